//! Linear layers over bf16 with the dot products of AVX-512 BF16: one instruction
//! multiplies two columns of sixteen rows.

use std::arch::x86_64::*;
use std::ops::Range;

use super::avx512::Avx512;
use super::linear::{self, LinearJob};
use super::packed::PackedData;
use super::{Activations, LANES};

/// Computes a linear layer like [`linear::linear`]. Weights that are not bf16 come with
/// f32 activations and are passed to that function.
///
/// # Safety
/// The conditions of [`linear::linear`], with AVX-512F and AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn linear(job: &LinearJob<'_>, pairs: Range<usize>, tokens: Range<usize>) {
    let (Activations::Bf16(input), PackedData::Bf16(data)) = (job.input, job.weights.data()) else {
        // SAFETY: the caller vouches for the conditions.
        return unsafe { linear::linear::<Avx512>(job, pairs, tokens) };
    };
    let column_pairs = job.weights.padded_columns() / 2;
    let panel = column_pairs * LANES;
    for pair in pairs {
        // SAFETY: the weights have this pair of panels, and the caller vouches for the
        // rows; a row of bf16 is a row of half as many pairs.
        unsafe {
            let first = data.as_ptr().add(2 * pair * panel);
            let panels = [first, first.add(panel)];
            let mut token = tokens.start;
            while token < tokens.end {
                let rows = linear::rows_at_once(MOST_ROWS, tokens.end - token);
                macro_rules! block {
                    ($rows:literal) => {{
                        let first = input.row(token).cast_const().cast::<i32>();
                        let sums = tile::<$rows>(first, input.pitch() / 2, panels, column_pairs);
                        for (row, sums) in sums.into_iter().enumerate() {
                            let place = linear::PanelRow { token: token + row, pair };
                            linear::epilogue(job, place, sums.map(Avx512));
                        }
                    }};
                }
                match rows {
                    1 => block!(1),
                    2 => block!(2),
                    4 => block!(4),
                    _ => block!(8),
                }
                token += rows;
            }
        }
    }
}

/// Multiplies `M` rows by two panels. `pitch` counts pairs.
///
/// # Safety
/// There must be `M` rows of `column_pairs` pairs, and as many in both panels. The
/// machine must have AVX-512F and AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
unsafe fn tile<const M: usize>(
    first: *const i32,
    pitch: usize,
    panels: [*const u32; 2],
    column_pairs: usize,
) -> [[__m512; 2]; M] {
    let mut sums = [[_mm512_setzero_ps(); 2]; M];
    for pair in 0..column_pairs {
        // SAFETY: every index is within the bounds that the caller vouches for, and any
        // 512 bits are 32 bf16.
        unsafe {
            let as_bf16 = |bits| std::mem::transmute::<__m512i, __m512bh>(bits);
            let low = as_bf16(_mm512_loadu_si512(panels[0].add(pair * LANES).cast()));
            let high = as_bf16(_mm512_loadu_si512(panels[1].add(pair * LANES).cast()));
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = as_bf16(_mm512_set1_epi32(*first.add(row * pitch + pair)));
                sums[0] = _mm512_dpbf16_ps(sums[0], low, x);
                sums[1] = _mm512_dpbf16_ps(sums[1], high, x);
            }
        }
    }
    sums
}

const MOST_ROWS: usize = 8;
