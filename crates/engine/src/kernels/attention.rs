//! Causal attention of a few tokens of one sequence over its paged keys and values, for
//! the query heads that share one KV head.
//!
//! A block's keys form a panel of sixteen rows, with tokens as rows and elements of the
//! head as columns, so scores are the same kind of product as in linear layers. A
//! block's values lie token by token. The softmax runs along the keys in spans and
//! keeps the largest score and the sum so far, as flash attention does, so memory does
//! not grow with the context.

use super::linear::{Bf16Panel, F32Panel, Panel, rows_at_once, tile};
use super::vector::Vector;
use super::{Activations, LANES, RowView};

/// The parameters that all attention of one layer shares within a step.
pub(crate) struct AttentionJob {
    /// Rotated queries. Head `h` of a token begins at column `h * head_dim`.
    pub(crate) queries: RowView<f32>,
    /// Output rows, with the same columns as the queries.
    pub(crate) output: Activations,
    /// The layer's keys and values.
    pub(crate) kv: KvView,
    /// Number of query heads that share a KV head.
    pub(crate) group: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Factor of the scores.
    pub(crate) scale: f32,
    /// Tokens that attention sees, including the last one; `None` for all.
    pub(crate) window: Option<usize>,
}

/// A view of the keys and values of one layer.
#[derive(Clone, Copy)]
pub(crate) struct KvView {
    /// Type of the elements.
    pub(crate) format: KvFormat,
    /// Keys of block 0, head 0.
    pub(crate) keys: *const u8,
    /// Values of block 0, head 0.
    pub(crate) values: *const u8,
    /// Number of KV heads.
    pub(crate) heads: usize,
    /// Elements of a head with its padding, a multiple of 32.
    pub(crate) head_columns: usize,
}

// SAFETY: a view is only a pointer; every access through it is unsafe and states its
// conditions.
unsafe impl Send for KvView {}
// SAFETY: the same reason holds for shared views.
unsafe impl Sync for KvView {}

/// The element type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvFormat {
    /// Four bytes an element.
    F32,
    /// Two bytes an element.
    Bf16,
}

/// Some tokens of one sequence, for one KV head.
pub(crate) struct AttentionTask<'a> {
    /// Row of the first token in queries and output.
    pub(crate) row: usize,
    /// Number of tokens in the task.
    pub(crate) tokens: usize,
    /// Position of the first token.
    pub(crate) position: usize,
    /// Index of the KV head.
    pub(crate) kv_head: usize,
    /// KV blocks of the sequence.
    pub(crate) blocks: &'a [u32],
}

/// The working memory of one thread. A row is a pair of token and head of the group.
pub(crate) struct AttentionScratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    /// The largest score so far and the sum of exponents of each row.
    softmax: Vec<(f32, f32)>,
}

impl AttentionScratch {
    /// Creates scratch for any task that [`tokens_of_task`] allows.
    pub(crate) fn new(group: usize, head_columns: usize) -> Self {
        let rows = tokens_of_task(group) * group;
        Self {
            queries: vec![0.0; rows * head_columns],
            scores: vec![0.0; rows * SPAN],
            sums: vec![0.0; rows * head_columns],
            softmax: vec![(0.0, 0.0); rows],
        }
    }
}

impl KvFormat {
    /// Returns the bytes of an element.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Returns the most tokens of a task.
pub(crate) fn tokens_of_task(group: usize) -> usize {
    (MOST_ROWS / group).max(1)
}

/// Computes attention and writes the task's rows of the output.
///
/// # Safety
/// Queries and output must have the rows. The blocks must be in the cache, cover the
/// tokens, and hold keys and values up to the last one. No other thread may touch these
/// outputs. The machine must have `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn attend<V: Vector>(
    job: &AttentionJob,
    task: &AttentionTask<'_>,
    scratch: &mut AttentionScratch,
) {
    assert!(task.tokens <= tokens_of_task(job.group), "a task fits its scratch");
    let end = task.position + task.tokens;
    assert!(end <= task.blocks.len() * LANES, "blocks cover the tokens");
    let first_seen = job.window.map_or(0, |window| (task.position + 1).saturating_sub(window));
    // SAFETY: the caller vouches for the conditions of each part.
    unsafe {
        gather(job, task, scratch);
        // Spans start at a block; keys before the window are masked in `soften`.
        let mut begin = first_seen / LANES * LANES;
        while begin < end {
            let keys = begin..end.min(begin + SPAN);
            match job.kv.format {
                KvFormat::F32 => span::<V, F32Kv>(job, task, keys, scratch),
                KvFormat::Bf16 => span::<V, Bf16Kv>(job, task, keys, scratch),
            }
            begin += SPAN;
        }
        scatter::<V>(job, task, scratch);
    }
}

