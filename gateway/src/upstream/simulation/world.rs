//! The play: one machine with a worker and a gateway, a wire between them, and
//! trouble. What happens next is the earliest thing in a queue; chance is the
//! seed's; nothing else decides anything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Duration, Instant};
use tokio_stream::wrappers::ReceiverStream;
use tollgate_domain::block::Attempt;
use tollgate_domain::{FinishReason, MonotonicTime, RequestId, Usage, WorkerEpoch};
use tollgate_ledger::{LedgerError, Posted};
use tollgate_wire::v1::{JournalAck, JournalBlock};
use tollgate_worker::rig::BlockReader;

use super::chance::Chance;
use super::disk::{Counted, SimDisk};
use super::facts::{End, Facts};
use super::front::{CAP_NS, Front, Fronts, Next, TaskEnd, caller, tenants};
use super::sqlite::Mounted;
use super::worker::{MS, Played, Wanted, Working};
use crate::upstream::{Online, UpstreamError};

/// A bug that is planted to see it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plant {
    None,
    /// Syncs are skipped.
    NoSync,
    /// A block is acknowledged when it is sent, not when it is committed.
    AcknowledgedTooEarly,
    /// A block that comes twice is posted under the next number.
    PostedTwice,
    /// A torn journal loses its last whole record too.
    CutTooEarly,
}

/// How a play went.
#[derive(Debug)]
pub(super) struct Outcome {
    /// A number of all that happened, in order.
    pub(super) trace: u64,
    /// What should not have been.
    pub(super) wrong: Vec<String>,
    pub(super) seen: Seen,
    pub(super) disk: Counted,
    /// What mattered, in order, for people.
    pub(super) diary: Vec<String>,
}

/// How often things happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) asked: u64,
    pub(super) answered: u64,
    pub(super) blocks: u64,
    pub(super) repeated: u64,
    pub(super) worker_deaths: u64,
    pub(super) gateway_deaths: u64,
    pub(super) cuts: u64,
    pub(super) events: u64,
}

impl Seen {
    pub(super) fn add(&mut self, other: &Self) {
        let Self { asked, answered, blocks, repeated, worker_deaths, gateway_deaths, cuts, events } =
            other;
        self.asked += asked;
        self.answered += answered;
        self.blocks += blocks;
        self.repeated += repeated;
        self.worker_deaths += worker_deaths;
        self.gateway_deaths += gateway_deaths;
        self.cuts += cuts;
        self.events += events;
    }
}

/// What happens.
#[derive(Debug)]
enum Event {
    Ask,
    Trouble,
    TroubleOver,
    StartWorker,
    Turn(u64),
    Stepped {
        life: u64,
        started: u64,
    },
    Tick(u64),
    /// The worker finds that its gateway is gone.
    Orphaned(u64),
    StartGateway,
    Commit(u64),
    Sweep(u64),
    Follow {
        life: u64,
        request: usize,
    },
    Leave {
        life: u64,
        request: usize,
    },
    Impatient {
        life: u64,
        request: usize,
        attempt: u32,
    },
    Connect,
    ToGateway {
        connection: u64,
        told: Box<Told>,
    },
    ToWorker {
        connection: u64,
        said: Box<Said>,
    },
    LostAtGateway(u64),
    LostAtWorker(u64),
}

/// What a worker tells a gateway.
#[derive(Debug)]
enum Told {
    Block(Box<JournalBlock>),
    Progress(Attempt, Usage),
    Finished(Attempt, Usage),
}

/// What a gateway says to a worker.
#[derive(Debug)]
pub(super) enum Said {
    Order(usize, Attempt, Wanted),
    Cancel(Attempt),
    Ack(JournalAck),
}

/// The wire, as long as both ends hold it.
struct Connection {
    number: u64,
    online: Arc<Online>,
    reader: BlockReader<SimDisk>,
    blocks: mpsc::Sender<Result<JournalBlock, tonic::Status>>,
    acks: mpsc::Receiver<JournalAck>,
    taken: Arc<AtomicBool>,
    task: AbortHandle,
    worker_holds: bool,
    gateway_holds: bool,
    /// When the last message of each direction arrives.
    arrivals: [u64; 2],
}

