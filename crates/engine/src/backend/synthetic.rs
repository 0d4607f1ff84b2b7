//! A device that is not there: it computes nothing and takes the time that a
//! cost model says, on a real clock or on a virtual one.
//!
//! It stands in for a GPU where scheduling, limits and capacity are looked at
//! and answers do not matter. Its class is `synthetic` and its name says so
//! too, so that no figure taken with it is mistaken for a device's. The price
//! table of its steps is made from the model that they follow: predictions on
//! it are right to the nanosecond.
//!
//! Every answer repeats one token until `max_tokens`, whatever the sampling
//! parameters. A prompt may ask for less: `[8 tokens]` anywhere in it makes
//! the eighth token the end token. As in a real model that wish is read from
//! the KV cache, so a lost or foreign block changes the answer.

use std::fmt;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use tollgate_domain::cost::CostTableParts;
use tollgate_domain::{AttentionShape, CostTable, CostTableError, Curve, DeviceClass};

use super::{
    BLOCK_TOKENS, Backend, BackendError, DeviceInfo, LogitRows, ModelShape, StepLimits, StepOutput,
    StepPlan,
};
use crate::clock::VirtualClock;

/// A backend that only passes time.
pub struct SyntheticBackend {
    shape: ModelShape,
    device: DeviceInfo,
    limits: StepLimits,
    kv_blocks: u32,
    cost: StepCost,
    text: SyntheticText,
    pace: Pace,
    /// What was read up to and with each place of the KV cache.
    memory: Vec<Reading>,
}

/// How a [`SyntheticBackend`] is set up.
#[derive(Clone, Debug)]
pub struct SyntheticOptions {
    /// How long a step takes.
    pub cost: StepCost,
    /// Tokens that the KV cache holds, rounded up to whole blocks.
    pub kv_tokens: u32,
    /// Tokens that one sequence may hold.
    pub context: u32,
    /// Tokens that one step may feed.
    pub step_tokens: u32,
    /// What its tokens say.
    pub text: SyntheticText,
}

/// How long a step takes:
///
/// ```text
/// (step + sequence x tokens drawn + prefill_token x other tokens + kv_token x tokens of context) / speed
/// ```
///
/// where a token is drawn for each row of logits, and the context is that of
/// all sequences in the step, their new tokens included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Of any step.
    pub step: Duration,
    /// For each sequence that draws a token; at least `prefill_token`.
    pub sequence: Duration,
    /// For each token of context that is read.
    pub kv_token: Duration,
    /// For each token of a prompt.
    pub prefill_token: Duration,
    /// How much faster than all that; 1 is as written.
    pub speed: f64,
}

/// What the tokens of a synthetic model say, and which two it ever draws.
#[derive(Clone, Debug)]
pub struct SyntheticText {
    /// The bytes of each token of the vocabulary.
    pub pieces: Vec<Box<[u8]>>,
    /// The token that answers are made of.
    pub answer: u32,
    /// The token that ends an answer, where a prompt asks for that.
    pub end: u32,
}

/// On what clock time passes.
#[derive(Clone, Debug)]
pub enum Pace {
    /// The host's: a step sleeps until it is over.
    Real,
    /// A virtual one, which each step moves on.
    Virtual(VirtualClock),
}

/// Why a synthetic backend was refused.
#[derive(Debug, thiserror::Error)]
pub enum SyntheticError {
    /// A figure out of its bounds.
    #[error("synthetic engine: {0}")]
    Invalid(&'static str),
    /// The cost model is no price table.
    #[error("synthetic engine")]
    Table(#[from] CostTableError),
}

impl SyntheticBackend {
    /// A backend with an empty KV cache.
    ///
    /// # Errors
    /// [`SyntheticError`] when the options make no model.
    pub fn new(options: SyntheticOptions, pace: Pace) -> Result<Self, SyntheticError> {
        let SyntheticOptions { cost, kv_tokens, context, step_tokens, text } = options;
        text.check()?;
        if kv_tokens == 0 || context < 2 || step_tokens == 0 {
            return Err(SyntheticError::Invalid("KV cache, context and step must hold tokens"));
        }
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
            memory: vec![Reading::default(); (kv_blocks * BLOCK_TOKENS) as usize],
        })
    }

    /// The same with an identity of its own, as made up as the device.
    pub fn with_uuid(mut self, uuid: String) -> Self {
        self.device.uuid = uuid;
        self
    }