/// Copies the queries, scaled and padded, and clears the sums.
///
/// # Safety
/// The conditions of [`attend`].
#[inline(always)]
unsafe fn gather(job: &AttentionJob, task: &AttentionTask<'_>, scratch: &mut AttentionScratch) {
    let (width, columns) = (job.head_dim, job.kv.head_columns);
    for token in 0..task.tokens {
        for head in 0..job.group {
            let row = token * job.group + head;
            let column = (task.kv_head * job.group + head) * width;
            // SAFETY: the caller vouches for the row of queries.
            let query = unsafe {
                let first = job.queries.row(task.row + token).add(column);
                std::slice::from_raw_parts(first.cast_const(), width)
            };
            let to = &mut scratch.queries[row * columns..(row + 1) * columns];
            for (to, from) in to.iter_mut().zip(query) {
                *to = *from * job.scale;
            }
            to[width..].fill(0.0);
        }
    }
    let rows = task.tokens * job.group;
    scratch.sums[..rows * columns].fill(0.0);
    scratch.softmax[..rows].fill((f32::NEG_INFINITY, 0.0));
}

/// Processes one span of keys: scores, running softmax, weighted values.
///
/// # Safety
/// The conditions of [`attend`]; `keys` must start at a block.
#[inline(always)]
unsafe fn span<V: Vector, E: KvElement>(
    job: &AttentionJob,
    task: &AttentionTask<'_>,
    keys: std::ops::Range<usize>,
    scratch: &mut AttentionScratch,
) {
    let rows = task.tokens * job.group;
    let columns = job.kv.head_columns;
    let blocks = &task.blocks[keys.start / LANES..keys.end.div_ceil(LANES)];
    let place = |block: u32| (block as usize * job.kv.heads + task.kv_head) * LANES * columns;
    // SAFETY: the offsets are those of blocks of the cache, scratch has the rows, and
    // at most `ROWS` rows are taken at once.
    unsafe {
        for (index, two) in blocks.chunks(2).enumerate() {
            let first = E::keys(job.kv.keys, place(two[0]));
            // The last block may have no partner. Scoring it twice is harmless: the
            // second half is masked.
            let second = two.get(1).map_or(first, |&block| E::keys(job.kv.keys, place(block)));
            score::<V, E>([first, second], index * 2 * LANES, rows, columns, scratch);
        }
        for row in 0..rows {
            let position = task.position + row / job.group;
            let from = job.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let seen = from.clamp(keys.start, keys.end)..(position + 1).clamp(keys.start, keys.end);
            soften::<V>(row, seen.start - keys.start..seen.end - keys.start, columns, scratch);
        }
        let values = ValueSpan { blocks, keys: keys.len(), kv_head: task.kv_head };
        // One chunk of the head at a time, so that the sums stay in registers.
        let mut row = 0;
        while row < rows {
            let some = rows_at_once(V::ROWS, rows - row);
            macro_rules! block {
                ($rows:literal) => {
                    blend::<V, E, $rows>(job, values, row, scratch)
                };
            }
            match some {
                1 => block!(1),
                2 => block!(2),
                _ if V::ROWS <= 2 => unreachable!("no more rows than ROWS"),
                4 => block!(4),
                _ => block!(8),
            }
            row += some;
        }
    }
}

/// Computes the scores of all rows against two blocks, into columns `to..to + 32`.
///
/// # Safety
/// Both panels must have `columns` columns, and scratch must have the rows. The machine
/// must have `V`'s instructions.
#[inline(always)]
unsafe fn score<V: Vector, E: KvElement>(
    panels: [*const <E::Keys as Panel>::Element; 2],
    to: usize,
    rows: usize,
    columns: usize,
    scratch: &mut AttentionScratch,
) {
    let mut row = 0;
    while row < rows {
        let some = rows_at_once(V::ROWS, rows - row);
        let queries = &scratch.queries[row * columns..(row + some) * columns];
        let scores = &mut scratch.scores[row * SPAN..(row + some) * SPAN];
        macro_rules! block {
            ($rows:literal) => {{
                // SAFETY: the slices above have this many rows, and 32 columns from
                // `to` on are within a span.
                unsafe {
                    let sums =
                        tile::<V, E::Keys, $rows>(queries.as_ptr(), columns, panels, columns / 2);
                    for (row, sums) in sums.into_iter().enumerate() {
                        let place = scores.as_mut_ptr().add(row * SPAN + to);
                        sums[0].store(place);
                        sums[1].store(place.add(LANES));
                    }
                }
            }};
        }
        match some {
            1 => block!(1),
            2 => block!(2),
            _ if V::ROWS <= 2 => unreachable!("no more rows than ROWS"),
            4 => block!(4),
            _ => block!(8),
        }
        row += some;
    }
}

