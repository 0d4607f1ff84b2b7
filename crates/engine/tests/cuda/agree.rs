//! Runs the same plans on two backends and measures the difference of their logits.

use tollgate_engine::backend::{Backend, BlockCopy, LogitRows, Span, StepOutput, StepPlan};
use tollgate_engine::model::{Family, ModelFiles};
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

/// Two backends with the same model and the same input.
pub struct Pair<'a> {
    pub reference: &'a mut dyn Backend,
    pub tested: &'a mut dyn Backend,
    expected: StepOutput,
    found: StepOutput,
    /// Number of rows compared so far.
    pub rows: usize,
    /// Number of those rows whose likeliest token stands out.
    pub clear: usize,
    /// The largest relative difference so far: a row's largest difference over its
    /// largest logit.
    pub worst: f32,
}

/// The largest relative difference that is allowed. Activations are rounded to bf16
/// about a dozen times a layer, and these roundings diverge most in tiny models. The
/// largest difference over thousands of rows was 0.018.
pub const BOUND: f32 = 3e-2;

impl<'a> Pair<'a> {
    pub fn new(reference: &'a mut dyn Backend, tested: &'a mut dyn Backend) -> Self {
        let (expected, found) = (StepOutput::default(), StepOutput::default());
        Self { reference, tested, expected, found, rows: 0, clear: 0, worst: 0.0 }
    }

    /// Runs a step on both backends and compares every row.
    pub fn step(&mut self, spans: &[Span<'_>], what: &str) {
        let plan = StepPlan::logits(spans);
        self.reference.step(&plan, &mut self.expected).unwrap();
        self.tested.step(&plan, &mut self.found).unwrap();
        let time = self.found.device_time().expect("a step has a time");
        let moved = self.found.transfers().expect("and its transfers have");
        assert!(moved.to_device + moved.to_host <= time, "{what}: {moved:?} of {time}");
        assert_eq!(self.found.rows(), self.expected.rows(), "{what}");
        for row in 0..self.expected.rows() {
            self.compare(row, what);
        }
    }

    /// Returns the likeliest token of a row of the last step, by the reference backend.
    pub fn likeliest(&self, row: usize) -> u32 {
        top(self.expected.row(row)).0
    }

    pub fn copy_block(&mut self, copy: BlockCopy) {
        self.reference.copy_block(copy);
        self.tested.copy_block(copy);
    }

    fn compare(&mut self, row: usize, what: &str) {
        let (expected, found) = (self.expected.row(row), self.found.row(row));
        let largest = expected.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
        let most = expected
            .iter()
            .zip(found)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0_f32, |most, d| if d <= most { most } else { d });
        assert!(most <= BOUND * largest, "{what}: row {row} differs by {most}, largest {largest}");
        self.worst = self.worst.max(most / largest);
        self.rows += 1;
        let (token, margin) = top(expected);
        if margin > 2.0 * BOUND * largest {
            self.clear += 1;
            assert_eq!(top(found).0, token, "{what}: row {row}");
        }
    }
}

/// Returns the likeliest token, and its distance to the second likeliest.
fn top(row: &[f32]) -> (u32, f32) {
    let (mut best, mut next) = ((0, f32::NEG_INFINITY), f32::NEG_INFINITY);
    for (token, &logit) in (0..).zip(row) {
        if logit > best.1 {
            (best, next) = ((token, logit), best.1);
        } else {
            next = next.max(logit);
        }
    }
    (best.0, best.1 - next)
}

/// Returns tiny models, one of each kind that the kernels support.
pub fn models() -> Vec<(&'static str, ModelSpec, Option<u32>)> {
    let tiny = ModelSpec { head_dim: 32, heads: 4, kv_heads: 2, ..ModelSpec::tiny() };
    vec![
        ("qwen2", tiny.clone(), None),
        (
            "llama",
            ModelSpec {
                family: Family::Llama,
                tied: false,
                head_dim: 64,
                heads: 3,
                kv_heads: 1,
                vocabulary: 259,
                intermediate: 136,
                ..tiny.clone()
            },
            None,
        ),
        (
            "qwen3",
            ModelSpec {
                family: Family::Qwen3,
                head_dim: 128,
                heads: 2,
                kv_heads: 2,
                layers: 1,
                hidden: 72,
                ..tiny.clone()
            },
            None,
        ),
        (
            "llama-group-of-7",
            ModelSpec {
                family: Family::Llama,
                head_dim: 128,
                heads: 7,
                kv_heads: 1,
                layers: 1,
                context: LONG_CONTEXT,
                ..tiny.clone()
            },
            None,
        ),
        ("mistral", ModelSpec { family: Family::Mistral, ..tiny }, Some(24)),
    ]
}

/// Writes a model with random weights and opens it.
pub fn open(spec: &ModelSpec, window: Option<u32>, seed: u64) -> (tempfile::TempDir, ModelFiles) {
    let folder = tempfile::tempdir().unwrap();
    RandomModel { spec: spec.clone(), element: Element::Bf16, seed }.write(folder.path()).unwrap();
    if let Some(window) = window {
        let path = folder.path().join("config.json");
        let text = std::fs::read(&path).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config["sliding_window"] = window.into();
        std::fs::write(path, config.to_string()).unwrap();
    }
    let files = ModelFiles::open(folder.path()).unwrap();
    (folder, files)
}

/// Returns the tokens of an artificial text.
pub fn text(length: usize, seed: u32, vocabulary: u32) -> Vec<u32> {
    (0..length as u32).map(|i| (i + 1).wrapping_mul(2_654_435_761 ^ seed) % vocabulary).collect()
}

/// Returns blocks for `tokens` tokens, out of order. `first` separates sequences.
pub fn scattered(tokens: usize, first: usize, blocks: u32) -> Vec<u32> {
    (0..tokens.div_ceil(16)).map(|i| ((first + i) as u32 * 37) % blocks).collect()
}