/// The whole play.
pub(super) struct World {
    chance: Chance,
    plant: Plant,
    queue: BTreeMap<(u64, u64), Event>,
    counter: u64,
    now: u64,
    origin: Instant,
    clock: Played,
    disk: SimDisk,
    fronts: Fronts,
    working: Option<Working>,
    front: Option<Front>,
    wire: Option<Connection>,
    wires: u64,
    processes: u64,
    lives: u64,
    /// Whether messages were put out of order, which a gateway calls a lie.
    shuffled: bool,
    ending: bool,
    facts: Facts,
    seen: Seen,
    trace: u64,
    diary: Vec<String>,
    // Last: every connection of SQLite's is gone before.
    mounted: Mounted,
}

/// How long clients come and trouble lasts, ms.
const TROUBLED: u64 = 4_000;
const LONGEST_DIARY: usize = 300;
/// How long everything may take to come to rest after that.
const PATIENCE: u64 = 40_000;

impl World {
    pub(super) fn new(seed: u64, plant: Plant) -> Self {
        let mut chance = Chance::new(seed);
        let disk = SimDisk::new(chance.fork());
        disk.faults(|faults| {
            faults.lying = plant == Plant::NoSync;
            faults.cuts_too_much = plant == Plant::CutTooEarly;
        });
        let mounted = Mounted::new(&disk, chance.fork());
        let mut world = Self {
            chance,
            plant,
            queue: BTreeMap::new(),
            counter: 0,
            now: 0,
            origin: Instant::now(),
            clock: Played::default(),
            disk,
            fronts: Fronts::new(),
            working: None,
            front: None,
            wire: None,
            wires: 0,
            processes: 0,
            lives: 0,
            shuffled: false,
            ending: false,
            facts: Facts::default(),
            seen: Seen::default(),
            trace: 0xcbf2_9ce4_8422_2325,
            diary: Vec::new(),
            mounted,
        };
        world.clock.turn(0);
        world.plan();
        world
    }

    fn plan(&mut self) {
        self.at(0, Event::StartWorker);
        self.at(0, Event::StartGateway);
        for _ in 0..self.chance.between(4, 9) {
            let when = self.chance.between(200, TROUBLED);
            self.at(when, Event::Ask);
        }
        for _ in 0..self.chance.between(1, 5) {
            let when = self.chance.between(300, TROUBLED);
            self.at(when, Event::Trouble);
        }
        self.at(TROUBLED + 500, Event::TroubleOver);
    }

    fn at(&mut self, when: u64, event: Event) {
        self.counter += 1;
        self.queue.insert((when.max(self.now), self.counter), event);
    }

    fn write_down(&mut self, what: impl FnOnce() -> String) {
        if self.diary.len() < LONGEST_DIARY {
            let now = self.now;
            self.diary.push(format!("{now:>6} {}", what()));
        }
    }

    fn soon(&mut self, least: u64, most: u64, event: Event) {
        let when = self.now + self.chance.between(least, most);
        self.at(when, event);
    }

    /// Plays to the end and judges.
    pub(super) async fn play(mut self) -> Outcome {
        let mut rested = None;
        while let Some(((when, _), event)) = self.queue.pop_first() {
            self.pass(when).await;
            self.note(&event);
            self.seen.events += 1;
            self.happen(event);
            self.settle_down().await;
            if self.disk.is_dark() {
                self.lose_power();
                self.settle_down().await;
            }
            if self.ending && rested.is_none() {
                rested = self.rest();
            }
            if rested.is_some() || self.facts.is_wrong() {
                break;
            }
            if self.now > TROUBLED + PATIENCE {
                self.facts.wrong("it does not come to rest");
                break;
            }
        }
        if !self.facts.is_wrong() {
            self.judge().await;
        }
        self.stop_worker();
        self.kill_gateway();
        self.settle_down().await;
        let (seen, disk) = (self.seen, self.disk.counted());
        let lies = self.fronts.lies();
        if lies > 0 && !self.shuffled {
            self.facts.wrong(format!("an honest worker was called a liar {lies} times"));
        }
        let trace = self.trace;
        let Self { facts, diary, .. } = self;
        Outcome { trace, wrong: facts.into_wrong(), seen, disk, diary }
    }

