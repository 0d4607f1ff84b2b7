//! The metering journal of a worker. It records the device's work and its owners,
//! on the disk, before a token of that work leaves the worker.
//!
//! The engine's thread appends a frame for each step ([`StepJournal`]). The
//! journal's own thread closes blocks and syncs every 100 ms. The gateway gets a
//! block only after its sync. A power cut can therefore only undo blocks that were
//! never sent, so a block number never stands for two different blocks. A SIGKILL
//! loses no frame that was written.
//!
//! A failed write ends the engine. So does a failed sync, permanently: after it,
//! the state of the disk is unknown.

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
use self::feed::ReadLimit;
use self::frame::{Frame, Header, Step};
use self::store::{Segment, SegmentId};
use self::writer::{LONGEST_OPEN, OpenBlock, Writer};
use crate::energy::Meter;

/// The parameters of a journal.
pub(crate) struct JournalOptions {
    /// The journal's folder; created if it is missing.
    pub(crate) folder: PathBuf,
    pub(crate) epoch: WorkerEpoch,
    pub(crate) worker: WorkerName,
    pub(crate) device: Device,
    pub(crate) model: ModelName,
    /// The version of the cost table.
    pub(crate) calibration: String,
    /// The device's energy counter.
    pub(crate) meter: Meter,
    /// The counter's value at the beginning of the epoch.
    pub(crate) counter: Option<Millijoules>,
    /// Bytes of files that the gateway has not acknowledged at most.
    pub(crate) most_bytes: u64,
    /// The beginning of the epoch on the engine's clock.
    pub(crate) began: MonotonicTime,
    /// The engine's clock.
    pub(crate) clock: Arc<dyn Clock>,
    /// The host's clock.
    pub(crate) utc: fn() -> UtcTime,
}

/// The journal of this process, with the files of earlier processes.
#[derive(Clone)]
pub(crate) struct Journal<D: Disk = OsDisk> {
    shared: Arc<Shared<D>>,
}

/// The account of the time between the last step and the end of the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// Idle time: the engine had nothing to do.
    Idle,
    /// Lost time: the engine failed during a step.
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
    /// Unacknowledged bytes according to the last change of the state. Kept beside
    /// the lock, so that reading them never waits for a sync.
    held: AtomicU64,
    /// Wakes the syncing thread when the journal closes.
    wake: Condvar,
    /// Counts the syncs that made blocks readable.
    synced: watch::Sender<u64>,
    /// The lock of the folder, held while this process writes to it.
    _lock: D::Lock,
}

struct State<F> {
    /// The files, oldest first. The last one is being written.
    segments: Vec<Segment>,
    /// The last acknowledged block of each epoch. An entry is removed with the
    /// epoch's last file.
    acknowledged: HashMap<WorkerEpoch, u64>,
    /// Bytes of the complete files.
    closed_bytes: u64,
    /// The previous file, until it is synced.
    closing: Option<Closing<F>>,
    writer: Writer<F>,
    /// The error after which nothing may be written.
    failed: Option<String>,
    closed: bool,
}

/// A complete file that is not synced yet.
struct Closing<F> {
    path: PathBuf,
    file: Arc<F>,
    length: u64,
    synced: u64,
    last_block: u64,
}

impl<D: Disk> Journal<D> {
    /// Opens the folder, closes the epochs that earlier processes left open, and
    /// begins a new epoch.
    ///
    /// # Errors
    /// The disk reports an error; `WouldBlock` if another worker uses the folder.
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
        // Recovery cuts files, so no other worker may be writing them: the lock comes
        // first.
        let lock = lock(&disk, &folder)?;
        let mut segments = store::recover(&disk, &folder)?;
        let closed_bytes = segments.iter().map(|segment| segment.bytes).sum();
        // The epoch began before this call, so the host's clock is moved back.
        let since = clock.now().0.saturating_sub(began.0);
        let utc_began = UtcTime(utc().0.saturating_sub(since));
        let header = Header {
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
            SegmentId { began: utc_began, epoch, number: 1 },
            header,
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
        // A disk that cannot sync must stop the start, not the first request.
        shared.sync()?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Starts the thread that closes blocks and syncs. The thread ends after
    /// [`Journal::close`].
    pub(crate) fn start(&self) -> io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name("journal".to_owned()).spawn(move || shared.run())
    }

