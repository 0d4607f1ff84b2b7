//! Tests of embedding, norms, positions and gates, and of the kernels that copy words.

use super::*;
use crate::backend::cuda::kernels::*;
use crate::kernels::{
    Activations, Buffer, HeadNorms, Instructions, Kernels, KvFormat, KvSlot, KvView, LANES,
    NormJob, NormRow, RotateJob, RowView, padded_columns, rotate,
};
use crate::model::{Rope, RopeScaling};

#[test]
fn feed_writes_sampled_tokens() {
    sound(|emulator, order| {
        let mut tokens = emulator.copy(&[7_u32, 8, 9, 10]);
        let sources = emulator.copy(&[1, NONE, 0, 2]);
        let sampled = emulator.copy(&[70_u32, 71, NONE]);
        let args = FeedArgs {
            tokens: tokens.at(),
            sources: sources.at(),
            sampled: sampled.at(),
            count: 4,
        };
        emulator.launch(&feed(args), order)?;
        // A sample that found no token becomes token 0, which the embedding has.
        assert_eq!(tokens.as_mut_slice(), [71, 8, 70, 0]);
        Ok(())
    });
}

#[test]
fn fill_writes_every_word() {
    sound(|emulator, order| {
        for count in [1_usize, 255, 256, 1_001] {
            let words = emulator.memory::<u32>(count);
            let args = FillArgs { words: words.at(), count: count as u64, value: 3 };
            emulator.launch(&fill(args), order)?;
            assert!(filled(&words)?.iter().all(|word| *word == 3));
        }
        Ok(())
    });
}

#[test]
fn copy_block_copies_every_layer() {
    sound(|emulator, order| {
        let (layers, blocks, elements) = (3, 4, 2 * 16 * 32);
        let cache = |seed| emulator.copy(&bf16_noise(seed, layers * blocks * elements));
        let (keys, values) = (cache(1), cache(2));
        let mut expected = [keys.as_slice().to_vec(), values.as_slice().to_vec()];
        let args = CopyBlockArgs {
            keys: keys.at(),
            values: values.at(),
            layer_elements: (blocks * elements) as u64,
            block_elements: elements as u32,
            from: 3,
            to: 1,
        };
        emulator.launch(&copy_block(args, layers as u32), order)?;
        for (expected, found) in expected.iter_mut().zip([&keys, &values]) {
            for layer in 0..layers {
                let block = |block| (layer * blocks + block) * elements;
                expected.copy_within(block(3)..block(4), block(1));
            }
            assert_eq!(&filled(found)?, expected);
        }
        Ok(())
    });
}

#[test]
fn embed_reads_rows_of_the_table() {
    sound(|emulator, order| {
        for (tokens, hidden) in [(1, 8), (17, 128), (5, 2_056)] {
            let vocabulary = 11;
            let table = bf16_noise(4, vocabulary * hidden);
            let ids: Vec<u32> = (0..tokens as u32).map(|token| token * 7 % 11).collect();
            let residual = emulator.memory::<f32>(tokens * hidden);
            let (device_table, device_ids) = (emulator.copy(&table), emulator.copy(&ids));
            let args = EmbedArgs {
                residual: residual.at(),
                table: device_table.at(),
                tokens: device_ids.at(),
                hidden: hidden as u32,
            };
            emulator.launch(&embed(args, tokens as u32), order)?;
            for (row, id) in filled(&residual)?.chunks(hidden).zip(&ids) {
                assert_eq!(row, widened(&table[*id as usize * hidden..][..hidden]));
            }
        }
        Ok(())
    });
}

/// Returns angles in the CPU backend's layout.
fn cpu_angles(frequencies: &[f64], positions: &[u32]) -> Vec<f32> {
    positions
        .iter()
        .flat_map(|position| {
            let angles = frequencies.iter().map(|by| by * f64::from(*position));
            let cosines = angles.clone().map(|angle| angle.cos() as f32);
            cosines.chain(angles.map(|angle| angle.sin() as f32)).collect::<Vec<f32>>()
        })
        .collect()
}

