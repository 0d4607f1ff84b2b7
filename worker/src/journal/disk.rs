//! The few things that the journal asks of a file system. The real one is
//! [`OsDisk`]; the simulation plays another, on which power cuts, torn and
//! reordered writes and failing syncs are one seed each. The disk is a type
//! parameter, so that the real one costs nothing.
//!
//! Nothing is durable before a `sync`: of a file its bytes, of a folder its
//! names.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file system, as far as the journal uses one.
pub trait Disk: Clone + Send + Sync + 'static {
    /// An open file.
    type File: DiskFile;
    /// Held as long as this process writes in a folder.
    type Lock: Send + Sync + 'static;

    /// Makes `folder` and those above it where they are missing; they outlast
    /// a power cut.
    fn make_folder(&self, folder: &Path) -> io::Result<()>;
    /// Takes the lock file at `path` for this process.
    fn lock(&self, path: &Path) -> io::Result<Self::Lock>;
    /// The files in `folder`, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>>;
    /// All bytes of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Makes a file that is not there yet, for reading and writing.
    fn create(&self, path: &Path) -> io::Result<Self::File>;
    /// Opens a file that is there, for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Self::File>;
    /// Takes the name of a file away.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Brings the names in `folder` to the disk.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
}

/// An open file of a [`Disk`].
pub trait DiskFile: Send + Sync + 'static {
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Fills `bytes` from `offset` on.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
    /// Cuts the file, or makes it longer with zeros.
    fn set_len(&self, length: u64) -> io::Result<()>;
    /// Brings its bytes and its length to the disk.
    fn sync(&self) -> io::Result<()>;
}

/// The host's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsDisk;

impl Disk for OsDisk {
    type File = File;
    type Lock = File;

    fn make_folder(&self, folder: &Path) -> io::Result<()> {
        if folder.is_dir() {
            return Ok(());
        }
        let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
        if let Some(above) = above {
            self.make_folder(above)?;
        }
        match fs::create_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        self.sync_folder(above.unwrap_or(Path::new(".")))
    }

    fn lock(&self, path: &Path) -> io::Result<File> {
        let file = File::create(path)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::ErrorKind::WouldBlock.into(),
            TryLockError::Error(error) => error,
        })?;
        Ok(file)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect()
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).open(path)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(path)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }
}

impl DiskFile for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, bytes, offset)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        File::set_len(self, length)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
