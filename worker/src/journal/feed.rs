//! Reads blocks back for the gateway: from the oldest file that it has not
//! acknowledged up to what has been synced, and on from there. The files are
//! the only memory: however far the gateway is behind, this holds one file.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tollgate_domain::Block;

use super::Shared;
use super::build::Builder;
use super::disk::{Disk, DiskFile, OsDisk};
use super::frame::{self, Found, Frame, MAGIC};
use super::store::damaged;

/// One reader's place in the journal.
pub(crate) struct Feed<D: Disk = OsDisk> {
    shared: Arc<Shared<D>>,
    reading: Option<Reading<D::File>>,
    /// The file that was read to its end last.
    done: Option<PathBuf>,
}

struct Reading<F> {
    path: PathBuf,
    file: F,
    builder: Option<Builder>,
    /// Bytes of it that were read from the disk.
    offset: u64,
    /// Read and not yet parsed, from `parsed` on.
    buffer: Vec<u8>,
    parsed: usize,
}

/// A file and how far it may be read.
pub(super) struct Readable {
    pub(super) path: PathBuf,
    pub(super) limit: u64,
    pub(super) is_closed: bool,
    /// Of its epoch, blocks up to here are in the ledger.
    pub(super) acknowledged: u64,
}

impl<D: Disk> Feed<D> {
    pub(super) fn new(shared: Arc<Shared<D>>) -> Self {
        Self { shared, reading: None, done: None }
    }

    /// The next block that is not acknowledged, if it is on the disk already.
    /// Blocks on file reads.
    pub(crate) fn next(&mut self) -> io::Result<Option<Block>> {
        loop {
            let path = self.reading.as_ref().map(|reading| &reading.path);
            let readable = match path {
                Some(path) => self.shared.readable(path),
                None => self.shared.readable_after(self.done.as_deref()),
            };
            let Some(readable) = readable else {
                match self.reading.take() {
                    // Acknowledged and deleted while it was read.
                    Some(reading) => self.done = Some(reading.path),
                    None => return Ok(None),
                }
                continue;
            };
            let mut reading = match self.reading.take() {
                Some(reading) => reading,
                None => Reading::new(readable.path.clone(), self.shared.disk.open(&readable.path)?),
            };
            let block = reading.next(&readable)?;
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

impl<F: DiskFile> Reading<F> {
    fn new(path: PathBuf, file: F) -> Self {
        Self {
            file,
            path,
            builder: None,
            offset: MAGIC.len() as u64,
            buffer: Vec::new(),
            parsed: 0,
        }
    }

    fn next(&mut self, readable: &Readable) -> io::Result<Option<Block>> {
        self.fill(readable.limit)?;
        loop {
            let Found::Frame(frame, taken) = frame::read(&self.buffer[self.parsed..]) else {
                if self.parsed < self.buffer.len() {
                    // Synced bytes end with a whole frame.
                    return Err(damaged(&self.path, "is damaged in what was synced"));
                }
                return Ok(None);
            };
            self.parsed += taken;
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
            (None, Frame::Head(head)) => {
                self.builder = Some(Builder::new(head));
                Ok(None)
            }
            (None, _) => Err(damaged(&self.path, "does not begin with a head")),
        }
    }

    /// Reads what may be read and is not yet.
    fn fill(&mut self, limit: u64) -> io::Result<()> {
        if limit <= self.offset {
            return Ok(());
        }
        self.buffer.drain(..self.parsed);
        self.parsed = 0;
        let start = self.buffer.len();
        self.buffer.resize(start + (limit - self.offset) as usize, 0); // a file is bounded
        self.file.read_exact_at(&mut self.buffer[start..], self.offset)?;
        self.offset = limit;
        Ok(())
    }
}
