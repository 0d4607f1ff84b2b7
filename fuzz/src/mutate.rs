//! Mutations of known inputs by a seed. The same seed gives the same inputs on
//! every machine.

/// Bytes of the longest mutation.
const MAX_BYTES: usize = 64 * 1024;

/// A generator of mutated inputs.
#[derive(Debug)]
pub struct Mutator {
    state: u64,
}

impl Mutator {
    /// Makes a generator with the seed `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns a mutation of one of the inputs in `corpus`, which must not be empty.
    pub fn draw(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut input = self.pick(corpus).clone();
        for _ in 0..=self.below(4) {
            self.change(&mut input, corpus);
        }
        input.truncate(MAX_BYTES);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        let at = self.below(input.len() + 1);
        match self.below(9) {
            // Change a bit or a byte.
            0 => self.at(input, |byte, random| *byte ^= 1 << (random % 8)),
            1 => self.at(input, |byte, random| *byte = random as u8),
            // Write a byte that has a meaning in some format.
            2 => {
                let special = *self.pick(b"\0\x01\x7f\x80\xff\"\\{}[]<|>.,:=-09eE \n\t");
                self.at(input, |byte, _| *byte = special);
            }
            // Write a number at the edge of a type, in some width.
            3 => {
                let number =
                    *self.pick(&[0, 1, 0x7f, 0x80, 0xffff, u32::MAX as u64, 1 << 40, u64::MAX]);
                let width = *self.pick(&[1, 2, 4, 8]);
                let bytes = number.to_le_bytes();
                splice(input, at, width, &bytes[..width]);
            }
            // Remove bytes.
            4 => {
                let less = self.below(16);
                splice(input, at, less, &[]);
            }
            5 => input.truncate(at),
            // Repeat a part.
            6 => {
                let end = (at + self.below(64)).min(input.len());
                let again = input[at..end].repeat(self.below(8));
                splice(input, at, 0, &again);
            }
            // Insert a part of another input.
            7 => {
                let other = self.pick(corpus).clone();
                let from = self.below(other.len() + 1);
                let to = (from + self.below(128)).min(other.len());
                splice(input, at, 0, &other[from..to]);
            }
            // Insert a word that many formats use.
            _ => {
                let word = *self.pick(&WORDS);
                splice(input, at, 0, word.as_bytes());
            }
        }
    }

    fn at(&mut self, input: &mut [u8], change: impl FnOnce(&mut u8, u64)) {
        let (place, random) = (self.below(input.len()), self.next());
        if let Some(byte) = input.get_mut(place) {
            change(byte, random);
        }
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Returns the next number of the SplitMix64 generator.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Replaces up to `width` bytes at `at` by `piece`.
fn splice(input: &mut Vec<u8>, at: usize, width: usize, piece: &[u8]) {
    let end = (at + width).min(input.len());
    input.splice(at..end, piece.iter().copied());
}

const WORDS: [&str; 20] = [
    "null",
    "true",
    "-1",
    "1e309",
    "0.1",
    "18446744073709551616",
    "\"\"",
    "[]",
    "{}",
    "\\u0000",
    "\\ud800",
    "<|im_end|>",
    "\u{10fffd}",
    "\u{200b}",
    "e\u{301}",
    "{{",
    "%}",
    "data: ",
    "\r\n",
    "..",
];

#[cfg(test)]
mod tests {
    use super::Mutator;

    #[test]
    fn mutator_output_depends_on_seed_only() {
        let corpus = [b"one".to_vec(), b"{\"two\": 2}".to_vec(), Vec::new()];
        let drawn = |seed| {
            let mut mutator = Mutator::new(seed);
            (0..1_000).map(|_| mutator.draw(&corpus)).collect::<Vec<_>>()
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
        let lengths: std::collections::HashSet<_> = drawn(1).iter().map(Vec::len).collect();
        assert!(lengths.len() > 20, "they differ: {}", lengths.len());
    }
}
