//! Cost of a step, its split over the sequences in the step, and the cost of a request that
//! does not depend on its neighbours.
//!
//! Two meters use one calibrated table. *Attribution* splits the measured time of one step
//! over its sequences, and the parts sum to the whole. *Reference cost* is the same formula
//! at a fixed reference batch. Reference cost depends on the request alone, never on
//! chunking or neighbours. Estimates, limits and prices use reference cost.
//!
//! A step has n_i new tokens and l_i logit rows for sequence i, N and L in all, and takes
//! the time T over the set S of active sequences. The weight of a sequence is
//!
//! ```text
//! w_i = (t0 + g(1)) / |S| + (g(N) - g(1)) n_i / N + h(L) l_i / L
//!       + kappa kv_bytes_i + phi attention_flop_i
//! ```
//!
//! where g and h are the measured times of the linear layers and of the output head against
//! tokens. All sequences share the reading of the weights (`g(1)`) equally. Arithmetic
//! above that floor is shared by tokens. Attention is paid by the sequence that causes it.
//! At the reference batch, a prompt with log-probabilities costs `h(C) / C` more for each
//! of its rows; see [`CostTable::prompt_work_ns`]. `docs/metering.md` explains the rule and
//! its reasons.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{DeviceNanos, SequenceId};

/// The calibrated cost of one model on one device. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "CostTableParts", into = "CostTableParts")]
pub struct CostTable {
    parts: CostTableParts,
}

/// The unchecked fields of a [`CostTable`], as they are stored and sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTableParts {
    /// Name of the calibration. Every record priced with the table contains it.
    pub version: String,
    /// Fixed time of a step, ns.
    pub step_ns: f64,
    /// g: time of all linear layers against tokens in the step.
    pub linear: Curve,
    /// h: time of the output head against logit rows.
    pub head: Curve,
    /// kappa: ns per byte of KV cache read.
    pub ns_per_kv_byte: f64,
    /// phi: ns per floating-point operation of attention.
    pub ns_per_attention_flop: f64,
    /// Attention work of one token.
    pub shape: AttentionShape,
    /// B: sequences in the reference batch.
    pub reference_batch: u32,
    /// C: tokens in a reference chunk of prefill.
    pub reference_chunk: u32,
}

/// The attention work of one token, from the shape of the model alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionShape {
    /// Bytes of K and V over all layers for one token of context.
    pub kv_bytes_per_token: u64,
    /// Floating-point operations over all layers for one query token and one token of
    /// context: `4 x layers x heads x head_dim`.
    pub flop_per_pair: u64,
}

/// The reason for which a table was rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostTableError {
    /// A curve without points, out of order, falling, negative or infinite.
    #[error(
        "cost table: curve {0} must have points of growing tokens and of ns from 0 to an hour that do not fall"
    )]
    Curve(&'static str),
    /// A coefficient that is negative or not finite.
    #[error("cost table: {0} must be from 0 to an hour in ns")]
    Coefficient(&'static str),
    /// A reference batch or chunk of zero, or an empty version.
    #[error("cost table: {0} must not be empty or zero")]
    Empty(&'static str),
}

/// A piecewise linear, monotone curve: time in ns against tokens. The value at 0 is 0. The
/// curve is flat before the first point and continues with the last slope beyond the last
/// point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve(pub Vec<(u32, f64)>);

impl Curve {
    /// Returns the time for `tokens`, ns.
    pub fn at(&self, tokens: u64) -> f64 {
        let points = &self.0;
        let (Some(&(first_x, first_y)), Some(&(last_x, last_y))) = (points.first(), points.last())
        else {
            return 0.0;
        };
        if tokens == 0 {
            return 0.0;
        }
        // Below the first point nothing was measured, and a step never costs less than
        // that.
        if tokens <= u64::from(first_x) {
            return first_y;
        }
        let upper = points.partition_point(|&(x, _)| u64::from(x) < tokens);
        let (upper, beyond) =
            // Beyond the last point the last slope continues.
            if upper < points.len() { (upper, false) } else { (points.len() - 1, true) };
        let Some(&(x0, y0)) = upper.checked_sub(1).and_then(|below| points.get(below)) else {
            // With a single point, the time beyond it grows in proportion.
            return last_y * tokens as f64 / f64::from(last_x.max(1));
        };
        let (x1, y1) = if beyond { (last_x, last_y) } else { points[upper] };
        y0 + (y1 - y0) * (tokens as f64 - f64::from(x0)) / f64::from(x1 - x0)
    }

    fn is_valid(&self) -> bool {
        !self.0.is_empty()
            // A point at 0 tokens would contradict the value 0 there.
            && self.0[0].0 > 0
            && self.0.iter().all(|&(_, ns)| (0.0..=LONGEST_NS).contains(&ns))
            && self.0.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1)
    }
}

/// The work of one sequence in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceWork {
    /// Id of the sequence.
    pub sequence: SequenceId,
    /// n: tokens fed: one during decoding, a chunk during prefill.
    pub new_tokens: u32,
    /// l: logit rows computed.
    pub logit_rows: u32,
    /// Tokens in the KV cache before the step.
    pub context: u32,
}

