//! Tests of the journal: crashes, full disks, damaged files, and arbitrary
//! operations.

mod damage;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tempfile::TempDir;
use tollgate_domain::{
    Block, BlockParts, Caller, DeviceClass, FinishReason, KeyId, Millijoules, RequestId,
    SequenceId, TenantId, Tier, Usage,
};
use tollgate_engine::{Owner, Stages as EngineStages, StepShare};

use super::*;
use std::fs;

#[derive(Clone, Default)]
struct FakeClock(Arc<AtomicU64>);

impl Clock for FakeClock {
    fn now(&self) -> MonotonicTime {
        MonotonicTime(self.0.load(Ordering::Relaxed))
    }
}

fn utc() -> UtcTime {
    UtcTime(1_795_176_000_000_000_000)
}

const EPOCH: WorkerEpoch = WorkerEpoch(1);
const NEXT_EPOCH: WorkerEpoch = WorkerEpoch(2);
const MS: u64 = 1_000_000;

/// A journal whose clock and whose syncing thread the test controls.
struct Bench {
    folder: TempDir,
    clock: FakeClock,
    journal: Journal,
    engine: Box<dyn StepJournal>,
    meter: Meter,
    /// The device's energy counter; `None` if the device reports none.
    counter: Option<u64>,
    steps: u64,
    /// WriterSnapshot of the requests that run, by number.
    attributed: BTreeMap<u64, u64>,
}

fn options(folder: &TempDir, epoch: WorkerEpoch, clock: &FakeClock) -> JournalOptions {
    JournalOptions {
        folder: folder.path().join("journal"),
        epoch,
        worker: WorkerName::new("0").expect("a name"),
        device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: String::new() },
        model: ModelName::new("m").expect("a name"),
        calibration: "v1".into(),
        meter: Meter::default(),
        counter: None,
        most_bytes: 64 << 20,
        began: clock.now(),
        clock: Arc::new(clock.clone()),
        utc,
    }
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let clock = FakeClock::default();
        let options = options(&folder, EPOCH, &clock);
        Self::with(folder, clock, options)
    }

    /// Creates a journal whose device reports its energy from the start.
    fn metered(counter: u64) -> Self {
        let (folder, clock) = (tempfile::tempdir().expect("a folder"), FakeClock::default());
        let counter_there = Some(Millijoules(counter));
        let options = JournalOptions { counter: counter_there, ..options(&folder, EPOCH, &clock) };
        options.meter.store(clock.now(), counter_there);
        Self { counter: Some(counter), ..Self::with(folder, clock, options) }
    }

    fn with(folder: TempDir, clock: FakeClock, options: JournalOptions) -> Self {
        let meter = options.meter.clone();
        let journal = Journal::open(OsDisk, options).expect("opens");
        let (engine, attributed) = (journal.for_engine(), BTreeMap::new());
        Self { folder, clock, journal, engine, meter, counter: None, steps: 0, attributed }
    }

    /// Stores a reading of the counter.
    fn read_counter(&self) {
        self.meter.store(self.clock.now(), self.counter.map(Millijoules));
    }

    /// Runs a step after `gap`, with the device time of each request.
    fn step(&mut self, gap: u64, shares: &[(u64, u64)], overhead: u64) -> io::Result<()> {
        self.wait(gap);
        self.read_counter();
        let started = self.clock.now();
        self.engine.began(started)?;
        let busy = shares.iter().map(|&(_, ns)| ns).sum::<u64>() + overhead;
        self.wait(busy);
        self.read_counter();
        self.record(started, shares, overhead)
    }

    /// Records the step that began at `started`.
    fn record(
        &mut self,
        started: MonotonicTime,
        shares: &[(u64, u64)],
        overhead: u64,
    ) -> io::Result<()> {
        let mut all: Vec<StepShare> = shares.iter().map(|&(id, ns)| share(id, ns)).collect();
        all.push(StepShare {
            sequence: SequenceId(1_000_000),
            owner: Owner::Overhead,
            attributed: DeviceNanos(overhead),
        });
        let busy: DeviceNanos = all.iter().map(|share| share.attributed).sum();
        self.steps += 1;
        for &(id, ns) in shares {
            *self.attributed.entry(id).or_default() += ns;
        }
        self.engine.step(&StepRecord { step: self.steps, started, busy, shares: &all })
    }

    /// Begins a step now.
    fn began(&mut self) {
        self.engine.began(self.clock.now()).expect("the journal is open");
    }

    fn finish(&mut self, id: u64) {
        let attributed = DeviceNanos(self.attributed.get(&id).copied().unwrap_or(0));
        let figures = RequestFigures {
            request: RequestId::from_random(id.into()),
            attempt: 0,
            caller: caller(),
            usage: Usage { attributed, ..Usage::default() },
            stages: EngineStages::default(),
            reason: FinishReason::Stop,
            tier: tier_of(id),
        };
        self.engine.finished(self.clock.now(), &[figures]).expect("writes");
    }

    fn wait(&self, ns: u64) {
        self.clock.0.fetch_add(ns, Ordering::Relaxed);
    }

    fn tick(&self) {
        self.read_counter();
        self.journal.tick(SEGMENT_BYTES).expect("syncs");
    }

    fn blocks(&self) -> Vec<Block> {
        read_all(&self.journal)
    }

    /// Simulates a crash and opens the journal in a new process.
    fn restart(self) -> (TempDir, Journal) {
        let Self { folder, clock, journal, engine, .. } = self;
        drop((engine, journal));
        let journal = Journal::open(OsDisk, options(&folder, NEXT_EPOCH, &clock)).expect("opens");
        (folder, journal)
    }
}

