//! Measures the cost of steps on a device before the device serves requests.
//!
//! The terms of [`tollgate_domain::cost`] come from steps that differ in one thing: in
//! tokens for g, in logit rows for h, in context for kappa and phi. A measurement cannot
//! separate the fixed time of a step from the time of its first token, and every formula
//! adds the two, so the fixed time is part of g(1). Each kind of step runs a few times and
//! the fastest run counts, because noise on a busy host only adds time. Larger steps are
//! measured while the time allowed lasts. A curve continues beyond its last point.

mod fit;

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use tollgate_domain::cost::CostTableParts;
use tollgate_domain::{CostTable, CostTableError, Curve, DeviceNanos, SequenceId, SequenceWork};

use crate::backend::{
    BLOCK_TOKENS, Backend, BackendError, BlockCopy, LogitRows, SampleRequest, SampleTarget, Span,
    StepOutput, StepPlan,
};
use crate::clock::Clock;
use crate::sample::SamplingParams;
use fit::{Sample, attention_rates};

/// A measured table and the cost of measuring it.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// Measured table. Its version names engine, device, model and content.
    pub table: CostTable,
    /// Device time of all measured steps, on the platform's account.
    pub device_time: DeviceNanos,
    /// Number of measured steps.
    pub steps: u64,
}

/// The reason for which a device could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// A step failed.
    #[error("a step of the calibration failed")]
    Backend(#[from] BackendError),
    /// The measurements do not form a valid table.
    #[error("the calibration measured an invalid table")]
    Table(#[from] CostTableError),
}

/// Measures the whole table. Takes at most about two seconds if a step takes less than two
/// milliseconds, otherwise about thirty.
///
/// # Errors
///
/// [`CalibrationError`] if a step fails.
pub fn calibrate(
    backend: &mut dyn Backend,
    clock: &dyn Clock,
) -> Result<Calibration, CalibrationError> {
    let mut probe = Probe::new(backend, clock);
    // One token tells small models from large ones, which need more time.
    let first = probe.fastest(&[Feed::one(1)], LogitRows::None, Duration::from_millis(50))?;
    let allowed = if first < SMALL_STEP_NS { SMALL_LIMIT } else { LARGE_LIMIT };
    // The shares of the three measurements sum to 0.9; the rest covers overrun of single
    // steps.
    let linear = probe.linear(&TOKENS, allowed.mul_f64(0.4))?;
    let head = probe.head(&ROWS, allowed.mul_f64(0.2))?;
    let attention = probe.attention(&linear, allowed.mul_f64(0.3))?;
    probe.finish("", linear, head, attention)
}

/// Measures a coarse table with a handful of steps, so that a first start can serve at
/// once. The table has few points, and attention costs what a slow machine would need.
///
/// # Errors
///
/// [`CalibrationError`] if a step fails.
pub fn coarse(
    backend: &mut dyn Backend,
    clock: &dyn Clock,
) -> Result<Calibration, CalibrationError> {
    let mut probe = Probe::new(backend, clock);
    let linear = probe.linear(&[1, 8, 64], Duration::from_millis(100))?;
    let head = probe.head(&[1, 8], Duration::from_millis(50))?;
    let attention =
        AttentionRates { ns_per_kv_byte: COARSE_NS_PER_KV_BYTE, ns_per_flop: COARSE_NS_PER_FLOP };
    probe.finish("-coarse", linear, head, attention)
}

/// Runner of timed steps on a backend that runs nothing else.
struct Probe<'a> {
    backend: &'a mut dyn Backend,
    clock: &'a dyn Clock,
    output: StepOutput,
    device_time: DeviceNanos,
    steps: u64,
}

/// The time that attention takes, at least 0 each.
struct AttentionRates {
    /// For each byte of KV that is read.
    ns_per_kv_byte: f64,
    /// For each floating-point operation.
    ns_per_flop: f64,
}

/// One span of a measured step. The token ids do not affect the time; the blocks do.
#[derive(Clone, Debug)]
struct Feed {
    tokens: u32,
    start: u32,
    blocks: Vec<u32>,
}

impl Feed {
    /// Creates a span of `tokens` tokens at the start of an empty sequence.
    fn one(tokens: u32) -> Self {
        Self { tokens, start: 0, blocks: (0..tokens.div_ceil(BLOCK_TOKENS)).collect() }
    }

    fn work(&self) -> SequenceWork {
        SequenceWork {
            sequence: SequenceId(0),
            new_tokens: self.tokens,
            logit_rows: 0,
            context: self.start,
        }
    }
}

