//! The worker's metering journal: what the device did and for whom, on the
//! disk before anyone hears of a token.
//!
//! The engine's thread appends a frame for each step ([`StepJournal`]); a
//! thread of the journal's own closes blocks and syncs every 100 ms. A block
//! is handed to the gateway only after its sync: what a power cut could undo
//! was never posted, so no block number ever means two things. A SIGKILL loses
//! no frame that was written.
//!
//! A write that fails ends the engine. A sync that fails does too, for good:
//! nobody knows what the disk kept.

mod build;
mod disk;
mod feed;
mod frame;
mod store;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::watch;
use tollgate_domain::{
    Device, DeviceNanos, Millijoules, ModelName, MonotonicTime, UtcTime, WorkerEpoch, WorkerName,
};
use tollgate_engine::{Clock, RequestFigures, StepJournal, StepRecord};

pub use self::disk::{Disk, DiskFile, OsDisk};
pub(crate) use self::feed::Feed;
use self::feed::Readable;
use self::frame::{Frame, Head, Step};
use self::store::{Place, Segment};
use self::writer::{LONGEST_OPEN, Open, Writer};
use crate::energy::Meter;

/// What a journal is told at its start.
pub(crate) struct JournalOptions {
    /// Its folder; made if there is none.
    pub(crate) folder: PathBuf,
    pub(crate) epoch: WorkerEpoch,
    pub(crate) worker: WorkerName,
    pub(crate) device: Device,
    pub(crate) model: ModelName,
    /// Version of the cost table.
    pub(crate) calibration: String,
    /// What the device draws.
    pub(crate) meter: Meter,
    /// What it said where the epoch begins.
    pub(crate) counter: Option<Millijoules>,
    /// Bytes of files that the gateway has not acknowledged.
    pub(crate) most_bytes: u64,
    /// When the epoch begins, on the engine's clock.
    pub(crate) began: MonotonicTime,
    /// The engine's clock.
    pub(crate) clock: Arc<dyn Clock>,
    /// The host's clock.
    pub(crate) utc: fn() -> UtcTime,
}

/// The journal of this process, and what earlier ones left.
#[derive(Clone)]
pub(crate) struct Journal<D: Disk = OsDisk> {
    shared: Arc<Shared<D>>,
}

/// Whose the time after the last step is, when the epoch closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// The engine had nothing to do.
    Idle,
    /// It broke down in a step.
    Loss,
}

struct Shared<D: Disk> {
    disk: D,
    clock: Arc<dyn Clock>,
    utc: fn() -> UtcTime,
    meter: Meter,
    folder: PathBuf,
    most_bytes: u64,
    state: Mutex<State<D::File>>,
    /// Bytes that the gateway has not acknowledged, as the state last said:
    /// to be read without waiting for a sync.
    held: AtomicU64,
    /// Wakes the syncing thread to end.
    wake: Condvar,
    /// Grows with each sync that made something readable.
    synced: watch::Sender<u64>,
    /// Held as long as this process writes here.
    _lock: D::Lock,
}

struct State<F> {
    /// Oldest first; the last is the one that is written.
    segments: Vec<Segment>,
    /// Blocks in the ledger, by epoch. Pruned with the epoch's last file.
    acknowledged: HashMap<WorkerEpoch, u64>,
    /// Bytes of the files that nothing more is written to.
    closed_bytes: u64,
    /// The file before the one that is written, until it is synced.
    closing: Option<Closing<F>>,
    writer: Writer<F>,
    /// Why nothing more may be written.
    failed: Option<String>,
    closed: bool,
}

/// A file that nothing more is written to and that is not synced yet.
struct Closing<F> {
    path: PathBuf,
    file: Arc<F>,
    length: u64,
    synced: u64,
    last_block: u64,
}

