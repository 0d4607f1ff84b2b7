//! Proofs that the records of one request are in a signed log.

use serde::Deserialize;

use crate::tree::{Leaf, root_of_path};
use crate::{Checkpoint, Hash, NoteError, VerifierKey};

/// A proof as it is read from a JSON object. Nothing in it is verified yet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    checkpoint: String,
    records: Vec<ProofOfRecord>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProofOfRecord {
    index: u64,
    record: String,
    path: Vec<String>,
}

/// A record that is proved to be in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proved {
    /// The record's number.
    pub index: u64,
    /// The record's bytes.
    pub record: String,
}

/// The reason why a proof fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// The text is no proof.
    #[error("this is no proof: {0}")]
    Form(String),
    /// The checkpoint is not valid.
    #[error("the checkpoint: {0}")]
    Checkpoint(NoteError),
    /// A record's path does not lead to the signed root.
    #[error("record {index} is not in the log of that checkpoint as it stands here")]
    Path {
        /// The record's number.
        index: u64,
    },
    /// The proof holds no record.
    #[error("the proof holds no record")]
    Empty,
}

impl Proof {
    /// Parses a proof.
    ///
    /// # Errors
    /// [`ProofError::Form`]
    pub fn read(text: &str) -> Result<Self, ProofError> {
        serde_json::from_str(text).map_err(|error| ProofError::Form(error.to_string()))
    }

    /// Verifies the proof with `keys`. Returns the checkpoint and the records that
    /// it signs.
    ///
    /// # Errors
    /// A record is not proved, or the checkpoint is not valid.
    pub fn verify(self, keys: &[VerifierKey]) -> Result<(Checkpoint, Vec<Proved>), ProofError> {
        let Self { checkpoint, records } = self;
        // The signature comes first: size and root are trusted below.
        let checkpoint = Checkpoint::open(&checkpoint, keys).map_err(ProofError::Checkpoint)?;
        // A proof of nothing would otherwise always succeed.
        if records.is_empty() {
            return Err(ProofError::Empty);
        }
        let mut proved = Vec::new();
        for ProofOfRecord { index, record, path } in records {
            // A path with a hash that cannot be read leads to no root, so it fails like a wrong
            // one.
            let path: Option<Vec<Hash>> = path.iter().map(|hash| Hash::from_hex(hash)).collect();
            let leaf = Leaf { index, hash: Hash::of_leaf(record.as_bytes()) };
            let root = path.and_then(|path| root_of_path(leaf, checkpoint.size(), &path));
            if root != Some(checkpoint.root()) {
                return Err(ProofError::Path { index });
            }
            proved.push(Proved { index, record });
        }
        Ok((checkpoint, proved))
    }
}