impl<'a> Probe<'a> {
    fn new(backend: &'a mut dyn Backend, clock: &'a dyn Clock) -> Self {
        Self {
            backend,
            clock,
            output: StepOutput::default(),
            device_time: DeviceNanos::ZERO,
            steps: 0,
        }
    }

    /// Measures g: time against tokens, without logit rows.
    fn linear(&mut self, tokens: &[u32], allowed: Duration) -> Result<Curve, CalibrationError> {
        let most =
            self.backend.limits().tokens.min(self.backend.kv_blocks().saturating_mul(BLOCK_TOKENS));
        self.curve(tokens, most, allowed, |probe, tokens, allowed| {
            probe.fastest(&probe.many(tokens), LogitRows::None, allowed)
        })
    }

    /// Measures h: the time that logit rows add to the same tokens.
    fn head(&mut self, rows: &[u32], allowed: Duration) -> Result<Curve, CalibrationError> {
        let most = self.most_tokens().min(self.backend.limits().logit_rows);
        self.curve(rows, most, allowed, |probe, rows, allowed| {
            let feeds = probe.many(rows);
            let with = probe.fastest(&feeds, LogitRows::All, allowed / 2)?;
            let without = probe.fastest(&feeds, LogitRows::None, allowed / 2)?;
            // Noise can make the difference negative.
            Ok((with - without).max(0.0))
        })
    }

    /// Returns spans with `tokens` tokens in all: single tokens like a decoding batch, up
    /// to the widest batch, and full blocks beyond it.
    fn many(&self, tokens: u32) -> Vec<Feed> {
        let each =
            if tokens <= WIDEST_BATCH.min(self.backend.kv_blocks()) { 1 } else { BLOCK_TOKENS };
        // At most one block each, so that attention takes almost no time.
        (0..tokens.div_ceil(each))
            .map(|block| Feed {
                tokens: (tokens - block * each).min(each),
                start: 0,
                blocks: vec![block],
            })
            .collect()
    }

    /// Returns the number of tokens that one step can feed to sequences of one block each.
    fn most_tokens(&self) -> u32 {
        let pool = self.backend.kv_blocks().saturating_mul(BLOCK_TOKENS);
        self.backend.limits().tokens.min(pool)
    }

    /// Measures points of growing size up to `most`, or until the next point would not fit
    /// the time left.
    fn curve(
        &mut self,
        sizes: &[u32],
        most: u32,
        allowed: Duration,
        mut measure: impl FnMut(&mut Self, u32, Duration) -> Result<f64, CalibrationError>,
    ) -> Result<Curve, CalibrationError> {
        let began = self.device_time;
        let mut points: Vec<(u32, f64)> = Vec::with_capacity(sizes.len());
        // At least one point is measured, because a curve without points is invalid.
        for &size in sizes.iter().filter(|&&size| size <= most.max(1)) {
            let before = self.device_time;
            let left = allowed.saturating_sub(Duration::from_nanos((before - began).nanos()));
            // Half of the time left: each point may run several times, and larger points
            // must follow.
            let ns = measure(self, size, left / 2)?;
            // Noise must not make more work cheaper.
            let floor = points.last().map_or(0.0, |&(_, ns)| ns);
            points.push((size, ns.max(floor)));
            // The next size takes about twice as long.
            let spent = Duration::from_nanos((self.device_time - before).nanos());
            if spent * 2 > left {
                break;
            }
        }
        Ok(Curve(points))
    }

    /// Measures kappa and phi: the time that context adds to decoding and to chunks of
    /// prefill.
    fn attention(
        &mut self,
        linear: &Curve,
        allowed: Duration,
    ) -> Result<AttentionRates, CalibrationError> {
        let began = self.device_time;
        let mut samples = Vec::new();
        for context in self.contexts(linear, allowed) {
            self.fill(context)?;
            self.copy_to_decoders(context);
            for feeds in self.attention_steps(context) {
                // The budget is shared by all remaining measurements.
                let spent = Duration::from_nanos((self.device_time - began).nanos());
                let left = allowed.saturating_sub(spent);
                let ns = self.fastest(&feeds, LogitRows::None, left / 8)?;
                samples.push(self.sample(&feeds, ns, linear));
            }
        }
        let (ns_per_kv_byte, ns_per_flop) = attention_rates(&samples);
        Ok(AttentionRates { ns_per_kv_byte, ns_per_flop })
    }

