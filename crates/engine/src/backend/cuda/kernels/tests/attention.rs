//! Tests of attention over paged keys and values, at awkward positions of a context.

use super::*;
use crate::backend::cuda::kernels::*;
use crate::kernels::{
    Activations, AttentionJob, AttentionScratch, AttentionTask, Buffer, Instructions, Kernels,
    KvFormat, KvSlot, KvView, LANES, RotateJob, RowView, rotate, tokens_of_task,
};

/// The arrangement of heads, and the window of attention.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: HeadDim,
    window: usize,
}

/// Sequences with their keys and values, queries of new tokens, and the CPU backend's
/// results.
struct Case {
    shape: Shape,
    /// Keys in the device's layout, with poison in every slot that holds no token.
    keys: Vec<u16>,
    values: Vec<u16>,
    queries: Vec<u16>,
    spans: Vec<KernelSpan>,
    blocks: Vec<u32>,
    expected: Vec<f32>,
}

impl Case {
    /// Creates sequences from pairs `(position, tokens)`: the number of cached tokens
    /// and of new ones.
    fn new(shape: Shape, sequences: &[(usize, usize)]) -> Self {
        let d = shape.head_dim.elements() as usize;
        let rows = sequences.iter().map(|(_, tokens)| tokens).sum::<usize>();
        let ends = sequences.iter().map(|(position, tokens)| (position + tokens).div_ceil(LANES));
        let pool = ends.sum::<usize>() + 1;
        let elements = pool * shape.kv_heads * LANES * d;
        let mut case = Self {
            shape,
            keys: vec![u16::MAX; elements],
            values: vec![u16::MAX; elements],
            queries: bf16_noise(1, rows * shape.heads * d),
            spans: Vec::new(),
            blocks: Vec::new(),
            expected: vec![0.0; rows * shape.heads * d],
        };
        let mut free: Vec<u32> = (0..pool as u32).map(|block| block * 7 % pool as u32).collect();
        free.sort_unstable_by_key(|block| (block * 5 + 3) % 7);
        let mut row = 0;
        for &(position, tokens) in sequences {
            let needed = (position + tokens).div_ceil(LANES);
            let blocks: Vec<u32> = free.drain(..needed).collect();
            case.spans.push(KernelSpan {
                row: row as u32,
                tokens: tokens as u32,
                position: position as u32,
                blocks: case.blocks.len() as u32,
            });
            case.sequence(row, position, tokens, &blocks);
            case.blocks.extend(blocks);
            row += tokens;
        }
        case
    }

    /// Fills one sequence's keys and values and computes its attention on the CPU.
    fn sequence(&mut self, row: usize, position: usize, tokens: usize, blocks: &[u32]) {
        let Shape { heads, kv_heads, head_dim, window } = self.shape;
        let d = head_dim.elements() as usize;
        let (end, width) = (position + tokens, (heads + 2 * kv_heads) * d);
        let mut qkv = Buffer::<f32>::zeroed(end * width).expect("a little memory");
        let kv_noise = widened(&bf16_noise(position + 17, end * 2 * kv_heads * d));
        for token in 0..end {
            let to = &mut qkv.as_mut_slice()[token * width..(token + 1) * width];
            to[heads * d..]
                .copy_from_slice(&kv_noise[token * 2 * kv_heads * d..][..2 * kv_heads * d]);
            for (index, value) in to[heads * d..].iter().enumerate() {
                let (head, column) = (index / d % kv_heads, index % d);
                let block = blocks[token / LANES] as usize;
                let place = ((block * kv_heads + head) * LANES + token % LANES) * d + column;
                let cache = if index < kv_heads * d { &mut self.keys } else { &mut self.values };
                cache[place] = half::bf16::from_f32(*value).to_bits();
            }
        }
        let elements = (*blocks.iter().max().expect("a block") as usize + 1) * kv_heads * LANES * d;
        let mut keys = Buffer::<u16>::zeroed(elements).expect("a little memory");
        let mut values = Buffer::<u16>::zeroed(elements).expect("a little memory");
        let kv = KvView {
            format: KvFormat::Bf16,
            keys: keys.as_mut_ptr().cast(),
            values: values.as_mut_ptr().cast(),
            heads: kv_heads,
            head_columns: d,
        };
        let still: Vec<f32> = (0..end * d).map(|i| if i % d < d / 2 { 1.0 } else { 0.0 }).collect();
        let qkv_rows = RowView::of(&mut qkv, width);
        let job = RotateJob { qkv: qkv_rows, heads, head_dim: d, angles: &still, norms: None, kv };
        for token in 0..end {
            let slot = KvSlot { block: blocks[token / LANES], slot: (token % LANES) as u32 };
            // SAFETY: the rows and the caches above have the token.
            unsafe { rotate(&job, token, slot) };
        }
        let mut queries = widened(&self.queries);
        let group = heads / kv_heads;
        let job = AttentionJob {
            queries: RowView::of_slice(&mut queries, heads * d),
            output: Activations::F32(RowView::of_slice(&mut self.expected, heads * d)),
            kv,
            group,
            head_dim: d,
            scale: 1.0 / (d as f32).sqrt(),
            window: (window > 0).then_some(window),
        };
        let kernels = Kernels::new(Instructions::Portable).expect("every machine has it");
        let mut scratch = AttentionScratch::new(group, d);
        for offset in (0..tokens).step_by(tokens_of_task(group)) {
            for kv_head in 0..kv_heads {
                let task = AttentionTask {
                    row: row + offset,
                    tokens: tokens_of_task(group).min(tokens - offset),
                    position: position + offset,
                    kv_head,
                    blocks,
                };
                // SAFETY: everything above has the task's tokens.
                unsafe { kernels.attend(&job, &task, &mut scratch) };
            }
        }
    }

