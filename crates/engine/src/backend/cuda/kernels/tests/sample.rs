//! Tests of sampling. The kernel must sample the same token as the CPU's sampler, for
//! all parameters.

use std::num::NonZeroU32;

use super::*;
use crate::backend::cuda::kernels::*;
use crate::grammar::TokenMask;
use crate::sample::{
    SampledToken, Sampler, SamplingParams, SamplingPoint, TokenCounts, TokenLogprobs,
    token_logprobs,
};

/// One sample with its parameters.
#[derive(Clone)]
struct Ask {
    params: SamplingParams,
    position: u32,
    /// Tokens that were generated before, with their counts.
    history: Vec<(u32, u32)>,
    /// Distinct tokens of the prompt in ascending order.
    prompt: Vec<u32>,
    /// One more token, which the previous step has sampled.
    pending: Option<u32>,
    given: Option<u32>,
    /// The tokens that may be sampled; `None` for all.
    mask: Option<Vec<u32>>,
}

impl Ask {
    fn greedy() -> Self {
        Self {
            params: SamplingParams::greedy(7),
            position: 0,
            history: Vec::new(),
            prompt: Vec::new(),
            pending: None,
            given: None,
            mask: None,
        }
    }

    fn warm(temperature: f32, top_p: f32, seed: u64) -> Self {
        let mut ask = Self::greedy();
        ask.params.temperature = temperature;
        ask.params.top_p = top_p;
        ask.params.seed = seed;
        ask.position = seed as u32 % 5;
        ask
    }

    /// Restricts sampling to the `top_k` likeliest tokens.
    fn among(mut self, top_k: u32) -> Self {
        self.params.top_k = NonZeroU32::new(top_k);
        self
    }

    fn on_cpu(&self, row: &[f32], sampler: &mut Sampler) -> Option<SampledToken> {
        if let Some(token) = self.given {
            let top = self.params.top_logprobs;
            let logprobs = top.map(|top| token_logprobs(row, token, top as usize));
            return Some(SampledToken { token, logprobs });
        }
        let mut counts = TokenCounts::default();
        for &(token, count) in &self.history {
            (0..count).for_each(|_| counts.add(token));
        }
        self.pending.into_iter().for_each(|token| counts.add(token));
        let point = SamplingPoint {
            seed: self.params.seed,
            position: self.position,
            counts: &counts,
            prompt: &self.prompt,
            constraint: None,
        };
        let mask = self.mask.as_ref();
        let mask = mask.map(|mask| TokenMask::of(row.len() as u32, mask.iter().copied()));
        sampler.sample(row, &self.params, point, mask.as_ref())
    }
}

/// Returns samples that together set every combination of parameters.
fn asks(vocabulary: usize) -> Vec<Ask> {
    let last = vocabulary as u32 - 1;
    let mut asks = vec![Ask::greedy()];
    for (seed, temperature) in [0.3, 1.0, 2.0, 0.01].into_iter().enumerate() {
        for (more, top_p) in [1.0, 0.95, 0.5, 0.1, 0.0].into_iter().enumerate() {
            asks.push(Ask::warm(temperature, top_p, (10 * seed + more) as u64));
        }
    }
    for (seed, (top_k, top_p)) in
        [(1, 1.0), (2, 0.7), (40, 1.0), (40, 0.9), (300, 1.0), (u32::MAX, 0.5)]
            .into_iter()
            .enumerate()
    {
        asks.push(Ask::warm(1.3, top_p, 50 + seed as u64).among(top_k));
    }
    for (seed, (min_p, top_k, top_p)) in
        [(0.02, 0, 1.0), (0.3, 0, 0.8), (0.1, 3, 1.0), (0.05, 40, 0.7), (1.0, 0, 1.0)]
            .into_iter()
            .enumerate()
    {
        let mut cut = Ask::warm(1.3, top_p, 60 + seed as u64).among(top_k);
        cut.params.min_p = min_p;
        asks.push(cut);
    }
    for temperature in [0.0, 1.0] {
        let mut biased = Ask::warm(temperature, 0.9, 77);
        biased.params.logit_bias = vec![(last, 3.0), (0, -100.0)];
        biased.params.top_logprobs = Some(3);
        let mut penalised = Ask::warm(temperature, 1.0, 78);
        penalised.params.presence_penalty = 0.7;
        penalised.params.frequency_penalty = 1.1;
        penalised.history = vec![(0, 2), (last / 2, 1), (last.max(1) - 1, 30)];
        penalised.params.top_logprobs = Some(20);
        let mut again = penalised.clone();
        again.pending = Some(last / 2);
        let mut fresh = penalised.clone();
        fresh.pending = Some(last);
        fresh.params.presence_penalty = -2.0;
        fresh.params.frequency_penalty = 0.0;
        fresh.params.logit_bias = vec![(last, 0.5)];
        // Each token of the history is in the prompt or not, and so is the
        // pending one; the likeliest token may be either.
        for (prompt, pending) in [
            (vec![0, last / 2], None),
            (vec![0, last / 2], Some(last / 2)),
            (vec![last], Some(last)),
            ((0..=last).collect(), Some(1 % last.max(1))),
            (vec![], Some(last)),
        ] {
            let mut repeated = penalised.clone();
            repeated.params.repetition_penalty = 1.3;
            repeated.params.presence_penalty = 0.0;
            repeated.prompt = prompt;
            repeated.prompt.dedup();
            repeated.pending = pending;
            let mut favoured = repeated.clone();
            favoured.params.repetition_penalty = 0.01; // large logits overflow
            favoured.params.presence_penalty = 0.3;
            let mut alone = repeated.clone();
            alone.params.frequency_penalty = 0.0;
            asks.extend([repeated, favoured, alone]);
        }
        asks.extend([biased, penalised, again, fresh]);
    }
    asks.extend(masked(last));
    for given in [0, last, u32::MAX - 1] {
        let mut told = Ask::greedy();
        told.given = Some(given);
        told.params.top_logprobs = Some(2);
        asks.push(told);
    }
    asks
}

