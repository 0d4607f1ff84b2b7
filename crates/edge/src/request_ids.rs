//! Ids of requests: 48 bits of milliseconds, then 24 bits for the number of the
//! gateway, which is 0 where there is one gateway, then 56 random bits. The `ulid` crate draws entropy for each id; this module draws
//! the entropy of 256 ids at once, because a refusal must cost less than a
//! draw. Ids grow with time, so that rows which the ledger writes together
//! stand on the same pages of its index.

use std::sync::{Mutex, PoisonError};

use http::HeaderValue;
use tollgate_domain::{RequestId, UtcTime};

/// A source of ids.
pub struct RequestIds {
    /// The number of the gateway: 24 bits.
    gateway: u32,
    pool: Mutex<EntropyPool>,
}

/// Random bytes for the next ids.
struct EntropyPool {
    /// Unix milliseconds at which the bytes were drawn.
    millis: u64,
    bytes: [u8; RANDOM_BYTES * IDS_AT_ONCE],
    /// Bytes that are spent; they are never used again.
    used: usize,
}

impl RequestIds {
    /// Creates the source of the ids of the gateway with this number, which has 24 bits.
    pub fn new(gateway: u32) -> Self {
        let bytes = [0; RANDOM_BYTES * IDS_AT_ONCE];
        let pool = Mutex::new(EntropyPool { millis: 0, bytes, used: bytes.len() });
        Self { gateway: gateway & ((1 << GATEWAY_BITS) - 1), pool }
    }

    /// Returns the bits of a new id, and the id as a header. `utc` reads the
    /// clock; it is called only when entropy is drawn.
    #[expect(
        clippy::expect_used,
        reason = "an id is written in hex digits, which are visible ASCII"
    )]
    pub fn draw(&self, utc: impl FnOnce() -> UtcTime) -> (u128, HeaderValue) {
        let bits = self.bits(utc);
        let text = RequestId::text_of(bits);
        let mut header = HeaderValue::from_bytes(&text).expect("hex digits are visible ASCII");
        // HTTP/2 must not put the id into its table: the id never comes again.
        header.set_sensitive(true);
        (bits, header)
    }

    #[expect(
        clippy::expect_used,
        reason = "the system's generator does not fail once it is seeded, and the pool holds whole ids"
    )]
    fn bits(&self, utc: impl FnOnce() -> UtcTime) -> u128 {
        // A panic in here leaves the pool as random as before.
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.used == pool.bytes.len() {
            // The system's generator does not fail once it has been seeded.
            aws_lc_rs::rand::fill(&mut pool.bytes).expect("the system gives random bytes");
            pool.used = 0;
            pool.millis = utc().0 / 1_000_000;
        }
        let (_, left) = pool.bytes.split_at(pool.used);
        let random: [u8; RANDOM_BYTES] = *left.first_chunk().expect("whole ids are left");
        pool.used += RANDOM_BYTES;
        let bits = random.iter().fold(0, |bits, byte| bits << 8 | u128::from(*byte));
        let gateway = u128::from(self.gateway) << RANDOM_BITS;
        u128::from(pool.millis) << (GATEWAY_BITS + RANDOM_BITS) | gateway | bits
    }
}

/// Random bytes of an id.
const RANDOM_BYTES: usize = 7;
const RANDOM_BITS: usize = 8 * RANDOM_BYTES;
/// Bits for the number of the gateway.
const GATEWAY_BITS: usize = 24;

/// Ids that share one draw of entropy.
const IDS_AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_unique() {
        let ids = RequestIds::new(0);
        let seen: std::collections::HashSet<String> = (0..3 * IDS_AT_ONCE)
            .map(|_| {
                let (bits, header) = ids.draw(|| UtcTime(1_000_000));
                let id = RequestId::from_random(bits);
                assert_eq!(header, id.as_str());
                id.as_str().to_owned()
            })
            .collect();
        assert_eq!(seen.len(), 3 * IDS_AT_ONCE);
    }

    #[test]
    fn request_ids_grow_with_time() {
        let ids = RequestIds::new(0);
        let first = ids.draw(|| UtcTime(1_000_000)).0;
        let at = |millis: u64| move || UtcTime(millis * 1_000_000);
        let later = (0..IDS_AT_ONCE).map(|_| ids.draw(at(3)).0).max().expect("some");
        assert!(first >> RANDOM_BITS < later >> RANDOM_BITS, "{first:032x} {later:032x}");
        let second = ids.draw(at(3)).0;
        assert_ne!(second << 48 >> 48, later << 48 >> 48, "the rest is random");
    }

    #[test]
    fn request_ids_have_number_of_gateway() {
        for (number, expected) in [(1, 1), ((1 << 24) - 1, (1 << 24) - 1), (1 << 24, 0)] {
            let (bits, _) = RequestIds::new(number).draw(|| UtcTime(5_000_000));
            assert_eq!(bits >> RANDOM_BITS, (5 << GATEWAY_BITS) | expected);
        }
    }
}