fn read_all(journal: &Journal) -> Vec<Block> {
    let mut feed = journal.feed();
    std::iter::from_fn(|| feed.next().expect("reads")).collect()
}

fn caller() -> Caller {
    Caller { tenant: TenantId::new("acme").expect("a name"), key: KeyId::new("k").expect("a name") }
}

/// Returns the tier of a request: every third one is of the batch tier.
fn tier_of(id: u64) -> Tier {
    if id % 3 == 2 { Tier::Batch } else { Tier::Interactive }
}

fn share(id: u64, ns: u64) -> StepShare {
    StepShare {
        sequence: SequenceId(id),
        owner: Owner::Request {
            caller: caller(),
            request: RequestId::from_random(id.into()),
            attempt: 0,
            tier: tier_of(id),
        },
        attributed: DeviceNanos(ns),
    }
}

/// Asserts that the blocks are numbered from 1 and cover `wall` without gaps.
fn assert_tiles(blocks: &[Block], epoch: WorkerEpoch, wall: u64) {
    let mut step = 0;
    for (index, block) in blocks.iter().enumerate() {
        let parts = block.parts();
        assert_eq!((parts.epoch, parts.number), (epoch, index as u64 + 1));
        if parts.first_step > 0 {
            assert_eq!(parts.first_step, step + 1);
            step = parts.last_step;
        }
    }
    let total: DeviceNanos = blocks.iter().map(|block| block.parts().wall).sum();
    assert_eq!(total, DeviceNanos(wall));
}

#[test]
fn block_closes_at_request_end_after_sync() {
    let mut bench = Bench::new();
    bench.step(5, &[(1, 100), (2, 50)], 7).expect("writes");
    bench.tick();
    assert_eq!(bench.blocks(), vec![], "nothing has ended");
    bench.step(3, &[(1, 10)], 0).expect("writes");
    bench.finish(1);
    assert_eq!(bench.blocks(), vec![], "nothing is synced");
    bench.tick();
    let blocks = bench.blocks();
    assert_tiles(&blocks, EPOCH, 175);
    let parts = blocks[0].parts();
    assert_eq!((parts.idle.nanos(), parts.overhead.nanos(), parts.loss.nanos()), (8, 7, 0));
    let shares: Vec<u64> = parts.shares.iter().map(|share| share.attributed.nanos()).collect();
    assert_eq!(shares, [110, 50]);
    let tiers: Vec<Tier> = parts.shares.iter().map(|share| share.tier).collect();
    assert_eq!(tiers, [tier_of(1), tier_of(2)]);
    assert_eq!(parts.finished[0].tier, tier_of(1));
    assert_eq!(parts.finished[0].usage.attributed, DeviceNanos(110));
    assert_eq!(parts.finished[0].finished, UtcTime(parts.started.0 + 175));
    assert!(!parts.last_of_epoch);
}

