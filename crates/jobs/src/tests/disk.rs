//! A simulated disk for blobs, and the fuse that kills a process at a durable step.
//!
//! A power cut keeps all that was synced. Of the bytes after that it keeps a part, and of
//! each name that was made or removed since the sync of its folder it keeps or loses the
//! change.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use super::chance::Chance;
use crate::disk::{Disk, DiskFile};

/// Kills a process at a durable step. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Fuse {
    inner: Arc<Mutex<FuseState>>,
    died: Arc<Notify>,
}

#[derive(Default)]
struct FuseState {
    steps: u64,
    dies_at: Option<(u64, Moment)>,
    is_dead: bool,
}

/// The moment of a death in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    Before,
    After,
}

impl Fuse {
    /// Lets the process die at step `step` from now, from 1.
    pub(super) fn dies_at(&self, step: u64, moment: Moment) {
        let mut state = self.inner.lock().expect("no panic");
        state.dies_at = Some((state.steps + step, moment));
    }

    pub(super) fn is_dead(&self) -> bool {
        self.inner.lock().expect("no panic").is_dead
    }

    /// Waits until the process dies.
    pub(super) async fn died(&self) {
        let died = self.died.notified();
        if !self.is_dead() {
            died.await;
        }
    }

    /// Does a durable step. Returns `None` if the process is dead or dies at the step.
    pub(super) fn step<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.inner.lock().expect("no panic");
        if state.is_dead {
            return None;
        }
        state.steps += 1;
        let moment = state.dies_at.filter(|(at, _)| *at == state.steps).map(|(_, moment)| moment);
        state.is_dead = moment.is_some();
        drop(state);
        let done = (moment != Some(Moment::Before)).then(act);
        if moment.is_some() {
            self.died.notify_waiters();
            return None;
        }
        done
    }
}

/// A disk of a machine; clones share it.
#[derive(Clone)]
pub(super) struct SimDisk {
    inner: Arc<Mutex<Inner>>,
    fuse: Fuse,
}

#[derive(Default)]
struct Inner {
    files: Vec<Content>,
    names: BTreeMap<PathBuf, usize>,
    durable_names: BTreeMap<PathBuf, usize>,
    /// Syncs that fail from now on.
    failing_syncs: u32,
    /// A planted bug: syncs report success and do nothing.
    is_lying: bool,
    free: Option<u64>,
}

#[derive(Clone, Default)]
struct Content {
    cached: Vec<u8>,
    /// Bytes that a power cut keeps.
    durable: usize,
}

impl SimDisk {
    pub(super) fn new(fuse: Fuse) -> Self {
        Self { inner: Arc::default(), fuse }
    }

    /// Returns the same disk for another process.
    pub(super) fn of(&self, fuse: Fuse) -> Self {
        Self { inner: Arc::clone(&self.inner), fuse }
    }

    pub(super) fn fail_syncs(&self, count: u32) {
        self.lock().failing_syncs = count;
    }

    pub(super) fn lie(&self) {
        self.lock().is_lying = true;
    }

    pub(super) fn set_free(&self, bytes: Option<u64>) {
        self.lock().free = bytes;
    }

    /// Changes a byte of each file.
    pub(super) fn damage(&self) {
        let mut inner = self.lock();
        inner
            .files
            .iter_mut()
            .filter_map(|file| file.cached.first_mut())
            .for_each(|byte| *byte ^= 1);
    }

    /// Loses each file.
    pub(super) fn lose(&self) {
        self.lock().names.clear();
    }

    /// Returns the number and the bytes of the files.
    pub(super) fn sums(&self) -> (usize, u64) {
        let inner = self.lock();
        let bytes = inner.names.values().map(|file| inner.files[*file].cached.len() as u64);
        (inner.names.len(), bytes.sum())
    }

    /// Cuts the power and restores it.
    pub(super) fn cut_power(&self, chance: &mut Chance) {
        let mut inner = self.lock();
        for file in &mut inner.files {
            let lost = (file.cached.len() - file.durable) as u64;
            let kept = file.durable + chance.below(lost + 1) as usize;
            file.cached.truncate(kept);
            // The length may reach the disk before the bytes do.
            if chance.percent(50) {
                file.cached[file.durable..].fill(0);
            }
            file.durable = kept;
        }
        let mut names = inner.durable_names.clone();
        for (name, file) in &inner.names {
            if !names.contains_key(name) && chance.percent(50) {
                names.insert(name.clone(), *file);
            }
        }
        let now = inner.names.clone();
        names.retain(|name, _| now.contains_key(name) || chance.percent(50));
        inner.durable_names = names.clone();
        inner.names = names;
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic")
    }

    /// Does a durable step of this process.
    fn step<T>(&self, act: impl FnOnce(&mut Inner) -> io::Result<T>) -> io::Result<T> {
        let done = self.fuse.step(|| act(&mut self.lock()));
        done.unwrap_or_else(|| Err(io::Error::other("the process is dead")))
    }
}

impl Disk for SimDisk {
    fn create_folder(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let file = self.step(|inner| {
            if inner.names.contains_key(path) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            inner.files.push(Content::default());
            let file = inner.files.len() - 1;
            inner.names.insert(path.to_owned(), file);
            Ok(file)
        })?;
        Ok(Box::new(SimFile { disk: self.clone(), file }))
    }

    fn open(&self, path: &Path, offset: u64) -> io::Result<Box<dyn Read + Send>> {
        let inner = self.lock();
        let file = inner.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        // An open file is read to its end even if it is deleted meanwhile.
        let bytes = inner.files[*file].cached.get(offset as usize..).unwrap_or_default();
        Ok(Box::new(io::Cursor::new(bytes.to_vec())))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|inner| {
            let file = inner.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
            inner.names.insert(to.to_owned(), file);
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(|inner| {
            inner.names.remove(path).map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
        })
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let inner = self.lock();
        Ok(inner.names.keys().filter(|name| name.parent() == Some(folder)).cloned().collect())
    }

    fn age(&self, _: &Path) -> io::Result<Duration> {
        Ok(Duration::MAX)
    }

    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        self.step(|inner| {
            if !inner.is_lying {
                inner.durable_names = inner.names.clone();
            }
            Ok(())
        })
    }

    fn free(&self, _: &Path) -> io::Result<u64> {
        Ok(self.lock().free.unwrap_or(1 << 40))
    }
}

struct SimFile {
    disk: SimDisk,
    file: usize,
}

impl Write for SimFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.disk.fuse.is_dead() {
            return Err(io::Error::other("the process is dead"));
        }
        self.disk.lock().files[self.file].cached.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DiskFile for SimFile {
    fn sync(&mut self) -> io::Result<()> {
        let file = self.file;
        self.disk.step(|inner| {
            if inner.failing_syncs > 0 {
                inner.failing_syncs -= 1;
                // The pages seem clean from now on, and are not on the disk.
                return Err(io::Error::other("the disk failed"));
            }
            let file = &mut inner.files[file];
            if !inner.is_lying {
                file.durable = file.cached.len();
            }
            Ok(())
        })
    }
}
