//! Slices of caps on a database server, and the charges of each gateway there.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

#[path = "common/place.rs"]
#[allow(unused_macros, reason = "these tests have one store")]
mod place;

use std::num::NonZeroU32;

use tollgate_cluster::{Answer, Order, Slice, Taken, Wanted};
use tollgate_domain::{UtcDay, WorkerName};
use tollgate_ledger::caps::{CapKey, Home, SliceCall, Slices};
use tollgate_ledger::gateways::{Freed, GatewayHomes, GatewayStart, HomeState, Membership};
use tollgate_ledger::{Ledger, LedgerOptions};
use tollgate_sql::testing::TestServer;

use crate::place::OnServer;

const TODAY: UtcDay = UtcDay(20_777);
const GATEWAYS: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

impl OnServer {
    fn slices(&self, home: Home) -> Slices {
        let address = self.server.address(&self.database);
        Slices::open(&address, home, TODAY).expect("opens")
    }
}

fn start(home: &str, life: u64) -> GatewayStart<'_> {
    GatewayStart { home, life, workers: None }
}

fn cap(name: &str) -> CapKey {
    let (limit, kind) = ("device_time_per_day".to_owned(), "tenant".to_owned());
    CapKey { limit, kind, scope: name.to_owned(), class: "cpu".to_owned() }
}

/// One gateway with one slice.
struct Member {
    slices: Slices,
    slice: Slice,
    newest: Order,
    used: u64,
    value: u64,
    data: tempfile::TempDir,
}

impl Member {
    fn new(place: &OnServer, value: u64) -> Self {
        let data = tempfile::tempdir().expect("a folder");
        Self::start(place, data, value)
    }

    fn start(place: &OnServer, data: tempfile::TempDir, value: u64) -> Self {
        let slices = place.slices(Home::begin_life(data.path()).expect("a home"));
        let newest = Order { life: slices.home().life, call: 0 };
        Self { slices, slice: Slice::default(), newest, used: 0, value, data }
    }

    fn call(&mut self, first_day: UtcDay, wanted: Wanted) -> SliceCall {
        self.newest.call += 1;
        let ask = self.slice.ask(self.newest, Taken { used: self.used, held: 0 }, wanted);
        let (cap, value) = (cap("acme"), self.value);
        SliceCall { cap, value, first_day, previous: UtcDay(first_day.0 - 1), ask }
    }

    fn ask(&mut self, first_day: UtcDay, wanted: Wanted) -> Option<Answer> {
        let call = self.call(first_day, wanted);
        let used = call.ask.used;
        let answers = self.slices.ask(&[call], GATEWAYS).expect("answers");
        let answer = answers.into_iter().next().expect("one answer")?;
        self.slice.answered(&answer, used, true);
        Some(answer)
    }

    fn need(&mut self, need: u64) -> u64 {
        let wanted = Wanted { keep: u64::MAX, need, expected: 0 };
        self.ask(TODAY, wanted).map_or(0, |answer| answer.granted)
    }

    fn give_back(&mut self) -> u64 {
        self.ask(TODAY, Wanted::default()).map_or(0, |answer| answer.granted)
    }
}

#[test]
fn slices_never_exceed_cap_under_concurrency() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    // The gateways ask at once, in a different order of the caps, and spend what they get.
    let sum: u64 = std::thread::scope(|scope| {
        let asking = [(); 4].map(|()| {
            scope.spawn(|| {
                let mut member = Member::new(&place, 1_000);
                for turn in 0..40 {
                    let had = member.slice.spare(Taken { used: member.used, held: 0 });
                    member.need(7 + turn % 20);
                    let has = member.slice.spare(Taken { used: member.used, held: 0 });
                    member.used += has.max(had);
                }
                member.used
            })
        });
        asking.map(|asking| asking.join().expect("no panic")).iter().sum()
    });
    assert_eq!(sum, 1_000, "the whole cap is spent, and not more");
}

