//! Linear layers: rows of activations times packed weights. The epilogue uses the
//! products while they are still in registers.

use std::ops::Range;

use super::packed::PackedData;
use super::vector::Vector;
use super::{Activations, LANES, Packed, RowView};

/// One linear layer over the tokens of a step.
pub(crate) struct LinearJob<'a> {
    /// Rows of [`Packed::padded_columns`] elements, zero behind the columns.
    pub(crate) input: Activations,
    /// Weights of the layer, packed.
    pub(crate) weights: &'a Packed,
    /// The use of the products.
    pub(crate) epilogue: LinearEpilogue<'a>,
}

/// The use of a linear layer's products.
pub(crate) enum LinearEpilogue<'a> {
    /// The products replace the output.
    Store {
        /// Output rows, with a pitch of at least the weights' rows.
        output: RowView<f32>,
        /// Added to each row; empty, or padded to the panels.
        bias: &'a [f32],
    },
    /// The products are added to the output, the residual stream.
    Add {
        /// Output rows, with a pitch of at least the weights' rows.
        output: RowView<f32>,
    },
    /// Even panels are gates and odd panels are the values they gate: the output is
    /// `silu(gate) * up`.
    Gate {
        /// Rows of the next layer's padded columns.
        output: Activations,
    },
}

/// Computes rows `tokens` of the pairs of panels `pairs`.
///
/// # Safety
/// Input and output must have the rows and columns of the job, and the input must have
/// rows up to the next multiple of [`super::ROW_STEP`]. No other thread may touch these
/// outputs. The machine must have `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn linear<V: Vector>(
    job: &LinearJob<'_>,
    pairs: Range<usize>,
    tokens: Range<usize>,
) {
    let Activations::F32(input) = job.input else {
        panic!("kernels without bf16 products are given f32 activations");
    };
    // SAFETY: the caller vouches for the conditions of `sweep`.
    unsafe {
        match job.weights.data() {
            PackedData::F32(data) => sweep::<V, F32Panel>(job, input, data.as_ptr(), pairs, tokens),
            PackedData::F16(data) => sweep::<V, F16Panel>(job, input, data.as_ptr(), pairs, tokens),
            PackedData::Bf16(data) => {
                sweep::<V, Bf16Panel>(job, input, data.as_ptr(), pairs, tokens);
            }
        }
    }
}

/// Computes the same for one panel format.
///
/// # Safety
/// The conditions of [`linear`]; `data` must be the job's weights.
#[inline(always)]
unsafe fn sweep<V: Vector, P: Panel>(
    job: &LinearJob<'_>,
    input: RowView<f32>,
    data: *const P::Element,
    pairs: Range<usize>,
    tokens: Range<usize>,
) {
    let column_pairs = job.weights.padded_columns() / 2;
    let panel = column_pairs * P::PAIR;
    for pair in pairs {
        // SAFETY: the weights have this pair of panels, and the caller vouches for the
        // rows.
        unsafe {
            let panels = [data.add(2 * pair * panel), data.add((2 * pair + 1) * panel)];
            let mut token = tokens.start;
            while token < tokens.end {
                let rows = rows_at_once(V::ROWS, tokens.end - token);
                macro_rules! block {
                    ($rows:literal) => {{
                        let first = input.row(token).cast_const();
                        let sums = tile::<V, P, $rows>(first, input.pitch(), panels, column_pairs);
                        for (row, sums) in sums.into_iter().enumerate() {
                            epilogue(job, PanelRow { token: token + row, pair }, sums);
                        }
                    }};
                }
                match rows {
                    1 => block!(1),
                    2 => block!(2),
                    _ if V::ROWS <= 2 => unreachable!("no more rows than ROWS"),
                    4 => block!(4),
                    _ => block!(8),
                }
                token += rows;
            }
        }
    }
}

/// Returns the largest power of two that is at most `most` and `left`. Each number of
/// rows is compiled separately, and powers of two keep these few.
#[inline(always)]
pub(super) fn rows_at_once(most: usize, left: usize) -> usize {
    1 << most.min(left).ilog2()
}

/// Multiplies `M` rows of activations by two panels.
///
/// # Safety
/// There must be `M` rows of `2 * column_pairs` elements, `pitch` apart, and as many
/// columns in both panels. The machine must have `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn tile<V: Vector, P: Panel, const M: usize>(
    first: *const f32,
    pitch: usize,
    panels: [*const P::Element; 2],
    column_pairs: usize,
) -> [[V; 2]; M] {
    // SAFETY: every index is within the bounds that the caller vouches for.
    unsafe {
        let mut sums = [[V::splat(0.0); 2]; M];
        for pair in 0..column_pairs {
            let [even_0, odd_0] = P::load::<V>(panels[0], pair);
            let [even_1, odd_1] = P::load::<V>(panels[1], pair);
            let mut row = 0;
            while row < M {
                let x = first.add(row * pitch + 2 * pair);
                let (even, odd) = (V::splat(*x), V::splat(*x.add(1)));
                let [sum_0, sum_1] = sums[row];
                sums[row] = [
                    odd_0.mul_add(odd, even_0.mul_add(even, sum_0)),
                    odd_1.mul_add(odd, even_1.mul_add(even, sum_1)),
                ];
                row += 1;
            }
        }
        sums
    }
}

