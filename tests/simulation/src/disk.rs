//! A simulated disk. Programs see a cache of pages; a power cut leaves only what
//! had reached the disk.
//!
//! The model: a page that was written is dirty until a sync of its file, or
//! until the kernel writes it back on its own, at any time and in any order. A
//! power cut keeps of each dirty page the old or the new 512 bytes of each
//! sector, or tears one at a byte; the length of a file is the old one, the
//! new one or one between, with zeros where no data came. Each created or removed
//! name is kept or lost, unless its folder was synced. A failed sync leaves pages
//! that seem clean and are not on the disk; only another write makes them dirty
//! again. A full disk refuses writes that make files longer.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate_worker::test_harness;

use super::chance::Chance;
use super::sqlite::Shared;

const PAGE: usize = 4096;
const SECTOR: usize = 512;

/// The disk of one machine; clones share it.
#[derive(Clone)]
pub(super) struct SimDisk {
    inner: Arc<Mutex<Inner>>,
    /// The process that uses this clone. A killed process writes no more.
    process: u64,
}

struct Inner {
    chance: Chance,
    files: Vec<Content>,
    /// The files as programs see them.
    names: BTreeMap<PathBuf, usize>,
    /// The files as a power cut leaves them.
    durable_names: BTreeMap<PathBuf, usize>,
    locks: BTreeMap<PathBuf, u64>,
    killed: BTreeSet<u64>,
    faults: Faults,
    counted: Counted,
    /// True after a power failure.
    dark: bool,
}

/// The planned failures of the disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// The number of changes until the power fails.
    pub(super) dark_in: Option<u64>,
    /// One sync of so many fails.
    pub(super) failing_syncs: Option<u64>,
    /// True while no file can grow.
    pub(super) full: bool,
    /// A planted bug: syncs do nothing and report success.
    pub(super) lying: bool,
    /// A planted bug: a reader of a journal with a torn end loses the last whole
    /// record as well.
    pub(super) cuts_too_much: bool,
}

/// The numbers of failures so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) syncs: u64,
    pub(super) failed_syncs: u64,
    pub(super) refused: u64,
    pub(super) power_cuts: u64,
    /// Sectors that power cuts reverted.
    pub(super) lost_sectors: u64,
}

#[derive(Default)]
struct Content {
    cached: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
    shared: Option<Arc<Shared>>,
}

/// An open file.
pub(super) struct SimFile {
    disk: SimDisk,
    file: usize,
}

impl SimDisk {
    pub(super) fn new(chance: Chance) -> Self {
        let inner = Inner {
            chance,
            files: Vec::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            locks: BTreeMap::new(),
            killed: BTreeSet::new(),
            faults: Faults::default(),
            counted: Counted::default(),
            dark: false,
        };
        Self { inner: Arc::new(Mutex::new(inner)), process: 0 }
    }

    /// Returns the same disk for process `process`.
    pub(super) fn of(&self, process: u64) -> Self {
        Self { inner: Arc::clone(&self.inner), process }
    }

    /// Kills a process. Its writes stay in the cache.
    pub(super) fn kill(&self, process: u64) {
        let mut inner = self.lock();
        inner.killed.insert(process);
        inner.locks.retain(|_, holder| *holder != process);
    }

    /// Drops the shared memory of mapped files, because its processes are gone.
    pub(super) fn forget_shared(&self) {
        self.lock().files.iter_mut().for_each(|file| file.shared = None);
    }

    pub(super) fn is_dark(&self) -> bool {
        self.lock().dark
    }

