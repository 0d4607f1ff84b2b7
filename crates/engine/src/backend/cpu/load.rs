//! The loading of a model's tensors into the matrices that the kernels read: q, k and v
//! fused, gate and up interleaved, everything in panels.

use std::io;
use std::sync::Mutex;

use super::CpuError;
use super::pool::Pool;
use crate::kernels::{Buffer, LANES, Packed, PackedFormat, RowSource, padded_columns, padded_rows};
use crate::model::names::*;
use crate::model::{ModelConfig, ModelFiles};
use crate::weights::{Element, Tensor, Weights, WeightsError};

pub(super) struct CpuModel {
    /// The embedding; `None` if the output head is the embedding.
    embedding: Option<EmbeddingTable>,
    pub(super) layers: Vec<CpuLayer>,
    /// Scale of the last norm.
    pub(super) norm: Vec<f32>,
    pub(super) head: Packed,
}

pub(super) struct CpuLayer {
    pub(super) input_norm: Vec<f32>,
    pub(super) qkv: Packed,
    /// Biases, padded to the panels' rows; empty if the model has none.
    pub(super) qkv_bias: Vec<f32>,
    /// Scales of the norms of query and key heads.
    pub(super) head_norms: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) output: Packed,
    pub(super) post_norm: Vec<f32>,
    /// Gate and up projection: even panels hold gate, odd panels hold up.
    pub(super) gate_up: Packed,
    pub(super) down: Packed,
    pub(super) window: Option<u32>,
}

/// An embedding, row by row, in the type of its file.
struct EmbeddingTable {
    bytes: Buffer<u16>,
    element: Element,
    columns: usize,
}

impl CpuModel {
    pub(super) fn load(files: &ModelFiles, pool: &Pool) -> Result<Self, CpuError> {
        let loader = Loader {
            config: files.config(),
            weights: files.weights(),
            format: format_of(files.config(), files.weights())?,
            pool,
        };
        loader.model()
    }

    /// Writes the embedding of `token` into `to`.
    pub(super) fn embed(&self, token: usize, to: &mut [f32]) {
        match &self.embedding {
            None => self.head.read_row(token, to),
            Some(table) => table.read_row(token, to),
        }
    }
}

impl EmbeddingTable {
    fn new(tensor: Tensor<'_>, columns: usize) -> io::Result<Self> {
        // Halves of f32 are stored as two words, so that one buffer type serves all
        // formats.
        let mut bytes = Buffer::zeroed(tensor.bytes.len() / 2)?;
        for (to, from) in bytes.as_mut_slice().iter_mut().zip(tensor.bytes.as_chunks::<2>().0) {
            *to = u16::from_ne_bytes(*from);
        }
        Ok(Self { bytes, element: tensor.element, columns })
    }

    fn read_row(&self, row: usize, to: &mut [f32]) {
        let halves = self.element.size() / 2 * self.columns;
        let row = &self.bytes.as_slice()[row * halves..(row + 1) * halves];
        match self.element {
            Element::F32 => {
                for (to, [low, high]) in to.iter_mut().zip(row.as_chunks::<2>().0) {
                    let ([a, b], [c, d]) = (low.to_ne_bytes(), high.to_ne_bytes());
                    *to = f32::from_le_bytes([a, b, c, d]);
                }
            }
            Element::F16 => {
                for (to, half) in to.iter_mut().zip(row) {
                    *to = half::f16::from_le_bytes(half.to_ne_bytes()).to_f32();
                }
            }
            Element::Bf16 => {
                for (to, half) in to.iter_mut().zip(row) {
                    *to = half::bf16::from_le_bytes(half.to_ne_bytes()).to_f32();
                }
            }
        }
    }
}

struct Loader<'a> {
    config: &'a ModelConfig,
    weights: &'a Weights,
    format: PackedFormat,
    pool: &'a Pool,
}