#[test]
fn transactions_with_many_caps_do_not_deadlock() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    std::thread::scope(|scope| {
        for is_reversed in [false, true, true] {
            let place = &place;
            scope.spawn(move || {
                let Member { mut slices, data: _data, .. } = Member::new(place, 0);
                for turn in 1..=20_u64 {
                    let mut calls: Vec<SliceCall> = (0..20_u64)
                        .map(|number| {
                            let order = Order { life: 1, call: turn * 100 + number };
                            let wanted = Wanted { keep: u64::MAX, need: 3, expected: 0 };
                            let ask = Slice::default().ask(order, Taken::default(), wanted);
                            let (first_day, previous) = (TODAY, UtcDay(TODAY.0 - 1));
                            let cap = cap(&format!("t{number:02}"));
                            SliceCall { cap, value: 1_000, first_day, previous, ask }
                        })
                        .collect();
                    if is_reversed {
                        calls.reverse();
                    }
                    let answers = slices.ask(&calls, GATEWAYS).expect("no deadlock");
                    assert!(answers.iter().all(Option::is_some));
                }
            });
        }
    });
}

#[test]
fn slice_of_earlier_life_is_found_and_kept() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut first = Member::new(&place, 1_000);
    assert_eq!(first.need(600), 600);
    let late = first.call(TODAY, Wanted::default());
    let data = std::mem::replace(&mut first.data, tempfile::tempdir().expect("a folder"));
    let mut second = Member::start(&place, data, 1_000);
    assert_eq!(second.slices.unspent(TODAY).expect("reads"), [cap("acme")]);
    assert_eq!(second.need(0), 600, "it does not know yet what the earlier life has spent");
    // A call of the earlier life that comes late changes nothing.
    assert_eq!(first.slices.ask(&[late], GATEWAYS).expect("answers"), [None]);
    let mut other = Member::new(&place, 1_000);
    assert_eq!(other.need(500), 400, "the rest");
    assert_eq!(other.slices.hungry().expect("reads"), [cap("acme")]);
    assert_eq!(second.give_back(), 0);
    assert_eq!(other.need(100), 500);
    assert_eq!(second.slices.unspent(TODAY).expect("reads"), []);
}

#[test]
fn slices_count_work_over_change_of_day() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let tomorrow = UtcDay(TODAY.0 + 1);
    let mut late = Member::new(&place, 1_000);
    assert_eq!(late.need(700), 700);
    let mut early = Member::new(&place, 1_000);
    let wanted = Wanted { keep: u64::MAX, need: 900, expected: 0 };
    let answer = early.ask(tomorrow, wanted).expect("answers");
    assert_eq!(answer.granted, 300, "700 may end in the new day");
    assert_eq!(late.need(100), 700, "what it has may end in the new day, which is full");
    // The late gateway enters the day with nothing that runs.
    late.slice.roll();
    assert_eq!(late.ask(tomorrow, Wanted::default()).expect("answers").granted, 0);
    assert_eq!(early.ask(tomorrow, wanted).expect("answers").granted, 1_000);
}

/// A standby that took over may lack the newest grants.
#[test]
fn new_timeline_grants_nothing_until_all_have_told() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut first = Member::new(&place, 1_000);
    assert_eq!(first.need(600), 600);
    // As a standby that has lost the grant.
    place.sql("DELETE FROM slices; UPDATE cap_timeline SET timeline = timeline + 7");
    let mut second = Member::new(&place, 1_000);
    assert_eq!(second.need(900), 0);
    assert_eq!(first.need(0), 600, "what a gateway has counts again");
    assert_eq!(second.need(900), 0, "the pause is not over");
    place.sql("UPDATE cap_timeline SET paused_until = clock_timestamp()");
    assert_eq!(second.need(900), 400);
}

#[test]
fn slices_are_read_again_over_new_connection() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut member = Member::new(&place, 1_000);
    assert_eq!(member.need(10), 10);
    place.server.cut_connections(&place.database);
    let call = member.call(TODAY, Wanted { keep: u64::MAX, need: 10, expected: 0 });
    if let Err(error) = member.slices.ask(&[call], GATEWAYS) {
        assert!(error.to_string().ends_with("slices of caps cannot be read or written"));
    }
    member.need(0);
    assert!(member.need(0) >= 10);
}

/// A gateway whose clock is ahead enters the next day early. Others still get what both days
/// have.
#[test]
fn clock_ahead_does_not_close_the_day() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut ahead = Member::new(&place, 1_000);
    let wanted = Wanted { keep: u64::MAX, need: 100, expected: 0 };
    let answer = ahead.ask(UtcDay(TODAY.0 + 1), wanted).expect("answers");
    assert_eq!(answer.granted, 100);
    let mut other = Member::new(&place, 1_000);
    assert_eq!(other.need(800), 800);
    assert_eq!(other.need(300), 900, "the rest of the next day");
    other.used = 900;
    assert_eq!(other.need(100), 1_000, "what is spent cannot end in the next day");
}