    /// Reads a span into the cache: what is remembered after each token.
    fn read(&mut self, tokens: &[u32], start: u32, blocks: &[u32]) {
        let place = |position: u32| {
            let block = blocks[(position / BLOCK_TOKENS) as usize];
            (block * BLOCK_TOKENS + position % BLOCK_TOKENS) as usize
        };
        let mut reading = match start.checked_sub(1) {
            Some(before) => self.memory[place(before)],
            None => Reading::default(),
        };
        for (position, &token) in (start..).zip(tokens) {
            reading = reading.after(token, &self.text);
            self.memory[place(position)] = reading;
        }
    }

    /// What is remembered at `position` of the sequence in `blocks`.
    fn remembered(&self, position: u32, blocks: &[u32]) -> Reading {
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

    fn copy_block(&mut self, from: u32, to: u32) {
        let places = |block: u32| (block * BLOCK_TOKENS) as usize;
        let from = places(from)..places(from + 1);
        self.memory.copy_within(from, places(to));
    }

    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        let begun = Instant::now();
        plan.check(&self.shape, self.limits, self.kv_blocks)?;
        let (mut tokens, mut rows, mut context) = (0, 0, 0);
        for span in plan.spans {
            self.read(span.tokens, span.start, span.blocks);
            tokens += span.tokens.len() as u64;
            rows += span.rows();
            context += span.end();
        }
        let vocabulary = self.text.pieces.len();
        let logits = output.reset(rows, vocabulary);
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
        let length = self.cost.of(tokens, rows as u64, context);
        match &self.pace {
            Pace::Real => wait_until(begun + length),
            Pace::Virtual(clock) => clock.advance(length),
        }
        Ok(())
    }
}

impl Default for StepCost {
    /// What the fairness benchmark is played on.
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
    /// The price of steps that follow this model.
    ///
    /// # Errors
    /// [`SyntheticError`] when a figure is out of its bounds.
    pub fn table(&self) -> Result<CostTable, SyntheticError> {
        if !(self.speed.is_finite() && self.speed > 0.0) {
            return Err(SyntheticError::Invalid("the speed must be above 0"));
        }
        if self.sequence < self.prefill_token {
            return Err(SyntheticError::Invalid("a drawn token takes at least a prompt's token"));
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

    /// How long a step takes that feeds `tokens`, draws `rows` and reads
    /// `context` tokens.
    fn of(&self, tokens: u64, rows: u64, context: u64) -> Duration {
        let Self { step, sequence, kv_token, prefill_token, speed: _ } = *self;
        let prefill = self.nanos(prefill_token);
        let nanos = self.nanos(step)
            + prefill * tokens as f64
            + (self.nanos(sequence) - prefill) * rows as f64
            + self.nanos(kv_token) * context as f64;
        Duration::from_nanos(nanos.ceil() as u64)
    }

    fn nanos(&self, span: Duration) -> f64 {
        span.as_nanos() as f64 / self.speed
    }

    /// Names the table; it stands in every record priced by it.
    fn version(&self) -> String {
        let Self { step, sequence, kv_token, prefill_token, speed } = self;
        let [step, sequence, kv_token, prefill_token] =
            [step, sequence, kv_token, prefill_token].map(Duration::as_nanos);
        format!("synthetic-{step}-{sequence}-{kv_token}-{prefill_token}-x{speed}")
    }
}

/// For people: the figures as they are configured.
impl fmt::Display for StepCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, sequence, kv_token, prefill_token, speed } = self;
        let told = format!(
            "{step:?} + {sequence:?}/sequence + {kv_token:?}/KV token + \
             {prefill_token:?}/prompt token, speed {speed}"
        );
        f.write_str(&told.replace('µ', "u")) // it stands in journals and logs
    }
}

impl SyntheticText {
    /// Tokens that are single bytes; 256 is the answer's token and 257 the end.
    pub fn bytes() -> Self {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte].into_boxed_slice());
        let own = [b" token".to_vec(), Vec::new()].map(Vec::into_boxed_slice);
        Self { pieces: bytes.chain(own).collect(), answer: 256, end: 257 }
    }

    fn check(&self) -> Result<(), SyntheticError> {
        let known = |token: u32| (token as usize) < self.pieces.len();
        if u32::try_from(self.pieces.len()).is_err() || !known(self.answer) || !known(self.end) {
            return Err(SyntheticError::Invalid("its two tokens must be in the vocabulary"));
        }
        if self.answer == self.end {
            return Err(SyntheticError::Invalid("an answer's token cannot be its end"));
        }
        Ok(())
    }
}

/// What a synthetic model remembers of the text so far: how far into a wish
/// like `[8 tokens]` it is, and what is left of the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    place: Place,
    /// The number in the wish that is being read.
    number: u32,
    /// Tokens still to be drawn; [`NO_END`] without a wish.
    left: u32,
}

