//! The file system under the blobs, as a trait: the host's in the product, and one that
//! loses power in tests.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A file that is being written.
pub(crate) trait DiskFile: Write + Send {
    /// Puts the bytes so far on the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// Files and folders.
pub(crate) trait Disk: Send + Sync {
    /// Makes a folder for this user alone, and its parents. An existing one is no error.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a new file for this user alone. An existing one is an error.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Opens a file to read it from `offset`.
    fn open(&self, path: &Path, offset: u64) -> io::Result<Box<dyn Read + Send>>;

    /// Gives a file another name in its folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Deletes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Returns the files of a folder.
    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>>;

    /// Returns the time since a file was last written.
    fn age(&self, path: &Path) -> io::Result<Duration>;

    /// Puts the names of a folder on the disk.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;

    /// Returns the free bytes of the file system.
    fn free(&self, folder: &Path) -> io::Result<u64>;
}

/// The file system of the host.
pub(crate) struct HostDisk;

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Disk for HostDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        // Names are random, so an existing file could only be another blob.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Box::new(file))
    }

    fn open(&self, path: &Path, offset: u64) -> io::Result<Box<dyn Read + Send>> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(Box::new(file))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    }

    fn age(&self, path: &Path) -> io::Result<Duration> {
        // A file from the future, by the clock of another machine, is new.
        Ok(fs::metadata(path)?.modified()?.elapsed().unwrap_or_default())
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }

    fn free(&self, folder: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(folder)?;
        // Not `f_bfree`: it counts blocks that only root may use.
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}