/// Returns the energy of each block.
fn drawn(blocks: &[Block]) -> Vec<Option<u64>> {
    blocks.iter().map(|block| block.parts().energy.map(Millijoules::millijoules)).collect()
}

#[test]
fn block_energy_is_the_counters_change() {
    let mut bench = Bench::metered(1_000);
    let counters = [
        (Some(1_300), Some(300)),
        (Some(1_300), Some(0)),
        (None, None),            // the device stops reporting
        (Some(2_000), None),     // the energy in between is unknown
        (Some(2_050), Some(50)), // known again from there
        (Some(40), None),        // the driver was reloaded
        (Some(45), Some(5)),
        (Some(u64::MAX), None), // no device draws that
        (Some(90), None),
        (Some(100), Some(10)),
    ];
    let mut expected = Vec::new();
    for (id, (counter, energy)) in counters.into_iter().enumerate() {
        bench.counter = counter;
        bench.step(MS, &[(id as u64, MS)], 0).expect("writes");
        bench.finish(id as u64);
        bench.tick();
        expected.push(energy);
    }
    assert_eq!(drawn(&bench.blocks()), expected);
    // A block without duration has no energy; the next block has it.
    bench.counter = Some(107);
    bench.finish(99);
    bench.tick();
    bench.counter = Some(111);
    bench.step(0, &[(50, MS)], 0).expect("writes");
    bench.journal.shared.rotate_when(0).expect("rotates");
    bench.counter = Some(120);
    bench.step(0, &[(50, MS)], 0).expect("writes");
    bench.finish(50);
    bench.tick();
    expected.extend([None, Some(11), Some(9)]);
    assert_eq!(drawn(&bench.blocks()), expected);
    // The energy of a block that recovery closed is unknown.
    bench.counter = Some(500);
    bench.step(0, &[(51, MS)], 0).expect("writes");
    let (_folder, next) = bench.restart();
    expected.push(None);
    assert_eq!(drawn(&read_all(&next)), expected);
}

#[test]
fn stale_counter_gives_no_energy() {
    let mut bench = Bench::metered(10);
    bench.counter = Some(20);
    bench.step(0, &[(1, MS)], 0).expect("writes");
    bench.wait(3_000 * MS);
    bench.engine.idle(bench.clock.now()).expect("writes");
    bench.journal.tick(SEGMENT_BYTES).expect("syncs");
    assert_eq!(drawn(&bench.blocks()), [None]);
}

/// If the device reports its energy, long idle time is a block of its own: its
/// energy is not shared with the steps around it.
#[test]
fn long_idle_time_keeps_its_energy() {
    let mut bench = Bench::metered(0);
    bench.counter = Some(30);
    bench.step(0, &[(1, 40 * MS)], 0).expect("writes");
    bench.wait(2_000 * MS);
    bench.counter = Some(190);
    bench.read_counter();
    bench.began();
    let started = bench.clock.now();
    // The syncing thread runs during the step.
    for counter in [220, 250, 265] {
        bench.wait(120 * MS);
        bench.counter = Some(counter);
        bench.tick();
    }
    bench.record(started, &[(1, 360 * MS)], 0).expect("writes");
    bench.finish(1);
    bench.counter = Some(900); // of what comes after it
    bench.tick();
    let blocks = bench.blocks();
    assert_eq!(drawn(&blocks), [Some(30), Some(160), Some(75)]);
    let idle: Vec<u64> = blocks.iter().map(|block| block.parts().idle.nanos() / MS).collect();
    assert_eq!(idle, [0, 2_000, 0]);
    assert_tiles(&blocks, EPOCH, 2_400 * MS);
}

/// A step that was queued on the device before the last one was recorded began
/// before that one ended. The time between is not idle.
#[test]
fn queued_step_begins_at_previous_end() {
    let mut bench = Bench::metered(0);
    let ahead = bench.clock.now();
    bench.step(0, &[(1, 5 * MS)], 0).expect("writes");
    bench.wait(1_500 * MS); // the process is held up, not the device
    bench.counter = Some(500);
    bench.read_counter();
    bench.engine.began(ahead).expect("the journal is open");
    bench.tick();
    bench.wait(200 * MS);
    bench.tick();
    let end = bench.clock.now().since(MonotonicTime(0)).as_nanos() as u64;
    bench.record(MonotonicTime(5 * MS), &[(1, end - 5 * MS)], 0).expect("writes");
    bench.finish(1);
    bench.tick();
    assert_tiles(&bench.blocks(), EPOCH, end);
    assert_eq!(bench.blocks().iter().map(|it| it.parts().idle.nanos()).sum::<u64>(), 0);
}

