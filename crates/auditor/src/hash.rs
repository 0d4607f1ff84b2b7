//! SHA-256 as RFC 6962 uses it, and the hash as hex text.

use std::fmt;

use aws_lc_rs::digest::{Context, SHA256, digest};

/// A SHA-256 hash. Shown as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash(pub(crate) [u8; 32]);

impl Hash {
    /// The hash that stands for the record before the first one.
    pub(crate) const ZERO: Self = Self([0; 32]);

    /// Returns the hash of a leaf: `SHA-256(0x00 || bytes)`.
    pub(crate) fn of_leaf(bytes: &[u8]) -> Self {
        // The prefix differs from that of inner nodes. Otherwise the bytes of an inner node could
        // be presented as a record.
        Self::of(&[&[0x00], bytes])
    }

    /// Returns the hash of an inner node: `SHA-256(0x01 || left || right)`.
    pub(crate) fn of_node(left: &Self, right: &Self) -> Self {
        Self::of(&[&[0x01], &left.0, &right.0])
    }

    /// Returns the root of a tree without leaves.
    pub(crate) fn of_nothing() -> Self {
        Self(bytes(digest(&SHA256, b"")))
    }

    fn of(parts: &[&[u8]]) -> Self {
        let mut context = Context::new(&SHA256);
        for part in parts {
            context.update(part);
        }
        Self(bytes(context.finish()))
    }

    /// Parses 64 lower-case hex digits; `None` for any other text.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            // Upper case is refused: a second spelling would let bytes of an export change
            // unnoticed.
            _ => None,
        };
        // The fixed length makes the pairs below exact: no digit and no byte is left over.
        let digits = <&[u8; 64]>::try_from(text.as_bytes()).ok()?;
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(hash))
    }
}

fn bytes(digest: aws_lc_rs::digest::Digest) -> [u8; 32] {
    let mut bytes = [0; 32];
    // The lengths are equal: a SHA-256 digest has 32 bytes.
    bytes.copy_from_slice(digest.as_ref());
    bytes
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hash({self})")
    }
}
