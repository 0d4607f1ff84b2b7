//! One random play.

use std::collections::{BTreeMap, VecDeque};

use tollgate_cluster::parts::PartMode;
use tollgate_cluster::parts::model::{NoAnswer, Store};
use tollgate_domain::{PlanLimits, Rate};

use crate::gateway::{Call, Flight, Gateway, PATIENCE, Reply};

/// The number of events of each kind.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Omission {
    /// Parts do not end.
    Life,
    /// A gateway that was stopped goes on with what it had.
    Ended,
    /// An equal part may be used at once when parts have ended.
    Narrowed,
    /// The store grants before all gateways have claimed.
    Learning,
    /// A call that comes late counts.
    Order,
    /// A store that was replaced by an older copy goes on with what that knows.
    Run,
    /// A store that nobody reached goes on with what it knows.
    Silence,
    /// A gateway claims nothing.
    Claims,
}

impl Omission {
    pub(crate) const ALL: [Self; 8] = [
        Self::Life,
        Self::Ended,
        Self::Narrowed,
        Self::Learning,
        Self::Order,
        Self::Run,
        Self::Silence,
        Self::Claims,
    ];
}

pub(crate) const GATEWAYS: u32 = 3;
const STEPS: u32 = 3_000;
/// The steps in which all gateways contend for places, of 60 ms each.
const CONTENTION: u32 = 1_000;
/// The calls for which a request waits at most.
const WAITS: u32 = 3;

struct SplitMix(u64);

impl SplitMix {
    /// Returns a number below `bound` (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// A call that the store has not executed, or an answer that has not come.
#[derive(Clone, Debug)]
enum Message {
    Call(u32, u64, Call),
    Reply(u32, u64, Reply),
}

/// The limit that the gateways share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A rate of requests.
    Rate,
    /// Requests that run and wait.
    Places,
}

/// The bucket that all gateways together must be like: its level in 60,000ths of a request.
struct Reference {
    rate: Rate,
    level: u64,
    refilled: u64,
}

impl Reference {
    fn take(&mut self, now: u64) -> bool {
        let grown = (now - self.refilled) * self.rate.per_minute;
        self.level = (self.level + grown).min(self.rate.burst * 60_000);
        self.refilled = now;
        let has = self.level >= 60_000;
        self.level = self.level.saturating_sub(60_000);
        has
    }
}

pub(crate) struct Play {
    random: SplitMix,
    omitted: Option<Omission>,
    now: u64,
    /// The store's clock minus this one, from a time long ago.
    clock: u64,
    run: u64,
    /// The process of the store that each gateway is connected to.
    connected: BTreeMap<u32, u64>,
    kind: Kind,
    limits: PlanLimits,
    store: Store,
    history: VecDeque<Store>,
    frozen_until: u64,
    /// The gateway whose calls are all lost, and the time at which the store is frozen then.
    cut_off: Option<(u32, u64)>,
    gateways: Vec<Gateway>,
    next_number: u32,
    next_request: u64,
    messages: Vec<(u64, Message)>,
    reference: Reference,
    /// The gateway that gets most requests.
    favourite: usize,
    /// Requests in each step at most, and one of how many calls is late or lost.
    pace: u64,
    losses: u64,
    /// True once a gateway used an equal part while the store granted without it.
    is_cut_off: bool,
    /// True once all messages come at once.
    is_quiet: bool,
    /// True once requests run until the end.
    are_long: bool,
    pub(crate) counts: Counts,
}

