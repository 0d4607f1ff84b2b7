//! A simulated device. It computes nothing and lets the time pass that a cost model
//! gives, on a real clock or on a virtual one.
//!
//! The backend stands in for a GPU in tests and benchmarks of scheduling, limits and
//! capacity, in which the answers do not matter. Its device class is `synthetic` and
//! its name says so too, so that no figure is mistaken for a measurement of hardware.
//! The price table is made from the same cost model, so predictions are exact to the
//! nanosecond.
//!
//! Every answer repeats one token until `max_tokens`, whatever the sampling parameters.
//! A prompt may ask for a length: `[8 tokens]` anywhere in it makes the eighth token
//! the end token. Like a real model, the backend reads this length marker from the KV
//! cache, so a lost or foreign block changes the answer.

use std::fmt;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use tollgate_domain::cost::CostTableParts;
use tollgate_domain::{AttentionShape, CostTable, CostTableError, Curve, DeviceClass};

use super::{
    BLOCK_TOKENS, Backend, BackendError, BlockCopy, DeviceInfo, LogitRows, ModelShape, StepLimits,
    StepOutput, StepPlan,
};
use crate::clock::VirtualClock;
use crate::model::SamplingDefaults;

/// A backend that lets time pass and computes nothing.
pub struct SyntheticBackend {
    shape: ModelShape,
    device: DeviceInfo,
    limits: StepLimits,
    kv_blocks: u32,
    cost: StepCost,
    text: SyntheticText,
    pace: Pace,
    /// The state of the text after each token in the KV cache.
    memory: Vec<TextState>,
}

/// The options of a [`SyntheticBackend`].
#[derive(Clone, Debug)]
pub struct SyntheticOptions {
    /// The duration of a step.
    pub cost: StepCost,
    /// Tokens that the KV cache holds, rounded up to whole blocks.
    pub kv_tokens: u32,
    /// Tokens that one sequence may hold.
    pub context: u32,
    /// Tokens that one step may feed to the model.
    pub step_tokens: u32,
    /// The text of the tokens.
    pub text: SyntheticText,
}

/// The duration of a step:
///
/// ```text
/// (step + sequence x sampled tokens + prefill_token x other tokens + kv_token x tokens of context) / speed
/// ```
///
/// A token is sampled for each row of logits. The context is that of all sequences in
/// the step, including their new tokens.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCost {
    /// Time that any step takes.
    pub step: Duration,
    /// Time for each sequence that samples a token; at least `prefill_token`.
    pub sequence: Duration,
    /// Time for each token of context that is read.
    pub kv_token: Duration,
    /// Time for each token of a prompt.
    pub prefill_token: Duration,
    /// Factor by which the device is faster than these times.
    pub speed: f64,
}

/// The text of a synthetic model's tokens, and the two tokens that the model samples.
#[derive(Clone, Debug)]
pub struct SyntheticText {
    /// The bytes of each token of the vocabulary.
    pub pieces: Vec<Box<[u8]>>,
    /// The token that answers consist of.
    pub answer: u32,
    /// The token that ends an answer if a prompt asks for a length.
    pub end: u32,
}

/// The clock on which time passes.
#[derive(Clone, Debug)]
pub enum Pace {
    /// The host's clock: a step sleeps until its time is over.
    Real,
    /// A virtual clock, which each step advances.
    Virtual(VirtualClock),
}

