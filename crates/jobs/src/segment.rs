//! Segments: files to which the answers of one claim are appended. Answers are synced
//! before their rows are committed, so that a row never names bytes that a power cut
//! takes away.

use std::collections::BTreeMap;

use crate::disk::DiskFile;
use crate::file::BlobRange;
use crate::ids::BlobId;
use crate::store::AnswerKind;

/// The open segments of a claim, one for each kind of answer.
#[derive(Default)]
pub(crate) struct Segments {
    open: BTreeMap<AnswerKind, Segment>,
}

struct Segment {
    id: BlobId,
    file: Box<dyn DiskFile>,
    length: u64,
}

impl Segments {
    /// Returns true if a kind has no segment yet.
    pub(crate) fn lacks(&self, kind: AnswerKind) -> bool {
        !self.open.contains_key(&kind)
    }

    /// Takes the new file of a kind's segment. The store has its row already.
    pub(crate) fn insert(&mut self, kind: AnswerKind, id: BlobId, file: Box<dyn DiskFile>) {
        self.open.insert(kind, Segment { id, file, length: 0 });
    }

    /// Appends answers and syncs them. After a failure the segments are not used again:
    /// a later sync would not tell about the bytes that this one has lost.
    ///
    /// # Errors
    /// The disk failed. Returned are the segments without an answer that counts.
    pub(crate) fn append<'a>(
        &mut self,
        answers: impl Iterator<Item = (AnswerKind, &'a [u8])>,
    ) -> Result<Vec<BlobRange>, (std::io::Error, Vec<BlobId>)> {
        // Found before the append, which counts bytes even if their sync fails.
        let unused = self.open.values().filter(|segment| segment.length == 0);
        let unused = unused.map(|segment| segment.id).collect();
        self.try_append(answers).map_err(|error| {
            self.open.clear();
            (error, unused)
        })
    }

    fn try_append<'a>(
        &mut self,
        answers: impl Iterator<Item = (AnswerKind, &'a [u8])>,
    ) -> std::io::Result<Vec<BlobRange>> {
        let mut ranges = Vec::new();
        for (kind, bytes) in answers {
            let Some(segment) = self.open.get_mut(&kind) else {
                return Err(std::io::Error::other("no segment for the answer"));
            };
            segment.file.write_all(bytes)?;
            let length = bytes.len() as u64;
            ranges.push(BlobRange { blob: segment.id, offset: segment.length, length });
            segment.length += length;
        }
        // One sync for each segment, however many answers there are.
        self.open.values_mut().try_for_each(|segment| segment.file.sync())?;
        Ok(ranges)
    }
}
