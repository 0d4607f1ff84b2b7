//! Sixteen lanes in two AVX registers.

use std::arch::x86_64::*;

use super::instructions::entries;
use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

/// Applies an intrinsic to both halves. The operands' existence proves that the machine
/// has it.
macro_rules! both {
    ($operation:ident, $($operand:expr),+) => {
        // SAFETY: an `Avx2` is created only in entries that are chosen after AVX2, FMA
        // and F16C were detected.
        unsafe { Avx2($operation($($operand.0),+), $operation($($operand.1),+)) }
    };
}

// SAFETY: only the entries below create an `Avx2`.
unsafe impl Vector for Avx2 {
    // A vector takes two of the 16 registers, so 2 rows times two panels are 8 of them.
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for elements and instructions.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for elements and instructions.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for elements and instructions.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u32) -> [Self; 2] {
        // SAFETY: the caller vouches for elements and instructions.
        unsafe {
            let low = _mm256_loadu_si256(from.cast());
            let high = _mm256_loadu_si256(from.add(8).cast());
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                Self(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ),
                Self(
                    _mm256_castsi256_ps(_mm256_and_si256(low, upper)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, upper)),
                ),
            ]
        }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller vouches for the instructions.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for room for 16 elements.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        both!(_mm256_fmadd_ps, self, by, plus)
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        both!(_mm256_add_ps, self, other)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        both!(_mm256_sub_ps, self, other)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        both!(_mm256_mul_ps, self, other)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        both!(_mm256_div_ps, self, other)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        both!(_mm256_max_ps, self, other)
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        both!(_mm256_min_ps, self, other)
    }

    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: the existence of `self` proves that the machine has the instructions.
        unsafe { Self(_mm256_round_ps::<0>(self.0), _mm256_round_ps::<0>(self.1)) }
    }

    #[inline(always)]
    fn scale_by_power(self, exponent: Self) -> Self {
        // SAFETY: the existence of `self` proves that the machine has the instructions.
        unsafe { Self(scale(self.0, exponent.0), scale(self.1, exponent.1)) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: the existence of `self` proves that the machine has the instructions.
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: the existence of `self` proves that the machine has the instructions.
        unsafe {
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}

/// Multiplies by a power of two.
///
/// # Safety
/// The machine must have AVX2.
#[inline(always)]
unsafe fn scale(value: __m256, exponent: __m256) -> __m256 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        // 127 is the bias of an f32's exponent, which begins at bit 23.
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
        _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
    }
}

entries!(Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