/// The reasons why the options of a synthetic backend are refused.
#[derive(Debug, thiserror::Error)]
pub enum SyntheticError {
    /// A figure is out of its bounds.
    #[error("synthetic engine: {0}")]
    Invalid(&'static str),
    /// The cost model does not give a valid price table.
    #[error("synthetic engine")]
    Table(#[from] CostTableError),
}

/// The figures of a step that its duration depends on.
#[derive(Clone, Copy, Default)]
struct StepSize {
    /// Tokens that the step feeds to the model.
    tokens: u64,
    /// Rows of logits, each of which is sampled.
    rows: u64,
    /// Tokens of context, over all sequences.
    context: u64,
}

impl SyntheticBackend {
    /// Creates a backend with an empty KV cache.
    ///
    /// # Errors
    /// [`SyntheticError`] if the options are out of bounds.
    pub fn new(options: SyntheticOptions, pace: Pace) -> Result<Self, SyntheticError> {
        let SyntheticOptions { cost, kv_tokens, context, step_tokens, text } = options;
        text.check()?;
        if kv_tokens == 0 || context < 2 || step_tokens == 0 {
            return Err(SyntheticError::Invalid("KV cache, context and step must hold tokens"));
        }
        // An invalid cost model must fail here and not at the first price.
        cost.table()?;
        let kv_blocks = kv_tokens.div_ceil(BLOCK_TOKENS);
        let about = format!("{cost} kv {kv_tokens} context {context}");
        let hash = digest(&SHA256, about.as_bytes());
        Ok(Self {
            shape: ModelShape {
                context,
                vocabulary: text.pieces.len() as u32, // checked above
                layers: 1,
                heads: 1,
                kv_heads: 1,
                head_dim: 1,
                kv_bytes_per_token: SHAPE.kv_bytes_per_token,
                end_tokens: vec![text.end],
                sampling_defaults: SamplingDefaults::default(),
                hash: hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect(),
            },
            device: DeviceInfo {
                class: DeviceClass::synthetic(),
                name: format!("synthetic: {cost}, {kv_tokens} KV tokens"),
                uuid: String::new(),
                threads: 0,
            },
            limits: StepLimits { tokens: step_tokens, logit_rows: step_tokens },
            kv_blocks,
            cost,
            text,
            pace,
            // Like a real KV cache, the memory is indexed by block and slot, not by
            // sequence.
            memory: vec![TextState::default(); (kv_blocks * BLOCK_TOKENS) as usize],
        })
    }

    /// Sets the UUID of the simulated device.
    pub fn with_uuid(mut self, uuid: String) -> Self {
        self.device.uuid = uuid;
        self
    }

    /// Reads a span into the cache, storing the state after each token.
    fn read(&mut self, tokens: &[u32], start: u32, blocks: &[u32]) {
        let place = |position: u32| {
            let block = blocks[(position / BLOCK_TOKENS) as usize];
            (block * BLOCK_TOKENS + position % BLOCK_TOKENS) as usize
        };
        let mut reading = match start.checked_sub(1) {
            Some(before) => self.memory[place(before)],
            None => TextState::default(),
        };
        for (position, &token) in (start..).zip(tokens) {
            reading = reading.after(token, &self.text);
            self.memory[place(position)] = reading;
        }
    }

    /// Returns the state at `position` of the sequence in `blocks`.
    fn remembered(&self, position: u32, blocks: &[u32]) -> TextState {
        let block = blocks[(position / BLOCK_TOKENS) as usize];
        self.memory[(block * BLOCK_TOKENS + position % BLOCK_TOKENS) as usize]
    }
}

impl Backend for SyntheticBackend {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn kv_blocks(&self) -> u32 {
        self.kv_blocks
    }

    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn copy_block(&mut self, BlockCopy { from, to }: BlockCopy) {
        let places = |block: u32| (block * BLOCK_TOKENS) as usize;
        let from = places(from)..places(from + 1);
        self.memory.copy_within(from, places(to));
    }

    #[expect(clippy::expect_used, reason = "`size` counted the rows of the same plan")]
    #[expect(
        clippy::disallowed_methods,
        reason = "a step in real time lasts as long as its cost says"
    )]
    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        let begun = Instant::now();
        plan.check(&self.shape, self.limits, self.kv_blocks)?;
        let mut size = StepSize::default();
        for span in plan.spans {
            self.read(span.tokens, span.start, span.blocks);
            size.tokens += span.tokens.len() as u64;
            size.rows += span.rows() as u64;
            size.context += span.end();
        }
        let vocabulary = self.text.pieces.len();
        let logits = output.reset([size.rows as usize, vocabulary]);
        // One finite logit in each row makes every sampling parameter choose the same
        // token.
        logits.fill(f32::NEG_INFINITY);
        let mut row = logits.chunks_exact_mut(vocabulary);
        for span in plan.spans {
            let first = match span.logits {
                LogitRows::None => continue,
                LogitRows::Last => span.end() as u32 - 1,
                LogitRows::All => span.start,
            };
            for position in first..span.end() as u32 {
                let next = self.remembered(position, span.blocks).next(&self.text);
                let row = row.next().expect("as many rows as were counted");
                row[next as usize] = 0.0;
            }
        }
        output.sample(plan);
        let length = self.cost.of(size);
        match &self.pace {
            // The time of the host's own work above is part of the step's duration.
            Pace::Real => wait_until(begun + length),
            Pace::Virtual(clock) => clock.advance(length),
        }
        Ok(())
    }
}