/// The work of reading a prompt, independent of other sequences. A pair (uncached, cached)
/// converts to a work without scored rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptWork {
    /// Tokens to compute.
    pub uncached: u64,
    /// Tokens before them that are in the cache.
    pub cached: u64,
    /// Computed tokens with logit rows that are needed for the prompt's log-probabilities. The
    /// row from which the first generated token is sampled belongs to that token's cost and
    /// is not counted here.
    pub scored: u64,
}

impl PromptWork {
    /// Creates the work of reading `tokens` tokens of a prompt from its start. All logit
    /// rows are needed if `scored` is true. Estimates, limits and bills all use this
    /// constructor, so they count alike.
    pub fn of(tokens: u64, scored: bool) -> Self {
        Self { uncached: tokens, cached: 0, scored: if scored { tokens } else { 0 } }
    }
}

impl From<(u64, u64)> for PromptWork {
    fn from((uncached, cached): (u64, u64)) -> Self {
        Self { uncached, cached, scored: 0 }
    }
}

/// The memory and the arithmetic of attention.
struct AttentionWork {
    /// Bytes of KV that are read.
    kv_bytes: f64,
    /// Floating-point operations.
    flop: f64,
}

impl AttentionShape {
    /// Returns the memory and the arithmetic of attention in `work`.
    fn attention(&self, work: &SequenceWork) -> AttentionWork {
        AttentionWork { kv_bytes: self.kv_bytes(work), flop: self.flop(work) }
    }

    /// Returns the bytes of KV that `work` reads: its whole context, once.
    pub fn kv_bytes(&self, work: &SequenceWork) -> f64 {
        self.kv_bytes_per_token as f64 * (f64::from(work.context) + f64::from(work.new_tokens))
    }

    /// Returns the floating-point operations of attention in `work`: each new token attends
    /// to the context, to earlier new tokens and to itself.
    pub fn flop(&self, work: &SequenceWork) -> f64 {
        let (n, context) = (f64::from(work.new_tokens), f64::from(work.context));
        self.flop_per_pair as f64 * (n * context + n * (n + 1.0) / 2.0)
    }
}

impl CostTable {
    /// Returns the name of the calibration.
    pub fn version(&self) -> &str {
        &self.parts.version
    }

    /// Returns the fields, for storing and sending.
    pub fn parts(&self) -> &CostTableParts {
        &self.parts
    }

    /// Splits the measured time `step` over `works` exactly. The result has one share per
    /// work, in the same order, and sums to `step`.
    ///
    /// Shares are whole nanoseconds by largest remainder, ties by sequence id. The order of
    /// `works` does not matter. Without work the result is empty and the caller books the
    /// step as overhead.
    pub fn attribute(&self, step: DeviceNanos, works: &[SequenceWork]) -> Vec<DeviceNanos> {
        let weights = self.weights(works);
        let ids: Vec<SequenceId> = works.iter().map(|work| work.sequence).collect();
        split(step, &weights, &ids)
    }