    async fn pass(&mut self, when: u64) {
        self.now = when;
        tokio::time::sleep_until(self.origin + Duration::from_millis(when)).await;
        self.clock.turn(when);
    }

    /// Lets what was woken run, and hears what comes of it.
    async fn settle_down(&mut self) {
        for _ in 0..4 {
            tokio::task::yield_now().await;
            self.hear_acks();
        }
        while let Some(ended) = self.front.as_mut().and_then(Front::ended_task) {
            match ended {
                TaskEnd::Followed(number, error) => {
                    if matches!(error, UpstreamError::Lied(_)) && !self.shuffled {
                        self.facts.wrong(format!("an honest worker is said to lie: {error}"));
                    }
                    self.mark(&[70, number]);
                    self.write_down(|| format!("wire {number}: {error}"));
                    self.lose_at_gateway(number);
                }
                TaskEnd::Done => {}
            }
        }
    }

    fn hear_acks(&mut self) {
        let Some(wire) = &mut self.wire else { return };
        let mut acks = Vec::new();
        while let Ok(ack) = wire.acks.try_recv() {
            acks.push(ack);
        }
        let number = wire.number;
        for ack in acks {
            let epoch = WorkerEpoch::try_from(ack.epoch.clone()).expect("it was said so");
            self.mark(&[71, epoch.0 as u64, ack.block]);
            self.write_down(|| format!("acknowledged {:x}/{}", epoch.0, ack.block));
            self.facts.acknowledged(epoch, ack.block);
            self.say(number, Said::Ack(ack));
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Ask => self.ask(),
            Event::Trouble => self.trouble(),
            Event::TroubleOver => self.trouble_over(),
            Event::StartWorker => self.start_worker(),
            Event::Turn(life) => self.turn(life),
            Event::Stepped { life, started } => self.stepped(life, started),
            Event::Tick(life) => self.tick(life),
            Event::Orphaned(life) if self.is_life(life) => self.stop_worker(),
            Event::Orphaned(_) => {}
            Event::StartGateway => self.start_gateway(),
            Event::Commit(life) => self.commit(life),
            Event::Sweep(life) => self.sweep(life),
            Event::Follow { life, request } => self.follow(life, request),
            Event::Leave { life, request } => self.leave(life, request),
            Event::Impatient { life, request, attempt } => {
                if let Some(front) = self.front.as_mut().filter(|front| front.life == life) {
                    front.impatient(request, attempt, &mut self.facts);
                }
            }
            Event::Connect => self.connect(),
            Event::ToGateway { connection, told } => self.told(connection, *told),
            Event::ToWorker { connection, said } => self.said(connection, *said),
            Event::LostAtGateway(connection) => self.lose_at_gateway(connection),
            Event::LostAtWorker(connection) => self.lose_at_worker(connection),
        }
    }

    // --- trouble ---

    fn trouble(&mut self) {
        let trouble = self.chance.below(9);
        self.write_down(|| format!("trouble {trouble}"));
        match trouble {
            0 => self.kill_worker(),
            1 => self.kill_gateway(),
            2 => {
                self.kill_worker();
                self.kill_gateway();
            }
            3 | 4 => {
                let changes = self.chance.between(1, 60);
                self.disk.faults(|faults| faults.dark_in = Some(changes));
            }
            5 => self.cut_wire(),
            6 => {
                self.disk.faults(|faults| faults.failing_syncs = Some(3));
                self.soon(50, 600, Event::TroubleOver);
            }
            7 => {
                self.disk.faults(|faults| faults.full = true);
                self.soon(50, 900, Event::TroubleOver);
            }
            _ => self.stop_worker(),
        }
    }

