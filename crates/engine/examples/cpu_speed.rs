//! Measures the speed of the CPU backend on a shape with random weights: tokens a
//! second for decode at several batch sizes and for prefill. The memory bandwidth is
//! measured in the same run, because it bounds decode.
//!
//! `cargo run -p tollgate-engine --example cpu_speed -- --shape qwen2.5-0.5b`
//!
//! Each figure is the best of several rounds, because other processes disturb a shared
//! machine.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tollgate_engine::Instructions;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::{Backend, LogitRows, Span, StepOutput, StepPlan};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

struct Arguments {
    shape: String,
    threads: usize,
    instructions: Option<Instructions>,
    rounds: u32,
    element: Element,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = arguments()?;
    let folder = model_folder(&arguments)?;
    let opened = Instant::now();
    let files = ModelFiles::open(&folder)?;
    println!("opened and hashed in {:.2} s", opened.elapsed().as_secs_f64());
    let loaded = Instant::now();
    let options = CpuOptions {
        threads: arguments.threads,
        kv_tokens: 64 * 1_024,
        step_tokens: 512,
        instructions: arguments.instructions,
    };
    let mut backend = CpuBackend::new(&files, &options)?;
    let (device, weights) = (backend.device().clone(), weight_bytes(&files));
    println!("packed in {:.2} s", loaded.elapsed().as_secs_f64());
    println!("{} on {}, {} threads", arguments.shape, device.name, device.threads);
    let bandwidth = bandwidth(arguments.threads, arguments.rounds);
    println!("memory reads        {bandwidth:8.1} GB/s");
    for batch in [1, 2, 4, 8, 16, 32, 64] {
        let time = decode(&mut backend, batch, 64, arguments.rounds)?;
        let streamed = weights as f64 / time.as_secs_f64() / 1e9;
        println!(
            "decode {batch:3}          {:8.1} tokens/s   {:7.2} ms a step, weights at {streamed:.1} GB/s",
            batch as f64 / time.as_secs_f64(),
            time.as_secs_f64() * 1e3,
        );
    }
    for tokens in [32, 128, 512] {
        let time = prefill(&mut backend, tokens, arguments.rounds)?;
        let rate = tokens as f64 / time.as_secs_f64();
        println!(
            "prefill {tokens:4}        {rate:8.1} tokens/s   {:7.2} ms",
            time.as_secs_f64() * 1e3
        );
    }
    let (one, many) = concurrency(&mut backend)?;
    println!(
        "32 in, 32 out       {one:8.1} tokens/s one at a time, {many:.1} with 32 at once: {:.1}x",
        many / one
    );
    Ok(())
}

/// Returns the best time of a step of `batch` sequences with `context` tokens each.
fn decode(
    backend: &mut CpuBackend,
    batch: usize,
    context: usize,
    rounds: u32,
) -> Result<Duration, Box<dyn Error>> {
    let tables: Vec<Vec<u32>> = (0..batch).map(|index| table(index, context + 16)).collect();
    let prompt = prompt(context);
    let mut output = StepOutput::default();
    for blocks in &tables {
        let span = Span { tokens: &prompt, start: 0, blocks, logits: LogitRows::None };
        backend.step(&StepPlan::logits(&[span]), &mut output)?;
    }
    let mut best = Duration::MAX;
    for round in 0..rounds.max(4) * 4 {
        let start = context as u32 + round % 16;
        let spans: Vec<Span<'_>> = tables
            .iter()
            .map(|blocks| Span { tokens: &[7], start, blocks, logits: LogitRows::Last })
            .collect();
        let began = Instant::now();
        backend.step(&StepPlan::logits(&spans), &mut output)?;
        best = best.min(began.elapsed());
    }
    Ok(best)
}

/// Returns the best time of one step that reads a prompt.
fn prefill(
    backend: &mut CpuBackend,
    tokens: usize,
    rounds: u32,
) -> Result<Duration, Box<dyn Error>> {
    let (prompt, blocks) = (prompt(tokens), table(0, tokens));
    let mut output = StepOutput::default();
    let mut best = Duration::MAX;
    for _ in 0..rounds {
        let span = Span { tokens: &prompt, start: 0, blocks: &blocks, logits: LogitRows::Last };
        let began = Instant::now();
        backend.step(&StepPlan::logits(&[span]), &mut output)?;
        best = best.min(began.elapsed());
    }
    Ok(best)
}