#[test]
fn angles_agree_for_every_rope_scaling() {
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_context: 8_192.0 };
    for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }, llama3] {
        let frequencies = Rope { theta: 500_000.0, scaling }.frequencies(64);
        let turns: Vec<f64> = frequencies.iter().map(|by| by / std::f64::consts::TAU).collect();
        let positions = [0, 1, 17, 8_191, 131_071, 1_000_003];
        let expected = cpu_angles(&frequencies, &positions);
        sound(|emulator, order| {
            let found = emulator.memory::<f32>(expected.len());
            let (turns, positions) = (emulator.copy(&turns), emulator.copy(&positions));
            let args = AnglesArgs {
                angles: found.at(),
                turns: turns.at(),
                positions: positions.at(),
                half: 32,
            };
            emulator.launch(&angles(args, 6), order)?;
            for (found, expected) in filled(&found)?.iter().zip(&expected) {
                assert!((found - expected).abs() < 2e-7, "{scaling:?}: {found} {expected}");
            }
            Ok(())
        });
    }
}

/// Returns rows of the residual stream, normalised by the CPU backend.
fn cpu_norm(input: &[f32], weight: &[f32], rows: &[u32]) -> Vec<f32> {
    let width = weight.len();
    let pitch = padded_columns(width);
    let padded = |values: &[f32]| {
        let mut buffer = Buffer::zeroed(values.len() / width * pitch).expect("a little memory");
        for (to, from) in buffer.as_mut_slice().chunks_mut(pitch).zip(values.chunks(width)) {
            to[..width].copy_from_slice(from);
        }
        buffer
    };
    let (mut input, weight) = (padded(input), padded(weight));
    let mut output = Buffer::<f32>::zeroed(rows.len() * pitch).expect("a little memory");
    let job = NormJob {
        input: RowView::of(&mut input, pitch),
        weight: weight.as_slice(),
        epsilon: 1e-6,
        width,
        output: Activations::F32(RowView::of(&mut output, pitch)),
    };
    let kernels = Kernels::new(Instructions::Portable).expect("every machine has it");
    for (to, from) in rows.iter().enumerate() {
        // SAFETY: both buffers have the rows, and nothing else uses them.
        unsafe { kernels.normalise(&job, NormRow { from: *from as usize, to }) };
    }
    output.as_slice().chunks(pitch).flat_map(|row| row[..width].to_vec()).collect()
}

fn check_norm(emulator: &Emulator, order: u32) -> Result<(), String> {
    for (tokens, width) in [(1, 8), (3, 128), (17, 896), (2, 2_056), (3, 3_584), (2, 8_200)] {
        let (input, weight) = (noise(1, tokens * width), noise(2, width));
        let gathered: Vec<u32> = (0..tokens as u32).rev().collect();
        let all: Vec<u32> = (0..tokens as u32).collect();
        let device = [emulator.copy(&input), emulator.copy(&weight)];
        let rows = emulator.copy(&gathered);
        for (pointer, which) in [(0, &all), (rows.at(), &gathered)] {
            let output = emulator.memory::<u16>(tokens * width);
            let args = NormArgs {
                output: output.at(),
                input: device[0].at(),
                weight: device[1].at(),
                rows: pointer,
                epsilon: 1e-6,
                width: width as u32,
            };
            emulator.launch(&rms_norm(args, tokens as u32), order)?;
            compare(&widened(&filled(&output)?), &cpu_norm(&input, &weight, which), ROUNDED)?;
        }
    }
    Ok(())
}

#[test]
fn norms_agree_with_the_cpu() {
    sound(check_norm);
}

#[test]
fn norm_without_barrier_is_found() {
    finds(Bug::NormWithoutBarrier, check_norm);
}

