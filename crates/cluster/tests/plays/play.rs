//! One random play.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;

use tollgate_cluster::{Answer, Wanted};

use crate::database::{Call, Database};
use crate::home::Home;
use crate::omission::Omission;
use crate::random::Random;

/// The number of events of each kind.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

const HOMES: usize = 3;
const CAP: u64 = 1_000;
const STEPS: u32 = 400;
/// The seconds after a failover in which nothing is granted.
const PAUSE: u64 = 100;

/// A message on its way.
#[derive(Clone, Copy)]
enum Message {
    Call(Call),
    Answer(Call, Answer),
}

pub(crate) struct Play {
    random: Random,
    omitted: Option<Omission>,
    now: u64,
    period: u32,
    database: Database,
    /// The database as it was some steps ago.
    history: VecDeque<Database>,
    homes: Vec<Home>,
    messages: Vec<(u64, Message)>,
    pub(crate) counts: Counts,
}

impl Play {
    pub(crate) fn new(seed: u64, omitted: Option<Omission>) -> Self {
        let homes = (0..HOMES).map(|index| {
            let mut home = Home::new(index, omitted);
            home.start();
            home.settle();
            home
        });
        Self {
            random: Random(seed),
            omitted,
            now: 0,
            period: 1,
            database: Database::default(),
            history: VecDeque::new(),
            homes: homes.collect(),
            messages: Vec::new(),
            counts: Counts::new(),
        }
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        for step in 0..STEPS {
            self.step();
            self.check().map_err(|found| format!("step {step}: {found}"))?;
        }
        self.end()
    }

    fn count(&mut self, event: &'static str) {
        *self.counts.entry(event).or_default() += 1;
    }

    fn step(&mut self) {
        self.now += self.random.below(3);
        self.history.push_back(self.database.clone());
        if self.history.len() > 8 {
            self.history.pop_front();
        }
        self.deliver_due();
        let at = self.random.index(HOMES);
        match self.random.below(100) {
            0..45 => self.request(at),
            45..65 => self.end_one(at),
            65..72 => self.homes[at].post(),
            72..88 => self.beat(at),
            88..92 => self.settle_or_end_left(at),
            92..95 => self.kill_or_start(at),
            95..98 => self.advance_clock(at),
            98 => self.begin_period(),
            _ => self.fail_over(),
        }
    }