    /// Returns the two largest lengths of context that fit the model, the pool and the time
    /// to fill them.
    fn contexts(&self, linear: &Curve, allowed: Duration) -> Vec<u32> {
        let step = self.backend.limits().tokens.min(FILL_CHUNK);
        let fill_ns =
            |context: u32| f64::from(context) / f64::from(step) * linear.at(u64::from(step));
        let (pool, chunk) = (self.backend.kv_blocks(), self.attention_chunk());
        let most = self.backend.shape().context.saturating_sub(chunk);
        let fits = |&context: &u32| {
            let decoders = DECODERS * blocks_of_decoder(context);
            context <= most
                && decoders + chunk.div_ceil(BLOCK_TOKENS) <= pool
                && fill_ns(context) < allowed.as_nanos() as f64 / 3.0
        };
        let mut contexts: Vec<u32> = CONTEXTS.into_iter().filter(fits).collect();
        // Long contexts separate attention from noise best.
        contexts.drain(..contexts.len().saturating_sub(2));
        contexts
    }

    /// Writes `context` tokens into the first blocks, so that later steps read memory that
    /// was written.
    fn fill(&mut self, context: u32) -> Result<(), CalibrationError> {
        let step = self.backend.limits().tokens.min(FILL_CHUNK);
        let blocks: Vec<u32> = (0..context.div_ceil(BLOCK_TOKENS)).collect();
        let mut start = 0;
        while start < context {
            let tokens = step.min(context - start);
            let feed = Feed { tokens, start, blocks: blocks.clone() };
            self.run(&[feed], LogitRows::None)?;
            start += tokens;
        }
        Ok(())
    }

    /// Copies the filled context to blocks of each decoding sequence. If the sequences
    /// shared blocks, a device's cache would hold them, and their reads would seem to
    /// cost almost nothing.
    fn copy_to_decoders(&mut self, context: u32) {
        for decoder in 1..DECODERS {
            let first = decoder * blocks_of_decoder(context);
            for from in 0..context / BLOCK_TOKENS {
                self.backend.copy_block(BlockCopy { from, to: first + from });
            }
        }
    }

    /// Returns two steps on a filled context: one of decoding sequences with a copy of it
    /// each, and one that reads a chunk.
    fn attention_steps(&self, context: u32) -> [Vec<Feed>; 2] {
        let each = blocks_of_decoder(context);
        let decoding = (0..DECODERS.min(self.backend.limits().tokens))
            .map(|decoder| Feed {
                tokens: 1,
                start: context,
                blocks: (decoder * each..(decoder + 1) * each).collect(),
            })
            .collect();
        let tokens = self.attention_chunk();
        let own = DECODERS * each..DECODERS * each + tokens.div_ceil(BLOCK_TOKENS);
        let blocks = (0..context / BLOCK_TOKENS).chain(own).collect();
        [decoding, vec![Feed { tokens, start: context, blocks }]]
    }

    /// Returns the tokens of the chunk in the attention steps. A much smaller chunk would
    /// leave most of a GPU idle, and attention would seem dearer than it is.
    fn attention_chunk(&self) -> u32 {
        REFERENCE_CHUNK.min(self.backend.limits().tokens)
    }

    fn sample(&self, feeds: &[Feed], ns: f64, linear: &Curve) -> Sample {
        let shape = self.backend.shape().attention();
        let tokens: u64 = feeds.iter().map(|feed| u64::from(feed.tokens)).sum();
        Sample {
            kv_bytes: feeds.iter().map(|feed| shape.kv_bytes(&feed.work())).sum(),
            flop: feeds.iter().map(|feed| shape.flop(&feed.work())).sum(),
            ns: ns - linear.at(tokens),
            of: ns,
        }
    }

    /// Returns the fastest of a few runs of one step, ns. The step runs at least once, and
    /// again while the time allowed lasts.
    fn fastest(
        &mut self,
        feeds: &[Feed],
        rows: LogitRows,
        allowed: Duration,
    ) -> Result<f64, CalibrationError> {
        let mut best = self.run(feeds, rows)?;
        let mut spent = best;
        for _ in 1..RUNS {
            // Stops before a run that would exceed the time, not after it.
            if Duration::from_nanos(spent.saturating_add(best)) > allowed {
                break;
            }
            let ns = self.run(feeds, rows)?;
            spent = spent.saturating_add(ns);
            best = best.min(ns);
        }
        Ok(best as f64)
    }

