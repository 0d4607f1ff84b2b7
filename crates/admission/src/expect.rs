//! Expected length of answers, learned by tenant and model. The expectation makes estimates
//! accurate but not safe: rates correct a wrong estimate by a bounded debt, and caps hold
//! the worst case.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tollgate_domain::{ModelName, TenantId};

/// Resolution of the mean: 1/256 token, so that short answers are learned too.
const FRACTION: u64 = 256;
/// Inverse weight of one answer. An eighth means that about the last twenty answers count.
const DECAY: i64 = 8;
/// Largest length that one answer can count, whatever the worker reports.
const LONGEST: u64 = 1 << 32;

type Means = HashMap<(TenantId, ModelName), u64>;

/// Decaying means of completion tokens. Memory is bounded by two generations of half the
/// capacity each. When the young generation is full, the old one is dropped, so pairs in
/// use stay and idle pairs are forgotten.
#[derive(Debug)]
pub struct ExpectedOutput {
    generation_size: usize,
    first_guess: u64,
    means: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    young: Means,
    old: Means,
}

impl ExpectedOutput {
    /// Creates an empty memory of up to `capacity` pairs, at least two. Unknown pairs are
    /// expected to give `first_guess` tokens.
    pub fn new(capacity: usize, first_guess: u32) -> Self {
        Self {
            generation_size: (capacity / 2).max(1),
            first_guess: u64::from(first_guess),
            means: Mutex::default(),
        }
    }

    /// Returns the expected tokens of one choice: at most `max_tokens`, and at least one if
    /// any are allowed.
    pub fn expect(&self, tenant: &TenantId, model: &ModelName, max_tokens: u32) -> u32 {
        let pair = (tenant.clone(), model.clone());
        let means = self.means.lock().unwrap_or_else(PoisonError::into_inner);
        // The old generation still counts until it is dropped.
        let known = means.young.get(&pair).or_else(|| means.old.get(&pair));
        let tokens = known.map_or(self.first_guess, |mean| mean.div_ceil(FRACTION)).max(1);
        u32::try_from(tokens).unwrap_or(u32::MAX).min(max_tokens)
    }

    /// Learns the length of one choice that ended by itself or by its length limit. Do not
    /// report cancelled choices, because their length means nothing.
    pub fn learn(&self, tenant: &TenantId, model: &ModelName, completion_tokens: u64) {
        let pair = (tenant.clone(), model.clone());
        let seen = completion_tokens.min(LONGEST) * FRACTION;
        let mut means = self.means.lock().unwrap_or_else(PoisonError::into_inner);
        let Generations { young, old } = &mut *means;
        let known = young.get(&pair).or_else(|| old.get(&pair)).copied();
        let mean = known.map_or(seen, |mean| {
            let step = (seen as i64 - mean as i64) / DECAY; // both below 2^40
            mean.saturating_add_signed(step)
        });
        // Checked before the insert, so that a generation never exceeds its size.
        if young.len() >= self.generation_size && !young.contains_key(&pair) {
            *old = std::mem::take(young);
        }
        // Into the young generation, so that a pair in use outlives the old one.
        young.insert(pair, mean);
    }
}

impl Default for ExpectedOutput {
    /// Creates a memory of 16,384 pairs with a first guess of 128 tokens.
    fn default() -> Self {
        Self::new(16_384, 128)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tenant: &str) -> (TenantId, ModelName) {
        (TenantId::new(tenant).unwrap(), ModelName::new("m").unwrap())
    }

    #[test]
    fn expected_output_learns_within_bounds() {
        let expected = ExpectedOutput::new(100, 128);
        let (tenant, model) = names("acme");
        assert_eq!(expected.expect(&tenant, &model, 1_000), 128);
        assert_eq!(expected.expect(&tenant, &model, 16), 16);
        assert_eq!(expected.expect(&tenant, &model, 0), 0);
        expected.learn(&tenant, &model, 10);
        assert_eq!(expected.expect(&tenant, &model, 1_000), 10);
        for _ in 0..100 {
            expected.learn(&tenant, &model, 400);
        }
        let near = expected.expect(&tenant, &model, 1_000);
        assert!((399..=400).contains(&near), "{near}");
        expected.learn(&tenant, &model, u64::MAX);
        assert_eq!(expected.expect(&tenant, &model, 2_048), 2_048);
        for _ in 0..400 {
            expected.learn(&tenant, &model, 0);
        }
        assert_eq!(expected.expect(&tenant, &model, 1_000), 1);
    }

    #[test]
    fn expected_output_forgets_idle_pairs_only() {
        let expected = ExpectedOutput::new(10, 128);
        let (used, model) = names("used");
        for other in 0..1_000 {
            expected.learn(&used, &model, 7);
            expected.learn(&names(&format!("t{other}")).0, &model, 9);
        }
        assert_eq!(expected.expect(&used, &model, 1_000), 7);
        assert_eq!(expected.expect(&names("t0").0, &model, 1_000), 128);
        let means = expected.means.lock().unwrap();
        assert!(means.young.len() + means.old.len() <= 10);
    }
}
