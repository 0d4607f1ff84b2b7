//! Random numbers without state. A number is a function of a seed and a counter (Salmon et
//! al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), mixed like in SplitMix64
//! (Steele, Lea, Flood, OOPSLA 2014).

/// Returns the seed of choice `choice` of a request with `seed`. The first choice has the
/// seed of the request, so a request for one choice gives the first of many.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    if choice == 0 { seed } else { mix(seed ^ mix(u64::from(choice))) }
}

/// Returns a number in 0..1 for a position in a stream.
pub(super) fn uniform(seed: u64, position: u32) -> f64 {
    let bits = mix(mix(seed).wrapping_add((u64::from(position) + 1).wrapping_mul(GOLDEN)));
    // 53 bits fill the mantissa of an f64, so every result is exact and below 1.
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GOLDEN);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// 2^64 divided by the golden ratio, rounded to an odd number.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_and_seeds_are_independent() {
        let mean = |numbers: &[f64]| numbers.iter().sum::<f64>() / numbers.len() as f64;
        let by_place: Vec<f64> = (0..10_000).map(|place| uniform(42, place)).collect();
        let by_seed: Vec<f64> = (0..10_000).map(|seed| uniform(seed, 3)).collect();
        let by_choice: Vec<f64> =
            (0..10_000).map(|choice| uniform(choice_seed(7, choice), 0)).collect();
        for numbers in [&by_place, &by_seed, &by_choice] {
            assert!(numbers.iter().all(|number| (0.0..1.0).contains(number)));
            // Six standard errors of a mean of 10,000.
            assert!((mean(numbers) - 0.5).abs() < 0.018);
            let neighbours: Vec<f64> =
                numbers.windows(2).map(|pair| (pair[0] - 0.5) * (pair[1] - 0.5)).collect();
            assert!(mean(&neighbours).abs() < 0.005);
        }
    }

    #[test]
    fn first_choice_has_the_seed_of_request() {
        assert_eq!(choice_seed(5, 0), 5);
        assert_ne!(choice_seed(5, 1), choice_seed(6, 1));
    }
}