    fn run(&mut self, feeds: &[Feed], logits: LogitRows) -> Result<u64, CalibrationError> {
        let vocabulary = self.backend.shape().vocabulary;
        // Different tokens, so that embeddings are read as in real steps.
        let token = |position: u32| (position.wrapping_mul(7_919)) % vocabulary;
        let tokens: Vec<Vec<u32>> =
            feeds.iter().map(|feed| (0..feed.tokens).map(token).collect()).collect();
        let spans: Vec<Span<'_>> = feeds
            .iter()
            .zip(&tokens)
            .map(|(feed, tokens)| Span { tokens, start: feed.start, blocks: &feed.blocks, logits })
            .collect();
        // Sampling is a part of the step, and greedy sampling is its cheapest form.
        let params = SamplingParams::greedy(0);
        let rows = spans.iter().map(|span| span.rows() as u32).sum();
        let draws: Vec<SampleRequest<'_>> = (0..rows)
            .map(|row| SampleRequest { row, params: &params, token: SampleTarget::first() })
            .collect();
        let started = self.clock.now();
        self.backend.step(&StepPlan::samples(&spans, &draws), &mut self.output)?;
        let ns = match self.output.device_time() {
            // The device's own timer excludes the host's work, which production does not
            // bill either.
            Some(busy) => busy.nanos(),
            None => self.clock.now().0.saturating_sub(started.0),
        };
        self.device_time += DeviceNanos(ns);
        self.steps += 1;
        Ok(ns)
    }

    fn finish(
        self,
        kind: &str,
        linear: Curve,
        head: Curve,
        attention: AttentionRates,
    ) -> Result<Calibration, CalibrationError> {
        let mut parts = CostTableParts {
            version: String::new(),
            step_ns: 0.0,
            linear,
            head,
            ns_per_kv_byte: attention.ns_per_kv_byte,
            ns_per_attention_flop: attention.ns_per_flop,
            shape: self.backend.shape().attention(),
            reference_batch: REFERENCE_BATCH,
            reference_chunk: REFERENCE_CHUNK,
        };
        // The version contains a hash of the content, so it is set last.
        parts.version = self.version(kind, &parts);
        let table = CostTable::try_from(parts)?;
        Ok(Calibration { table, device_time: self.device_time, steps: self.steps })
    }

    /// Returns the version `engine/device/model/content`. The last two parts are the first
    /// digits of hashes.
    fn version(&self, kind: &str, parts: &CostTableParts) -> String {
        // The parts of a table are numbers and names, which always serialise.
        let content = serde_json::to_vec(parts).unwrap_or_default();
        let hash: String = digest(&SHA256, &content).as_ref()[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!("{}-{hash}{kind}", calibration_key(&*self.backend))
    }
}

/// Returns the prefix of versions that are valid for this engine, this device and this
/// model. A stored table with another prefix must be measured again.
pub fn calibration_key(backend: &dyn Backend) -> String {
    let device = backend.device();
    let name: String = device
        .name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .take(96)
        .collect();
    let model: String = backend.shape().hash.chars().take(12).collect();
    let (class, threads) = (&device.class, device.threads);
    format!("{}.{METHOD}-{class}-{name}-{threads}-{model}", env!("CARGO_PKG_VERSION"))
}

/// Returns the blocks of a decoding sequence in the attention steps: its context, a
/// multiple of [`BLOCK_TOKENS`], and one block to write to.
fn blocks_of_decoder(context: u32) -> u32 {
    context / BLOCK_TOKENS + 1
}

/// Number of the measuring method. A table of another method is measured again.
const METHOD: u32 = 3;
/// Largest number of tokens that is measured as a decoding batch.
const WIDEST_BATCH: u32 = 64;
/// B: sequences in the reference batch.
const REFERENCE_BATCH: u32 = 32;
/// C: tokens in a reference chunk of prefill.
const REFERENCE_CHUNK: u32 = 256;
/// Numbers of tokens at which g is measured.
const TOKENS: [u32; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
/// Numbers of rows at which h is measured.
const ROWS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Lengths of context; the two largest possible ones are measured.
const CONTEXTS: [u32; 6] = [64, 128, 256, 512, 1_024, 2_048];
/// Number of decoding sequences in the attention steps.
const DECODERS: u32 = 8;
/// Tokens of a step that fills the context.
const FILL_CHUNK: u32 = 256;
/// Largest number of runs of one step.
const RUNS: u32 = 7;
/// Step time below which a model counts as small.
const SMALL_STEP_NS: f64 = 2_000_000.0;
const SMALL_LIMIT: Duration = Duration::from_secs(2);
const LARGE_LIMIT: Duration = Duration::from_secs(30);
/// Memory of a slow host, 5 GB/s.
const COARSE_NS_PER_KV_BYTE: f64 = 0.2;
/// Two slow cores, 10 GFLOP/s.
const COARSE_NS_PER_FLOP: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeBackend, FakeClock, table};