#[test]
fn journal_reads_previous_versions() {
    for version in [1, 2] {
        let mut bench = Bench::new();
        // Both requests are interactive: these versions knew no other tier.
        bench.step(5, &[(1, 100)], 7).expect("writes");
        bench.finish(1);
        bench.tick();
        bench.step(5, &[(3, 100)], 7).expect("writes");
        let before = bench.blocks();
        let file = bench.journal.shared.state().segments[0].path.clone();
        let mut bytes = fs::read(&file).expect("reads");
        assert_eq!(bytes[..8], *b"tgjrnl\x00\x03");
        bytes[7] = version;
        fs::write(&file, &bytes).expect("writes");
        let (_folder, next) = bench.restart();
        let found = read_all(&next);
        assert_eq!(found[..1], before);
        assert_eq!(drawn(&found), [None, None]);
        assert_eq!(fs::read(&file).expect("reads")[..8], bytes[..8], "it stays what it was");
    }
}

#[test]
fn block_closes_after_one_second_and_when_idle() {
    let mut bench = Bench::new();
    bench.step(0, &[(1, 600 * MS)], 0).expect("writes");
    bench.tick();
    assert_eq!(bench.blocks().len(), 0);
    bench.step(0, &[(1, 600 * MS)], 0).expect("writes");
    bench.tick();
    assert_eq!(bench.blocks().len(), 1);
    bench.step(0, &[(1, MS)], 0).expect("writes");
    bench.wait(MS);
    bench.engine.idle(bench.clock.now()).expect("writes");
    bench.tick();
    assert_eq!(bench.blocks().len(), 2);
    // Idle time alone closes a block once a minute.
    for second in 1..=120 {
        bench.wait(1_000 * MS);
        bench.engine.idle(bench.clock.now()).expect("writes");
        bench.tick();
        assert_eq!(bench.blocks().len(), 2 + second / 60);
    }
    assert_tiles(&bench.blocks(), EPOCH, bench.clock.now().0);
}

#[test]
fn journal_close_ends_the_epoch() {
    let mut bench = Bench::new();
    bench.journal.overhead(MonotonicTime(0), DeviceNanos(40)).expect("writes");
    bench.wait(40);
    bench.step(2, &[(1, 8)], 0).expect("writes");
    bench.wait(50);
    bench.journal.close(Tail::Idle).expect("closes");
    let blocks = bench.blocks();
    assert_tiles(&blocks, EPOCH, 100);
    let last = blocks.last().expect("a block").parts();
    assert!(last.last_of_epoch);
    assert_eq!((last.overhead.nanos(), last.idle.nanos(), last.loss.nanos()), (40, 52, 0));
    assert!(bench.step(0, &[(1, 1)], 0).is_err(), "nothing after the end");
    let (_folder, next) = bench.restart();
    assert_eq!(read_all(&next), blocks, "the next process reads the same blocks");
}

/// A SIGKILL loses only the current step, as `loss`.
#[test]
fn recovery_closes_crashed_epoch() {
    let mut bench = Bench::new();
    bench.step(0, &[(1, 100 * MS)], 0).expect("writes");
    bench.tick();
    bench.began();
    bench.wait(250 * MS); // a long step is under way
    bench.tick();
    bench.wait(30 * MS); // the process dies in the step
    let (_folder, next) = bench.restart();
    let blocks = read_all(&next);
    assert_tiles(&blocks, EPOCH, 350 * MS);
    let parts = blocks[0].parts();
    assert!(parts.last_of_epoch);
    assert_eq!(parts.shares[0].attributed, DeviceNanos(100 * MS), "a share stays a share");
    assert_eq!(parts.loss, DeviceNanos(250 * MS));
    assert_eq!(parts.finished, vec![]);
}

