//! The RMS norm of rows of the residual stream, written as activations.

use super::vector::Vector;
use super::{Activations, LANES, RowView};

/// The parameters of an RMS norm.
pub(crate) struct NormJob<'a> {
    /// Input rows. The padding behind `width` must be zero.
    pub(crate) input: RowView<f32>,
    /// Scale of each element, padded with zeros to the pitch of `input`.
    pub(crate) weight: &'a [f32],
    /// Added to the mean of squares.
    pub(crate) epsilon: f32,
    /// Elements of a row.
    pub(crate) width: usize,
    /// Output rows, in the format of the next layer.
    pub(crate) output: Activations,
}

/// The rows of one call.
#[derive(Clone, Copy)]
pub(crate) struct NormRow {
    /// Row of the input.
    pub(crate) from: usize,
    /// Row of the output.
    pub(crate) to: usize,
}

/// Normalises a row of the input into a row of the output.
///
/// # Safety
/// Both rows must exist, and no other thread may touch the output row. The machine must
/// have `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn normalise<V: Vector>(job: &NormJob<'_>, row: NormRow) {
    let NormRow { from, to } = row;
    let columns = job.weight.len();
    assert!(columns == job.input.pitch() && columns.is_multiple_of(LANES), "rows of whole vectors");
    // SAFETY: the caller vouches for the rows, which are `columns` long.
    unsafe {
        let input = job.input.row(from).cast_const();
        let mut squares = V::splat(0.0);
        for column in (0..columns).step_by(LANES) {
            let x = V::load(input.add(column));
            squares = x.mul_add(x, squares);
        }
        let scale = 1.0 / (squares.sum() / job.width as f32 + job.epsilon).sqrt();
        let scale = V::splat(scale);
        for column in (0..columns).step_by(LANES) {
            let weight = V::load(job.weight.as_ptr().add(column));
            let value = V::load(input.add(column)).mul(scale).mul(weight);
            match job.output {
                Activations::F32(rows) => value.store(rows.row(to).add(column)),
                Activations::Bf16(rows) => value.store_bf16(rows.row(to).add(column)),
            }
        }
    }
}