impl Loader<'_> {
    fn model(&self) -> Result<CpuModel, CpuError> {
        let config = self.config;
        let (vocabulary, hidden) = (config.vocabulary as usize, config.hidden as usize);
        let embedding = self.weights.tensor(EMBEDDING, &[vocabulary, hidden])?;
        let layers = (0..config.layers as usize).map(|index| self.layer(index));
        Ok(CpuModel {
            layers: layers.collect::<Result<_, _>>()?,
            norm: self.vector(NORM, hidden)?,
            head: self.matrix(if config.tied { EMBEDDING } else { HEAD }, [vocabulary, hidden])?,
            embedding: match config.tied {
                true => None,
                false => Some(
                    EmbeddingTable::new(embedding, hidden)
                        .map_err(|error| CpuError::Memory("the embedding", error))?,
                ),
            },
        })
    }

    fn layer(&self, index: usize) -> Result<CpuLayer, CpuError> {
        let config = self.config;
        let name = |part: &str| layer_tensor(index, part);
        let hidden = config.hidden as usize;
        let intermediate = config.intermediate as usize;
        let head_norms = match config.family.has_qk_norm() {
            false => None,
            true => Some((
                self.plain(&name(Q_NORM), config.head_dim as usize)?,
                self.plain(&name(K_NORM), config.head_dim as usize)?,
            )),
        };
        Ok(CpuLayer {
            input_norm: self.vector(&name(INPUT_NORM), hidden)?,
            qkv: self.qkv(index)?,
            qkv_bias: self.qkv_bias(index)?,
            head_norms,
            output: self.matrix(&name(OUTPUT), [hidden, config.query_width()])?,
            post_norm: self.vector(&name(POST_NORM), hidden)?,
            gate_up: self.gate_up(index)?,
            down: self.matrix(&name(DOWN), [hidden, intermediate])?,
            window: config.windows[index],
        })
    }

    fn qkv(&self, index: usize) -> Result<Packed, CpuError> {
        let hidden = self.config.hidden as usize;
        let mut tensors = Vec::with_capacity(3);
        for (name, rows) in qkv_parts(self.config, index, "weight") {
            tensors.push((self.weights.tensor(&name, &[rows, hidden])?, rows));
        }
        let rows = tensors.iter().map(|(_, rows)| rows).sum();
        self.pack([rows, hidden], |mut row| {
            tensors.iter().find_map(|&(tensor, rows)| {
                let here = (row < rows).then_some(RowSource { tensor, row });
                // The index within the next tensor. After a hit the wrapped value is
                // not used.
                row = row.wrapping_sub(rows);
                here
            })
        })
    }

    fn qkv_bias(&self, index: usize) -> Result<Vec<f32>, CpuError> {
        let mut bias = Vec::new();
        if self.config.family.has_qkv_bias() {
            for (name, rows) in qkv_parts(self.config, index, "bias") {
                bias.extend(self.plain(&name, rows)?);
            }
            // The epilogue adds whole vectors, so the bias must be as long as the
            // panels' rows.
            bias.resize(padded_rows(bias.len()), 0.0);
        }
        Ok(bias)
    }

    fn gate_up(&self, index: usize) -> Result<Packed, CpuError> {
        let (hidden, rows) = (self.config.hidden as usize, self.config.intermediate as usize);
        let gate = self.weights.tensor(&layer_tensor(index, GATE), &[rows, hidden])?;
        let up = self.weights.tensor(&layer_tensor(index, UP), &[rows, hidden])?;
        // Gate and up of the same outputs lie in neighbouring panels, so one epilogue
        // sees both.
        let panels = rows.div_ceil(LANES);
        self.pack([2 * LANES * panels, hidden], |row| {
            let (panel, lane) = (row / LANES, row % LANES);
            let tensor = if panel % 2 == 0 { gate } else { up };
            let row = panel / 2 * LANES + lane;
            (row < rows).then_some(RowSource { tensor, row })
        })
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Packed, CpuError> {
        let tensor = self.weights.tensor(name, &shape)?;
        let [rows, _] = shape;
        self.pack(shape, |row| (row < rows).then_some(RowSource { tensor, row }))
    }

    /// Packs a matrix of this many rows and columns. `source` names the tensor and row of each; rows
    /// without a source stay zero, as does the padding.
    #[expect(clippy::expect_used, reason = "one thread locks each panel, once")]
    fn pack<'t>(
        &self,
        shape: [usize; 2],
        source: impl Fn(usize) -> Option<RowSource<'t>> + Sync,
    ) -> Result<Packed, CpuError> {
        let [_, columns] = shape;
        let mut packed = Packed::zeroed(self.format, shape)
            .map_err(|error| CpuError::Memory("the weights", error))?;
        let panels: Vec<_> = packed.panels_mut().into_iter().map(Mutex::new).collect();
        self.pool.run(panels.len(), &|_, index| {
            // The lock only proves to the compiler that one thread fills a panel.
            let mut panel = panels[index].lock().expect("each panel is filled once");
            let mut scratch = vec![0.0; columns];
            for lane in 0..LANES {
                if let Some(source) = source(index * LANES + lane) {
                    panel.fill(lane, source, &mut scratch);
                }
            }
        });
        // The panels borrow the matrix, which is returned below.
        drop(panels);
        Ok(packed)
    }

    /// Reads a vector as f32, padded with zeros to a row of activations.
    fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, CpuError> {
        let mut vector = self.plain(name, length)?;
        vector.resize(padded_columns(length), 0.0);
        Ok(vector)
    }

    fn plain(&self, name: &str, length: usize) -> Result<Vec<f32>, CpuError> {
        let mut vector = vec![0.0; length];
        self.weights.tensor(name, &[length])?.read(0..length, &mut vector);
        Ok(vector)
    }
}

/// Returns the one format that keeps every matrix of the model exactly.
fn format_of(config: &ModelConfig, weights: &Weights) -> Result<PackedFormat, WeightsError> {
    let (vocabulary, hidden) = (config.vocabulary as usize, config.hidden as usize);
    let (queries, keys) = (config.query_width(), config.kv_width());
    let intermediate = config.intermediate as usize;
    // Norms and biases do not count: they are f32 in memory in any case.
    let mut elements = vec![weights.tensor(EMBEDDING, &[vocabulary, hidden])?.element];
    if !config.tied {
        elements.push(weights.tensor(HEAD, &[vocabulary, hidden])?.element);
    }
    for index in 0..config.layers as usize {
        for (part, shape) in [
            (QUERIES, [queries, hidden]),
            (KEYS, [keys, hidden]),
            (VALUES, [keys, hidden]),
            (OUTPUT, [hidden, queries]),
            (GATE, [intermediate, hidden]),
            (UP, [intermediate, hidden]),
            (DOWN, [hidden, intermediate]),
        ] {
            elements.push(weights.tensor(&layer_tensor(index, part), &shape)?.element);
        }
    }
    Ok(PackedFormat::holding(elements))
}
