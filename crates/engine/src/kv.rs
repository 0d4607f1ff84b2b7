//! Bookkeeping of the KV pool: which sequence holds which block.
//!
//! Blocks have reference counts. Choices of one prompt share its full blocks. A shared
//! block is full and is never written again. The last, partly filled block is copied when a
//! sequence forks. A table must be released to its pool; dropping it would lose its blocks.

use crate::backend::{BLOCK_TOKENS, BlockCopy};

/// The block ids and reference counts of a pool. The pool owns no memory.
#[derive(Debug)]
pub struct BlockPool {
    references: Vec<u32>,
    /// Blocks without a reference. The block released last is used first.
    free: Vec<u32>,
}

impl BlockPool {
    /// Creates a pool of free blocks `0..blocks`.
    pub fn new(blocks: u32) -> Self {
        // Reversed, so that the first blocks are used first.
        Self { references: vec![0; blocks as usize], free: (0..blocks).rev().collect() }
    }

    /// Returns the number of blocks in the pool.
    pub fn total(&self) -> u32 {
        self.references.len() as u32
    }

    /// Returns the number of free blocks.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    fn take(&mut self) -> Option<u32> {
        let block = self.free.pop()?;
        self.references[block as usize] = 1;
        Some(block)
    }

    fn share(&mut self, block: u32) {
        self.references[block as usize] += 1;
    }

    fn release(&mut self, block: u32) {
        let references = &mut self.references[block as usize];
        assert!(*references > 0, "KV block {block} was released twice");
        *references -= 1;
        if *references == 0 {
            // A stack reuses the block that is most likely still in a cache.
            self.free.push(block);
        }
    }
}

/// The blocks of one sequence, in order of position.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<u32>,
    /// Number of leading blocks that may be shared. Blocks from here on are not shared.
    shared: usize,
}

impl BlockTable {
    /// Returns the block ids, for [`BLOCK_TOKENS`] tokens each.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Returns true if the table has no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the number of blocks that become free if this table alone is released.
    pub fn exclusive(&self, pool: &BlockPool) -> u32 {
        let own = |&&block: &&u32| pool.references[block as usize] == 1;
        // Only shared blocks need a look at their count: later ones have one reference.
        let of_shared = self.blocks[..self.shared].iter().filter(own).count();
        (of_shared + self.blocks.len() - self.shared) as u32
    }

    /// Grows to `blocks` blocks, or not at all. Returns true if the table has that many
    /// blocks now.
    #[must_use]
    pub fn grow_to(&mut self, blocks: u32, pool: &mut BlockPool) -> bool {
        let more = blocks.saturating_sub(self.len());
        // Checked first, so that a failed growth leaves the table unchanged.
        if more > pool.free() {
            return false;
        }
        self.blocks.extend((0..more).map_while(|_| pool.take()));
        true
    }

    /// Creates the table of another sequence that starts with the same `tokens` tokens. The
    /// new table shares the full blocks and gets a fresh block for the rest, if there is
    /// one. Returns `None` and takes nothing if the pool is empty.
    pub fn fork(&mut self, tokens: u32, pool: &mut BlockPool) -> Option<Fork> {
        let full = (tokens / BLOCK_TOKENS) as usize;
        let mut blocks = self.blocks[..full].to_vec();
        let mut copy = None;
        if !tokens.is_multiple_of(BLOCK_TOKENS) {
            // Taken before the full blocks are shared, so that a failure changes nothing.
            let fresh = pool.take()?;
            copy = Some(BlockCopy { from: self.blocks[full], to: fresh });
            blocks.push(fresh);
        }
        for &block in &self.blocks[..full] {
            pool.share(block);
        }
        self.shared = self.shared.max(full);
        Some(Fork { table: Self { blocks, shared: full }, copy })
    }

    /// Releases all blocks but the first `blocks` to the pool.
    pub fn shrink_to(&mut self, blocks: u32, pool: &mut BlockPool) {
        // Released from the end, so that a table built again gets its blocks in order.
        let kept = self.blocks.len().min(blocks as usize);
        for block in self.blocks.drain(kept..).rev() {
            pool.release(block);
        }
        self.shared = self.shared.min(kept);
    }

    /// Releases all blocks to the pool.
    pub fn release(&mut self, pool: &mut BlockPool) {
        self.shrink_to(0, pool);
    }
}

/// The result of a fork.
#[derive(Debug)]
pub struct Fork {
    /// Blocks of the new sequence.
    pub table: BlockTable,
    /// Copy that the device must do before the next step.
    pub copy: Option<BlockCopy>,
}

