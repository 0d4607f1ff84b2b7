//! A play: gateways, workers and databases, and the random steps that they take.

mod checks;

use std::collections::{BTreeMap, VecDeque};

use tollgate_cluster::{
    Ask, BootMillis, GatewayNumber, Short, Slice, Timeline, Watch, WorkRefused, WorkerGate,
};

use crate::database::{Block, Database, Told, Unlearned, WORKERS};
use crate::omission::Omission;
use crate::random::Random;

/// The number of times that each fault happened.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

pub(crate) struct Play {
    random: Random,
    /// The column of [`ACTS`] that this play uses.
    weather: usize,
    omitted: Option<Omission>,
    now: u64,
    /// The cap. An admin raises it each time that little is left, so that the play stays where
    /// mistakes matter.
    cap: u64,
    /// The newest is last. Those before it still answer gateways that have not heard of it.
    databases: Vec<Database>,
    /// States of the newest database that a standby may have, with their times.
    replicas: VecDeque<(u64, Database)>,
    gateways: Vec<Gateway>,
    workers: [Worker; WORKERS],
    /// Attempts that are on their way to a worker.
    wire: Vec<Sent>,
    /// Transactions whose client has given up and which the database has yet to see.
    late: Vec<(usize, Transaction)>,
    /// The ended attempts: the worker, the number of the block, the cost.
    ended: BTreeMap<u64, (usize, u64, u64)>,
    /// The cost of all ended attempts.
    cost: u64,
    next_attempt: u64,
    pub(crate) counts: Counts,
}

struct Gateway {
    number: GatewayNumber,
    life: u64,
    database: usize,
    /// True if it is cut off from the standbys that take over.
    stays: bool,
    timeline: Timeline,
    slice: Slice,
    watch: Watch,
    /// The attempts that hold a part of the slice, with their worst case.
    held: BTreeMap<u64, u64>,
    /// Milliseconds that its clock did not count.
    frozen: u64,
    asleep_until: u64,
    /// Time at which the stream to each worker was opened.
    streams: [Option<BootMillis>; WORKERS],
    /// Time at which the newest answered beat was sent.
    beat: BootMillis,
    /// The amount that it gave back in calls without an answer.
    leaving: u64,
    lives: bool,
}

struct Worker {
    gate: WorkerGate,
    running: Vec<Attempt>,
    journal: Vec<Block>,
    /// Grows at each start, which ends all streams.
    life: u32,
}

impl Worker {
    fn takes(&self, number: GatewayNumber, timeline: Timeline) -> bool {
        self.gate.judge(number, timeline).is_ok()
    }
}

#[derive(Clone, Copy)]
struct Attempt {
    id: u64,
    gateway: usize,
    number: GatewayNumber,
    worst: u64,
}

struct Sent {
    attempt: Attempt,
    timeline: Timeline,
    worker: usize,
    worker_life: u32,
}

enum Transaction {
    Ask { number: GatewayNumber, life: u64, ask: Ask },
    Learn { number: GatewayNumber, told: Told },
    Post { worker: usize, first: u64, blocks: Vec<Block> },
}

/// The outcome of a transaction.
enum Fate {
    Answered,
    CommittedUnanswered,
    Lost,
    Late,
}

impl Play {
    pub(crate) fn new(seed: u64, omitted: Option<Omission>) -> Self {
        let worker = || Worker {
            gate: WorkerGate::new(Timeline(0)),
            running: Vec::new(),
            journal: Vec::new(),
            life: 0,
        };
        let mut play = Self {
            random: Random(seed),
            weather: (seed % WEATHERS as u64) as usize,
            omitted,
            now: 1_000_000,
            cap: 2 * LARGEST,
            databases: vec![Database::new(omitted)],
            replicas: VecDeque::new(),
            gateways: Vec::new(),
            workers: [worker(), worker()],
            wire: Vec::new(),
            late: Vec::new(),
            ended: BTreeMap::new(),
            cost: 0,
            next_attempt: 0,
            counts: Counts::new(),
        };
        (0..3).for_each(|_| play.join());
        play
    }

