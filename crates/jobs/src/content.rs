//! The bytes of a file as a client downloads them, in chunks.

use std::io::Read;

use crate::blobs::RangeReader;
use crate::error::JobError;
use crate::file::{BlobRange, FileRow};
use crate::hash::Sha256;
use crate::jobs::ReadGuard;
use crate::upload::blocking;

/// A file that is being read. Its bytes stay on the disk until this is dropped.
pub struct Content {
    file: FileRow,
    state: Option<ReadState>,
    _guard: ReadGuard,
}

struct ReadState {
    reader: RangeReader,
    hash: Sha256,
}

impl Content {
    pub(crate) fn new(guard: ReadGuard, file: FileRow, ranges: Vec<BlobRange>) -> Self {
        // Without the buffer: a chunk is as large, and would only be copied once more.
        let reader = guard.blobs().reader(ranges).into_inner();
        let state = Some(ReadState { reader, hash: Sha256::new() });
        Self { file, state, _guard: guard }
    }

    /// Returns the file's row.
    pub fn file(&self) -> &FileRow {
        &self.file
    }

    /// Returns the next bytes; `None` at the end.
    ///
    /// # Errors
    /// [`JobError::Damaged`] if the bytes are not those that were uploaded, or the disk
    /// failed.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, JobError> {
        let Some(mut state) = self.state.take() else { return Ok(None) };
        let (read, state) = blocking(move || {
            let mut buffer = vec![0; CHUNK];
            let read = state
                .reader
                .read(&mut buffer)
                .map_err(|error| crate::blobs::at(std::path::Path::new("content"), error))?;
            buffer.truncate(read);
            state.hash.update(&buffer);
            Ok((buffer, state))
        })
        .await?;
        if !read.is_empty() {
            self.state = Some(state);
            return Ok(Some(read));
        }
        let hash = state.hash.finish();
        match self.file.sha256.is_some_and(|expected| expected != hash) {
            // The bytes are sent already. The error breaks the download off before its stated
            // length.
            true => Err(JobError::Damaged),
            false => Ok(None),
        }
    }
}

const CHUNK: usize = 64 * 1024;