/// Returns samples with masks: of few tokens, of all but the last one, of none, and with
/// biases and penalties that would bring masked tokens back.
fn masked(last: u32) -> Vec<Ask> {
    let mut asks = Vec::new();
    for temperature in [0.0, 1.0] {
        for mask in [vec![last], (0..=last).step_by(3).collect(), (0..last).collect(), vec![]] {
            let mut masked = Ask::warm(temperature, 0.9, 79);
            masked.mask = Some(mask);
            masked.params.top_logprobs = Some(2);
            let mut drawn_back = masked.clone();
            drawn_back.params.logit_bias = vec![(0, 100.0), (last, 100.0)];
            drawn_back.params.presence_penalty = -2.0;
            drawn_back.params.repetition_penalty = 0.01;
            drawn_back.history = vec![(0, 1), (last, 2)];
            asks.extend([masked, drawn_back]);
        }
    }
    asks
}

/// Runs the kernel and returns the sampled token.
#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
fn draw(
    emulator: &Emulator,
    order: u32,
    row: &[f32],
    asks: &[Ask],
) -> Result<Vec<Option<SampledToken>>, String> {
    let (mut bias_tokens, mut biases) = (Vec::new(), Vec::new());
    let (mut count_tokens, mut counts) = (Vec::new(), Vec::new());
    let mut prompt_tokens = Vec::new();
    let mut masks = Vec::new();
    let mut previous = vec![5_u32];
    let mut rows = Vec::new();
    for ask in asks {
        rows.push(SampleRow {
            seed: ask.params.seed,
            temperature: ask.params.temperature,
            top_p: ask.params.top_p,
            presence: ask.params.presence_penalty,
            frequency: ask.params.frequency_penalty,
            position: ask.position,
            row: 1,
            given: ask.given.unwrap_or(NONE),
            pending: ask.pending.map_or(NONE, |_| previous.len() as u32),
            biases: biases.len() as u32,
            bias_count: ask.params.logit_bias.len() as u32,
            counts: counts.len() as u32,
            count_count: ask.history.len() as u32,
            top: ask.params.top_logprobs.unwrap_or(NONE),
            top_k: ask.params.top_k.map_or(0, NonZeroU32::get),
            repetition: ask.params.repetition_penalty,
            prompt: prompt_tokens.len() as u32,
            prompt_count: ask.prompt.len() as u32,
            min_p: ask.params.min_p,
            mask: ask.mask.as_ref().map_or(NONE, |_| masks.len() as u32),
            unused: 0,
        });
        if let Some(mask) = &ask.mask {
            masks.extend_from_slice(TokenMask::of(row.len() as u32, mask.iter().copied()).words());
        }
        previous.extend(ask.pending);
        bias_tokens.extend(ask.params.logit_bias.iter().map(|(token, _)| *token));
        biases.extend(ask.params.logit_bias.iter().map(|(_, bias)| *bias));
        count_tokens.extend(ask.history.iter().map(|(token, _)| *token));
        counts.extend(ask.history.iter().map(|(token, count)| {
            if ask.prompt.contains(token) { count | PROMPTED } else { *count }
        }));
        prompt_tokens.extend(ask.prompt.iter().copied());
    }
    let most = MOST_TOP as usize;
    // Rows of an odd vocabulary lie one after the other, so not every row is aligned.
    let logits = emulator.copy(&[vec![f32::NAN; row.len()], row.to_vec()].concat());
    let tokens = emulator.memory::<u32>(asks.len());
    let logprobs = emulator.memory::<f32>(asks.len());
    let top_tokens = emulator.memory::<u32>(asks.len() * most);
    let top_logprobs = emulator.memory::<f32>(asks.len() * most);
    let weights = emulator.memory::<f32>(asks.len() * row.len());
    let chunks = sums_of_sample(row.len() as u32) as usize;
    let sums = emulator.memory::<f64>(asks.len() * chunks);
    let rows = emulator.copy(&rows);
    let [previous, bias_tokens, count_tokens, counts, prompt_tokens, masks] =
        [previous, bias_tokens, count_tokens, counts, prompt_tokens, masks]
            .map(|from| emulator.copy(&from));
    let biases = emulator.copy(&biases);
    let args = SampleArgs {
        tokens: tokens.at(),
        logprobs: logprobs.at(),
        top_tokens: top_tokens.at(),
        top_logprobs: top_logprobs.at(),
        weights: weights.at(),
        sums: sums.at(),
        rows: rows.at(),
        logits: logits.at(),
        previous: previous.at(),
        bias_tokens: bias_tokens.at(),
        biases: biases.at(),
        count_tokens: count_tokens.at(),
        counts: counts.at(),
        prompt_tokens: prompt_tokens.at(),
        masks: masks.at(),
        vocabulary: row.len() as u32,
    };
    emulator.launch(&sample(args, asks.len() as u32), order)?;
    if !weights.is_whole() || !sums.is_whole() {
        return Err("something was written behind the scratch".to_owned());
    }
    let (tokens, logprobs) = (filled(&tokens)?, filled(&logprobs)?);
    let (top_tokens, top_logprobs) = (filled(&top_tokens)?, filled(&top_logprobs)?);
    let drawn = asks.iter().enumerate().map(|(index, ask)| {
        let token = (tokens[index] != NONE).then_some(tokens[index])?;
        let logprobs = ask.params.top_logprobs.map(|top| {
            let listed = index * most..index * most + row.len().min(top as usize);
            let tokens = top_tokens[listed.clone()].iter().copied();
            TokenLogprobs {
                logprob: logprobs[index],
                top: tokens.zip(top_logprobs[listed].iter().copied()).collect(),
            }
        });
        Some(SampledToken { token, logprobs })
    });
    Ok(drawn.collect())
}

