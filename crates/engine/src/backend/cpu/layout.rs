//! The plan of a step, laid out for the passes: the tokens with their cache slots, the
//! rotation angles, the attention tasks and the rows of logits.

use crate::backend::{BLOCK_TOKENS, BackendError, LogitRows, PlanFault, Span};
use crate::kernels::{KvSlot, tokens_of_task};
use crate::model::ModelConfig;

pub(super) struct StepLayout {
    /// Every token of the step, in the order of the spans.
    pub(super) tokens: Vec<Token>,
    /// Cosines, then sines, of each token's angles: `head_dim` numbers a token.
    pub(super) angles: Vec<f32>,
    /// Attention tasks, in the order of spans and positions.
    pub(super) tasks: Vec<Task>,
    /// Rows of tokens that produce logits.
    pub(super) logit_rows: Vec<u32>,
    frequencies: Vec<f64>,
    task_tokens: usize,
    /// The last step that wrote to each KV block.
    written: Vec<u64>,
    step: u64,
}

/// A token of the step.
#[derive(Clone, Copy)]
pub(super) struct Token {
    pub(super) id: u32,
    pub(super) slot: KvSlot,
}

/// Attention of some neighbouring tokens of one span. One task is computed for one KV
/// head at a time.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) span: u32,
    /// Row of the first token in the step.
    pub(super) row: u32,
    /// Position of the first token in its sequence.
    pub(super) position: u32,
    pub(super) tokens: u32,
}

impl StepLayout {
    /// Creates a layout for steps of up to `tokens` tokens over a pool of `blocks` KV
    /// blocks.
    pub(super) fn new(config: &ModelConfig, tokens: usize, blocks: u32) -> Self {
        Self {
            tokens: Vec::with_capacity(tokens),
            angles: Vec::with_capacity(tokens * config.head_dim as usize),
            tasks: Vec::with_capacity(tokens),
            logit_rows: Vec::with_capacity(tokens),
            frequencies: config.rope.frequencies(config.head_dim),
            task_tokens: tokens_of_task((config.heads / config.kv_heads) as usize),
            written: vec![0; blocks as usize],
            step: 0,
        }
    }

    /// Lays out spans that were already checked one by one.
    ///
    /// # Errors
    /// [`PlanFault::BlockShared`] if two spans would write to one block, which two
    /// threads could do at the same time.
    pub(super) fn lay_out(&mut self, spans: &[Span<'_>]) -> Result<(), BackendError> {
        self.tokens.clear();
        self.angles.clear();
        self.tasks.clear();
        self.logit_rows.clear();
        self.step += 1;
        for (index, span) in spans.iter().enumerate() {
            self.claim_blocks(span).map_err(|reason| BackendError::Plan { span: index, reason })?;
            self.lay_out_span(index as u32, span);
        }
        Ok(())
    }

    fn claim_blocks(&mut self, span: &Span<'_>) -> Result<(), PlanFault> {
        let last = ((span.end() - 1) / u64::from(BLOCK_TOKENS)) as usize;
        for &block in &span.blocks[(span.start / BLOCK_TOKENS) as usize..=last] {
            // Marking blocks with the step's number needs no clearing between steps.
            let written = std::mem::replace(&mut self.written[block as usize], self.step);
            if written == self.step {
                return Err(PlanFault::BlockShared { block });
            }
        }
        Ok(())
    }

    fn lay_out_span(&mut self, index: u32, span: &Span<'_>) {
        let first = self.tokens.len() as u32;
        for (position, &id) in (span.start..).zip(span.tokens) {
            let block = span.blocks[(position / BLOCK_TOKENS) as usize];
            self.tokens.push(Token { id, slot: KvSlot { block, slot: position % BLOCK_TOKENS } });
            // f64, because an f32 angle loses its fraction at positions of long
            // contexts.
            let angles = self.frequencies.iter().map(|by| by * f64::from(position));
            self.angles.extend(angles.clone().map(|angle| angle.cos() as f32));
            self.angles.extend(angles.map(|angle| angle.sin() as f32));
        }
        let count = span.tokens.len() as u32;
        for offset in (0..count).step_by(self.task_tokens) {
            self.tasks.push(Task {
                span: index,
                row: first + offset,
                position: span.start + offset,
                tokens: (count - offset).min(self.task_tokens as u32),
            });
        }
        match span.logits {
            LogitRows::None => {}
            LogitRows::Last => self.logit_rows.push(first + count - 1),
            LogitRows::All => self.logit_rows.extend(first..first + count),
        }
    }
}
