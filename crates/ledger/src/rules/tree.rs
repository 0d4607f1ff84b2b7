//! The Merkle tree of RFC 6962, section 2.1: its hashes, its root as leaves come,
//! and the path from a leaf to a root. The database keeps only every eighth level
//! of inner nodes; the levels between are hashed again when a path is asked for,
//! at most a few hundred hashes a level.

use std::ops::Range;

use aws_lc_rs::digest::{Context, SHA256, digest};

use crate::error::LedgerError;
use crate::rows::records::{Hash, NodeRow};

/// Levels from one kept level to the next: one node in 256 is kept.
const KEPT_LEVELS: u32 = 8;

/// The kept nodes: returns the node at a level and a position, if it is kept.
pub(crate) type Nodes<'n> = dyn Fn(u32, u64) -> Result<Option<Hash>, LedgerError> + 'n;

/// The perfect subtrees that make up the tree of the first `size` leaves, largest
/// first. The root and the next leaf need nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frontier {
    size: u64,
    /// One hash for each bit that is set in `size`.
    peaks: Vec<Hash>,
}

impl Frontier {
    /// Returns the frontier of the first `size` leaves.
    pub(crate) fn load(size: u64, nodes: &Nodes<'_>) -> Result<Self, LedgerError> {
        let mut peaks = Vec::new();
        for level in set_bits(size) {
            // The position counts subtrees of this width, from the left.
            peaks.push(perfect(nodes, level, (size >> level) - 1)?);
        }
        Ok(Self { size, peaks })
    }

    /// Returns the number of leaves.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the hashes of the subtrees, largest first.
    pub(crate) fn peaks(&self) -> &[Hash] {
        &self.peaks
    }

    /// Returns the subtrees as nodes, largest first.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeRow> {
        let levels = set_bits(self.size).zip(&self.peaks);
        levels.map(|(level, hash)| NodeRow {
            level,
            position: (self.size >> level) - 1,
            hash: *hash,
        })
    }

    /// Adds a leaf. Calls `complete` with every inner node that the leaf completes.
    #[expect(clippy::expect_used, reason = "the tree keeps one peak for each one bit of its size")]
    pub(crate) fn push(&mut self, leaf: Hash, mut complete: impl FnMut(NodeRow)) {
        let mut hash = leaf;
        for level in 1..=self.size.trailing_ones() {
            // Each trailing one bit is a subtree that the new leaf completes, like a carry.
            let left = self.peaks.pop().expect("a peak for each bit of the size");
            hash = node(&left, &hash);
            // The size is that before the leaf: shifted, it counts the nodes to the left.
            complete(NodeRow { level, position: self.size >> level, hash });
        }
        self.peaks.push(hash);
        self.size += 1;
    }

    /// Returns the root. The right subtrees are joined first, as RFC 6962 splits.
    pub(crate) fn root(&self) -> Hash {
        // The smallest subtree is the rightmost one.
        let joined = self.peaks.iter().rev().copied().reduce(|right, left| node(&left, &right));
        joined.unwrap_or_else(|| hash_of(digest(&SHA256, b"")))
    }
}

/// Returns the bits that are set in `size`, highest first.
fn set_bits(size: u64) -> impl Iterator<Item = u32> {
    (0..u64::BITS).rev().filter(move |bit| size >> bit & 1 == 1)
}

/// Returns `SHA-256(0x00 || bytes)`.
pub(crate) fn leaf(bytes: &[u8]) -> Hash {
    let mut context = Context::new(&SHA256);
    // RFC 6962 sets leaves apart from inner nodes, so that neither passes for the other.
    context.update(&[0x00]);
    context.update(bytes);
    hash_of(context.finish())
}

/// Returns `SHA-256(0x01 || left || right)`.
fn node(left: &Hash, right: &Hash) -> Hash {
    let mut context = Context::new(&SHA256);
    context.update(&[0x01]);
    context.update(left);
    context.update(right);
    hash_of(context.finish())
}

fn hash_of(digest: aws_lc_rs::digest::Digest) -> Hash {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest.as_ref());
    hash
}

/// Returns true if nodes of `level` are kept in the database.
pub(crate) fn is_kept(level: u32) -> bool {
    level > 0 && level.is_multiple_of(KEPT_LEVELS)
}

/// Returns the siblings on the way from leaf `index` to the root of the first
/// `size` leaves, lowest first: `PATH(index, D[size])` of RFC 6962, section 2.1.1.
pub(crate) fn path(index: u64, nodes: &Nodes<'_>, size: u64) -> Result<Vec<Hash>, LedgerError> {
    // Callers compare with the signed size first, so this is a mistake in the program.
    assert!(index < size, "leaf {index} is not among {size}");
    let (mut begin, mut end) = (0, size);
    let mut siblings = Vec::new();
    while end - begin > 1 {
        let middle = begin + widest_left(end - begin);
        let sibling = if index < middle {
            let right = range(nodes, middle..end)?;
            end = middle;
            right
        } else {
            let left = range(nodes, begin..middle)?;
            begin = middle;
            left
        };
        siblings.push(sibling);
    }
    // The walk goes down from the root, and a path is read from the leaf up.
    siblings.reverse();
    Ok(siblings)
}

/// Returns the largest power of two below `width`, which is at least 2.
fn widest_left(width: u64) -> u64 {
    1 << (u64::BITS - 1 - (width - 1).leading_zeros())
}

