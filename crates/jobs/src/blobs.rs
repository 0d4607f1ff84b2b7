//! Bytes on disk: one file for each blob, under a random name in one folder. Every file
//! has mode 0600, and no name comes from a client.

use std::collections::HashSet;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::disk::{Disk, DiskFile};
use crate::error::JobError;
use crate::file::BlobRange;
use crate::ids::BlobId;

/// The folder of blobs. Clones share it.
#[derive(Clone)]
pub(crate) struct Blobs {
    disk: Arc<dyn Disk>,
    folder: Arc<Path>,
}

impl Blobs {
    /// Opens the folder, and makes it with mode 0700 if there is none.
    pub(crate) fn open(disk: Arc<dyn Disk>, folder: &Path) -> Result<Self, JobError> {
        disk.create_folder(folder).map_err(|source| at(folder, source))?;
        Ok(Self { disk, folder: folder.into() })
    }

    /// Makes a new file for an upload. Its name says that it is not whole.
    pub(crate) fn create_part(&self, id: BlobId) -> Result<Box<dyn DiskFile>, JobError> {
        let path = self.part(id);
        self.disk.create(&path).map_err(|source| at(&path, source))
    }

    /// Makes a new file that grows, such as a segment, and syncs the folder.
    pub(crate) fn create(&self, id: BlobId) -> Result<Box<dyn DiskFile>, JobError> {
        let path = self.path(id);
        // The name is synced now, because rows will soon name bytes of the file.
        let file = self.disk.create(&path).map_err(|source| at(&path, source))?;
        self.sync()?;
        Ok(file)
    }

    /// Gives a whole file its lasting name. The file's bytes are on the disk before its
    /// name is, and both are when this returns.
    pub(crate) fn keep(&self, id: BlobId, file: &mut dyn DiskFile) -> Result<(), JobError> {
        let part = self.part(id);
        let renamed = file.sync().and_then(|()| self.disk.rename(&part, &self.path(id)));
        renamed.map_err(|source| at(&part, source))?;
        self.sync()
    }

    /// Copies a blob from another folder. A copy that is there already is whole.
    pub(crate) fn copy(&self, id: BlobId, from: &Self) -> Result<(), JobError> {
        if self.path(id).exists() {
            return Ok(());
        }
        let mut source = from.open_at(id, 0)?;
        // A copy that was cut off may have left a part.
        self.delete(id)?;
        let mut file = self.create_part(id)?;
        io::copy(&mut source, &mut file).map_err(|source| at(&self.part(id), source))?;
        self.keep(id, &mut *file)
    }

    /// Deletes a blob, whole or not. A blob that is not there is no error.
    pub(crate) fn delete(&self, id: BlobId) -> Result<(), JobError> {
        // The folder is not synced: if a power cut brings a name back, no row names it, and the
        // next start deletes it.
        for path in [self.part(id), self.path(id)] {
            if_there(self.disk.remove(&path)).map_err(|source| at(&path, source))?;
        }
        Ok(())
    }

    /// Deletes every file that `known` does not name and that is at least `age` old, and returns
    /// their number.
    pub(crate) fn delete_unknown(
        &self,
        known: &HashSet<BlobId>,
        age: Duration,
    ) -> Result<u64, JobError> {
        let mut deleted = 0;
        for path in self.disk.list(&self.folder).map_err(|source| at(&self.folder, source))? {
            if is_known(&path, known) {
                continue;
            }
            // Another gateway may delete it first.
            let is_old =
                if_there(self.disk.age(&path)).map(|found| found.is_some_and(|found| found >= age));
            if is_old.map_err(|source| at(&path, source))? {
                let removed =
                    if_there(self.disk.remove(&path)).map_err(|source| at(&path, source))?;
                deleted += u64::from(removed.is_some());
            }
        }
        Ok(deleted)
    }

    /// Opens a blob to read it from `offset`.
    pub(crate) fn open_at(
        &self,
        id: BlobId,
        offset: u64,
    ) -> Result<Box<dyn Read + Send>, JobError> {
        let path = self.path(id);
        self.disk.open(&path, offset).map_err(|source| at(&path, source))
    }

