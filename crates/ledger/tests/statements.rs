//! A statement equals a naive recount of the posted blocks, in any order of blocks,
//! and its lines sum to its total.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use std::collections::BTreeMap;

use common::*;
use proptest::prelude::*;
use tollgate_domain::{
    Amount, Block, BlockParts, ByClass, Caller, DeviceClass, DeviceNanos, KeyId, Millijoules,
    ModelName, PlanName, PriceBook, PriceList, PriceListName, TenantId, Tier, Usage, UtcMonth,
    UtcTime, WorkerEpoch,
};
use tollgate_ledger::{
    Ledger, LedgerHandle, PlansInForce, Posted, PricedAs, Record, Statement, StatementError,
    StatementQuery,
};

/// The factor of the batch tier, in a form that leaves something to round.
const BATCH: &str = "0.333333333";
const DAY_NS: u64 = 86_400_000_000_000;

/// Returns noon on a day of November 2026; days 0 and 31 are in the months beside it.
fn noon(day: u8) -> UtcTime {
    UtcTime(NOON.0 - 20 * DAY_NS + u64::from(day) * DAY_NS)
}

fn november() -> UtcMonth {
    "2026-11".parse().expect("a month")
}

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

fn list(name: &str, from: &str, second: &str, prompt: &str, completion: &str) -> PriceList {
    PriceList {
        name: PriceListName::new(name).expect("a name"),
        plan: None,
        model: None,
        from: from.parse().expect("a day"),
        device_second: ByClass::all(second.parse().expect("a price")),
        million_prompt_tokens: prompt.parse().expect("a price"),
        million_completion_tokens: completion.parse().expect("a price"),
        batch: BATCH.parse().expect("a factor"),
    }
}

/// Returns prices that rise in mid-month, to values with long fractions.
fn book() -> PriceBook {
    PriceBook {
        currency: "EUR".parse().expect("one"),
        lists: vec![
            list("late", "2026-11-16", "0.0033333", "0.7", "1.3"),
            list("early", "2026-01-01", "0.0025", "0.15", "0.6"),
        ],
    }
}

fn statement_of(
    ledger: &LedgerHandle,
    tenant: &TenantId,
    prices: &PriceBook,
    records: &mut Vec<(String, Record)>,
) -> Result<Statement, StatementError> {
    let plan = plan("team");
    let query = query(tenant, prices, PricedAs::Plan(&plan));
    let counted = ledger.reader().statement_records(query, &mut |line, record| {
        records.push((line.to_owned(), record.clone()));
    })?;
    // The statement from the sums by day is the same.
    assert_eq!(ledger.reader().statement(query)?, counted);
    Ok(counted)
}

fn plan(name: &str) -> PlanName {
    PlanName::new(name).expect("a name")
}

fn query<'a>(
    tenant: &'a TenantId,
    prices: &'a PriceBook,
    priced_as: PricedAs<'a>,
) -> StatementQuery<'a> {
    StatementQuery { tenant, month: november(), priced_as, prices, now: noon(31) }
}

/// One block of one share, possibly with its end.
#[derive(Clone, Debug)]
struct Worked {
    epoch: u8,
    day: u8,
    tenant: u8,
    key: u8,
    gpu: bool,
    tier: Tier,
    attributed: u32,
    reference: u32,
    ends: bool,
    /// The payable part of an attempt that failed by our fault.
    cap: Option<u32>,
}

fn any_work() -> impl Strategy<Value = Worked> {
    let tier = prop_oneof![Just(Tier::Interactive), Just(Tier::Batch)];
    let who = (0_u8..3, 0_u8..2, 0_u8..2, any::<bool>(), tier);
    (who, 0_u8..32, any::<u32>(), any::<u32>(), any::<bool>(), proptest::option::of(any::<u32>()))
        .prop_map(|((epoch, tenant, key, gpu, tier), day, attributed, reference, ends, cap)| {
            Worked {
                // An epoch has one device.
                epoch: epoch * 2 + u8::from(gpu),
                day,
                tenant,
                key,
                gpu,
                tier,
                attributed,
                reference,
                ends,
                cap,
            }
        })
}