/// Returns the hash over `leaves`, a range as the tree splits.
fn range(nodes: &Nodes<'_>, leaves: Range<u64>) -> Result<Hash, LedgerError> {
    let Range { start: begin, end } = leaves;
    let width = end - begin;
    if width.is_power_of_two() {
        // A range whose width is a power of two is one node: the tree splits at such bounds.
        return perfect(nodes, width.trailing_zeros(), begin / width);
    }
    let middle = begin + widest_left(width);
    Ok(node(&range(nodes, begin..middle)?, &range(nodes, middle..end)?))
}

/// Returns the root of the perfect subtree at `level` and `position`.
fn perfect(nodes: &Nodes<'_>, level: u32, position: u64) -> Result<Hash, LedgerError> {
    // Archives keep their peaks, whatever the level, so look before hashing again.
    match nodes(level, position)? {
        Some(found) => Ok(found),
        // At most seven levels are hashed again, because the next kept level stops the descent.
        None if level > 0 && !is_kept(level) => {
            let left = perfect(nodes, level - 1, 2 * position)?;
            let right = perfect(nodes, level - 1, 2 * position + 1)?;
            Ok(node(&left, &right))
        }
        None => Err(LedgerError::Damaged(format!(
            "the audit log has no hash {position} of level {level}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::hex::hex;

    /// The definition of RFC 6962, section 2.1.
    fn naive_root(leaves: &[Vec<u8>]) -> Hash {
        match leaves {
            [] => hash_of(digest(&SHA256, b"")),
            [one] => leaf(one),
            several => {
                let mut k = 1;
                while k * 2 < several.len() {
                    k *= 2;
                }
                node(&naive_root(&several[..k]), &naive_root(&several[k..]))
            }
        }
    }

    /// The definition of RFC 6962, section 2.1.1.
    fn naive_path(m: usize, leaves: &[Vec<u8>]) -> Vec<Hash> {
        if leaves.len() == 1 {
            return Vec::new();
        }
        let mut k = 1;
        while k * 2 < leaves.len() {
            k *= 2;
        }
        if m < k {
            let mut path = naive_path(m, &leaves[..k]);
            path.push(naive_root(&leaves[k..]));
            path
        } else {
            let mut path = naive_path(m - k, &leaves[k..]);
            path.push(naive_root(&leaves[..k]));
            path
        }
    }

    /// The nodes that a database would keep of these leaves.
    type Kept = HashMap<(u32, u64), Hash>;

    fn kept(leaves: &[Vec<u8>]) -> (Kept, Frontier) {
        let mut kept = Kept::new();
        let mut frontier = Frontier::default();
        for (seq, bytes) in leaves.iter().enumerate() {
            let hash = leaf(bytes);
            kept.insert((0, seq as u64), hash);
            frontier.push(hash, |node| {
                if is_kept(node.level) {
                    kept.insert((node.level, node.position), node.hash);
                }
            });
        }
        (kept, frontier)
    }

    fn find(kept: &Kept) -> impl Fn(u32, u64) -> Result<Option<Hash>, LedgerError> + '_ {
        |level, position| Ok(kept.get(&(level, position)).copied())
    }

    fn leaves(count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|index| format!("leaf {index}").into_bytes()).collect()
    }

    /// The leaves and roots of the Certificate Transparency reference
    /// implementation's tests (`merkle_tree_test.cc`, RFC 6962).
    #[test]
    fn roots_equal_reference_vectors() {
        let inputs: [&[u8]; 8] = [
            &[],
            &[0x00],
            &[0x10],
            &[0x20, 0x21],
            &[0x30, 0x31],
            &[0x40, 0x41, 0x42, 0x43],
            &[0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57],
            &[
                0x60, 0x61, 0x62, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x6b, 0x6c, 0x6d,
                0x6e, 0x6f,
            ],
        ];
        let roots = [
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
            "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
            "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
            "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
            "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
            "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
        ];
        let mut frontier = Frontier::default();
        for (size, root) in roots.into_iter().enumerate() {
            assert_eq!(hex(&frontier.root()), root, "{size} leaves");
            if let Some(input) = inputs.get(size) {
                frontier.push(leaf(input), |_| ());
            }
        }
    }

    #[test]
    fn paths_cross_a_kept_level() {
        let leaves = leaves(1_100);
        let (kept, frontier) = kept(&leaves);
        assert_eq!(frontier.root(), naive_root(&leaves));
        assert_eq!(Frontier::load(1_100, &find(&kept)).expect("loads"), frontier);
        for index in [0, 255, 256, 700, 1_023, 1_024, 1_099] {
            let path = path(index as u64, &find(&kept), 1_100).expect("reads");
            assert_eq!(path, naive_path(index, &leaves), "leaf {index}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        #[test]
        fn roots_and_paths_equal_rfc_definition(count in 1_usize..400, at in 0.0..1.0_f64) {
            let leaves = leaves(count);
            let (kept, frontier) = kept(&leaves);
            prop_assert_eq!(frontier.root(), naive_root(&leaves));
            let size = 1 + (at * (count - 1) as f64) as usize;
            let earlier = Frontier::load(size as u64, &find(&kept)).expect("loads");
            prop_assert_eq!(earlier.root(), naive_root(&leaves[..size]));
            let index = (at * size as f64) as usize % size;
            let path = path(index as u64, &find(&kept), size as u64).expect("reads");
            prop_assert_eq!(path, naive_path(index, &leaves[..size]));
        }
    }
}
