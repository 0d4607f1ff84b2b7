//! Measures steps of the CPU backend from outside, to compare them with a peer's own
//! decode call. Neither side samples; each sequence's last token gives logits.

use std::error::Error;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::{
    BLOCK_TOKENS, Backend, LogitRows, Span, StepLimits, StepOutput, StepPlan,
};
use tollgate_engine::model::ModelFiles;

use crate::Obeys;

pub(crate) struct Steps {
    backend: CpuBackend,
    output: StepOutput,
}

impl Steps {
    pub(crate) fn new(files: &ModelFiles) -> Result<Self, Box<dyn Error>> {
        let options = CpuOptions {
            kv_tokens: KV_TOKENS,
            step_tokens: STEP_TOKENS,
            ..CpuOptions::for_model(files.config(), 0)
        };
        Ok(Self { backend: CpuBackend::new(files, &options)?, output: StepOutput::default() })
    }

    /// Returns the likeliest next tokens after `prompt`, one at a time.
    fn greedy(&mut self, tokens: usize, prompt: &[u32]) -> Result<Value, Box<dyn Error>> {
        let blocks = table(0, prompt.len() + tokens);
        let (mut fed, mut start, mut ids) = (prompt.to_vec(), 0, Vec::new());
        while ids.len() < tokens {
            let span = Span { tokens: &fed, start, blocks: &blocks, logits: LogitRows::Last };
            self.backend.step(&StepPlan::logits(&[span]), &mut self.output)?;
            let row = self.output.row(0);
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            let best = best.ok_or("no logits")? as u32;
            start += fed.len() as u32;
            fed = vec![best];
            ids.push(best);
        }
        Ok(json!({ "tokens": ids }))
    }

    /// Measures `steps` steps of `batch` sequences that hold `context` tokens each.
    fn decode(
        &mut self,
        batch: usize,
        context: usize,
        steps: usize,
    ) -> Result<Value, Box<dyn Error>> {
        let tables: Vec<Vec<u32>> = (0..batch).map(|i| table(i, context + steps)).collect();
        let prompt = prompt(context);
        for blocks in &tables {
            let span = Span { tokens: &prompt, start: 0, blocks, logits: LogitRows::None };
            self.backend.step(&StepPlan::logits(&[span]), &mut self.output)?;
        }
        let began = Instant::now();
        for start in context..context + steps {
            let spans: Vec<Span<'_>> = tables
                .iter()
                .map(|blocks| Span {
                    tokens: &[7],
                    start: start as u32,
                    blocks,
                    logits: LogitRows::Last,
                })
                .collect();
            self.backend.step(&StepPlan::logits(&spans), &mut self.output)?;
        }
        Ok(told(batch * steps, began))
    }

    fn prefill(&mut self, tokens: usize) -> Result<Value, Box<dyn Error>> {
        let (prompt, blocks) = (prompt(tokens), table(0, tokens));
        let began = Instant::now();
        for (index, chunk) in prompt.chunks(STEP_TOKENS as usize).enumerate() {
            let start = index as u32 * STEP_TOKENS;
            let span = Span { tokens: chunk, start, blocks: &blocks, logits: LogitRows::Last };
            self.backend.step(&StepPlan::logits(&[span]), &mut self.output)?;
        }
        Ok(told(tokens, began))
    }
}

impl Obeys for Steps {
    fn obey(&mut self, words: &[&str]) -> Result<Value, Box<dyn Error>> {
        match *words {
            ["greedy", tokens, prompt] => {
                let prompt: Vec<u32> =
                    prompt.split(',').map(str::parse).collect::<Result<_, _>>()?;
                self.greedy(tokens.parse()?, &prompt)
            }
            ["decode", batch, context, steps] => {
                self.decode(batch.parse()?, context.parse()?, steps.parse()?)
            }
            ["prefill", tokens] => self.prefill(tokens.parse()?),
            ["bandwidth"] => Ok(bandwidth(self.backend.device().threads as usize)),
            _ => Err(format!("cannot {}", words.join(" ")).into()),
        }
    }

    fn about(&self) -> Value {
        let device = self.backend.device();
        let StepLimits { tokens, logit_rows } = self.backend.limits();
        json!({
            "engine": "tollgate", "version": env!("CARGO_PKG_VERSION"), "device": device.name,
            "threads": device.threads, "step_tokens": tokens, "logit_rows": logit_rows,
        })
    }
}

fn told(tokens: usize, began: Instant) -> Value {
    json!({ "tokens": tokens, "seconds": began.elapsed().as_secs_f64() })
}

/// Returns the best bandwidth at which all threads read together. Decode reads every
/// weight once a step, so the bandwidth bounds decode.
fn bandwidth(threads: usize) -> Value {
    let memory = vec![1_u64; 128 << 20];
    let best = (0..PASSES).map(|_| read_once(&memory, threads)).min().unwrap_or_default();
    json!({ "bytes": memory.len() * 8, "seconds": best.as_secs_f64() })
}

fn read_once(memory: &[u64], threads: usize) -> Duration {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for part in memory.chunks(memory.len().div_ceil(threads)) {
            scope.spawn(move || {
                let sums =
                    part.as_chunks::<32>().0.iter().fold([0_u64; 32], |sums, chunk| {
                        std::array::from_fn(|i| sums[i] ^ chunk[i])
                    });
                std::hint::black_box(sums);
            });
        }
    });
    began.elapsed()
}

fn table(sequence: usize, tokens: usize) -> Vec<u32> {
    let blocks = tokens.div_ceil(BLOCK_TOKENS as usize) as u32;
    (0..blocks).map(|block| sequence as u32 * blocks + block).collect()
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|index| index * 7 % 500).collect()
}

/// Tokens for the largest command: sixteen sequences of 512.
const KV_TOKENS: u32 = 8_192;

/// Passes over memory; the best one counts.
const PASSES: u32 = 8;

/// Tokens of one step, the same as the peer's batch.
const STEP_TOKENS: u32 = 512;
