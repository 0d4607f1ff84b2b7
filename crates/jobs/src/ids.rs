//! Random ids of 128 bits. An id cannot be guessed, so it says nothing about other
//! tenants' files and batches.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A text that is no id of the expected kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an id: expected {prefix:?} and 32 hex digits")]
pub struct InvalidId {
    prefix: &'static str,
}

macro_rules! id {
    ($(#[$doc:meta])* $type:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type([u8; 16]);

        impl $type {
            /// Makes an id from 128 random bits.
            pub fn from_random(bits: u128) -> Self {
                Self(bits.to_be_bytes())
            }

            /// Returns the bits.
            pub fn bits(self) -> u128 {
                u128::from_be_bytes(self.0)
            }

            /// Returns the bits as they stand in a column, the highest byte first.
            pub(crate) fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{:032x}"), self.bits())
            }
        }

        impl std::str::FromStr for $type {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                bits_of(text, $prefix).map(Self::from_random).ok_or(InvalidId { prefix: $prefix })
            }
        }

        impl TryFrom<String> for $type {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(id: $type) -> Self {
                id.to_string()
            }
        }
    };
}

id!(
    /// The id of a file as clients see it: `file-` and 32 hex digits.
    FileId, "file-"
);
id!(
    /// The id of a batch as clients see it: `batch_` and 32 hex digits.
    BatchId, "batch_"
);
id!(
    /// The name of a file on disk. Clients never see it.
    BlobId, ""
);

/// Reads the digits after `prefix`. One id has one spelling, so that no two texts name
/// the same row.
fn bits_of(text: &str, prefix: &str) -> Option<u128> {
    let digits = text.strip_prefix(prefix)?;
    // `from_str_radix` alone would also take a sign, capital letters and fewer digits.
    let is_canonical = digits.len() == 32
        && digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    is_canonical.then(|| u128::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_has_one_spelling() {
        let id = FileId::from_random(0xab);
        let text = id.to_string();
        assert_eq!(text, "file-000000000000000000000000000000ab");
        assert_eq!(text.parse(), Ok(id));
        for wrong in [
            "file-ab",
            "file-000000000000000000000000000000AB",
            "file-+00000000000000000000000000000ab",
            "batch_000000000000000000000000000000ab",
            "../000000000000000000000000000000ab",
            "",
        ] {
            assert!(wrong.parse::<FileId>().is_err(), "{wrong:?}");
        }
    }
}