impl<D: Disk> Journal<D> {
    /// Opens the folder, closes what earlier epochs left open and begins a
    /// new one.
    ///
    /// # Errors
    /// The disk's, and `WouldBlock` where another worker holds the folder.
    pub(crate) fn open(disk: D, options: JournalOptions) -> io::Result<Self> {
        let JournalOptions {
            folder,
            epoch,
            worker,
            device,
            model,
            calibration,
            meter,
            counter,
            most_bytes,
            began,
            clock,
            utc,
        } = options;
        disk.make_folder(&folder)?;
        let lock = lock(&disk, &folder)?;
        let mut segments = store::recover(&disk, &folder)?;
        let closed_bytes = segments.iter().map(|segment| segment.bytes).sum();
        let since = clock.now().0.saturating_sub(began.0);
        let utc_began = UtcTime(utc().0.saturating_sub(since));
        let head = Head {
            epoch,
            worker,
            device,
            model,
            calibration,
            block: 1,
            clock: began,
            utc: utc_began,
        };
        let mut writer = Writer::create(
            &disk,
            &folder,
            Place { began: utc_began, epoch, number: 1 },
            head,
            &mut segments,
        )?;
        (writer.counter, writer.reading) = (counter, counter);
        let state = State {
            segments,
            acknowledged: HashMap::new(),
            closed_bytes,
            closing: None,
            writer,
            failed: None,
            closed: false,
        };
        let shared = Shared {
            disk,
            clock,
            utc,
            meter,
            folder,
            most_bytes,
            held: AtomicU64::new(state.held_bytes()),
            state: Mutex::new(state),
            wake: Condvar::new(),
            synced: watch::Sender::new(0),
            _lock: lock,
        };
        shared.sync()?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Starts the thread that closes blocks and syncs. It ends after
    /// [`Journal::close`].
    pub(crate) fn start(&self) -> io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name("journal".to_owned()).spawn(move || shared.run())
    }

    /// What the engine writes to.
    pub(crate) fn for_engine(&self) -> Box<dyn StepJournal> {
        Box::new(EngineSide { shared: Arc::clone(&self.shared) })
    }

    /// Books device time that no tenant owns: warm-up and calibration.
    pub(crate) fn overhead(&self, started: MonotonicTime, busy: DeviceNanos) -> io::Result<()> {
        self.shared.append(|writer| {
            let idle = writer.idle_before(started)?;
            let step = Step { step: 0, idle, overhead: busy, shares: Vec::new() };
            writer.put_step(step, busy);
            writer.reading = self.shared.counter();
            Ok(())
        })
    }

    /// Ends the epoch and syncs. Nothing can be written after it.
    pub(crate) fn close(&self, tail: Tail) -> io::Result<()> {
        let now = self.shared.clock.now();
        let next = (self.shared.utc)();
        let appended = {
            let mut state = self.shared.state();
            let appended = self.shared.append_to(&mut state, |writer| {
                if tail == Tail::Loss {
                    writer.put_idle_before_step();
                }
                let rest = DeviceNanos(now.0.saturating_sub(writer.clock.0));
                match tail {
                    Tail::Idle => writer.put_gap(rest, DeviceNanos::ZERO),
                    Tail::Loss => writer.put_gap(DeviceNanos::ZERO, rest),
                }
                writer.reading = self.shared.counter();
                writer.put_cut(next, true);
                Ok(())
            });
            state.closed = true;
            appended
        };
        self.shared.wake.notify_all();
        appended.and_then(|()| self.shared.sync())
    }

    /// Blocks of `epoch` up to `block` are in the ledger: files that hold no
    /// other are deleted. What was never sent cannot be acknowledged.
    pub(crate) fn acknowledge(&self, epoch: WorkerEpoch, block: u64) {
        self.shared.acknowledge(epoch, block);
    }

    /// Reads from the oldest block that is not acknowledged.
    pub(crate) fn feed(&self) -> Feed<D> {
        Feed::new(Arc::clone(&self.shared))
    }

    /// Whether so much waits for the gateway that new requests should wait
    /// too. What runs may go on: the bound that ends the engine is further up.
    pub(crate) fn is_full(&self) -> bool {
        self.shared.held_bytes() > self.shared.most_bytes / 4 * 3
    }

