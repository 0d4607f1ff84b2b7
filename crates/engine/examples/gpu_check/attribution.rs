//! Compares the attribution of a step's time with measurements. The step is run with
//! every subset of its sequences. A sequence's Shapley value is the time that it adds to
//! a subset, averaged over all orders in which the sequences could have been added. (L. S.
//! Shapley, "A value for n-person games", 1953.)

use std::error::Error;
use std::time::Instant;

use serde_json::{Value, json};
use tollgate_domain::{CostTable, DeviceNanos, SequenceId, SequenceWork};
use tollgate_engine::backend::cuda::CudaBackend;
use tollgate_engine::backend::{BLOCK_TOKENS, Backend as _, LogitRows, Span};
use tollgate_engine::random_model::ModelSpec;
use tollgate_engine::{SystemClock, calibrate, coarse};

use crate::options::{self, Options, Way};
use crate::speed;

/// The largest part of a step's time that may be attributed to another sequence than by
/// Shapley values.
const BOUND: f64 = 0.15;
/// Runs of each subset; the median counts.
const RUNS: usize = 3;

/// A sequence of a step: its new tokens and the tokens that it already has.
type Sequence = (u32, u32);

/// A step whose attribution is checked.
struct Mix {
    name: &'static str,
    sequences: &'static [Sequence],
}

/// Decoding sequences with different contexts, and sequences beside parts of prompts.
const MIXES: [Mix; 3] = [
    Mix {
        name: "eight that decode, with 64 to 8,000 tokens of context",
        sequences: &[
            (1, 64),
            (1, 128),
            (1, 512),
            (1, 1_024),
            (1, 1_024),
            (1, 2_048),
            (1, 4_096),
            (1, 8_000),
        ],
    },
    Mix {
        name: "a new prompt's 256 tokens beside six that decode",
        sequences: &[(256, 0), (1, 128), (1, 512), (1, 512), (1, 1_024), (1, 2_048), (1, 4_096)],
    },
    Mix {
        name: "two parts of prompts beside four that decode",
        sequences: &[(256, 4_096), (64, 512), (1, 128), (1, 1_024), (1, 2_048), (1, 8_000)],
    },
];
const TINY: [Mix; 1] = [Mix { name: "three", sequences: &[(1, 40), (1, 8), (20, 0)] }];

/// Returns the names of all cases.
pub(crate) fn titles(options: &Options) -> Vec<String> {
    shapes(options).into_iter().map(|(name, _)| name.to_owned()).collect()
}

fn shapes(options: &Options) -> Vec<(&'static str, ModelSpec)> {
    if options.is_quick {
        return vec![("tiny", options::tiny())];
    }
    let named = |name| Some((name, ModelSpec::named(name)?));
    ["llama-3-8b", "qwen2.5-0.5b"].into_iter().filter_map(named).collect()
}

/// Measures the shape of this name. Returns `None` for an unknown name.
pub(crate) fn run(options: &Options, wanted: &str) -> Option<Value> {
    let (name, spec) = shapes(options).into_iter().find(|(name, _)| *name == wanted)?;
    let mut told = measure(&spec, options)
        .unwrap_or_else(|error| json!({ "passed": false, "why": error.to_string() }));
    told["case"] = name.into();
    Some(told)
}

fn measure(spec: &ModelSpec, options: &Options) -> Result<Value, Box<dyn Error>> {
    let mut backend = options::with_noise(spec, &options.backend(Way::WORKER, 1_024))?;
    let began = Instant::now();
    // The whole calibration takes minutes on an emulated device.
    let measure = if options.is_quick { coarse } else { calibrate };
    let calibration = measure(&mut backend, &SystemClock::new())?;
    let seconds = began.elapsed().as_secs_f64();
    let mixes = if options.is_quick { &TINY[..] } else { &MIXES[..] };
    let mixes = mixes
        .iter()
        .map(|mix| measure_mix(&mut backend, &calibration.table, mix))
        .collect::<Result<Vec<_>, _>>()?;
    let passed = mixes.iter().all(|mix| mix["misplaced"].as_f64() <= Some(BOUND));
    Ok(json!({
        // A device that runs other work, or an emulated one, has no true times.
        "passed": passed || options.is_quick, "bound": BOUND, "device": backend.device().name,
        "calibration_seconds": seconds, "calibration_steps": calibration.steps,
        "calibration_device_ns": calibration.device_time.nanos(),
        "table": calibration.table.parts(), "mixes": mixes,
    }))
}

