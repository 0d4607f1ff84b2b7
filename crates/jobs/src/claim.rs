//! Claims: the right of one run of a dispatcher to a batch, and the names of tries.
//!
//! A commit under a claim that is not the batch's latest changes nothing. The request
//! id of a try follows from the claim, the line and the number of the try, so that
//! another process can name the tries of a dead one.

use tollgate_domain::RequestId;

use crate::batch::BatchRow;
use crate::file::{BlobRange, FileRow};
use crate::hash::Sha256;
use crate::ids::BatchId;

/// The number of a claim within its batch, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimNumber(pub u64);

/// The random part of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimSeed {
    /// 128 random bits, which fence the claim.
    pub bits: u128,
    /// The bits of a request id drawn at the claim: 48 bits of milliseconds, then 24
    /// bits of the gateway's number, then bits that are not used.
    pub id_bits: u128,
}

/// A claim that a dispatcher holds or held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The batch.
    pub batch: BatchId,
    /// The number.
    pub number: ClaimNumber,
    /// The random part.
    pub seed: ClaimSeed,
}

/// A try of a line under a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TryName {
    /// The claim.
    pub claim: ClaimNumber,
    /// The line, from 0.
    pub line: u64,
    /// The number of the try under the claim, from 0.
    pub number: u32,
}

impl Claim {
    /// Returns the request id of a try.
    pub fn request_id(&self, line: u64, number: u32) -> RequestId {
        let mut hash = Sha256::new();
        // Fields of fixed length, so that no two tries give the hash the same bytes.
        hash.update(&self.seed.bits.to_be_bytes());
        hash.update(&line.to_be_bytes());
        hash.update(&number.to_be_bytes());
        let digest = hash.finish();
        let low = digest.iter().take(7).fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
        RequestId::from_random(self.seed.id_bits >> LOW_BITS << LOW_BITS | low)
    }

    /// Returns the name of a try.
    pub fn try_name(&self, line: u64, number: u32) -> TryName {
        TryName { claim: self.number, line, number }
    }
}

/// A try that may have reached a worker and that no row answers. Its fault cap must be
/// in the ledger before its line runs again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenTry {
    /// The line, from 0.
    pub line: u64,
    /// The request id.
    pub request: RequestId,
}

/// A batch under a new claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The claim.
    pub claim: Claim,
    /// The batch.
    pub batch: BatchRow,
    /// The input.
    pub file: FileRow,
    /// The bytes of the input.
    pub ranges: Vec<BlobRange>,
    /// The lines that have an answer.
    pub answered: Vec<u64>,
    /// The tries of earlier claims that may lack their caps.
    pub open: Vec<OpenTry>,
    /// Claims in turn, this one included, of which those before sent lines and brought
    /// no answer.
    pub barren: u32,
}

/// Bits of a request id that come from the hash.
const LOW_BITS: u32 = 56;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_names_the_try() {
        let claim = Claim {
            batch: BatchId::from_random(1),
            number: ClaimNumber(1),
            seed: ClaimSeed { bits: 7, id_bits: u128::MAX << 56 },
        };
        let id = claim.request_id(3, 0);
        assert!(id.as_str().starts_with("req-ffffffffffffffffff"), "{id}");
        assert_eq!(id, claim.request_id(3, 0));
        assert_ne!(id, claim.request_id(3, 1));
        assert_ne!(id, claim.request_id(4, 0));
        let other = Claim { seed: ClaimSeed { bits: 8, ..claim.seed }, ..claim };
        assert_ne!(id, other.request_id(3, 0));
    }
}
