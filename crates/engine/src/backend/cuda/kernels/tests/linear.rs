//! Tests of linear layers, with the tiled and the skinny kernels.

use super::*;
use crate::backend::cuda::kernels::*;
use crate::kernels::{
    Activations, Buffer, Instructions, Kernels, LinearEpilogue, LinearJob, Packed, PackedFormat,
    ROW_STEP, RowSource, RowView, padded_columns,
};
use crate::weights::{Element, Tensor};

/// The input and the weights of a layer, and the CPU backend's result.
struct Layer {
    rows: usize,
    columns: usize,
    depth: usize,
    input: Vec<u16>,
    weights: Vec<u16>,
    expected: Vec<f32>,
}

impl Layer {
    fn new(rows: usize, columns: usize, depth: usize) -> Self {
        let (input, weights) = (bf16_noise(1, rows * depth), bf16_noise(2, columns * depth));
        let mut layer = Self { rows, columns, depth, input, weights, expected: Vec::new() };
        layer.expected = layer.on_cpu();
        layer
    }

    fn on_cpu(&self) -> Vec<f32> {
        let bytes: Vec<u8> = self.weights.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let tensor = Tensor { element: Element::Bf16, bytes: &bytes };
        let mut packed = Packed::zeroed(PackedFormat::Bf16, [self.columns, self.depth])
            .expect("a little memory");
        let mut scratch = vec![0.0; self.depth];
        for (index, panel) in packed.panels_mut().iter_mut().enumerate() {
            for row in index * 16..self.columns.min((index + 1) * 16) {
                panel.fill(row % 16, RowSource { tensor, row }, &mut scratch);
            }
        }
        let pitch = padded_columns(self.depth);
        let mut input =
            Buffer::zeroed(self.rows.next_multiple_of(ROW_STEP) * pitch).expect("a little memory");
        let rows = input.as_mut_slice().chunks_mut(pitch);
        for (to, from) in rows.zip(widened(&self.input).chunks(self.depth)) {
            to[..self.depth].copy_from_slice(from);
        }
        let mut output = vec![0.0; self.rows * self.columns];
        let job = LinearJob {
            input: Activations::F32(RowView::of(&mut input, pitch)),
            weights: &packed,
            epilogue: LinearEpilogue::Store {
                output: RowView::of_slice(&mut output, self.columns),
                bias: &[],
            },
        };
        let kernels = Kernels::new(Instructions::Portable).expect("every machine has it");
        // SAFETY: the buffers above have the rows and columns of the job.
        unsafe { kernels.linear(&job, 0..packed.pairs(), 0..self.rows) };
        output
    }

    fn check(
        &self,
        emulator: &Emulator,
        order: u32,
        kernel: fn(LinearArgs, Epilogue) -> Launch<LinearArgs>,
        epilogue: Epilogue,
    ) -> Result<(), String> {
        let (input, weights) = (emulator.copy(&self.input), emulator.copy(&self.weights));
        let count = self.rows * self.columns;
        let before = noise(3, count);
        let mut f32_output = emulator.memory::<f32>(count);
        let bf16_output = emulator.memory::<u16>(count);
        if epilogue == Epilogue::Add {
            f32_output.as_mut_slice().copy_from_slice(&before);
        }
        let is_bf16 = epilogue == Epilogue::Bf16;
        let args = LinearArgs {
            output: if is_bf16 { bf16_output.at() } else { f32_output.at() },
            input: input.at(),
            weights: weights.at(),
            rows: self.rows as u32,
            columns: self.columns as u32,
            depth: self.depth as u32,
        };
        let launch = kernel(args, epilogue);
        emulator.launch(&launch, order)?;
        let result = match epilogue {
            Epilogue::F32 => compare(&filled(&f32_output)?, &self.expected, SUMMED),
            Epilogue::Bf16 => compare(&widened(&filled(&bf16_output)?), &self.expected, ROUNDED),
            Epilogue::Add => {
                let sums = self.expected.iter().zip(&before).map(|(a, b)| a + b);
                compare(&filled(&f32_output)?, &sums.collect::<Vec<f32>>(), SUMMED)
            }
        };
        result.map_err(|error| {
            let Self { rows, columns, depth, .. } = self;
            format!("{} {rows}x{columns}x{depth}: {error}", launch.kernel)
        })
    }
}