    /// Plays random steps, and then an end without faults.
    ///
    /// # Errors
    /// The first broken promise.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            self.step();
            self.check_cap()?;
        }
        self.end()
    }

    fn step(&mut self) {
        let weights = |(_, weights): &(Act, [u64; WEATHERS])| weights[self.weather];
        let mut left = self.random.below(ACTS.iter().map(weights).sum());
        let act = ACTS.iter().find(|act| match left.checked_sub(weights(act)) {
            Some(less) => {
                left = less;
                false
            }
            None => true,
        });
        act.expect("the number is below the sum").0(self);
    }

    fn pass_some(&mut self) {
        let millis = self.random.below(2_000);
        self.pass(millis);
    }

    fn omits(&self, rule: Omission) -> bool {
        self.omitted == Some(rule)
    }

    fn count(&mut self, fault: &'static str) {
        *self.counts.entry(fault).or_default() += 1;
    }

    fn newest(&mut self) -> &mut Database {
        self.databases.last_mut().expect("there is a database")
    }

    fn clock(&self, gateway: usize) -> BootMillis {
        BootMillis(self.now - self.gateways[gateway].frozen)
    }

    /// Draws a gateway that lives and is awake.
    fn awake(&mut self) -> Option<usize> {
        let now = self.now;
        let is_awake = |gateway: &&Gateway| gateway.lives && gateway.asleep_until <= now;
        let count = self.gateways.iter().filter(is_awake).count();
        let nth = self.random.index(count.max(1));
        let mut awake = self.gateways.iter().enumerate().filter(|(_, gateway)| is_awake(gateway));
        awake.nth(nth).map(|(index, _)| index)
    }

    fn pass(&mut self, millis: u64) {
        self.now += millis;
        let cap = self.cap;
        if self.newest().cap.rest(cap) < LARGEST && self.random.chance(20) {
            self.cap += LARGEST;
        }
        let (now, newest) = (self.now, self.newest().clone());
        self.replicas.push_back((now, newest));
        self.replicas.retain(|(time, _)| *time + MOST_LAG > now);
    }

    fn join(&mut self) {
        if self.gateways.iter().filter(|gateway| gateway.lives).count() >= 4 {
            return;
        }
        // A gateway may also reach a database that a standby has replaced.
        let database = self.random.index(self.databases.len());
        let life = 1 + self.random.below(u64::MAX - 1);
        let number = self.databases[database].join(life);
        let timeline = self.databases[database].timeline;
        let stays = self.random.chance(20);
        self.gateways.push(Gateway {
            number,
            life,
            database,
            stays,
            timeline,
            slice: Slice::new(timeline),
            watch: Watch::default(),
            held: BTreeMap::new(),
            frozen: 0,
            asleep_until: 0,
            streams: [None; WORKERS],
            beat: BootMillis(0),
            leaving: 0,
            lives: true,
        });
    }

    fn kill(&mut self) {
        let Some(gateway) = self.awake() else { return };
        self.gateways[gateway].lives = false;
        self.count("killed");
    }

    /// Stops a gateway for a time, which its clock counts or not.
    fn sleep(&mut self) {
        let Some(index) = self.awake() else { return };
        let most = if self.random.chance(50) { 10_000 } else { 400_000 };
        let millis = self.random.below(most);
        let uncounted = self.random.chance(50);
        let now = self.now;
        let gateway = &mut self.gateways[index];
        gateway.asleep_until = now + millis;
        if uncounted {
            gateway.frozen += millis;
        }
        self.count(if uncounted { "frozen" } else { "stopped" });
    }

    fn request(&mut self) {
        let Some(index) = self.awake() else { return };
        let worst = 1 + self.random.below(LARGEST);
        // Once more after each beat that it lacked.
        let _ = (0..3).find(|_| self.attempt(index, worst));
    }

    /// Sends an attempt to a worker. Returns false if a beat must be answered first; then the
    /// beat has been sent.
    fn attempt(&mut self, index: usize, worst: u64) -> bool {
        if !self.gateways[index].lives {
            return true;
        }
        let now = self.clock(index);
        let gives_back_late = self.omits(Omission::GiveBackFirst);
        let gateway = &mut self.gateways[index];
        let id = self.next_attempt;
        match gateway.slice.hold(now, worst) {
            Ok(()) => _ = gateway.held.insert(id, worst),
            // The control uses what is being given back.
            Err(Short { missing }) if gives_back_late && missing <= gateway.leaving => {}
            Err(Short { missing }) => {
                self.beat(index, missing, 0);
                return false;
            }
        }
        self.next_attempt += 1;
        let worker = self.random.index(WORKERS);
        let any_beat = self.omits(Omission::BeatAfterOpen);
        let gateway = &mut self.gateways[index];
        let opened = *gateway.streams[worker].get_or_insert(now);
        if gateway.beat <= opened && !any_beat {
            self.settle(index, id, 0);
            self.pass(1);
            self.beat(index, 0, 0);
            return false;
        }
        let attempt = Attempt { id, gateway: index, number: gateway.number, worst };
        let timeline = gateway.timeline;
        let worker_life = self.workers[worker].life;
        self.wire.push(Sent { attempt, timeline, worker, worker_life });
        if self.random.chance(85) {
            let newest = self.wire.len() - 1;
            self.receive(newest);
        } else {
            self.count("work delayed");
        }
        true
    }

    fn deliver(&mut self) {
        if !self.wire.is_empty() {
            let at = self.random.index(self.wire.len());
            self.receive(at);
        }
    }

    /// Lets a worker receive an attempt.
    fn receive(&mut self, at: usize) {
        let Sent { attempt, timeline, worker, worker_life } = self.wire.swap_remove(at);
        let to = &mut self.workers[worker];
        // The stream ended with the worker.
        if to.life != worker_life {
            return self.settle(attempt.gateway, attempt.id, 0);
        }
        match to.gate.check(attempt.number, timeline) {
            Ok(()) => to.running.push(attempt),
            Err(refused) => {
                self.settle(attempt.gateway, attempt.id, 0);
                if refused == WorkRefused::Retired {
                    self.gateways[attempt.gateway].lives = false;
                    self.count("retired work refused");
                } else {
                    self.count("old timeline refused");
                }
            }
        }
    }

    fn settle(&mut self, gateway: usize, attempt: u64, cost: u64) {
        let gateway = &mut self.gateways[gateway];
        if let Some(worst) = gateway.held.remove(&attempt) {
            gateway.slice.settle(worst, cost);
        }
    }

    fn finish(&mut self) {
        let worker = self.random.index(WORKERS);
        if self.workers[worker].running.is_empty() {
            return;
        }
        let at = self.random.index(self.workers[worker].running.len());
        let attempt = self.workers[worker].running.swap_remove(at);
        let cost = self.journal(worker, attempt);
        if self.random.chance(80) {
            self.settle(attempt.gateway, attempt.id, cost);
        } else {
            self.count("end unheard");
        }
    }

    /// Writes an attempt to a worker's journal and returns its cost.
    fn journal(&mut self, worker: usize, attempt: Attempt) -> u64 {
        // Many requests cost far less than their worst case.
        let most = if self.random.chance(50) { attempt.worst / 4 } else { attempt.worst };
        let cost = self.random.below(most + 1);
        let journal = &mut self.workers[worker].journal;
        journal.push(Block { number: attempt.number, cost });
        self.cost += cost;
        self.ended.insert(attempt.id, (worker, journal.len() as u64, cost));
        cost
    }

    /// Lets a gateway settle what it finds posted.
    fn hear_of_posted(&mut self) {
        let Some(index) = self.awake() else { return };
        let posted = self.databases[self.gateways[index].database].posted;
        let held: Vec<u64> = self.gateways[index].held.keys().copied().collect();
        for id in held {
            if let Some(&(worker, block, cost)) = self.ended.get(&id)
                && block <= posted[worker]
            {
                self.settle(index, id, cost);
            }
        }
    }

    fn restart_worker(&mut self) {
        let index = self.random.index(WORKERS);
        let running = std::mem::take(&mut self.workers[index].running);
        for attempt in running {
            self.journal(index, attempt);
        }
        let forgets = self.omits(Omission::KeepTimeline);
        let worker = &mut self.workers[index];
        worker.life += 1;
        let kept = if forgets { Timeline(0) } else { worker.gate.timeline() };
        worker.gate = WorkerGate::new(kept);
        self.gateways.iter_mut().for_each(|gateway| gateway.streams[index] = None);
        self.count("worker restarted");
    }

    fn fate(&mut self) -> Fate {
        match self.random.below(100) {
            0..=69 => Fate::Answered,
            70..=79 => Fate::CommittedUnanswered,
            80..=89 => Fate::Lost,
            _ => Fate::Late,
        }
    }

    fn beat_of_one(&mut self) {
        let Some(index) = self.awake() else { return };
        let back = if self.random.chance(60) { self.random.below(400) } else { 0 };
        self.beat(index, 0, back);
    }

    /// Sends a beat of a gateway, which asks and gives back.
    fn beat(&mut self, index: usize, need: u64, give_back: u64) {
        let newest = self.databases.len() - 1;
        let stays = self.gateways[index].stays;
        if self.gateways[index].database < newest && !stays && self.random.chance(30) {
            self.gateways[index].database = newest;
        }
        let now = self.clock(index);
        let expected = self.random.below(600);
        let gateway = &mut self.gateways[index];
        let (number, life, database) = (gateway.number, gateway.life, gateway.database);
        let ask = gateway.slice.ask(now, need, expected, give_back);
        gateway.leaving += ask.give_back;
        let transaction = Transaction::Ask { number, life, ask };
        match self.fate() {
            Fate::Answered => self.answer(index, ask, now),
            Fate::CommittedUnanswered => {
                self.commit(database, &transaction);
                self.count("call unanswered");
            }
            Fate::Lost => self.count("call lost"),
            Fate::Late => {
                self.late.push((database, transaction));
                self.count("call late");
            }
        }
    }

    fn answer(&mut self, index: usize, ask: Ask, now: BootMillis) {
        let tells = !self.omits(Omission::TellFirst);
        let fate = self.fate();
        let gateway = &mut self.gateways[index];
        let database = &mut self.databases[gateway.database];
        let number = gateway.number;
        let Some((answer, beats)) = database.ask(number, gateway.life, self.cap, ask) else {
            // Retired, or unknown to a promoted standby: it ends itself.
            gateway.lives = false;
            return self.count("ended itself");
        };
        gateway.beat = now;
        if let Some(granted) = gateway.slice.answered(answer) {
            let told = Told { call: ask.call, granted };
            let lost = matches!(fate, Fate::Lost | Fate::Late);
            let row = match tells {
                _ if lost => None,
                true => database.learn(number, told),
                false => Some(answer.row),
            };
            // If the answer is lost, the gateway tells it again.
            if let Some(row) = row.filter(|_| matches!(fate, Fate::Answered)) {
                database.unlearned.remove(&Unlearned::Gateway(number));
                gateway.slice.told(answer.timeline, row);
                gateway.timeline = answer.timeline;
            }
            if matches!(fate, Fate::Late) && tells {
                let transaction = Transaction::Learn { number, told };
                self.late.push((gateway.database, transaction));
            }
        }
        gateway.leaving = 0;
        for silent in gateway.watch.answered(now, beats) {
            database.retire(silent);
            *self.counts.entry("retired").or_default() += 1;
        }
    }

    fn commit(&mut self, database: usize, transaction: &Transaction) {
        let database = &mut self.databases[database];
        match transaction {
            Transaction::Ask { number, life, ask } => {
                let _ = database.ask(*number, *life, self.cap, *ask);
            }
            Transaction::Learn { number, told } => {
                let _ = database.learn(*number, *told);
            }
            Transaction::Post { worker, first, blocks } => {
                database.post(*worker, *first, blocks);
            }
        }
    }

    fn commit_late(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let at = self.random.index(self.late.len());
        let (database, transaction) = self.late.swap_remove(at);
        self.commit(database, &transaction);
    }

    /// Lets a gateway post blocks of a worker.
    fn post(&mut self) {
        let Some(index) = self.awake() else { return };
        let worker = self.random.index(WORKERS);
        let database = self.gateways[index].database;
        let posted = self.databases[database].posted[worker];
        let most = 1 + self.random.index(5);
        let unposted = self.workers[worker].journal.iter().skip(posted as usize);
        let blocks: Vec<Block> = unposted.take(most).copied().collect();
        if blocks.is_empty() {
            return;
        }
        let transaction = Transaction::Post { worker, first: posted + 1, blocks };
        match self.fate() {
            Fate::Answered | Fate::CommittedUnanswered => self.commit(database, &transaction),
            Fate::Lost => {}
            Fate::Late => {
                self.late.push((database, transaction));
                self.count("post late");
            }
        }
    }

    /// Lets a worker hear of the retired gateways, and close those without running attempts.
    fn close(&mut self) {
        let index = self.random.index(WORKERS);
        let refuses = !self.omits(Omission::RefuseRetired);
        let database = self.databases.last_mut().expect("there is a database");
        let worker = &mut self.workers[index];
        worker.gate.hear(database.timeline);
        for (number, member) in &mut database.members {
            let Some(retirement) = &mut member.retirement else { continue };
            if refuses {
                worker.gate.retire(*number);
            }
            if worker.running.iter().all(|attempt| attempt.number != *number) {
                retirement.closed(index, worker.journal.len() as u64);
            }
        }
    }

    fn free(&mut self) {
        self.newest().free_complete();
    }

    /// Lets a worker tell a promoted standby of which gateways it has attempts.
    fn tell(&mut self) {
        let index = self.random.index(WORKERS);
        let tells = !self.omits(Omission::UnknownNumbers);
        let database = self.databases.last_mut().expect("there is a database");
        if !database.unlearned.remove(&Unlearned::Worker(index)) {
            return;
        }
        let worker = &mut self.workers[index];
        worker.gate.hear(database.timeline);
        let posted = database.posted[index] as usize;
        let running = worker.running.iter().map(|attempt| attempt.number);
        let unposted = worker.journal.iter().skip(posted).map(|block| block.number);
        let numbers: Vec<GatewayNumber> = running.chain(unposted).collect();
        let unknown = numbers.iter().any(|number| !database.members.contains_key(number));
        if tells {
            numbers.into_iter().for_each(|number| database.adopt_unknown(number));
        }
        if unknown {
            self.count("unknown gateway learned");
        }
    }

    /// Lets more than the longest silence pass, in which those that are awake send beats.
    fn watch_long(&mut self) {
        for _ in 0..60 {
            self.pass(2_000);
            for index in 0..self.gateways.len() {
                let gateway = &self.gateways[index];
                if gateway.lives && gateway.asleep_until <= self.now {
                    self.beat(index, 0, 0);
                }
            }
        }
    }

    /// Promotes a standby that lacks the newest commits.
    fn fail_over(&mut self) {
        if self.replicas.is_empty() {
            return;
        }
        let at = self.random.index(self.replicas.len());
        let (_, replica) = self.replicas.swap_remove_back(at).expect("the index is within");
        self.databases.push(replica.promoted());
        self.replicas.clear();
        self.count("failed over");
    }
}

