//! Tests of every kernel of every instruction set that this machine has. The kernels
//! are compared with plain f64 arithmetic at awkward shapes.

use super::*;
use crate::weights::{Element, Tensor};

/// Returns a fixed sequence of numbers, evenly spread over -1..1.
fn noise(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u64 * 2 + 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn bytes_of(element: Element, values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| match element {
            Element::F32 => value.to_le_bytes().to_vec(),
            Element::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
            Element::Bf16 => half::bf16::from_f32(*value).to_le_bytes().to_vec(),
        })
        .collect()
}

fn pack(tensor: Tensor<'_>, rows: usize, columns: usize) -> Packed {
    let format = PackedFormat::holding([tensor.element]);
    let mut packed = Packed::zeroed(format, [rows, columns]).unwrap();
    let mut scratch = vec![0.0; columns];
    for (panel, fill) in packed.panels_mut().iter_mut().enumerate() {
        for row in panel * LANES..rows.min((panel + 1) * LANES) {
            fill.fill(row % LANES, RowSource { tensor, row }, &mut scratch);
        }
    }
    packed
}

fn over_kernels(check: impl Fn(Kernels)) {
    for instructions in Instructions::ALL {
        if let Some(kernels) = Kernels::new(instructions) {
            println!("{instructions}");
            check(kernels);
        }
    }
}

/// Activations, rounded to bf16 if the kernels read bf16, and the values after
/// rounding.
struct Input {
    f32: Buffer<f32>,
    bf16: Buffer<u16>,
    exact: Vec<Vec<f64>>,
    is_bf16: bool,
    pitch: usize,
}

impl Input {
    fn new(tokens: usize, columns: usize, is_bf16: bool) -> Self {
        let pitch = padded_columns(columns);
        let rows = tokens.next_multiple_of(ROW_STEP);
        let mut f32 = Buffer::zeroed(rows * pitch).unwrap();
        let mut bf16 = Buffer::zeroed(rows * pitch).unwrap();
        let mut exact = vec![Vec::new(); tokens];
        for (token, exact) in exact.iter_mut().enumerate() {
            for (column, value) in noise(token + 99, columns).into_iter().enumerate() {
                let rounded = half::bf16::from_f32(value);
                f32.as_mut_slice()[token * pitch + column] = value;
                bf16.as_mut_slice()[token * pitch + column] = rounded.to_bits();
                exact.push(if is_bf16 { rounded.to_f64() } else { value.into() });
            }
        }
        Self { f32, bf16, exact, is_bf16, pitch }
    }

    fn view(&mut self) -> Activations {
        if self.is_bf16 {
            Activations::Bf16(RowView::of(&mut self.bf16, self.pitch))
        } else {
            Activations::F32(RowView::of(&mut self.f32, self.pitch))
        }
    }
}

#[test]
fn linear_layers_agree_with_plain_sums() {
    over_kernels(|kernels| {
        for element in [Element::F32, Element::F16, Element::Bf16] {
            for (rows, columns) in [(1, 2), (16, 32), (17, 33), (50, 96), (98, 130), (64, 1_000)] {
                for tokens in [1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 70] {
                    check_linear(kernels, element, rows, columns, tokens);
                }
            }
        }
    });
}

fn check_linear(kernels: Kernels, element: Element, rows: usize, columns: usize, tokens: usize) {
    let bytes = bytes_of(element, &noise(7, rows * columns));
    let tensor = Tensor { element, bytes: &bytes };
    let mut weights = vec![0.0; rows * columns];
    tensor.read(0..rows * columns, &mut weights);
    let packed = pack(tensor, rows, columns);
    let mut row = vec![0.0; columns];
    packed.read_row(rows - 1, &mut row);
    assert_eq!(row, weights[(rows - 1) * columns..]);
    let mut input = Input::new(tokens, columns, packed.is_bf16() && kernels.wants_bf16());
    let bias = noise(3, padded_rows(rows));
    // The pitch is as tight as that of rows of logits, and guard values surround the
    // rows.
    let mut output = vec![f32::NAN; (tokens + 1) * rows];
    let job = LinearJob {
        input: input.view(),
        weights: &packed,
        epilogue: LinearEpilogue::Store {
            output: RowView::of_slice(&mut output, rows),
            bias: &bias,
        },
    };
    // SAFETY: the buffers above have the rows and columns of the job.
    unsafe { kernels.linear(&job, 0..packed.pairs(), 0..tokens) };
    for (token, x) in input.exact.iter().enumerate() {
        for row in 0..rows {
            let weights = &weights[row * columns..(row + 1) * columns];
            let sum: f64 = x.iter().zip(weights).map(|(x, w)| x * f64::from(*w)).sum();
            let found = f64::from(output[token * rows + row]);
            let expected = sum + f64::from(bias[row]);
            assert!(
                (found - expected).abs() <= 1e-5 * (columns as f64).max(4.0),
                "{element:?} {rows}x{columns} {tokens}: token {token} row {row}: {found} {expected}"
            );
        }
    }
    assert!(output[tokens * rows..].iter().all(|value| value.is_nan()), "kept within its rows");
}

