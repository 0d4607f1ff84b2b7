//! Compares samples of a device with samples of the host from the same rows, and
//! overlapping steps with steps that run one after the other.

use std::num::NonZeroU32;

use tollgate_engine::backend::{
    Backend, LogitRows, Results, SampleRequest, SampleTarget, Span, StepOutput, StepPlan,
};
use tollgate_engine::sample::{
    Sampler, SamplingParams, SamplingPoint, TokenCounts, token_logprobs,
};

use crate::agree::{scattered, span, text};

/// Runs both comparisons on a model of that vocabulary, and returns the number of
/// compared samples.
pub fn check(backend: &mut dyn Backend, vocabulary: u32) -> usize {
    let drawn = the_same_as_the_hosts(backend, vocabulary);
    drawn + ahead_as_in_turn(backend, vocabulary)
}

/// Returns sampling parameters that together set every field.
fn ways(vocabulary: u32) -> Vec<SamplingParams> {
    let greedy = SamplingParams::greedy(7);
    let random = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let some = |bias: f32| (0..vocabulary).step_by(3).take(200).map(move |token| (token, bias));
    vec![
        greedy.clone(),
        SamplingParams { top_logprobs: Some(20), ..greedy.clone() },
        random.clone(),
        SamplingParams { top_p: 0.6, temperature: 0.8, ..random.clone() },
        SamplingParams { top_k: NonZeroU32::new(50), ..random.clone() },
        SamplingParams { min_p: 0.2, temperature: 1.5, ..random.clone() },
        SamplingParams { logit_bias: some(4.0).collect(), ..greedy.clone() },
        SamplingParams { presence_penalty: 2.0, frequency_penalty: 1.5, ..random.clone() },
        SamplingParams {
            frequency_penalty: 0.7,
            top_k: NonZeroU32::new(9),
            logit_bias: some(-2.0).collect(),
            top_p: 0.9,
            temperature: 1.7,
            top_logprobs: Some(0),
            ..random.clone()
        },
        SamplingParams { repetition_penalty: 1.7, ..greedy.clone() },
        SamplingParams { repetition_penalty: 0.7, frequency_penalty: 0.4, top_p: 0.9, ..random },
    ]
}

/// Returns counts of generated tokens, some of them above one.
fn counts(seed: u32, vocabulary: u32) -> TokenCounts {
    let mut counts = TokenCounts::new();
    let before = text(40, seed, vocabulary / 2 + 1);
    before.into_iter().for_each(|token| counts.add(token));
    counts
}

/// Returns the distinct tokens of a prompt in ascending order.
fn distinct(tokens: &[u32]) -> Vec<u32> {
    let mut distinct = tokens.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    distinct
}

fn the_same_as_the_hosts(backend: &mut dyn Backend, vocabulary: u32) -> usize {
    let ways = ways(vocabulary);
    let texts: Vec<Vec<u32>> =
        (0..ways.len()).map(|i| text(20, 60 + i as u32, vocabulary)).collect();
    let tables: Vec<Vec<u32>> =
        (0..ways.len()).map(|i| scattered(20, 2 * i, backend.kv_blocks().min(127))).collect();
    let spans: Vec<Span<'_>> = texts
        .iter()
        .zip(&tables)
        .map(|(text, blocks)| span(text, 0, blocks, LogitRows::All))
        .collect();
    let mut output = StepOutput::default();
    backend.step(&StepPlan::logits(&spans), &mut output).unwrap();
    let rows: Vec<Vec<f32>> = (0..output.rows()).map(|row| output.row(row).to_vec()).collect();
    let counts = counts(5, vocabulary);
    let prompt = distinct(&text(30, 6, vocabulary));
    let mut draws = Vec::new();
    for (row, params) in (0..rows.len() as u32).map(|row| (row, &ways[row as usize / 20])) {
        // A row may serve several choices, and a step may have more samples than rows.
        for seed in [3, u64::MAX - u64::from(row)] {
            let point = SamplingPoint {
                seed,
                position: row,
                counts: &counts,
                prompt: &prompt,
                constraint: None,
            };
            let token = SampleTarget::Next { point, pending: None };
            draws.push(SampleRequest { row, params, token });
        }
        draws.push(SampleRequest { row, params, token: SampleTarget::Given(row % vocabulary) });
    }
    let most = backend.limits().samples() as usize;
    let mut sampler = Sampler::default();
    let mut compared = 0;
    for draws in draws.chunks(most) {
        backend.step(&StepPlan::samples(&spans, draws), &mut output).unwrap();
        assert_eq!(output.sampled().len(), draws.len());
        for (draw, drawn) in draws.iter().zip(output.sampled()) {
            let (row, drawn) = (&rows[draw.row as usize], drawn.as_ref().expect("a token"));
            let (token, is_told) = match draw.token {
                SampleTarget::Given(token) => (token, true),
                SampleTarget::Next { point, .. } => {
                    let expected = sampler.sample(row, draw.params, point, None).expect("a token");
                    (expected.token, expected.logprobs.is_some())
                }
            };
            assert_eq!(drawn.token, token, "{draw:?}");
            assert_eq!(drawn.logprobs.is_some(), is_told, "{draw:?}");
            if let Some(told) = &drawn.logprobs {
                let top = draw.params.top_logprobs.unwrap_or(0) as usize;
                let expected = token_logprobs(row, token, top);
                assert!((told.logprob - expected.logprob).abs() < 1e-3, "{told:?} {expected:?}");
                let tokens = |of: &[(u32, f32)]| of.iter().map(|it| it.0).collect::<Vec<u32>>();
                assert_eq!(tokens(&told.top), tokens(&expected.top));
                for (told, expected) in told.top.iter().zip(&expected.top) {
                    assert!((told.1 - expected.1).abs() < 1e-3, "{told:?} {expected:?}");
                }
            }
            compared += 1;
        }
    }
    compared
}