/// How far into a wish the text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Outside,
    /// Behind the bracket.
    Bracket,
    /// In the number.
    Number,
    /// So many bytes into what stands behind it.
    Unit(u8),
}

impl Default for Reading {
    fn default() -> Self {
        Self { place: Place::Outside, number: 0, left: NO_END }
    }
}

impl Reading {
    fn after(mut self, token: u32, text: &SyntheticText) -> Self {
        if token == text.answer {
            if self.left != NO_END {
                self.left = self.left.saturating_sub(1);
            }
            return Self { place: Place::Outside, ..self };
        }
        for &byte in text.pieces[token as usize].iter() {
            self.read(byte);
        }
        self
    }

    fn read(&mut self, byte: u8) {
        self.place = match (self.place, byte) {
            (_, b'[') => {
                self.number = 0;
                Place::Bracket
            }
            (Place::Bracket | Place::Number, b'0'..=b'9') => {
                let digit = u32::from(byte - b'0');
                self.number = self.number.saturating_mul(10).saturating_add(digit).min(NO_END - 1);
                Place::Number
            }
            (Place::Number, _) if byte == UNIT[0] => Place::Unit(1),
            (Place::Unit(read), _) if byte == UNIT[usize::from(read)] => {
                if usize::from(read) + 1 == UNIT.len() {
                    self.left = self.number;
                    Place::Outside
                } else {
                    Place::Unit(read + 1)
                }
            }
            _ => Place::Outside,
        };
    }

    /// The token that comes next: of n that were asked for the last is the end.
    fn next(self, text: &SyntheticText) -> u32 {
        if self.left <= 1 { text.end } else { text.answer }
    }
}

/// Sleeps, and spins for the last bit: a sleeper wakes up late.
fn wait_until(end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    std::thread::sleep(left.saturating_sub(LATE_WAKE));
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// What attention reads is counted in tokens of context and nothing else.
const SHAPE: AttentionShape = AttentionShape { kv_bytes_per_token: 1, flop_per_pair: 4 };
/// What stands behind the number in a wish.
const UNIT: &[u8] = b" tokens]";
/// No wish.
const NO_END: u32 = u32::MAX;
/// How late a thread that slept wakes up, mostly.
const LATE_WAKE: Duration = Duration::from_micros(100);

#[cfg(test)]
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

    /// The next token after `text`, read in the pieces that it comes in.
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
    fn an_answer_ends_only_where_a_prompt_asks_for_it() {
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
    fn a_copied_block_remembers() {
        let mut backend = backend(&VirtualClock::default(), StepCost::default());
        let mut output = StepOutput::default();
        let prompt: Vec<u32> = b"[2 tokens]".iter().map(|&byte| u32::from(byte)).collect();
        let span = Span { tokens: &prompt, start: 0, blocks: &[3], logits: LogitRows::None };
        backend.step(&StepPlan::logits(&[span]), &mut output).expect("it fits");
        backend.copy_block(3, 7);
        let span = Span { tokens: &[256], start: 10, blocks: &[7], logits: LogitRows::Last };
        backend.step(&StepPlan::logits(&[span]), &mut output).expect("it fits");
        assert_eq!(output.row(0)[257], 0.0);
    }

    proptest! {
        #[test]
        fn the_table_predicts_every_step(
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
    fn nonsense_is_refused() {
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
            ("drawn token", |options| options.cost.sequence = Duration::ZERO),
            ("hold tokens", |options| options.kv_tokens = 0),
            ("in the vocabulary", |options| options.text.end = 258),
            ("cannot be its end", |options| options.text.end = 256),
        ];
        for (named, spoil) in cases {
            let mut options = good.clone();
            spoil(&mut options);
            let refused = SyntheticBackend::new(options, Pace::Real).err().expect(named);
            assert!(refused.to_string().contains(named), "{refused}");
        }
    }

    #[test]
    fn a_real_step_takes_its_time() {
        let cost = StepCost { speed: 10.0, ..StepCost::default() };
        let text = SyntheticText::bytes();
        let options = SyntheticOptions { cost, kv_tokens: 64, context: 64, step_tokens: 64, text };
        let mut backend = SyntheticBackend::new(options, Pace::Real).expect("a model");
        let span = Span { tokens: &[1; 10], start: 0, blocks: &[0], logits: LogitRows::Last };
        let begun = Instant::now();
        backend.step(&StepPlan::logits(&[span]), &mut StepOutput::default()).expect("it fits");
        assert!(begun.elapsed() >= cost.of(10, 1, 10));
    }
}