impl Worked {
    fn caller(&self) -> Caller {
        Caller {
            tenant: tenant(if self.tenant == 0 { "acme" } else { "other" }),
            key: KeyId::new(if self.key == 0 { "k1" } else { "k2" }).expect("a name"),
        }
    }

    fn class(&self) -> DeviceClass {
        DeviceClass::new(if self.gpu { "h200" } else { "cpu" }).expect("a name")
    }

    fn usage(&self) -> Usage {
        usage(self.attributed.into(), self.reference.into())
    }

    fn block(&self, request: u128, number: u64) -> Block {
        let mut share = share("acme", request, self.attributed.into());
        share.caller = self.caller();
        share.tier = self.tier;
        let mut end = finished("acme", request, self.usage());
        end.caller = self.caller();
        end.tier = self.tier;
        end.finished = noon(self.day);
        let mut parts: BlockParts =
            parts(number, vec![share], if self.ends { vec![end] } else { vec![] });
        parts.epoch = WorkerEpoch(100 + u128::from(self.epoch));
        parts.device.class = self.class();
        parts.started = noon(self.day);
        parts.energy = self.gpu.then_some(Millijoules(u64::from(self.reference % 1_000_000)));
        Block::try_from(parts).expect("it balances")
    }
}

/// Posts the work; `order` chooses the epoch of each next block.
fn post_all(ledger: &LedgerHandle, work: &[Worked], reversed: bool) {
    let mut epochs: Vec<u8> = (0..6).collect();
    if reversed {
        epochs.reverse();
    }
    for epoch in epochs {
        let mut number = 0;
        for (request, worked) in work.iter().enumerate().filter(|(_, w)| w.epoch == epoch) {
            number += 1;
            let request = request as u128 + 1;
            post(ledger, worked.block(request, number)).expect("posts");
            if let Some(payable) = worked.cap {
                let mut cap = cap("acme", request, usage(payable.into(), payable.into()));
                cap.caller = worked.caller();
                cap.class = worked.class();
                cap.tier = worked.tier;
                cap.at = noon(worked.day);
                post_cap(ledger, cap).expect("posts");
            }
        }
    }
}

/// Returns requests, tokens in, tokens out, attributed and reference, recounted from
/// the work; and the amount in nano-units, computed step by step.
type Recount = BTreeMap<(String, String, Tier, bool), (u64, u64, u64, u64, u64, u128)>;