/// Turns a row's scores into exponents relative to the largest score so far, and
/// rescales the earlier sums to it. Keys outside `seen` get weight 0.
///
/// # Safety
/// Scratch must have the row. The machine must have `V`'s instructions.
#[inline(always)]
unsafe fn soften<V: Vector>(
    row: usize,
    seen: std::ops::Range<usize>,
    columns: usize,
    scratch: &mut AttentionScratch,
) {
    let scores = &mut scratch.scores[row * SPAN..(row + 1) * SPAN];
    if seen.is_empty() {
        // Zeros, because the values of this span are added for all rows of the task.
        scores.fill(0.0);
        return;
    }
    let whole = seen.end.next_multiple_of(LANES);
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..whole].fill(f32::NEG_INFINITY);
    let (largest_before, sum_before) = scratch.softmax[row];
    // SAFETY: `whole` is at most a span, a multiple of the lanes; the sums are
    // `columns` long, another multiple.
    unsafe {
        let mut largest = V::splat(largest_before);
        for key in (0..whole).step_by(LANES) {
            largest = largest.max(V::load(scores.as_ptr().add(key)));
        }
        let largest = largest.largest();
        let minus = V::splat(-largest);
        for key in (0..whole).step_by(LANES) {
            let place = scores.as_mut_ptr().add(key);
            V::load(place).add(minus).exp().store(place);
        }
        // `exp` turns minus infinity into a tiny number and not into 0.
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let mut sum = V::splat(0.0);
        for key in (0..whole).step_by(LANES) {
            sum = sum.add(V::load(scores.as_ptr().add(key)));
        }
        // 0 for the first span, whose earlier maximum is minus infinity.
        let correction = (largest_before - largest).exp();
        // If the largest score has not grown, the earlier sums stay as they are.
        if correction < 1.0 && sum_before > 0.0 {
            let factor = V::splat(correction);
            let sums = &mut scratch.sums[row * columns..(row + 1) * columns];
            for column in (0..columns).step_by(LANES) {
                let place = sums.as_mut_ptr().add(column);
                V::load(place).mul(factor).store(place);
            }
        }
        scratch.softmax[row] = (largest, sum_before * correction + sum.sum());
    }
}

/// The values of a span of keys, for one KV head.
#[derive(Clone, Copy)]
struct ValueSpan<'a> {
    /// Blocks of the span.
    blocks: &'a [u32],
    /// Number of keys in the blocks.
    keys: usize,
    kv_head: usize,
}

/// Adds the values of a span of keys, weighted by the exponents of `M` rows.
///
/// # Safety
/// The conditions of [`attend`]; scratch must have rows `row..row + M`.
#[inline(always)]
unsafe fn blend<V: Vector, E: KvElement, const M: usize>(
    job: &AttentionJob,
    values: ValueSpan<'_>,
    row: usize,
    scratch: &mut AttentionScratch,
) {
    let ValueSpan { blocks, keys, kv_head } = values;
    let columns = job.kv.head_columns;
    let weights = &scratch.scores[row * SPAN..(row + M) * SPAN];
    let sums = &mut scratch.sums[row * columns..(row + M) * columns];
    for column in (0..columns).step_by(2 * LANES) {
        // SAFETY: the head's columns are a multiple of 32, the blocks hold `keys` keys,
        // and the slices above have `M` rows.
        unsafe {
            let mut totals = [[V::splat(0.0); 2]; M];
            let mut m = 0;
            while m < M {
                let place = sums.as_ptr().add(m * columns + column);
                totals[m] = [V::load(place), V::load(place.add(LANES))];
                m += 1;
            }
            for (index, &block) in blocks.iter().enumerate() {
                let place = (block as usize * job.kv.heads + kv_head) * LANES * columns + column;
                for key in 0..LANES.min(keys - index * LANES) {
                    let values = E::values(job.kv.values, place + key * columns);
                    let low = E::load_values::<V>(values, 0);
                    let high = E::load_values::<V>(values, LANES);
                    let mut m = 0;
                    while m < M {
                        let weight =
                            V::splat(*weights.as_ptr().add(m * SPAN + index * LANES + key));
                        let [a, b] = totals[m];
                        totals[m] = [low.mul_add(weight, a), high.mul_add(weight, b)];
                        m += 1;
                    }
                }
            }
            let mut m = 0;
            while m < M {
                let place = sums.as_mut_ptr().add(m * columns + column);
                totals[m][0].store(place);
                totals[m][1].store(place.add(LANES));
                m += 1;
            }
        }
    }
}