impl Default for StepCost {
    /// Returns the cost model of the fairness benchmark.
    fn default() -> Self {
        Self {
            step: Duration::from_millis(28),
            sequence: Duration::from_micros(300),
            kv_token: Duration::from_nanos(1_200),
            prefill_token: Duration::from_micros(210),
            speed: 1.0,
        }
    }
}

impl StepCost {
    /// Returns the price table that follows this cost model.
    ///
    /// # Errors
    /// [`SyntheticError`] if a figure is out of its bounds.
    pub fn table(&self) -> Result<CostTable, SyntheticError> {
        if !(self.speed.is_finite() && self.speed > 0.0) {
            return Err(SyntheticError::Invalid("the speed must be above 0"));
        }
        if self.sequence < self.prefill_token {
            return Err(SyntheticError::Invalid(
                "a sampled token takes at least as long as a prompt's token",
            ));
        }
        let prefill = self.nanos(self.prefill_token);
        let parts = CostTableParts {
            version: self.version(),
            step_ns: self.nanos(self.step),
            linear: Curve(vec![(1, prefill)]),
            head: Curve(vec![(1, self.nanos(self.sequence) - prefill)]),
            ns_per_kv_byte: self.nanos(self.kv_token) / SHAPE.kv_bytes_per_token as f64,
            ns_per_attention_flop: 0.0,
            shape: SHAPE,
            reference_batch: 32,
            reference_chunk: 256,
        };
        Ok(CostTable::try_from(parts)?)
    }

    /// Returns the duration of a step of this size.
    fn of(&self, size: StepSize) -> Duration {
        let Self { step, sequence, kv_token, prefill_token, speed: _ } = *self;
        let prefill = self.nanos(prefill_token);
        let nanos = self.nanos(step)
            + prefill * size.tokens as f64
            + (self.nanos(sequence) - prefill) * size.rows as f64
            + self.nanos(kv_token) * size.context as f64;
        Duration::from_nanos(nanos.ceil() as u64)
    }

    fn nanos(&self, span: Duration) -> f64 {
        span.as_nanos() as f64 / self.speed
    }

    /// Returns the name of the price table, which every record priced by it contains.
    fn version(&self) -> String {
        let Self { step, sequence, kv_token, prefill_token, speed } = self;
        let [step, sequence, kv_token, prefill_token] =
            [step, sequence, kv_token, prefill_token].map(Duration::as_nanos);
        format!("synthetic-{step}-{sequence}-{kv_token}-{prefill_token}-x{speed}")
    }
}

/// Writes the figures as they are configured, for people.
impl fmt::Display for StepCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, sequence, kv_token, prefill_token, speed } = self;
        let told = format!(
            "{step:?} + {sequence:?}/sequence + {kv_token:?}/KV token + \
             {prefill_token:?}/prompt token, speed {speed}"
        );
        f.write_str(&told.replace('µ', "u")) // journals and logs are ASCII
    }
}

impl SyntheticText {
    /// Returns the vocabulary of single bytes, with 256 as the answer's token and 257
    /// as the end.
    pub fn bytes() -> Self {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte].into_boxed_slice());
        let own = [b" token".to_vec(), Vec::new()].map(Vec::into_boxed_slice);
        Self { pieces: bytes.chain(own).collect(), answer: 256, end: 257 }
    }

    fn check(&self) -> Result<(), SyntheticError> {
        let known = |token: u32| (token as usize) < self.pieces.len();
        if u32::try_from(self.pieces.len()).is_err() || !known(self.answer) || !known(self.end) {
            return Err(SyntheticError::Invalid(
                "the answer's token and the end token must be in the vocabulary",
            ));
        }
        if self.answer == self.end {
            return Err(SyntheticError::Invalid("the answer's token cannot be the end token"));
        }
        Ok(())
    }
}

/// The state of a synthetic model after some text: the progress of its reading of a
/// length marker like `[8 tokens]`, and the tokens left of the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TextState {
    marker: MarkerState,
    /// The number in the marker that is being read.
    number: u32,
    /// Tokens that are still to be sampled; [`NO_END`] without a marker.
    left: u32,
}

/// The progress within a length marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MarkerState {
    Outside,
    /// After the opening bracket.
    Bracket,
    /// Within the digits of the number.
    Number,
    /// After this many bytes of the unit, which follows the number.
    Unit(u8),
}

impl Default for TextState {
    fn default() -> Self {
        Self { marker: MarkerState::Outside, number: 0, left: NO_END }
    }
}