    fn trouble_over(&mut self) {
        self.disk.faults(|faults| {
            faults.full = false;
            faults.failing_syncs = None;
        });
        if self.now > TROUBLED {
            self.disk.faults(|faults| faults.dark_in = None);
            self.ending = true;
        }
    }

    fn lose_power(&mut self) {
        self.mark(&[72]);
        self.write_down(|| "the power fails".to_owned());
        self.kill_worker();
        self.kill_gateway();
        self.disk.cut_power();
    }

    fn kill_worker(&mut self) {
        let Some(working) = self.working.take() else { return };
        self.seen.worker_deaths += 1;
        self.write_down(|| format!("worker {:x} dies", working.epoch.0));
        self.disk.kill(working.process);
        self.facts.died(working.epoch, self.now * MS);
        drop(working);
        if let Some(number) = self.wire.as_ref().map(|wire| wire.number) {
            self.lose_at_worker(number);
        }
        self.soon(100, 700, Event::StartWorker);
    }

    /// It is told to end: it closes its journal and tells what it can.
    fn stop_worker(&mut self) {
        let Some(working) = &mut self.working else { return };
        let epoch = working.epoch;
        if working.rig.close().is_ok() {
            self.facts.synced(epoch);
        }
        self.tell_blocks();
        self.kill_worker();
    }

    fn kill_gateway(&mut self) {
        let Some(front) = self.front.take() else { return };
        self.seen.gateway_deaths += 1;
        self.write_down(|| "gateway dies".to_owned());
        self.disk.kill(front.process);
        self.disk.forget_shared();
        drop(front);
        if let Some(number) = self.wire.as_ref().map(|wire| wire.number) {
            self.lose_at_gateway(number);
        }
        // The worker is its child, and hears that it is gone.
        let life = self.lives;
        self.soon(5, 250, Event::Orphaned(life));
        self.soon(300, 900, Event::StartGateway);
    }

    // --- the wire ---

    fn cut_wire(&mut self) {
        let Some(number) = self.wire.as_ref().map(|wire| wire.number) else { return };
        self.seen.cuts += 1;
        self.soon(0, 60, Event::LostAtGateway(number));
        self.soon(0, 60, Event::LostAtWorker(number));
    }

    fn lose_at_gateway(&mut self, number: u64) {
        let Some(wire) = self.wire.as_mut().filter(|wire| wire.number == number) else { return };
        if std::mem::take(&mut wire.gateway_holds) {
            wire.task.abort();
            self.soon(0, 40, Event::LostAtWorker(number));
            let again = self.front.as_mut().map(|front| front.lost(number, &mut self.facts));
            for request in again.into_iter().flatten() {
                let life = self.front.as_ref().map_or(0, |front| front.life);
                self.soon(1, 30, Event::Follow { life, request });
            }
        }
        self.hang_up();
    }

    fn lose_at_worker(&mut self, number: u64) {
        let Some(wire) = self.wire.as_mut().filter(|wire| wire.number == number) else { return };
        if std::mem::take(&mut wire.worker_holds) {
            if let Some(working) = &mut self.working {
                for run in working.runs.iter_mut().filter(|run| run.connection == number) {
                    run.cancelled.get_or_insert(FinishReason::Fault);
                }
            }
            self.soon(0, 40, Event::LostAtGateway(number));
        }
        self.hang_up();
    }

    fn hang_up(&mut self) {
        if self.wire.as_ref().is_some_and(|wire| !wire.gateway_holds && !wire.worker_holds) {
            self.wire = None;
            self.soon(50, 120, Event::Connect);
        }
    }

    fn connect(&mut self) {
        let (Some(front), Some(working), None) = (&mut self.front, &self.working, &self.wire)
        else {
            return;
        };
        self.wires += 1;
        let online = self.fronts.online(working.epoch, front);
        let (blocks, receiver) = mpsc::channel(1_024);
        let (ack_sender, acks) = mpsc::channel(1_024);
        let taken = Arc::new(AtomicBool::new(false));
        let number = self.wires;
        let task = front.follow_journal(
            number,
            Arc::clone(&online),
            ReceiverStream::new(receiver),
            ack_sender,
            Arc::clone(&taken),
        );
        self.wire = Some(Connection {
            number,
            online,
            reader: working.rig.reader(),
            blocks,
            acks,
            taken,
            task,
            worker_holds: true,
            gateway_holds: true,
            arrivals: [self.now; 2],
        });
        self.tell_blocks();
    }

