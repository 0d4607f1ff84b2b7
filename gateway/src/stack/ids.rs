//! Ids of requests: 128 random bits each, drawn from the system's generator
//! some hundred at a time, because a refusal should cost less than a draw.

use std::sync::{Mutex, PoisonError};

use http::HeaderValue;
use tollgate_domain::RequestId;

/// Where ids come from.
pub(super) struct Ids {
    drawn: Mutex<Drawn>,
}

struct Drawn {
    bits: [u8; ID * AT_ONCE],
    /// Bytes given out; they are never given out again.
    used: usize,
}

impl Ids {
    pub(super) fn new() -> Self {
        let bits = [0; ID * AT_ONCE];
        Self { drawn: Mutex::new(Drawn { bits, used: bits.len() }) }
    }

    /// A new id, and as a header. The header is marked as one that HTTP/2 must
    /// not remember: it never comes again.
    pub(super) fn draw(&self) -> (RequestId, HeaderValue) {
        let id = RequestId::from_random(self.bits());
        let mut header = HeaderValue::from_str(id.as_str()).expect("hex digits are visible ASCII");
        header.set_sensitive(true);
        (id, header)
    }

    fn bits(&self) -> u128 {
        // A panic within leaves what was drawn as random as it was.
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if drawn.used == drawn.bits.len() {
            // The system's generator does not fail once it has been seeded.
            aws_lc_rs::rand::fill(&mut drawn.bits).expect("the system gives random bytes");
            drawn.used = 0;
        }
        let (_, left) = drawn.bits.split_at(drawn.used);
        let bits = *left.first_chunk().expect("whole ids are left");
        drawn.used += ID;
        u128::from_ne_bytes(bits)
    }
}

/// Bytes of an id.
const ID: usize = 16;

/// Ids drawn at once.
const AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_id_comes_twice() {
        let ids = Ids::new();
        let seen: std::collections::HashSet<String> = (0..3 * AT_ONCE)
            .map(|_| {
                let (id, header) = ids.draw();
                assert_eq!(header, id.as_str());
                id.as_str().to_owned()
            })
            .collect();
        assert_eq!(seen.len(), 3 * AT_ONCE);
    }
}