    pub(super) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.lock().faults);
    }

    pub(super) fn counted(&self) -> Counted {
        self.lock().counted
    }

    /// Cuts the power and restores it. All processes are gone.
    pub(super) fn cut_power(&self) {
        let mut guard = self.lock();
        let inner = &mut *guard;
        inner.counted.power_cuts += 1;
        for file in &mut inner.files {
            inner.counted.lost_sectors += file.lose_power(&mut inner.chance);
        }
        let all: BTreeSet<PathBuf> =
            inner.names.keys().chain(inner.durable_names.keys()).cloned().collect();
        for name in all {
            let (now, then) = (inner.names.get(&name), inner.durable_names.get(&name));
            if now == then {
                continue;
            }
            match if inner.chance.percent(50) { now.copied() } else { then.copied() } {
                Some(file) => _ = inner.durable_names.insert(name, file),
                None => _ = inner.durable_names.remove(&name),
            }
        }
        inner.names = inner.durable_names.clone();
        inner.locks.clear();
        inner.dark = false;
        inner.faults.dark_in = None;
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the disk for a read.
    fn alive(&self) -> io::Result<MutexGuard<'_, Inner>> {
        let inner = self.lock();
        if inner.dark || inner.killed.contains(&self.process) {
            return Err(io::Error::other("no such process any more"));
        }
        Ok(inner)
    }

    /// Locks the disk for a change.
    fn changing(&self) -> io::Result<MutexGuard<'_, Inner>> {
        let mut inner = self.alive()?;
        if let Some(left) = &mut inner.faults.dark_in {
            *left = left.saturating_sub(1);
            inner.dark = inner.faults.dark_in == Some(0);
        }
        Ok(inner)
    }

    pub(super) fn open_file(&self, path: &Path, creates: bool) -> io::Result<SimFile> {
        let mut inner = self.changing()?;
        let file = match inner.names.get(path) {
            Some(&file) => file,
            None if creates => {
                if inner.faults.full {
                    inner.counted.refused += 1;
                    return Err(io::ErrorKind::StorageFull.into());
                }
                inner.files.push(Content::default());
                let file = inner.files.len() - 1;
                inner.names.insert(path.to_owned(), file);
                file
            }
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        Ok(SimFile { disk: self.clone(), file })
    }

    /// Makes a file without a name.
    pub(super) fn scratch(&self) -> io::Result<SimFile> {
        let mut inner = self.alive()?;
        inner.files.push(Content::default());
        Ok(SimFile { disk: self.clone(), file: inner.files.len() - 1 })
    }

    /// Returns a checksum of the disk, without SQLite's logs, which hold random salt.
    pub(super) fn fingerprint(&self) -> u64 {
        let inner = self.lock();
        let mut print = 0xcbf2_9ce4_8422_2325_u64;
        let salted = |path: &Path| path.to_string_lossy().ends_with("-wal");
        for (_, file) in inner.names.iter().filter(|(path, _)| !salted(path)) {
            for word in inner.files[*file].cached.chunks(8) {
                let mut bytes = [0; 8];
                bytes[..word.len()].copy_from_slice(word);
                print = (print ^ u64::from_le_bytes(bytes)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        print
    }

    /// Rewrites and syncs a file, if there is one.
    pub(super) fn rewrite(&self, path: &Path) -> io::Result<()> {
        let file = match self.open_file(path, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        let mut bytes = vec![0; file.length()? as usize];
        test_harness::DiskFile::read_exact_at(&file, &mut bytes, 0)?;
        test_harness::DiskFile::write_all_at(&file, &bytes, 0)?;
        test_harness::DiskFile::sync(&file)
    }

    pub(super) fn exists(&self, path: &Path) -> bool {
        self.lock().names.contains_key(path)
    }
}

impl test_harness::Disk for SimDisk {
    type File = SimFile;
    type Lock = ();

    fn make_folder(&self, _: &Path) -> io::Result<()> {
        self.alive().map(drop) // folders exist with their files
    }

    fn lock(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.alive()?;
        match inner.locks.insert(path.to_owned(), self.process) {
            None => Ok(()),
            Some(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let inner = self.alive()?;
        Ok(inner.names.keys().filter(|path| path.parent() == Some(folder)).cloned().collect())
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let inner = self.alive()?;
        let file = *inner.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        let mut bytes = inner.files[file].cached.clone();
        if inner.faults.cuts_too_much {
            lose_the_last_record(&mut bytes);
        }
        Ok(bytes)
    }

    fn create(&self, path: &Path) -> io::Result<SimFile> {
        if self.alive()?.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.open_file(path, true)
    }

    fn open(&self, path: &Path) -> io::Result<SimFile> {
        self.open_file(path, false)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.changing()?;
        inner.names.remove(path).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        let mut guard = self.changing()?;
        let inner = &mut *guard;
        if inner.faults.lying {
            return Ok(());
        }
        inner.durable_names.retain(|path, _| path.parent() != Some(folder));
        for (path, file) in &inner.names {
            if path.parent() == Some(folder) {
                inner.durable_names.insert(path.clone(), *file);
            }
        }
        Ok(())
    }
}

impl test_harness::DiskFile for SimFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut guard = self.disk.changing()?;
        let inner = &mut *guard;
        let file = &mut inner.files[self.file];
        let (start, end) = (offset as usize, offset as usize + bytes.len());
        if inner.faults.full && end > file.cached.len() {
            inner.counted.refused += 1;
            // A full disk takes half of the write.
            let part = bytes.len() / 2;
            file.write(&bytes[..part], start);
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write(bytes, start);
        if inner.chance.percent(3) {
            let any = file.dirty.iter().nth(inner.chance.below(file.dirty.len() as u64) as usize);
            if let Some(page) = any.copied() {
                file.write_back(page);
                file.dirty.remove(&page);
            }
        }
        Ok(())
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let inner = self.disk.alive()?;
        let cached = &inner.files[self.file].cached;
        let start = offset as usize;
        let part = cached.get(start..start + bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(part);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut inner = self.disk.changing()?;
        let file = &mut inner.files[self.file];
        let before = file.cached.len();
        file.cached.resize(length as usize, 0);
        // The page at the new end changes as well.
        file.dirty.retain(|page| page * PAGE < length as usize);
        if (length as usize) < before && !(length as usize).is_multiple_of(PAGE) {
            file.dirty.insert(length as usize / PAGE);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut guard = self.disk.changing()?;
        let inner = &mut *guard;
        inner.counted.syncs += 1;
        if inner.dark {
            return Err(io::Error::other("the power failed"));
        }
        if inner.faults.failing_syncs.is_some_and(|of| inner.chance.below(of) == 0) {
            inner.counted.failed_syncs += 1;
            inner.files[self.file].dirty.clear();
            return Err(io::Error::from_raw_os_error(5));
        }
        if inner.faults.lying {
            return Ok(());
        }
        let file = &mut inner.files[self.file];
        for page in std::mem::take(&mut file.dirty) {
            file.write_back(page);
        }
        file.durable.resize(file.cached.len(), 0);
        Ok(())
    }
}

impl SimFile {
    pub(super) fn length(&self) -> io::Result<u64> {
        Ok(self.disk.alive()?.files[self.file].cached.len() as u64)
    }

    /// Reads `bytes.len()` bytes; bytes after the end are zero.
    pub(super) fn read_some_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let inner = self.disk.alive()?;
        let cached = &inner.files[self.file].cached;
        let start = cached.len().min(offset as usize);
        let there = bytes.len().min(cached.len() - start);
        bytes[..there].copy_from_slice(&cached[start..start + there]);
        bytes[there..].fill(0);
        Ok(there)
    }

    /// Syncs the names in the file's folder, at the file's first sync.
    pub(super) fn sync_names(&self, path: &Path) -> io::Result<()> {
        test_harness::Disk::sync_folder(&self.disk, path.parent().unwrap_or(Path::new("")))
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        let mut inner = self.disk.lock();
        Arc::clone(inner.files[self.file].shared.get_or_insert_with(Arc::default))
    }
}

impl Content {
    fn write(&mut self, bytes: &[u8], start: usize) {
        let end = start + bytes.len();
        if end > self.cached.len() {
            self.cached.resize(end, 0);
        }
        self.cached[start..end].copy_from_slice(bytes);
        if start < end {
            self.dirty.extend(start / PAGE..=(end - 1) / PAGE);
        }
    }

    fn write_back(&mut self, page: usize) {
        let (start, end) = (page * PAGE, self.cached.len().min((page + 1) * PAGE));
        if start < end {
            if self.durable.len() < end {
                self.durable.resize(end, 0);
            }
            self.durable[start..end].copy_from_slice(&self.cached[start..end]);
        }
    }

    /// Returns the number of lost sectors.
    fn lose_power(&mut self, chance: &mut Chance) -> u64 {
        let mut lost = 0;
        let (old, new) = (self.durable.len(), self.cached.len());
        let length = match chance.below(3) {
            0 => old,
            1 => new,
            _ => old.min(new) + chance.below((old.abs_diff(new) + 1) as u64) as usize,
        };
        let mut left = std::mem::take(&mut self.durable);
        left.resize(length.max(old), 0);
        for page in std::mem::take(&mut self.dirty) {
            let whole = chance.below(4);
            for sector in 0..PAGE / SECTOR {
                let start = page * PAGE + sector * SECTOR;
                let end = (start + SECTOR).min(length).min(new);
                if start >= end {
                    continue;
                }
                let kept = match whole {
                    0 => 0,
                    1 => end - start,
                    _ => match chance.below(8) {
                        0..4 => end - start,
                        4..7 => 0,
                        _ => chance.below((end - start) as u64) as usize,
                    },
                };
                lost += u64::from(kept < end - start);
                left[start..start + kept].copy_from_slice(&self.cached[start..start + kept]);
            }
        }
        left.truncate(length);
        self.cached = left.clone();
        self.durable = left;
        self.shared = None;
        lost
    }
}

/// Plants a bug: if bytes follow the last whole record of a journal, the record is
/// cut with them. A record is a length, a checksum and as many bytes, after the
/// journal's first eight bytes.
fn lose_the_last_record(bytes: &mut Vec<u8>) {
    let (mut at, mut before) = (8, 8);
    while let Some(length) = bytes.get(at..at + 4) {
        let length = u32::from_le_bytes(length.try_into().expect("four bytes")) as usize;
        let whole = bytes.get(at + 8..at + 8 + length).is_some_and(|payload| {
            let mut sum = crc32fast::Hasher::new();
            sum.update(&bytes[at..at + 4]);
            sum.update(payload);
            bytes[at + 4..at + 8] == sum.finalize().to_le_bytes()
        });
        if !whole {
            break;
        }
        (before, at) = (at, at + 8 + length);
    }
    if at < bytes.len() {
        bytes.truncate(before);
    }
}
