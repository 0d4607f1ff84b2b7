//! `top_k` and `top_p`: keep a number of most likely tokens, or the smallest set whose
//! weights reach a part of the whole.
//!
//! Positive floats are ordered like their bits. A histogram over the top bits finds in one
//! pass the bucket in which the set ends, and only this bucket is sorted.

/// The amount of a row that is kept.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    /// A number of tokens, at least 1.
    Count(u32),
    /// The tokens that together reach this part of all weights.
    Part(f32),
}

impl Kept {
    /// Returns the amount that one token adds.
    fn mass(self, weight: f32) -> f64 {
        match self {
            Self::Count(_) => f64::from(u8::from(weight > 0.0)),
            Self::Part(_) => f64::from(weight),
        }
    }

    /// Returns the amount that the kept tokens must reach, given the amount of all tokens.
    fn wanted(self, all: f64) -> f64 {
        match self {
            Self::Count(most) => f64::from(most).min(all),
            Self::Part(part) => f64::from(part) * all,
        }
    }
}

/// Cutter of the tail of weights. Keeps its memory between rows.
#[derive(Debug)]
pub(super) struct Tail {
    /// Amounts of the weights in each bucket.
    mass: Vec<f64>,
    /// Weights of the bucket in which the set ends, with their tokens.
    edge: Vec<(f32, u32)>,
}

impl Default for Tail {
    fn default() -> Self {
        Self { mass: vec![0.0; BUCKETS], edge: Vec::new() }
    }
}

impl Tail {
    /// Sets every weight outside the kept set to 0. Weights are numbers from 0 to 1. A
    /// token with the largest weight always stays. Of equal weights the smaller id stays
    /// first.
    pub(super) fn cut(&mut self, weights: &mut [f32], kept: Kept) {
        self.mass.fill(0.0);
        for &weight in weights.iter() {
            // One pass over the row; sorting a vocabulary of 150,000 tokens would dominate
            // the step.
            self.mass[bucket(weight)] += kept.mass(weight);
        }
        let wanted = kept.wanted(self.mass.iter().sum());
        let Some((straddling, above)) = self.straddling(wanted) else { return };
        let last = self.last_kept(weights, straddling, kept, wanted - above);
        for (token, weight) in weights.iter_mut().enumerate() {
            let keep = *weight > last.0 || (*weight == last.0 && token as u32 <= last.1);
            if !keep {
                *weight = 0.0;
            }
        }
    }

    /// Returns the highest bucket at which the sum from above reaches `wanted`, and the sum
    /// of the buckets above it.
    fn straddling(&self, wanted: f64) -> Option<(usize, f64)> {
        let mut above = 0.0;
        for bucket in (0..BUCKETS).rev() {
            let mass = self.mass[bucket];
            // An empty bucket has no token that could be the last one kept.
            if mass > 0.0 && above + mass >= wanted {
                return Some((bucket, above));
            }
            above += mass;
        }
        None // by rounding the sum falls short of the whole; all tokens stay
    }

    /// Returns the least likely token of the bucket that is still kept.
    fn last_kept(
        &mut self,
        weights: &[f32],
        straddling: usize,
        kept: Kept,
        wanted: f64,
    ) -> (f32, u32) {
        self.edge.clear();
        self.edge.extend(
            weights
                .iter()
                .enumerate()
                .filter(|&(_, &weight)| bucket(weight) == straddling)
                .map(|(token, &weight)| (weight, token as u32)),
        );
        // Ties are broken by id, so the result does not depend on the sort.
        self.edge.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut sum = 0.0;
        for &(weight, token) in &self.edge {
            sum += kept.mass(weight);
            if sum >= wanted {
                return (weight, token);
            }
        }
        // Rounding can keep the sum below what is wanted; then all of the bucket stays.
        self.edge.last().copied().unwrap_or((0.0, u32::MAX))
    }
}

fn bucket(weight: f32) -> usize {
    ((weight.to_bits() >> BUCKET_SHIFT) as usize).min(BUCKETS - 1)
}

/// Shift that gives eight buckets for each power of two.
const BUCKET_SHIFT: u32 = 20;
/// Number of buckets, up to the bucket of 1.0.
const BUCKETS: usize = (0x3f80_0000 >> BUCKET_SHIFT) + 1;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(weights: &[f32], kept: Kept) -> Vec<u32> {
        let mut weights = weights.to_vec();
        Tail::default().cut(&mut weights, kept);
        (0..weights.len()).filter(|&i| weights[i] > 0.0).map(|i| i as u32).collect()
    }

    #[test]
    fn top_p_keeps_smallest_set_that_reaches_part() {
        let weights = [0.25, 1.0, 0.5, 0.25];
        for (part, expected) in [
            (0.0, vec![1]),
            (0.5, vec![1]),
            (0.51, vec![1, 2]),
            (0.75, vec![1, 2]),
            (0.76, vec![0, 1, 2]),
            (0.99, vec![0, 1, 2, 3]),
        ] {
            assert_eq!(kept(&weights, Kept::Part(part)), expected, "{part}");
        }
    }

    #[test]
    fn top_k_keeps_most_likely_tokens() {
        let weights = [0.25, 1.0, 0.5, 0.25, 0.0];
        for (count, expected) in [
            (1, vec![1]),
            (2, vec![1, 2]),
            (3, vec![0, 1, 2]),
            (4, vec![0, 1, 2, 3]),
            (5, vec![0, 1, 2, 3]),
            (u32::MAX, vec![0, 1, 2, 3]),
        ] {
            assert_eq!(kept(&weights, Kept::Count(count)), expected, "{count}");
        }
    }

    proptest! {
        #[test]
        fn top_k_agrees_with_full_sort(
            weights in prop::collection::vec(
                prop_oneof![0.0f32..1.0, 0.0f32..1e-3, Just(0.5f32), Just(0.0)], 1..200),
            count in 1u32..250,
        ) {
            let mut order: Vec<u32> = (0..weights.len() as u32).collect();
            let weight = |token: &u32| weights[*token as usize];
            order.retain(|token| weight(token) > 0.0);
            order.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(a.cmp(b)));
            order.truncate(count as usize);
            order.sort_unstable();
            prop_assert_eq!(kept(&weights, Kept::Count(count)), order);
        }

        #[test]
        fn top_p_agrees_with_full_sort(
            weights in prop::collection::vec(
                prop_oneof![0.0f32..1.0, 0.0f32..1e-3, Just(0.5f32), Just(0.0)], 1..200),
            part in 0.01f32..0.99,
        ) {
            let mut weights = weights;
            weights[0] = 1.0; // a row's likeliest token has weight 1
            let mut order: Vec<usize> = (0..weights.len()).collect();
            order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
            let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
            let wanted = f64::from(part) * total;
            let (mut sum, mut expected) = (0.0, Vec::new());
            for &i in &order {
                if sum >= wanted { break }
                sum += f64::from(weights[i]);
                expected.push(i as u32);
            }
            expected.sort_unstable();
            let found = kept(&weights, Kept::Part(part));
            // Sums in another order may differ by a rounding error at the edge of the set.
            let difference = found.len().abs_diff(expected.len());
            let close = (sum - wanted).abs() < 1e-9;
            prop_assert!(found == expected || (difference <= 1 && close));
        }
    }
}