/// Returns generated tokens a second for requests of 32 tokens in and 32 out: one
/// request at a time, and 32 together.
fn concurrency(backend: &mut CpuBackend) -> Result<(f64, f64), Box<dyn Error>> {
    let mut output = StepOutput::default();
    let mut run = |batch: usize| -> Result<f64, Box<dyn Error>> {
        let tables: Vec<Vec<u32>> = (0..batch).map(|index| table(index, 64)).collect();
        let prompt = prompt(32);
        let began = Instant::now();
        for some in tables.chunks(8) {
            let spans: Vec<Span<'_>> = some
                .iter()
                .map(|blocks| Span { tokens: &prompt, start: 0, blocks, logits: LogitRows::Last })
                .collect();
            backend.step(&StepPlan::logits(&spans), &mut output)?;
        }
        for start in 32..63 {
            let spans: Vec<Span<'_>> = tables
                .iter()
                .map(|blocks| Span { tokens: &[7], start, blocks, logits: LogitRows::Last })
                .collect();
            backend.step(&StepPlan::logits(&spans), &mut output)?;
        }
        Ok(32.0 * batch as f64 / began.elapsed().as_secs_f64())
    };
    let mut best = (0.0_f64, 0.0_f64);
    for _ in 0..3 {
        best = (best.0.max(run(1)?), best.1.max(run(32)?));
    }
    Ok(best)
}

/// Returns the bandwidth at which all threads read together, in GB a second.
fn bandwidth(threads: usize, rounds: u32) -> f64 {
    let memory = vec![1_u64; 64 << 20];
    let mut best = Duration::MAX;
    for _ in 0..rounds {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for part in memory.chunks(memory.len().div_ceil(threads)) {
                scope.spawn(move || {
                    let sums = part.as_chunks::<32>().0.iter().fold([0_u64; 32], |sums, chunk| {
                        std::array::from_fn(|i| sums[i] ^ chunk[i])
                    });
                    std::hint::black_box(sums);
                });
            }
        });
        best = best.min(began.elapsed());
    }
    (memory.len() * 8) as f64 / best.as_secs_f64() / 1e9
}

/// Returns the bytes of the weights that a decode step reads; a tied model reads its
/// embedding once.
fn weight_bytes(files: &ModelFiles) -> usize {
    files.weights().files().iter().map(|(_, bytes)| bytes.len()).sum()
}

fn table(sequence: usize, tokens: usize) -> Vec<u32> {
    let blocks = tokens.div_ceil(16) as u32;
    (0..blocks).map(|block| sequence as u32 * blocks + block).collect()
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|index| index * 7 % 500).collect()
}

/// Returns the folder of the random model, which the first run writes.
fn model_folder(arguments: &Arguments) -> Result<PathBuf, Box<dyn Error>> {
    let spec = ModelSpec::named(&arguments.shape)
        .ok_or_else(|| format!("--shape is one of {}", ModelSpec::NAMES.join(", ")))?;
    let kind = format!("{:?}", arguments.element).to_lowercase();
    let folder = PathBuf::from(format!("target/random-models/{}-{kind}", arguments.shape));
    if !folder.join("model.safetensors").exists() {
        println!("writing {}", folder.display());
        RandomModel { spec, element: arguments.element, seed: 1 }.write(&folder)?;
    }
    Ok(folder)
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut arguments = Arguments {
        shape: "qwen2.5-0.5b".to_owned(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        instructions: None,
        rounds: 5,
        element: Element::Bf16,
    };
    let mut words = std::env::args().skip(1);
    while let Some(flag) = words.next() {
        let value = words.next().ok_or_else(|| format!("{flag} wants a value"))?;
        match flag.as_str() {
            "--shape" => arguments.shape = value,
            "--threads" => arguments.threads = value.parse()?,
            "--rounds" => arguments.rounds = value.parse()?,
            "--instructions" => {
                let known = Instructions::ALL.into_iter().find(|i| i.to_string() == value);
                arguments.instructions = Some(known.ok_or("unknown instructions")?);
            }
            "--element" => {
                let all = [Element::F32, Element::F16, Element::Bf16];
                let known = all.into_iter().find(|e| format!("{e:?}").eq_ignore_ascii_case(&value));
                arguments.element = known.ok_or("--element is f32, f16 or bf16")?;
            }
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    Ok(arguments)
}