/// Returns the number of blocks that hold `tokens` tokens.
pub fn blocks_for(tokens: u32) -> u32 {
    tokens.div_ceil(BLOCK_TOKENS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Act {
        Grow { table: usize, blocks: u32 },
        Fork { table: usize, tokens: u32 },
        Release { table: usize },
        Shrink { table: usize, blocks: u32 },
    }

    fn any_act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (0usize..6, 1u32..12).prop_map(|(table, blocks)| Act::Grow { table, blocks }),
            (0usize..6, 0u32..160).prop_map(|(table, tokens)| Act::Fork { table, tokens }),
            (0usize..6).prop_map(|table| Act::Release { table }),
            (0usize..6, 0u32..12).prop_map(|(table, blocks)| Act::Shrink { table, blocks }),
        ]
    }

    /// Checks that free and held blocks make up the whole pool, that the reference counts
    /// are exact, and that no table holds a block twice.
    fn check_invariants(pool: &BlockPool, tables: &[BlockTable]) {
        let mut counted = vec![0; pool.references.len()];
        for table in tables {
            let mut own = table.blocks.clone();
            own.sort_unstable();
            own.dedup();
            assert_eq!(own.len(), table.blocks.len());
            for &block in &table.blocks {
                counted[block as usize] += 1;
            }
            let exclusive = table.blocks.iter().filter(|&&it| pool.references[it as usize] == 1);
            assert_eq!(table.exclusive(pool) as usize, exclusive.count());
        }
        assert_eq!(counted, pool.references);
        let mut free = pool.free.clone();
        free.sort_unstable();
        let unheld: Vec<u32> =
            (0..pool.total()).filter(|&block| counted[block as usize] == 0).collect();
        assert_eq!(free, unheld);
    }

    proptest! {
        #[test]
        fn pool_never_loses_or_duplicates_blocks(acts in prop::collection::vec(any_act(), 0..80)) {
            let mut pool = BlockPool::new(24);
            let mut tables: Vec<BlockTable> = (0..3).map(|_| BlockTable::default()).collect();
            for act in acts {
                match act {
                    Act::Grow { table, blocks } => {
                        if let Some(table) = tables.get_mut(table) {
                            let (before, free) = (table.len(), pool.free());
                            let grown = table.grow_to(blocks, &mut pool);
                            prop_assert_eq!(grown, blocks.saturating_sub(before) <= free);
                            prop_assert_eq!(table.len(), if grown { before.max(blocks) } else { before });
                        }
                    }
                    Act::Fork { table, tokens } => {
                        let fork = tables.get_mut(table).and_then(|table| {
                            table.fork(tokens.min(table.len() * BLOCK_TOKENS), &mut pool)
                        });
                        if let Some(Fork { table, copy }) = fork {
                            if let Some(BlockCopy { from, to }) = copy {
                                prop_assert_ne!(from, to);
                                prop_assert_eq!(pool.references[to as usize], 1);
                            }
                            tables.push(table);
                        }
                    }
                    Act::Shrink { table, blocks } => {
                        if let Some(table) = tables.get_mut(table) {
                            let before = table.len();
                            table.shrink_to(blocks, &mut pool);
                            prop_assert_eq!(table.len(), before.min(blocks));
                        }
                    }
                    Act::Release { table } if table < tables.len() => {
                        tables[table].release(&mut pool);
                    }
                    Act::Release { .. } => {}
                }
                check_invariants(&pool, &tables);
            }
            for table in &mut tables {
                table.release(&mut pool);
            }
            prop_assert_eq!(pool.free(), pool.total());
        }
    }

    #[test]
    fn fork_shares_full_blocks_and_copies_tail() {
        for (tokens, shared, copies) in [(32, 2, false), (33, 2, true), (5, 0, true), (0, 0, false)]
        {
            let mut pool = BlockPool::new(8);
            let mut table = BlockTable::default();
            assert!(table.grow_to(4, &mut pool));
            let fork = table.fork(tokens, &mut pool).expect("there is room");
            assert_eq!(fork.table.blocks[..shared], table.blocks[..shared], "{tokens}");
            assert_eq!(fork.copy.is_some(), copies, "{tokens}");
            assert_eq!(table.exclusive(&pool), 4 - shared as u32, "{tokens}");
        }
    }

    #[test]
    fn failed_fork_takes_no_block() {
        let mut pool = BlockPool::new(2);
        let mut table = BlockTable::default();
        assert!(table.grow_to(2, &mut pool));
        assert!(table.fork(17, &mut pool).is_none());
        assert_eq!(table.exclusive(&pool), 2);
        assert!(!table.grow_to(3, &mut pool));
        assert_eq!(table.len(), 2);
    }
}
