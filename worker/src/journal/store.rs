//! Journal files on the disk: their names, what a crash left in them, and
//! their end. A name sorts by when its epoch began, then by its place in it.

use std::io;
use std::path::{Path, PathBuf};

use tollgate_domain::{DeviceNanos, UtcTime, WorkerEpoch};

use super::build::Builder;
use super::disk::{Disk, DiskFile};
use super::frame::{self, Found, Frame, Head, MAGIC};

/// A file of the journal.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) epoch: WorkerEpoch,
    /// Its last block, once no more are written to it.
    pub(super) last_block: Option<u64>,
    /// Its valid bytes, once no more are written to it.
    pub(super) bytes: u64,
}

/// Which file of which epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// When the epoch began, by the host's clock.
    pub(super) began: UtcTime,
    pub(super) epoch: WorkerEpoch,
    pub(super) number: u32,
}

impl Place {
    fn file_name(&self) -> String {
        format!("{:020}-{}-{:06}.journal", self.began.0, self.epoch, self.number)
    }
}

/// Makes the file at `place` with its head. Neither its name nor its bytes are
/// on the disk before the file and the folder are synced.
pub(super) fn create<D: Disk>(
    disk: &D,
    folder: &Path,
    place: Place,
    head: &Head,
) -> io::Result<(Segment, D::File, u64)> {
    let path = folder.join(place.file_name());
    let mut bytes = MAGIC.to_vec();
    frame::write(&Frame::Head(head.clone()), &mut bytes);
    let made = disk.create(&path).and_then(|file| {
        file.write_all_at(&bytes, 0)?;
        Ok(file)
    });
    let file = made.inspect_err(|error| {
        // A file without a head holds nothing and would only be in the way.
        if error.kind() != io::ErrorKind::AlreadyExists {
            let _ = disk.remove(&path);
        }
    })?;
    let segment = Segment { path, epoch: place.epoch, last_block: None, bytes: 0 };
    Ok((segment, file, bytes.len() as u64))
}

/// Finds what earlier epochs left, oldest first, cuts torn tails and closes
/// every epoch; what it answers is on the disk. Calling it again changes
/// nothing.
pub(super) fn recover<D: Disk>(disk: &D, folder: &Path) -> io::Result<Vec<Segment>> {
    let mut paths = disk.list(folder)?;
    paths.retain(|path| path.extension().is_some_and(|end| end == "journal"));
    paths.sort();
    let mut scanned: Vec<(PathBuf, Scanned)> = Vec::with_capacity(paths.len());
    for path in paths {
        match scan(disk, &path)? {
            Some(file) if scanned.last().is_some_and(|(_, before)| !before.leads_to(&file)) => {
                // What was handed out stood in synced files, so this was not.
                let kept = set_aside(disk, &path, &file.bytes)?;
                tracing::warn!(file = %path.display(), kept = %kept.display(), "a journal file lost the one before it");
                disk.remove(&path)?;
            }
            Some(file) => scanned.push((path, file)),
            None => {
                // Torn at its birth: not even its head reached the disk.
                tracing::warn!(file = %path.display(), "removed a journal file without a head");
                disk.remove(&path)?;
            }
        }
    }
    let mut segments = Vec::with_capacity(scanned.len());
    for index in 0..scanned.len() {
        let epoch = scanned[index].1.builder.head().epoch;
        let is_last =
            scanned.get(index + 1).is_none_or(|(_, next)| next.builder.head().epoch != epoch);
        let (path, file) = &mut scanned[index];
        settle_tail(disk, path, file, is_last)?;
        segments.push(Segment {
            path: path.clone(),
            epoch,
            last_block: Some(file.builder.number() - 1),
            bytes: file.bytes.len() as u64,
        });
        file.bytes = Vec::new();
    }
    disk.sync_folder(folder)?;
    Ok(segments)
}

/// A file as it was found.
struct Scanned {
    builder: Builder,
    /// Up to the end of its last whole frame.
    bytes: Vec<u8>,
    /// Bytes behind that.
    torn: usize,
}

impl Scanned {
    /// Whether `next` begins where this ends, or is another epoch's.
    fn leads_to(&self, next: &Self) -> bool {
        let (head, next) = (self.builder.head(), next.builder.head());
        head.epoch != next.epoch
            || (self.builder.is_between_blocks() && self.builder.number() == next.block)
    }
}

fn scan<D: Disk>(disk: &D, path: &Path) -> io::Result<Option<Scanned>> {
    let mut bytes = disk.read(path)?;
    let Some(rest) = frame::after_magic(&bytes) else {
        // A power cut can leave the length of a file without its first bytes.
        if bytes.iter().take(MAGIC.len()).any(|&byte| byte != 0) && bytes.len() >= MAGIC.len() {
            return Err(damaged(path, "is not a journal of this version"));
        }
        return Ok(None);
    };
    let Found::Frame(head, taken) = frame::read(rest) else {
        return Ok(None);
    };
    let Frame::Head(head) = *head else {
        return Err(damaged(path, "does not begin with a head"));
    };
    let mut builder = Builder::new(head);
    let mut at = MAGIC.len() + taken;
    while let Found::Frame(frame, taken) = frame::read(&bytes[at..]) {
        builder.apply(*frame).map_err(|error| damaged(path, &error.to_string()))?;
        at += taken;
    }
    if let Some(next) = frame::next_after(&bytes, at) {
        // A torn write is the last one, but pages reach the disk in any order:
        // whether whole frames behind it were ever synced, nobody can tell.
        let kept = set_aside(disk, path, &bytes)?;
        tracing::error!(
            file = %path.display(), offset = at, next_frame = next, kept = %kept.display(),
            "a journal is damaged: what it says after this place is not billed"
        );
    }
    let torn = bytes.len() - at;
    bytes.truncate(at);
    Ok(Some(Scanned { builder, bytes, torn }))
}

/// What cannot be told any more is kept for people.
fn set_aside<D: Disk>(disk: &D, path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let aside = path.with_extension("damaged");
    match disk.remove(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let copy = disk.create(&aside)?;
    copy.write_all_at(bytes, 0)?;
    copy.sync()?;
    Ok(aside)
}

/// Cuts what is torn, and closes the epoch where nobody did: its shares stay
/// shares, the step that was under way is loss, what came after is nobody's.
///
/// All of it is written anew and synced. What a file seems to hold need not be
/// on the disk: its writer may have been killed before a sync, and after one
/// that failed the kernel no longer knows what is missing.
fn settle_tail<D: Disk>(
    disk: &D,
    path: &Path,
    file: &mut Scanned,
    is_last: bool,
) -> io::Result<()> {
    let handle = disk.open(path)?;
    if file.torn > 0 {
        tracing::warn!(file = %path.display(), bytes = file.torn, "cut the torn end of a journal");
        handle.set_len(file.bytes.len() as u64)?;
    }
    if is_last && !file.builder.ended() {
        let mut frames = Vec::new();
        let loss = file.builder.lost();
        if loss != DeviceNanos::ZERO {
            frames.push(Frame::Gap { idle: DeviceNanos::ZERO, loss });
        }
        let next = file.builder.utc_of(file.builder.clock());
        // What was drawn since the last cut, nobody knows any more.
        frames.push(Frame::Cut { next, last: true, energy: None });
        for frame in frames {
            frame::write(&frame, &mut file.bytes);
            file.builder.apply(frame).map_err(|error| damaged(path, &error.to_string()))?;
        }
    }
    handle.write_all_at(&file.bytes, 0)?;
    handle.sync()
}

pub(super) fn damaged(path: &Path, what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the journal {} {what}", path.display()))
}
