//! A verifier of exported audit logs: offline, from plain files and a public key.
//!
//! The crate shares only the format that `docs/audit.md` describes with the writer
//! of the log, so that a mistake of the writer is no mistake of the verifier. It
//! trusts no file: a file may be forged, torn or endless. It names the first record
//! that cannot be right.

mod hash;
mod log;
mod note;
mod proof;
mod tree;

pub use hash::Hash;
pub use log::{Fault, Folder, LogError, Sound, verify};
pub use note::{Checkpoint, NoteError, VerifierKey, VerifierKeyError};
pub use proof::{Proof, ProofError, Proved};
