//! An NVIDIA GPU as a device, reached through its driver alone.
//!
//! The `probe` says whether there is one. All memory is taken at the
//! start; a step is one upload, the kernels, one download and two events, whose
//! distance is the step's device time. Whatever fails in between leaves the
//! device in a state nobody knows, and the backend is not used again.

mod code;
mod driver;
mod forward;
pub mod kernels;
mod layout;
mod machine;
mod memory;
mod probe;
mod products;
mod weights;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::DeviceNanos;

use super::{
    BLOCK_TOKENS, Backend, BackendError, DeviceInfo, ModelShape, StepLimits, StepOutput, StepPlan,
};
use crate::model::{ModelConfig, ModelFiles};
use crate::weights::WeightsError;

use driver::{Blas, Context, Event};
use forward::Forward;
use kernels::{CopyBlockArgs, HeadDim};
use layout::{Layout, Room};
use machine::{Machine, SOURCE};
use memory::{Buffers, Cache, kv_bytes_per_token};
use probe::Found;
use products::Products;
use weights::{LoadError, Model, Origin};

pub use code::{CodeError, CodeFolders};
pub use driver::DriverFault;
pub use probe::{Absent, Wanted, device_class};

/// A model on a GPU.
pub struct CudaBackend {
    config: ModelConfig,
    shape: ModelShape,
    device: DeviceInfo,
    limits: StepLimits,
    head_dim: HeadDim,
    multiprocessors: u32,
    context: Arc<Context>,
    machine: Machine,
    products: Products,
    model: Model,
    cache: Cache,
    buffers: Buffers,
    layout: Layout,
    began: Event,
    ended: Event,
    /// What a block's copy came to, told at the next step.
    failed: Option<DriverFault>,
    notes: Vec<String>,
}

/// How a [`CudaBackend`] is set up.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which device.
    pub wanted: Wanted,
    /// The part of the device's free memory that is taken: weights, buffers,
    /// and for the KV cache what is left of it. Above 0, at most 1.
    pub memory_share: f64,
    /// Tokens that one step may feed.
    pub step_tokens: u32,
    /// Where kernels and libraries are looked for.
    pub folders: CodeFolders,
    /// Whether the vendor's library may multiply; if not, only own kernels do.
    pub vendor_products: bool,
}

/// Why a model could not be set up on a GPU.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no device for us.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// There are no kernels for it.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The kernels do not know models of this kind.
    #[error("the CUDA kernels do not serve this model: {0}")]
    Model(String),
    /// The model is larger than the memory that may be taken.
    #[error(
        "the model needs {} MiB and {} MiB of the device's memory may be taken",
        .needed >> 20, .allowed >> 20
    )]
    Memory {
        /// Bytes of weights, buffers and the least cache.
        needed: u64,
        /// Bytes that may be taken.
        allowed: u64,
    },
    /// The weights are not what the configuration implies.
    #[error(transparent)]
    Weights(WeightsError),
    /// The driver refused something.
    #[error("the device cannot be set up: {0}")]
    Driver(#[from] DriverFault),
}

impl CudaError {
    /// Whether a CPU can serve instead: everything but a broken model.
    pub fn leaves_the_cpu(&self) -> bool {
        !matches!(self, Self::Weights(_))
    }
}

impl From<LoadError> for CudaError {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Weights(error) => Self::Weights(error),
            LoadError::Driver(fault) => Self::Driver(fault),
        }
    }
}

/// Opens the device that is wanted, says what it is, and lets it go.
///
/// # Errors
/// [`Absent`]: one sentence.
pub fn look(wanted: &Wanted) -> Result<DeviceInfo, Absent> {
    probe::open(wanted).map(|found| info(&found))
}

/// Compiles the kernels for every generation of devices into `out`, and
/// returns the files. It needs the vendor's compiler, and no device.
///
/// # Errors
/// [`CodeError`] when there is no compiler, or it refuses, or `out` does.
pub fn build_kernels(out: &Path, libraries: &[PathBuf]) -> Result<Vec<PathBuf>, CodeError> {
    code::build(&SOURCE, out, libraries)
}

impl CudaBackend {
    /// Opens the device, loads kernels and weights, and takes all memory.
    ///
    /// # Errors
    /// [`CudaError`], each a sentence.
    pub fn new(files: &ModelFiles, options: &CudaOptions) -> Result<Self, CudaError> {
        Self::with(files.config(), files.hash(), &Origin::Files(files.weights()), options)
    }

    /// As [`Self::new`], for a model of this shape whose weights mean nothing:
    /// what they are does not change how long a step takes.
    ///
    /// # Errors
    /// As there.
    pub fn with_noise(config: &ModelConfig, options: &CudaOptions) -> Result<Self, CudaError> {
        Self::with(config, "noise", &Origin::noise(), options)
    }

