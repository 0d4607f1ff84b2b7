//! The work between the QKV projection and attention: norms of heads, rotary position
//! embedding, and the write of new keys and values to the cache.

use super::attention::KvFormat;
use super::vector::bf16_bits;
use super::{KvView, LANES, RowView};

/// The parameters that all tokens of one layer share within a step.
pub(crate) struct RotateJob<'a> {
    /// Rows of queries, keys and values. Queries are changed in place.
    pub(crate) qkv: RowView<f32>,
    /// Number of query heads.
    pub(crate) heads: usize,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Cosines, then sines, of each token's angles: `head_dim` numbers a token.
    pub(crate) angles: &'a [f32],
    /// Scales of the norms of query and key heads, if the model has them.
    pub(crate) norms: Option<HeadNorms<'a>>,
    /// The cache that keys and values are written to.
    pub(crate) kv: KvView,
}

/// Norms over each head of queries and keys.
#[derive(Clone, Copy)]
pub(crate) struct HeadNorms<'a> {
    /// Scale of the queries' elements.
    pub(crate) query: &'a [f32],
    /// Scale of the keys' elements.
    pub(crate) key: &'a [f32],
    /// Added to the mean of squares.
    pub(crate) epsilon: f32,
}

/// The location of a token's keys and values in the cache.
#[derive(Clone, Copy)]
pub(crate) struct KvSlot {
    /// Index of the block.
    pub(crate) block: u32,
    /// Index of the token in the block.
    pub(crate) slot: u32,
}

/// Rotates one token's queries and keys and writes its keys and values to the cache.
///
/// # Safety
/// `qkv` must have the row and its columns, the cache must have the slot, and no other
/// thread may touch either.
pub(crate) unsafe fn rotate(job: &RotateJob<'_>, token: usize, to: KvSlot) {
    let (width, kv_heads) = (job.head_dim, job.kv.heads);
    let columns = (job.heads + 2 * kv_heads) * width;
    assert!(columns <= job.qkv.pitch(), "queries, keys and values in a row");
    // SAFETY: the caller vouches for the row, and no other thread touches it.
    let row = unsafe { std::slice::from_raw_parts_mut(job.qkv.row(token), columns) };
    let (queries, rest) = row.split_at_mut(job.heads * width);
    let (keys, values) = rest.split_at_mut(kv_heads * width);
    let (cosines, sines) = job.angles[token * width..(token + 1) * width].split_at(width / 2);
    for query in queries.chunks_exact_mut(width) {
        if let Some(norms) = job.norms {
            normalise(query, norms.query, norms.epsilon);
        }
        turn(query, cosines, sines);
    }
    for key in keys.chunks_exact_mut(width) {
        if let Some(norms) = job.norms {
            normalise(key, norms.key, norms.epsilon);
        }
        turn(key, cosines, sines);
    }
    let heads = keys.chunks_exact(width).zip(values.chunks_exact(width));
    for (head, (key, value)) in heads.enumerate() {
        let panel = LANES * job.kv.head_columns;
        let place =
            PanelSlot { panel: (to.block as usize * kv_heads + head) * panel, slot: to.slot };
        // SAFETY: the caller vouches for the slot; the head is below the cache's number
        // of heads, and its columns are at least `width`.
        unsafe { store(&job.kv, place, key, value) };
    }
}

/// The location of one head's keys and values of a token.
#[derive(Clone, Copy)]
struct PanelSlot {
    /// First element of the head's panel in the cache.
    panel: usize,
    /// Index of the token in the block.
    slot: u32,
}

/// Writes one head's key and value to the cache.
///
/// # Safety
/// The cache must have the panel and the slot in it, and no other thread may touch them.
unsafe fn store(kv: &KvView, place: PanelSlot, key: &[f32], value: &[f32]) {
    let (panel, slot) = (place.panel, place.slot as usize);
    // SAFETY: a panel holds 16 slots of the head's columns, at least as many as the
    // head has elements, an even number.
    unsafe {
        match kv.format {
            KvFormat::F32 => {
                let keys = kv.keys.cast::<f32>().cast_mut().add(panel);
                for (column, key) in key.iter().enumerate() {
                    keys.add(column * LANES + slot).write(*key);
                }
                let values = kv.values.cast::<f32>().cast_mut();
                let values = values.add(panel + slot * kv.head_columns);
                values.copy_from_nonoverlapping(value.as_ptr(), value.len());
            }
            KvFormat::Bf16 => {
                let keys = kv.keys.cast::<u16>().cast_mut().add(panel).cast::<u32>();
                for (pair, key) in key.as_chunks::<2>().0.iter().enumerate() {
                    let bits = u32::from(bf16_bits(key[1])) << 16 | u32::from(bf16_bits(key[0]));
                    keys.add(pair * LANES + slot).write(bits);
                }
                let values = kv.values.cast::<u16>().cast_mut();
                let values = values.add(panel + slot * kv.head_columns);
                for (index, value) in value.iter().enumerate() {
                    values.add(index).write(bf16_bits(*value));
                }
            }
        }
    }
}

/// Rotates the pairs (i, i + half) of a head.
fn turn(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (low, high) = head.split_at_mut(cosines.len());
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

fn normalise(head: &mut [f32], weight: &[f32], epsilon: f32) {
    let squares: f32 = head.iter().map(|x| x * x).sum();
    let scale = 1.0 / (squares / head.len() as f32 + epsilon).sqrt();
    for (x, weight) in head.iter_mut().zip(weight) {
        *x *= scale * weight;
    }
}