    /// Whether its epoch has been ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared.state().closed
    }

    /// Whether every block is in the ledger.
    pub(crate) fn is_acknowledged(&self) -> bool {
        let state = self.shared.state();
        let last = state.writer.block - 1;
        let current = state.acknowledged.get(&state.writer.place.epoch).copied().unwrap_or(0);
        state.segments.len() == 1 && current >= last
    }

    /// One look of the syncing thread, for who has none.
    pub(crate) fn tick(&self, segment_bytes: u64) -> io::Result<()> {
        self.shared.tick(segment_bytes)
    }

    /// Whether anybody takes blocks: who follows holds a [`Self::watch`].
    pub(crate) fn is_followed(&self) -> bool {
        self.shared.synced.receiver_count() > 0
    }

    /// Changes whenever a [`Feed`] may find more.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.shared.synced.subscribe()
    }
}

struct EngineSide<D: Disk> {
    shared: Arc<Shared<D>>,
}

impl<D: Disk> StepJournal for EngineSide<D> {
    fn began(&mut self, at: MonotonicTime) -> io::Result<()> {
        let mut state = self.shared.state();
        state.writer.in_step = Some(at);
        // What is drawn at rest is no step's: it is cut off here, before the
        // step draws anything.
        let rest = at.since(state.writer.clock);
        let Some(counter) = self.shared.counter().filter(|_| rest >= LONG_REST) else {
            return Ok(());
        };
        self.shared.append_to(&mut state, |writer| {
            if writer.open != Open::default() {
                self.shared.put_cut(writer);
            }
            writer.put_idle_before_step();
            writer.reading = Some(counter);
            self.shared.put_cut(writer);
            Ok(())
        })
    }

    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let most = self.shared.most_bytes;
        if self.shared.held_bytes() > most {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("{most} bytes of journal wait for the gateway"),
            ));
        }
        self.shared.append(|writer| {
            writer.step(record)?;
            writer.reading = self.shared.counter();
            if self.shared.clock.now().since(writer.block_began) >= LONGEST_OPEN {
                self.shared.put_cut(writer);
            }
            Ok(())
        })
    }

    fn finished(&mut self, at: MonotonicTime, requests: &[RequestFigures]) -> io::Result<()> {
        self.shared.append(|writer| {
            for request in requests {
                writer.finished(at, request);
            }
            Ok(())
        })
    }

    fn idle(&mut self, now: MonotonicTime) -> io::Result<()> {
        self.shared.append(|writer| {
            writer.in_step = None;
            let waited = now.since(writer.clock);
            let reports = writer.open.steps || writer.open.finished > 0;
            if reports || waited >= IDLE_REPORT {
                writer.put_gap(DeviceNanos(waited.as_nanos() as u64), DeviceNanos::ZERO);
                writer.reading = self.shared.counter();
                writer.open.idled = true;
            }
            Ok(())
        })
    }
}

impl<D: Disk> Shared<D> {
    fn state(&self) -> MutexGuard<'_, State<D::File>> {
        // Frames are written whole or not at all, so the state is sound
        // whatever panicked elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that the gateway has not acknowledged.
    fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Says what `state` holds; its lock is held, so the last word is the
    /// latest.
    fn tell_held(&self, state: &State<D::File>) {
        self.held.store(state.held_bytes(), Ordering::Relaxed);
    }

    /// The device's energy counter now. Read with the state's lock held, so that
    /// what is booked later never says less.
    fn counter(&self) -> Option<Millijoules> {
        self.meter.now(self.clock.now())
    }

    /// Ends the block where the records end.
    fn put_cut(&self, writer: &mut Writer<D::File>) {
        let next = writer.utc_at_end(self.clock.now(), (self.utc)());
        writer.put_cut(next, false);
    }

    /// Lets `put` make frames and writes them: all of them or, on an error,
    /// none, with everything as it was.
    fn append(&self, put: impl FnOnce(&mut Writer<D::File>) -> io::Result<()>) -> io::Result<()> {
        self.append_to(&mut self.state(), put)
    }

    fn append_to(
        &self,
        state: &mut State<D::File>,
        put: impl FnOnce(&mut Writer<D::File>) -> io::Result<()>,
    ) -> io::Result<()> {
        if let Some(reason) = &state.failed {
            return Err(io::Error::other(format!("the journal failed before: {reason}")));
        }
        if state.closed {
            return Err(io::Error::other("the journal is closed"));
        }
        let before = state.writer.figures();
        state.writer.frames.clear();
        let written = put(&mut state.writer).and_then(|()| state.writer.write());
        if let Err(error) = &written {
            state.writer.restore(before);
            if state.writer.file.set_len(state.writer.length).is_err() {
                state.failed = Some(error.to_string());
            }
        }
        self.tell_held(state);
        written
    }