fn recount(work: &[Worked]) -> Recount {
    let mut lines = Recount::new();
    for worked in work.iter().filter(|w| w.tenant == 0 && (1..=30).contains(&w.day)) {
        let (key, class) = (worked.caller().key.to_string(), worked.class().to_string());
        let line = lines.entry((key, class, worked.tier, worked.day >= 16)).or_default();
        let cap = worked.cap.unwrap_or(u32::MAX);
        line.3 += u64::from(worked.attributed.min(cap));
        // A failed attempt is charged by its cap, with or without a report.
        if worked.ends || worked.cap.is_some() {
            let reference = if worked.ends { worked.reference.min(cap) } else { cap };
            line.0 += 1;
            line.1 += 10;
            line.2 += 5;
            line.4 += u64::from(reference);
        }
    }
    for ((_, _, tier, is_late), line) in &mut lines {
        // Nano-units for a second, for a million tokens in, for a million out.
        let (second, prompt, completion) = if *is_late {
            (3_333_300_u128, 700_000_000, 1_300_000_000)
        } else {
            (2_500_000, 150_000_000, 600_000_000)
        };
        let exact = u128::from(line.4) * second * 1_000_000
            + u128::from(line.1) * prompt * 1_000_000_000
            + u128::from(line.2) * completion * 1_000_000_000;
        // The factor comes before the only rounding.
        line.5 = match tier {
            Tier::Interactive => exact / 1_000_000_000_000_000,
            Tier::Batch => exact * 333_333_333 / 1_000_000_000_000_000_000_000_000,
        };
    }
    lines
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn statement_equals_recount(work in proptest::collection::vec(any_work(), 0..24)) {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
        post_all(&ledger, &work, false);
        let mut records = Vec::new();
        let made = statement_of(&ledger, &tenant("acme"), &book(), &mut records).expect("made");

        let found: Recount = made.lines.iter().map(|line| {
            let is_late = line.list.as_str() == "late";
            let key = (line.key.to_string(), line.class.to_string(), line.tier, is_late);
            let f = line.figures;
            let figures = (f.requests, f.prompt_tokens, f.completion_tokens, f.attributed_ns,
                f.reference_ns, f.amount.0);
            (key, figures)
        }).collect();
        prop_assert_eq!(&found, &recount(&work));
        prop_assert_eq!(found.len(), made.lines.len(), "no two lines are about the same");
        let sum: Amount = made.lines.iter().map(|line| line.figures.amount).sum();
        prop_assert_eq!(made.total.amount, sum);

        // Every record is in one line, and each line counts its records.
        for line in &made.lines {
            let mine: Vec<&Record> =
                records.iter().filter(|(id, _)| *id == line.id).map(|(_, record)| record).collect();
            prop_assert_eq!(mine.len() as u64, line.charges + line.entries);
            let mut figures = (0_i64, 0_u64);
            let mut drew = None;
            for record in mine {
                match record {
                    Record::Charge { reference_ns, .. } => figures.1 += reference_ns,
                    Record::Entry { amount_ns, energy_mj, .. } => {
                        figures.0 += amount_ns;
                        drew = drew.map_or(*energy_mj, |sum: i64| energy_mj.map(|it| sum + it));
                    }
                }
            }
            let line_figures = (line.figures.attributed_ns as i64, line.figures.reference_ns);
            prop_assert_eq!(figures, line_figures);
            prop_assert_eq!(drew, line.figures.energy_mj.map(|energy| energy as i64));
            prop_assert!(line.entries == 0 || drew.is_some() == line.class.is_gpu(), "{line:?}");
            let text: String = line.days.iter().map(|day| format!("{day}\n")).collect();
            prop_assert_eq!(&line.digest, &sha256(&text));
        }

        // The order of posting makes no difference.
        let folder = tempfile::tempdir().expect("a folder");
        let other = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
        post_all(&other, &work, true);
        let again = statement_of(&other, &tenant("acme"), &book(), &mut vec![]).expect("made");
        prop_assert_eq!(made, again);
    }
}

fn sha256(text: &str) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn one(day: u8) -> Worked {
    let (attributed, reference) = (1_000_000, 2_000_000_000);
    Worked {
        epoch: 0,
        day,
        tenant: 0,
        key: 0,
        gpu: false,
        tier: Tier::Interactive,
        attributed,
        reference,
        ends: true,
        cap: None,
    }
}

#[test]
fn price_change_splits_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    post_all(&ledger, &[one(1), one(15), one(16), one(30), one(31)], false);
    let made = statement_of(&ledger, &tenant("acme"), &book(), &mut vec![]).expect("made");
    let lines: Vec<String> = made
        .lines
        .iter()
        .map(|line| {
            let f = line.figures;
            format!("{} {} {} {} {}", line.from, line.to, line.list, f.requests, f.amount)
        })
        .collect();
    // 2 x (2 s x 0.0025 + 10 x 0.15e-6 + 5 x 0.6e-6), and at the later prices.
    assert_eq!(
        lines,
        ["2026-11-01 2026-11-15 early 2 0.010009000", "2026-11-16 2026-11-30 late 2 0.013360200"]
    );
    assert_eq!(made.total.amount.to_string(), "0.023369200");
    assert!(made.is_provisional, "the month has ended this noon");
}

/// An import recognises a line again: a changed figure changes the digests, not the
/// ids.
#[test]
fn statement_ids_stay_and_digests_change() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    let acme = tenant("acme");
    post(&ledger, one(3).block(1, 1)).expect("posts");
    let first = statement_of(&ledger, &acme, &book(), &mut vec![]).expect("made");
    let same = statement_of(&ledger, &acme, &book(), &mut vec![]).expect("made");
    assert_eq!(first, same);
    post(&ledger, one(3).block(2, 2)).expect("posts");
    let more = statement_of(&ledger, &acme, &book(), &mut vec![]).expect("made");
    assert_eq!((&first.id, &first.lines[0].id), (&more.id, &more.lines[0].id));
    assert_ne!(first.lines[0].digest, more.lines[0].digest);
    assert_ne!(first.digest, more.digest);
    // printf "line\nacme\n2026-11\nk1\nm\ncpu\n2026-11-01\n" | sha256sum
    assert_eq!(first.lines[0].id, "line-0090ba941e8b7926aaad1ccdb3abe300");
}

