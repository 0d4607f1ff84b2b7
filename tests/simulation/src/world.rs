//! One run: a machine with a worker and a gateway, a wire between them, and
//! failures. The earliest event in a queue happens next, and the seed determines
//! every random choice.

mod gateway;
mod trouble;
mod wire;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Duration, Instant};
use tollgate_domain::block::Attempt;
use tollgate_domain::{Usage, WorkerEpoch};
use tollgate_ledger::Posted;
use tollgate_wire::v1::{JournalAck, JournalBlock};
use tollgate_worker::test_harness::BlockReader;

use super::chance::Chance;
use super::disk::{Counted, SimDisk};
use super::facts::Facts;
use super::gateway::{CAP_NS, Gateway, Gateways, TaskEnd, tenants};
use super::sqlite::Mounted;
use super::worker::{MS, SimulatedClock, Wanted, Working};
use tollgate_serving::worker_identity::WorkerError;
use tollgate_serving::workers::ConnectedWorker;

/// A planted bug, which the checks must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlantedBug {
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

/// The result of a run.
#[derive(Debug)]
pub(super) struct Outcome {
    /// A hash of all events, in order.
    pub(super) trace: u64,
    /// Failed checks.
    pub(super) wrong: Vec<String>,
    pub(super) seen: Seen,
    pub(super) disk: Counted,
    /// Important events in order, for people.
    pub(super) diary: Vec<String>,
}

/// Numbers of events.
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

/// An event of the simulation.
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
    /// The worker notices that its gateway is gone.
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
        message: Box<WorkerMessage>,
    },
    ToWorker {
        connection: u64,
        message: Box<GatewayMessage>,
    },
    LostAtGateway(u64),
    LostAtWorker(u64),
}

/// A message from a worker to a gateway.
#[derive(Debug)]
enum WorkerMessage {
    Block(Box<JournalBlock>),
    Progress(Attempt, Usage),
    Finished(Attempt, Usage),
}

/// A message from a gateway to a worker.
#[derive(Debug)]
pub(super) enum GatewayMessage {
    Order(usize, Attempt, Wanted),
    Cancel(Attempt),
    Ack(JournalAck),
}

/// A connection, while an end of it is open.
struct Connection {
    number: u64,
    online: Arc<ConnectedWorker>,
    reader: BlockReader<SimDisk>,
    blocks: mpsc::Sender<Result<JournalBlock, tonic::Status>>,
    acks: mpsc::Receiver<JournalAck>,
    taken: Arc<AtomicBool>,
    task: AbortHandle,
    worker_holds: bool,
    gateway_holds: bool,
    /// The arrival time of the last message in each direction.
    arrivals: [u64; 2],
}

/// The state of a run.
pub(super) struct World {
    chance: Chance,
    plant: PlantedBug,
    queue: BTreeMap<(u64, u64), Event>,
    counter: u64,
    now: u64,
    origin: Instant,
    clock: SimulatedClock,
    disk: SimDisk,
    gateways: Gateways,
    working: Option<Working>,
    gateway: Option<Gateway>,
    wire: Option<Connection>,
    wires: u64,
    processes: u64,
    lives: u64,
    /// True if messages were sent out of order, which a gateway rejects.
    shuffled: bool,
    ending: bool,
    facts: Facts,
    seen: Seen,
    trace: u64,
    diary: Vec<String>,
    // Last field: every connection of SQLite must be dropped before.
    mounted: Mounted,
}

/// Time in which clients come and failures happen, milliseconds.
const TROUBLED: u64 = 4_000;
const LONGEST_DIARY: usize = 300;
/// Time in which all work must end after that, milliseconds.
const PATIENCE: u64 = 40_000;