    fn deliver_due(&mut self) {
        let (due, later) = std::mem::take(&mut self.messages)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _)| *at <= self.now);
        self.messages = later;
        for (_, message) in due {
            self.deliver(message);
        }
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::Answer(call, answer) => self.homes[call.home].answered(&call, &answer),
            Message::Call(call) => {
                let Some(answer) = self.answer(&call) else { return };
                if self.random.chance(10) {
                    self.count("answer lost");
                } else {
                    let at = self.now + self.random.below(2);
                    self.messages.push((at, Message::Answer(call, answer)));
                }
            }
        }
    }

    fn answer(&mut self, call: &Call) -> Option<Answer> {
        let gateways = NonZeroU32::new(HOMES as u32).expect("not zero");
        match self.database.answer(call, (self.now, CAP), gateways, self.omitted) {
            Ok(answer) => {
                if answer.granted < answer.claimed + call.ask.need {
                    self.count("need met in part");
                }
                Some(answer)
            }
            Err(_) => {
                self.count("call stale");
                None
            }
        }
    }

    fn send(&mut self, at: usize, wanted: Wanted) {
        let call = self.homes[at].ask(self.now, wanted);
        let late = match self.random.below(10) {
            0 => return self.count("call lost"),
            1 => {
                self.count("call late");
                self.random.below(20)
            }
            _ => 0,
        };
        self.messages.push((self.now + late, Message::Call(call)));
    }

    fn request(&mut self, at: usize) {
        if !self.homes[at].is_running {
            return;
        }
        let worst = 1 + self.random.below(60);
        let spare = self.homes[at].spare(self.now);
        if spare >= worst {
            self.homes[at].held.push(worst);
        } else if self.random.chance(70) {
            let expected = self.random.below(200);
            let keep = self.random.below(50);
            self.send(at, Wanted { keep, need: worst - spare, expected });
        } else if spare > 0 {
            // The end of the cap: the request gets less than it asked for.
            self.homes[at].held.push(spare);
        }
    }

    fn end_one(&mut self, at: usize) {
        let running = self.homes[at].held.len();
        if running > 0 {
            let (which, part) = (self.random.index(running), self.random.below(101));
            self.homes[at].end(which, part);
        }
    }

    fn beat(&mut self, at: usize) {
        if self.homes[at].is_running {
            let keep = if self.random.chance(30) { 0 } else { self.random.below(100) };
            self.send(at, Wanted { keep, ..Wanted::default() });
        }
    }

    fn settle_or_end_left(&mut self, at: usize) {
        if !self.homes[at].left.is_empty() {
            self.count("work after its gateway");
            let part = self.random.below(101);
            self.homes[at].end_left(part);
        } else if self.homes[at].is_running {
            self.homes[at].settle();
        }
    }

    fn kill_or_start(&mut self, at: usize) {
        if self.homes[at].is_running {
            self.count("killed");
            self.homes[at].kill();
        } else {
            self.count("restarted");
            self.homes[at].start();
        }
    }

    fn begin_period(&mut self) {
        // The clocks of all machines agree within less than a period.
        let may_begin =
            |home: &Home| home.period == self.period && home.has_no_work_before(self.period);
        if self.homes.iter().all(may_begin) {
            self.count("period begun");
            self.period += 1;
        }
    }

    fn advance_clock(&mut self, at: usize) {
        if self.homes[at].period < self.period {
            if !self.homes[at].held.is_empty() {
                self.count("ran across periods");
            }
            self.homes[at].roll();
        }
    }

    /// Replaces the database by a standby that lacks the newest commits. A gateway that does
    /// not run could not tell what was lost, so then the standby lacks nothing.
    fn fail_over(&mut self) {
        let all_know = self.homes.iter().all(|home| home.is_running && home.slice.is_known());
        if !all_know {
            return;
        }
        self.count("failed over");
        if let Some(older) = self.history.pop_front() {
            self.database = older;
        }
        self.history.clear();
        self.messages.clear();
        self.database.paused_until = self.now + PAUSE;
        // Each gateway calls once a second, and the pause is longer than any of them may go
        // without an answer.
        let first = self.random.index(HOMES);
        for turn in 0..HOMES {
            let at = (first + turn) % HOMES;
            let wanted = Wanted { keep: u64::MAX, need: 0, expected: 100 };
            let call = self.homes[at].ask(self.now, wanted);
            if let Some(answer) = self.answer(&call) {
                self.homes[at].answered(&call, &answer);
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        for period in self.period - 1..=self.period {
            let most: Vec<u64> = self.homes.iter().map(|home| home.most(period)).collect();
            if most.iter().sum::<u64>() > CAP {
                let rows = &self.database.rows;
                return Err(format!("{most:?} of {CAP} in period {period}; {rows:?}"));
            }
        }
        Ok(())
    }

    /// Ends all work and checks that the rest of the cap can be granted.
    fn end(&mut self) -> Result<(), String> {
        self.messages.clear();
        self.now += 2 * PAUSE;
        for at in 0..HOMES {
            while self.homes[at].period < self.period {
                self.homes[at].roll();
            }
            if !self.homes[at].is_running {
                self.homes[at].start();
            }
            while !self.homes[at].left.is_empty() {
                self.homes[at].end_left(50);
            }
            self.homes[at].settle();
            while !self.homes[at].held.is_empty() {
                self.homes[at].end(0, 50);
            }
            self.check()?;
        }
        // Twice, because the first call of a life does not give back.
        for at in (0..HOMES).chain(0..HOMES) {
            self.call_now(at, Wanted::default());
        }
        let spent: u64 = self.homes.iter().map(|home| home.most(self.period)).sum();
        let at = self.random.index(HOMES);
        let before = self.homes[at].spare(self.now);
        self.call_now(at, Wanted { need: CAP, ..Wanted::default() });
        let granted = self.homes[at].spare(self.now);
        if (before, granted) != (0, CAP - spent) {
            return Err(format!("of {CAP}, {spent} are spent and {granted} free, {before} before"));
        }
        self.check()
    }

    fn call_now(&mut self, at: usize, wanted: Wanted) {
        let call = self.homes[at].ask(self.now, wanted);
        if let Some(answer) = self.answer(&call) {
            self.homes[at].answered(&call, &answer);
        }
    }
}
