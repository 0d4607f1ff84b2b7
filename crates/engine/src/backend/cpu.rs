//! A model on the CPU. All cores work on one step at a time.
//!
//! A step is a list of passes over the tokens. Each pass is split into chunks, which
//! the threads of a pool take one by one; a pass begins when the previous pass has
//! ended. All memory is taken at the start. The part of a pass that computes one
//! sequence never reads rows or blocks of another sequence.

mod cache;
mod forward;
mod layout;
mod load;
mod pool;
mod scratch;

use tollgate_domain::DeviceClass;

use super::{
    BLOCK_TOKENS, Backend, BackendError, BlockCopy, DeviceInfo, ModelShape, StepLimits, StepOutput,
    StepPlan,
};
use crate::kernels::{Instructions, Kernels, KvFormat};
use crate::model::{ModelConfig, ModelFiles};
use crate::weights::WeightsError;

use cache::KvCache;
use forward::Forward;
use load::CpuModel;
use pool::Pool;
use scratch::Scratch;

/// A model on the CPU.
pub struct CpuBackend {
    config: ModelConfig,
    shape: ModelShape,
    device: DeviceInfo,
    limits: StepLimits,
    kernels: Kernels,
    pool: Pool,
    model: CpuModel,
    cache: KvCache,
    scratch: Scratch,
}

/// The options of a [`CpuBackend`].
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads that compute, including the engine's own thread; at least 1.
    pub threads: usize,
    /// Tokens that the KV cache holds, rounded up to whole blocks. The system provides
    /// the memory when it is first used.
    pub kv_tokens: u32,
    /// Tokens that one step may feed to the model.
    pub step_tokens: u32,
    /// The instruction set; `None` selects the best one of this machine.
    pub instructions: Option<Instructions>,
}

/// The reasons why a model could not be set up on the CPU.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The weights do not match the configuration.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The system refused memory.
    #[error("cannot take memory for {0}")]
    Memory(&'static str, #[source] std::io::Error),
    /// The system refused a thread.
    #[error("cannot start a compute thread")]
    Thread(#[source] std::io::Error),
    /// The machine lacks the instruction set that the options ask for.
    #[error("this machine has no {0} instructions")]
    Instructions(Instructions),
}

impl CpuOptions {
    /// Returns options for every core, the best instructions and steps of up to 512
    /// tokens. The KV cache holds 64 sequences of 2,048 tokens, or of the model's
    /// context if that is shorter. The cache takes at most `kv_bytes`, but at least the
    /// bytes of one such sequence.
    pub fn for_model(config: &ModelConfig, kv_bytes: u64) -> Self {
        let token = cache::bytes_per_token(config, KvFormat::F32).max(1);
        let sequence = u64::from(config.context.min(2_048));
        let wanted = (64 * sequence).min(kv_bytes / token).max(sequence);
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            kv_tokens: u32::try_from(wanted).unwrap_or(u32::MAX),
            step_tokens: 512,
            instructions: None,
        }
    }
}

impl CpuBackend {
    /// Sets up the backend and packs the weights into memory of its own. The files are
    /// not needed afterwards.
    ///
    /// # Errors
    /// [`CpuError`], which names the file and the tensor if one is at fault.
    pub fn new(files: &ModelFiles, options: &CpuOptions) -> Result<Self, CpuError> {
        let config = files.config().clone();
        let instructions = options.instructions.unwrap_or_else(Instructions::best);
        let kernels = Kernels::new(instructions).ok_or(CpuError::Instructions(instructions))?;
        let pool = Pool::new(options.threads.clamp(1, MOST_THREADS)).map_err(CpuError::Thread)?;
        let model = CpuModel::load(files, &pool)?;
        let is_bf16 = model.head.is_bf16();
        // Keys and values have the weights' precision: f32 weights must not lose bits
        // in the cache.
        let format = if is_bf16 { KvFormat::Bf16 } else { KvFormat::F32 };
        let blocks = options.kv_tokens.max(1).div_ceil(BLOCK_TOKENS);
        let cache = KvCache::new(&config, format, blocks)?;
        let tokens = options.step_tokens.clamp(1, MOST_STEP_TOKENS);
        let wants_bf16 = is_bf16 && kernels.wants_bf16();
        let scratch = Scratch::new(&config, tokens as usize, wants_bf16, &cache, pool.threads())?;
        Ok(Self {
            shape: shape_of(files, &cache),
            device: DeviceInfo {
                class: DeviceClass::cpu(),
                name: format!("{} ({instructions})", processor_name()),
                uuid: String::new(),
                threads: pool.threads() as u32,
            },
            limits: StepLimits { tokens, logit_rows: tokens.min(config.logit_rows(MOST_LOGITS)) },
            config,
            kernels,
            pool,
            model,
            cache,
            scratch,
        })
    }

    /// Returns the instruction set that is used.
    pub fn instructions(&self) -> Instructions {
        self.kernels.instructions()
    }
}

impl Backend for CpuBackend {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn kv_blocks(&self) -> u32 {
        self.cache.blocks()
    }

    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn enter(&mut self) {
        // `enter` runs on the engine's thread, which computes like the pool's threads.
        pool::give_way();
    }

    fn copy_block(&mut self, copy: BlockCopy) {
        self.cache.copy_block(copy);
    }

    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        plan.check(&self.shape, self.limits, self.cache.blocks())?;
        // Nothing is written before the plan has passed both checks, so a refused step
        // changes nothing.
        self.scratch.layout.lay_out(plan.spans)?;
        let rows = self.scratch.layout.logit_rows.len();
        let logits = output.reset([rows, self.config.vocabulary as usize]);
        let forward = Forward {
            kernels: self.kernels,
            pool: &self.pool,
            config: &self.config,
            model: &self.model,
            spans: plan.spans,
            layout: &self.scratch.layout,
            attention: &self.scratch.attention,
            views: self.scratch.buffers.views(),
        };
        forward.embed();
        for (index, layer) in self.model.layers.iter().enumerate() {
            forward.layer(layer, self.cache.layer(index));
        }
        forward.head(logits);
        output.sample(plan);
        Ok(())
    }
}

fn shape_of(files: &ModelFiles, cache: &KvCache) -> ModelShape {
    let config = files.config();
    ModelShape {
        // A sequence longer than the whole pool could never finish.
        context: config.context.min(cache.blocks().saturating_mul(BLOCK_TOKENS)),
        vocabulary: config.vocabulary,
        layers: config.layers,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        kv_bytes_per_token: cache.bytes_per_token(),
        end_tokens: config.end_tokens.clone(),
        sampling_defaults: config.sampling_defaults,
        hash: files.hash().to_owned(),
    }
}

/// Returns the processor's name as the system reports it.
fn processor_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

const MOST_THREADS: usize = 256;
const MOST_STEP_TOKENS: u32 = 8_192;
/// The most logits of a step, which take 64 MiB of f32.
const MOST_LOGITS: u32 = 16 << 20;
