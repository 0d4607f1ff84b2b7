//! Sixteen lanes in one AVX-512 register.

use std::arch::x86_64::*;

use super::instructions::entries;
use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct Avx512(pub(super) __m512);

/// Applies an intrinsic to values whose existence proves that the machine has it.
macro_rules! on {
    ($operation:expr) => {
        // SAFETY: an `Avx512` is created only in entries that are chosen after AVX-512F
        // was detected.
        unsafe { $operation }
    };
}

// SAFETY: only the entries below create an `Avx512`.
unsafe impl Vector for Avx512 {
    // 8 rows times two panels are 16 sums, half of the 32 registers.
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for elements and instructions.
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for elements and instructions.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for elements and instructions.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u32) -> [Self; 2] {
        // SAFETY: the caller vouches for elements and instructions.
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            let upper = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))),
                Self(_mm512_castsi512_ps(upper)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller vouches for the instructions.
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for room for 16 elements.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Self(on!(_mm512_fmadd_ps(self.0, by.0, plus.0)))
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(on!(_mm512_add_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(on!(_mm512_sub_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(on!(_mm512_mul_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(on!(_mm512_div_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(on!(_mm512_max_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(on!(_mm512_min_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn round(self) -> Self {
        // 0 rounds to the nearest whole number, ties to even.
        Self(on!(_mm512_roundscale_ps::<0>(self.0)))
    }

    #[inline(always)]
    fn scale_by_power(self, exponent: Self) -> Self {
        Self(on!(_mm512_scalef_ps(self.0, exponent.0)))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        on!(_mm512_reduce_add_ps(self.0))
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        on!(_mm512_reduce_max_ps(self.0))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // Ties to even by hand: AVX-512F alone cannot round to bf16.
        // SAFETY: the caller vouches for room for 16 elements.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
            let narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(chosen));
            _mm256_storeu_si256(to.cast(), narrow);
        }
    }
}

entries!(Avx512, #[target_feature(enable = "avx512f,avx2,fma,f16c")]);