fn check(emulator: &Emulator, order: u32, row: &[f32], asks: &[Ask]) -> Result<(), String> {
    let mut sampler = Sampler::default();
    for (index, (found, ask)) in draw(emulator, order, row, asks)?.iter().zip(asks).enumerate() {
        let expected = ask.on_cpu(row, &mut sampler);
        if !is_same(found.as_ref(), expected.as_ref()) {
            let count = row.len();
            return Err(format!("{index} of {count}: {found:?} instead of {expected:?}"));
        }
    }
    Ok(())
}

/// Compares tokens exactly, and log-probabilities to about the precision of f32.
fn is_same(found: Option<&SampledToken>, expected: Option<&SampledToken>) -> bool {
    let (Some(found), Some(expected)) = (found, expected) else {
        return found.is_none() && expected.is_none();
    };
    let close = |a: f32, b: f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
    let logprobs = match (&found.logprobs, &expected.logprobs) {
        (Some(found), Some(expected)) => {
            found.top.len() == expected.top.len()
                && close(found.logprob, expected.logprob)
                && found.top.iter().zip(&expected.top).all(|(a, b)| a.0 == b.0 && close(a.1, b.1))
        }
        (found, expected) => found.is_none() && expected.is_none(),
    };
    found.token == expected.token && logprobs
}

/// Returns logits with a few clear favourites.
fn peaked(vocabulary: usize) -> Vec<f32> {
    noise(vocabulary, vocabulary).into_iter().map(|x| 9.0 * x * x * x).collect()
}

#[test]
fn every_parameter_samples_as_on_the_cpu() {
    for vocabulary in [1, 2, 7, 255, 257, 2_048, 5_003] {
        let row = peaked(vocabulary);
        let asks = asks(vocabulary);
        sound(|emulator, order| check(emulator, order, &row, &asks));
    }
}

