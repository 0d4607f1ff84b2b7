//! Runs one text in every way that a batch may cut it up and compares the bits of its
//! logits. Deterministic backends promise the same logits in any batch.

use tollgate_engine::backend::{Backend, LogitRows, Span, StepOutput, StepPlan};

use crate::agree::{scattered, span, text};

/// Returns the number of logits of a text that differ in any bit from those of the same
/// text alone and in one piece. The text is read token by token, in chunks, and beside
/// other sequences that read and decode.
pub fn differing(backend: &mut dyn Backend, vocabulary: u32) -> usize {
    let whole = text(LENGTH, 1, vocabulary);
    let table = scattered(LENGTH, 0, backend.kv_blocks().min(127));
    let mut expected = Vec::new();
    read(backend, &[span(&whole, 0, &table, LogitRows::All)], |_, row| expected.push(row.to_vec()));
    let mut differing = 0;
    for size in [1, 7, 33] {
        let table = scattered(LENGTH, size, backend.kv_blocks().min(127));
        for start in (0..LENGTH).step_by(size) {
            let chunk = &whole[start..LENGTH.min(start + size)];
            read(backend, &[span(chunk, start, &table, LogitRows::All)], |row, found| {
                differing += different(&expected[start + row], found);
            });
        }
    }
    for among in [5, 40] {
        differing += among_others(backend, vocabulary, &whole, &expected, among);
    }
    differing
}

/// Runs the text beside this many other sequences before and after it.
fn among_others(
    backend: &mut dyn Backend,
    vocabulary: u32,
    whole: &[u32],
    expected: &[Vec<f32>],
    others: usize,
) -> usize {
    let blocks = backend.kv_blocks().min(127);
    let table = scattered(LENGTH, 0, blocks);
    let strangers: Vec<Vec<u32>> =
        (0..others).map(|i| text(1 + 3 * i % 4, 30 + i as u32, vocabulary)).collect();
    let own = LENGTH.div_ceil(16);
    let tables: Vec<Vec<u32>> = (0..others).map(|i| scattered(32, own + 2 * i, blocks)).collect();
    let mut differing = 0;
    for (turn, range) in [0..9, 9..10, 10..47, 47..48, 48..LENGTH].into_iter().enumerate() {
        let mut spans: Vec<Span<'_>> = strangers
            .iter()
            .zip(&tables)
            .map(|(text, table)| span(text, 0, table, LogitRows::Last))
            .collect();
        let at = (turn * 7) % (others + 1);
        spans.insert(at, span(&whole[range.clone()], range.start, &table, LogitRows::All));
        read(backend, &spans, |row, found| {
            if (at..at + range.len()).contains(&row) {
                differing += different(&expected[range.start + row - at], found);
            }
        });
    }
    differing
}

fn read(backend: &mut dyn Backend, spans: &[Span<'_>], mut row: impl FnMut(usize, &[f32])) {
    let mut output = StepOutput::default();
    backend.step(&StepPlan::logits(spans), &mut output).unwrap();
    (0..output.rows()).for_each(|index| row(index, output.row(index)));
}

fn different(expected: &[f32], found: &[f32]) -> usize {
    assert_eq!(expected.len(), found.len());
    expected.iter().zip(found).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
}

const LENGTH: usize = 70;
