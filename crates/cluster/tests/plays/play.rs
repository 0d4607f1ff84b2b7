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
/// The caps of plays without and with lost gateways. A mistake shows at the end of a cap only.
const CAPS: [u64; 2] = [1_000, 300];
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
    loses: bool,
    cap: u64,
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
            home.start(0);
            home.settle();
            home
        });
        Self {
            random: Random(seed),
            omitted,
            loses: seed % 2 == 1,
            cap: CAPS[seed as usize % 2],
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
        // In half of the plays gateways are lost for good, as far as the others can tell.
        if self.loses && self.random.chance(10) {
            return self.lose(at);
        }
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
        match self.database.answer(call, (self.now, self.cap), gateways, self.omitted) {
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
        if self.now < self.homes[at].cut_until {
            return self.count("call lost");
        }
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
            self.homes[at].place(worst);
        } else if self.random.chance(70) {
            let expected = self.random.below(200);
            let keep = self.random.below(50);
            self.send(at, Wanted { keep, need: worst - spare, expected });
        } else if spare > 0 {
            // The end of the cap: the request gets less than it asked for.
            self.homes[at].place(spare);
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
            self.start(at);
        }
    }

    fn start(&mut self, at: usize) {
        self.homes[at].start(self.database.newest_life(at));
    }

    fn lose(&mut self, at: usize) {
        match self.random.below(10) {
            0..2 => {
                self.count("cut off");
                self.homes[at].cut_until = self.now + self.random.below(300);
            }
            2..4 => self.kill_or_start(at),
            _ => self.retire_or_free(at),
        }
    }

    /// Takes a silent gateway for lost, or frees what a lost one has.
    fn retire_or_free(&mut self, at: usize) {
        let home = &mut self.homes[at];
        if home.lost_life.is_none() {
            if home.is_silent(self.now) {
                home.retire();
                self.count("taken for lost");
            }
        } else if !home.is_lost() && self.omitted != Some(Omission::LostLife) {
            home.lost_life = None;
            self.count("lost one back");
        } else if home.is_running && (home.is_freed || home.has_work()) && self.random.chance(30) {
            // It hears that it was taken for lost.
            home.kill();
            self.count("lost one ends");
        } else if !home.is_freed && (!home.has_work() || self.omitted == Some(Omission::WorkOfLost))
        {
            home.is_freed = true;
            let spent = home.post_all().clone();
            let spent = Some(&spent).filter(|_| self.omitted != Some(Omission::TollOfLost));
            self.database.free(at, spent);
            self.count("lost one freed");
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
            if most.iter().sum::<u64>() > self.cap {
                let rows = &self.database.rows;
                return Err(format!("{most:?} of {} in period {period}; {rows:?}", self.cap));
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
            if self.homes[at].is_lost() && self.homes[at].is_running {
                self.homes[at].kill();
            }
            self.homes[at].lost_life = None;
            if !self.homes[at].is_running {
                self.start(at);
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
        self.call_now(at, Wanted { need: self.cap, ..Wanted::default() });
        let granted = self.homes[at].spare(self.now);
        if (before, granted) != (0, self.cap - spent) {
            let cap = self.cap;
            return Err(format!("of {cap}, {spent} are spent and {granted} free, {before} before"));
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