/// The first step after idle time can be lost like any other. The idle time stays
/// idle.
#[test]
fn crash_loses_only_the_current_step() {
    for ended_by_itself in [false, true] {
        let mut bench = Bench::new();
        bench.step(0, &[(1, 100 * MS)], 0).expect("writes");
        bench.finish(1);
        bench.engine.idle(bench.clock.now()).expect("writes");
        bench.tick();
        bench.wait(7_000 * MS);
        bench.began();
        bench.wait(250 * MS);
        bench.tick();
        if ended_by_itself {
            // The watchdog closes the step as lost, then the process ends.
            bench.journal.close(Tail::Loss).expect("closes");
        }
        let (_folder, next) = bench.restart();
        let blocks = read_all(&next);
        assert_tiles(&blocks, EPOCH, 7_350 * MS);
        let sum = |figure: fn(&BlockParts) -> DeviceNanos| {
            blocks.iter().map(|block| figure(block.parts()).nanos()).sum::<u64>()
        };
        assert_eq!(sum(|parts| parts.idle), 7_000 * MS);
        assert_eq!(sum(|parts| parts.loss), 250 * MS);
        assert!(blocks.last().is_some_and(|block| block.parts().last_of_epoch));
    }
}

/// A file that ends during a step includes the idle time before the step.
#[test]
fn rotation_keeps_idle_time_before_long_step() {
    let mut bench = Bench::new();
    bench.step(0, &[(1, 100)], 0).expect("writes");
    bench.finish(1);
    bench.tick();
    bench.wait(1_300 * MS);
    bench.began();
    bench.wait(250 * MS);
    bench.tick();
    bench.journal.shared.rotate_when(0).expect("rotates");
    let sent = bench.blocks();
    bench.journal.close(Tail::Loss).expect("closes");
    assert_tiles(&bench.blocks(), EPOCH, 1_550 * MS + 100);
    let (_folder, next) = bench.restart();
    let blocks = read_all(&next);
    assert_eq!(blocks[..sent.len()], sent[..]);
    assert_tiles(&blocks, EPOCH, 1_550 * MS + 100);
}

/// Wherever a write is torn, the whole frames before it are kept, blocks that were
/// sent stay the same, and the epoch balances and ends.
#[test]
fn recovery_cuts_torn_tail_at_last_frame() {
    let mut bench = Bench::new();
    bench.step(1, &[(1, 100)], 0).expect("writes");
    bench.finish(1);
    bench.tick();
    let sent = bench.blocks();
    let synced = bench.journal.shared.state().writer.synced as usize;
    bench.step(2, &[(2, 30), (3, 4)], 5).expect("writes");
    bench.finish(2);
    bench.step(3, &[(3, 7)], 0).expect("writes");
    let path = bench.journal.shared.state().segments[0].path.clone();
    let name = path.file_name().expect("a name").to_owned();
    let bytes = fs::read(&path).expect("reads");
    assert!(bytes.len() > synced);
    for length in synced..=bytes.len() {
        let folder = tempfile::tempdir().expect("a folder");
        let there = folder.path().join("journal");
        fs::create_dir(&there).expect("a folder");
        fs::write(there.join(&name), &bytes[..length]).expect("writes");
        let clock = FakeClock::default();
        let journal = Journal::open(OsDisk, options(&folder, NEXT_EPOCH, &clock)).expect("opens");
        let blocks = read_all(&journal);
        assert_eq!(blocks[..sent.len()], sent[..], "at {length}");
        assert!(blocks.last().expect("a block").parts().last_of_epoch);
        let wall = blocks.iter().map(|block| block.parts().wall.nanos()).sum();
        assert_tiles(&blocks, EPOCH, wall);
        drop(journal);
        // A second crash during recovery changes nothing.
        let again = Journal::open(OsDisk, options(&folder, WorkerEpoch(3), &clock)).expect("opens");
        let old: Vec<Block> =
            read_all(&again).into_iter().filter(|block| block.parts().epoch == EPOCH).collect();
        assert_eq!(old, blocks, "at {length}");
    }
}