    /// Returns the predicted time of a step of `works`.
    pub fn predict_step(&self, works: &[SequenceWork]) -> DeviceNanos {
        DeviceNanos::from_f64_ceil(self.weights(works).iter().sum())
    }

    /// Starts the prediction of a step that is built up work by work.
    pub fn step_cost(&self) -> StepCost<'_> {
        StepCost { table: self, sequences: 0, tokens: 0, rows: 0, attention_ns: 0.0 }
    }

    fn weights(&self, works: &[SequenceWork]) -> Vec<f64> {
        let CostTableParts { step_ns, linear, head, .. } = &self.parts;
        // The fixed time of the step is shared by all sequences alike.
        let active = works.len() as f64;
        let tokens: u64 = works.iter().map(|work| u64::from(work.new_tokens)).sum();
        let rows: u64 = works.iter().map(|work| u64::from(work.logit_rows)).sum();
        let floor = (step_ns + linear.at(1)) / active;
        // The floor `g(1)` is paid by all sequences alike, so only the time above it is
        // split by tokens.
        let arithmetic = over(linear.at(tokens) - linear.at(1), tokens).max(0.0);
        let logits = over(head.at(rows), rows);
        works
            .iter()
            .map(|work| {
                floor
                    + arithmetic * f64::from(work.new_tokens)
                    + logits * f64::from(work.logit_rows)
                    + self.attention_ns(self.parts.shape.attention(work))
            })
            .collect()
    }

    /// Returns the reference cost of reading a prompt, ns: its tokens, plus `h(C) / C` for
    /// each scored row.
    pub fn prompt_work_ns(&self, work: PromptWork) -> f64 {
        let PromptWork { uncached, cached, scored } = work;
        let chunk = u64::from(self.parts.reference_chunk);
        self.prompt_ns(cached..cached + uncached)
            + scored as f64 * self.parts.head.at(chunk) / chunk as f64
    }

    /// Returns the reference cost of a prompt's tokens alone, ns: those at `computed`,
    /// in chunks of C. Tokens before them were found in the prefix cache.
    pub fn prompt_ns(&self, computed: Range<u64>) -> f64 {
        let (cached, uncached) = (computed.start, computed.end - computed.start);
        let CostTableParts { step_ns, linear, reference_batch, reference_chunk, shape, .. } =
            &self.parts;
        if uncached == 0 {
            return 0.0;
        }
        let (batch, chunk) = (f64::from(*reference_batch), u64::from(*reference_chunk));
        let chunks = uncached.div_ceil(chunk);
        // Floating point is exact here: token counts stay far below 2^53.
        let full = (uncached / chunk) as f64;
        // Each chunk reads the context up to its own end: cached + C, cached + 2C, ...
        let full_reads = full * cached as f64 + chunk as f64 * full * (full + 1.0) / 2.0;
        let last_read =
            if uncached.is_multiple_of(chunk) { 0.0 } else { (cached + uncached) as f64 };
        let n = uncached as f64;
        let pairs = n * cached as f64 + n * (n + 1.0) / 2.0;
        chunks as f64 * (step_ns + linear.at(1)) / batch
            + n * (linear.at(chunk) - linear.at(1)) / chunk as f64
            + self.attention_ns(AttentionWork {
                kv_bytes: shape.kv_bytes_per_token as f64 * (full_reads + last_read),
                flop: shape.flop_per_pair as f64 * pairs,
            })
    }

    /// Returns the reference cost of generating the tokens at `generated`, ns. The tokens
    /// before them are the context.
    pub fn generated_ns(&self, generated: Range<u64>) -> f64 {
        let (context, tokens) = (generated.start, generated.end - generated.start);
        let CostTableParts { step_ns, linear, head, reference_batch, shape, .. } = &self.parts;
        let batch = u64::from(*reference_batch);
        // The cost of a whole step at the reference batch, of which one token pays one
        // part.
        let each = (step_ns + linear.at(1)) + (linear.at(batch) - linear.at(1)) + head.at(batch);
        let m = tokens as f64;
        // Token j of m attends to context + j tokens, itself included.
        let seen = m * context as f64 + m * (m + 1.0) / 2.0;
        m * each / batch as f64
            + self.attention_ns(AttentionWork {
                kv_bytes: shape.kv_bytes_per_token as f64 * seen,
                flop: shape.flop_per_pair as f64 * seen,
            })
    }

    /// Returns the largest number of tokens that one choice can have within `time`: a step
    /// gives a sequence one token, and no step is shorter than one with a single sequence
    /// and an empty context.
    pub fn tokens_within(&self, time: Duration) -> u64 {
        let CostTableParts { step_ns, linear, head, .. } = &self.parts;
        let shortest = step_ns + linear.at(1) + head.at(1);
        // `linear.at(1)` is above zero in every table. A float beyond 64 bits converts to
        // the largest integer.
        (time.as_nanos() as f64 / shortest).ceil() as u64
    }

    /// Returns the reference cost of a whole request, rounded up to ns once. Prompts are
    /// [`PromptWork`]s or (uncached, cached) pairs; choices are (context, generated) pairs.
    pub fn request(
        &self,
        prompts: impl IntoIterator<Item = impl Into<PromptWork>>,
        choices: impl IntoIterator<Item = (u64, u64)>,
    ) -> DeviceNanos {
        let prompts: f64 =
            prompts.into_iter().map(|prompt| self.prompt_work_ns(prompt.into())).sum();
        let choices: f64 = choices
            .into_iter()
            .map(|(context, tokens)| self.generated_ns(context..context + tokens))
            .sum();
        DeviceNanos::from_f64_ceil(prompts + choices)
    }

    fn attention_ns(&self, work: AttentionWork) -> f64 {
        let AttentionWork { kv_bytes, flop } = work;
        self.parts.ns_per_kv_byte * kv_bytes + self.parts.ns_per_attention_flop * flop
    }
}