    /// The syncing thread.
    fn run(&self) {
        loop {
            let (state, _) = self
                .wake
                .wait_timeout_while(self.state(), SYNC_EVERY, |state| !state.closed)
                .unwrap_or_else(PoisonError::into_inner);
            if state.closed {
                return;
            }
            drop(state);
            if let Err(error) = self.tick(SEGMENT_BYTES) {
                tracing::error!(%error, "the journal cannot be kept");
            }
        }
    }

    /// One look: closes the block if it is time, syncs, starts a new file if
    /// this one is long.
    fn tick(&self, segment_bytes: u64) -> io::Result<()> {
        let now = self.clock.now();
        let due = {
            let state = self.state();
            state.failed.is_none() && !state.closed && state.writer.is_cut_due(now)
        };
        if due {
            self.append(|writer| {
                self.put_cut(writer);
                Ok(())
            })?;
        }
        self.mark_alive(now)?;
        self.sync()?;
        self.rotate_when(segment_bytes)
    }

    /// A step that lasts leaves a mark, so that a crash in it is a loss of
    /// known length.
    fn mark_alive(&self, now: MonotonicTime) -> io::Result<()> {
        let long_step = {
            let mut state = self.state();
            let stirred = std::mem::take(&mut state.writer.stirred);
            state.failed.is_none() && !state.closed && state.writer.in_step.is_some() && !stirred
        };
        if !long_step {
            return Ok(());
        }
        self.append(|writer| {
            writer.put_idle_before_step();
            frame::write(&Frame::Alive { at: now }, &mut writer.frames);
            Ok(())
        })?;
        self.state().writer.stirred = false;
        Ok(())
    }

    /// Brings to the disk what is written, without holding up the writer: the
    /// file before this one first, so that what can be read has no gap.
    fn sync(&self) -> io::Result<()> {
        let (closing, file, number, length, is_named) = {
            let State { closing, writer, .. } = &*self.state();
            if closing.is_none() && writer.synced == writer.length {
                return Ok(());
            }
            let closing = closing.as_ref().map(|closing| Arc::clone(&closing.file));
            let file = Arc::clone(&writer.file);
            (closing, file, writer.place.number, writer.length, writer.synced > 0)
        };
        let result = closing.as_ref().map_or(Ok(()), |before| before.sync()).and_then(|()| {
            file.sync()?;
            if is_named { Ok(()) } else { self.disk.sync_folder(&self.folder) }
        });
        let mut guard = self.state();
        let state = &mut *guard;
        if let Err(error) = result {
            state.failed = Some(error.to_string());
            return Err(error);
        }
        if closing.is_some()
            && let Some(Closing { path, length, last_block, .. }) = state.closing.take()
            && let Some(closed) = state.segments.iter_mut().find(|segment| segment.path == path)
        {
            (closed.last_block, closed.bytes) = (Some(last_block), length);
        }
        // Meanwhile the journal may have been closed, and another file begun.
        if state.writer.place.number == number {
            state.writer.synced = state.writer.synced.max(length);
        }
        drop(guard);
        self.synced.send_modify(|version| *version += 1);
        Ok(())
    }