/// Damage before whole frames is not taken for a torn end.
#[test]
fn recovery_keeps_copy_of_damaged_file() {
    let mut bench = Bench::new();
    for step in 1..=20 {
        bench.step(step, &[(step, 100)], 0).expect("writes");
        bench.finish(step);
        bench.tick();
    }
    let path = bench.journal.shared.state().segments[0].path.clone();
    let name = path.file_name().expect("a name").to_owned();
    let bytes = fs::read(&path).expect("reads");
    for (flipped, aside) in [(bytes.len() / 2, true), (bytes.len() - 1, false)] {
        let mut damaged = bytes.clone();
        damaged[flipped] ^= 0x11;
        let folder = tempfile::tempdir().expect("a folder");
        let there = folder.path().join("journal");
        fs::create_dir(&there).expect("a folder");
        fs::write(there.join(&name), &damaged).expect("writes");
        let journal = Journal::open(OsDisk, options(&folder, NEXT_EPOCH, &FakeClock::default()))
            .expect("opens");
        let blocks = read_all(&journal);
        let wall = blocks.iter().map(|block| block.parts().wall.nanos()).sum();
        assert_tiles(&blocks, EPOCH, wall);
        let kept = there.join(&name).with_extension("damaged");
        assert_eq!(kept.exists(), aside, "byte {flipped} of {}", bytes.len());
        if aside {
            assert!(fs::read(&kept).expect("reads") == damaged, "the whole file is kept");
        }
    }
}

#[test]
fn recovery_removes_file_without_header() {
    for length in 0..40 {
        let bench = Bench::new();
        let path = bench.journal.shared.state().segments[0].path.clone();
        let bytes = fs::read(&path).expect("reads");
        let clock = bench.clock.clone();
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("journal")).expect("a folder");
        let torn = folder.path().join("journal").join(path.file_name().expect("a name"));
        fs::write(&torn, &bytes[..length]).expect("writes");
        let journal = Journal::open(OsDisk, options(&folder, NEXT_EPOCH, &clock)).expect("opens");
        assert_eq!(read_all(&journal), vec![]);
        assert!(!torn.exists());
    }
}

#[test]
fn acknowledge_deletes_only_acknowledged_files() {
    let mut bench = Bench::new();
    bench.step(0, &[(1, 10)], 0).expect("writes");
    bench.finish(1);
    bench.tick();
    bench.step(0, &[(2, 10)], 0).expect("writes");
    bench.finish(2);
    let (folder, next) = bench.restart();
    let files = || fs::read_dir(folder.path().join("journal")).expect("lists").count();
    assert_eq!(files(), 3, "the old epoch, the new one and the lock");
    next.acknowledge(EPOCH, 1);
    let left: Vec<u64> = read_all(&next).iter().map(|block| block.parts().number).collect();
    assert_eq!((files(), left), (3, vec![2]));
    // Acknowledgements of blocks and of an epoch that do not exist.
    next.acknowledge(NEXT_EPOCH, 99);
    next.acknowledge(WorkerEpoch(77), 1);
    assert_eq!(files(), 3);
    next.acknowledge(EPOCH, 99);
    assert_eq!((files(), read_all(&next)), (2, vec![]));
    next.close(Tail::Idle).expect("closes");
    assert!(!next.is_acknowledged());
    next.acknowledge(NEXT_EPOCH, 1);
    assert!(next.is_acknowledged());
}

#[test]
fn journal_bounds_unacknowledged_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = FakeClock::default();
    let options = JournalOptions { most_bytes: 2_000, ..options(&folder, EPOCH, &clock) };
    let mut bench = Bench::with(folder, clock, options);
    let error = (0..1_000).find_map(|id| bench.step(0, &[(id, 1)], 0).err()).expect("it fills");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    // The frames that were written are whole nevertheless.
    let written = bench.journal.shared.state().writer.clock.0;
    let (_folder, next) = bench.restart();
    assert_tiles(&read_all(&next), EPOCH, written);
}

#[test]
fn journal_refuses_unbalanced_steps() {
    let mut bench = Bench::new();
    let shares = [share(1, 100)];
    let mut record =
        StepRecord { step: 1, started: MonotonicTime(0), busy: DeviceNanos(99), shares: &shares };
    assert!(bench.engine.step(&record).is_err());
    record.busy = DeviceNanos(100);
    bench.engine.step(&record).expect("writes");
    // Two clock readings may overlap by less than the grain, but not by more.
    bench.engine.step(&StepRecord { step: 2, ..record }).expect("within the grain");
    let long = [share(1, 5 * MS)];
    let record = StepRecord { busy: DeviceNanos(5 * MS), shares: &long, step: 3, ..record };
    bench.engine.step(&record).expect("writes");
    let early = StepRecord { step: 4, started: MonotonicTime(2 * MS), ..record };
    assert!(bench.engine.step(&early).is_err());
}