    fn check_decode(&self, emulator: &Emulator, order: u32, splits: u32) -> Result<(), String> {
        let Shape { heads, kv_heads, head_dim, window } = self.shape;
        let d = head_dim.elements() as usize;
        // An unused entry must do no harm.
        let mut spans = self.spans.clone();
        spans.insert(1, KernelSpan { row: 99, tokens: 0, position: 99, blocks: 99 });
        let output = emulator.memory::<u16>(self.queries.len());
        let parts = spans.len() * heads * splits as usize;
        let partial = emulator.memory::<f32>(parts * d);
        let softmax = emulator.memory::<f32>(parts * 2);
        let [queries, keys, values] =
            [&self.queries, &self.keys, &self.values].map(|from| emulator.copy(from));
        let blocks = emulator.copy(&self.blocks);
        let device_spans = emulator.copy(&spans);
        let args = DecodeArgs {
            output: output.at(),
            partial: partial.at(),
            softmax: softmax.at(),
            queries: queries.at(),
            keys: keys.at(),
            values: values.at(),
            spans: device_spans.at(),
            blocks: blocks.at(),
            scale: 1.0 / (d as f32).sqrt(),
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            splits,
            window: window as u32,
        };
        emulator.launch(&decode(args, spans.len() as u32, head_dim), order)?;
        if splits > 1 {
            let args = CombineArgs {
                output: output.at(),
                partial: partial.at(),
                softmax: softmax.at(),
                spans: device_spans.at(),
                heads: heads as u32,
                splits,
            };
            emulator.launch(&combine(args, spans.len() as u32, head_dim), order)?;
            if !partial.is_whole() || !softmax.is_whole() {
                return Err("something was written behind the parts".to_owned());
            }
        }
        compare(&widened(&filled(&output)?), &self.expected, ATTENDED)
            .map_err(|error| format!("{:?}, {splits} splits: {error}", self.shape))
    }

    fn check_prefill(&self, emulator: &Emulator, order: u32) -> Result<(), String> {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        let most = tile_tokens((heads / kv_heads) as u32);
        let scale = 1.0 / (head_dim.elements() as f32).sqrt();
        let output = self.prefill(emulator, order, most, scale)?;
        compare(&widened(&output), &self.expected, ATTENDED)
            .map_err(|error| format!("{:?}: {error}", self.shape))
    }

    /// Runs prefill over all rows, in tiles of at most `most` tokens.
    fn prefill(
        &self,
        emulator: &Emulator,
        order: u32,
        most: u32,
        scale: f32,
    ) -> Result<Vec<u16>, String> {
        let Shape { heads, kv_heads, head_dim, window } = self.shape;
        let mut tiles = vec![KernelSpan { row: 99, tokens: 0, position: 99, blocks: 99 }];
        for span in &self.spans {
            tiles.extend((0..span.tokens).step_by(most as usize).map(|offset| KernelSpan {
                row: span.row + offset,
                tokens: most.min(span.tokens - offset),
                position: span.position + offset,
                blocks: span.blocks,
            }));
        }
        let output = emulator.memory::<u16>(self.queries.len());
        let [queries, keys, values] =
            [&self.queries, &self.keys, &self.values].map(|from| emulator.copy(from));
        let blocks = emulator.copy(&self.blocks);
        let spans = emulator.copy(&tiles);
        let args = PrefillArgs {
            output: output.at(),
            queries: queries.at(),
            keys: keys.at(),
            values: values.at(),
            spans: spans.at(),
            blocks: blocks.at(),
            scale,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            window: window as u32,
        };
        emulator.launch(&prefill(args, tiles.len() as u32, head_dim), order)?;
        filled(&output)
    }
}