type Act = fn(&mut Play);

const WEATHERS: usize = 3;
/// The acts, each with its weight in each weather: a bit of everything, many failovers while
/// work runs, and gateways that sleep until they are retired.
const ACTS: [(Act, [u64; WEATHERS]); 17] = [
    (Play::request, [400, 300, 150]),
    (Play::finish, [100, 20, 150]),
    (Play::beat_of_one, [80, 200, 80]),
    (Play::post, [60, 20, 150]),
    (Play::deliver, [40, 20, 40]),
    (Play::commit_late, [30, 30, 30]),
    (Play::close, [40, 40, 150]),
    (Play::free, [30, 30, 80]),
    (Play::tell, [20, 80, 20]),
    (Play::pass_some, [70, 70, 40]),
    (Play::watch_long, [10, 2, 20]),
    (Play::kill, [10, 4, 4]),
    (Play::join, [30, 60, 30]),
    (Play::sleep, [10, 4, 40]),
    (Play::restart_worker, [10, 4, 20]),
    (Play::fail_over, [2, 20, 2]),
    (Play::hear_of_posted, [60, 20, 60]),
];

const STEPS: usize = 1_200;
/// Largest worst case of a request.
const LARGEST: u64 = 300;
/// Milliseconds that a standby is behind at most.
const MOST_LAG: u64 = 5_000;