    fn with(
        config: &ModelConfig,
        hash: &str,
        origin: &Origin<'_>,
        options: &CudaOptions,
    ) -> Result<Self, CudaError> {
        let config = config.clone();
        let head_dim = head_dim_of(&config).map_err(CudaError::Model)?;
        let found = probe::open(&options.wanted)?;
        let device = info(&found);
        let Found { context, listed } = found;
        let mut notes = vec![format!("{} ({})", listed.name, listed.uuid)];
        let code = code::obtain(&SOURCE, &code::target_of(listed.capability), &options.folders)?;
        notes.push(code.origin);
        let free = context.free_bytes()?;
        let allowed = (free as f64 * options.memory_share.clamp(0.0, 1.0)) as u64;
        check_room(&config, allowed)?;
        let machine = Machine::load(&context, &code.image)?;
        let blas = match options.vendor_products {
            true => Blas::start(&context, &options.folders.libraries)
                .map_err(|reason| notes.push(format!("{reason}: own kernels multiply instead")))
                .ok(),
            false => None,
        };
        let model = Model::load(&config, origin, &context)?;
        let tokens = options.step_tokens.clamp(1, MOST_STEP_TOKENS);
        let limits = StepLimits { tokens, logit_rows: most_logit_rows(tokens, config.vocabulary) };
        let most_blocks = most_blocks(&config);
        let room = Room {
            tokens: tokens as usize,
            context: config.context,
            kv_blocks: most_blocks,
            tile: kernels::tile_tokens(config.heads / config.kv_heads),
        };
        let parts = parts_at_most(&config, listed.multiprocessors, tokens);
        let buffers = Buffers::new(&context, &config, limits, room, parts)?;
        let taken = free.saturating_sub(context.free_bytes()?);
        let blocks = blocks_in(&config, allowed.saturating_sub(taken));
        if u64::from(blocks) * u64::from(BLOCK_TOKENS) < u64::from(least_context(&config)) {
            let least = u64::from(least_context(&config)) * kv_bytes_per_token(&config);
            return Err(CudaError::Memory { needed: taken + least, allowed });
        }
        let cache = Cache::new(&context, &config, blocks)?;
        context.wait()?;
        notes.push(format!(
            "{} MiB of weights and buffers, {} KV blocks in {} MiB",
            taken >> 20,
            blocks,
            (u64::from(blocks) * block_bytes(&config)) >> 20
        ));
        Ok(Self {
            shape: shape_of(&config, hash, blocks),
            layout: Layout::new(Room { kv_blocks: blocks, ..room }),
            began: context.event()?,
            ended: context.event()?,
            products: Products::new(blas),
            multiprocessors: listed.multiprocessors,
            failed: None,
            config,
            device,
            limits,
            head_dim,
            context,
            machine,
            model,
            cache,
            buffers,
            notes,
        })
    }

    /// What was found at the start, for the log: device, kernels, memory.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Bytes of the model's weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        weights::bytes_of(&self.config)
    }

    /// Copies keys over values, whatever they hold: how many bytes are read and
    /// as many written, and the device's time. What memory can do, for steps to
    /// be compared with. The cache is of no use to a sequence afterwards.
    ///
    /// # Errors
    /// [`DriverFault`].
    pub fn time_copy(&mut self) -> Result<(u64, DeviceNanos), DriverFault> {
        self.context.bind()?;
        self.context.record(&self.began)?;
        let bytes = self.context.copy(&self.cache.values, &self.cache.keys)?;
        self.context.record(&self.ended)?;
        self.context.wait()?;
        Ok((bytes as u64, DeviceNanos(self.began.nanos_until(&self.ended)?)))
    }

    /// Runs a plan that was laid out; returns the device's time.
    fn run(&mut self) -> Result<DeviceNanos, DriverFault> {
        if let Some(fault) = self.failed.take() {
            return Err(fault);
        }
        self.context.bind()?;
        let places = self.layout.pack(self.buffers.plan.as_mut_slice());
        self.context.record(&self.began)?;
        let words = self.buffers.plan_words.address();
        self.context.upload(words, &self.buffers.plan, 4 * places.end)?;
        let mut forward = Forward {
            context: &self.context,
            machine: &self.machine,
            products: &mut self.products,
            config: &self.config,
            head_dim: self.head_dim,
            model: &self.model,
            cache: &self.cache,
            buffers: &self.buffers,
            layout: &self.layout,
            places,
            splits: splits(&self.config, self.multiprocessors, &self.layout),
        };
        forward.run()?;
        let rows = self.layout.logit_rows.len();
        if rows > 0 {
            let bytes = 4 * rows * self.config.vocabulary as usize;
            let logits = self.buffers.logits.address();
            self.context.download(&mut self.buffers.host_logits, logits, bytes)?;
        }
        self.context.record(&self.ended)?;
        self.context.wait()?;
        Ok(DeviceNanos(self.began.nanos_until(&self.ended)?))
    }
}

