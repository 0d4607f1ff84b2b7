//! The working memory of a step, taken once for the largest step.

use std::io;
use std::sync::Mutex;

use super::CpuError;
use super::cache::KvCache;
use super::layout::StepLayout;
use crate::kernels::{
    Activations, AttentionScratch, Buffer, COLUMN_STEP, ROW_STEP, RowView, padded_columns,
    padded_rows,
};
use crate::model::ModelConfig;

pub(super) struct Scratch {
    pub(super) layout: StepLayout,
    pub(super) buffers: ActivationBuffers,
    /// Scratch for each thread. A thread locks only its own.
    pub(super) attention: Vec<Mutex<AttentionScratch>>,
}

/// Activations between the passes, one row for each token.
pub(super) struct ActivationBuffers {
    residual: Buffer<f32>,
    normed: ActivationBuffer,
    qkv: Buffer<f32>,
    attended: ActivationBuffer,
    gated: ActivationBuffer,
    pitches: Pitches,
}

/// Views of the buffers for the passes of one step.
#[derive(Clone, Copy)]
pub(super) struct Views {
    /// The residual stream, f32.
    pub(super) residual: RowView<f32>,
    /// Input of the QKV, gate and up projections and of the output head.
    pub(super) normed: Activations,
    /// Queries, keys and values.
    pub(super) qkv: RowView<f32>,
    /// Input of the output projection.
    pub(super) attended: Activations,
    /// Input of the down projection.
    pub(super) gated: Activations,
}

enum ActivationBuffer {
    F32(Buffer<f32>),
    Bf16(Buffer<u16>),
}

/// Elements of a row in each buffer.
#[derive(Clone, Copy)]
struct Pitches {
    residual: usize,
    normed: usize,
    qkv: usize,
    attended: usize,
    gated: usize,
}

impl Scratch {
    pub(super) fn new(
        config: &ModelConfig,
        tokens: usize,
        bf16: bool,
        cache: &KvCache,
        threads: usize,
    ) -> Result<Self, CpuError> {
        // The configuration's checks ensure that the division is exact.
        let group = config.heads as usize / cache.heads();
        let attention = || Mutex::new(AttentionScratch::new(group, cache.head_columns()));
        Ok(Self {
            layout: StepLayout::new(config, tokens, cache.blocks()),
            buffers: ActivationBuffers::new(config, tokens, bf16)
                .map_err(|error| CpuError::Memory("activations", error))?,
            attention: (0..threads).map(|_| attention()).collect(),
        })
    }
}

impl ActivationBuffers {
    fn new(config: &ModelConfig, tokens: usize, bf16: bool) -> io::Result<Self> {
        let rows = tokens.next_multiple_of(ROW_STEP);
        let pitches = Pitches {
            residual: padded_columns(config.hidden as usize),
            normed: odd_lines(config.hidden as usize),
            qkv: padded_rows(config.query_width() + 2 * config.kv_width()),
            attended: odd_lines(config.query_width()),
            gated: odd_lines(config.intermediate as usize),
        };
        let activations = |columns| ActivationBuffer::new(bf16, rows * columns);
        Ok(Self {
            residual: Buffer::zeroed(rows * pitches.residual)?,
            normed: activations(pitches.normed)?,
            qkv: Buffer::zeroed(rows * pitches.qkv)?,
            attended: activations(pitches.attended)?,
            gated: activations(pitches.gated)?,
            pitches,
        })
    }

    pub(super) fn views(&mut self) -> Views {
        let pitches = self.pitches;
        Views {
            residual: RowView::of(&mut self.residual, pitches.residual),
            normed: self.normed.view(pitches.normed),
            qkv: RowView::of(&mut self.qkv, pitches.qkv),
            attended: self.attended.view(pitches.attended),
            gated: self.gated.view(pitches.gated),
        }
    }
}

impl ActivationBuffer {
    fn new(bf16: bool, elements: usize) -> io::Result<Self> {
        Ok(if bf16 {
            Self::Bf16(Buffer::zeroed(elements)?)
        } else {
            Self::F32(Buffer::zeroed(elements)?)
        })
    }

    fn view(&mut self, pitch: usize) -> Activations {
        match self {
            Self::F32(buffer) => Activations::F32(RowView::of(buffer, pitch)),
            Self::Bf16(buffer) => Activations::Bf16(RowView::of(buffer, pitch)),
        }
    }
}

/// Returns the pitch for rows of `columns` activations: an odd number of steps, so that
/// neighbouring rows do not compete for the same cache sets.
fn odd_lines(columns: usize) -> usize {
    ((padded_columns(columns) / COLUMN_STEP) | 1) * COLUMN_STEP
}
