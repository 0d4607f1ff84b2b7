//! The Merkle tree of RFC 6962 as a verifier needs it: the root of the leaves so
//! far, and the root that a path leads to.

use crate::Hash;

/// The tree of the leaves so far, as its perfect subtrees, largest first. It needs
/// one hash for each bit of its size, whatever its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    size: u64,
    subtrees: Vec<Hash>,
}

impl Tree {
    /// Returns a tree of `size` leaves that are known by their subtrees only; `None`
    /// where the number of subtrees does not fit the size.
    pub(crate) fn after(size: u64, subtrees: Vec<Hash>) -> Option<Self> {
        // Each one bit of the size stands for one perfect subtree.
        (size.count_ones() as usize == subtrees.len()).then_some(Self { size, subtrees })
    }

    /// Returns the number of leaves.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Adds a leaf.
    pub(crate) fn push(&mut self, leaf: Hash) {
        self.subtrees.push(leaf);
        self.size += 1;
        // Two subtrees of one width become one of twice the width, as a carry does.
        for _ in 0..self.size.trailing_zeros() {
            let (right, left) = (self.subtrees.pop(), self.subtrees.pop());
            let (Some(left), Some(right)) = (left, right) else {
                unreachable!("a subtree for each bit of the size")
            };
            self.subtrees.push(Hash::of_node(&left, &right));
        }
    }

    /// Returns the root.
    pub(crate) fn root(&self) -> Hash {
        // RFC 6962 splits at the largest power of two, so the right side joins first.
        let mut from_the_right = self.subtrees.iter().rev();
        let Some(&last) = from_the_right.next() else { return Hash::of_nothing() };
        from_the_right.fold(last, |right, left| Hash::of_node(left, &right))
    }
}

/// A leaf of a tree.
#[derive(Clone, Copy)]
pub(crate) struct Leaf {
    /// The number of leaves before it.
    pub(crate) index: u64,
    /// The hash of its content.
    pub(crate) hash: Hash,
}

/// Returns the root that `path` leads to from `leaf` in a tree of `size` leaves; `None`
/// where the path has the wrong length. RFC 9162, section 2.1.3.2.
pub(crate) fn root_of_path(leaf: Leaf, size: u64, path: &[Hash]) -> Option<Hash> {
    let Leaf { index, mut hash } = leaf;
    // This also refuses an empty tree, so `size - 1` below does not underflow.
    if index >= size {
        return None;
    }
    let (mut node, mut last) = (index, size - 1);
    for sibling in path {
        if last == 0 {
            // The path goes on above the root.
            return None;
        }
        if node & 1 == 1 || node == last {
            hash = Hash::of_node(sibling, &hash);
            // On the right edge some levels have no sibling; skip them.
            while node & 1 == 0 && node != 0 {
                node >>= 1;
                last >>= 1;
            }
        } else {
            hash = Hash::of_node(&hash, sibling);
        }
        node >>= 1;
        last >>= 1;
    }
    // Levels are left over if the path was too short.
    (last == 0).then_some(hash)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leaves(count: usize) -> Vec<Hash> {
        (0..count).map(|index| Hash::of_leaf(format!("leaf {index}").as_bytes())).collect()
    }

    /// The definition of RFC 6962, section 2.1.
    fn naive_root(leaves: &[Hash]) -> Hash {
        match leaves {
            [] => Hash::of_nothing(),
            [one] => *one,
            several => {
                let (left, right) = several.split_at(half(several.len()));
                Hash::of_node(&naive_root(left), &naive_root(right))
            }
        }
    }

    /// The definition of RFC 6962, section 2.1.1.
    fn naive_path(index: usize, leaves: &[Hash]) -> Vec<Hash> {
        if leaves.len() == 1 {
            return Vec::new();
        }
        let (left, right) = leaves.split_at(half(leaves.len()));
        let (mut path, other) = if index < left.len() {
            (naive_path(index, left), naive_root(right))
        } else {
            (naive_path(index - left.len(), right), naive_root(left))
        };
        path.push(other);
        path
    }

    /// Returns the largest power of two below `count`.
    fn half(count: usize) -> usize {
        count.next_power_of_two() / 2
    }

    fn tree(leaves: &[Hash]) -> Tree {
        let mut tree = Tree::after(0, Vec::new()).expect("nothing");
        leaves.iter().for_each(|&leaf| tree.push(leaf));
        tree
    }

    /// Leaves and roots of the Certificate Transparency reference tests.
    #[test]
    fn roots_equal_reference_vectors() {
        let inputs: [&[u8]; 4] = [&[], &[0x00], &[0x10], &[0x20, 0x21]];
        let roots = [
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
            "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ];
        for (size, root) in roots.into_iter().enumerate() {
            let leaves: Vec<Hash> =
                inputs[..size].iter().map(|input| Hash::of_leaf(input)).collect();
            assert_eq!(tree(&leaves).root().to_string(), root, "{size} leaves");
        }
    }

    proptest! {
        #[test]
        fn trees_and_paths_equal_rfc_definition(count in 1_usize..300, at in 0.0..1.0_f64) {
            let leaves = leaves(count);
            prop_assert_eq!(tree(&leaves).root(), naive_root(&leaves));
            let index = (at * count as f64) as usize % count;
            let path = naive_path(index, &leaves);
            let leaf = Leaf { index: index as u64, hash: leaves[index] };
            let size = count as u64;
            let root = |path: &[Hash]| root_of_path(leaf, size, path);
            prop_assert_eq!(root(&path), Some(naive_root(&leaves)));
            // Another place, another size, a longer or shorter path: no proof.
            if count > 1 {
                let moved = Leaf { index: (leaf.index + 1) % size, ..leaf };
                prop_assert_ne!(root_of_path(moved, size, &path), Some(naive_root(&leaves)));
                prop_assert_eq!(root(&path[1..]), None);
            }
            let longer = [&path[..], &[Hash::ZERO]].concat();
            prop_assert_eq!(root(&longer), None);
            let beyond = Leaf { index: size, ..leaf };
            prop_assert_eq!(root_of_path(beyond, size, &path), None);
        }

        #[test]
        fn tree_continues_from_its_subtrees(count in 0_usize..200, more in 0_usize..100) {
            let leaves = leaves(count + more);
            let earlier = tree(&leaves[..count]);
            let mut later = Tree::after(count as u64, earlier.subtrees).expect("as many");
            leaves[count..].iter().for_each(|&leaf| later.push(leaf));
            prop_assert_eq!(later.root(), naive_root(&leaves));
        }
    }
}
