//! Least-squares fit of two rates to a few measured steps.

/// The attention work of a step and its measured time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Bytes of KV read.
    pub(super) kv_bytes: f64,
    /// Floating-point operations of attention.
    pub(super) flop: f64,
    /// Time beyond that of the linear layers, ns. Noise may make it negative.
    pub(super) ns: f64,
    /// Time of the whole step, ns. The noise is proportional to it.
    pub(super) of: f64,
}

/// Returns ns per byte of KV and ns per operation, both at least 0: the pair with the least
/// weighted squared error. The weight of a sample is its accuracy.
pub(super) fn attention_rates(samples: &[Sample]) -> (f64, f64) {
    let weight = |sample: &Sample| 1.0 / sample.of.max(1.0).powi(2);
    let sum = |term: fn(&Sample) -> f64| -> f64 {
        samples.iter().map(|sample| weight(sample) * term(sample)).sum()
    };
    let bytes_bytes = sum(|s| s.kv_bytes * s.kv_bytes);
    let flop_flop = sum(|s| s.flop * s.flop);
    let bytes_flop = sum(|s| s.kv_bytes * s.flop);
    let bytes_ns = sum(|s| s.kv_bytes * s.ns);
    let flop_ns = sum(|s| s.flop * s.ns);
    let determinant = bytes_bytes * flop_flop - bytes_flop * bytes_flop;
    // A determinant near zero means that the samples cannot separate the two rates.
    if determinant > f64::EPSILON * bytes_bytes * flop_flop {
        let by_bytes = (bytes_ns * flop_flop - flop_ns * bytes_flop) / determinant;
        let by_flop = (flop_ns * bytes_bytes - bytes_ns * bytes_flop) / determinant;
        if by_bytes >= 0.0 && by_flop >= 0.0 {
            return (by_bytes, by_flop);
        }
    }
    // One rate alone: the one that leaves the smaller error.
    let alone = |with_ns: f64, with_itself: f64| {
        if with_itself > 0.0 { (with_ns / with_itself).max(0.0) } else { 0.0 }
    };
    let (by_bytes, by_flop) = (alone(bytes_ns, bytes_bytes), alone(flop_ns, flop_flop));
    // This product is what the rate alone takes off the squared error.
    if by_bytes * bytes_ns >= by_flop * flop_ns { (by_bytes, 0.0) } else { (0.0, by_flop) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(kv_bytes: f64, flop: f64, ns: f64) -> Sample {
        Sample { kv_bytes, flop, ns, of: ns.abs() + 1_000.0 }
    }

    #[test]
    fn fit_finds_both_rates() {
        let of = |bytes: f64, flop: f64| sample(bytes, flop, 0.02 * bytes + 0.001 * flop);
        let samples = [of(1e5, 1e5), of(1e6, 1e6), of(1e5, 6e6), of(1e6, 6e7)];
        let (by_bytes, by_flop) = attention_rates(&samples);
        assert!((by_bytes - 0.02).abs() < 1e-9 && (by_flop - 0.001).abs() < 1e-9);
    }

    #[test]
    fn fitted_rates_are_never_negative() {
        for samples in [
            vec![],
            vec![sample(1e5, 1e5, -50.0)],
            vec![sample(1e5, 1e5, 500.0), sample(2e5, 2e5, 1_000.0)],
            vec![sample(1e5, 1e5, 900.0), sample(1e5, 6e6, 100.0)],
            vec![sample(1e6, 1e6, 0.0), sample(1e5, 6e6, 100.0)],
            vec![sample(0.0, 0.0, 10.0)],
        ] {
            let (by_bytes, by_flop) = attention_rates(&samples);
            assert!(by_bytes >= 0.0 && by_flop >= 0.0, "{samples:?}");
            assert!(by_bytes.is_finite() && by_flop.is_finite(), "{samples:?}");
        }
    }
}