    /// Returns a reader over ranges, one after the other.
    pub(crate) fn reader(&self, ranges: Vec<BlobRange>) -> BufReader<RangeReader> {
        let ranges = ranges.into_iter();
        BufReader::with_capacity(
            READ_BUFFER,
            RangeReader { blobs: self.clone(), ranges, open: None },
        )
    }

    /// Returns the free bytes of the file system.
    pub(crate) fn free(&self) -> Result<u64, JobError> {
        self.disk.free(&self.folder).map_err(|source| at(&self.folder, source))
    }

    fn sync(&self) -> Result<(), JobError> {
        self.disk.sync_folder(&self.folder).map_err(|source| at(&self.folder, source))
    }

    fn path(&self, id: BlobId) -> PathBuf {
        self.folder.join(id.to_string())
    }

    fn part(&self, id: BlobId) -> PathBuf {
        self.folder.join(format!("{id}.part"))
    }
}

/// Returns `None` for a file that is not there.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Returns true if `known` has the blob of a file, whole or not.
fn is_known(path: &Path, known: &HashSet<BlobId>) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let id = name.map(|name| name.strip_suffix(".part").unwrap_or(name));
    id.and_then(|id| id.parse().ok()).is_some_and(|id| known.contains(&id))
}

/// Names the file in an error.
pub(crate) fn at(path: &Path, source: io::Error) -> JobError {
    JobError::File { path: path.to_owned(), source: Arc::new(source) }
}

/// Wraps an error for readers, with the kind that the disk gave it.
fn with_kind(error: JobError) -> io::Error {
    let kind = match &error {
        JobError::File { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

/// A reader over ranges of blobs.
pub(crate) struct RangeReader {
    blobs: Blobs,
    ranges: std::vec::IntoIter<BlobRange>,
    open: Option<io::Take<Box<dyn Read + Send>>>,
}

impl Read for RangeReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(open) = &mut self.open {
                let read = open.read(buffer)?;
                // An empty buffer reads nothing, which is not the end of the range.
                if read > 0 || buffer.is_empty() {
                    return Ok(read);
                }
                // A file that is shorter than its rows say has lost bytes.
                if open.limit() > 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            let Some(range) = self.ranges.next() else { return Ok(0) };
            let file = self.blobs.open_at(range.blob, range.offset).map_err(with_kind)?;
            self.open = Some(file.take(range.length));
        }
    }
}

const READ_BUFFER: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::disk::HostDisk;

    #[test]
    fn blob_without_a_row_is_deleted() {
        let folder = tempfile::tempdir().expect("a folder");
        let blobs = Blobs::open(Arc::new(HostDisk), folder.path()).expect("opens");
        let id = BlobId::from_random;
        let mut file = blobs.create_part(id(1)).expect("new");
        blobs.keep(id(1), &mut *file).expect("kept");
        blobs.create_part(id(2)).expect("new");
        blobs.create(id(3)).expect("new");
        let mode = std::fs::metadata(blobs.path(id(1))).expect("there");
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
        // An upload of another gateway has a row.
        blobs.create_part(id(4)).expect("new");
        let known = HashSet::from([id(1), id(4)]);
        let hour = Duration::from_secs(3_600);
        assert_eq!(blobs.delete_unknown(&known, hour).expect("sweeps"), 0, "all are new");
        assert_eq!(blobs.delete_unknown(&known, Duration::ZERO).expect("sweeps"), 2);
        assert!(blobs.part(id(4)).exists());
        assert!(blobs.open_at(id(1), 0).is_ok());
        assert!(blobs.open_at(id(3), 0).is_err());
    }

    #[test]
    fn range_reader_joins_ranges_and_finds_missing_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let blobs = Blobs::open(Arc::new(HostDisk), folder.path()).expect("opens");
        let id = BlobId::from_random;
        blobs.create(id(1)).expect("new").write_all(b"abcdef").expect("written");
        let range = |offset, length| BlobRange { blob: id(1), offset, length };
        let mut text = String::new();
        blobs.reader(vec![range(4, 2), range(0, 3)]).read_to_string(&mut text).expect("reads");
        assert_eq!(text, "efabc");
        let error = blobs.reader(vec![range(4, 3)]).read_to_string(&mut text).expect_err("short");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