/// Divides the sums by the softmax's denominators and writes them as activations.
///
/// # Safety
/// The conditions of [`attend`].
#[inline(always)]
unsafe fn scatter<V: Vector>(
    job: &AttentionJob,
    task: &AttentionTask<'_>,
    scratch: &mut AttentionScratch,
) {
    let (width, columns) = (job.head_dim, job.kv.head_columns);
    for row in 0..task.tokens * job.group {
        let (token, head) = (task.row + row / job.group, row % job.group);
        let column = (task.kv_head * job.group + head) * width;
        let factor = 1.0 / scratch.softmax[row].1;
        let sums = &mut scratch.sums[row * columns..row * columns + width];
        for sum in sums.iter_mut() {
            *sum *= factor;
        }
        // SAFETY: the caller vouches for the row of the output, which is as wide as all
        // heads.
        unsafe {
            match job.output {
                Activations::F32(rows) => {
                    let to = rows.row(token).add(column);
                    to.copy_from_nonoverlapping(sums.as_ptr(), width);
                }
                Activations::Bf16(rows) => {
                    let to = rows.row(token).add(column);
                    let whole = width / LANES * LANES;
                    for index in (0..whole).step_by(LANES) {
                        V::load(sums.as_ptr().add(index)).store_bf16(to.add(index));
                    }
                    for (index, sum) in sums.iter().enumerate().skip(whole) {
                        to.add(index).write(super::vector::bf16_bits(*sum));
                    }
                }
            }
        }
    }
}

/// The representation of cached elements.
trait KvElement {
    type Keys: Panel;
    type Value: Copy;
    /// Returns the address of the key element `place`.
    ///
    /// # Safety
    /// The element must be in the cache.
    unsafe fn keys(base: *const u8, place: usize) -> *const <Self::Keys as Panel>::Element;
    /// Returns the address of the value element `place`.
    ///
    /// # Safety
    /// The element must be in the cache.
    unsafe fn values(base: *const u8, place: usize) -> *const Self::Value;
    /// Loads sixteen values, starting at `offset`.
    ///
    /// # Safety
    /// The values must be in the cache. The machine must have `V`'s instructions.
    unsafe fn load_values<V: Vector>(values: *const Self::Value, offset: usize) -> V;
}

struct F32Kv;
struct Bf16Kv;

impl KvElement for F32Kv {
    type Keys = F32Panel;
    type Value = f32;

    #[inline(always)]
    unsafe fn keys(base: *const u8, place: usize) -> *const f32 {
        // SAFETY: the caller vouches for the element.
        unsafe { base.cast::<f32>().add(place) }
    }

    #[inline(always)]
    unsafe fn values(base: *const u8, place: usize) -> *const f32 {
        // SAFETY: the caller vouches for the element.
        unsafe { base.cast::<f32>().add(place) }
    }

    #[inline(always)]
    unsafe fn load_values<V: Vector>(values: *const f32, offset: usize) -> V {
        // SAFETY: the caller vouches for the values.
        unsafe { V::load(values.add(offset)) }
    }
}

impl KvElement for Bf16Kv {
    type Keys = Bf16Panel;
    type Value = u16;

    #[inline(always)]
    unsafe fn keys(base: *const u8, place: usize) -> *const u32 {
        // SAFETY: the caller vouches for the element, which is the first of a pair.
        unsafe { base.cast::<u16>().add(place).cast() }
    }

    #[inline(always)]
    unsafe fn values(base: *const u8, place: usize) -> *const u16 {
        // SAFETY: the caller vouches for the element.
        unsafe { base.cast::<u16>().add(place) }
    }

    #[inline(always)]
    unsafe fn load_values<V: Vector>(values: *const u16, offset: usize) -> V {
        // SAFETY: the caller vouches for the values.
        unsafe { V::load_bf16(values.add(offset)) }
    }
}

/// Keys that are scored before their values are summed: a multiple of 32.
const SPAN: usize = 128;
/// Rows of a task, unless the heads of one token alone are more.
const MOST_ROWS: usize = 32;
