//! The audit log: every entry and every admin action is a record of a hash
//! chain, written in the same transaction as what it tells of.
//!
//! A record is a line of JSON whose bytes never change: its hash is the leaf
//! hash of RFC 6962 over exactly these bytes, and each record names the hash
//! of the one before. The records are the leaves of a Merkle tree whose root
//! is signed now and then ([`note`]). What reads this back and judges it is
//! another crate, which shares the documented format and no code
//! (`docs/audit.md`).

pub(crate) mod chain;
pub(crate) mod check;
pub(crate) mod export;
pub(crate) mod note;
pub(crate) mod record;
pub(crate) mod tree;