#[test]
fn gates_and_residuals_agree_with_plain_sums() {
    over_kernels(|kernels| {
        for element in [Element::F32, Element::Bf16] {
            let (rows, columns, tokens) = (64, 70, 21);
            let bytes = bytes_of(element, &noise(5, rows * columns));
            let tensor = Tensor { element, bytes: &bytes };
            let packed = pack(tensor, rows, columns);
            let mut weights = vec![0.0; rows * columns];
            tensor.read(0..rows * columns, &mut weights);
            let is_bf16 = packed.is_bf16() && kernels.wants_bf16();
            let mut input = Input::new(tokens, columns, is_bf16);
            let product = |token: usize, row: usize| -> f64 {
                let weights = &weights[row * columns..(row + 1) * columns];
                input.exact[token].iter().zip(weights).map(|(x, w)| x * f64::from(*w)).sum()
            };
            let products: Vec<Vec<f64>> =
                (0..tokens).map(|t| (0..rows).map(|row| product(t, row)).collect()).collect();

            let mut stream = Buffer::<f32>::zeroed(tokens * rows).unwrap();
            stream.as_mut_slice().fill(2.0);
            let output = RowView::of(&mut stream, rows);
            let job = LinearJob {
                input: input.view(),
                weights: &packed,
                epilogue: LinearEpilogue::Add { output },
            };
            // SAFETY: the buffers have the rows and columns of the job.
            unsafe { kernels.linear(&job, 0..2, 0..tokens) };
            for (token, products) in products.iter().enumerate() {
                for (row, product) in products.iter().enumerate() {
                    let found = f64::from(stream.as_slice()[token * rows + row]);
                    assert!((found - product - 2.0).abs() < 1e-3, "{found} {product}");
                }
            }

            let mut gated = Input::new(tokens, rows / 2, is_bf16);
            let epilogue = LinearEpilogue::Gate { output: gated.view() };
            let job = LinearJob { input: input.view(), weights: &packed, epilogue };
            // SAFETY: the buffers have the rows and columns of the job.
            unsafe { kernels.linear(&job, 0..2, 0..tokens) };
            for (token, products) in products.iter().enumerate() {
                for index in 0..rows / 2 {
                    let row = index / LANES * 2 * LANES + index % LANES;
                    let (gate, up) = (products[row], products[row + LANES]);
                    let expected = gate / (1.0 + (-gate).exp()) * up;
                    let place = token * gated.pitch + index;
                    let found = if is_bf16 {
                        half::bf16::from_bits(gated.bf16.as_slice()[place]).to_f64()
                    } else {
                        gated.f32.as_slice()[place].into()
                    };
                    let bound = if is_bf16 { 5e-3 } else { 1e-4 };
                    assert!((found - expected).abs() <= bound * (1.0 + expected.abs()));
                }
            }
        }
    });
}

#[test]
fn norms_agree_with_plain_sums() {
    over_kernels(|kernels| {
        for width in [2, 16, 40, 64, 900] {
            let pitch = padded_columns(width);
            let mut input = Buffer::zeroed(2 * pitch).unwrap();
            let values = noise(width, width);
            input.as_mut_slice()[pitch..pitch + width].copy_from_slice(&values);
            let mut weight = noise(1, width);
            let squares: f64 = values.iter().map(|x| f64::from(x * x)).sum();
            let scale = 1.0 / (squares / width as f64 + 1e-6).sqrt();
            let expected: Vec<f64> = values
                .iter()
                .zip(&weight)
                .map(|(x, weight)| f64::from(*x) * scale * f64::from(*weight))
                .collect();
            weight.resize(pitch, 0.0);
            for is_bf16 in [false, true] {
                let mut output = Input::new(1, width, is_bf16);
                let job = NormJob {
                    input: RowView::of(&mut input, pitch),
                    weight: &weight,
                    epsilon: 1e-6,
                    width,
                    output: output.view(),
                };
                // SAFETY: both buffers have the rows.
                unsafe { kernels.normalise(&job, NormRow { from: 1, to: 0 }) };
                for (column, expected) in expected.iter().enumerate() {
                    let (found, bound) = if is_bf16 {
                        (half::bf16::from_bits(output.bf16.as_slice()[column]).to_f64(), 4e-3)
                    } else {
                        (f64::from(output.f32.as_slice()[column]), 1e-5)
                    };
                    assert!((found - expected).abs() <= bound * expected.abs() + 1e-6);
                }
            }
        }
    });
}