impl World {
    pub(super) fn new(seed: u64, plant: PlantedBug) -> Self {
        let mut chance = Chance::new(seed);
        let disk = SimDisk::new(chance.fork());
        disk.faults(|faults| {
            faults.lying = plant == PlantedBug::NoSync;
            faults.cuts_too_much = plant == PlantedBug::CutTooEarly;
        });
        let mounted = Mounted::new(&disk, chance.fork());
        let mut world = Self {
            chance,
            plant,
            queue: BTreeMap::new(),
            counter: 0,
            now: 0,
            origin: Instant::now(),
            clock: SimulatedClock::default(),
            disk,
            gateways: Gateways::new(),
            working: None,
            gateway: None,
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

    /// Runs to the end and checks the result.
    pub(super) async fn run(mut self) -> Outcome {
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
        let violations = self.gateways.violations();
        if violations > 0 && !self.shuffled {
            self.facts.wrong(format!("an honest worker was distrusted {violations} times"));
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

    /// Runs the woken tasks and handles their results.
    async fn settle_down(&mut self) {
        for _ in 0..4 {
            tokio::task::yield_now().await;
            self.hear_acks();
        }
        while let Some(ended) = self.gateway.as_mut().and_then(Gateway::ended_task) {
            match ended {
                TaskEnd::Followed(number, error) => {
                    if matches!(error, WorkerError::InvalidReport(_)) && !self.shuffled {
                        self.facts.wrong(format!("an honest worker was rejected: {error}"));
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
            let epoch = WorkerEpoch::try_from(ack.epoch.clone()).expect("an epoch");
            self.mark(&[71, epoch.0 as u64, ack.block]);
            self.write_down(|| format!("acknowledged {:x}/{}", epoch.0, ack.block));
            self.facts.acknowledged(epoch, ack.block);
            self.send_to_worker(number, GatewayMessage::Ack(ack));
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
                if let Some(gateway) = living(&mut self.gateway, life) {
                    gateway.impatient(request, attempt, &mut self.facts);
                }
            }
            Event::Connect => self.connect(),
            Event::ToGateway { connection, message } => {
                self.receive_at_gateway(connection, *message)
            }
            Event::ToWorker { connection, message } => self.receive_at_worker(connection, *message),
            Event::LostAtGateway(connection) => self.lose_at_gateway(connection),
            Event::LostAtWorker(connection) => self.lose_at_worker(connection),
        }
    }

    /// True once every request has ended and every block is in the ledger.
    fn rest(&mut self) -> Option<()> {
        let gateway = self.gateway.as_mut()?;
        let working = self.working.as_ref()?;
        if !gateway.is_at_rest() || !working.runs.is_empty() {
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
            self.send_blocks();
            return None;
        }
        working.rig.is_acknowledged().then_some(())
    }

    async fn judge(&mut self) {
        // Messages that were still on their way.
        for _ in 0..3 {
            let when = self.now + 2_500;
            self.pass(when).await;
            if let Some(gateway) = &mut self.gateway {
                gateway.commit();
            }
            self.settle_down().await;
        }
        let Some(gateway) = &mut self.gateway else { return };
        let reader = gateway.reader();
        self.facts.judge(&reader, &tenants(), CAP_NS);
        for (tenant, id) in self.gateways.asked() {
            self.facts.judge_sum(&reader, tenant, id);
        }
        // Each acknowledged block is in the ledger, unchanged.
        for block in self.facts.all_acknowledged() {
            let (epoch, number) = (block.parts().epoch, block.parts().number);
            let posted = gateway.post_again(block);
            if posted != Ok(Posted::Already) {
                self.facts.wrong(format!("block {number} of {epoch} was acknowledged: {posted:?}"));
            }
        }
        // No hold outlives its deadline.
        let when = self.now + 70_000;
        self.pass(when).await;
        if let Some(gateway) = &mut self.gateway {
            gateway.end_of_holds(&mut self.facts);
        }
        let print = self.disk.fingerprint();
        self.mark(&[print]);
    }

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
            Event::ToGateway { connection, message } => match &**message {
                WorkerMessage::Block(block) => (15, *connection, block.block),
                WorkerMessage::Progress(_, usage) => (16, *connection, usage.completion_tokens),
                WorkerMessage::Finished(_, usage) => (17, *connection, usage.attributed.nanos()),
            },
            Event::ToWorker { connection, message } => match &**message {
                GatewayMessage::Order(tenant, ..) => (18, *connection, *tenant as u64),
                GatewayMessage::Cancel(attempt) => (19, *connection, attempt.attempt.into()),
                GatewayMessage::Ack(ack) => (20, *connection, ack.block),
            },
            Event::LostAtGateway(connection) => (21, *connection, 0),
            Event::LostAtWorker(connection) => (22, *connection, 0),
            Event::Orphaned(life) => (23, *life, 0),
        };
        self.mark(&[now, kind, first, second]);
    }
}

/// Returns the gateway, if it still is incarnation `life`.
fn living(gateway: &mut Option<Gateway>, life: u64) -> Option<&mut Gateway> {
    gateway.as_mut().filter(|gateway| gateway.life == life)
}
