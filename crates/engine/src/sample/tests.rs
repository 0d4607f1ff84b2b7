//! Samples from rows with a known distribution.

use super::*;

fn plain() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_k: None,
        top_p: 1.0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: Vec::new(),
        seed: 0,
        top_logprobs: None,
        stop_tokens: Vec::new(),
        ignores_end: false,
        grammar: None,
    }
}

fn draw(row: &[f32], params: &SamplingParams, seed: u64, counts: &TokenCounts) -> Option<u32> {
    let point = SamplingPoint { seed, position: 0, counts, prompt: &[], constraint: None };
    Sampler::default().sample(row, params, point, None).map(|drawn| drawn.token)
}

/// Returns the frequency of each token over many seeds.
fn shares(row: &[f32], params: &SamplingParams) -> Vec<f64> {
    const DRAWS: u64 = 20_000;
    let (mut sampler, counts) = (Sampler::default(), TokenCounts::default());
    let mut seen = vec![0u64; row.len()];
    for seed in 0..DRAWS {
        let point =
            SamplingPoint { seed, position: 9, counts: &counts, prompt: &[], constraint: None };
        let drawn = sampler.sample(row, params, point, None).expect("there is something to draw");
        seen[drawn.token as usize] += 1;
    }
    seen.into_iter().map(|count| count as f64 / DRAWS as f64).collect()
}