    /// Starts a new file once this one has so many bytes. Files hold whole
    /// blocks, so the open one is closed first. The engine waits for no sync:
    /// should the power fail before this one, the next process finds a file
    /// that does not follow the one before it, and nothing of either was
    /// handed out.
    fn rotate_when(&self, bytes: u64) -> io::Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.writer.length < bytes
            || state.closed
            || state.failed.is_some()
            || state.closing.is_some()
        {
            return Ok(());
        }
        let now = self.clock.now();
        let next = state.writer.utc_at_end(now, (self.utc)());
        // Idle time alone makes no block due, and is of this file all the same.
        if state.writer.open != Open::default() || state.writer.clock != state.writer.block_began {
            self.append_to(state, |writer| {
                writer.put_cut(next, false);
                Ok(())
            })?;
        }
        let writer = &state.writer;
        let head =
            Head { block: writer.block, clock: writer.clock, utc: next, ..writer.head.clone() };
        let place = Place { number: writer.place.number + 1, ..writer.place };
        let closing = Closing {
            path: state.segments[state.segments.len() - 1].path.clone(),
            file: Arc::clone(&writer.file),
            length: writer.length,
            synced: writer.synced,
            last_block: writer.block - 1,
        };
        let mut next = Writer::create(&self.disk, &self.folder, place, head, &mut state.segments)?;
        next.in_step = state.writer.in_step;
        (next.counter, next.reading) = (state.writer.counter, state.writer.reading);
        state.closed_bytes += closing.length;
        state.closing = Some(closing);
        state.writer = next;
        self.tell_held(state);
        drop(guard);
        self.sync()
    }

    fn acknowledge(&self, epoch: WorkerEpoch, block: u64) {
        let mut guard = self.state();
        let state = &mut *guard;
        let current = state.writer.place.epoch;
        let written = state
            .segments
            .iter()
            .filter(|segment| segment.epoch == epoch)
            .filter_map(|segment| segment.last_block)
            .max();
        let written = if epoch == current { Some(state.writer.block - 1) } else { written };
        let Some(written) = written else {
            return; // an epoch that is unknown or done with
        };
        let known = state.acknowledged.entry(epoch).or_default();
        *known = block.min(written).max(*known);
        let acknowledged = *known;
        let done = |segment: &mut Segment| {
            segment.epoch == epoch && segment.last_block.is_some_and(|last| last <= acknowledged)
        };
        let done: Vec<Segment> = state.segments.extract_if(.., done).collect();
        state.closed_bytes -= done.iter().map(|segment| segment.bytes).sum::<u64>();
        self.tell_held(state);
        if epoch != current && state.segments.iter().all(|segment| segment.epoch != epoch) {
            state.acknowledged.remove(&epoch);
        }
        drop(guard);
        // The engine need not wait for the disk to forget them. It forgets the
        // oldest first: a younger one that came back alone after a power cut
        // would still be whole, an older one would seem to be the end.
        for Segment { path, .. } in done {
            let gone = self.disk.remove(&path).and_then(|()| self.disk.sync_folder(&self.folder));
            if let Err(error) = gone {
                tracing::warn!(%error, file = %path.display(), "a journal file stays");
            }
        }
    }

    fn readable(&self, path: &Path) -> Option<Readable> {
        let state = self.state();
        state.segments.iter().find(|segment| segment.path == path).map(|it| state.readable(it))
    }

    fn readable_after(&self, path: Option<&Path>) -> Option<Readable> {
        let state = self.state();
        // Names sort in the order of writing.
        state
            .segments
            .iter()
            .find(|segment| path.is_none_or(|path| segment.path.as_path() > path))
            .map(|segment| state.readable(segment))
    }
}

impl<F> State<F> {
    fn held_bytes(&self) -> u64 {
        self.closed_bytes + self.writer.length
    }

    fn readable(&self, segment: &Segment) -> Readable {
        Readable {
            path: segment.path.clone(),
            limit: match &self.closing {
                _ if segment.last_block.is_some() => segment.bytes,
                Some(closing) if closing.path == segment.path => closing.synced,
                _ => self.writer.synced,
            },
            is_closed: segment.last_block.is_some(),
            acknowledged: self.acknowledged.get(&segment.epoch).copied().unwrap_or(0),
        }
    }
}

/// Takes the folder for this process.
fn lock<D: Disk>(disk: &D, folder: &Path) -> io::Result<D::Lock> {
    disk.lock(&folder.join("lock")).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(
            error.kind(),
            format!("the journal {} is in use by another worker", folder.display()),
        ),
        _ => error,
    })
}

/// How often written frames are brought to the disk, and blocks closed for
/// requests that have finished.
const SYNC_EVERY: Duration = Duration::from_millis(100);
/// A rest that is a block of its own, where the device tells what it draws.
const LONG_REST: Duration = Duration::from_secs(1);
/// How often an idle worker reports that it is.
const IDLE_REPORT: Duration = Duration::from_secs(60);
/// When a new file begins.
const SEGMENT_BYTES: u64 = 8 << 20;