/// Vocabularies a little larger than the tokens that the threads read in one turn, with
/// rows that begin at 16 bytes and rows that do not.
#[test]
fn large_vocabularies_sample_as_on_the_cpu() {
    for vocabulary in [4_096, 8_192, 8_196, 9_999, 20_004] {
        let row = peaked(vocabulary);
        let asks: Vec<Ask> = [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)]
            .into_iter()
            .map(|(temperature, top_p)| Ask::warm(temperature, top_p, 5))
            .chain([Ask::warm(1.0, 0.9, 6).among(50)])
            .collect();
        sound(|emulator, order| check(emulator, order, &row, &asks));
    }
}

/// Equal logits within one load of a thread, in two loads, in two turns and in two
/// threads: the smaller id must win.
#[test]
fn equal_logits_prefer_the_smaller_id() {
    let near = [4_000, 4_001, 4_004, 6_048, 12_192, 20_002];
    let pairs = near.into_iter().flat_map(|first| near.map(|second| (first, second)));
    for (first, second) in pairs.filter(|(first, second)| first < second) {
        for (a, b) in [(2.0, 2.0), (-0.0, 0.0), (0.0, -0.0), (f32::INFINITY, f32::INFINITY)] {
            for count in [20_003, 20_004] {
                let mut row = vec![-1.0; count];
                row[5] = f32::NAN;
                (row[first], row[second]) = (a, b);
                sound(|emulator, order| check(emulator, order, &row, &[Ask::greedy()]));
            }
        }
    }
}

#[test]
fn many_seeds_sample_as_on_the_cpu() {
    let row = peaked(600);
    let asks: Vec<Ask> = (0..120)
        .map(|seed| Ask::warm(0.8, if seed % 2 == 0 { 1.0 } else { 0.9 }, 1_000 + seed))
        .collect();
    sound(|emulator, order| check(emulator, order, &row, &asks));
    let Some(emulator) = Emulator::sound() else { return };
    let drawn = draw(emulator, 0, &row, &asks).expect("it was sound above");
    let tokens: std::collections::BTreeSet<u32> =
        drawn.into_iter().flatten().map(|drawn| drawn.token).collect();
    assert!(tokens.len() > 10, "different seeds draw different tokens: {tokens:?}");
}

#[test]
fn degenerate_rows_sample_as_on_the_cpu() {
    let mut odd = peaked(700);
    for (index, value) in [
        (3, f32::NAN),
        (10, f32::NEG_INFINITY),
        (511, f32::INFINITY),
        (600, f32::INFINITY),
        (699, f32::NAN),
        (20, -0.0),
    ] {
        odd[index] = value;
    }
    let mut zeros = vec![-3.0; 40];
    zeros[11] = -0.0;
    zeros[12] = 0.0;
    let rows = [
        vec![f32::NEG_INFINITY; 300],
        vec![f32::NAN; 9],
        vec![f32::NAN; 12],
        vec![0.0; 1_000], // all alike: the nucleus ends among equals
        (0..1_200).map(|token| if token % 3 == 0 { 1.0 } else { 0.5 }).collect(),
        (0..900).map(|token| -(token as f32) / 4.0).collect(),
        odd,
        zeros,
    ];
    for row in rows {
        let asks = asks(row.len());
        sound(|emulator, order| check(emulator, order, &row, &asks));
    }
}

/// The likeliest tokens are searched in a list with limited room. In this row all
/// tokens of some threads are above all tokens of every other thread, so the list
/// overflows.
#[test]
fn overflowing_top_lists_are_reported_in_order() {
    for few in [18, 19, 20] {
        let likely = |token: usize| token % 512 < few;
        let logit = |token| if likely(token) { 10.0 + (token % 97) as f32 / 64.0 } else { -3.0 };
        let row: Vec<f32> = (0..512 * 40).map(logit).collect();
        assert!(row.iter().filter(|logit| **logit > 0.0).count() > 512);
        let mut told = Ask::greedy();
        told.params.top_logprobs = Some(20);
        sound(|emulator, order| check(emulator, order, &row, std::slice::from_ref(&told)));
    }
}

#[test]
fn planted_sampling_bugs_are_found() {
    let row = peaked(2_048);
    let asks: Vec<Ask> = (0..8).map(|seed| Ask::warm(1.0, 1.0, seed)).collect();
    finds(Bug::SampleWithoutBarrier, |emulator, order| check(emulator, order, &row, &asks));
    let even = vec![0.0; 1_000];
    let asks: Vec<Ask> = (0..8).map(|seed| Ask::warm(1.0, 0.4, seed)).collect();
    finds(Bug::SampleTies, |emulator, order| check(emulator, order, &even, &asks));
    let few: Vec<Ask> = asks.into_iter().map(|ask| ask.among(5)).collect();
    finds(Bug::SampleTies, |emulator, order| check(emulator, order, &even, &few));
}