    fn tell(&mut self, number: u64, told: Told) {
        let delay = self.chance.between(0, 15);
        let wire = self.wire.as_mut();
        let Some(wire) = wire.filter(|wire| wire.number == number && wire.worker_holds) else {
            return;
        };
        let mut when = (self.now + delay).max(wire.arrivals[0]);
        if let Told::Block(block) = &told {
            if self.chance.percent(1) {
                // Behind what comes after it.
                self.shuffled = true;
                when += self.chance.between(1, 150);
            } else {
                wire.arrivals[0] = when;
            }
            if self.chance.percent(8) {
                self.seen.repeated += 1;
                let mut block = block.clone();
                if self.plant == Plant::PostedTwice {
                    block.block += 1;
                    if block.first_step > 0 {
                        (block.first_step, block.last_step) =
                            (block.last_step + 1, block.last_step + 1);
                    }
                }
                let told = Box::new(Told::Block(block));
                self.at(when, Event::ToGateway { connection: number, told });
            }
        } else {
            wire.arrivals[0] = when;
        }
        self.at(when, Event::ToGateway { connection: number, told: Box::new(told) });
    }

    fn say(&mut self, number: u64, said: Said) {
        let delay = self.chance.between(0, 15);
        let wire = self.wire.as_mut();
        let Some(wire) = wire.filter(|wire| wire.number == number && wire.gateway_holds) else {
            return;
        };
        let when = (self.now + delay).max(wire.arrivals[1]);
        wire.arrivals[1] = when;
        self.at(when, Event::ToWorker { connection: number, said: Box::new(said) });
    }

    fn told(&mut self, connection: u64, told: Told) {
        let Some(wire) = self.wire.as_ref().filter(|wire| wire.number == connection) else {
            return;
        };
        let (true, Some(front)) = (wire.gateway_holds, &mut self.front) else { return };
        match told {
            Told::Block(block) => {
                if wire.blocks.try_send(Ok(*block)).is_err() {
                    self.lose_at_gateway(connection);
                }
            }
            Told::Progress(attempt, usage) => front.progress(&attempt, usage),
            Told::Finished(attempt, usage) => {
                self.seen.answered += 1;
                self.diary.push(format!("{:>6} heard the end of {attempt:?}", self.now));
                front.finished(&attempt, usage, &mut self.facts);
            }
        }
    }

    fn said(&mut self, connection: u64, said: Said) {
        let holds =
            self.wire.as_ref().is_some_and(|wire| wire.number == connection && wire.worker_holds);
        let (true, Some(working)) = (holds, &mut self.working) else { return };
        match said {
            Said::Order(tenant, attempt, order) => {
                working.order((caller(tenant), attempt, connection), order, self.now);
            }
            Said::Cancel(attempt) => {
                for run in working.runs.iter_mut().filter(|run| run.attempt == attempt) {
                    run.cancelled.get_or_insert(FinishReason::Cancelled);
                }
            }
            Said::Ack(ack) => {
                let epoch = WorkerEpoch::try_from(ack.epoch).expect("it was said so");
                working.rig.acknowledge(epoch, ack.block);
            }
        }
    }

    // --- the worker ---

