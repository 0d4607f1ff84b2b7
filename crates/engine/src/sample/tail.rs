//! `top_k` and `top_p`: the likeliest tokens, so many of them or the smallest
//! set whose weights reach a part of the whole.
//!
//! Positive floats are ordered as their bits are, so a histogram over the top
//! bits finds in one pass where the set ends; only the bucket that straddles
//! the end is sorted.

/// How much of a row is kept.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    /// So many tokens, at least 1.
    Count(u32),
    /// Tokens that together reach this part of all weights.
    Part(f32),
}

impl Kept {
    /// What one token adds.
    fn mass(self, weight: f32) -> f64 {
        match self {
            Self::Count(_) => f64::from(u8::from(weight > 0.0)),
            Self::Part(_) => f64::from(weight),
        }
    }

    /// What those that are kept reach, of all together.
    fn wanted(self, all: f64) -> f64 {
        match self {
            Self::Count(most) => f64::from(most).min(all),
            Self::Part(part) => f64::from(part) * all,
        }
    }
}

/// Cuts the tail off weights; keeps its memory between rows.
#[derive(Debug)]
pub(super) struct Tail {
    /// Sum of what the weights in each bucket add.
    mass: Vec<f64>,
    /// The weights of the straddling bucket, with their tokens.
    edge: Vec<(f32, u32)>,
}

impl Default for Tail {
    fn default() -> Self {
        Self { mass: vec![0.0; BUCKETS], edge: Vec::new() }
    }
}

impl Tail {
    /// Sets every weight outside what is kept to 0. Weights are 0 to 1 and
    /// numbers. A token of the largest weight always stays; of equal ones the
    /// smaller id goes first.
    pub(super) fn cut(&mut self, weights: &mut [f32], kept: Kept) {
        self.mass.fill(0.0);
        for &weight in weights.iter() {
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

    /// The highest bucket at which those so far reach `wanted`, and the sum of
    /// those above it.
    fn straddling(&self, wanted: f64) -> Option<(usize, f64)> {
        let mut above = 0.0;
        for bucket in (0..BUCKETS).rev() {
            let mass = self.mass[bucket];
            if mass > 0.0 && above + mass >= wanted {
                return Some((bucket, above));
            }
            above += mass;
        }
        None // by rounding: the whole falls short of itself, all stay
    }

    /// The least likely token of the bucket that is still within.
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
        self.edge.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut sum = 0.0;
        for &(weight, token) in &self.edge {
            sum += kept.mass(weight);
            if sum >= wanted {
                return (weight, token);
            }
        }
        self.edge.last().copied().unwrap_or((0.0, u32::MAX))
    }
}

fn bucket(weight: f32) -> usize {
    ((weight.to_bits() >> BUCKET_SHIFT) as usize).min(BUCKETS - 1)
}

/// Eight buckets for each power of two.
const BUCKET_SHIFT: u32 = 20;
/// Up to and with the bucket of 1.0.
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
    fn keeps_the_smallest_set_that_reaches_the_part() {
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
    fn keeps_so_many_of_the_likeliest() {
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
        fn counts_as_sorting_everything_does(
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
        fn agrees_with_sorting_everything(
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
            // Sums in another order may differ by a crumb at the very edge.
            let difference = found.len().abs_diff(expected.len());
            let close = (sum - wanted).abs() < 1e-9;
            prop_assert!(found == expected || (difference <= 1 && close));
        }
    }
}