    /// Returns the engine's side of the journal.
    pub(crate) fn for_engine(&self) -> Box<dyn StepJournal> {
        Box::new(EngineSide { shared: Arc::clone(&self.shared) })
    }

    /// Records device time that belongs to no tenant: warm-up and calibration.
    pub(crate) fn overhead(&self, started: MonotonicTime, busy: DeviceNanos) -> io::Result<()> {
        self.shared.append(|writer| {
            let idle = writer.idle_before(started)?;
            // The engine's steps are numbered from 1, so 0 marks other work of the
            // device.
            let step = Step { step: 0, idle, overhead: busy, shares: Vec::new() };
            writer.put_step(step, busy);
            writer.reading = self.shared.counter();
            Ok(())
        })
    }

    /// Ends the epoch and syncs. Nothing can be written afterwards.
    pub(crate) fn close(&self, tail: Tail) -> io::Result<()> {
        let now = self.shared.clock.now();
        let next = (self.shared.utc)();
        let appended = {
            let mut state = self.shared.state();
            let appended = self.shared.append_to(&mut state, |writer| {
                // The time before the running step was idle. Only the time since then
                // is lost.
                if tail == Tail::Loss {
                    writer.put_idle_before_step();
                }
                let rest = DeviceNanos(now.0.saturating_sub(writer.clock.0));
                match tail {
                    Tail::Idle => writer.put_gap(rest, DeviceNanos::ZERO),
                    Tail::Loss => writer.put_gap(DeviceNanos::ZERO, rest),
                }
                writer.reading = self.shared.counter();
                writer.close_block(next, true);
                Ok(())
            });
            // This is set even if the append failed, so that the syncing thread ends.
            state.closed = true;
            appended
        };
        self.shared.wake.notify_all();
        appended.and_then(|()| self.shared.sync())
    }

    /// Records that the gateway posted the blocks of `epoch` up to `block`, and
    /// deletes the files that hold no other blocks. A block that was never written
    /// cannot be acknowledged.
    pub(crate) fn acknowledge(&self, epoch: WorkerEpoch, block: u64) {
        self.shared.acknowledge(epoch, block);
    }

    /// Returns a reader that begins at the oldest unacknowledged block.
    pub(crate) fn feed(&self) -> Feed<D> {
        Feed::new(Arc::clone(&self.shared))
    }

    /// Returns true if new requests should wait, because many bytes are
    /// unacknowledged. Running requests may continue up to `most_bytes`.
    pub(crate) fn is_full(&self) -> bool {
        // The last quarter is kept for requests that already run. Dividing first
        // cannot overflow.
        self.shared.held_bytes() > self.shared.most_bytes / 4 * 3
    }