    fn start_worker(&mut self) {
        if self.working.is_some() {
            return;
        }
        if self.front.is_none() {
            return self.soon(20, 100, Event::StartWorker);
        }
        self.processes += 1;
        self.lives += 1;
        let (process, epoch) = (self.processes, WorkerEpoch(0xe000 + u128::from(self.lives)));
        match Working::start(self.disk.of(process), process, epoch, &self.clock) {
            Ok(working) => {
                self.facts.born(epoch, self.now * MS);
                self.write_down(|| format!("worker {:x} starts", epoch.0));
                self.working = Some(working);
                let life = self.lives;
                self.soon(5, 30, Event::Turn(life));
                self.soon(0, 100, Event::Tick(life));
                self.soon(20, 80, Event::Connect);
            }
            Err(error) => {
                self.disk.kill(process);
                if error.kind() == std::io::ErrorKind::InvalidData {
                    self.facts.wrong(format!("a journal cannot be opened: {error}"));
                }
                self.soon(100, 300, Event::StartWorker);
            }
        }
    }

    fn is_life(&self, life: u64) -> bool {
        self.lives == life && self.working.is_some()
    }

    fn turn(&mut self, life: u64) {
        let (true, Some(working)) = (self.is_life(life), &mut self.working) else { return };
        if working.rig.is_closed() {
            return;
        }
        if working.runs.is_empty() {
            if working.idle(MonotonicTime(self.now * MS)).is_err() {
                return self.kill_worker();
            }
            return self.soon(20, 60, Event::Turn(life));
        }
        if working.began(self.now).is_err() {
            return self.kill_worker();
        }
        let started = self.now;
        let (least, most) = if self.chance.percent(3) { (200, 900) } else { (3, 40) };
        self.soon(least, most, Event::Stepped { life, started });
    }

    fn stepped(&mut self, life: u64, started: u64) {
        let (true, Some(working)) = (self.is_life(life), &mut self.working) else { return };
        let table = &self.fronts.model().table;
        let Ok(stepped) = working.step(&mut self.chance, table, started, self.now) else {
            return self.kill_worker();
        };
        let epoch = working.epoch;
        self.facts.stepped(epoch, self.now * MS);
        for (attempt, connection, usage) in stepped.told {
            self.tell(connection, Told::Progress(attempt, usage));
        }
        for (connection, figures) in stepped.ended {
            let attempt = Attempt { request: figures.request, attempt: figures.attempt };
            let is_paid = figures.reason != FinishReason::Fault;
            let end = End {
                caller: figures.caller,
                attempt: attempt.clone(),
                usage: figures.usage,
                is_paid,
            };
            self.facts.ended(epoch, end);
            self.tell(connection, Told::Finished(attempt, figures.usage));
        }
        self.at(self.now, Event::Turn(life));
    }

    fn tick(&mut self, life: u64) {
        let (true, Some(working)) = (self.is_life(life), &mut self.working) else { return };
        let epoch = working.epoch;
        let segment = self.chance.between(600, 3_000);
        match working.rig.tick(segment) {
            Ok(()) => self.facts.synced(epoch),
            Err(_) if self.disk.is_dark() => return,
            // The engine ends at its next word.
            Err(_) => return self.kill_worker(),
        }
        self.tell_blocks();
        self.at(self.now + 100, Event::Tick(life));
    }

    fn tell_blocks(&mut self) {
        let mut blocks = Vec::new();
        let Some(wire) = self.wire.as_mut().filter(|wire| wire.worker_holds) else { return };
        let number = wire.number;
        loop {
            match wire.reader.next_block() {
                Ok(Some(block)) => blocks.push(block),
                Ok(None) => break,
                Err(_) if self.disk.is_dark() => break,
                Err(error) => {
                    self.facts.wrong(format!("the journal cannot be read: {error}"));
                    break;
                }
            }
        }
        for block in blocks {
            self.seen.blocks += 1;
            self.facts.handed(&block);
            let parts = block.parts();
            self.mark(&[73, parts.epoch.0 as u64, parts.number, parts.wall.nanos()]);
            self.write_down(|| {
                let ended = parts.finished.iter().map(|it| (&it.attempt.request, it.reason));
                let ended: Vec<_> = ended.collect();
                format!("told {:x}/{}: {ended:?}", parts.epoch.0, parts.number)
            });
            if self.plant == Plant::AcknowledgedTooEarly
                && let Some(working) = &self.working
            {
                working.rig.acknowledge(parts.epoch, parts.number);
            }
            self.tell(number, Told::Block(Box::new(block.into())));
        }
    }