#[test]
fn journal_folder_has_one_writer() {
    let bench = Bench::new();
    let error = Journal::open(OsDisk, options(&bench.folder, NEXT_EPOCH, &bench.clock))
        .err()
        .expect("it is taken");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

#[derive(Clone, Debug)]
enum Act {
    Step {
        gap: u32,
        shares: Vec<(u8, u32)>,
        overhead: u32,
    },
    Finish(u8),
    Idle(u32),
    /// The device draws this many millijoules.
    Draw(u32),
    Tick,
    Rotate,
}

fn any_act() -> impl Strategy<Value = Act> {
    let shares = proptest::collection::vec((0_u8..8, 0_u32..500_000_000), 0..5);
    prop_oneof![
        5 => (0_u32..2_000_000_000, shares, 0_u32..1_000)
            .prop_map(|(gap, shares, overhead)| Act::Step { gap, shares, overhead }),
        2 => (0_u8..8).prop_map(Act::Finish),
        1 => (0_u32..2_000_000_000).prop_map(Act::Idle),
        2 => (0_u32..1_000_000).prop_map(Act::Draw),
        4 => Just(Act::Tick),
        1 => Just(Act::Rotate),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// After any operations, blocks cover the epoch exactly, and every share and
    /// every millijoule arrives once. A reader that follows, a late reader and the
    /// next process see the same blocks.
    #[test]
    fn blocks_cover_epoch_and_balance(acts in proptest::collection::vec(any_act(), 1..60)) {
        let mut bench = Bench::metered(77);
        let mut follower = bench.journal.feed();
        let mut followed = Vec::new();
        let mut given = 0_u64;
        // A finished request gets no further shares: another request follows it.
        let mut living: [u64; 8] = std::array::from_fn(|id| id as u64);
        for act in acts {
            match act {
                Act::Step { gap, shares, overhead } => {
                    // A sequence is in a step once at most.
                    let shares: BTreeMap<u64, u64> = shares
                        .iter()
                        .map(|&(id, ns)| (living[usize::from(id)], ns.into()))
                        .collect();
                    let shares: Vec<(u64, u64)> = shares.into_iter().collect();
                    given += shares.iter().map(|&(_, ns)| ns).sum::<u64>();
                    bench.step(gap.into(), &shares, overhead.into()).expect("writes");
                }
                Act::Finish(id) => {
                    bench.finish(living[usize::from(id)]);
                    living[usize::from(id)] += 8;
                }
                Act::Idle(ns) => {
                    bench.wait(ns.into());
                    bench.read_counter();
                    bench.engine.idle(bench.clock.now()).expect("writes");
                }
                Act::Draw(energy) => bench.counter = bench.counter.map(|it| it + u64::from(energy)),
                Act::Tick => bench.tick(),
                Act::Rotate => {
                    bench.read_counter();
                    bench.journal.shared.sync().expect("syncs");
                    bench.journal.shared.rotate_when(0).expect("rotates");
                }
            }
            while let Some(block) = follower.next().expect("reads") {
                followed.push(block);
            }
        }
        bench.wait(1); // in no time nothing is drawn
        bench.read_counter();
        let wall = bench.clock.now().0;
        bench.journal.close(Tail::Idle).expect("closes");
        while let Some(block) = follower.next().expect("reads") {
            followed.push(block);
        }
        assert_tiles(&followed, EPOCH, wall);
        let shares: u64 = followed
            .iter()
            .flat_map(|block| &block.parts().shares)
            .map(|share| share.attributed.nanos())
            .sum();
        prop_assert_eq!(shares, given);
        let drew: u64 = drawn(&followed).into_iter().flatten().sum();
        prop_assert_eq!(Some(77 + drew), bench.counter);
        prop_assert_eq!(&bench.blocks(), &followed);
        drop(follower); // it keeps the folder
        let (_folder, next) = bench.restart();
        prop_assert_eq!(read_all(&next), followed);
    }
}
