//! The forward pass of one step on the CPU: its passes, and the split of each pass over
//! the threads.

use std::ops::Range;
use std::sync::Mutex;

use super::layout::{StepLayout, Token};
use super::load::{CpuLayer, CpuModel};
use super::pool::Pool;
use super::scratch::Views;
use crate::backend::Span;
use crate::kernels::{
    AttentionJob, AttentionScratch, AttentionTask, HeadNorms, Kernels, KvView, LinearEpilogue,
    LinearJob, NormJob, NormRow, ROW_STEP, RotateJob, RowView, rotate,
};
use crate::model::ModelConfig;

/// Everything that a step reads, and views of everything that it writes.
pub(super) struct Forward<'a> {
    pub(super) kernels: Kernels,
    pub(super) pool: &'a Pool,
    pub(super) config: &'a ModelConfig,
    pub(super) model: &'a CpuModel,
    pub(super) spans: &'a [Span<'a>],
    pub(super) layout: &'a StepLayout,
    pub(super) attention: &'a [Mutex<AttentionScratch>],
    pub(super) views: Views,
}

impl Forward<'_> {
    /// Fills the residual stream with the tokens' embeddings.
    pub(super) fn embed(&self) {
        let hidden = self.config.hidden as usize;
        let tokens = &self.layout.tokens;
        self.for_rows(0..tokens.len(), EMBED_ROWS, |row| {
            // SAFETY: the stream has a row for each token, and each row is in exactly
            // one chunk of this pass.
            let to =
                unsafe { std::slice::from_raw_parts_mut(self.views.residual.row(row), hidden) };
            self.model.embed(tokens[row].id as usize, to);
        });
    }

    /// Computes one layer: attention, then the feed-forward network. Each adds its
    /// result to the residual stream.
    pub(super) fn layer(&self, layer: &CpuLayer, kv: KvView) {
        let Views { residual, normed, qkv, attended, gated } = self.views;
        let heads = self.config.heads as usize;
        let head_dim = self.config.head_dim as usize;
        self.normalise(&layer.input_norm);
        self.linear(&LinearJob {
            input: normed,
            weights: &layer.qkv,
            epilogue: LinearEpilogue::Store { output: qkv, bias: &layer.qkv_bias },
        });
        self.rotate(&RotateJob {
            qkv,
            heads,
            head_dim,
            angles: &self.layout.angles,
            norms: layer.head_norms.as_ref().map(|(query, key)| HeadNorms {
                query,
                key,
                epsilon: self.config.norm_epsilon,
            }),
            kv,
        });
        self.attend(&AttentionJob {
            queries: qkv,
            output: attended,
            kv,
            group: heads / kv.heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: layer.window.map(|window| window as usize),
        });
        let epilogue = || LinearEpilogue::Add { output: residual };
        self.linear(&LinearJob { input: attended, weights: &layer.output, epilogue: epilogue() });
        self.normalise(&layer.post_norm);
        self.linear(&LinearJob {
            input: normed,
            weights: &layer.gate_up,
            epilogue: LinearEpilogue::Gate { output: gated },
        });
        self.linear(&LinearJob { input: gated, weights: &layer.down, epilogue: epilogue() });
    }

    /// Computes the last norm and the output head for the rows that produce logits.
    pub(super) fn head(&self, logits: &mut [f32]) {
        let wanted = &self.layout.logit_rows;
        self.normalise_rows(&self.model.norm, wanted.len(), |row| wanted[row] as usize);
        let output = RowView::of_slice(logits, self.config.vocabulary as usize);
        let job = LinearJob {
            input: self.views.normed,
            weights: &self.model.head,
            epilogue: LinearEpilogue::Store { output, bias: &[] },
        };
        self.linear_rows(&job, wanted.len());
    }

    fn normalise(&self, weight: &[f32]) {
        self.normalise_rows(weight, self.layout.tokens.len(), |row| row);
    }

    fn normalise_rows(&self, weight: &[f32], rows: usize, from: impl Fn(usize) -> usize + Sync) {
        let job = NormJob {
            input: self.views.residual,
            weight,
            epsilon: self.config.norm_epsilon,
            width: self.config.hidden as usize,
            output: self.views.normed,
        };
        self.for_rows(0..rows, NORM_ROWS, |row| {
            // SAFETY: both views have a row for each token, and each row is in exactly
            // one chunk of this pass.
            unsafe { self.kernels.normalise(&job, NormRow { from: from(row), to: row }) }
        });
    }

    fn linear(&self, job: &LinearJob<'_>) {
        self.linear_rows(job, self.layout.tokens.len());
    }

    /// Computes a linear layer. The work is split by pairs of panels, and by tokens if
    /// their rows would not fit into a core's cache.
    fn linear_rows(&self, job: &LinearJob<'_>, rows: usize) {
        let row_bytes = job.weights.padded_columns() * size_of::<f32>();
        let band = (BAND_BYTES / row_bytes / ROW_STEP * ROW_STEP).max(ROW_STEP);
        let bands = rows.div_ceil(band);
        let pairs = job.weights.pairs();
        let least = (CHUNK_BYTES / (job.weights.pair_bytes() * rows.div_ceil(8)).max(1)).max(1);
        let share = pairs.div_ceil(self.pool.threads() * CHUNKS_PER_THREAD).max(least);
        let shares = pairs.div_ceil(share);
        self.pool.run(bands * shares, &|_, chunk| {
            let (band_index, share_index) = (chunk / shares, chunk % shares);
            let pairs = share_index * share..((share_index + 1) * share).min(pairs);
            let rows = band_index * band..((band_index + 1) * band).min(rows);
            // SAFETY: the buffers have a row for each token, up to a multiple of
            // `ROW_STEP`, as wide as the model's layers, which the views were made for.
            // Each output is in exactly one chunk of this pass.
            unsafe { self.kernels.linear(job, pairs, rows) }
        });
    }

    fn rotate(&self, job: &RotateJob<'_>) {
        let tokens = &self.layout.tokens;
        self.for_rows(0..tokens.len(), ROTATE_ROWS, |row| {
            let Token { slot, .. } = tokens[row];
            // SAFETY: QKV has a row for each token. The layout has checked that no
            // block is written by two spans, and each token is in exactly one chunk of
            // this pass.
            unsafe { rotate(job, row, slot) }
        });
    }

    #[expect(
        clippy::expect_used,
        reason = "a thread locks its own scratch only, and a panic of a thread ends the step"
    )]
    fn attend(&self, job: &AttentionJob) {
        let heads = job.kv.heads;
        let tasks = &self.layout.tasks;
        self.pool.run(tasks.len() * heads, &|thread, chunk| {
            let task = &tasks[chunk / heads];
            let task = AttentionTask {
                row: task.row as usize,
                tokens: task.tokens as usize,
                position: task.position as usize,
                kv_head: chunk % heads,
                blocks: self.spans[task.span as usize].blocks,
            };
            let mut scratch =
                // A thread only locks its own scratch, so the lock is always free.
                self.attention[thread].lock().expect("a thread that panicked has stopped the step");
            // SAFETY: the plan was checked, so blocks are in the pool and cover the
            // tokens. The previous pass wrote the last of their keys. Each task's heads
            // of its rows are in exactly one chunk of this pass.
            unsafe { self.kernels.attend(job, &task, &mut scratch) }
        });
    }

    /// Calls `work` for each of the rows. A thread takes this many rows at once.
    fn for_rows(&self, rows: Range<usize>, at_once: usize, work: impl Fn(usize) + Sync) {
        self.pool.run(rows.len().div_ceil(at_once), &|_, chunk| {
            let first = rows.start + chunk * at_once;
            for row in first..(first + at_once).min(rows.end) {
                work(row);
            }
        });
    }
}

/// Bytes of activation rows that stay in a core's second-level cache beside a pair of
/// panels.
const BAND_BYTES: usize = 2 << 20;
/// The least bytes that make a chunk worth handing to another thread.
const CHUNK_BYTES: usize = 64 << 10;
// Several chunks for each thread even out cores that other processes slow down.
const CHUNKS_PER_THREAD: usize = 6;
const EMBED_ROWS: usize = 8;
const NORM_ROWS: usize = 16;
const ROTATE_ROWS: usize = 8;