impl Play {
    pub(crate) fn new(kind: Kind, seed: u64, omitted: Option<Omission>) -> Self {
        let mut random = SplitMix(seed);
        let rate = Rate {
            per_minute: [60, 600, 6_000][random.below(3) as usize],
            burst: [3, 30, 600][random.below(3) as usize],
        };
        let limits = match kind {
            Kind::Rate => PlanLimits { requests: Some(rate), ..PlanLimits::default() },
            Kind::Places => PlanLimits {
                concurrent: Some([1, 2, 5, 12, 40][random.below(5) as usize]),
                queued: Some([0, 3, 50][random.below(3) as usize]),
                ..PlanLimits::default()
            },
        };
        let pace = [3, 3, 9, 20][random.below(4) as usize];
        let losses = [15, 60, 200][random.below(3) as usize];
        let now = 1_000;
        let gateways = (1..=GATEWAYS).map(|number| Gateway::new(number, &limits, now, omitted));
        Self {
            random,
            omitted,
            now,
            clock: 1_800_000_000_000,
            run: 1,
            connected: BTreeMap::new(),
            store: Store::default(),
            history: VecDeque::new(),
            frozen_until: 0,
            cut_off: None,
            gateways: gateways.collect(),
            kind,
            limits,
            next_request: 0,
            next_number: GATEWAYS + 1,
            messages: Vec::new(),
            reference: Reference { rate, level: rate.burst * 60_000, refilled: now },
            favourite: 0,
            pace,
            losses,
            is_cut_off: false,
            is_quiet: false,
            are_long: false,
            counts: Counts::new(),
        }
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            if self.is_cut_off {
                // It may use an equal part beside what the others have.
                self.count("cut off alone");
                return Ok(());
            }
            self.now += 1 + self.random.below(20);
            self.fault();
            self.step()?;
            self.requests()?;
        }
        self.end()
    }

    fn count(&mut self, event: &'static str) {
        *self.counts.entry(event).or_default() += 1;
    }

    fn step(&mut self) -> Result<(), String> {
        self.deliver()?;
        for at in 0..self.gateways.len() {
            self.gateways[at].was_cut_off = self.is_cut_off(at);
        }
        for at in 0..self.gateways.len() {
            if self.gateways[at].stopped_until > self.now {
                continue;
            }
            if let Some(Flight { sent, .. }) = &self.gateways[at].flight
                && sent + PATIENCE <= self.now
            {
                let now = self.now;
                self.gateways[at].failed(now);
                self.retry(at)?;
            }
            let now = self.now;
            if let Some(call) = self.gateways[at].next_call(now) {
                if let Call::Ask(_, calls) = &call
                    && calls.iter().any(|call| call.ask.give > 0)
                {
                    self.count("given back");
                }
                let number = self.gateways[at].number;
                let id = self.gateways[at].flight.as_ref().map_or(0, |flight| flight.id);
                self.send(number, id, call);
            }
        }
        self.advance()
    }

    /// Ends requests, and starts those that waited for a place.
    fn advance(&mut self) -> Result<(), String> {
        let (now, share) = (self.now, self.share());
        for at in 0..self.gateways.len() {
            self.gateways[at].uncover(now, share);
            if self.gateways[at].stopped_until > now {
                continue;
            }
            let started = self.gateways[at].advance(now);
            if started > 0 {
                self.count("promoted");
                self.check_places(at)?;
            }
        }
        Ok(())
    }

    /// Returns the equal part of the places.
    fn share(&self) -> usize {
        let places = self.limits.concurrent.unwrap_or(0);
        (places / GATEWAYS).max(1) as usize
    }

    /// Checks that no more requests run than there are places, after one began at a gateway.
    fn check_places(&mut self, at: usize) -> Result<(), String> {
        let (now, share) = (self.now, self.share());
        self.gateways.iter_mut().for_each(|gateway| gateway.uncover(now, share));
        let mut is_cut_off = false;
        for other in 0..self.gateways.len() {
            is_cut_off |= self.gateways[other].covered() > 0 && self.is_cut_off(other);
        }
        self.is_cut_off |= is_cut_off;
        if self.is_cut_off {
            return Ok(());
        }
        let modes: Vec<_> = self.gateways.iter().map(|gateway| gateway.mode(now)).collect();
        let places = self.limits.concurrent.unwrap_or(0);
        // Each gateway has at least one place while the store does not answer.
        let are_divided = modes.contains(&PartMode::Divided);
        let most = if are_divided { places.max(GATEWAYS) } else { places } as usize;
        let covered: Vec<usize> = self.gateways.iter().map(Gateway::covered).collect();
        if covered.iter().sum::<usize>() > most {
            return Err(format!("{covered:?} of {places} at {now} by gateway {at}, {modes:?}"));
        }
        Ok(())
    }

    fn send(&mut self, number: u32, id: u64, call: Call) {
        if self.cut_off.is_some_and(|(cut_off, _)| cut_off == number) {
            return self.count("call lost");
        }
        let late = match self.random.below(self.losses) {
            _ if self.is_quiet => 0,
            0 => return self.count("call lost"),
            1 => {
                self.count("call late");
                self.random.below(4_000)
            }
            _ => self.random.below(5),
        };
        self.messages.push((self.now + late, Message::Call(number, id, call)));
    }

    fn deliver(&mut self) -> Result<(), String> {
        let (now, frozen) = (self.now, self.now < self.frozen_until);
        let (mut due, later) =
            std::mem::take(&mut self.messages).into_iter().partition::<Vec<_>, _>(
                |(at, message)| *at <= now && !(frozen && matches!(message, Message::Call(..))),
            );
        self.messages = later;
        due.sort_by_key(|(at, _)| *at);
        for (_, message) in due {
            match message {
                Message::Call(number, id, call) => {
                    let reply = self.execute(number, &call);
                    let late = match self.random.below(self.losses) {
                        _ if self.is_quiet => 0,
                        0 => {
                            self.count("answer late");
                            PATIENCE + self.random.below(100)
                        }
                        _ => self.random.below(5),
                    };
                    self.messages.push((now + late, Message::Reply(number, id, reply)));
                }
                Message::Reply(number, id, reply) => self.receive(number, id, &reply)?,
            }
        }
        Ok(())
    }

    fn execute(&mut self, number: u32, call: &Call) -> Reply {
        self.history.push_back(self.store.clone());
        if self.history.len() > 20 {
            self.history.pop_front();
        }
        let now = self.now + self.clock;
        if self.omitted == Some(Omission::Silence) {
            self.store.hide_silence(now);
        }
        match call {
            Call::Beat(beat) => {
                self.connected.insert(number, self.run);
                let born = self.store.born();
                let answer = self.store.beat(now, self.run, beat);
                // A store that was born just now grants nothing yet.
                if answer.must_claim && answer.born == born {
                    // The store may have given its parts to others by now.
                    let asked = self.gateways.iter_mut().filter(|it| it.number == number);
                    asked.for_each(|gateway| gateway.was_cut_off = true);
                }
                Reply::Beat(answer)
            }
            // A new connection begins with a beat.
            Call::Ask(..) if self.connected.get(&number) != Some(&self.run) => Reply::Parts(None),
            Call::Ask(born, calls) => {
                let mut answers = Vec::new();
                for call in calls {
                    let mut ask = call.ask;
                    match self.omitted {
                        Some(Omission::Order) => ask.call += self.now * 1_000_000,
                        Some(Omission::Claims) if ask.need_parts == 0 => ask.claim = 0,
                        _ => {}
                    }
                    match self.store.ask(now, (number, *born), &call.shared.to_string(), &ask) {
                        Ok(answer) => answers.push(Some(answer)),
                        Err(NoAnswer::Stale) => answers.push(None),
                        Err(NoAnswer::Unknown) => return Reply::Parts(None),
                    }
                }
                Reply::Parts(Some(answers))
            }
        }
    }

    fn receive(&mut self, number: u32, id: u64, reply: &Reply) -> Result<(), String> {
        let Some(at) = self.gateways.iter().position(|it| it.number == number) else {
            return Ok(());
        };
        let gateway = &mut self.gateways[at];
        // The answer waits in the socket while the gateway is stopped.
        if gateway.stopped_until > self.now {
            let until = gateway.stopped_until;
            self.messages.push((until, Message::Reply(number, id, reply.clone())));
            return Ok(());
        }
        // A connection on which a call has failed is closed.
        let is_of_call = |flight: &Flight| flight.id == id && flight.sent + PATIENCE > self.now;
        let is_of_call = gateway.flight.as_ref().is_some_and(is_of_call);
        if is_of_call && gateway.answered(self.now, reply) {
            return self.retry(at);
        }
        Ok(())
    }

    /// Lets the requests that waited at a gateway try once more.
    fn retry(&mut self, at: usize) -> Result<(), String> {
        for waits in self.gateways[at].woken() {
            self.count("waited");
            self.request(at, waits)?;
        }
        Ok(())
    }

    fn requests(&mut self) -> Result<(), String> {
        if self.random.below(100) == 0 {
            self.favourite = self.random.below(GATEWAYS.into()) as usize;
        }
        let many = if self.random.below(100) == 0 { 40 } else { self.random.below(self.pace) };
        for _ in 0..many {
            let at = match self.random.below(4) {
                0 => self.random.below(GATEWAYS.into()) as usize,
                _ => self.favourite,
            };
            if self.gateways[at].stopped_until <= self.now {
                self.request(at, WAITS)?;
            }
        }
        Ok(())
    }

    fn request(&mut self, at: usize, waits: u32) -> Result<(), String> {
        let now = self.now;
        self.next_request += 1;
        let millis = match self.are_long {
            true => 1_000_000,
            false => 20 + self.random.below([100, 1_000, 4_000][self.next_request as usize % 3]),
        };
        let taken = match self.kind {
            Kind::Rate => self.gateways[at].request(now, waits),
            Kind::Places => self.gateways[at].reserve(now, (self.next_request, millis), waits),
        };
        match taken {
            Some(true) if self.kind == Kind::Places => {
                self.count("admitted");
                self.check_places(at)?;
            }
            Some(true) => {
                self.count("admitted");
                self.is_cut_off |= self.is_cut_off(at);
                if self.is_cut_off {
                    return Ok(());
                }
                if !self.reference.take(now) {
                    let rate = self.reference.rate;
                    return Err(format!("too much of {rate:?} at {now} by gateway {at}"));
                }
            }
            Some(false) => self.count("refused"),
            None => {}
        }
        Ok(())
    }

    /// Returns true if a gateway uses an equal part beside what others have: the store does not
    /// answer it alone. Then more than one bucket may be used.
    fn is_cut_off(&self, at: usize) -> bool {
        let (now, gateway) = (self.now, &self.gateways[at]);
        let store_answers = now >= self.frozen_until;
        let mode = gateway.mode(now);
        let others = self.gateways.iter().filter(|it| it.number != gateway.number);
        let others_are_leased = others.into_iter().any(|it| it.mode(now) == PartMode::Leased);
        let grants = || self.store.grants_without(now + self.clock, gateway.number);
        match mode {
            PartMode::Divided if gateway.was_cut_off || others_are_leased => true,
            PartMode::Narrowed if gateway.was_cut_off => true,
            PartMode::Divided | PartMode::Narrowed => store_answers && grants(),
            PartMode::Leased | PartMode::Ended => false,
        }
    }

    fn fault(&mut self) {
        // What the gateway had has not ended yet when the others lose the store, too.
        if let Some((_, until)) = self.cut_off
            && until <= self.now
        {
            self.cut_off = None;
            self.frozen_until = self.now + 7_000;
        }
        match self.random.below(1_200) {
            0 => {
                self.count("store emptied");
                self.store = Store::default();
            }
            1 => {
                self.count("replaced by an older copy");
                if let Some(older) = self.history.pop_front() {
                    self.store = older;
                }
                // Its connections are new.
                if self.omitted != Some(Omission::Run) {
                    self.run += 1;
                }
                self.messages.clear();
            }
            2 => {
                self.count("frozen short");
                self.frozen_until = self.now + self.random.below(2_500);
            }
            3 => {
                self.count("frozen long");
                self.frozen_until = self.now + 3_000 + self.random.below(10_000);
            }
            4 => {
                self.count("clock set");
                let step = self.random.below(7_200_000);
                self.clock = self.clock + 3_600_000 - step;
            }
            5 | 6 => {
                self.count("gateway stopped");
                let at = self.random.below(GATEWAYS.into()) as usize;
                self.gateways[at].stopped_until = self.now + self.random.below(9_000);
            }
            8 => {
                self.count("cut off, then frozen");
                let at = self.random.below(GATEWAYS.into()) as usize;
                self.cut_off = Some((self.gateways[at].number, self.now + 2_400));
            }
            7 => {
                self.count("gateway killed");
                let at = self.random.below(GATEWAYS.into()) as usize;
                let now = self.now;
                self.gateways[at] = Gateway::new(self.next_number, &self.limits, now, self.omitted);
                self.next_number += 1;
            }
            _ => {}
        }
    }

    fn rest(&mut self, millis: u64) -> Result<(), String> {
        let until = self.now + millis;
        while self.now < until {
            self.now += 20;
            self.step()?;
        }
        Ok(())
    }

    /// Lets everything rest, and checks that one gateway gets the whole burst.
    fn end(&mut self) -> Result<(), String> {
        let Rate { per_minute, burst } = self.reference.rate;
        (self.frozen_until, self.cut_off, self.is_quiet) = (0, None, true);
        self.rest(20_000)?;
        if self.kind == Kind::Places {
            return self.end_of_places();
        }
        // With the next call the store finds what gateways that have ended had.
        self.request(0, WAITS)?;
        self.rest(30_000 + burst * 60_000 / per_minute)?;
        let at = self.random.below(GATEWAYS.into()) as usize;
        let before = self.counts.get("admitted").copied().unwrap_or(0);
        for _ in 0..burst {
            self.request(at, WAITS)?;
            // The store answers a moment later.
            for _ in 0..4 {
                self.now += 5;
                self.step()?;
            }
        }
        let admitted = self.counts.get("admitted").copied().unwrap_or(0) - before;
        // The last request may wait for a call that the next beat makes.
        if admitted + 1 + burst / 20 < burst && self.omitted.is_none() {
            return Err(format!("only {admitted} of {burst} at the end"));
        }
        Ok(())
    }

    /// Checks that one gateway gets all places, and that another one gets the first that is free.
    fn end_of_places(&mut self) -> Result<(), String> {
        // With the next calls the store finds what gateways that have ended had.
        self.request(0, WAITS)?;
        self.rest(30_000)?;
        self.are_long = true;
        let places = self.limits.concurrent.unwrap_or(0) as usize;
        let at = self.random.below(GATEWAYS.into()) as usize;
        for _ in 0..places {
            self.request(at, WAITS)?;
            self.rest(100)?;
        }
        let (running, _) = self.gateways[at].held();
        let is_expected = self.omitted.is_none();
        if running < places && is_expected {
            return Err(format!("only {running} of {places} places at the end"));
        }
        if self.limits.queued == Some(0) {
            return self.contend(places);
        }
        let other = (at + 1) % self.gateways.len();
        self.request(other, WAITS)?;
        self.rest(400)?;
        if self.gateways[other].held() != (0, 1) && is_expected {
            return Err(format!("{:?} beside {places} places", self.gateways[other].held()));
        }
        self.gateways[at].end_one(self.now);
        self.rest(1_500)?;
        if self.gateways[other].held() != (1, 0) && is_expected {
            return Err(format!("{:?} after one was free", self.gateways[other].held()));
        }
        self.contend(places)
    }

    /// Checks that places go round while all gateways ask for more than there are.
    fn contend(&mut self, places: usize) -> Result<(), String> {
        // It takes as long as everything before it.
        if self.random.below(3) > 0 {
            return Ok(());
        }
        self.gateways.iter_mut().for_each(|gateway| gateway.end_all(self.now));
        self.are_long = false;
        self.rest(5_000)?;
        let begun = |play: &Self| -> Vec<u64> {
            play.gateways.iter().map(|gateway| gateway.begun).collect()
        };
        let (mut busy, mut before) = (0, Vec::new());
        for step in 0..CONTENTION {
            if step == CONTENTION / 4 {
                before = begun(self);
            }
            for at in 0..self.gateways.len() {
                for _ in 0..places.div_ceil(4) {
                    self.request(at, WAITS)?;
                }
                self.rest(20)?;
            }
            if step >= CONTENTION / 4 {
                busy += self.gateways.iter().map(|gateway| gateway.held().0).sum::<usize>();
            }
        }
        let mut began = begun(self).into_iter().zip(before).map(|(after, before)| after - before);
        // Requests take up to four seconds, and places move at beats.
        let part = busy as f64 / (CONTENTION as usize * 3 / 4 * places) as f64;
        if self.omitted.is_none() && (part < 0.4 || began.any(|began| began == 0)) {
            return Err(format!("{part} of {places} places in use, or none by one gateway"));
        }
        Ok(())
    }
}
