//! The ledger's rules, as pure functions: from a block or a cap and the rows that
//! are known, to postings, corrections, record bytes, statements. No database, no
//! clock, no file.

pub(crate) mod balance;
pub(crate) mod block;
pub(crate) mod charge;
pub(crate) mod correction;
pub(crate) mod note;
pub(crate) mod plans;
pub(crate) mod record;
pub(crate) mod statement;
pub(crate) mod tree;