/// A data folder that was restored from an older copy has an older number of its starts.
#[test]
fn restored_data_folder_begins_later_life() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut first = Member::new(&place, 1_000);
    first.need(10);
    let file = first.data.path().join("gateway.id");
    let older = std::fs::read(&file).expect("reads");
    let data = std::mem::replace(&mut first.data, tempfile::tempdir().expect("a folder"));
    let mut second = Member::start(&place, data, 1_000);
    second.need(10);
    assert_eq!(second.newest.life, 2);
    std::fs::write(&file, older).expect("writes");
    let data = std::mem::replace(&mut second.data, tempfile::tempdir().expect("a folder"));
    let mut third = Member::start(&place, data, 1_000);
    assert_eq!(third.newest.life, 3);
    assert_eq!(third.need(0), 20);
    let call = second.call(TODAY, Wanted::default());
    assert_eq!(second.slices.ask(&[call], GATEWAYS).expect("answers"), [None]);
}

/// An admin frees the slices of a gateway that is gone, and not those of one that may run.
#[test]
fn slices_of_lost_gateway_are_freed() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let address = place.server.address(&place.database);
    let (mut lost, mut other) = (Member::new(&place, 1_000), Member::new(&place, 1_000));
    let home = lost.slices.home().id.clone();
    let mut homes = GatewayHomes::on(&address);
    let mut membership = Membership::join(&address, "lost", Some(&start(&home, 1))).expect("joins");
    membership.beat(0).expect("beats");
    assert!(lost.need(600) >= 600);
    lost.used = 100;
    lost.ask(TODAY, Wanted { keep: u64::MAX, need: 0, expected: 0 }).expect("told");
    let of = |homes: &mut GatewayHomes, id: &str| {
        let listed = homes.list().expect("reads");
        listed.into_iter().find(|row| row.home == id).expect("listed")
    };
    let row = of(&mut homes, &home);
    assert_eq!((row.name.as_deref(), row.state, row.caps), (Some("lost"), HomeState::Running, 1));
    assert_eq!(homes.free(&home).expect("answers"), Freed::MayRun);
    assert_eq!(homes.free("unknown").expect("answers"), Freed::Unknown);
    // Its machine is lost: 100 s of silence, by the server's clock.
    place.sql("UPDATE homes SET seen_at = seen_at - interval '99 s' WHERE name = 'lost'");
    assert_eq!(of(&mut homes, &home).state, HomeState::Silent);
    assert_eq!(homes.free(&home).expect("answers"), Freed::MayRun);
    place.sql("UPDATE homes SET seen_at = seen_at - interval '2 s' WHERE name = 'lost'");
    assert!(other.need(900) < 900, "the lost gateway has the rest");
    assert_eq!(homes.free(&home).expect("answers"), Freed::Caps(1));
    assert_eq!(of(&mut homes, &home).caps, 0);
    assert!(other.need(900) >= 900, "only what was spent is gone");
    // It was cut off, and not lost: it gets nothing on its old slice.
    assert!(lost.ask(TODAY, Wanted { keep: u64::MAX, need: 1, expected: 0 }).is_none());
    // A start counts a later life.
    let Member { data, .. } = lost;
    let mut lost = Member::start(&place, data, 1_000);
    lost.used = 100;
    assert_eq!(lost.need(500), 100, "what it has spent, and no more");
    membership.leave().expect("leaves");
    assert_eq!(of(&mut homes, &home).state, HomeState::Stopped);
}