fn measure_mix(
    backend: &mut CudaBackend,
    table: &CostTable,
    mix: &Mix,
) -> Result<Value, Box<dyn Error>> {
    let count = mix.sequences.len();
    let mut times = vec![0.0; 1 << count];
    for (subset, found) in times.iter_mut().enumerate().skip(1) {
        *found = time(backend, mix.sequences, subset)?;
    }
    let whole = times[times.len() - 1];
    let works = works(mix.sequences);
    let shares = table.attribute(DeviceNanos(whole as u64), &works);
    let shares: Vec<f64> = shares.iter().map(|share| share.nanos() as f64).collect();
    let values = shapley(&times);
    let misplaced: f64 =
        shares.iter().zip(&values).map(|(share, value)| (share - value).abs()).sum::<f64>() / 2.0;
    let sequences: Vec<Value> = (0..count)
        .map(|i| {
            json!({
                "new_tokens": mix.sequences[i].0, "context": mix.sequences[i].1,
                "attributed_ns": shares[i], "shapley_ns": values[i],
                "alone_ns": times[1 << i], "left_out_ns": whole - times[(times.len() - 1) ^ (1 << i)],
            })
        })
        .collect();
    Ok(json!({
        "mix": mix.name, "step_ns": whole,
        "predicted_ns": table.predict_step(&works).nanos(),
        "misplaced": misplaced / whole, "sequences": sequences,
        "subset_ns": times,
    }))
}

/// Returns the Shapley value of each sequence. `times` has the time of every subset, by
/// its bits.
pub(crate) fn shapley(times: &[f64]) -> Vec<f64> {
    let count = times.len().ilog2() as usize;
    let factorial = |n: usize| (1..=n).map(|k| k as f64).product::<f64>();
    // The part of all orders in which exactly a given subset of this size comes first.
    let weight = |size: usize| factorial(size) * factorial(count - 1 - size) / factorial(count);
    (0..count)
        .map(|i| {
            (0..times.len())
                .filter(|subset| subset & (1 << i) == 0)
                .map(|subset| {
                    let added = times[subset | (1 << i)] - times[subset];
                    weight(subset.count_ones() as usize) * added
                })
                .sum()
        })
        .collect()
}

fn works(sequences: &[Sequence]) -> Vec<SequenceWork> {
    (0..)
        .zip(sequences)
        .map(|(i, &(new_tokens, context))| SequenceWork {
            sequence: SequenceId(i),
            new_tokens,
            logit_rows: 1,
            context,
        })
        .collect()
}

/// Returns the device's time of a step with these sequences, ns: the median of some runs
/// after two warm-up runs. Every sequence has the same KV blocks in each subset.
fn time(
    backend: &mut CudaBackend,
    sequences: &[Sequence],
    subset: usize,
) -> Result<f64, Box<dyn Error>> {
    let vocabulary = backend.shape().vocabulary;
    let mut next = 0;
    let inputs: Vec<(Vec<u32>, Vec<u32>)> = sequences
        .iter()
        .map(|&(tokens, context)| {
            let first = next;
            next += (context + tokens).div_ceil(BLOCK_TOKENS);
            ((0..tokens).map(|at| (at * 7 + 3) % vocabulary).collect(), (first..next).collect())
        })
        .collect();
    if next > backend.kv_blocks() {
        return Err("the KV cache is too small".into());
    }
    let spans: Vec<Span<'_>> = inputs
        .iter()
        .zip(sequences)
        .enumerate()
        .filter(|(i, _)| subset & (1 << i) != 0)
        .map(|(_, ((tokens, blocks), &(_, start)))| Span {
            tokens,
            start,
            blocks,
            logits: LogitRows::Last,
        })
        .collect();
    Ok(speed::median(backend, &spans, RUNS)?.0)
}