    #[test]
    fn calibration_finds_the_table_of_the_device() {
        let clock = FakeClock::default();
        let mut backend = FakeBackend::new(256, clock.clone());
        let found = calibrate(&mut backend, &clock).expect("it measures");
        assert_eq!(found.device_time.nanos(), clock.now().0, "all of it is on record");
        assert!(found.device_time < DeviceNanos::from_secs(2));
        let truth = table();
        for (new_tokens, logit_rows, context, count) in
            [(1, 1, 0, 1), (1, 1, 900, 20), (100, 0, 0, 1), (200, 1, 500, 1), (1, 1, 10, 64)]
        {
            let works: Vec<SequenceWork> = (0..count)
                .map(|id| SequenceWork {
                    sequence: SequenceId(id),
                    new_tokens,
                    logit_rows,
                    context,
                })
                .collect();
            let expected = truth.predict_step(&works).as_secs_f64();
            let predicted = found.table.predict_step(&works).as_secs_f64();
            let error = (predicted / expected - 1.0).abs();
            // The curve of the model bends between the measured points.
            assert!(error < 0.03, "{new_tokens} {context} {count}: {predicted} for {expected}");
        }
        let kappa = found.table.parts().ns_per_kv_byte;
        assert!((kappa / truth.parts().ns_per_kv_byte - 1.0).abs() < 0.2, "{kappa}");
    }

    #[test]
    fn calibration_works_with_small_pool() {
        for blocks in [1, 2, 9, 20] {
            let clock = FakeClock::default();
            let mut backend = FakeBackend::new(blocks, clock.clone());
            let found = calibrate(&mut backend, &clock).expect("it measures");
            assert!(!found.table.parts().linear.0.is_empty(), "{blocks}");
        }
    }

    #[test]
    fn attention_steps_share_no_blocks() {
        let clock = FakeClock::default();
        let mut backend = FakeBackend::new(256, clock.clone());
        let mut probe = Probe::new(&mut backend, &clock);
        probe.fill(256).expect("it runs");
        probe.copy_to_decoders(256);
        let [decoding, chunk] = probe.attention_steps(256);
        let written = |feed: &Feed| feed.blocks[256 / BLOCK_TOKENS as usize..].to_vec();
        let all: Vec<u32> = decoding.iter().flat_map(|feed| feed.blocks.clone()).collect();
        let mut distinct = all.clone();
        distinct.extend(written(&chunk[0]));
        distinct.sort_unstable();
        let before = distinct.len();
        distinct.dedup();
        assert_eq!(distinct.len(), before, "a block has two sequences");
        assert_eq!(decoding.len(), DECODERS as usize);
        // Every sequence reads the same context, and none reads memory never written.
        let first = backend.marks_of(&decoding[0].blocks[..16]);
        assert!(first.iter().all(|&mark| mark > 0));
        assert!(decoding.iter().all(|feed| backend.marks_of(&feed.blocks[..16]) == first));
    }

    #[test]
    fn coarse_calibration_takes_few_steps() {
        let clock = FakeClock::default();
        let mut backend = FakeBackend::new(64, clock.clone());
        let found = coarse(&mut backend, &clock).expect("it measures");
        assert!(found.steps <= 50, "{}", found.steps);
        assert!(found.table.version().ends_with("-coarse"));
        assert!(found.table.version().starts_with(&calibration_key(&backend)));
        let work =
            SequenceWork { sequence: SequenceId(1), new_tokens: 1, logit_rows: 1, context: 500 };
        assert!(found.table.predict_step(&[work]) >= table().predict_step(&[work]));
    }

    #[test]
    fn calibration_versions_differ_by_content() {
        let clock = FakeClock::default();
        let mut backend = FakeBackend::new(256, clock.clone());
        let one = calibrate(&mut backend, &clock).expect("it measures");
        let same = calibrate(&mut backend, &clock).expect("it measures");
        assert_eq!(one.table.version(), same.table.version());
        let other = coarse(&mut backend, &clock).expect("it measures");
        assert_ne!(one.table.version(), other.table.version());
    }
}