/// The predicted time of a step, updated as works are added and removed. A prediction takes
/// constant time for any number of works.
#[derive(Clone, Copy, Debug)]
pub struct StepCost<'a> {
    table: &'a CostTable,
    sequences: u64,
    tokens: u64,
    rows: u64,
    attention_ns: f64,
}

impl StepCost<'_> {
    /// Adds `work` to the step.
    pub fn add(&mut self, work: &SequenceWork) {
        self.sequences += 1;
        self.tokens += u64::from(work.new_tokens);
        self.rows += u64::from(work.logit_rows);
        self.attention_ns += self.attention(work);
    }

    /// Removes `work`, which must be in the step.
    pub fn remove(&mut self, work: &SequenceWork) {
        self.sequences -= 1;
        self.tokens -= u64::from(work.new_tokens);
        self.rows -= u64::from(work.logit_rows);
        // Rounding may leave a value slightly below zero.
        self.attention_ns = (self.attention_ns - self.attention(work)).max(0.0);
    }

    /// Returns the same value as [`CostTable::predict_step`] for the works in the step,
    /// except for the rounding of floating-point sums.
    pub fn predicted(&self) -> DeviceNanos {
        let CostTableParts { step_ns, linear, head, .. } = &self.table.parts;
        // An empty step does not run.
        if self.sequences == 0 {
            return DeviceNanos::ZERO;
        }
        // A step without new tokens still reads the weights.
        let linear = linear.at(1).max(linear.at(self.tokens));
        DeviceNanos::from_f64_ceil(step_ns + linear + head.at(self.rows) + self.attention_ns)
    }

    fn attention(&self, work: &SequenceWork) -> f64 {
        self.table.attention_ns(self.table.parts.shape.attention(work))
    }
}

