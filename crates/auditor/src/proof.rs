//! The proof that records of one request are in a signed log.

use serde::Deserialize;

use crate::tree::root_of_path;
use crate::{Checkpoint, Hash, NoteError, VerifierKey};

/// A proof as it is written: a JSON object.
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

/// A record that is in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proved {
    /// Its number.
    pub index: u64,
    /// Its bytes.
    pub record: String,
}

/// Why a proof proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// It is no proof.
    #[error("this is no proof: {0}")]
    Form(String),
    /// Its checkpoint cannot be believed.
    #[error("the checkpoint: {0}")]
    Checkpoint(NoteError),
    /// A record's path does not lead to the signed root.
    #[error("record {index} is not in the log of that checkpoint as it stands here")]
    Path {
        /// Its number.
        index: u64,
    },
    /// It has no record.
    #[error("it has no record")]
    Empty,
}

impl Proof {
    /// Reads a proof.
    ///
    /// # Errors
    /// [`ProofError::Form`]
    pub fn read(text: &str) -> Result<Self, ProofError> {
        serde_json::from_str(text).map_err(|error| ProofError::Form(error.to_string()))
    }

    /// The records that it proves, and the checkpoint that signs them.
    ///
    /// # Errors
    /// One of them is not proved, or the checkpoint cannot be believed.
    pub fn verify(self, keys: &[VerifierKey]) -> Result<(Checkpoint, Vec<Proved>), ProofError> {
        let Self { checkpoint, records } = self;
        let checkpoint = Checkpoint::open(&checkpoint, keys).map_err(ProofError::Checkpoint)?;
        if records.is_empty() {
            return Err(ProofError::Empty);
        }
        let mut proved = Vec::new();
        for ProofOfRecord { index, record, path } in records {
            let path: Option<Vec<Hash>> = path.iter().map(|hash| Hash::from_hex(hash)).collect();
            let leaf = Hash::of_leaf(record.as_bytes());
            let root = path.and_then(|path| root_of_path(leaf, index, checkpoint.size(), &path));
            if root != Some(checkpoint.root()) {
                return Err(ProofError::Path { index });
            }
            proved.push(Proved { index, record });
        }
        Ok((checkpoint, proved))
    }
}
