//! The arithmetic of a transformer on a CPU. The kernels are written once over sixteen
//! lanes and compiled for each instruction set; the best set is chosen at run time.
//!
//! Weights lie in panels of sixteen rows, so that a panel is read in one stream and
//! serves every token of the step. Sums are f32 throughout. The `unsafe` code of the
//! CPU backend lives here: each function states what its caller must ensure, and a
//! [`Kernels`] exists only for instructions that this machine has.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod buffer;
mod instructions;
mod linear;
mod norm;
mod packed;
mod portable;
mod rotate;
mod rows;
mod vector;

#[cfg(test)]
mod tests;

pub(crate) use attention::{
    AttentionJob, AttentionScratch, AttentionTask, KvFormat, KvView, tokens_of_task,
};
pub(crate) use buffer::Buffer;
pub use instructions::Instructions;
pub(crate) use instructions::Kernels;
pub(crate) use linear::{LinearEpilogue, LinearJob};
pub(crate) use norm::{NormJob, NormRow};
pub(crate) use packed::{Packed, PackedFormat, RowSource, padded_columns, padded_rows};
pub(crate) use rotate::{HeadNorms, KvSlot, RotateJob, rotate};
pub(crate) use rows::{Activations, RowView};

/// Rows of a weight matrix in a panel; also the lanes of a [`vector::Vector`] and the
/// tokens of a KV block.
pub(crate) const LANES: usize = 16;

/// Multiple that rows of activations are padded to with zeros.
pub(crate) const COLUMN_STEP: usize = 32;

/// Multiple that buffers of activations round their rows up to. Kernels may read rows
/// behind the last one and discard their results.
pub(crate) const ROW_STEP: usize = 32;
