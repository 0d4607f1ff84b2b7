//! The arithmetic of a transformer on a CPU, written once over sixteen lanes
//! and compiled for each instruction set; the best one is chosen at run time.
//!
//! Weights lie in panels of sixteen rows, so that each is read in one stream
//! and serves every token of the step; accumulation is in f32 throughout.
//! `unsafe` lives here: each entry states what it asks of its caller, and
//! [`Kernels`] is only ever made for instructions that this machine has.

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
pub(crate) use norm::NormJob;
pub(crate) use packed::{Packed, PackedFormat, RowSource, padded_columns, padded_rows};
pub(crate) use rotate::{HeadNorms, KvSlot, RotateJob, rotate};
pub(crate) use rows::{Activations, RowView};

/// RowView of a weight matrix in a panel, lanes of a [`vector::Vector`], tokens
/// of a KV block.
pub(crate) const LANES: usize = 16;

/// RowView of activations are padded with zeros to a multiple of this.
pub(crate) const COLUMN_STEP: usize = 32;

/// Buffers of activations hold a multiple of this many rows: kernels may read
/// rows behind the last and write what comes of them nowhere.
pub(crate) const ROW_STEP: usize = 32;
