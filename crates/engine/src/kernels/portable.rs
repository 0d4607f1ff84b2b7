//! Sixteen lanes as an array. The code is correct on any machine, and simple enough for
//! the compiler to use NEON or SSE.

use super::LANES;
use super::instructions::entries;
use super::vector::Vector;

#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

macro_rules! lanes {
    ($index:ident => $value:expr) => {{
        let mut lanes = [0.0_f32; LANES];
        let mut $index = 0;
        while $index < LANES {
            lanes[$index] = $value;
            $index += 1;
        }
        Portable(lanes)
    }};
}

// SAFETY: the implementation needs no instructions beyond the target's baseline.
unsafe impl Vector for Portable {
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 16 elements.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 16 elements.
        let halves = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(i => half::f16::from_bits(halves[i]).to_f32())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 16 elements.
        let halves = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from(halves[i]) << 16))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u32) -> [Self; 2] {
        // SAFETY: the caller vouches for 16 elements.
        let pairs = unsafe { from.cast::<[u32; LANES]>().read_unaligned() };
        [
            lanes!(i => f32::from_bits(pairs[i] << 16)),
            lanes!(i => f32::from_bits(pairs[i] & 0xffff_0000)),
        ]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for room for 16 elements.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        // Without hardware support, a fused multiply-add is a slow library call.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            lanes!(i => self.0[i].mul_add(by.0[i], plus.0[i]))
        } else {
            lanes!(i => self.0[i] * by.0[i] + plus.0[i])
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        lanes!(i => self.0[i] + other.0[i])
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        lanes!(i => self.0[i] - other.0[i])
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        lanes!(i => self.0[i] * other.0[i])
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        lanes!(i => self.0[i] / other.0[i])
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        lanes!(i => if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        lanes!(i => if self.0[i] < other.0[i] { self.0[i] } else { other.0[i] })
    }

    #[inline(always)]
    fn round(self) -> Self {
        // Adding 1.5 * 2^23 leaves no bits for a fraction; |x| is far below that
        // number.
        const SHIFT: f32 = 12_582_912.0;
        lanes!(i => (self.0[i] + SHIFT) - SHIFT)
    }

    #[inline(always)]
    fn scale_by_power(self, exponent: Self) -> Self {
        lanes!(i => self.0[i] * f32::from_bits(((exponent.0[i] as i32 + 127) << 23) as u32))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let mut sums = self.0;
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
            half /= 2;
        }
        sums[0]
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

entries!(Portable);