/// The state of a choice, as an engine keeps it.
struct Choice {
    blocks: Vec<u32>,
    params: SamplingParams,
    tokens: Vec<u32>,
    prompt: usize,
    counts: TokenCounts,
    /// The prompt's distinct tokens in ascending order.
    prompt_set: Vec<u32>,
}

impl Choice {
    fn point(&self, ahead: u32) -> SamplingPoint<'_> {
        let position = (self.tokens.len() - self.prompt) as u32 + ahead;
        SamplingPoint {
            seed: 99,
            position,
            counts: &self.counts,
            prompt: &self.prompt_set,
            constraint: None,
        }
    }

    fn take(&mut self, token: u32) {
        self.tokens.push(token);
        self.counts.add(token);
    }
}

fn choices(backend: &dyn Backend, vocabulary: u32, first: usize) -> Vec<Choice> {
    ways(vocabulary)
        .into_iter()
        .enumerate()
        .map(|(i, params)| Choice {
            blocks: scattered(32, first + 2 * i, backend.kv_blocks().min(127)),
            params,
            prompt_set: distinct(&text(4 + i, 80 + i as u32, vocabulary)),
            tokens: text(4 + i, 80 + i as u32, vocabulary),
            prompt: 4 + i,
            counts: TokenCounts::new(),
        })
        .collect()
}

fn read_prompts(backend: &mut dyn Backend, choices: &mut [Choice]) {
    let spans: Vec<Span<'_>> =
        choices.iter().map(|it| span(&it.tokens, 0, &it.blocks, LogitRows::Last)).collect();
    let draws = draws(choices, None);
    let mut output = StepOutput::default();
    backend.step(&StepPlan::samples(&spans, &draws), &mut output).unwrap();
    take(choices, &mut output);
}

/// Returns one sample request for each choice, or for those whose previous sample is
/// still running.
fn draws<'a>(choices: &'a [Choice], pending: Option<&[u32]>) -> Vec<SampleRequest<'a>> {
    (0..)
        .zip(choices)
        .map(|(row, choice)| {
            let pending = pending.map(|before| before[row as usize]);
            let point = choice.point(u32::from(pending.is_some()));
            let token = SampleTarget::Next { point, pending };
            SampleRequest { row, params: &choice.params, token }
        })
        .collect()
}

fn take(choices: &mut [Choice], output: &mut StepOutput) {
    for (choice, drawn) in choices.iter_mut().zip(output.take_sampled()) {
        choice.take(drawn.expect("a token").token);
    }
}

fn ahead_as_in_turn(backend: &mut dyn Backend, vocabulary: u32) -> usize {
    const STEPS: usize = 9;
    assert!(backend.runs_ahead());
    let mut in_turn = choices(backend, vocabulary, 0);
    read_prompts(backend, &mut in_turn);
    let mut output = StepOutput::default();
    for _ in 0..STEPS {
        let spans: Vec<Span<'_>> = in_turn
            .iter()
            .map(|it| {
                let start = it.tokens.len() - 1;
                span(&it.tokens[start..], start, &it.blocks, LogitRows::Last)
            })
            .collect();
        let draws = draws(&in_turn, None);
        backend.step(&StepPlan::samples(&spans, &draws), &mut output).unwrap();
        take(&mut in_turn, &mut output);
    }
    let mut ahead = choices(backend, vocabulary, 60);
    read_prompts(backend, &mut ahead);
    let feeds: Vec<u32> = (0..ahead.len() as u32).collect();
    let mut outputs = [StepOutput::default(), StepOutput::default()];
    for step in 0..=STEPS {
        if step < STEPS {
            // The first step is fed with known tokens, each further step with samples
            // of the step before.
            let fed = step > 0;
            let spans: Vec<Span<'_>> = ahead
                .iter()
                .map(|it| {
                    let start = it.tokens.len() - usize::from(!fed);
                    let tokens = if fed { &[0][..] } else { &it.tokens[start..] };
                    span(tokens, start, &it.blocks, LogitRows::Last)
                })
                .collect();
            let draws = draws(&ahead, fed.then_some(&feeds));
            let feeds: &[u32] = if fed { &feeds } else { &[] };
            let plan = StepPlan {
                spans: &spans,
                results: Results::Samples(&draws),
                token_feedback: feeds,
            };
            backend.begin(&plan, &mut outputs[step % 2]).unwrap();
        }
        if step > 0 {
            backend.finish(&mut outputs[(step - 1) % 2]).unwrap();
            take(&mut ahead, &mut outputs[(step - 1) % 2]);
        }
    }
    for (ahead, in_turn) in ahead.iter().zip(&in_turn) {
        assert_eq!(ahead.tokens, in_turn.tokens, "{:?}", ahead.params);
    }
    STEPS * ahead.len()
}