#[test]
fn statement_refuses_usage_without_price() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    post_all(&ledger, &[one(3)], false);
    let acme = tenant("acme");
    let mut late = book();
    late.lists.truncate(1);
    let error = statement_of(&ledger, &acme, &late, &mut vec![]).expect_err("too early");
    assert_eq!(
        error.to_string(),
        "2026-11-03 has usage of model \"m\" and no price list for plan \"team\"; lists begin later"
    );
    let mut gpus = book();
    for list in &mut gpus.lists {
        let price = list.device_second.default.take().expect("a price");
        list.device_second.classes.insert(DeviceClass::new("h200").expect("a name"), price);
    }
    let error = statement_of(&ledger, &acme, &gpus, &mut vec![]).expect_err("no price");
    assert_eq!(
        error.to_string(),
        "price list \"early\" has no price for device class \"cpu\", and no default"
    );
    // An attempt that nobody pays for needs no price. It still has a line, because a recount
    // finds its record.
    let beta = tenant("beta");
    let unpaid = cap("beta", 7, Usage::default());
    post_cap(&ledger, tollgate_ledger::FaultCap { at: noon(3), ..unpaid }).expect("posts");
    let made = statement_of(&ledger, &beta, &gpus, &mut vec![]).expect("made");
    assert_eq!((made.lines.len(), made.lines[0].charges, made.total.amount), (1, 1, Amount(0)));
    let nobody = statement_of(&ledger, &tenant("nobody"), &book(), &mut vec![]).expect("made");
    assert_eq!((nobody.lines.len(), nobody.total.amount), (0, Amount(0)));
}

/// Two models at their own prices: each line has the list of its model, also where the
/// lists of the models begin on different days.
#[test]
fn statement_prices_models_by_their_list() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    let work: [(&str, &[u8]); 2] = [("m", &[3, 12]), ("large", &[3, 12, 20])];
    for (epoch, (model, days)) in (0_u8..).zip(work) {
        for (number, day) in (1_u8..).zip(days) {
            let request = u128::from(epoch * 10 + number);
            let worked = Worked { epoch, ..one(*day) };
            let mut parts = worked.block(request, number.into()).into_parts();
            parts.model = ModelName::new(model).expect("a name");
            post(&ledger, Block::try_from(parts).expect("it balances")).expect("posts");
        }
    }
    let mut prices = book();
    let mut large = list("large", "2026-11-10", "0.5", "0", "0");
    large.model = Some(ModelName::new("large").expect("a name"));
    prices.lists.push(large);
    let mut records = Vec::new();
    let made = statement_of(&ledger, &tenant("acme"), &prices, &mut records).expect("made");
    let lines: Vec<String> = made
        .lines
        .iter()
        .map(|line| {
            let (f, days) = (line.figures, (line.from.0 - 20_757, line.to.0 - 20_757));
            format!(
                "{} {} {} {} {} {}",
                line.model, days.0, days.1, line.list, f.requests, f.amount
            )
        })
        .collect();
    // A request at "early" costs 2 s x 0.0025 + 10 x 0.15e-6 + 5 x 0.6e-6.
    assert_eq!(
        lines,
        [
            "large 1 9 early 1 0.005004500",
            "large 10 30 large 2 2.000000000",
            "m 1 15 early 2 0.010009000"
        ]
    );
    assert_eq!(made.total.amount.to_string(), "2.015013500");
    assert_eq!(records.len(), 10, "each record is in one line");
}

/// The rows must agree with the sums by day.
#[test]
fn statement_finds_records_unlike_their_sums() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open(&path).expect("opens");
    post_all(&ledger, &[one(3)], false);
    let connection = rusqlite::Connection::open(&path).expect("opens");
    connection.execute("UPDATE daily SET reference_ns = reference_ns - 1", []).expect("writes");
    let error = statement_of(&ledger, &tenant("acme"), &book(), &mut vec![]).expect_err("damaged");
    assert!(error.to_string().contains("sums by day"), "{error}");
}

