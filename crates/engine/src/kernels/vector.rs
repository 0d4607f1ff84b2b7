//! The abstraction of sixteen f32 lanes over the registers of a machine.

use super::LANES;

/// Sixteen lanes of f32. Every method compiles to a few instructions inside a function
/// that enables the implementation's target features.
///
/// # Safety
/// A value may be created only on machines that have the implementation's instructions:
/// methods without `unsafe` rely on it.
pub(crate) unsafe trait Vector: Copy {
    /// Rows of tokens that a kernel holds in registers beside two panels.
    const ROWS: usize;

    /// Loads sixteen f32 elements.
    ///
    /// # Safety
    /// `from` must have 16 elements, of any alignment. The machine must have the
    /// instructions.
    unsafe fn load(from: *const f32) -> Self;
    /// Loads sixteen IEEE half-precision elements.
    ///
    /// # Safety
    /// The conditions of [`Vector::load`].
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Loads sixteen bf16 elements.
    ///
    /// # Safety
    /// The conditions of [`Vector::load`].
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Loads sixteen pairs of bf16: the lower halves, then the upper halves.
    ///
    /// # Safety
    /// The conditions of [`Vector::load`].
    unsafe fn load_bf16_pairs(from: *const u32) -> [Self; 2];
    /// Sets every lane to `value`.
    ///
    /// # Safety
    /// The machine must have the instructions.
    unsafe fn splat(value: f32) -> Self;
    /// Stores the lanes.
    ///
    /// # Safety
    /// `to` must have room for 16 elements, of any alignment.
    unsafe fn store(self, to: *mut f32);

    /// Returns `self * by + plus`.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// Rounds to the nearest whole number, ties to even.
    fn round(self) -> Self;
    /// Returns `self * 2^exponent` for whole exponents in -126..=127.
    fn scale_by_power(self, exponent: Self) -> Self;
    /// Returns the sum of all lanes.
    fn sum(self) -> f32;
    /// Returns the largest lane.
    fn largest(self) -> f32;

    /// Rounds to the nearest bf16, ties to even, and stores the lanes.
    ///
    /// # Safety
    /// The conditions of [`Vector::store`].
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

    /// Returns `e^self`, accurate to about two units in the last place; 0 or tiny for
    /// inputs far below 0.
    #[inline(always)]
    fn exp(self) -> Self {
        // SAFETY: the existence of `self` proves that the machine has the instructions.
        unsafe {
            // The bounds keep 2^n within the normal range of f32.
            let x = self.max(Self::splat(-87.3)).min(Self::splat(88.0));
            let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            // ln 2 is split into two parts, so that the remainder is exact.
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

    /// Returns `x * sigmoid(x)`.
    #[inline(always)]
    fn silu(self) -> Self {
        // SAFETY: the existence of `self` proves that the machine has the instructions.
        unsafe {
            let one = Self::splat(1.0);
            let minus = Self::splat(0.0).sub(self);
            self.div(one.add(minus.exp()))
        }
    }
}

/// Returns the bits of the nearest bf16, ties to even. A NaN stays a NaN.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Cutting bits off a NaN could leave infinity; the set bit keeps it a quiet
        // NaN.
        return (bits >> 16) as u16 | 0x40;
    }
    // One less than half of the last kept bit, and one more if that bit is odd: ties go to even.
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
