//! Most likely tokens of a row of logits, and the row's normaliser. NaN counts as minus
//! infinity; ties go to the smaller id.

use super::exponential::sum_of_exponentials;

/// Returns the most likely token, or `None` if no logit is above minus infinity.
pub(super) fn argmax(row: &[f32]) -> Option<u32> {
    let highest = highest(row);
    if highest == f32::NEG_INFINITY {
        return None;
    }
    row.iter().position(|&logit| logit == highest).map(|token| token as u32)
}

/// Returns the logarithm of the sum of exp over the row.
pub(super) fn log_sum_exp(row: &[f32]) -> f64 {
    let highest = bounded(highest(row));
    if highest == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let sum = sum_of_exponentials(row, highest);
    f64::from(highest) + sum.ln()
}

/// Returns the `count` most likely tokens and their logits, most likely first.
pub(super) fn top(row: &[f32], count: usize) -> Vec<(u32, f32)> {
    let count = count.min(row.len());
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return best;
    }
    let mut least = f32::NEG_INFINITY;
    for (token, &logit) in row.iter().enumerate() {
        let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        // An equal logit of a later token stays out, because ties go to the smaller id.
        if best.len() == count && logit <= least {
            continue;
        }
        let at = best.partition_point(|&(_, other)| other >= logit);
        best.insert(at, (token as u32, logit));
        best.truncate(count);
        least = best[best.len() - 1].1;
    }
    best
}

/// Returns the logit, or the largest finite number for infinity. NaN stays NaN.
pub(super) fn bounded(logit: f32) -> f32 {
    if logit > f32::MAX { f32::MAX } else { logit }
}

fn highest(row: &[f32]) -> f32 {
    // Independent lanes let the compiler use vector instructions.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = row.chunks_exact(lanes.len());
    let rest = chunks.remainder();
    let higher = |a: f32, b: f32| if b > a { b } else { a };
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = higher(*lane, logit);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, higher)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: f32 = f32::NEG_INFINITY;

    #[test]
    fn argmax_finds_first_of_highest() {
        let mut long = vec![0.0; 1_000];
        long[777] = 3.0;
        long[900] = 3.0;
        for (row, expected) in [
            (vec![], None),
            (vec![f32::NAN, NONE], None),
            (vec![f32::NAN, -5.0, f32::NAN], Some(1)),
            (vec![1.0, f32::INFINITY, 2.0], Some(1)),
            (vec![2.0, 2.0], Some(0)),
            (long, Some(777)),
        ] {
            assert_eq!(argmax(&row), expected, "{row:?}");
        }
    }

    #[test]
    fn top_lists_tokens_in_order() {
        let row = [0.5, f32::NAN, 2.0, 0.5, 3.0, NONE];
        for (count, expected) in
            [(0, vec![]), (1, vec![4]), (4, vec![4, 2, 0, 3]), (99, vec![4, 2, 0, 3, 1, 5])]
        {
            let tokens: Vec<u32> = top(&row, count).into_iter().map(|(token, _)| token).collect();
            assert_eq!(tokens, expected, "{count}");
        }
    }

    #[test]
    fn log_sum_exp_ignores_nan() {
        let row = [1.0f32, 2.0, f32::NAN, 3.0];
        let expected = (1f64.exp() + 2f64.exp() + 3f64.exp()).ln();
        assert!((log_sum_exp(&row) - expected).abs() < 1e-6);
        assert_eq!(log_sum_exp(&[NONE, f32::NAN]), f64::NEG_INFINITY);
    }
}