/// A plan that changed in mid-month: each day has the prices of its plan, and the
/// change is recorded once, however often it is submitted.
#[test]
fn statement_prices_days_by_their_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    let (acme, mut prices) = (tenant("acme"), book());
    let mut dear = list("dear", "2026-01-01", "1", "0", "0");
    dear.plan = Some(plan("gold"));
    prices.lists.push(dear);
    post_all(&ledger, &[one(1), one(9), one(10), one(20), one(30)], false);

    let unknown = query(&acme, &prices, PricedAs::Told(None));
    let error = ledger.reader().statement(unknown).expect_err("nobody said");
    assert_eq!(error.to_string(), "no plan of tenant \"acme\" is known");
    let (team, gold) = (plan("team"), plan("gold"));
    let config = PricedAs::Told(Some(&gold));
    let spans = |made: &Statement| -> Vec<String> {
        made.plans.iter().map(|it| format!("{} {} {}", it.from, it.to, it.plan)).collect()
    };
    let made = ledger.reader().statement(query(&acme, &prices, config)).expect("made");
    assert_eq!(spans(&made), ["2026-11-01 2026-11-30 gold"], "what the config says now");

    let tell = |day: u8, plan: &PlanName| {
        let mut action = action(&format!("start-{day}-{plan}"), "plans.in_force");
        action.at = noon(day);
        let plans = vec![(tenant("acme"), plan.clone()), (tenant("other"), team.clone())];
        post_plans(&ledger, PlansInForce { action, plans }).expect("posts")
    };
    let told =
        [(5, &team), (6, &team), (10, &gold), (12, &gold), (11, &gold), (20, &team), (20, &gold)];
    let heard: Vec<Posted> = told.iter().map(|(day, plan)| tell(*day, plan)).collect();
    use Posted::{Already, New};
    assert_eq!(heard, [New, Already, New, Already, Already, New, New]);
    let made = ledger.reader().statement(query(&acme, &prices, config)).expect("made");
    assert_eq!(
        spans(&made),
        // The first known plan also holds for the days before; of one day, the last plan.
        ["2026-11-01 2026-11-09 team", "2026-11-10 2026-11-19 gold", "2026-11-20 2026-11-30 gold"]
    );
    let lines: Vec<String> = made
        .lines
        .iter()
        .map(|line| format!("{} {} {} {}", line.from, line.to, line.list, line.figures.requests))
        .collect();
    assert_eq!(lines, ["2026-11-01 2026-11-09 early 2", "2026-11-10 2026-11-30 dear 3"]);
    let mut counted = 0;
    let again = ledger
        .reader()
        .statement_records(query(&acme, &prices, config), &mut |_, _| counted += 1)
        .expect("made");
    let again_total = again.total.amount;
    assert_eq!((again, counted), (made, 10));
    assert_eq!(ledger.reader().check(), vec![]);
    // Budgets price the same days by the same plans.
    let priced = ledger.reader().spending(noon(30).day()).expect("reads").priced;
    let plans: Vec<String> = priced
        .iter()
        .map(|row| format!("{} {}", row.day, row.plan.as_ref().expect("known")))
        .collect();
    assert_eq!(
        plans,
        [
            "2026-11-01 team",
            "2026-11-09 team",
            "2026-11-10 gold",
            "2026-11-20 gold",
            "2026-11-30 gold"
        ]
    );
    let cost = |row: &tollgate_ledger::PricedRow| {
        let plan = row.plan.as_ref().expect("known");
        let list = prices.in_force(plan, Some(&row.model), row.day).expect("a list");
        list.on(&row.class, row.tier).expect("a price").exact_cost(row.used)
    };
    let sum = priced.iter().map(cost).fold(tollgate_domain::ExactAmount::ZERO, |a, b| a.plus(b));
    assert_eq!(sum.floor(), again_total);
}

/// A line holds its unit prices, so that it can be checked by hand.
#[test]
fn statement_line_shows_its_prices() {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    post_all(&ledger, &[one(20)], false);
    let made = statement_of(&ledger, &tenant("acme"), &book(), &mut vec![]).expect("made");
    let line = &made.lines[0];
    assert_eq!(line.prices.device_second.to_string(), "0.0033333");
    assert_eq!(line.model, ModelName::new("m").expect("a name"));
    assert_eq!(line.figures.attributed_ns, DeviceNanos(1_000_000).nanos());
}