const FINISHES: [Epilogue; 3] = [Epilogue::F32, Epilogue::Bf16, Epilogue::Add];

#[test]
fn tiled_layers_agree_with_the_cpu() {
    for (rows, columns, depth) in
        [(1, 1, 8), (9, 130, 40), (17, 128, 128), (128, 128, 96), (130, 67, 264), (33, 257, 64)]
    {
        let layer = Layer::new(rows, columns, depth);
        for epilogue in FINISHES {
            sound(|emulator, order| layer.check(emulator, order, tiled, epilogue));
        }
    }
}

#[test]
fn skinny_layers_agree_with_the_cpu() {
    for rows in [1, 7, 8, 9, 16, 17, 32, 33, 71] {
        for (columns, depth) in [(1, 8), (16, 32), (37, 128), (130, 520), (517, 136)] {
            let layer = Layer::new(rows, columns, depth);
            for epilogue in FINISHES {
                sound(|emulator, order| layer.check(emulator, order, skinny, epilogue));
            }
        }
    }
}

/// Depths at which the warps take four chunks at once, two, or one that may end within,
/// in combination and alone.
#[test]
fn skinny_layers_agree_at_every_depth() {
    for rows in [1, 8, 9, 17, 33] {
        for depth in [512, 1_032, 2_048, 64 * 8 * 5, 64 * 8 * 7 + 40, 64 * 8 * 11 - 8] {
            let layer = Layer::new(rows, 21, depth);
            sound(|emulator, order| layer.check(emulator, order, skinny, Epilogue::F32));
        }
    }
}

/// The first rows of many rows, compared with the same rows alone.
#[test]
fn row_sums_do_not_depend_on_other_rows() {
    const MANY: usize = 70;
    for depth in [520, 64 * 8 * 7 + 40] {
        let layer = Layer::new(MANY, 37, depth);
        sound(|emulator, order| {
            let (input, weights) = (emulator.copy(&layer.input), emulator.copy(&layer.weights));
            let run = |first: usize, rows: usize| {
                let output = emulator.memory::<f32>(rows * layer.columns);
                let args = LinearArgs {
                    output: output.at(),
                    input: input.at() + (2 * first * layer.depth) as u64,
                    weights: weights.at(),
                    rows: rows as u32,
                    columns: layer.columns as u32,
                    depth: layer.depth as u32,
                };
                emulator.launch(&skinny(args, Epilogue::F32), order)?;
                filled(&output)
            };
            let all = run(0, MANY)?;
            for (first, rows) in [(0, 1), (3, 8), (12, 16), (30, 33), (69, 1)] {
                let from = first * layer.columns;
                let same = run(first, rows)? == all[from..from + rows * layer.columns];
                same.then_some(()).ok_or_else(|| format!("{rows} rows from {first} on"))?;
            }
            Ok(())
        });
    }
}

#[test]
fn few_rows_take_a_skinny_kernel() {
    let args = |rows| LinearArgs { output: 0, input: 0, weights: 0, rows, columns: 1, depth: 8 };
    for (rows, kernel) in [
        (1, "skinny8_add"),
        (8, "skinny8_add"),
        (9, "skinny16_add"),
        (17, "skinny32_add"),
        (32, "skinny32_add"),
        (33, "linear_add"),
    ] {
        assert_eq!(linear(args(rows), Epilogue::Add).kernel, kernel, "{rows}");
    }
}

#[test]
fn planted_tile_bugs_are_found() {
    let layer = Layer::new(33, 67, 264);
    for bug in [Bug::LinearWithoutWait, Bug::LinearWithoutBarrier, Bug::LinearWithoutBound] {
        finds(bug, |emulator, order| layer.check(emulator, order, tiled, Epilogue::F32));
    }
}

#[test]
fn skinny_layer_without_bound_is_found() {
    for depth in [72, 2_048] {
        let layer = Layer::new(11, 40, depth);
        finds(Bug::SkinnyWithoutBound, |emulator, order| {
            layer.check(emulator, order, skinny, Epilogue::Bf16)
        });
    }
}