impl TextState {
    fn after(mut self, token: u32, text: &SyntheticText) -> Self {
        if token == text.answer {
            // Without a marker the answer has no end of its own.
            if self.left != NO_END {
                self.left = self.left.saturating_sub(1);
            }
            return Self { marker: MarkerState::Outside, ..self };
        }
        for &byte in text.pieces[token as usize].iter() {
            self.read(byte);
        }
        self
    }

    fn read(&mut self, byte: u8) {
        self.marker = match (self.marker, byte) {
            (_, b'[') => {
                self.number = 0;
                MarkerState::Bracket
            }
            (MarkerState::Bracket | MarkerState::Number, b'0'..=b'9') => {
                // A number that is too large must not equal `NO_END`, which means that
                // there is no marker.
                let digit = u32::from(byte - b'0');
                self.number = self.number.saturating_mul(10).saturating_add(digit).min(NO_END - 1);
                MarkerState::Number
            }
            (MarkerState::Number, _) if byte == UNIT[0] => MarkerState::Unit(1),
            (MarkerState::Unit(read), _) if byte == UNIT[usize::from(read)] => {
                if usize::from(read) + 1 == UNIT.len() {
                    self.left = self.number;
                    MarkerState::Outside
                } else {
                    MarkerState::Unit(read + 1)
                }
            }
            _ => MarkerState::Outside,
        };
    }

    /// Returns the next token. Of n tokens that were asked for, the last one is the end
    /// token.
    fn next(self, text: &SyntheticText) -> u32 {
        if self.left <= 1 { text.end } else { text.answer }
    }
}

