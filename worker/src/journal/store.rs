//! The journal's files on the disk: their names, their recovery after a crash, and
//! the end of their epochs. A name sorts by the beginning of its epoch, then by its
//! number in the epoch.

use std::io;
use std::path::{Path, PathBuf};

use tollgate_domain::{DeviceNanos, UtcTime, WorkerEpoch};

use super::build::Builder;
use super::disk::{Disk, DiskFile};
use super::frame::{self, Frame, FrameRead, Header, MAGIC};

/// A file of the journal.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) epoch: WorkerEpoch,
    /// The last block of a complete file; `None` while the file is being written.
    pub(super) last_block: Option<u64>,
    /// The bytes of a complete file.
    pub(super) bytes: u64,
}

/// The identity of a file: its epoch and its number in the epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentId {
    /// The beginning of the epoch on the host's clock.
    pub(super) began: UtcTime,
    pub(super) epoch: WorkerEpoch,
    pub(super) number: u32,
}

impl SegmentId {
    fn file_name(&self) -> String {
        format!("{:020}-{}-{:06}.journal", self.began.0, self.epoch, self.number)
    }
}

/// Creates the file `id` with its header. Neither its name nor its bytes are
/// durable before the file and the folder are synced.
pub(super) fn create<D: Disk>(
    disk: &D,
    folder: &Path,
    id: SegmentId,
    header: &Header,
) -> io::Result<(Segment, D::File, u64)> {
    let path = folder.join(id.file_name());
    let mut bytes = MAGIC.to_vec();
    frame::write(&Frame::Header(header.clone()), &mut bytes);
    let made = disk.create(&path).and_then(|file| {
        file.write_all_at(&bytes, 0)?;
        Ok(file)
    });
    let file = made.inspect_err(|error| {
        // A file without a header is useless, and its name would block the next
        // attempt.
        if error.kind() != io::ErrorKind::AlreadyExists {
            let _ = disk.remove(&path);
        }
    })?;
    let segment = Segment { path, epoch: id.epoch, last_block: None, bytes: 0 };
    Ok((segment, file, bytes.len() as u64))
}

/// Recovers the files of earlier epochs, oldest first: cuts torn ends and closes
/// every epoch. The result is synced. Recovery is idempotent.
pub(super) fn recover<D: Disk>(disk: &D, folder: &Path) -> io::Result<Vec<Segment>> {
    let mut paths = disk.list(folder)?;
    // The folder also has the lock and the copies of damaged files.
    paths.retain(|path| path.extension().is_some_and(|end| end == "journal"));
    // Names sort by epoch and number, so the files come in the order of writing.
    paths.sort();
    let mut scanned: Vec<(PathBuf, ScannedSegment)> = Vec::with_capacity(paths.len());
    for path in paths {
        match scan(disk, &path)? {
            Some(file) if scanned.last().is_some_and(|(_, before)| !before.leads_to(&file)) => {
                // Blocks are sent only from synced files, and every file before a
                // synced file is synced, so no block of this file was sent.
                let kept = keep_copy(disk, &path, &file.bytes)?;
                tracing::warn!(file = %path.display(), kept = %kept.display(), "journal file does not follow its predecessor; copied and removed it");
                disk.remove(&path)?;
            }
            Some(file) => scanned.push((path, file)),
            None => disk.remove(&path)?,
        }
    }
    let mut segments = Vec::with_capacity(scanned.len());
    for index in 0..scanned.len() {
        let epoch = scanned[index].1.builder.header().epoch;
        let is_last =
            scanned.get(index + 1).is_none_or(|(_, next)| next.builder.header().epoch != epoch);
        let (path, file) = &mut scanned[index];
        settle_tail(disk, path, file, is_last)?;
        segments.push(Segment {
            path: path.clone(),
            epoch,
            // The builder's number belongs to the next block, which has no records
            // here.
            last_block: Some(file.builder.number() - 1),
            bytes: file.bytes.len() as u64,
        });
        // The bytes are on the disk again. Many files may follow, so the memory is
        // freed now.
        file.bytes = Vec::new();
    }
    // Without this sync, removed files could return after a power cut.
    disk.sync_folder(folder)?;
    Ok(segments)
}

/// A file as recovery found it.
struct ScannedSegment {
    builder: Builder,
    /// The bytes up to the end of the last whole frame.
    bytes: Vec<u8>,
    /// Bytes after the last whole frame.
    torn: usize,
}

impl ScannedSegment {
    /// Returns true if `next` continues this file or belongs to another epoch.
    fn leads_to(&self, next: &Self) -> bool {
        let (header, next) = (self.builder.header(), next.builder.header());
        header.epoch != next.epoch
            || (self.builder.is_between_blocks() && self.builder.number() == next.block)
    }
}