/// Returns `silu(x)` in f32.
fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn check_gate(emulator: &Emulator, order: u32) -> Result<(), String> {
    for (rows, width) in [(1, 8), (17, 384), (3, 4_864), (2, 1_032)] {
        let gate_up: Vec<u16> = bf16_noise(9, rows * 2 * width);
        let expected: Vec<f32> = widened(&gate_up)
            .chunks(2 * width)
            .flat_map(|row| {
                let (gates, ups) = row.split_at(width);
                gates.iter().zip(ups).map(|(gate, up)| silu(*gate) * up).collect::<Vec<f32>>()
            })
            .collect();
        let output = emulator.memory::<u16>(rows * width);
        let gate_up = emulator.copy(&gate_up);
        let args = GateArgs { output: output.at(), gate_up: gate_up.at(), width: width as u32 };
        emulator.launch(&swiglu(args, rows as u32), order)?;
        compare(&widened(&filled(&output)?), &expected, ROUNDED)?;
    }
    Ok(())
}

#[test]
fn gates_agree_with_plain_arithmetic() {
    sound(check_gate);
}

/// Far below zero nothing passes, although the exponential overflows; far above zero
/// everything passes.
#[test]
fn gates_agree_far_from_zero() {
    let gates = [100.0, -100.0, 1e4, -1e4, 87.0, -87.5, -88.0, -89.0, 0.0, -0.0, 3e38, -3e38]
        .map(|gate| half::bf16::from_f32(gate).to_f32());
    let infinite = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0];
    sound(|emulator, order| {
        let gates = [&gates[..], &infinite].concat();
        let ups = vec![-1.5; gates.len()];
        let values = [&gates[..], &ups].concat();
        let bits: Vec<u16> =
            values.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        let (output, gate_up) = (emulator.memory::<u16>(gates.len()), emulator.copy(&bits));
        let width = gates.len() as u32;
        let args = GateArgs { output: output.at(), gate_up: gate_up.at(), width };
        emulator.launch(&swiglu(args, 1), order)?;
        for (found, gate) in widened(&filled(&output)?).into_iter().zip(gates) {
            let expected = half::bf16::from_f32(silu(gate) * -1.5).to_f32();
            let is_same = match expected.is_finite() {
                true => (found - expected).abs() <= 0.0045 * expected.abs() + 1e-30,
                false => found.to_string() == expected.to_string(),
            };
            is_same.then_some(()).ok_or_else(|| format!("{gate}: {found}, not {expected}"))?;
        }
        Ok(())
    });
}

#[test]
fn gate_without_bound_is_found() {
    finds(Bug::GateWithoutBound, check_gate);
}

/// Returns a token's keys or values, which both caches hold in different layouts.
fn cpu_head(kv: &KvView, slot: u32, kv_head: usize, width: usize) -> [Vec<f32>; 2] {
    let (block, slot) = (slot as usize / LANES, slot as usize % LANES);
    let place = (block * kv.heads + kv_head) * LANES * kv.head_columns;
    // SAFETY: the tests' caches have the blocks that their slots name.
    let read = |from: *const u8, at: usize| unsafe { from.cast::<u16>().add(place + at).read() };
    let keys = (0..width).map(|i| read(kv.keys, (i / 2 * LANES + slot) * 2 + i % 2));
    let values = (0..width).map(|i| read(kv.values, slot * kv.head_columns + i));
    [widened(&keys.collect::<Vec<u16>>()), widened(&values.collect::<Vec<u16>>())]
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: HeadDim,
}