#[test]
fn attention_agrees_with_plain_sums() {
    over_kernels(|kernels| {
        for format in [KvFormat::F32, KvFormat::Bf16] {
            for (heads, kv_heads, head_dim) in [(1, 1, 2), (4, 2, 24), (7, 1, 64), (40, 1, 32)] {
                let shape = Heads { heads, kv_heads, head_dim };
                for (position, tokens, window) in [
                    (0, 1, None),
                    (0, 20, None),
                    (15, 2, None),
                    (127, 3, None),
                    (300, 9, None),
                    (300, 9, Some(1)),
                    (300, 9, Some(5)),
                    (300, 9, Some(140)),
                    (300, 9, Some(1_000)),
                ] {
                    check_attention(kernels, format, shape, position, tokens, window);
                }
            }
        }
    });
}

#[derive(Clone, Copy)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
fn check_attention(
    kernels: Kernels,
    format: KvFormat,
    shape: Heads,
    position: usize,
    tokens: usize,
    window: Option<usize>,
) {
    let Heads { heads, kv_heads, head_dim } = shape;
    let (total, columns) = (position + tokens, padded_columns(head_dim));
    let blocks: Vec<u32> = (0..total.div_ceil(16) as u32).rev().collect();
    let elements = blocks.len() * kv_heads * LANES * columns;
    let mut caches = [(); 2].map(|()| Buffer::<f32>::zeroed(elements).unwrap());
    // Slots that were never written must not influence the result.
    caches.iter_mut().for_each(|cache| cache.as_mut_slice().fill(f32::NAN));
    let [keys, values] = &mut caches;
    let kv = KvView {
        format,
        keys: keys.as_mut_ptr().cast(),
        values: values.as_mut_ptr().cast(),
        heads: kv_heads,
        head_columns: columns,
    };
    if columns > head_dim {
        // Padding is zero and never written.
        keys.as_mut_slice().fill(0.0);
        values.as_mut_slice().fill(0.0);
    }
    let width = (heads + 2 * kv_heads) * head_dim;
    let mut qkv = Buffer::zeroed(total * width).unwrap();
    qkv.as_mut_slice().copy_from_slice(&noise(heads, total * width));
    let plain = qkv.as_slice().to_vec();
    // Angles of zero: cosines of 1 and sines of 0.
    let mut angle = vec![1.0; head_dim];
    angle[head_dim / 2..].fill(0.0);
    let angles = angle.repeat(total);
    let queries = RowView::of(&mut qkv, width);
    let rotate_job = RotateJob { qkv: queries, heads, head_dim, angles: &angles, norms: None, kv };
    for token in 0..total {
        let slot = KvSlot { block: blocks[token / 16], slot: (token % 16) as u32 };
        // SAFETY: the cache has the blocks, and QKV has the rows.
        unsafe { rotate(&rotate_job, token, slot) };
    }
    let pitch = padded_columns(heads * head_dim);
    let mut output = Buffer::<f32>::zeroed(total * pitch).unwrap();
    let scale = 1.0 / (head_dim as f32).sqrt();
    let job = AttentionJob {
        queries,
        output: Activations::F32(RowView::of(&mut output, pitch)),
        kv,
        group: heads / kv_heads,
        head_dim,
        scale,
        window,
    };
    let most = tokens_of_task(job.group);
    let mut scratch = AttentionScratch::new(job.group, columns);
    for first in (0..tokens).step_by(most) {
        for kv_head in 0..kv_heads {
            let position = position + first;
            let task = AttentionTask {
                row: position,
                tokens: most.min(tokens - first),
                position,
                kv_head,
                blocks: &blocks,
            };
            // SAFETY: everything was written above.
            unsafe { kernels.attend(&job, &task, &mut scratch) };
        }
    }
    let round = |x: f32| match format {
        KvFormat::F32 => f64::from(x),
        KvFormat::Bf16 => half::bf16::from_f32(x).to_f64(),
    };
    for token in position..total {
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let row =
                |token: usize, head: usize| &plain[token * width + head * head_dim..][..head_dim];
            let first = window.map_or(0, |window| (token + 1).saturating_sub(window));
            let scores: Vec<f64> = (first..=token)
                .map(|key| {
                    let products = row(token, head)
                        .iter()
                        .zip(row(key, heads + kv_head))
                        .map(|(q, k)| f64::from(*q) * round(*k));
                    (products.sum::<f64>() * f64::from(scale)).exp()
                })
                .collect();
            let sum: f64 = scores.iter().sum();
            for element in 0..head_dim {
                let expected: f64 = (first..=token)
                    .zip(&scores)
                    .map(|(key, score)| {
                        score / sum * round(row(key, heads + kv_heads + kv_head)[element])
                    })
                    .sum();
                let found = f64::from(output.as_slice()[token * pitch + head * head_dim + element]);
                assert!((found - expected).abs() < 2e-5, "{found} {expected}");
            }
        }
    }
}
