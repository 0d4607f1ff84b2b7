//! Journal files on the disk: their names, what a crash left in them, and
//! their end. A name sorts by when its epoch began, then by its place in it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use tollgate_domain::{DeviceNanos, UtcTime, WorkerEpoch};

use super::build::Builder;
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

/// Makes the file at `place` with its head, on the disk before this returns.
pub(super) fn create(folder: &Path, place: Place, head: &Head) -> io::Result<(Segment, File, u64)> {
    let path = folder.join(place.file_name());
    let mut bytes = MAGIC.to_vec();
    frame::write(&Frame::Head(head.clone()), &mut bytes);
    let made =
        OpenOptions::new().read(true).write(true).create_new(true).open(&path).and_then(|file| {
            file.write_all_at(&bytes, 0)?;
            file.sync_all()?;
            sync_folder(folder)?;
            Ok(file)
        });
    let file = made.inspect_err(|_| {
        // A file without a head holds nothing and would only be in the way.
        let _ = fs::remove_file(&path);
    })?;
    let segment = Segment { path, epoch: place.epoch, last_block: None, bytes: 0 };
    Ok((segment, file, bytes.len() as u64))
}

/// Finds what earlier epochs left, oldest first, cuts torn tails and closes
/// every epoch. Calling it again changes nothing.
pub(super) fn recover(folder: &Path) -> io::Result<Vec<Segment>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .filter(|path| {
            path.as_ref().map_or(true, |path| path.extension().is_some_and(|end| end == "journal"))
        })
        .collect::<io::Result<_>>()?;
    paths.sort();
    let mut scanned = Vec::with_capacity(paths.len());
    for path in paths {
        match scan(&path)? {
            Some(file) => scanned.push((path, file)),
            None => {
                // Torn at its birth: not even its head reached the disk.
                tracing::warn!(file = %path.display(), "removed a journal file without a head");
                fs::remove_file(&path)?;
            }
        }
    }
    let mut segments = Vec::with_capacity(scanned.len());
    for index in 0..scanned.len() {
        let epoch = scanned[index].1.builder.head().epoch;
        let is_last =
            scanned.get(index + 1).is_none_or(|(_, next)| next.builder.head().epoch != epoch);
        let (path, file) = &mut scanned[index];
        settle_tail(path, file, is_last)?;
        segments.push(Segment {
            path: path.clone(),
            epoch,
            last_block: Some(file.builder.number() - 1),
            bytes: file.valid,
        });
    }
    sync_folder(folder)?;
    Ok(segments)
}

/// A file as it was found.
struct Scanned {
    builder: Builder,
    /// Bytes up to the end of its last whole frame.
    valid: u64,
    /// Bytes in it.
    length: u64,
}

fn scan(path: &Path) -> io::Result<Option<Scanned>> {
    let mut bytes = Vec::new();
    File::open(path)?.read_to_end(&mut bytes)?;
    let Some(rest) = bytes.strip_prefix(MAGIC.as_slice()) else {
        if bytes.len() >= MAGIC.len() {
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
        set_aside(path, at, next)?;
    }
    Ok(Some(Scanned { builder, valid: at as u64, length: bytes.len() as u64 }))
}

/// A torn write is the last one. Where whole frames follow, the file was
/// damaged: what comes after cannot be told any more, and is kept for people.
fn set_aside(path: &Path, at: usize, next: usize) -> io::Result<()> {
    let aside = path.with_extension("damaged");
    tracing::error!(
        file = %path.display(), offset = at, next_frame = next, kept = %aside.display(),
        "a journal is damaged: what it says after this place is not billed"
    );
    fs::copy(path, &aside)?;
    File::open(&aside)?.sync_all()
}

/// Cuts what is torn, and closes the epoch where nobody did: its shares stay
/// shares, the step that was under way is loss, what came after is nobody's.
fn settle_tail(path: &Path, file: &mut Scanned, is_last: bool) -> io::Result<()> {
    let closes = is_last && !file.builder.ended();
    if !closes && file.valid == file.length {
        return Ok(());
    }
    let handle = OpenOptions::new().write(true).open(path)?;
    if file.valid < file.length {
        let torn = file.length - file.valid;
        tracing::warn!(file = %path.display(), bytes = torn, "cut the torn end of a journal");
        handle.set_len(file.valid)?;
    }
    if closes {
        let mut bytes = Vec::new();
        let mut frames = Vec::new();
        let loss = file.builder.lost();
        if loss != DeviceNanos::ZERO {
            frames.push(Frame::Gap { idle: DeviceNanos::ZERO, loss });
        }
        let next = file.builder.utc_of(file.builder.clock());
        frames.push(Frame::Cut { next, last: true });
        for frame in frames {
            frame::write(&frame, &mut bytes);
            file.builder.apply(frame).map_err(|error| damaged(path, &error.to_string()))?;
        }
        handle.write_all_at(&bytes, file.valid)?;
        file.valid += bytes.len() as u64;
    }
    handle.sync_all()
}

pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

pub(super) fn damaged(path: &Path, what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the journal {} {what}", path.display()))
}
