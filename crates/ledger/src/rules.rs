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

/// Returns bytes as lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(DIGITS[usize::from(byte >> 4)].into());
        text.push(DIGITS[usize::from(byte & 15)].into());
    }
    text
}
