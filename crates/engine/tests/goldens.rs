//! Comparison of the forward pass with reference logits of random tiny models of every
//! family. The references come from transformers, which computed them in f32 over the
//! folder's own weights. The same tokens are cut up in every way that a scheduler may
//! choose.
//!
//! The largest difference, relative to the largest absolute logit, must be at most 1e-3
//! for f32 weights and 2e-2 for bf16 weights, on every instruction set that the machine
//! has.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::path::{Path, PathBuf};

use tollgate_engine::Instructions;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::{Backend, BlockCopy, LogitRows, Span, StepOutput, StepPlan};
use tollgate_engine::model::ModelFiles;

struct Golden {
    tokens: Vec<u32>,
    /// Rows of logits, one for each token.
    logits: Vec<f32>,
    vocabulary: usize,
    bound: f32,
}

#[test]
fn single_span_agrees_with_the_reference() {
    over_all(|backend, golden| {
        let blocks = scattered(golden.tokens.len(), 0);
        let mut output = StepOutput::default();
        step(backend, &[span(&golden.tokens, 0, &blocks, LogitRows::All)], &mut output);
        for row in 0..golden.tokens.len() {
            golden.check(row, output.row(row), "plain");
        }
    });
}

#[test]
fn single_tokens_agree_with_the_reference() {
    over_all(|backend, golden| {
        let blocks = scattered(golden.tokens.len(), 3);
        let mut output = StepOutput::default();
        for position in 0..golden.tokens.len() {
            let token = &golden.tokens[position..=position];
            step(backend, &[span(token, position, &blocks, LogitRows::Last)], &mut output);
            golden.check(position, output.row(0), "token by token");
        }
    });
}

#[test]
fn odd_chunks_agree_with_the_reference() {
    over_all(|backend, golden| {
        for size in [2, 5, 7, 15, 16, 17, 33] {
            let blocks = scattered(golden.tokens.len(), size);
            let mut output = StepOutput::default();
            for start in (0..golden.tokens.len()).step_by(size) {
                let chunk = &golden.tokens[start..golden.tokens.len().min(start + size)];
                step(backend, &[span(chunk, start, &blocks, LogitRows::All)], &mut output);
                for row in 0..chunk.len() {
                    golden.check(start + row, output.row(row), "chunks");
                }
            }
        }
    });
}

#[test]
fn ragged_batches_agree_with_the_reference() {
    over_all(|backend, golden| {
        // Sequences of the same tokens at different positions: some read their prompt
        // while others decode, and one asks for no logits.
        let total = golden.tokens.len();
        let strides = [1, 3, 48, 11, 1, 16, 5];
        let tables: Vec<Vec<u32>> = (0..strides.len()).map(|i| scattered(total, 5 * i)).collect();
        let mut places = vec![0_usize; strides.len()];
        let mut output = StepOutput::default();
        while places.iter().any(|&place| place < total) {
            let mut spans = Vec::new();
            let mut expected = Vec::new();
            for (index, (place, stride)) in places.iter_mut().zip(strides).enumerate() {
                let end = total.min(*place + stride);
                if *place == end {
                    continue;
                }
                let logits = match index {
                    3 => LogitRows::None,
                    0 | 2 => LogitRows::All,
                    _ => LogitRows::Last,
                };
                spans.push(span(&golden.tokens[*place..end], *place, &tables[index], logits));
                match logits {
                    LogitRows::None => {}
                    LogitRows::Last => expected.push(end - 1),
                    LogitRows::All => expected.extend(*place..end),
                }
                *place = end;
            }
            step(backend, &spans, &mut output);
            assert_eq!(output.rows(), expected.len());
            for (row, position) in expected.into_iter().enumerate() {
                golden.check(position, output.row(row), "ragged");
            }
        }
    });
}

#[test]
fn fork_does_not_change_its_origin() {
    over_all(|backend, golden| {
        // The fork shares whole blocks and copies the partly filled block. Both
        // continue, and the fork first writes other tokens.
        let (head, tail) = golden.tokens.split_at(21);
        let mut output = StepOutput::default();
        step(backend, &[span(head, 0, &[9, 4, 2], LogitRows::Last)], &mut output);
        backend.copy_block(BlockCopy { from: 4, to: 7 });
        let strangers = vec![1; tail.len()];
        step(backend, &[span(&strangers, 21, &[9, 7, 5], LogitRows::None)], &mut output);
        step(backend, &[span(tail, 21, &[9, 4, 2], LogitRows::All)], &mut output);
        for row in 0..tail.len() {
            golden.check(21 + row, output.row(row), "fork");
        }
    });
}

impl Golden {
    fn read(folder: &Path) -> Self {
        let text = std::fs::read(folder.join("golden.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let tokens: Vec<u32> = serde_json::from_value(json["tokens"].clone()).unwrap();
        let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let data = &rest[u64::from_le_bytes(*length) as usize..];
        let logits: Vec<f32> =
            data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let name = folder.file_name().unwrap().to_string_lossy();
        let bound = if name.ends_with("-f32") { 1e-3 } else { 2e-2 };
        Self { vocabulary: logits.len() / tokens.len(), tokens, logits, bound }
    }

    fn check(&self, position: usize, found: &[f32], what: &str) {
        let expected = &self.logits[position * self.vocabulary..][..self.vocabulary];
        let largest = self.logits.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let most = differences.fold(0.0_f32, |most, d| if d <= most { most } else { d });
        assert!(
            most <= self.bound * largest,
            "{what}: at position {position} logits differ by {most}, largest {largest}"
        );
    }
}

fn over_all(check: impl Fn(&mut CpuBackend, &Golden)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 7, "every family has its folder");
    for folder in folders.iter().filter(|folder| folder.join("golden.json").exists()) {
        let golden = Golden::read(folder);
        let files = ModelFiles::open(folder).unwrap();
        for instructions in Instructions::ALL.into_iter().filter(|i| i.is_available()) {
            let options = CpuOptions {
                threads: 2,
                kv_tokens: BLOCKS * 16,
                step_tokens: 128,
                instructions: Some(instructions),
            };
            println!("{} on {instructions}", folder.display());
            check(&mut CpuBackend::new(&files, &options).unwrap(), &golden);
        }
    }
}

fn span<'a>(tokens: &'a [u32], start: usize, blocks: &'a [u32], logits: LogitRows) -> Span<'a> {
    Span { tokens, start: start as u32, blocks, logits }
}

fn step(backend: &mut CpuBackend, spans: &[Span<'_>], output: &mut StepOutput) {
    backend.step(&StepPlan::logits(spans), output).unwrap();
}

/// Returns blocks for `tokens` tokens, out of order. `first` separates sequences.
fn scattered(tokens: usize, first: usize) -> Vec<u32> {
    (0..tokens.div_ceil(16)).map(|i| ((first + i) as u32 * 37) % BLOCKS).collect()
}

/// A prime, so that steps of 37 reach every block.
const BLOCKS: u32 = 101;
