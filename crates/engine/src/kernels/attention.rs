//! Causal attention of a few tokens of one sequence over its paged keys and
//! values, for the query heads that share one KV head.
//!
//! A block's keys lie as a panel of sixteen (tokens are its rows, elements of
//! the head its columns), so that scores are products of the same kind as in
//! linear layers; its values lie token by token. Softmax runs along the keys
//! in spans, keeping the largest score and the sum so far (as in flash
//! attention), so that memory does not grow with the context.

use super::linear::{Bf16Panel, F32Panel, Panel, rows_at_once, tile};
use super::vector::Vector;
use super::{Activations, LANES, RowView};

/// What is the same for all attention of one layer in one step.
pub(crate) struct AttentionJob {
    /// Rotated queries: head `h` of a token begins at column `h * head_dim`.
    pub(crate) queries: RowView<f32>,
    /// Where results go, in the same columns.
    pub(crate) output: Activations,
    /// The layer's keys and values.
    pub(crate) kv: KvView,
    /// Query heads that share a KV head.
    pub(crate) group: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// Tokens that are seen, the last one included.
    pub(crate) window: Option<usize>,
}

/// Keys and values of one layer.
#[derive(Clone, Copy)]
pub(crate) struct KvView {
    /// The type of their elements.
    pub(crate) format: KvFormat,
    /// Keys of block 0, head 0.
    pub(crate) keys: *const u8,
    /// Values of block 0, head 0.
    pub(crate) values: *const u8,
    /// KV heads.
    pub(crate) heads: usize,
    /// Elements of a head with their padding, a multiple of 32.
    pub(crate) head_columns: usize,
}

// SAFETY: a view is only a place; going there is unsafe and says so.
unsafe impl Send for KvView {}
// SAFETY: likewise.
unsafe impl Sync for KvView {}

/// The type of cached keys' and values' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvFormat {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
}

/// Some tokens of one sequence and one KV head.
pub(crate) struct AttentionTask<'a> {
    /// The first token's row in queries and output.
    pub(crate) row: usize,
    /// How many tokens.
    pub(crate) tokens: usize,
    /// The first token's position.
    pub(crate) position: usize,
    /// The KV head.
    pub(crate) kv_head: usize,
    /// The sequence's blocks.
    pub(crate) blocks: &'a [u32],
}

/// What one thread computes in. RowView are (token, head of the group).
pub(crate) struct AttentionScratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    /// For each row: the largest score, and the sum of exponents below it.
    softmax: Vec<(f32, f32)>,
}