/// Sleeps until shortly before `end` and spins for the rest, because a sleeping thread
/// wakes up late.
#[expect(clippy::disallowed_methods, reason = "a step in real time lasts as long as its cost says")]
fn wait_until(end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    std::thread::sleep(left.saturating_sub(LATE_WAKE));
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// An attention shape that counts only tokens of context.
const SHAPE: AttentionShape = AttentionShape { kv_bytes_per_token: 1, flop_per_pair: 4 };
/// The text behind the number in a length marker.
const UNIT: &[u8] = b" tokens]";
/// The number of tokens left if no marker was read.
const NO_END: u32 = u32::MAX;
/// The usual delay of a thread that wakes up.
const LATE_WAKE: Duration = Duration::from_micros(100);

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use proptest::prelude::*;
    use tollgate_domain::{DeviceNanos, SequenceId, SequenceWork};

    use super::*;
    use crate::backend::Span;
    use crate::clock::Clock;

    fn backend(clock: &VirtualClock, cost: StepCost) -> SyntheticBackend {
        let options = SyntheticOptions {
            cost,
            kv_tokens: 4_096,
            context: 2_048,
            step_tokens: 1_024,
            text: SyntheticText::bytes(),
        };
        SyntheticBackend::new(options, Pace::Virtual(clock.clone())).expect("a model")
    }

    /// Returns the next token after `text`, which is read in the given pieces.
    fn next(text: &[&[u8]], drawn: &[u32]) -> u32 {
        let mut backend = backend(&VirtualClock::default(), StepCost::default());
        let blocks: Vec<u32> = (0..16).rev().collect();
        let mut start = 0;
        let mut output = StepOutput::default();
        let mut feed = |tokens: &[u32]| {
            let span = Span { tokens, start, blocks: &blocks, logits: LogitRows::Last };
            backend.step(&StepPlan::logits(&[span]), &mut output).expect("it fits");
            start += tokens.len() as u32;
        };
        for piece in text {
            feed(&piece.iter().map(|&byte| u32::from(byte)).collect::<Vec<u32>>());
        }
        for token in drawn {
            feed(&[*token]);
        }
        let row = output.row(0);
        let likeliest = (0..).zip(row).filter(|(_, logit)| **logit == 0.0).map(|(token, _)| token);
        let likeliest: Vec<u32> = likeliest.collect();
        assert_eq!(likeliest.len(), 1);
        likeliest[0]
    }

    #[test]
    fn answer_ends_only_if_a_prompt_asks() {
        let SyntheticText { answer, end, .. } = SyntheticText::bytes();
        let cases: [(&[&[u8]], usize, u32); 9] = [
            (&[b"tell me"], 0, answer),
            (&[b"tell me"], 100, answer),
            (&[b"tell me [3 tokens]"], 0, answer),
            (&[b"tell me [3 tokens]"], 1, answer),
            (&[b"tell me [3 tokens]"], 2, end),
            (&[b"tell [", b"3 tok", b"ens]?"], 2, end),
            (&[b"[[3 tokens]"], 2, end),
            (&[b"[3 tokens] no, [9 tokens]"], 2, answer),
            (&[b"[3 token] [ tokens] [3tokens]"], 9, answer),
        ];
        for (text, drawn, expected) in cases {
            assert_eq!(next(text, &vec![answer; drawn]), expected, "{text:?} {drawn}");
        }
    }

    #[test]
    fn copied_block_keeps_the_length_marker() {
        let mut backend = backend(&VirtualClock::default(), StepCost::default());
        let mut output = StepOutput::default();
        let prompt: Vec<u32> = b"[2 tokens]".iter().map(|&byte| u32::from(byte)).collect();
        let span = Span { tokens: &prompt, start: 0, blocks: &[3], logits: LogitRows::None };
        backend.step(&StepPlan::logits(&[span]), &mut output).expect("it fits");
        backend.copy_block(BlockCopy { from: 3, to: 7 });
        let span = Span { tokens: &[256], start: 10, blocks: &[7], logits: LogitRows::Last };
        backend.step(&StepPlan::logits(&[span]), &mut output).expect("it fits");
        assert_eq!(output.row(0)[257], 0.0);
    }

    proptest! {
        #[test]
        fn price_table_predicts_every_step(
            spans in prop::collection::vec((1u32..60, 0u32..200, any::<bool>()), 1..12),
            speed in 0.1f64..40.0,
        ) {
            let cost = StepCost { speed, ..StepCost::default() };
            let clock = VirtualClock::default();
            let mut backend = backend(&clock, cost);
            let tokens = [u32::from(b'x'); 60];
            let blocks: Vec<Vec<u32>> =
                (0..spans.len() as u32).map(|span| (span * 17..span * 17 + 17).collect()).collect();
            let plan: Vec<Span<'_>> = spans
                .iter()
                .zip(&blocks)
                .map(|(&(count, start, draws), blocks)| Span {
                    tokens: &tokens[..count as usize],
                    start,
                    blocks,
                    logits: if draws { LogitRows::Last } else { LogitRows::None },
                })
                .collect();
            let works: Vec<SequenceWork> = (0..)
                .zip(&spans)
                .map(|(id, &(new_tokens, context, draws))| SequenceWork {
                    sequence: SequenceId(id),
                    new_tokens,
                    logit_rows: u32::from(draws),
                    context,
                })
                .collect();
            backend.step(&StepPlan::logits(&plan), &mut StepOutput::default()).expect("it fits");
            let DeviceNanos(predicted) = cost.table().expect("a table").predict_step(&works);
            // Two sums of the same terms may round differently.
            prop_assert!(predicted.abs_diff(clock.now().0) <= 1);
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        let good = SyntheticOptions {
            cost: StepCost::default(),
            kv_tokens: 100,
            context: 100,
            step_tokens: 10,
            text: SyntheticText::bytes(),
        };
        type Spoil = fn(&mut SyntheticOptions);
        let cases: [(&str, Spoil); 5] = [
            ("speed", |options| options.cost.speed = 0.0),
            ("sampled token", |options| options.cost.sequence = Duration::ZERO),
            ("hold tokens", |options| options.kv_tokens = 0),
            ("in the vocabulary", |options| options.text.end = 258),
            ("cannot be the end", |options| options.text.end = 256),
        ];
        for (named, spoil) in cases {
            let mut options = good.clone();
            spoil(&mut options);
            let refused = SyntheticBackend::new(options, Pace::Real).err().expect(named);
            assert!(refused.to_string().contains(named), "{refused}");
        }
    }

    #[test]
    fn real_step_takes_its_duration() {
        let cost = StepCost { speed: 10.0, ..StepCost::default() };
        let text = SyntheticText::bytes();
        let options = SyntheticOptions { cost, kv_tokens: 64, context: 64, step_tokens: 64, text };
        let mut backend = SyntheticBackend::new(options, Pace::Real).expect("a model");
        let span = Span { tokens: &[1; 10], start: 0, blocks: &[0], logits: LogitRows::Last };
        let begun = Instant::now();
        backend.step(&StepPlan::logits(&[span]), &mut StepOutput::default()).expect("it fits");
        assert!(begun.elapsed() >= cost.of(StepSize { tokens: 10, rows: 1, context: 10 }));
    }
}