impl Backend for CudaBackend {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn kv_blocks(&self) -> u32 {
        self.cache.blocks
    }

    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        assert!(from < self.cache.blocks && to < self.cache.blocks, "blocks of the pool");
        let args = CopyBlockArgs {
            keys: self.cache.keys.address().raw(),
            values: self.cache.values.address().raw(),
            layer_elements: self.cache.layer_elements(),
            block_elements: self.cache.block_elements,
            from,
            to,
        };
        let launch = kernels::copy_block(args, self.config.layers);
        let copied = self.context.bind().and_then(|()| {
            // SAFETY: both blocks are in the pool, in every layer.
            unsafe { self.machine.launch(&self.context, &launch) }
        });
        if let Err(fault) = copied {
            self.failed.get_or_insert(fault);
        }
    }

    fn step(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        plan.check(&self.shape, self.limits, self.cache.blocks)?;
        self.layout.lay_out(plan.spans)?;
        let busy = self.run().map_err(|fault| BackendError::Device(fault.to_string()))?;
        let vocabulary = self.config.vocabulary as usize;
        let logits = output.reset(self.layout.logit_rows.len(), vocabulary);
        let bytes = self.buffers.host_logits.as_slice().as_chunks::<4>().0;
        for (to, from) in logits.iter_mut().zip(bytes) {
            *to = f32::from_le_bytes(*from);
        }
        output.set_device_time(busy);
        Ok(())
    }
}

fn info(found: &Found) -> DeviceInfo {
    let listed = &found.listed;
    DeviceInfo {
        class: device_class(&listed.name),
        name: listed.name.clone(),
        uuid: listed.uuid.clone(),
        threads: 0,
    }
}

/// The kernels' size of head for a model, or why they have none.
fn head_dim_of(config: &ModelConfig) -> Result<HeadDim, String> {
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

/// Refuses a model that cannot fit before anything is loaded.
fn check_room(config: &ModelConfig, allowed: u64) -> Result<(), CudaError> {
    let least = u64::from(least_context(config)) * kv_bytes_per_token(config);
    let needed = weights::bytes_of(config) + least;
    if needed > allowed { Err(CudaError::Memory { needed, allowed }) } else { Ok(()) }
}

/// A cache that holds less than this is of no use.
fn least_context(config: &ModelConfig) -> u32 {
    config.context.min(2_048)
}

fn block_bytes(config: &ModelConfig) -> u64 {
    kv_bytes_per_token(config) * u64::from(BLOCK_TOKENS)
}

/// KV blocks that bytes hold, within what a batch can use.
fn blocks_in(config: &ModelConfig, bytes: u64) -> u32 {
    let blocks = bytes / block_bytes(config).max(1);
    u32::try_from(blocks).unwrap_or(u32::MAX).min(most_blocks(config))
}

/// Enough for [`MOST_SEQUENCES`] of the model's context.
fn most_blocks(config: &ModelConfig) -> u32 {
    config.context.div_ceil(BLOCK_TOKENS).saturating_mul(MOST_SEQUENCES).min(MOST_BLOCKS)
}

fn shape_of(config: &ModelConfig, hash: &str, blocks: u32) -> ModelShape {
    ModelShape {
        // A sequence that the whole pool cannot hold could never finish.
        context: config.context.min(blocks.saturating_mul(BLOCK_TOKENS)),
        vocabulary: config.vocabulary,
        layers: config.layers,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        kv_bytes_per_token: kv_bytes_per_token(config),
        end_tokens: config.end_tokens.clone(),
        hash: hash.to_owned(),
    }
}

/// Rows of logits that a step may ask for: one for each of 64 sequences at
/// least, more while they take little memory.
fn most_logit_rows(tokens: u32, vocabulary: u32) -> u32 {
    tokens.min((MOST_LOGITS / vocabulary.max(1)).max(64))
}

/// Parts that the attention of single tokens is split into, so that the whole
/// device has something to do; each part is worth its start.
fn splits(config: &ModelConfig, multiprocessors: u32, layout: &Layout) -> u32 {
    let blocks = layout.decodes.len() as u32 * config.kv_heads;
    if blocks == 0 {
        return 1;
    }
    let wanted = (BLOCKS_PER_MULTIPROCESSOR * multiprocessors).div_ceil(blocks);
    wanted.min(layout.longest_decode.div_ceil(PART_TOKENS)).max(1)
}

/// Parts over all heads that a step can have at most.
fn parts_at_most(config: &ModelConfig, multiprocessors: u32, tokens: u32) -> usize {
    let group = (config.heads / config.kv_heads) as usize;
    let device = (BLOCKS_PER_MULTIPROCESSOR * multiprocessors) as usize;
    // More than one part each only while the blocks are fewer than wanted.
    let tokens = (tokens * config.kv_heads) as usize;
    (device + tokens.min(device)) * group
}

const MOST_STEP_TOKENS: u32 = 8_192;
/// 64 MiB of f32.
const MOST_LOGITS: u32 = 16 << 20;
/// Sequences of the model's whole context that a cache is ever large enough for.
const MOST_SEQUENCES: u32 = 256;
/// 64 Mi tokens.
const MOST_BLOCKS: u32 = 4 << 20;
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;
/// Tokens of context that a part of attention reads at least.
const PART_TOKENS: u32 = 128;
