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
mod feed;
mod frame;
mod store;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::watch;
use tollgate_domain::{
    Device, DeviceNanos, ModelName, MonotonicTime, UtcTime, WorkerEpoch, WorkerName,
};
use tollgate_engine::{Clock, RequestFigures, StepJournal, StepRecord};

pub(crate) use self::feed::Feed;
use self::feed::Readable;
use self::frame::{Frame, Head, Step};
use self::store::{Place, Segment};
use self::writer::{LONGEST_OPEN, Open, Writer};

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
pub(crate) struct Journal {
    shared: Arc<Shared>,
}

/// Whose the time after the last step is, when the epoch closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// The engine had nothing to do.
    Idle,
    /// It broke down in a step.
    Loss,
}

struct Shared {
    clock: Arc<dyn Clock>,
    utc: fn() -> UtcTime,
    folder: PathBuf,
    most_bytes: u64,
    state: Mutex<State>,
    /// Bytes that the gateway has not acknowledged, as the state last said:
    /// to be read without waiting for a sync.
    held: AtomicU64,
    /// Wakes the syncing thread to end.
    wake: Condvar,
    /// Grows with each sync that made something readable.
    synced: watch::Sender<u64>,
    /// Held as long as this process writes here.
    _lock: File,
}

struct State {
    /// Oldest first; the last is the one that is written.
    segments: Vec<Segment>,
    /// Blocks in the ledger, by epoch. Pruned with the epoch's last file.
    acknowledged: HashMap<WorkerEpoch, u64>,
    /// Bytes of the closed files.
    closed_bytes: u64,
    writer: Writer,
    /// Why nothing more may be written.
    failed: Option<String>,
    closed: bool,
}

impl Journal {
    /// Opens the folder, closes what earlier epochs left open and begins a
    /// new one.
    ///
    /// # Errors
    /// The disk's, and `WouldBlock` where another worker holds the folder.
    pub(crate) fn open(options: JournalOptions) -> io::Result<Self> {
        let JournalOptions {
            folder,
            epoch,
            worker,
            device,
            model,
            calibration,
            most_bytes,
            began,
            clock,
            utc,
        } = options;
        fs::create_dir_all(&folder)?;
        let lock = lock(&folder)?;
        let mut segments = store::recover(&folder)?;
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
        let writer = Writer::create(
            &folder,
            Place { began: utc_began, epoch, number: 1 },
            head,
            &mut segments,
        )?;
        let state = State {
            segments,
            acknowledged: HashMap::new(),
            closed_bytes,
            writer,
            failed: None,
            closed: false,
        };
        let shared = Shared {
            clock,
            utc,
            folder,
            most_bytes,
            held: AtomicU64::new(state.held_bytes()),
            state: Mutex::new(state),
            wake: Condvar::new(),
            synced: watch::Sender::new(0),
            _lock: lock,
        };
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
    pub(crate) fn feed(&self) -> Feed {
        Feed::new(Arc::clone(&self.shared))
    }

    /// Whether so much waits for the gateway that new requests should wait
    /// too. What runs may go on: the bound that ends the engine is further up.
    pub(crate) fn is_full(&self) -> bool {
        self.shared.held_bytes() > self.shared.most_bytes / 4 * 3
    }

    /// Whether every block is in the ledger.
    pub(crate) fn is_acknowledged(&self) -> bool {
        let state = self.shared.state();
        let last = state.writer.block - 1;
        let current = state.acknowledged.get(&state.writer.place.epoch).copied().unwrap_or(0);
        state.segments.len() == 1 && current >= last
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

struct EngineSide {
    shared: Arc<Shared>,
}

impl StepJournal for EngineSide {
    fn began(&mut self, at: MonotonicTime) -> io::Result<()> {
        self.shared.state().writer.in_step = Some(at);
        Ok(())
    }

    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let (now, utc, most) = (self.shared.clock.now(), self.shared.utc, self.shared.most_bytes);
        if self.shared.held_bytes() > most {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("{most} bytes of journal wait for the gateway"),
            ));
        }
        self.shared.append(|writer| {
            writer.step(record)?;
            if now.since(writer.block_began) >= LONGEST_OPEN {
                writer.put_cut(writer.utc_at_end(now, utc()), false);
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
                writer.open.idled = true;
            }
            Ok(())
        })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
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
    fn tell_held(&self, state: &State) {
        self.held.store(state.held_bytes(), Ordering::Relaxed);
    }

    /// Lets `put` make frames and writes them: all of them or, on an error,
    /// none, with everything as it was.
    fn append(&self, put: impl FnOnce(&mut Writer) -> io::Result<()>) -> io::Result<()> {
        self.append_to(&mut self.state(), put)
    }

    fn append_to(
        &self,
        state: &mut State,
        put: impl FnOnce(&mut Writer) -> io::Result<()>,
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
            if let Err(error) = self.tick() {
                tracing::error!(%error, "the journal cannot be kept");
            }
        }
    }