impl TryFrom<CostTableParts> for CostTable {
    type Error = CostTableError;

    fn try_from(parts: CostTableParts) -> Result<Self, CostTableError> {
        for (name, curve) in [("linear", &parts.linear), ("head", &parts.head)] {
            if !curve.is_valid() {
                return Err(CostTableError::Curve(name));
            }
        }
        for (name, value) in [
            ("step_ns", parts.step_ns),
            ("ns_per_kv_byte", parts.ns_per_kv_byte),
            ("ns_per_attention_flop", parts.ns_per_attention_flop),
        ] {
            if !(0.0..=LONGEST_NS).contains(&value) {
                return Err(CostTableError::Coefficient(name));
            }
        }
        // Checked after the ranges, so that NaN never reaches these comparisons.
        for (name, empty) in [
            // A model without cost means that the table was never measured.
            ("linear", parts.linear.at(1) == 0.0),
            ("version", parts.version.is_empty()),
            ("reference_batch", parts.reference_batch == 0),
            ("reference_chunk", parts.reference_chunk == 0),
        ] {
            if empty {
                return Err(CostTableError::Empty(name));
            }
        }
        Ok(Self { parts })
    }
}

impl From<CostTable> for CostTableParts {
    fn from(table: CostTable) -> Self {
        table.parts
    }
}

/// Longest time of a step and largest coefficient: an hour, in ns. The bound keeps every
/// cost of a request that fits a context within the ledger's integers.
const LONGEST_NS: f64 = 3.6e12;

/// Returns `value / count`, or 0 if `count` is 0.
fn over(value: f64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { value / count as f64 }
}

/// Splits `total` in proportion to `weights`, exactly, in whole nanoseconds: largest
/// remainder, ties to the smaller id. A negative weight or NaN counts as 0. If no weight is
/// above 0, all are equal.
fn split(total: DeviceNanos, weights: &[f64], ids: &[SequenceId]) -> Vec<DeviceNanos> {
    let scaled = integer_weights(weights);
    // 2^40 times the number of sequences fits a u128.
    let sum: u128 = scaled.iter().map(|&weight| u128::from(weight)).sum();
    if sum == 0 {
        return Vec::new();
    }
    // A product of two 64-bit numbers needs 128 bits.
    let total_wide = u128::from(total.nanos());
    let mut shares: Vec<DeviceNanos> = Vec::with_capacity(scaled.len());
    let mut remainders: Vec<(u128, SequenceId, usize)> = Vec::with_capacity(scaled.len());
    for (index, &weight) in scaled.iter().enumerate() {
        let product = total_wide * u128::from(weight);
        shares.push(DeviceNanos((product / sum) as u64));
        remainders.push((product % sum, ids[index], index));
    }
    let given: DeviceNanos = shares.iter().copied().sum();
    let left = (total - given).nanos() as usize; // less than the number of shares
    // The id breaks ties, so the split does not depend on the order of the works.
    remainders.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    for &(_, _, index) in remainders.iter().take(left) {
        shares[index] += DeviceNanos(1);
    }
    shares
}

/// Converts weights to integers up to 2^40. The split is then exact and does not depend on
/// the order of floating-point sums.
fn integer_weights(weights: &[f64]) -> Vec<u64> {
    const SCALE: f64 = (1u64 << 40) as f64;
    // Relative to the largest weight, so that very small and very large tables lose no
    // precision.
    let largest = weights.iter().copied().filter(|w| !w.is_nan()).fold(0.0, f64::max);
    if largest <= 0.0 {
        return vec![1; weights.len()];
    }
    weights
        .iter()
        .map(|&weight| match weight {
            w if w.is_nan() || w <= 0.0 => 0,
            w if w.is_infinite() => SCALE as u64,
            // Finite weights beside an infinite one get the smallest positive weight.
            w if largest.is_infinite() => u64::from(w > 0.0),
            w => (w / largest * SCALE).round() as u64,
        })
        .collect()
}

#[cfg(test)]
mod tests;
