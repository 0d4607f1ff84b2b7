//! Sixteen f32 lanes, however a machine holds them.

use super::LANES;

/// Sixteen lanes of f32. Every method compiles to a few instructions inside
/// a function that enables the implementation's target features.
///
/// # Safety
/// A value must only come to be where the instructions of the implementation
/// are there: methods without `unsafe` rely on it.
pub(crate) unsafe trait Vector: Copy {
    /// How many rows of tokens a kernel holds in registers with two panels.
    const ROWS: usize;

    /// # Safety
    /// `from` has 16 elements, of any alignment; the instructions are there.
    unsafe fn load(from: *const f32) -> Self;
    /// Sixteen IEEE halves.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Sixteen bf16.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Sixteen pairs of bf16: the lower halves, then the upper halves.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load_bf16_pairs(from: *const u32) -> [Self; 2];
    /// # Safety
    /// The instructions are there.
    unsafe fn splat(value: f32) -> Self;
    /// # Safety
    /// `to` has room for 16 elements, of any alignment.
    unsafe fn store(self, to: *mut f32);

    /// `self * by + plus`.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// To the nearest whole number, ties to even.
    fn round(self) -> Self;
    /// `self * 2^exponent` for whole exponents in -126..=127.
    fn scale_by_power(self, exponent: Self) -> Self;
    /// Of all lanes.
    fn sum(self) -> f32;
    /// Of all lanes.
    fn largest(self) -> f32;

    /// Rounds to the nearest bf16, ties to even.
    ///
    /// # Safety
    /// As [`Vector::store`].
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let mut lanes = [0.0_f32; LANES];
        // SAFETY: the array has 16 lanes; the caller vouches for `to`.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (index, lane) in lanes.iter().enumerate() {
                to.add(index).write(bf16_bits(*lane));
            }
        }
    }

    /// `e^self` to about two units in the last place; 0 or tiny far below 0.
    #[inline(always)]
    fn exp(self) -> Self {
        // SAFETY: `self` is proof that the instructions are there.
        unsafe {
            let x = self.max(Self::splat(-87.3)).min(Self::splat(88.0));
            let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            // ln 2 in two parts, so that the remainder is exact.
            let r = n.mul_add(Self::splat(-0.693_359_4), x);
            let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.mul_add(r, Self::splat(coefficient));
            }
            let p = p.mul_add(r.mul(r), r).add(Self::splat(1.0));
            p.scale_by_power(n)
        }
    }

    /// `x * sigmoid(x)`.
    #[inline(always)]
    fn silu(self) -> Self {
        // SAFETY: `self` is proof that the instructions are there.
        unsafe {
            let one = Self::splat(1.0);
            let minus = Self::splat(0.0).sub(self);
            self.div(one.add(minus.exp()))
        }
    }
}

/// The bits of the nearest bf16, ties to even; a NaN stays one.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