impl AttentionScratch {
    /// Room for the rows of any task that [`tokens_of_task`] allows.
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
    /// Bytes of an element.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// How many tokens a task may have.
pub(crate) fn tokens_of_task(group: usize) -> usize {
    (MOST_ROWS / group).max(1)
}

/// Attends, and writes the task's rows of the output.
///
/// # Safety
/// Queries and output have the rows; the blocks are in the cache, cover the
/// tokens, and hold keys and values up to the last one; no other thread
/// touches these outputs; `V`'s instructions are there.
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
    // SAFETY: the caller vouches for what each part asks.
    unsafe {
        gather(job, task, scratch);
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

/// Copies the queries, scaled and padded, and clears what is summed.
///
/// # Safety
/// As [`attend`].
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

/// One span of keys: scores, softmax so far, values.
///
/// # Safety
/// As [`attend`], and `keys` begins a block.
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
    // SAFETY: places are those of blocks of the cache, scratch has the rows,
    // and `ROWS` rows at most are taken at once.
    unsafe {
        for (index, two) in blocks.chunks(2).enumerate() {
            let first = E::keys(job.kv.keys, place(two[0]));
            let second = two.get(1).map_or(first, |&block| E::keys(job.kv.keys, place(block)));
            score::<V, E>([first, second], index * 2 * LANES, rows, columns, scratch);
        }
        for row in 0..rows {
            let position = task.position + row / job.group;
            let from = job.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let seen = from.clamp(keys.start, keys.end)..(position + 1).clamp(keys.start, keys.end);
            soften::<V>(row, seen.start - keys.start..seen.end - keys.start, columns, scratch);
        }
        // A chunk of the head at a time, so that sums stay in registers.
        let mut row = 0;
        while row < rows {
            let some = rows_at_once(V::ROWS, rows - row);
            macro_rules! block {
                ($rows:literal) => {
                    blend::<V, E, $rows>(job, blocks, keys.len(), row, task.kv_head, scratch)
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

/// Scores of all rows against two blocks, into columns `to..to + 32`.
///
/// # Safety
/// Both panels have `columns` columns, scratch has the rows; `V`'s
/// instructions are there.
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
                // SAFETY: slices above have this many rows, and 32 columns
                // from `to` on are within a span.
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

/// Turns a row's scores into exponents against the largest score so far, and
/// brings what was summed before to the same measure. Keys outside `seen`
/// count nothing.
///
/// # Safety
/// Scratch has the row; `V`'s instructions are there.
#[inline(always)]
unsafe fn soften<V: Vector>(
    row: usize,
    seen: std::ops::Range<usize>,
    columns: usize,
    scratch: &mut AttentionScratch,
) {
    let scores = &mut scratch.scores[row * SPAN..(row + 1) * SPAN];
    if seen.is_empty() {
        scores.fill(0.0);
        return;
    }
    let whole = seen.end.next_multiple_of(LANES);
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..whole].fill(f32::NEG_INFINITY);
    let (largest_before, sum_before) = scratch.softmax[row];
    // SAFETY: `whole` is at most a span, a multiple of the lanes; sums are
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
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let mut sum = V::splat(0.0);
        for key in (0..whole).step_by(LANES) {
            sum = sum.add(V::load(scores.as_ptr().add(key)));
        }
        let correction = (largest_before - largest).exp();
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

/// Adds the values of `keys` keys, weighted by the exponents of `M` rows.
///
/// # Safety
/// As [`attend`]; scratch has rows `row..row + M`.
#[inline(always)]
unsafe fn blend<V: Vector, E: KvElement, const M: usize>(
    job: &AttentionJob,
    blocks: &[u32],
    keys: usize,
    row: usize,
    kv_head: usize,
    scratch: &mut AttentionScratch,
) {
    let columns = job.kv.head_columns;
    let weights = &scratch.scores[row * SPAN..(row + M) * SPAN];
    let sums = &mut scratch.sums[row * columns..(row + M) * columns];
    for column in (0..columns).step_by(2 * LANES) {
        // SAFETY: the head's columns are a multiple of 32, the blocks hold
        // `keys` keys, and the slices above have `M` rows.
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

/// Divides the sums and writes them as activations.
///
/// # Safety
/// As [`attend`].
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
        // SAFETY: the caller vouches for the row of the output, which is as
        // wide as all heads.
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

/// How the cache holds an element.
trait KvElement {
    type Keys: Panel;
    type Value: Copy;
    /// # Safety
    /// Element `place` is in the cache.
    unsafe fn keys(base: *const u8, place: usize) -> *const <Self::Keys as Panel>::Element;
    /// # Safety
    /// Element `place` is in the cache.
    unsafe fn values(base: *const u8, place: usize) -> *const Self::Value;
    /// # Safety
    /// Sixteen values from `offset` on are in the cache; `V`'s instructions
    /// are there.
    unsafe fn load_values<V: Vector>(values: *const Self::Value, offset: usize) -> V;
}

struct F32Kv;
struct Bf16Kv;

impl KvElement for F32Kv {
    type Keys = F32Panel;
    type Value = f32;

    #[inline(always)]
    unsafe fn keys(base: *const u8, place: usize) -> *const f32 {
        // SAFETY: the caller vouches for the place.
        unsafe { base.cast::<f32>().add(place) }
    }

    #[inline(always)]
    unsafe fn values(base: *const u8, place: usize) -> *const f32 {
        // SAFETY: the caller vouches for the place.
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
        // SAFETY: the caller vouches for the place, which begins a pair.
        unsafe { base.cast::<u16>().add(place).cast() }
    }

    #[inline(always)]
    unsafe fn values(base: *const u8, place: usize) -> *const u16 {
        // SAFETY: the caller vouches for the place.
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
/// RowView of a task, unless one token alone has more heads.
const MOST_ROWS: usize = 32;
