//! The steps that set up a backend on a GPU.
//!
//! [`Setup::open`] takes the device and its machine code, [`Setup::load`] brings kernels and weights
//! to it, [`Setup::take_buffers`] takes the memory of a step, and [`Setup::take_cache`] gives the KV
//! cache what is left. The order matters: the cache is sized by what the others took.

use std::sync::Arc;

use tollgate_domain::DeviceNanos;

use super::BLOCKS_PER_MULTIPROCESSOR;
use super::capacity::StepCapacity;
use super::code;
use super::driver::{Blas, Context};
use super::forward::{LayerGemms, head_gemm};
use super::gemm::{Gemm, GemmKind, GemmRunner};
use super::kernel_module::{KernelModule, SOURCE};
use super::kernels::{self, HeadDim};
use super::memory::{DeviceBuffers, DeviceCache, kv_bytes_per_token};
use super::options::{CudaError, CudaOptions, KernelChoice, Launches};
use super::probe::{self, OpenedDevice, device_class};
use super::weights::{self, DeviceModel, Origin};
use crate::backend::{BLOCK_TOKENS, DeviceInfo, ModelShape, StepLimits};
use crate::model::ModelConfig;

/// A backend that is being set up: the opened device, and the options that apply to it.
pub(super) struct Setup<'a> {
    config: &'a ModelConfig,
    options: &'a CudaOptions,
    pub(super) context: Arc<Context>,
    pub(super) device: DeviceInfo,
    pub(super) multiprocessors: u32,
    /// True if steps that only decode may run as graphs.
    pub(super) has_graphs: bool,
    /// Lines for the log.
    pub(super) notes: Vec<String>,
    /// Machine code of the kernels for this device.
    image: Vec<u8>,
    /// True if a kernel may start while the kernel before it ends.
    overlaps: bool,
    /// Bytes of the device that were free before the setup took any.
    free: u64,
    /// Bytes that the setup may take.
    allowed: u64,
}

/// Kernels and weights on the device.
pub(super) struct Loaded {
    pub(super) module: KernelModule,
    pub(super) gemms: GemmRunner,
    pub(super) model: DeviceModel,
}

/// The limits of a step, and the buffers that are large enough for them.
pub(super) struct StepMemory {
    pub(super) limits: StepLimits,
    pub(super) buffers: DeviceBuffers,
    /// Capacity without KV blocks, which are counted last.
    capacity: StepCapacity,
}

impl<'a> Setup<'a> {
    /// Opens the selected device, finds machine code for it, and checks that the model can fit.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`], [`CudaError::Code`], [`CudaError::Memory`] or [`CudaError::Driver`].
    pub(super) fn open(
        config: &'a ModelConfig,
        options: &'a CudaOptions,
    ) -> Result<Self, CudaError> {
        let opened = probe::open(&options.device)?;
        let is_deterministic = options.kernels == KernelChoice::Deterministic;
        let mut device = info(&opened);
        let OpenedDevice { context, listed } = opened;
        let mut notes = vec![format!("{} ({})", listed.name, listed.uuid)];
        if is_deterministic {
            // Deterministic kernels are slower. The name is part of the calibration's key, so
            // these kernels get prices of their own.
            device.name.push_str(" (deterministic)");
            notes.push("deterministic kernels: results do not depend on the batch".to_owned());
        }
        let code = code::obtain(&SOURCE, &code::target_of(listed.capability), &options.folders)?;
        notes.push(code.origin);
        let free = context.free_bytes()?;
        let allowed = (free as f64 * options.memory_share.clamp(0.0, 1.0)) as u64;
        // Loading takes long, so a model that cannot fit is refused before.
        check_fits(config, allowed)?;
        Ok(Self {
            config,
            options,
            context,
            device,
            multiprocessors: listed.multiprocessors,
            // Deterministic kernels treat every span as prefill, so no step only decodes.
            has_graphs: options.launches != Launches::Single && !is_deterministic,
            notes,
            image: code.image,
            overlaps: options.launches == Launches::Overlapping && listed.capability >= (9, 0),
            free,
            allowed,
        })
    }

    /// Loads the kernels, the vendor's matrix library if the options allow it, and the weights.
    ///
    /// # Errors
    /// [`CudaError::Weights`] or [`CudaError::Driver`].
    pub(super) fn load(&mut self, origin: &Origin<'_>) -> Result<Loaded, CudaError> {
        let module = KernelModule::load(&self.context, &self.image, self.overlaps)?;
        let gemms = match self.options.kernels {
            KernelChoice::Fastest => GemmRunner::new(self.start_vendor_library()),
            KernelChoice::Own => GemmRunner::new(None),
            KernelChoice::Deterministic => GemmRunner::deterministic(),
        };
        let model = DeviceModel::load(self.config, origin, &self.context)?;
        Ok(Loaded { module, gemms, model })
    }