/// A token's row of the output, cut to the columns of one pair of panels.
#[derive(Clone, Copy)]
pub(super) struct PanelRow {
    /// Row of the output.
    pub(super) token: usize,
    /// Index of the pair of panels: columns `32 * pair` and on.
    pub(super) pair: usize,
}

/// Applies the job's epilogue to the products of one token and one pair of panels.
///
/// # Safety
/// The conditions of [`linear`].
#[inline(always)]
pub(super) unsafe fn epilogue<V: Vector>(job: &LinearJob<'_>, place: PanelRow, sums: [V; 2]) {
    let PanelRow { token, pair } = place;
    let column = 2 * LANES * pair;
    // SAFETY: `put` and `add` stay within the pitch; gates are half as wide as their
    // weights, and the next layer's columns are padded.
    unsafe {
        match &job.epilogue {
            LinearEpilogue::Store { output, bias } => {
                let sums = match bias.get(column..column + 2 * LANES) {
                    Some(bias) => [
                        sums[0].add(V::load(bias.as_ptr())),
                        sums[1].add(V::load(bias.as_ptr().add(LANES))),
                    ],
                    None => sums,
                };
                put(*output, place, sums, job.weights.rows());
            }
            LinearEpilogue::Add { output } => {
                assert!(column + 2 * LANES <= output.pitch(), "the residual stream is padded");
                let place = output.row(token).add(column);
                sums[0].add(V::load(place)).store(place);
                let place = place.add(LANES);
                sums[1].add(V::load(place)).store(place);
            }
            LinearEpilogue::Gate { output } => {
                let value = sums[0].silu().mul(sums[1]);
                match output {
                    Activations::F32(rows) => value.store(rows.row(token).add(LANES * pair)),
                    Activations::Bf16(rows) => value.store_bf16(rows.row(token).add(LANES * pair)),
                }
            }
        }
    }
}

/// Stores 32 values, or as many as the row has room for.
///
/// # Safety
/// The output must have the row, `width` must not exceed its pitch, and no other thread
/// may touch these columns.
#[inline(always)]
unsafe fn put<V: Vector>(output: RowView<f32>, place: PanelRow, sums: [V; 2], width: usize) {
    let PanelRow { token, pair } = place;
    let column = 2 * LANES * pair;
    // SAFETY: whole vectors are stored only if the pitch has room for both; otherwise
    // single elements up to the width.
    unsafe {
        let place = output.row(token).add(column);
        if column + 2 * LANES <= output.pitch() {
            sums[0].store(place);
            sums[1].store(place.add(LANES));
        } else {
            let mut values = [0.0_f32; 2 * LANES];
            sums[0].store(values.as_mut_ptr());
            sums[1].store(values.as_mut_ptr().add(LANES));
            for (index, value) in values.into_iter().take(width.saturating_sub(column)).enumerate()
            {
                place.add(index).write(value);
            }
        }
    }
}

/// The representation of two columns of sixteen rows in a panel.
pub(super) trait Panel {
    type Element: Copy;
    /// Elements of two columns.
    const PAIR: usize;
    /// Loads columns `2 * pair` and `2 * pair + 1`.
    ///
    /// # Safety
    /// The panel must have the columns. The machine must have `V`'s instructions.
    unsafe fn load<V: Vector>(panel: *const Self::Element, pair: usize) -> [V; 2];
}

pub(super) struct F32Panel;
pub(super) struct F16Panel;
pub(super) struct Bf16Panel;

impl Panel for F32Panel {
    type Element = f32;
    const PAIR: usize = 2 * LANES;

    #[inline(always)]
    unsafe fn load<V: Vector>(panel: *const f32, pair: usize) -> [V; 2] {
        // SAFETY: the caller vouches for both columns.
        unsafe {
            let even = panel.add(pair * Self::PAIR);
            [V::load(even), V::load(even.add(LANES))]
        }
    }
}

impl Panel for F16Panel {
    type Element = u16;
    const PAIR: usize = 2 * LANES;

    #[inline(always)]
    unsafe fn load<V: Vector>(panel: *const u16, pair: usize) -> [V; 2] {
        // SAFETY: the caller vouches for both columns.
        unsafe {
            let even = panel.add(pair * Self::PAIR);
            [V::load_f16(even), V::load_f16(even.add(LANES))]
        }
    }
}

impl Panel for Bf16Panel {
    type Element = u32;
    const PAIR: usize = LANES;

    #[inline(always)]
    unsafe fn load<V: Vector>(panel: *const u32, pair: usize) -> [V; 2] {
        // SAFETY: the caller vouches for both columns.
        unsafe { V::load_bf16_pairs(panel.add(pair * Self::PAIR)) }
    }
}
