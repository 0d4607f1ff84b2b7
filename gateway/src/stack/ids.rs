//! Ids of requests: the time in milliseconds at which some hundred of them were
//! drawn, 48 bits, then 80 random ones of their own. Drawn together because a
//! refusal should cost less than a draw. They grow with time because the
//! ledger finds requests by id: what is written together then stands together,
//! and not each on a page of its own.

use std::sync::{Mutex, PoisonError};

use http::HeaderValue;
use tollgate_domain::RequestId;

use crate::Clock;

/// Where ids come from.
pub(super) struct Ids {
    clock: Clock,
    drawn: Mutex<Drawn>,
}

struct Drawn {
    /// When.
    millis: u64,
    bits: [u8; ID * AT_ONCE],
    /// Bytes given out; they are never given out again.
    used: usize,
}

impl Ids {
    pub(super) fn new(clock: Clock) -> Self {
        let bits = [0; ID * AT_ONCE];
        Self { clock, drawn: Mutex::new(Drawn { millis: 0, bits, used: bits.len() }) }
    }

    /// The bits of a new id, and the id as a header. The header is marked as one
    /// that HTTP/2 must not remember: it never comes again.
    pub(super) fn draw(&self) -> (u128, HeaderValue) {
        let bits = self.bits();
        let text = RequestId::text_of(bits);
        let mut header = HeaderValue::from_bytes(&text).expect("hex digits are visible ASCII");
        header.set_sensitive(true);
        (bits, header)
    }

    fn bits(&self) -> u128 {
        // A panic within leaves what was drawn as random as it was.
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if drawn.used == drawn.bits.len() {
            // The system's generator does not fail once it has been seeded.
            aws_lc_rs::rand::fill(&mut drawn.bits).expect("the system gives random bytes");
            drawn.used = 0;
            drawn.millis = self.clock.utc().0 / 1_000_000;
        }
        let (_, left) = drawn.bits.split_at(drawn.used);
        let random: [u8; ID] = *left.first_chunk().expect("whole ids are left");
        drawn.used += ID;
        let bits = random.iter().fold(0, |bits, byte| bits << 8 | u128::from(*byte));
        u128::from(drawn.millis) << RANDOM_BITS | bits
    }
}

/// Random bytes of an id.
const ID: usize = 10;
const RANDOM_BITS: usize = 8 * ID;

/// Ids drawn at once.
const AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_id_comes_twice() {
        let ids = Ids::new(Clock::system());
        let seen: std::collections::HashSet<String> = (0..3 * AT_ONCE)
            .map(|_| {
                let (bits, header) = ids.draw();
                let id = RequestId::from_random(bits);
                assert_eq!(header, id.as_str());
                id.as_str().to_owned()
            })
            .collect();
        assert_eq!(seen.len(), 3 * AT_ONCE);
    }

    #[test]
    fn they_grow_with_time() {
        let ids = Ids::new(Clock::system());
        let first = ids.draw().0;
        std::thread::sleep(std::time::Duration::from_millis(2));
        let later = (0..AT_ONCE).map(|_| ids.draw().0).max().expect("some");
        assert!(first >> RANDOM_BITS < later >> RANDOM_BITS, "{first:032x} {later:032x}");
        let second = ids.draw().0;
        assert_ne!(second << 48 >> 48, later << 48 >> 48, "the rest is drawn");
    }
}
