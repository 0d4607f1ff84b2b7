//! Exponentials and sums over a whole vocabulary, written so that the compiler vectorises
//! them.

/// Replaces each logit by `exp((logit - highest) * scale)`, with a relative error of about
/// 2e-7. A result below the smallest normal number, or NaN, becomes 0.
pub(super) fn exponentials(logits: &mut [f32], highest: f32, scale: f32) {
    for logit in logits {
        *logit = exponential((*logit - highest) * scale);
    }
}

/// Returns exp(x) by Cody and Waite's reduction to |r| <= ln(2)/2 and the polynomial of
/// Cephes' `expf` (Moshier), without a branch.
fn exponential(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // The logarithm of 2 has two parts, so that `whole` times the first is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = x - whole * LN2_HIGH - whole * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + coefficient;
    }
    // The low bits of `shifted` are the whole number; 127 is the bias of an f32's exponent.
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    // The comparison is false for NaN, which then gives 0.
    if x > LOWEST { (p * r * r + r + 1.0) * power } else { 0.0 }
}

/// Returns the sum of `exp(logit - highest)` over a row, in double precision. NaN adds
/// nothing.
pub(super) fn sum_of_exponentials(row: &[f32], highest: f32) -> f64 {
    let mut weights = [0.0f32; 64];
    let mut total = 0.0;
    for chunk in row.chunks(weights.len()) {
        let weights = &mut weights[..chunk.len()];
        for (weight, &logit) in weights.iter_mut().zip(chunk) {
            // An infinite logit counts as the largest finite number, which `highest` is then.
            let bounded = if logit > highest { highest } else { logit };
            *weight = exponential(bounded - highest);
        }
        total += sum(weights);
    }
    total
}

/// Returns the sum in double precision. The order of additions depends on the length alone,
/// so the result is reproducible.
pub(super) fn sum(weights: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let chunks = weights.chunks_exact(lanes.len());
    let rest: f64 = chunks.remainder().iter().map(|&weight| f64::from(weight)).sum();
    for chunk in chunks {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(weight);
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// Argument whose exponential is just above the smallest normal f32.
const LOWEST: f32 = -87.3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_agrees_with_the_library() {
        for step in 0..87_000 {
            let x = -(step as f32) / 1_000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exponential(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "{x}: {error}");
        }
        assert_eq!(exponential(0.0), 1.0);
    }

    #[test]
    fn exponential_of_tiny_or_nan_is_zero() {
        for x in [-87.4, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exponential(x), 0.0, "{x}");
        }
    }

    #[test]
    fn sum_counts_every_element_once() {
        for length in [0usize, 1, 7, 8, 9, 256, 1_001] {
            let weights: Vec<f32> = (0..length).map(|i| i as f32).collect();
            assert_eq!(sum(&weights), (length * length.saturating_sub(1) / 2) as f64, "{length}");
        }
    }
}