fn softmax(row: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = row.iter().map(|&l| (f64::from(l) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

#[test]
fn draws_follow_the_distribution() {
    let row: Vec<f32> =
        (0..600).map(|i| if i % 100 == 7 { (i / 100) as f32 } else { -30.0 }).collect();
    for temperature in [0.5f32, 1.0, 2.0] {
        let expected = softmax(&row, f64::from(temperature));
        let found = shares(&row, &SamplingParams { temperature, ..plain() });
        for (token, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Five standard errors of 20,000 samples.
            assert!((found - expected).abs() < 0.018, "{temperature} {token}: {found} {expected}");
        }
    }
}

#[test]
fn top_p_cuts_the_tail() {
    let row = [0.5f32.ln(), 0.3f32.ln(), 0.15f32.ln(), 0.05f32.ln()];
    for (top_p, kept) in [(0.0, 1), (0.4, 1), (0.7, 2), (0.9, 3), (0.99, 4), (1.0, 4)] {
        let found = shares(&row, &SamplingParams { top_p, ..plain() });
        let drawn = found.iter().filter(|&&share| share > 0.0).count();
        assert_eq!(drawn, kept, "{top_p}: {found:?}");
    }
}

#[test]
fn top_k_cuts_before_top_p_does() {
    let row = [0.15f32.ln(), 0.5f32.ln(), 0.05f32.ln(), 0.3f32.ln()];
    let cases: [(u32, f32, &[usize]); 6] = [
        (1, 1.0, &[1]),
        (2, 1.0, &[1, 3]),
        (3, 1.0, &[0, 1, 3]),
        (9, 1.0, &[0, 1, 2, 3]),
        // The first two hold 0.8 of the weight, and the first holds 0.63 of that.
        (2, 0.6, &[1]),
        (4, 0.6, &[1, 3]),
    ];
    for (top_k, top_p, kept) in cases {
        let params = SamplingParams { top_k: NonZeroU32::new(top_k), top_p, ..plain() };
        let found = shares(&row, &params);
        let drawn: Vec<usize> = (0..row.len()).filter(|&token| found[token] > 0.0).collect();
        assert_eq!(drawn, kept, "{top_k} {top_p}: {found:?}");
    }
}

#[test]
fn min_p_cuts_before_top_k() {
    // Beside the likeliest token, the others have 0.5, 0.25 and 0.125 of its weight, and
    // half of the temperature squares these parts.
    let row = [0.25f32.ln(), 1.0f32.ln(), 0.125f32.ln(), 0.5f32.ln()];
    let cases: [(f32, f32, u32, f32, &[usize]); 9] = [
        (0.0, 1.0, 0, 1.0, &[0, 1, 2, 3]),
        (0.12, 1.0, 0, 1.0, &[0, 1, 2, 3]),
        (0.13, 1.0, 0, 1.0, &[0, 1, 3]),
        (0.26, 1.0, 0, 1.0, &[1, 3]),
        (1.0, 1.0, 0, 1.0, &[1]),
        (0.13, 0.5, 0, 1.0, &[1, 3]),
        (0.13, 1.0, 2, 1.0, &[1, 3]),
        (0.26, 1.0, 3, 1.0, &[1, 3]),
        // All four hold 1.875, and the first 0.53 of that; the first two hold 1.5, and
        // the first 0.67 of that.
        (0.26, 1.0, 0, 0.6, &[1]),
    ];
    for (min_p, temperature, top_k, top_p, kept) in cases {
        let top_k = NonZeroU32::new(top_k);
        let params = SamplingParams { min_p, temperature, top_k, top_p, ..plain() };
        let found = shares(&row, &params);
        let drawn: Vec<usize> = (0..row.len()).filter(|&token| found[token] > 0.0).collect();
        assert_eq!(drawn, kept, "{min_p} {temperature} {top_k:?} {top_p}: {found:?}");
    }
}

#[test]
fn greedy_takes_the_likeliest_after_penalties_and_biases() {
    let row = [1.0, 3.0, 2.5, f32::NAN];
    let mut counts = TokenCounts::default();
    for _ in 0..2 {
        counts.add(1);
    }
    let none = TokenCounts::default();
    let greedy = SamplingParams { temperature: 0.0, ..plain() };
    let cases = [
        (greedy.clone(), &counts, 1),
        (SamplingParams { presence_penalty: 0.4, ..greedy.clone() }, &counts, 1),
        (SamplingParams { presence_penalty: 0.6, ..greedy.clone() }, &counts, 2),
        (SamplingParams { presence_penalty: 0.6, ..greedy.clone() }, &none, 1),
        (SamplingParams { frequency_penalty: 0.3, ..greedy.clone() }, &counts, 2),
        (SamplingParams { frequency_penalty: 0.2, ..greedy.clone() }, &counts, 1),
        (SamplingParams { logit_bias: vec![(0, 100.0)], ..greedy.clone() }, &counts, 0),
        (SamplingParams { logit_bias: vec![(1, -100.0)], ..greedy.clone() }, &counts, 2),
    ];
    for (params, counts, expected) in cases {
        assert_eq!(draw(&row, &params, 0, counts), Some(expected), "{params:?}");
        let warm = SamplingParams { temperature: 1e-4, ..params };
        assert_eq!(draw(&row, &warm, 0, counts), Some(expected), "{warm:?}");
    }
}

#[test]
fn repetition_penalty_applies_once_to_each_earlier_token() {
    // Token 1 is likeliest, token 3 has the only negative logit.
    let row = [2.0, 4.0, 3.0, -1.0];
    let mut generated = TokenCounts::new();
    (0..5).for_each(|_| generated.add(1));
    let none = TokenCounts::new();
    let by =
        |repetition_penalty| SamplingParams { repetition_penalty, temperature: 0.0, ..plain() };
    let negative = SamplingParams { logit_bias: vec![(0, -3.0), (1, -9.0), (2, -9.0)], ..by(2.0) };
    let both = SamplingParams { presence_penalty: 0.5, ..by(1.25) };
    let cases: [(&str, SamplingParams, &TokenCounts, &[u32], u32); 9] = [
        ("no penalty", by(1.0), &generated, &[1], 1),
        ("neither in prompt nor in answer", by(5.0), &none, &[], 1),
        ("generated: 4 / 1.3 is above 3, whatever the count", by(1.3), &generated, &[], 1),
        ("generated: 4 / 1.4 is below 3", by(1.4), &generated, &[], 2),
        ("in the prompt", by(1.4), &none, &[0, 1], 2),
        ("in both: once, so 4 / 1.3 stays above 3", by(1.3), &generated, &[1], 1),
        ("below 1 favours what was there", by(0.5), &none, &[2], 2),
        ("4 / 1.25 - 0.5 is below 3", both, &generated, &[1], 2),
        // Biased to -1, -5, -6 and -1: token 0 becomes -2, so token 3 is likeliest.
        ("a negative logit is multiplied", negative, &none, &[0], 3),
    ];
    for (name, params, counts, prompt, expected) in cases {
        let point = SamplingPoint { seed: 0, position: 0, counts, prompt, constraint: None };
        let token = Sampler::default().sample(&row, &params, point, None).map(|drawn| drawn.token);
        assert_eq!(token, Some(expected), "{name}");
    }
}

#[test]
fn broken_rows_are_no_token_and_no_panic() {
    let none = TokenCounts::default();
    let (nan, low, high) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    for (row, expected) in [
        (vec![nan, nan], None),
        (vec![low, nan], None),
        (vec![], None),
        (vec![nan, 0.0, low], Some(1)),
        (vec![0.0, high, nan], Some(1)),
    ] {
        for (temperature, top_p) in [(0.0, 1.0), (1.0, 1.0), (1.0, 0.5), (2.0, 0.0)] {
            let params = SamplingParams { temperature, top_p, ..plain() };
            assert_eq!(draw(&row, &params, 3, &none), expected, "{row:?} {params:?}");
        }
    }
    let logprobs = token_logprobs(&[nan, high, low, 0.0], 0, 9);
    assert!(logprobs.top.iter().all(|(_, logprob)| logprob.is_finite()));
    assert_eq!(logprobs.logprob, LEAST_LOGPROB);
}

#[test]
fn logprobs_are_the_models_own() {
    let row = [1.0f32, 2.0, 0.0, 2.0];
    let params = SamplingParams {
        temperature: 0.0,
        logit_bias: vec![(2, 50.0)],
        top_logprobs: Some(3),
        ..plain()
    };
    let counts = TokenCounts::default();
    let point =
        SamplingPoint { seed: 0, position: 0, counts: &counts, prompt: &[], constraint: None };
    let drawn = Sampler::default().sample(&row, &params, point, None).expect("a token");
    let logprobs = drawn.logprobs.expect("they were asked for");
    assert_eq!(drawn.token, 2);
    let expected = softmax(&row, 1.0);
    assert!((f64::from(logprobs.logprob) - expected[2].ln()).abs() < 1e-6);
    let tokens: Vec<u32> = logprobs.top.iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [1, 3, 0]);
    for (token, logprob) in logprobs.top {
        assert!((f64::from(logprob) - expected[token as usize].ln()).abs() < 1e-6);
    }
}

#[test]
fn seed_and_position_fix_the_sample() {
    let row: Vec<f32> = (0..1_000).map(|i| (i % 17) as f32 / 8.0).collect();
    let counts = TokenCounts::default();
    let mut warm = Sampler::default();
    let mut different = 0;
    for position in 0..50 {
        let point =
            |seed| SamplingPoint { seed, position, counts: &counts, prompt: &[], constraint: None };
        let fresh = Sampler::default().sample(&row, &plain(), point(1), None);
        assert_eq!(warm.sample(&row, &plain(), point(1), None), fresh);
        different += u32::from(warm.sample(&row, &plain(), point(2), None) != fresh);
    }
    assert!(different > 40);
}

#[test]
fn parameters_are_bounded() {
    let good = plain();
    let cases = [
        (good.clone(), None),
        (
            SamplingParams { temperature: -0.1, ..good.clone() },
            Some("temperature is -0.1; it lies between 0 and 2"),
        ),
        (
            SamplingParams { top_p: f32::NAN, ..good.clone() },
            Some("top_p is NaN; it lies between 0 and 1"),
        ),
        (
            SamplingParams { min_p: 1.5, ..good.clone() },
            Some("min_p is 1.5; it lies between 0 and 1"),
        ),
        (
            SamplingParams { repetition_penalty: 0.0, ..good.clone() },
            Some("repetition_penalty is 0; it lies between 0.01 and 10"),
        ),
        (
            SamplingParams { repetition_penalty: f32::NAN, ..good.clone() },
            Some("repetition_penalty is NaN; it lies between 0.01 and 10"),
        ),
        (
            SamplingParams { presence_penalty: 2.5, ..good.clone() },
            Some("presence_penalty is 2.5; it lies between -2 and 2"),
        ),
        (
            SamplingParams { logit_bias: vec![(10, 0.0)], ..good.clone() },
            Some("logit_bias names token 10; the vocabulary has 10"),
        ),
        (
            SamplingParams { logit_bias: vec![(1, 101.0)], ..good.clone() },
            Some("logit_bias is 101; it lies between -100 and 100"),
        ),
        (
            SamplingParams { logit_bias: vec![(1, 0.0); 1_025], ..good.clone() },
            Some("logit_bias has 1025 entries; at most 1024 are allowed"),
        ),
        (
            SamplingParams { top_logprobs: Some(21), ..good.clone() },
            Some("top_logprobs is 21; at most 20 are allowed"),
        ),
    ];
    for (params, expected) in cases {
        let found = params.check(10).err().map(|error| error.to_string());
        assert_eq!(found.as_deref(), expected);
    }
}
