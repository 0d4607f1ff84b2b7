//! A set of line numbers, one bit a line.

use std::sync::Arc;

/// A set of lines of one batch. A clone is cheap until one of the two changes.
#[derive(Clone, Debug, Default)]
pub(super) struct LineSet {
    words: Arc<Vec<u64>>,
}

impl LineSet {
    pub(super) fn insert(&mut self, line: u64) {
        let (word, bit) = place(line);
        let words = Arc::make_mut(&mut self.words);
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        if let Some(word) = words.get_mut(word) {
            *word |= bit;
        }
    }

    pub(super) fn contains(&self, line: u64) -> bool {
        let (word, bit) = place(line);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }
}

impl FromIterator<u64> for LineSet {
    fn from_iter<I: IntoIterator<Item = u64>>(lines: I) -> Self {
        let mut set = Self::default();
        lines.into_iter().for_each(|line| set.insert(line));
        set
    }
}

/// Returns the index of the word and the bit of a line.
fn place(line: u64) -> (usize, u64) {
    ((line / 64) as usize, 1 << (line % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_set_holds_what_was_inserted() {
        let set: LineSet = [0, 63, 64, 1_000].into_iter().collect();
        let held: Vec<u64> = (0..2_000).filter(|line| set.contains(*line)).collect();
        assert_eq!(held, [0, 63, 64, 1_000]);
    }
}