/// Single tokens at the edges of blocks and far behind them.
const SINGLE: [(usize, usize); 7] = [(0, 1), (15, 1), (16, 1), (17, 1), (37, 1), (130, 1), (63, 1)];

#[test]
fn decode_attention_agrees_with_the_cpu() {
    for head_dim in HeadDim::ALL {
        for (heads, kv_heads, window) in [(1, 1, 0), (4, 2, 0), (14, 2, 0), (16, 1, 20), (9, 1, 5)]
        {
            let case = Case::new(Shape { heads, kv_heads, head_dim, window }, &SINGLE);
            for splits in [1, 3, 16] {
                sound(|emulator, order| case.check_decode(emulator, order, splits));
            }
        }
    }
}

/// Groups and heads of models with 7 to 8 billion parameters, far into a context:
/// single tokens in as many parts as an otherwise idle device makes, the last of which
/// may be empty; and a chunk.
#[test]
fn attention_over_long_contexts_agrees_with_the_cpu() {
    for (heads, window) in [(4, 0), (7, 0), (7, 1_100)] {
        let shape = Shape { heads, kv_heads: 1, head_dim: HeadDim::D128, window };
        let singles = Case::new(shape, &[(2_100, 1), (2_303, 1)]);
        sound(|emulator, order| singles.check_decode(emulator, order, 16));
        let chunk = Case::new(shape, &[(2_075, 21)]);
        sound(|emulator, order| chunk.check_prefill(emulator, order));
    }
}

#[test]
fn planted_decode_bugs_are_found() {
    let shape = Shape { heads: 4, kv_heads: 2, head_dim: HeadDim::D64, window: 0 };
    let case = Case::new(shape, &SINGLE);
    for bug in [Bug::DecodeWrongHead, Bug::DecodeMask, Bug::DecodeWithoutBarrier] {
        finds(bug, |emulator, order| case.check_decode(emulator, order, 2));
    }
}

/// Whole prompts, chunks that follow cached tokens, and single tokens.
const CHUNKS: [(usize, usize); 6] = [(0, 1), (0, 17), (16, 70), (37, 3), (129, 5), (0, 64)];

#[test]
fn prefill_attention_agrees_with_the_cpu() {
    for head_dim in HeadDim::ALL {
        for (heads, kv_heads, window) in [(1, 1, 0), (4, 2, 0), (14, 2, 0), (16, 1, 20), (9, 1, 5)]
        {
            let case = Case::new(Shape { heads, kv_heads, head_dim, window }, &CHUNKS);
            sound(|emulator, order| case.check_prefill(emulator, order));
        }
    }
}

/// A row has the same bits in a tile that reaches far behind it. All keys are equal and
/// scores are high. Half of the values are 1 and half are the next number, so a mean is
/// midway between both and shows its last bit.
#[test]
fn attention_does_not_depend_on_the_tile() {
    const HIGH: f32 = 4.0;
    let [one, next] = [0x3f80, 0x3f81];
    for (heads, head_dim) in [(2, HeadDim::D32), (7, HeadDim::D64), (4, HeadDim::D128)] {
        let shape = Shape { heads, kv_heads: 1, head_dim, window: 0 };
        let mut case = Case::new(shape, &[(40, 90)]);
        let d = head_dim.elements() as usize;
        let key = bf16_noise(3, d);
        let is_token = |bits: &u16| *bits != u16::MAX;
        for (index, bits) in case.keys.iter_mut().enumerate().filter(|(_, bits)| is_token(bits)) {
            *bits = key[index % d];
        }
        for (index, bits) in case.values.iter_mut().enumerate().filter(|(_, bits)| is_token(bits)) {
            *bits = if (index / d).is_multiple_of(2) { one } else { next };
        }
        sound(|emulator, order| {
            let alone = case.prefill(emulator, order, 1, HIGH)?;
            for most in [2, 5, tile_tokens(heads as u32)] {
                let tiled = case.prefill(emulator, order, most, HIGH)?;
                let differ = alone.iter().zip(&tiled).filter(|(a, b)| a != b).count();
                (differ == 0)
                    .then_some(())
                    .ok_or_else(|| format!("{shape:?}: {differ} differ in tiles of {most}"))?;
            }
            Ok(())
        });
    }
}

#[test]
fn planted_prefill_bugs_are_found() {
    let shape = Shape { heads: 4, kv_heads: 2, head_dim: HeadDim::D64, window: 0 };
    let case = Case::new(shape, &CHUNKS);
    for bug in [
        Bug::PrefillWrongHead,
        Bug::PrefillMask,
        Bug::PrefillWithoutWait,
        Bug::PrefillWithoutBarrier,
    ] {
        finds(bug, |emulator, order| case.check_prefill(emulator, order));
    }
}
