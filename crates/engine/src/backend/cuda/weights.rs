//! The upload of a model's weights: q, k and v as one matrix, gate and up as one,
//! matrices in bf16, vectors in f32.

use std::sync::Arc;

use super::driver::{Context, DeviceMemory, DriverFault};
use crate::model::ModelConfig;
use crate::model::names::*;
use crate::weights::{Element, Tensor, Weights, WeightsError};

/// A model in device memory.
pub(super) struct DeviceModel {
    pub(super) embedding: DeviceMemory,
    /// The output head; `None` if the head is the embedding.
    head: Option<DeviceMemory>,
    pub(super) layers: Vec<DeviceLayer>,
    /// Scale of the last norm.
    pub(super) norm: DeviceMemory,
    /// Turns of each pair of a head from one position to the next, in whole turns, f64.
    pub(super) turns: DeviceMemory,
}

/// One layer of the model.
pub(super) struct DeviceLayer {
    pub(super) input_norm: DeviceMemory,
    pub(super) qkv: DeviceMemory,
    pub(super) qkv_bias: Option<DeviceMemory>,
    /// Scales of the norms of query and key heads.
    pub(super) head_norms: Option<(DeviceMemory, DeviceMemory)>,
    pub(super) output: DeviceMemory,
    pub(super) post_norm: DeviceMemory,
    pub(super) gate_up: DeviceMemory,
    pub(super) down: DeviceMemory,
    /// Tokens that attention looks back; 0 for no limit.
    pub(super) window: u32,
}

/// The origin of the weights.
pub(super) enum Origin<'a> {
    /// The files of a model.
    Files(&'a Weights),
    /// Random values: scales are 1, biases 0, and matrices repeat the same noise.
    /// Serves to measure shapes without their files.
    Noise(Vec<u8>),
}

impl Origin<'_> {
    /// Returns noise for [`Origin::Noise`], bf16 between -1/32 and 1/32.
    pub(super) fn noise() -> Self {
        let mut state = 1_u64;
        let mut bytes = Vec::with_capacity(2 * NOISE);
        for _ in 0..NOISE {
            // Knuth's MMIX generator; its upper bits are good enough for noise.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let part = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bytes.extend(half::bf16::from_f32(part / 32.0).to_le_bytes());
        }
        Self::Noise(bytes)
    }
}

/// The reasons why weights were not uploaded.
pub(super) enum LoadError {
    Weights(WeightsError),
    Driver(DriverFault),
}

impl From<WeightsError> for LoadError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl From<DriverFault> for LoadError {
    fn from(fault: DriverFault) -> Self {
        Self::Driver(fault)
    }
}

/// Returns the bytes of the model's matrices and vectors on the device.
pub(super) fn bytes_of(config: &ModelConfig) -> u64 {
    let of = |a: u32, b: u64| u64::from(a) * b;
    let hidden = u64::from(config.hidden);
    let (queries, keys) = (config.query_width() as u64, config.kv_width() as u64);
    let table = of(config.vocabulary, hidden);
    let layer =
        hidden * (queries + 2 * keys) + queries * hidden + of(3 * config.intermediate, hidden);
    let vectors = 2 * hidden + queries + 2 * keys + of(2, u64::from(config.head_dim));
    let tables = if config.tied { table } else { 2 * table };
    // Matrices take 2 bytes an element, vectors 4.
    2 * (tables + of(config.layers, layer)) + 4 * of(config.layers, vectors) + 4 * hidden
}

impl DeviceModel {
    pub(super) fn load(
        config: &ModelConfig,
        origin: &Origin<'_>,
        context: &Arc<Context>,
    ) -> Result<Self, LoadError> {
        let source = match origin {
            Origin::Files(weights) => LoadedOrigin::Files(weights),
            Origin::Noise(noise) => LoadedOrigin::Noise(written(context, noise)?),
        };
        DeviceLoader { config, source, context }.model()
    }

    /// Returns the matrix of the output head.
    pub(super) fn head(&self) -> &DeviceMemory {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// An [`Origin`] with its noise already uploaded.
enum LoadedOrigin<'a> {
    Files(&'a Weights),
    Noise(DeviceMemory),
}

struct DeviceLoader<'a> {
    config: &'a ModelConfig,
    source: LoadedOrigin<'a>,
    context: &'a Arc<Context>,
}

impl DeviceLoader<'_> {
    fn model(&self) -> Result<DeviceModel, LoadError> {
        let config = self.config;
        let (vocabulary, hidden) = (config.vocabulary as usize, config.hidden as usize);
        let turns: Vec<u8> = config
            .rope
            .frequencies(config.head_dim)
            .into_iter()
            // Whole turns in f64 keep their fraction at large positions; the kernel
            // subtracts the whole part.
            .flat_map(|radians| (radians / std::f64::consts::TAU).to_le_bytes())
            .collect();
        Ok(DeviceModel {
            embedding: self.matrix(&[(EMBEDDING.to_owned(), vocabulary)], hidden)?,
            head: match config.tied {
                true => None,
                // Only untied models have a tensor of this name.
                false => Some(self.matrix(&[(HEAD.to_owned(), vocabulary)], hidden)?),
            },
            layers: (0..config.layers as usize)
                .map(|index| self.layer(index))
                .collect::<Result<_, _>>()?,
            norm: self.vector(&[(NORM.to_owned(), hidden)])?,
            turns: written(self.context, &turns)?,
        })
    }

