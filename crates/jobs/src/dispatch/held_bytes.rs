//! Bytes of the bodies of open tries: those that run, and those that wait for their records.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of the bodies of a batch's open tries.
#[derive(Clone, Default)]
pub(super) struct OpenBytes(Arc<AtomicUsize>);

/// The bytes of one body. A drop ends their count.
pub(super) struct HeldBytes {
    all: OpenBytes,
    bytes: usize,
}

impl OpenBytes {
    /// Returns true if one more try may begin. A body of any size begins below the bound.
    pub(super) fn has_room(&self) -> bool {
        // A count, which orders no other memory.
        self.0.load(Ordering::Relaxed) < MOST
    }

    /// Counts a body until the result is dropped.
    pub(super) fn hold(&self, body: &str) -> HeldBytes {
        self.0.fetch_add(body.len(), Ordering::Relaxed);
        HeldBytes { all: self.clone(), bytes: body.len() }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes of all bodies: 512 tries of 8 KiB. Without the bound, 512 bodies of the largest size
/// would take a gibibyte.
const MOST: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_bytes_have_room_below_their_bound() {
        let open = OpenBytes::default();
        let half = "x".repeat(MOST / 2);
        let first = open.hold(&half);
        assert!(open.has_room());
        let second = open.hold(&half);
        assert!(!open.has_room());
        drop(first);
        let giant = open.hold(&"x".repeat(MOST));
        assert!(!open.has_room());
        drop((second, giant));
        assert!(open.has_room());
    }
}
