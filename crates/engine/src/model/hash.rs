//! A model's identity: SHA-256 over its configuration and the content of its weight
//! files.
//!
//! The files are hashed in pieces on all cores, and the pieces' hashes are hashed in
//! order, so that a large model does not wait for one core.

use std::sync::atomic::{AtomicUsize, Ordering};

use aws_lc_rs::digest::{Context, Digest, SHA256, digest};

use crate::weights::Weights;

/// Returns a SHA-256 in hex over the hash of `config`, and for each weight file in
/// order of name: its name, its length in bytes, and the hashes of its pieces.
pub(super) fn of_model(config: &[u8], weights: &Weights) -> String {
    let files = weights.files();
    let pieces: Vec<&[u8]> = files.iter().flat_map(|(_, bytes)| bytes.chunks(PIECE)).collect();
    let mut hashes = hash_all(&pieces).into_iter();
    let mut whole = Context::new(&SHA256);
    whole.update(digest(&SHA256, config).as_ref());
    for (name, bytes) in files {
        whole.update(name.as_bytes());
        // A NUL ends the name, so that name and length cannot be confused.
        whole.update(&[0]);
        whole.update(&(bytes.len() as u64).to_le_bytes());
        for hash in hashes.by_ref().take(bytes.len().div_ceil(PIECE)) {
            whole.update(hash.as_ref());
        }
    }
    whole.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[expect(clippy::expect_used, reason = "hashing mapped bytes does not panic")]
fn hash_all(pieces: &[&[u8]]) -> Vec<Digest> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(pieces.len());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            // Relaxed: the counter only hands out indexes, and joining a thread publishes its
            // hashes.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(index) else { break };
            done.push((index, digest(&SHA256, piece)));
        }
        done
    };
    let mut hashes: Vec<(usize, Digest)> = std::thread::scope(|scope| {
        // From 1, because this thread hashes as well.
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut hashes = work();
        for helper in helpers {
            hashes.extend(helper.join().expect("hashing does not panic"));
        }
        hashes
    });
    // Threads finish in any order, and the identity must not depend on it.
    hashes.sort_by_key(|&(index, _)| index);
    hashes.into_iter().map(|(_, hash)| hash).collect()
}

const PIECE: usize = 16 << 20;
