//! Judges an exported audit log: offline, from plain files and a public key.
//!
//! It shares nothing with what writes the log but the format that
//! `docs/audit.md` describes, so that a mistake of the writer is no mistake of
//! the judge. It believes no file: what it reads may be forged, torn or
//! endless, and the first record that cannot be right is named.

mod hash;
mod log;
mod note;
mod proof;
mod tree;

pub use hash::Hash;
pub use log::{Fault, Folder, LogError, Sound, verify};
pub use note::{Checkpoint, NoteError, VerifierKey, VerifierKeyError};
pub use proof::{Proof, ProofError, Proved};