    /// One look: closes the block if it is time, syncs, starts a new file if
    /// this one is long.
    fn tick(&self) -> io::Result<()> {
        let now = self.clock.now();
        let due = {
            let state = self.state();
            state.failed.is_none() && !state.closed && state.writer.is_cut_due(now)
        };
        if due {
            self.append(|writer| {
                writer.put_cut(writer.utc_at_end(now, (self.utc)()), false);
                Ok(())
            })?;
        }
        self.mark_alive(now)?;
        self.sync()?;
        self.rotate_when(SEGMENT_BYTES)
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

    /// Brings to the disk what is written, without holding up the writer.
    fn sync(&self) -> io::Result<()> {
        let (file, length) = {
            let state = self.state();
            if state.writer.synced == state.writer.length {
                return Ok(());
            }
            (Arc::clone(&state.writer.file), state.writer.length)
        };
        let result = file.sync_data();
        let mut state = self.state();
        match result {
            Ok(()) => {
                // Only this thread starts another file, and not meanwhile.
                state.writer.synced = state.writer.synced.max(length);
                drop(state);
                self.synced.send_modify(|version| *version += 1);
                Ok(())
            }
            Err(error) => {
                state.failed = Some(error.to_string());
                Err(error)
            }
        }
    }

    /// Starts a new file once this one has so many bytes. Files hold whole
    /// blocks, so the open one is closed first; the engine waits for one sync,
    /// once in some megabytes.
    fn rotate_when(&self, bytes: u64) -> io::Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.writer.length < bytes || state.closed || state.failed.is_some() {
            return Ok(());
        }
        let next = state.writer.utc_at_end(self.clock.now(), (self.utc)());
        if state.writer.open != Open::default() {
            self.append_to(state, |writer| {
                writer.put_cut(next, false);
                Ok(())
            })?;
        }
        if let Err(error) = state.writer.file.sync_data() {
            state.failed = Some(error.to_string());
            return Err(error);
        }
        let writer = &state.writer;
        let head =
            Head { block: writer.block, clock: writer.clock, utc: next, ..writer.head.clone() };
        let place = Place { number: writer.place.number + 1, ..writer.place };
        let closed = state.segments.len() - 1;
        let mut next = Writer::create(&self.folder, place, head, &mut state.segments)?;
        next.in_step = state.writer.in_step;
        state.segments[closed].last_block = Some(state.writer.block - 1);
        state.segments[closed].bytes = state.writer.length;
        state.closed_bytes += state.writer.length;
        state.writer = next;
        self.tell_held(state);
        drop(guard);
        self.synced.send_modify(|version| *version += 1);
        Ok(())
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
        // The engine need not wait for the disk to forget them.
        for Segment { path, .. } in done {
            if let Err(error) = fs::remove_file(&path) {
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

impl State {
    fn held_bytes(&self) -> u64 {
        self.closed_bytes + self.writer.length
    }

    fn readable(&self, segment: &Segment) -> Readable {
        Readable {
            path: segment.path.clone(),
            limit: if segment.last_block.is_some() { segment.bytes } else { self.writer.synced },
            is_closed: segment.last_block.is_some(),
            acknowledged: self.acknowledged.get(&segment.epoch).copied().unwrap_or(0),
        }
    }
}

/// Takes the folder for this process.
fn lock(folder: &Path) -> io::Result<File> {
    let file = File::create(folder.join("lock"))?;
    file.try_lock().map_err(|error| match error {
        fs::TryLockError::WouldBlock => io::Error::new(
            io::ErrorKind::WouldBlock,
            format!("the journal {} is in use by another worker", folder.display()),
        ),
        fs::TryLockError::Error(error) => error,
    })?;
    Ok(file)
}

/// How often written frames are brought to the disk, and blocks closed for
/// requests that have finished.
const SYNC_EVERY: Duration = Duration::from_millis(100);
/// How often an idle worker reports that it is.
const IDLE_REPORT: Duration = Duration::from_secs(60);
/// When a new file begins.
const SEGMENT_BYTES: u64 = 8 << 20;
