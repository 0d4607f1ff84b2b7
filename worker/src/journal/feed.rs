//! The reader of blocks for the gateway: from the oldest unacknowledged file up to
//! the last synced byte, and on as more is synced. The files are the only buffer:
//! however late the gateway is, a reader holds one file in memory.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tollgate_domain::Block;

use super::Shared;
use super::build::Builder;
use super::disk::{Disk, DiskFile, OsDisk};
use super::frame::{self, Frame, FrameRead, MAGIC};
use super::store::damaged;

/// A reader's position in the journal.
pub(crate) struct Feed<D: Disk = OsDisk> {
    shared: Arc<Shared<D>>,
    reading: Option<OpenSegment<D::File>>,
    /// The last file that was read to its end.
    done: Option<PathBuf>,
}

struct OpenSegment<F> {
    path: PathBuf,
    file: F,
    builder: Option<Builder>,
    /// Bytes that were read from the file.
    offset: u64,
    /// The bytes that were read; those from `parsed` on are not parsed yet.
    buffer: Vec<u8>,
    parsed: usize,
}

/// A file and the limit up to which it may be read.
pub(super) struct ReadLimit {
    pub(super) path: PathBuf,
    pub(super) limit: u64,
    pub(super) is_closed: bool,
    /// The last acknowledged block of the file's epoch.
    pub(super) acknowledged: u64,
}

impl<D: Disk> Feed<D> {
    pub(super) fn new(shared: Arc<Shared<D>>) -> Self {
        Self { shared, reading: None, done: None }
    }

    /// Returns the next unacknowledged block that is synced, or `None` if there is
    /// none yet. Blocks on file reads.
    pub(crate) fn next(&mut self) -> io::Result<Option<Block>> {
        loop {
            let path = self.reading.as_ref().map(|reading| &reading.path);
            let readable = match path {
                Some(path) => self.shared.readable(path),
                None => self.shared.readable_after(self.done.as_deref()),
            };
            let Some(readable) = readable else {
                match self.reading.take() {
                    // The file was acknowledged and deleted while it was read.
                    Some(reading) => self.done = Some(reading.path),
                    None => return Ok(None),
                }
                continue;
            };
            let mut reading = match self.reading.take() {
                Some(reading) => reading,
                None => {
                    OpenSegment::new(readable.path.clone(), self.shared.disk.open(&readable.path)?)
                }
            };
            let block = reading.next(&readable)?;
            // An open file may still grow, so only a closed file is left behind.
            let at_end = readable.is_closed && block.is_none();
            if at_end {
                self.done = Some(reading.path);
                continue;
            }
            self.reading = Some(reading);
            return Ok(block);
        }
    }
}

impl<F: DiskFile> OpenSegment<F> {
    fn new(path: PathBuf, file: F) -> Self {
        Self {
            file,
            path,
            builder: None,
            // The first bytes name the format and are no frame.
            offset: MAGIC.len() as u64,
            buffer: Vec::new(),
            parsed: 0,
        }
    }

    fn next(&mut self, readable: &ReadLimit) -> io::Result<Option<Block>> {
        self.fill(readable.limit)?;
        loop {
            let FrameRead::Frame(frame, taken) = frame::read(&self.buffer[self.parsed..]) else {
                if self.parsed < self.buffer.len() {
                    // Synced bytes end with a whole frame, so this is no torn
                    // write.
                    return Err(damaged(&self.path, "is damaged in its synced part"));
                }
                return Ok(None);
            };
            self.parsed += taken;
            // A gateway that reconnects has already posted the acknowledged blocks.
            if let Some(block) = self.apply(*frame)?
                && block.parts().number > readable.acknowledged
            {
                return Ok(Some(block));
            }
        }
    }

    fn apply(&mut self, frame: Frame) -> io::Result<Option<Block>> {
        match (&mut self.builder, frame) {
            (Some(builder), frame) => {
                builder.apply(frame).map_err(|error| damaged(&self.path, &error.to_string()))
            }
            (None, Frame::Header(header)) => {
                self.builder = Some(Builder::new(header));
                Ok(None)
            }
            (None, _) => Err(damaged(&self.path, "does not begin with a header")),
        }
    }

    /// Reads the bytes up to `limit`.
    fn fill(&mut self, limit: u64) -> io::Result<()> {
        // The limit is 0 until the file's name is synced, and the subtraction below
        // must not underflow.
        if limit <= self.offset {
            return Ok(());
        }
        // Parsed bytes are dropped first, so that the buffer holds at most one
        // file.
        self.buffer.drain(..self.parsed);
        self.parsed = 0;
        let start = self.buffer.len();
        self.buffer.resize(start + (limit - self.offset) as usize, 0); // a file is bounded
        self.file.read_exact_at(&mut self.buffer[start..], self.offset)?;
        self.offset = limit;
        Ok(())
    }
}