pub fn span<'a>(tokens: &'a [u32], start: usize, blocks: &'a [u32], logits: LogitRows) -> Span<'a> {
    Span { tokens, start: start as u32, blocks, logits }
}

/// Runs every way in which a scheduler cuts work up: whole prompts, odd chunks, ragged
/// batches, forks, and long decoding.
pub fn everything(pair: &mut Pair<'_>, vocabulary: u32) {
    let blocks = BLOCKS;
    let prompt = text(75, 1, vocabulary);
    let table = scattered(75, 0, blocks);
    pair.step(&[span(&prompt, 0, &table, LogitRows::All)], "one prompt");
    chunks(pair, vocabulary);
    ragged(pair, vocabulary);
    fork(pair, vocabulary);
    decoding(pair, vocabulary);
}

fn chunks(pair: &mut Pair<'_>, vocabulary: u32) {
    let prompt = text(70, 2, vocabulary);
    for size in [1, 7, 16, 33] {
        let table = scattered(70, size, BLOCKS);
        for start in (0..70).step_by(size) {
            let chunk = &prompt[start..70.min(start + size)];
            pair.step(&[span(chunk, start, &table, LogitRows::Last)], "chunks");
        }
    }
}

/// Runs sequences of different lengths: some read their prompt while others decode, and
/// one asks for no logits.
fn ragged(pair: &mut Pair<'_>, vocabulary: u32) {
    const STRIDES: [usize; 9] = [1, 3, 48, 11, 1, 16, 5, 1, 2];
    let texts: Vec<Vec<u32>> =
        (0..STRIDES.len()).map(|i| text(40 + 3 * i, 10 + i as u32, vocabulary)).collect();
    let tables: Vec<Vec<u32>> =
        texts.iter().enumerate().map(|(i, text)| scattered(text.len(), 5 * i, BLOCKS)).collect();
    let mut places = vec![0_usize; STRIDES.len()];
    while places.iter().zip(&texts).any(|(&place, text)| place < text.len()) {
        let mut spans = Vec::new();
        for (index, (place, stride)) in places.iter_mut().zip(STRIDES).enumerate() {
            let end = texts[index].len().min(*place + stride);
            if *place == end {
                continue;
            }
            let logits = match index {
                3 => LogitRows::None,
                0 | 2 => LogitRows::All,
                _ => LogitRows::Last,
            };
            spans.push(span(&texts[index][*place..end], *place, &tables[index], logits));
            *place = end;
        }
        pair.step(&spans, "ragged");
    }
}

/// Forks a sequence, which shares whole blocks and copies the partly filled block. The
/// fork is then preempted and computed again in other blocks.
fn fork(pair: &mut Pair<'_>, vocabulary: u32) {
    let whole = text(60, 3, vocabulary);
    let (head, tail) = whole.split_at(21);
    let mut other = head.to_vec();
    other.extend(text(39, 4, vocabulary));
    pair.step(&[span(head, 0, &[9, 4], LogitRows::Last)], "before the fork");
    pair.copy_block(BlockCopy { from: 4, to: 7 });
    let spans = [
        span(tail, 21, &[9, 4, 2, 12], LogitRows::Last),
        span(&other[21..], 21, &[9, 7, 5, 13], LogitRows::All),
    ];
    pair.step(&spans, "the fork");
    pair.step(&[span(&other, 0, &[31, 30, 29, 28], LogitRows::All)], "computed again");
}

/// Feeds the reference's likeliest tokens to both backends, in a batch that grows past
/// the limit of the kernels for few rows.
fn decoding(pair: &mut Pair<'_>, vocabulary: u32) {
    const SEQUENCES: usize = 10;
    let prompts: Vec<Vec<u32>> =
        (0..SEQUENCES).map(|i| text(3 + 14 * i, 20 + i as u32, vocabulary)).collect();
    let tables: Vec<Vec<u32>> =
        (0..SEQUENCES).map(|i| (0..10).map(|block| (10 * i + block) as u32).collect()).collect();
    let mut places = [0_usize; SEQUENCES];
    let mut next: Vec<Vec<u32>> = prompts;
    for turn in 0..8 {
        let active = SEQUENCES.min(6 + turn);
        let spans: Vec<Span<'_>> =
            (0..active).map(|i| span(&next[i], places[i], &tables[i], LogitRows::Last)).collect();
        pair.step(&spans, "decoding");
        for i in 0..active {
            places[i] += next[i].len();
            next[i] = vec![pair.likeliest(i)];
        }
    }
}

/// Runs a prompt of more than 2,048 tokens and single tokens behind it. Their attention
/// is split into as many parts as the device wants, 32 on an H100. Needs a model of
/// [`LONG_CONTEXT`]; takes ten seconds on an emulated device.
pub fn far_into_a_context(pair: &mut Pair<'_>, vocabulary: u32) {
    const TOKENS: usize = 2_070;
    let prompt = text(TOKENS, 5, vocabulary);
    let table = scattered(TOKENS + 16, 1, BLOCKS);
    for start in (0..TOKENS).step_by(256) {
        let chunk = &prompt[start..TOKENS.min(start + 256)];
        pair.step(&[span(chunk, start, &table, LogitRows::Last)], "a long prompt");
    }
    for place in TOKENS..TOKENS + 16 {
        let next = [pair.likeliest(0)];
        pair.step(&[span(&next, place, &table, LogitRows::Last)], "far into a context");
    }
}

/// The context of the tiny model for long contexts.
pub const LONG_CONTEXT: u32 = 4_096;
/// A prime above the number of blocks in the plans, so that steps of 37 reach every
/// block.
pub const BLOCKS: u32 = 139;