#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
fn check_rope(
    emulator: &Emulator,
    order: u32,
    shape: Heads,
    has_bias: bool,
    has_norms: bool,
) -> Result<(), String> {
    let Heads { heads, kv_heads, head_dim } = shape;
    let d = head_dim.elements() as usize;
    let (tokens, blocks, width) = (5, 4, (heads + 2 * kv_heads) * d);
    let slots = [17_u32, NONE, 63, 0, 33];
    let qkv = noise(3, tokens * width);
    let bias = if has_bias { noise(4, width) } else { vec![0.0; width] };
    let norms = [noise(5, d), noise(6, d)];
    let frequencies = Rope { theta: 10_000.0, scaling: RopeScaling::None }.frequencies(d as u32);
    let turning = cpu_angles(&frequencies, &[0, 5, 1_000, 3, 77]);

    let mut cpu_qkv = Buffer::zeroed(tokens * width).expect("a little memory");
    for (index, to) in cpu_qkv.as_mut_slice().iter_mut().enumerate() {
        *to = qkv[index] + bias[index % width];
    }
    let elements = blocks * kv_heads * LANES * d;
    let mut cpu_keys = Buffer::<u16>::zeroed(elements).expect("a little memory");
    let mut cpu_values = Buffer::<u16>::zeroed(elements).expect("a little memory");
    let kv = KvView {
        format: KvFormat::Bf16,
        keys: cpu_keys.as_mut_ptr().cast(),
        values: cpu_values.as_mut_ptr().cast(),
        heads: kv_heads,
        head_columns: d,
    };
    let job = RotateJob {
        qkv: RowView::of(&mut cpu_qkv, width),
        heads,
        head_dim: d,
        angles: &turning,
        norms: has_norms.then_some(HeadNorms { query: &norms[0], key: &norms[1], epsilon: 1e-6 }),
        kv,
    };
    for (token, slot) in slots.iter().enumerate() {
        // An unused slot stands in for "none".
        let slot = if *slot == NONE { 50 } else { *slot };
        // SAFETY: the buffers above have the token, and the caches have the slot.
        unsafe { rotate(&job, token, KvSlot { block: slot / 16, slot: slot % 16 }) };
    }

    let queries = emulator.memory::<u16>(tokens * heads * d);
    let keys = emulator.memory::<u16>(elements);
    let values = emulator.memory::<u16>(elements);
    let device = [&qkv, &bias, &norms[0], &norms[1], &turning].map(|from| emulator.copy(from));
    let device_slots = emulator.copy(&slots);
    let args = RopeArgs {
        queries: queries.at(),
        keys: keys.at(),
        values: values.at(),
        qkv: device[0].at(),
        bias: if has_bias { device[1].at() } else { 0 },
        query_norm: if has_norms { device[2].at() } else { 0 },
        key_norm: if has_norms { device[3].at() } else { 0 },
        angles: device[4].at(),
        slots: device_slots.at(),
        epsilon: 1e-6,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
    };
    emulator.launch(&rope(args, tokens as u32, head_dim), order)?;
    let queries = widened(&filled(&queries)?);
    for (token, row) in cpu_qkv.as_slice().chunks(width).enumerate() {
        compare(&queries[token * heads * d..][..heads * d], &row[..heads * d], ROUNDED)?;
    }
    let found = [filled(&keys)?, filled(&values)?];
    let mut written = vec![false; blocks * 16];
    for slot in slots.into_iter().filter(|slot| *slot != NONE) {
        written[slot as usize] = true;
        for kv_head in 0..kv_heads {
            let expected = cpu_head(&kv, slot, kv_head, d);
            for (found, expected) in found.iter().zip(&expected) {
                compare(&widened(row_of(found, slot, kv_head, shape)), expected, ROUNDED)?;
            }
        }
    }
    for slot in (0..written.len()).filter(|slot| !written[*slot]) {
        for (found, kv_head) in found.iter().zip(0..kv_heads) {
            let row = row_of(found, slot as u32, kv_head, shape);
            assert!(row.iter().all(|bits| *bits == u16::MAX), "slot {slot} was not to be written");
        }
    }
    Ok(())
}

/// Returns a token's key or value in the device's layout.
fn row_of(cache: &[u16], slot: u32, kv_head: usize, shape: Heads) -> &[u16] {
    let d = shape.head_dim.elements() as usize;
    let (block, slot) = (slot as usize / 16, slot as usize % 16);
    &cache[((block * shape.kv_heads + kv_head) * 16 + slot) * d..][..d]
}

#[test]
fn rope_agrees_with_the_cpu() {
    for head_dim in HeadDim::ALL {
        for (heads, kv_heads) in [(1, 1), (4, 2), (7, 1), (14, 2)] {
            for (has_bias, has_norms) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let shape = Heads { heads, kv_heads, head_dim };
                sound(|emulator, order| check_rope(emulator, order, shape, has_bias, has_norms));
            }
        }
    }
}