/// Another gateway retires one that is lost, and ends its slices in its place.
#[test]
fn lost_gateway_is_retired_in_its_place() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let address = place.server.address(&place.database);
    let (mut lost, other) = (Member::new(&place, 1_000), Member::new(&place, 1_000));
    let ids = [&lost, &other].map(|member| member.slices.home().id.clone());
    let workers = ["gpu0", "gpu1"].map(|name| WorkerName::new(name).expect("a name"));
    let join = |name, id| {
        let start = GatewayStart { workers: Some(&workers), ..start(id, 1) };
        Membership::join(&address, name, Some(&start)).expect("joins")
    };
    let (mut first, mut second) = (join("lost", &ids[0]), join("other", &ids[1]));
    for membership in [&mut first, &mut second] {
        assert!(!membership.beat(0).expect("beats").is_retired);
    }
    assert!(lost.need(600) >= 600);
    let [found] = &second.others().expect("reads")[..] else { panic!("one other") };
    assert_eq!((&found.home, found.number, found.life), (&ids[0], first.number(), 1));
    assert_eq!(
        (found.is_retired, &found.workers[..]),
        (false, &["gpu0".to_owned(), "gpu1".to_owned()][..])
    );
    let mut homes = GatewayHomes::on(&address);
    // It beats between the look and the retirement.
    first.beat(0).expect("beats");
    assert!(!homes.retire(found).expect("answers"));
    let [found] = &second.others().expect("reads")[..] else { panic!("one other") };
    assert!(homes.retire(found).expect("answers"));
    assert!(first.beat(0).expect("beats").is_retired, "it hears of it");
    let [found] = &second.others().expect("reads")[..] else { panic!("one other") };
    assert!(found.is_retired);
    // Two gateways may be at it, or one after the other; each has a life of its own.
    let mut early = Slices::take_over(&address, found).expect("answers").expect("it is lost");
    let mut slices = Slices::take_over(&address, found).expect("answers").expect("it is lost");
    assert!(early.home().life < slices.home().life);
    assert_eq!(slices.all_unspent().expect("reads"), [cap("acme")]);
    let end = |slices: &mut Slices, used| {
        let (life, mut slice) = (slices.home().life, Slice::default());
        for number in 1..=2 {
            let order = Order { life, call: number };
            let ask = slice.ask(order, Taken { used, held: 0 }, Wanted::default());
            let (first_day, previous) = (TODAY, UtcDay(TODAY.0 - 1));
            let call = SliceCall { cap: cap("acme"), value: 0, first_day, previous, ask };
            let answers = slices.ask(&[call], GATEWAYS).expect("answers");
            let answer = answers[0]?;
            slice.answered(&answer, used, true);
        }
        Some(slice.granted())
    };
    assert_eq!(end(&mut slices, 250), Some(250));
    assert_eq!(end(&mut early, 200), None, "an older life changes nothing");
    assert_eq!(slices.all_unspent().expect("reads"), []);
    assert!(lost.ask(TODAY, Wanted { keep: u64::MAX, need: 1, expected: 0 }).is_none());
    homes.stop_retired(found).expect("answers");
    assert_eq!(second.others().expect("reads"), []);
    assert!(Slices::take_over(&address, found).expect("answers").is_none(), "it is done");
    // It starts again, in a life after all of these.
    let newest = slices.home().life;
    let Member { data, .. } = lost;
    let mut lost = Member::start(&place, data, 1_000);
    assert!(lost.slices.home().life > newest);
    lost.used = 250;
    assert_eq!(lost.need(0), 250);
    assert!(Slices::take_over(&address, found).expect("answers").is_none(), "it has begun");
    // The control: nobody can settle for a gateway with workers of its own.
    let own = Membership::join(&address, "own", Some(&start("another", 1)));
    own.expect("joins").beat(0).expect("beats");
    assert_eq!(second.others().expect("reads"), []);
}

/// A start leaves the open attempts of gateways that run to these, and voids those of its own
/// earlier starts.
#[test]
fn gateways_that_run_are_known_by_number() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let address = place.server.address(&place.database);
    drop(Ledger::open_with(LedgerOptions::at(place.place())).expect("opens"));
    let reader = Ledger::open_read_only(place.place()).expect("reads");
    let live = || reader.live_gateways().expect("reads");
    assert!(live().is_empty(), "no gateway has slices yet");
    let data = tempfile::tempdir().expect("a folder");
    let start = || {
        let slices = place.slices(Home::begin_life(data.path()).expect("a home"));
        let home = slices.home().id.clone();
        let mut membership =
            Membership::join(&address, "a", Some(&start(&home, 1))).expect("joins");
        membership.beat(0).expect("beats");
        membership
    };
    let first = start();
    assert_eq!(live(), [first.number()]);
    // Killed, and started again at once.
    let second = start();
    assert_eq!(live(), [second.number()]);
    second.leave().expect("leaves");
    assert!(live().is_empty());
}
