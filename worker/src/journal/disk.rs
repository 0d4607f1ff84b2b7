//! The file system operations that the journal needs. [`OsDisk`] is the real file
//! system; a simulation implements another one, on which a seed decides power cuts,
//! torn and reordered writes and failing syncs. The disk is a type parameter, so
//! the real one has no overhead.
//!
//! Nothing is durable before a `sync`: the bytes of a file by its own sync, names
//! by the sync of their folder.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The operations of a file system that the journal uses.
pub trait Disk: Clone + Send + Sync + 'static {
    /// An open file.
    type File: DiskFile;
    /// The lock of a folder, held while this process writes to it.
    type Lock: Send + Sync + 'static;

    /// Creates `folder` and its parents if they are missing, durably.
    fn make_folder(&self, folder: &Path) -> io::Result<()>;
    /// Locks the file at `path` for this process.
    fn lock(&self, path: &Path) -> io::Result<Self::Lock>;
    /// Returns the files in `folder`, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>>;
    /// Returns all bytes of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Creates a new file for reading and writing. Fails if the file exists.
    fn create(&self, path: &Path) -> io::Result<Self::File>;
    /// Opens an existing file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Self::File>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in `folder` durable.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
}

/// An open file of a [`Disk`].
pub trait DiskFile: Send + Sync + 'static {
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Fills `bytes` from `offset` on.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
    /// Cuts the file, or extends it with zeros.
    fn set_len(&self, length: u64) -> io::Result<()>;
    /// Makes the file's bytes and length durable.
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
        // A folder survives a power cut only if every folder above it does, so the
        // parents come first.
        if let Some(above) = above {
            self.make_folder(above)?;
        }
        match fs::create_dir(folder) {
            // Another process may create the folder after the check above. That does
            // no harm.
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // The new name is an entry of the parent, so the parent must be synced.
        self.sync_folder(above.unwrap_or(Path::new(".")))
    }

    fn lock(&self, path: &Path) -> io::Result<File> {
        let file = File::create(path)?;
        // `lock` would wait. A second worker must fail at once, with a message.
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
        // `create_new` refuses an existing file, so a new file never overwrites
        // recorded usage.
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
        // `fdatasync` leaves out the times of the file, which no reader needs.
        self.sync_data()
    }
}
