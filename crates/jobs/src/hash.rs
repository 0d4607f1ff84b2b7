//! SHA-256 over bytes that come in parts.

use aws_lc_rs::digest::{Context, SHA256};

/// A running hash.
#[derive(Clone)]
pub(crate) struct Sha256(Context);

impl Sha256 {
    pub(crate) fn new() -> Self {
        Self(Context::new(&SHA256))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the hash of all parts.
    pub(crate) fn finish(self) -> [u8; 32] {
        let mut hash = [0; 32];
        let digest = self.0.finish();
        // Both have 32 bytes, so nothing is left out.
        hash.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
        hash
    }
}