    /// Starts the vendor's matrix library. Without the library the backend's own kernels run.
    fn start_vendor_library(&mut self) -> Option<Blas> {
        match Blas::start(&self.context, &self.options.folders.libraries) {
            Ok(blas) => Some(blas),
            Err(reason) => {
                self.notes.push(format!("{reason}: own kernels multiply instead"));
                None
            }
        }
    }

    /// Takes the buffers of the largest step, and measures the ways to multiply in them.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(super) fn take_buffers(&mut self, loaded: &mut Loaded) -> Result<StepMemory, CudaError> {
        let config = self.config;
        let tokens = self.options.step_tokens.clamp(1, MOST_STEP_TOKENS);
        let limits = StepLimits { tokens, logit_rows: tokens.min(config.logit_rows(MOST_LOGITS)) };
        let capacity = StepCapacity {
            tokens: tokens as usize,
            logit_rows: limits.logit_rows as usize,
            samples: limits.samples() as usize,
            vocabulary: config.vocabulary,
            context: config.context,
            kv_blocks: 0,
            tile: kernels::tile_tokens(config.heads / config.kv_heads),
            has_decode_kernel: self.options.kernels != KernelChoice::Deterministic,
        };
        let parts = parts_at_most(config, limits, self.multiprocessors);
        let buffers = DeviceBuffers::new(&self.context, config, limits, parts)?;
        let Loaded { module, gemms, model } = loaded;
        let kinds = kinds(config, model, &buffers, limits);
        let nanos = self.options.search.as_nanos().min(u128::from(u64::MAX)) as u64;
        // SAFETY: buffers of rows hold a whole bucket of the most that a step may ask for, and the
        // weights are those of the model's layers.
        let searched = unsafe { gemms.search(&self.context, module, &kinds, DeviceNanos(nanos))? };
        if searched > 0 {
            self.notes.push(format!("{searched} matrix products measured"));
        }
        // The library loads code when a product first runs, so the memory that is left can be
        // read only after the search has ended.
        self.context.wait()?;
        Ok(StepMemory { limits, buffers, capacity })
    }

    /// Takes the KV cache: as many blocks as fit into what is left of the allowed memory.
    /// Also returns the capacity of a step with those blocks.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if the cache would be too small to be useful; [`CudaError::Driver`].
    pub(super) fn take_cache(
        &mut self,
        step: &StepMemory,
    ) -> Result<(DeviceCache, StepCapacity), CudaError> {
        let (config, allowed) = (self.config, self.allowed);
        // The driver takes memory for graphs later, when it first captures a step.
        let graphs = if self.has_graphs { GRAPH_BYTES.min(allowed / 32) } else { 0 };
        let plan = 4 * step.capacity.words() as u64;
        let taken = self.free.saturating_sub(self.context.free_bytes()?) + plan + graphs;
        let blocks = blocks_in(config, allowed.saturating_sub(taken));
        if u64::from(blocks) * u64::from(BLOCK_TOKENS) < u64::from(least_context(config)) {
            let least = u64::from(least_context(config)) * kv_bytes_per_token(config);
            return Err(CudaError::Memory { needed: taken + least, allowed });
        }
        let cache = DeviceCache::new(&self.context, config, blocks)?;
        self.context.wait()?;
        self.notes.push(format!(
            "{} MiB of weights and buffers, {} KV blocks in {} MiB",
            taken >> 20,
            blocks,
            (u64::from(blocks) * block_bytes(config)) >> 20
        ));
        Ok((cache, StepCapacity { kv_blocks: blocks, ..step.capacity }))
    }
}

pub(super) fn info(opened: &OpenedDevice) -> DeviceInfo {
    let listed = &opened.listed;
    DeviceInfo {
        class: device_class(&listed.name),
        name: listed.name.clone(),
        uuid: listed.uuid.clone(),
        threads: 0,
    }
}

/// Returns the kernels' head size for a model, or a sentence about what the kernels do
/// not support.
pub(super) fn head_dim_of(config: &ModelConfig) -> Result<HeadDim, String> {
    let head_dim = HeadDim::new(config.head_dim).ok_or_else(|| {
        format!("its head_dim is {}; 32, 64 and 128 are supported", config.head_dim)
    })?;
    for (name, width) in
        [("hidden_size", config.hidden), ("intermediate_size", config.intermediate)]
    {
        if !width.is_multiple_of(8) {
            return Err(format!("its {name} {width} is not a multiple of 8"));
        }
    }
    let group = config.heads / config.kv_heads;
    if group > kernels::MOST_GROUP {
        let most = kernels::MOST_GROUP;
        return Err(format!("{group} heads share one KV head; at most {most} may"));
    }
    Ok(head_dim)
}