/// Reads a file and corrects flipped bits in memory. Returns `None` for a file
/// without a readable header, which the caller removes.
fn scan<D: Disk>(disk: &D, path: &Path) -> io::Result<Option<ScannedSegment>> {
    let mut bytes = disk.read(path)?;
    if frame::is_newer(&bytes) {
        return Err(damaged(path, "has a newer version than this program reads"));
    }
    let mut corrections = Corrections { path, count: 0 };
    let header = corrections.header(&mut bytes);
    let Some((header, mut at)) = header else {
        report_headless(disk, path, &bytes)?;
        return Ok(None);
    };
    let mut builder = Builder::new(header);
    while let Some((frame, taken)) = corrections.frame(&mut bytes, at) {
        builder.apply(frame).map_err(|error| damaged(path, &error.to_string()))?;
        at += taken;
    }
    if let Some(next) = frame::next_after(&bytes, at) {
        // A whole frame follows the unreadable one. Pages reach the disk in any
        // order, so it is unknown if the later frames were ever synced.
        let kept = keep_copy(disk, path, &bytes)?;
        tracing::error!(
            file = %path.display(), offset = at, next_frame = next, kept = %kept.display(),
            "journal is damaged; blocks of this epoch after the offset that the ledger does not have yet are not billed"
        );
    }
    let torn = bytes.len() - at;
    bytes.truncate(at);
    Ok(Some(ScannedSegment { builder, bytes, torn }))
}

/// The flipped bits that the scan of one file corrects.
struct Corrections<'a> {
    path: &'a Path,
    count: usize,
}

impl Corrections<'_> {
    /// Reads the first bytes and the header. Returns the header and its end.
    fn header(&mut self, bytes: &mut [u8]) -> Option<(Header, usize)> {
        if frame::after_magic(bytes).is_none() {
            let bit = frame::correct_magic(bytes)?;
            self.log_bit(bit);
        }
        let (header, taken) = self.frame(bytes, MAGIC.len())?;
        let Frame::Header(header) = header else { return None };
        Some((header, MAGIC.len() + taken))
    }

    /// Reads the frame at `at`, and corrects a flipped bit in it.
    fn frame(&mut self, bytes: &mut [u8], at: usize) -> Option<(Frame, usize)> {
        let rest = bytes.get_mut(at..)?;
        if let FrameRead::Frame(frame, taken) = frame::read(rest) {
            return Some((*frame, taken));
        }
        // A file with this many damaged frames is not worth the search.
        if self.count == MOST_CORRECTED {
            return None;
        }
        let bit = frame::correct_bit(rest)?;
        self.log_bit(at * 8 + bit);
        match frame::read(&bytes[at..]) {
            FrameRead::Frame(frame, taken) => Some((*frame, taken)),
            FrameRead::End => None,
        }
    }

    /// Counts and logs a corrected bit, by its number in the file.
    fn log_bit(&mut self, bit: usize) {
        self.count += 1;
        tracing::warn!(
            file = %self.path.display(), offset = bit / 8, bit = bit % 8,
            "journal had a flipped bit; corrected it by the checksum, and no record is lost"
        );
    }
}

/// Logs that a file has no readable header, and keeps a copy of it if it may have
/// had records.
fn report_headless<D: Disk>(disk: &D, path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A power cut leaves a short file, or zeros where the first bytes should be.
    let is_torn = bytes.iter().take(MAGIC.len()).all(|&byte| byte == 0)
        || bytes.len() < MAGIC.len()
        || frame::after_magic(bytes).is_some();
    if is_torn && frame::next_after(bytes, MAGIC.len()).is_none() {
        tracing::warn!(file = %path.display(), "removed a journal file without a header");
        return Ok(());
    }
    let kept = keep_copy(disk, path, bytes)?;
    tracing::error!(
        file = %path.display(), offset = 0, kept = %kept.display(),
        "journal file has no readable header; its blocks that the ledger does not have yet are not billed"
    );
    Ok(())
}

/// Copies a damaged file, so that an admin can examine it.
fn keep_copy<D: Disk>(disk: &D, path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let aside = path.with_extension("damaged");
    // `create` fails if a copy of earlier damage exists.
    match disk.remove(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let copy = disk.create(&aside)?;
    copy.write_all_at(bytes, 0)?;
    copy.sync()?;
    Ok(aside)
}

/// Cuts the torn end, and closes the epoch if its process did not. Recorded shares
/// stay with their owners, the step that was running is lost, and the time after it
/// counts for no tenant.
///
/// All bytes are written again and synced. The bytes that a read returns need not
/// be on the disk: the process may have been killed before a sync, and after a
/// failed sync the kernel no longer knows which pages are missing.
fn settle_tail<D: Disk>(
    disk: &D,
    path: &Path,
    file: &mut ScannedSegment,
    is_last: bool,
) -> io::Result<()> {
    let handle = disk.open(path)?;
    if file.torn > 0 {
        tracing::warn!(file = %path.display(), bytes = file.torn, "cut the torn end of a journal file");
        // New frames may be shorter than the torn end, so the end is cut first.
        handle.set_len(file.bytes.len() as u64)?;
    }
    // Only the last file of an epoch can be open: every earlier file ends with a
    // whole block.
    if is_last && !file.builder.ended() {
        let mut frames = Vec::new();
        let loss = file.builder.lost();
        if loss != DeviceNanos::ZERO {
            frames.push(Frame::Gap { idle: DeviceNanos::ZERO, loss });
        }
        let next = file.builder.utc_of(file.builder.clock());
        // The energy since the last closed block is unknown.
        frames.push(Frame::CloseBlock { next, last: true, energy: None });
        for frame in frames {
            frame::write(&frame, &mut file.bytes);
            file.builder.apply(frame).map_err(|error| damaged(path, &error.to_string()))?;
        }
    }
    handle.write_all_at(&file.bytes, 0)?;
    handle.sync()
}

/// Flipped bits that are corrected in one file at most.
const MOST_CORRECTED: usize = 1_000;

pub(super) fn damaged(path: &Path, what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the journal {} {what}", path.display()))
}