    // --- the gateway ---

    fn start_gateway(&mut self) {
        if self.front.is_some() {
            return;
        }
        self.processes += 1;
        let disk = self.disk.of(self.processes);
        self.mounted.remount(disk);
        let path = self.mounted.path("/ledger.db");
        match self.fronts.start(self.processes, &path, self.now) {
            Ok(front) => {
                let life = front.life;
                self.front = Some(front);
                self.write_down(|| format!("gateway {life} starts"));
                self.soon(1, 10, Event::Commit(life));
                self.soon(900, 1_100, Event::Sweep(life));
                self.soon(20, 80, Event::Connect);
            }
            Err(error) => {
                self.disk.kill(self.processes);
                self.disk.forget_shared();
                if matches!(error, LedgerError::Damaged(_) | LedgerError::Format { .. }) {
                    self.facts.wrong(format!("the ledger cannot be opened: {error}"));
                }
                self.soon(100, 300, Event::StartGateway);
            }
        }
    }

    fn front(&mut self, life: u64) -> Option<&mut Front> {
        self.front.as_mut().filter(|front| front.life == life)
    }

    fn commit(&mut self, life: u64) {
        let Some(front) = self.front(life) else { return };
        let wait = front.commit();
        self.soon(wait, wait + 8, Event::Commit(life));
    }

    fn sweep(&mut self, life: u64) {
        let Some(front) = self.front.as_mut().filter(|front| front.life == life) else { return };
        front.sweep(&mut self.facts);
        self.soon(900, 1_100, Event::Sweep(life));
    }

    fn ask(&mut self) {
        let (number, tenant) = (self.chance.number(), self.chance.below(2) as usize);
        let order = Wanted {
            prompt: self.chance.between(1, 40),
            stops_after: self.chance.between(1, 30),
            most: self.chance.between(4, 40),
            budget: None,
        };
        let is_streamed = self.chance.percent(70);
        let is_left = self.chance.percent(20);
        let is_forgotten = self.chance.percent(4);
        let leaves = self.chance.between(20, 800);
        let Some(front) = &mut self.front else { return };
        // Before a worker was there nobody knows a model to ask for.
        let wire = self.wire.as_ref().filter(|wire| wire.taken.load(Ordering::Relaxed));
        front.has_model |= wire.is_some_and(|wire| wire.gateway_holds);
        if !front.has_model {
            return;
        }
        self.seen.asked += 1;
        let id = RequestId::from_random(number.into());
        let asked = front.ask(id.clone(), tenant, order, (is_streamed, is_forgotten));
        let life = front.life;
        self.fronts.remember(tenant, id);
        let Some(request) = asked else { return };
        self.soon(0, 5, Event::Follow { life, request });
        if is_left {
            self.soon(leaves, leaves, Event::Leave { life, request });
        }
    }

    /// A request waits for a place, then for a worker.
    fn follow(&mut self, life: u64, request: usize) {
        let Some(front) = self.front.as_mut().filter(|front| front.life == life) else { return };
        let wire = self.wire.as_ref().filter(|wire| {
            wire.gateway_holds && wire.taken.load(Ordering::Relaxed) && wire.online.takes_requests()
        });
        let place = wire.map(|wire| (wire.number, Arc::clone(&wire.online)));
        let number = place.as_ref().map_or(0, |place| place.0);
        match front.follow(request, place, &mut self.facts) {
            Next::Wait => self.soon(20, 50, Event::Follow { life, request }),
            Next::Say(said) => {
                self.write_down(|| format!("wire {number}: {said:?}"));
                self.say(number, said);
            }
            Next::Nothing => {}
        }
    }

    fn leave(&mut self, life: u64, request: usize) {
        let Some(front) = self.front.as_mut().filter(|front| front.life == life) else { return };
        if let Some((connection, attempt)) = front.leave(request) {
            let number = attempt.attempt;
            self.say(connection, Said::Cancel(attempt));
            let when = self.now + 10_000;
            self.at(when, Event::Impatient { life, request, attempt: number });
        }
    }