    fn layer(&self, index: usize) -> Result<DeviceLayer, LoadError> {
        let config = self.config;
        let (hidden, head) = (config.hidden as usize, config.head_dim as usize);
        let intermediate = config.intermediate as usize;
        let of = |part: &str, rows: usize| (layer_tensor(index, part), rows);
        let head_norms = match config.family.has_qk_norm() {
            false => None,
            true => Some((self.vector(&[of(Q_NORM, head)])?, self.vector(&[of(K_NORM, head)])?)),
        };
        let qkv_bias = match config.family.has_qkv_bias() {
            false => None,
            true => Some(self.vector(&qkv_parts(config, index, "bias"))?),
        };
        Ok(DeviceLayer {
            input_norm: self.vector(&[of(INPUT_NORM, hidden)])?,
            qkv: self.matrix(&qkv_parts(config, index, "weight"), hidden)?,
            qkv_bias,
            head_norms,
            output: self.matrix(&[of(OUTPUT, hidden)], config.query_width())?,
            post_norm: self.vector(&[of(POST_NORM, hidden)])?,
            gate_up: self.matrix(&[of(GATE, intermediate), of(UP, intermediate)], hidden)?,
            down: self.matrix(&[of(DOWN, hidden)], intermediate)?,
            // To the kernels, 0 means that the layer sees all of the context.
            window: config.windows[index].unwrap_or(0),
        })
    }

    /// Uploads the rows of all parts, one below the other, in bf16.
    fn matrix(&self, parts: &[(String, usize)], columns: usize) -> Result<DeviceMemory, LoadError> {
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let memory = self.context.allocate(2 * rows * columns)?;
        let weights = match &self.source {
            LoadedOrigin::Files(weights) => weights,
            LoadedOrigin::Noise(noise) => {
                self.context.repeat(&memory, noise)?;
                self.context.wait()?;
                return Ok(memory);
            }
        };
        let mut place = 0;
        for (name, rows) in parts {
            let tensor = weights.tensor(name, &[*rows, columns])?;
            self.narrowed(tensor, |bytes| {
                let written = self.context.write(memory.at(place), bytes);
                place += bytes.len();
                written
            })?;
        }
        Ok(memory)
    }

    /// Converts a tensor to bf16 and passes it on piece by piece.
    fn narrowed(
        &self,
        tensor: Tensor<'_>,
        mut write: impl FnMut(&[u8]) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        // The file's bytes are already in the device's format.
        if tensor.element == Element::Bf16 {
            return write(tensor.bytes);
        }
        let elements = tensor.bytes.len() / tensor.element.size();
        let mut wide = vec![0.0_f32; PIECE.min(elements)];
        // A whole matrix in f32 would need twice the host memory of the file.
        for start in (0..elements).step_by(PIECE) {
            let end = (start + PIECE).min(elements);
            let wide = &mut wide[..end - start];
            tensor.read(start..end, wide);
            let narrow: Vec<u8> =
                wide.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
            write(&narrow)?;
        }
        Ok(())
    }

    /// Uploads all parts, one after the other, in f32.
    fn vector(&self, parts: &[(String, usize)]) -> Result<DeviceMemory, LoadError> {
        let mut all = Vec::new();
        for (name, length) in parts {
            let mut values = vec![0.0_f32; *length];
            match &self.source {
                LoadedOrigin::Files(weights) => {
                    weights.tensor(name, &[*length])?.read(0..*length, &mut values);
                }
                LoadedOrigin::Noise(_) if name.ends_with("bias") => {}
                LoadedOrigin::Noise(_) => values.fill(1.0),
            }
            all.extend(values.into_iter().flat_map(f32::to_le_bytes));
        }
        Ok(written(self.context, &all)?)
    }
}

fn written(context: &Arc<Context>, bytes: &[u8]) -> Result<DeviceMemory, DriverFault> {
    let memory = context.allocate(bytes.len())?;
    context.write(memory.address(), bytes)?;
    Ok(memory)
}

/// Elements that are converted at a time.
const PIECE: usize = 1 << 20;

/// Elements of noise. The number is odd, so that no two rows of a matrix are equal.
const NOISE: usize = (16 << 20) - 1;