    /// Returns true if the epoch has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared.state().closed
    }

    /// Returns true if every block has been acknowledged.
    pub(crate) fn is_acknowledged(&self) -> bool {
        let state = self.shared.state();
        let last = state.writer.block - 1;
        // Older files are removed once they are acknowledged, so only the open file
        // may be left.
        state.segments.len() == 1 && state.acknowledged_of_epoch() >= last
    }

    /// Returns the block of this epoch with the newest record.
    pub(crate) fn newest_block(&self) -> u64 {
        let state = self.shared.state();
        let is_empty = state.writer.open == OpenBlock::default();
        state.writer.block - u64::from(is_empty)
    }

    /// Returns true if `block` of this epoch and all before it have been acknowledged, those of
    /// earlier epochs included.
    pub(crate) fn is_acknowledged_to(&self, block: u64) -> bool {
        let state = self.shared.state();
        let epoch = state.writer.id.epoch;
        let is_alone = state.segments.iter().all(|segment| segment.epoch == epoch);
        is_alone && state.acknowledged_of_epoch() >= block
    }

    /// Does one round of the syncing thread's work, for tests without that thread.
    pub(crate) fn tick(&self, segment_bytes: u64) -> io::Result<()> {
        self.shared.tick(segment_bytes)
    }

    /// Returns true while a gateway reads blocks and holds a [`Self::watch`].
    pub(crate) fn is_followed(&self) -> bool {
        self.shared.synced.receiver_count() > 0
    }

    /// Returns a receiver that changes whenever a [`Feed`] may find more blocks.
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
        // Energy that is drawn while idle must not count for the step. The idle
        // time becomes a block of its own, before the step draws power.
        let rest = at.since(state.writer.clock);
        let Some(counter) = self.shared.counter().filter(|_| rest >= LONG_REST) else {
            return Ok(());
        };
        self.shared.append_to(&mut state, |writer| {
            if writer.open != OpenBlock::default() {
                self.shared.close_block(writer);
            }
            writer.put_idle_before_step();
            writer.reading = Some(counter);
            self.shared.close_block(writer);
            Ok(())
        })
    }

    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let most = self.shared.most_bytes;
        // The error ends the engine: work that cannot be recorded cannot be billed.
        if self.shared.held_bytes() > most {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("more than {most} bytes of journal wait for the gateway"),
            ));
        }
        self.shared.append(|writer| {
            writer.step(record)?;
            writer.reading = self.shared.counter();
            if self.shared.clock.now().since(writer.block_began) >= LONGEST_OPEN {
                self.shared.close_block(writer);
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
            // Work is reported at once. Idle time alone is written rarely, so that an
            // idle worker does not fill its disk.
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
        // Ignores poisoning: frames are written whole or not at all, so the state
        // is sound after any panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the unacknowledged bytes.
    fn held_bytes(&self) -> u64 {
        // The value guards no other memory, so relaxed ordering is enough.
        self.held.load(Ordering::Relaxed)
    }

    /// Publishes the bytes that `state` holds. The caller holds the lock, so the
    /// last stored value is the latest.
    fn publish_held(&self, state: &State<D::File>) {
        self.held.store(state.held_bytes(), Ordering::Relaxed);
    }

    /// Returns the device's energy counter. The caller holds the state's lock, so
    /// that the values in the journal never decrease.
    fn counter(&self) -> Option<Millijoules> {
        self.meter.now(self.clock.now())
    }

    /// Closes the open block at the end of the last record.
    fn close_block(&self, writer: &mut Writer<D::File>) {
        let next = writer.utc_at_end(self.clock.now(), (self.utc)());
        writer.close_block(next, false);
    }

    /// Writes the frames that `put` creates: all of them or, on an error, none. An
    /// error leaves the state unchanged.
    fn append(&self, put: impl FnOnce(&mut Writer<D::File>) -> io::Result<()>) -> io::Result<()> {
        self.append_to(&mut self.state(), put)
    }

    fn append_to(
        &self,
        state: &mut State<D::File>,
        put: impl FnOnce(&mut Writer<D::File>) -> io::Result<()>,
    ) -> io::Result<()> {
        if let Some(reason) = &state.failed {
            return Err(io::Error::other(format!("the journal has failed: {reason}")));
        }
        if state.closed {
            return Err(io::Error::other("the journal is closed"));
        }
        let before = state.writer.figures();
        state.writer.frames.clear();
        let written = put(&mut state.writer).and_then(|()| state.writer.write());
        if let Err(error) = &written {
            state.writer.restore(before);
            // A partly written frame must not stay: later frames would follow it.
            if state.writer.file.set_len(state.writer.length).is_err() {
                state.failed = Some(error.to_string());
            }
        }
        self.publish_held(state);
        written
    }

    /// Runs the syncing thread until the journal is closed.
    fn run(&self) {
        loop {
            // A wait on the condition, unlike a sleep, lets `close` end the thread at
            // once.
            let (state, _) = self
                .wake
                .wait_timeout_while(self.state(), SYNC_EVERY, |state| !state.closed)
                .unwrap_or_else(PoisonError::into_inner);
            if state.closed {
                return;
            }
            // `tick` takes the lock again, and the engine must not wait for a sync.
            drop(state);
            if let Err(error) = self.tick(SEGMENT_BYTES) {
                tracing::error!(%error, "cannot write the journal; the engine stops at its next step");
            }
        }
    }

    /// Closes the block if it is due, syncs, and begins a new file if the current
    /// one has `segment_bytes`.
    fn tick(&self, segment_bytes: u64) -> io::Result<()> {
        let now = self.clock.now();
        let due = {
            let state = self.state();
            state.failed.is_none() && !state.closed && state.writer.is_close_due(now)
        };
        if due {
            self.append(|writer| {
                self.close_block(writer);
                Ok(())
            })?;
        }
        // The mark comes before the sync, so that the same sync makes the mark
        // durable.
        self.mark_alive(now)?;
        self.sync()?;
        self.rotate_when(segment_bytes)
    }

    /// Writes a mark during a long step, so that a crash in the step loses a known
    /// time.
    fn mark_alive(&self, now: MonotonicTime) -> io::Result<()> {
        let long_step = {
            let mut state = self.state();
            // A recent record already proves that the process was alive.
            let wrote = std::mem::take(&mut state.writer.wrote);
            state.failed.is_none() && !state.closed && state.writer.in_step.is_some() && !wrote
        };
        if !long_step {
            return Ok(());
        }
        self.append(|writer| {
            writer.put_idle_before_step();
            frame::write(&Frame::Alive { at: now }, &mut writer.frames);
            Ok(())
        })?;
        // The mark must not count as a record, or only every second round would write
        // one.
        self.state().writer.wrote = false;
        Ok(())
    }

    /// Syncs the written bytes without blocking the writer. The previous file comes
    /// first, so that the readable blocks have no gap.
    fn sync(&self) -> io::Result<()> {
        // The lock is released before the sync, so that the engine does not wait for
        // the disk.
        let (closing, file, number, length, is_named) = {
            let State { closing, writer, .. } = &*self.state();
            if closing.is_none() && writer.synced == writer.length {
                return Ok(());
            }
            let closing = closing.as_ref().map(|closing| Arc::clone(&closing.file));
            let file = Arc::clone(&writer.file);
            (closing, file, writer.id.number, writer.length, writer.synced > 0)
        };
        let result = closing.as_ref().map_or(Ok(()), |before| before.sync()).and_then(|()| {
            file.sync()?;
            // A name needs one sync only, together with the first bytes of the file.
            if is_named { Ok(()) } else { self.disk.sync_folder(&self.folder) }
        });
        let mut guard = self.state();
        let state = &mut *guard;
        if let Err(error) = result {
            // After a failed sync the kernel may have dropped the unwritten pages. A
            // second sync could succeed without them, so the failure is permanent.
            state.failed = Some(error.to_string());
            return Err(error);
        }
        if closing.is_some()
            && let Some(Closing { path, length, last_block, .. }) = state.closing.take()
            && let Some(closed) = state.segments.iter_mut().find(|segment| segment.path == path)
        {
            (closed.last_block, closed.bytes) = (Some(last_block), length);
        }
        // The journal may have been closed and a new file begun during the sync.
        if state.writer.id.number == number {
            // `close` syncs on another thread, so two syncs can overlap and end in
            // any order.
            state.writer.synced = state.writer.synced.max(length);
        }
        drop(guard);
        // Readers take the lock when they wake, so the lock is released by now.
        self.synced.send_modify(|version| *version += 1);
        Ok(())
    }

    /// Begins a new file once the current one has this many bytes. Files hold whole
    /// blocks, so the open block is closed first.
    ///
    /// The engine does not wait for a sync here. If the power fails before the
    /// sync, recovery finds a file that does not follow its predecessor and
    /// discards it; no block of it was sent.
    fn rotate_when(&self, bytes: u64) -> io::Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        // `state.closing` has one place, so a second file waits for the sync of the
        // first.
        if state.writer.length < bytes
            || state.closed
            || state.failed.is_some()
            || state.closing.is_some()
        {
            return Ok(());
        }
        let now = self.clock.now();
        let next = state.writer.utc_at_end(now, (self.utc)());
        // Idle time alone makes no block due, but it belongs to this file.
        if state.writer.open != OpenBlock::default()
            || state.writer.clock != state.writer.block_began
        {
            self.append_to(state, |writer| {
                writer.close_block(next, false);
                Ok(())
            })?;
        }
        let writer = &state.writer;
        let header =
            Header { block: writer.block, clock: writer.clock, utc: next, ..writer.header.clone() };
        let id = SegmentId { number: writer.id.number + 1, ..writer.id };
        let closing = Closing {
            path: state.segments[state.segments.len() - 1].path.clone(),
            file: Arc::clone(&writer.file),
            length: writer.length,
            synced: writer.synced,
            last_block: writer.block - 1,
        };
        // Each file names its owners again, so that a reader can start at any file.
        let mut next = Writer::create(&self.disk, &self.folder, id, header, &mut state.segments)?;
        // The running step will be recorded in the new file.
        next.in_step = state.writer.in_step;
        // The open energy account continues in the new file.
        (next.counter, next.reading) = (state.writer.counter, state.writer.reading);
        state.closed_bytes += closing.length;
        state.closing = Some(closing);
        state.writer = next;
        self.publish_held(state);
        // The sync below takes the lock again.
        drop(guard);
        self.sync()
    }

    fn acknowledge(&self, epoch: WorkerEpoch, block: u64) {
        let mut guard = self.state();
        let state = &mut *guard;
        let current = state.writer.id.epoch;
        let written = state
            .segments
            .iter()
            .filter(|segment| segment.epoch == epoch)
            .filter_map(|segment| segment.last_block)
            .max();
        // The open file has no last block yet, so the writer's number counts.
        let written = if epoch == current { Some(state.writer.block - 1) } else { written };
        let Some(written) = written else {
            return; // an unknown epoch, or one whose files are deleted
        };
        let known = state.acknowledged.entry(epoch).or_default();
        // A gateway must not acknowledge unwritten blocks, or they would be deleted
        // unseen later. A late, smaller number must not undo a larger one.
        *known = block.min(written).max(*known);
        let acknowledged = *known;
        let done = |segment: &mut Segment| {
            segment.epoch == epoch && segment.last_block.is_some_and(|last| last <= acknowledged)
        };
        let done: Vec<Segment> = state.segments.extract_if(.., done).collect();
        state.closed_bytes -= done.iter().map(|segment| segment.bytes).sum::<u64>();
        self.publish_held(state);
        // Without the removal, the map would grow with every restart of the worker.
        if epoch != current && state.segments.iter().all(|segment| segment.epoch != epoch) {
            state.acknowledged.remove(&epoch);
        }
        drop(guard);
        // The files are deleted without the lock, so that the engine does not wait
        // for the disk. The oldest file goes first: after a power cut, a younger
        // file that reappears alone is still valid, while an older one would look
        // like the end of the epoch.
        for Segment { path, .. } in done {
            let gone = self.disk.remove(&path).and_then(|()| self.disk.sync_folder(&self.folder));
            if let Err(error) = gone {
                tracing::warn!(%error, file = %path.display(), "cannot delete an acknowledged journal file");
            }
        }
    }

    fn readable(&self, path: &Path) -> Option<ReadLimit> {
        let state = self.state();
        state.segments.iter().find(|segment| segment.path == path).map(|it| state.readable(it))
    }

    fn readable_after(&self, path: Option<&Path>) -> Option<ReadLimit> {
        let state = self.state();
        // File names sort in the order of writing.
        state
            .segments
            .iter()
            .find(|segment| path.is_none_or(|path| segment.path.as_path() > path))
            .map(|segment| state.readable(segment))
    }
}

impl<F> State<F> {
    /// Returns the last acknowledged block of the present epoch.
    fn acknowledged_of_epoch(&self) -> u64 {
        self.acknowledged.get(&self.writer.id.epoch).copied().unwrap_or(0)
    }

    fn held_bytes(&self) -> u64 {
        self.closed_bytes + self.writer.length
    }

    fn readable(&self, segment: &Segment) -> ReadLimit {
        ReadLimit {
            path: segment.path.clone(),
            limit: match &self.closing {
                // A file is complete only after its sync, so all of it may be read.
                _ if segment.last_block.is_some() => segment.bytes,
                Some(closing) if closing.path == segment.path => closing.synced,
                // Any other file without a last block is the one that is written now.
                _ => self.writer.synced,
            },
            is_closed: segment.last_block.is_some(),
            acknowledged: self.acknowledged.get(&segment.epoch).copied().unwrap_or(0),
        }
    }
}

/// Locks the folder for this process.
fn lock<D: Disk>(disk: &D, folder: &Path) -> io::Result<D::Lock> {
    disk.lock(&folder.join("lock")).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(
            error.kind(),
            format!("the journal {} is in use by another worker", folder.display()),
        ),
        _ => error,
    })
}

/// Time between two syncs. Blocks of finished requests are closed as often.
const SYNC_EVERY: Duration = Duration::from_millis(100);
/// Idle time that becomes a block of its own if the device reports its energy.
const LONG_REST: Duration = Duration::from_secs(1);
/// Time between two blocks of an idle worker.
const IDLE_REPORT: Duration = Duration::from_secs(60);
/// Bytes after which a new file begins.
const SEGMENT_BYTES: u64 = 8 << 20;