    // --- the end ---

    /// Once every request has ended and every block is in the ledger.
    fn rest(&mut self) -> Option<()> {
        let front = self.front.as_mut()?;
        let working = self.working.as_ref()?;
        if !front.is_at_rest() || !working.runs.is_empty() {
            return None;
        }
        if !working.rig.is_closed() {
            if self.chance.percent(10) {
                // Most worlds end as they are; some are woken once more.
                self.kill_gateway();
                return None;
            }
            let (epoch, now) = (working.epoch, self.now * MS);
            if working.rig.close().is_err() {
                self.facts.wrong("a journal cannot be closed in peace");
            }
            self.facts.stepped(epoch, now);
            self.facts.synced(epoch);
            self.facts.died(epoch, now);
            self.tell_blocks();
            return None;
        }
        working.rig.is_acknowledged().then_some(())
    }

    async fn judge(&mut self) {
        // What was on its way when it came to rest.
        for _ in 0..3 {
            let when = self.now + 2_500;
            self.pass(when).await;
            if let Some(front) = &mut self.front {
                front.commit();
            }
            self.settle_down().await;
        }
        let Some(front) = &mut self.front else { return };
        let reader = front.reader();
        self.facts.judge(&reader, &tenants(), CAP_NS);
        for (tenant, id) in self.fronts.asked() {
            self.facts.judge_sum(&reader, tenant, id);
        }
        // Each one that was acknowledged is there, in the same words.
        for block in self.facts.all_acknowledged() {
            let (epoch, number) = (block.parts().epoch, block.parts().number);
            let posted = front.post_again(block);
            if posted != Ok(Posted::Already) {
                self.facts.wrong(format!("block {number} of {epoch} was acknowledged: {posted:?}"));
            }
        }
        // And no hold outlives its life.
        let when = self.now + 70_000;
        self.pass(when).await;
        if let Some(front) = &mut self.front {
            front.end_of_holds(&mut self.facts);
        }
        let print = self.disk.fingerprint();
        self.mark(&[print]);
    }

    // --- the trace ---

    fn mark(&mut self, numbers: &[u64]) {
        for number in numbers {
            self.trace = (self.trace ^ number).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
    }

    fn note(&mut self, event: &Event) {
        let now = self.now;
        let (kind, first, second) = match event {
            Event::Ask => (1, 0, 0),
            Event::Trouble => (2, 0, 0),
            Event::TroubleOver => (3, 0, 0),
            Event::StartWorker => (4, 0, 0),
            Event::Turn(life) => (5, *life, 0),
            Event::Stepped { life, started } => (6, *life, *started),
            Event::Tick(life) => (7, *life, 0),
            Event::StartGateway => (8, 0, 0),
            Event::Commit(life) => (9, *life, 0),
            Event::Sweep(life) => (10, *life, 0),
            Event::Follow { life, request } => (11, *life, *request as u64),
            Event::Leave { life, request } => (12, *life, *request as u64),
            Event::Impatient { life, request, .. } => (13, *life, *request as u64),
            Event::Connect => (14, 0, 0),
            Event::ToGateway { connection, told } => match &**told {
                Told::Block(block) => (15, *connection, block.block),
                Told::Progress(_, usage) => (16, *connection, usage.completion_tokens),
                Told::Finished(_, usage) => (17, *connection, usage.attributed.nanos()),
            },
            Event::ToWorker { connection, said } => match &**said {
                Said::Order(tenant, ..) => (18, *connection, *tenant as u64),
                Said::Cancel(attempt) => (19, *connection, attempt.attempt.into()),
                Said::Ack(ack) => (20, *connection, ack.block),
            },
            Event::LostAtGateway(connection) => (21, *connection, 0),
            Event::LostAtWorker(connection) => (22, *connection, 0),
            Event::Orphaned(life) => (23, *life, 0),
        };
        self.mark(&[now, kind, first, second]);
    }
}
