//! Keys and values of every sequence, in blocks of sixteen tokens.
//!
//! The layout is `[layer][block][kv_head][16 x head]`, with keys and values in separate
//! arrays. Within a block, a head's keys form a panel (`[element / 2][token][2]` for
//! bf16, `[element][token]` for f32), and its values lie token by token. Heads are
//! padded to 32 elements with zeros, which are never written.

use std::io;

use super::CpuError;
use crate::backend::BlockCopy;
use crate::kernels::{Buffer, KvFormat, KvView, LANES, padded_columns};
use crate::model::ModelConfig;

pub(super) struct KvCache {
    storage: Storage,
    layers: usize,
    blocks: u32,
    heads: usize,
    head_columns: usize,
}

enum Storage {
    F32 { keys: Buffer<f32>, values: Buffer<f32> },
    Bf16 { keys: Buffer<u16>, values: Buffer<u16> },
}

/// Returns the bytes of keys and values over all layers for one token.
pub(super) fn bytes_per_token(config: &ModelConfig, format: KvFormat) -> u64 {
    let head = padded_columns(config.head_dim as usize) * format.size();
    2 * u64::from(config.layers) * u64::from(config.kv_heads) * head as u64
}

impl KvCache {
    pub(super) fn new(
        config: &ModelConfig,
        format: KvFormat,
        blocks: u32,
    ) -> Result<Self, CpuError> {
        let (layers, heads) = (config.layers as usize, config.kv_heads as usize);
        let head_columns = padded_columns(config.head_dim as usize);
        let storage = [layers, heads, LANES, head_columns]
            .into_iter()
            // Huge options must fail with an error here and not overflow.
            .try_fold(blocks as usize, usize::checked_mul)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
            .and_then(|elements| Storage::new(format, elements))
            .map_err(|error| CpuError::Memory("the KV cache", error))?;
        Ok(Self { storage, layers, blocks, heads, head_columns })
    }

    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the elements of a head with its padding.
    pub(super) fn head_columns(&self) -> usize {
        self.head_columns
    }

    /// Returns the bytes of keys and values over all layers for one token.
    pub(super) fn bytes_per_token(&self) -> u64 {
        let head = self.head_columns * self.storage.format().size();
        (2 * self.layers * self.heads * head) as u64
    }

    /// Returns a view of one layer.
    pub(super) fn layer(&mut self, layer: usize) -> KvView {
        assert!(layer < self.layers, "a layer of the model");
        // Layer-major, so that one pass touches one contiguous part.
        let place = layer * self.blocks as usize * self.block_elements();
        let (keys, values) = match &mut self.storage {
            Storage::F32 { keys, values } => (
                keys.as_mut_slice()[place..].as_mut_ptr().cast(),
                values.as_mut_slice()[place..].as_mut_ptr().cast(),
            ),
            Storage::Bf16 { keys, values } => (
                keys.as_mut_slice()[place..].as_mut_ptr().cast(),
                values.as_mut_slice()[place..].as_mut_ptr().cast(),
            ),
        };
        let format = self.storage.format();
        KvView { format, keys, values, heads: self.heads, head_columns: self.head_columns }
    }

    pub(super) fn copy_block(&mut self, BlockCopy { from, to }: BlockCopy) {
        assert!(from < self.blocks && to < self.blocks, "blocks of the pool");
        let elements = self.block_elements();
        for layer in 0..self.layers {
            let place = |block: u32| (layer * self.blocks as usize + block as usize) * elements;
            let (from, to) = (place(from)..place(from) + elements, place(to));
            match &mut self.storage {
                Storage::F32 { keys, values } => {
                    keys.as_mut_slice().copy_within(from.clone(), to);
                    values.as_mut_slice().copy_within(from, to);
                }
                Storage::Bf16 { keys, values } => {
                    keys.as_mut_slice().copy_within(from.clone(), to);
                    values.as_mut_slice().copy_within(from, to);
                }
            }
        }
    }

    fn block_elements(&self) -> usize {
        self.heads * LANES * self.head_columns
    }
}

impl Storage {
    fn new(format: KvFormat, elements: usize) -> io::Result<Self> {
        Ok(match format {
            KvFormat::F32 => {
                Self::F32 { keys: Buffer::zeroed(elements)?, values: Buffer::zeroed(elements)? }
            }
            KvFormat::Bf16 => {
                Self::Bf16 { keys: Buffer::zeroed(elements)?, values: Buffer::zeroed(elements)? }
            }
        })
    }

    fn format(&self) -> KvFormat {
        match self {
            Self::F32 { .. } => KvFormat::F32,
            Self::Bf16 { .. } => KvFormat::Bf16,
        }
    }
}
