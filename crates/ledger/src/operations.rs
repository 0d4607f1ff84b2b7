//! The operations of the ledger: each reads rows, asks the rules, writes rows.
//! An operation runs inside its caller's transaction and leaves rolling back to the
//! caller, unless it opens a file itself.

pub(crate) mod acts;
pub(crate) mod archive;
pub(crate) mod backup;
pub(crate) mod cap;
pub(crate) mod chain;
pub(crate) mod check;
pub(crate) mod export;
pub(crate) mod migrate;
pub(crate) mod move_to_server;
pub(crate) mod plans;
pub(crate) mod post;
pub(crate) mod query;
pub(crate) mod statement;
pub(crate) mod store;
pub(crate) mod wal;
pub(crate) mod wal_rewrite;