/// Returns the matrix products of the largest step. Each has the weights of enough
/// layers to exceed the device's cache.
pub(super) fn kinds(
    config: &ModelConfig,
    model: &DeviceModel,
    buffers: &DeviceBuffers,
    limits: StepLimits,
) -> Vec<GemmKind> {
    let layers: Vec<[Gemm; 4]> = model
        .layers
        .iter()
        .map(|layer| LayerGemms::new(config, buffers, layer, limits.tokens).all())
        .collect();
    let kind = |index: usize| {
        let gemm = layers[0][index];
        let bytes = 2 * gemm.columns as usize * gemm.depth as usize;
        let weights = layers.iter().map(|gemms| gemms[index].weights);
        GemmKind { gemm, weights: weights.take(SEARCHED_BYTES.div_ceil(bytes)).collect() }
    };
    let head = head_gemm(config, buffers, model, limits.logit_rows);
    let head = GemmKind { gemm: head, weights: vec![head.weights] };
    (0..layers[0].len()).map(kind).chain([head]).collect()
}

/// Checks that the model can fit, before anything is loaded.
fn check_fits(config: &ModelConfig, allowed: u64) -> Result<(), CudaError> {
    let least = u64::from(least_context(config)) * kv_bytes_per_token(config);
    let needed = weights::bytes_of(config) + least;
    if needed > allowed { Err(CudaError::Memory { needed, allowed }) } else { Ok(()) }
}

/// Returns the tokens that a useful cache holds at least.
fn least_context(config: &ModelConfig) -> u32 {
    config.context.min(2_048)
}

fn block_bytes(config: &ModelConfig) -> u64 {
    kv_bytes_per_token(config) * u64::from(BLOCK_TOKENS)
}

/// Returns the number of KV blocks that fit into `bytes`, at most as many as a batch
/// can use.
fn blocks_in(config: &ModelConfig, bytes: u64) -> u32 {
    // Each token of the cache may also be on the lists of counted tokens and of
    // prompts, which take 12 bytes a token.
    let block = block_bytes(config) + u64::from(BLOCK_TOKENS) * 12;
    u32::try_from(bytes / block).unwrap_or(u32::MAX).min(most_blocks(config))
}

/// Returns the number of KV blocks for [`MOST_SEQUENCES`] sequences of the model's
/// context.
fn most_blocks(config: &ModelConfig) -> u32 {
    config.context.div_ceil(BLOCK_TOKENS).saturating_mul(MOST_SEQUENCES).min(MOST_BLOCKS)
}

pub(super) fn shape_of(config: &ModelConfig, hash: &str, blocks: u32) -> ModelShape {
    ModelShape {
        // A sequence longer than the whole pool could never finish.
        context: config.context.min(blocks.saturating_mul(BLOCK_TOKENS)),
        vocabulary: config.vocabulary,
        layers: config.layers,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        kv_bytes_per_token: kv_bytes_per_token(config),
        end_tokens: config.end_tokens.clone(),
        sampling_defaults: config.sampling_defaults,
        hash: hash.to_owned(),
    }
}

/// Returns the most parts of attention over all heads that a step can have.
fn parts_at_most(config: &ModelConfig, limits: StepLimits, multiprocessors: u32) -> usize {
    let group = (config.heads / config.kv_heads) as usize;
    let device = (BLOCKS_PER_MULTIPROCESSOR * multiprocessors) as usize;
    // A token has more than one part only while there are fewer thread blocks than the
    // device wants.
    let tokens = (limits.tokens * config.kv_heads) as usize;
    (device + tokens.min(device)) * group
}

const MOST_STEP_TOKENS: u32 = 8_192;
/// The most bytes that are left for graphs. About a hundred graphs of some hundred
/// launches each fit.
const GRAPH_BYTES: u64 = 256 << 20;
/// The most logits of a step, which take 160 MiB of f32.
const MOST_LOGITS: u32 = 40 << 20;
/// The most sequences of the model's whole context that a cache is sized for.
const MOST_SEQUENCES: u32 = 256;
/// Bytes of weights that the measurement of one product reads: several times the size
/// of a device's cache.
const SEARCHED_BYTES: usize = 256 << 20;
/// The most blocks of a cache, which hold 64 Mi tokens.
const MOST_BLOCKS: u32 = 4 << 20;
