//! An NVIDIA GPU as a device, reached through its driver alone.
//!
//! The `probe` says whether there is one. Memory is taken at the start; a step
//! is one upload, the kernels, and what was drawn, between two events whose
//! distance is the step's device time. While one step runs the next can be given
//! to the device, fed with what that one draws. Whatever fails in between leaves
//! the device in a state nobody knows, and the backend is not used again.

mod choices;
mod code;
mod driver;
mod forward;
mod graphs;
pub mod kernels;
mod layout;
mod machine;
mod memory;
mod operations;
mod options;
mod probe;
mod products;
mod room;
mod weights;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::DeviceNanos;

use super::{
    BLOCK_TOKENS, Backend, BackendError, DeviceInfo, ModelShape, Results, StepLimits, StepOutput,
    StepPlan, Transfers,
};
use crate::model::{ModelConfig, ModelFiles};

use choices::DrawnPlaces;
use driver::{Blas, Context, Event, Memory, Pinned};
use forward::{Forward, LayerProducts, head_product};
use graphs::{Alike, Graphs};
use kernels::{CopyBlockArgs, HeadDim};
use layout::{Layout, Places};
use machine::{Machine, SOURCE};
use memory::{Buffers, Cache, Slot, kv_bytes_per_token};
use probe::Found;
use products::{Kind, Product, Products};
use room::Room;
use weights::{Model, Origin};

pub use code::{CodeError, CodeFolders};
pub use driver::DriverFault;
pub use operations::Operation;
pub use options::{CudaError, CudaOptions, KernelChoice, Launches};
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
    /// The plan's words on the device.
    plan: Memory,
    /// The next step takes the first of them, and they change places.
    slots: [Slot; 2],
    /// Steps that were begun and not finished.
    open: usize,
    /// Rows of logits for who wants them here: taken when that is first so.
    host_logits: Option<Pinned>,
    /// None: every step goes launch by launch.
    graphs: Option<Graphs>,
    /// What a block's copy came to, told at the next step.
    failed: Option<DriverFault>,
    notes: Vec<String>,
}

/// The identity of the device that is wanted, of which nothing is taken.
///
/// # Errors
/// [`Absent`]: one sentence.
pub fn find(wanted: &Wanted) -> Result<String, Absent> {
    probe::find(wanted).map(|listed| listed.uuid)
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
        let backend = Self::with(config, "noise", &Origin::noise(), options)?;
        // Arithmetic on zeros takes less power, and so less time.
        for memory in [&backend.cache.keys, &backend.cache.values] {
            backend.context.repeat(memory, &backend.model.layers[0].gate_up)?;
        }
        backend.context.wait()?;
        Ok(backend)
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
        let is_deterministic = options.kernels == KernelChoice::Deterministic;
        let mut device = info(&found);
        let Found { context, listed } = found;
        let mut notes = vec![format!("{} ({})", listed.name, listed.uuid)];
        if is_deterministic {
            // Another speed, so other prices.
            device.name.push_str(" (deterministic)");
            notes.push("one kernel for each operation: the same bits in any company".to_owned());
        }
        let code = code::obtain(&SOURCE, &code::target_of(listed.capability), &options.folders)?;
        notes.push(code.origin);
        let free = context.free_bytes()?;
        let allowed = (free as f64 * options.memory_share.clamp(0.0, 1.0)) as u64;
        check_room(&config, allowed)?;
        let overlaps = options.launches == Launches::Overlapping && listed.capability >= (9, 0);
        let machine = Machine::load(&context, &code.image, overlaps)?;
        let mut products = match options.kernels {
            KernelChoice::Fastest => Products::new(
                Blas::start(&context, &options.folders.libraries)
                    .map_err(|reason| notes.push(format!("{reason}: own kernels multiply instead")))
                    .ok(),
            ),
            KernelChoice::Own => Products::new(None),
            KernelChoice::Deterministic => Products::deterministic(),
        };
        let model = Model::load(&config, origin, &context)?;
        let tokens = options.step_tokens.clamp(1, MOST_STEP_TOKENS);
        let limits = StepLimits { tokens, logit_rows: most_logit_rows(tokens, config.vocabulary) };
        let room = Room {
            tokens: tokens as usize,
            logit_rows: limits.logit_rows as usize,
            draws: limits.samples() as usize,
            vocabulary: config.vocabulary,
            context: config.context,
            kv_blocks: 0,
            tile: kernels::tile_tokens(config.heads / config.kv_heads),
            decodes_apart: !is_deterministic,
        };
        let parts = parts_at_most(&config, listed.multiprocessors, tokens);
        let buffers = Buffers::new(&context, &config, limits, parts)?;
        let kinds = kinds(&config, &model, &buffers, limits);
        let search = DeviceNanos(options.search.as_nanos().min(u128::from(u64::MAX)) as u64);
        // SAFETY: buffers of rows hold a whole bucket of the most that a step
        // may ask for, and the weights are those of the model's layers.
        let searched = unsafe { products.search(&context, &machine, &kinds, search)? };
        if searched > 0 {
            notes.push(format!("{searched} products measured"));
        }
        context.wait()?;
        // The library loads code as it is first run, and graphs come later.
        // Where all is prefill no step only decodes.
        let has_graphs = options.launches != Launches::Single && !is_deterministic;
        let graphs = if has_graphs { GRAPH_BYTES.min(allowed / 32) } else { 0 };
        let taken = free.saturating_sub(context.free_bytes()?) + 4 * room.words() as u64 + graphs;
        let blocks = blocks_in(&config, allowed.saturating_sub(taken));
        if u64::from(blocks) * u64::from(BLOCK_TOKENS) < u64::from(least_context(&config)) {
            let least = u64::from(least_context(&config)) * kv_bytes_per_token(&config);
            return Err(CudaError::Memory { needed: taken + least, allowed });
        }
        let cache = Cache::new(&context, &config, blocks)?;
        let room = Room { kv_blocks: blocks, ..room };
        context.wait()?;
        notes.push(format!(
            "{} MiB of weights and buffers, {} KV blocks in {} MiB",
            taken >> 20,
            blocks,
            (u64::from(blocks) * block_bytes(&config)) >> 20
        ));
        Ok(Self {
            shape: shape_of(&config, hash, blocks),
            layout: Layout::new(room),
            plan: context.allocate(4 * room.words())?,
            slots: [Slot::new(&context, &room)?, Slot::new(&context, &room)?],
            open: 0,
            host_logits: None,
            graphs: has_graphs.then(Graphs::default),
            products,
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
        let Slot { began, ended, .. } = &self.slots[0];
        self.context.record(began)?;
        let bytes = self.context.copy(&self.cache.values, &self.cache.keys)?;
        self.context.record(ended)?;
        self.context.wait()?;
        Ok((bytes as u64, DeviceNanos(began.nanos_until(ended)?)))
    }

    /// Whether the vendor's library multiplies.
    pub fn has_vendor_products(&self) -> bool {
        self.products.has_vendors()
    }

    /// Kinds of steps that are given to the device as one graph so far.
    pub fn graphs(&self) -> usize {
        self.graphs.as_ref().map_or(0, Graphs::len)
    }

    /// Gives a plan that was laid out to the device.
    fn put(&mut self, results: Results<'_>) -> Result<(), DriverFault> {
        if let Some(fault) = self.failed.take() {
            return Err(fault);
        }
        self.context.bind()?;
        let alike = self.make_alike();
        let places = self.layout.pack(self.slots[0].plan.as_mut_slice());
        let (mut forward, [slot, before], graphs) = self.parts(places);
        let context = forward.context;
        // What is captured runs nothing, and is nobody's time.
        let graph = match (alike, graphs) {
            (Some(alike), Some(graphs)) => graphs.of(alike, || forward.capture()),
            _ => None,
        };
        context.record(&slot.began)?;
        context.upload(forward.plan.address(), &slot.plan, 4 * places.end)?;
        context.record(&slot.loaded)?;
        forward.feed(&before.drawn)?;
        match graph {
            // SAFETY: what was captured points to buffers that live as long as
            // the graph, and this plan is of the same kind: as many tokens,
            // parts and rows.
            Some(graph) => unsafe { context.replay(graph) }?,
            None => forward.run()?,
        }
        slot.rows = 0;
        slot.told.clear();
        match results {
            Results::Samples(_) => {
                forward.draw(&slot.drawn, &before.drawn)?;
                context.record(&slot.computed)?;
                slot.told.extend_from_slice(forward.layout.choices.told());
                let bytes = DrawnPlaces::of(slot.told.len()).wanted(&slot.told);
                context.download(&mut slot.host_drawn, slot.drawn.address(), bytes)?;
            }
            Results::Logits => self.bring_logits()?,
        }
        self.context.record(&self.slots[0].ended)?;
        self.slots.swap(0, 1);
        self.open += 1;
        Ok(())
    }

    /// The forward of a plan whose lists lie at `places`, and beside it what a
    /// step needs of the rest.
    fn parts(&mut self, places: Places) -> (Forward<'_>, &mut [Slot; 2], &mut Option<Graphs>) {
        let forward = Forward {
            context: &self.context,
            machine: &self.machine,
            products: &mut self.products,
            config: &self.config,
            head_dim: self.head_dim,
            model: &self.model,
            cache: &self.cache,
            buffers: &self.buffers,
            plan: &self.plan,
            layout: &self.layout,
            places,
            splits: splits(&self.config, self.multiprocessors, &self.layout),
            draws_at_once: self.limits.logit_rows as usize,
        };
        (forward, &mut self.slots, &mut self.graphs)
    }

    /// Puts the copy of the rows of logits to the host behind the step.
    fn bring_logits(&mut self) -> Result<(), DriverFault> {
        let slot = &mut self.slots[0];
        self.context.record(&slot.computed)?;
        slot.rows = self.layout.rows_wanted;
        let row = 4 * self.config.vocabulary as usize;
        let host = match &mut self.host_logits {
            Some(host) => host,
            none => none.insert(self.context.pinned(row * self.limits.logit_rows as usize)?),
        };
        self.context.download(host, self.buffers.logits.address(), row * slot.rows)
    }

    /// Where the step is one of a kind that comes often, rounds it up to that
    /// kind.
    fn make_alike(&mut self) -> Option<Alike> {
        let decodes = self.layout.decodes.len() as u32;
        let tokens = graphs::rounded(decodes);
        let fits = tokens <= self.limits.tokens.min(self.limits.logit_rows);
        if self.graphs.is_none() || decodes == 0 || !self.layout.only_decodes() || !fits {
            return None;
        }
        self.layout.pad(tokens as usize);
        let splits = splits(&self.config, self.multiprocessors, &self.layout);
        Some(Alike { tokens, splits, has_rows: !self.layout.logit_rows.is_empty() })
    }

    /// Waits for the step that was begun first, and reads what it came to.
    fn take(&mut self, output: &mut StepOutput) -> Result<(), DriverFault> {
        assert!(self.open > 0, "a step that was begun");
        // The last one begun is in the second place.
        let slot = &self.slots[2 - self.open];
        self.open -= 1;
        slot.ended.wait()?;
        let rows = output.reset(slot.rows, self.config.vocabulary as usize);
        if let Some(host) = &self.host_logits {
            for (to, from) in rows.iter_mut().zip(host.as_slice().as_chunks::<4>().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        let places = DrawnPlaces::of(slot.told.len());
        output.set_sampled(places.read(slot.host_drawn.as_slice(), &slot.told));
        let between = |from: &Event, to: &Event| from.nanos_until(to).map(DeviceNanos);
        output.set_device_time(between(&slot.began, &slot.ended)?);
        output.set_transfers(Transfers {
            to_device: between(&slot.began, &slot.loaded)?,
            to_host: between(&slot.computed, &slot.ended)?,
        });
        Ok(())
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // What a step that was not finished reads and writes is given back next.
        let _ = self.context.bind().and_then(|()| self.context.wait());
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

    fn begin(&mut self, plan: &StepPlan<'_>, _: &mut StepOutput) -> Result<(), BackendError> {
        assert!(self.open < self.slots.len(), "one step more than the one that runs");
        let draws = matches!(plan.results, Results::Samples(_));
        assert!(draws || self.open == 0, "rows of logits have one place on the host");
        plan.check(&self.shape, self.limits, self.cache.blocks)?;
        plan.check_feedback(self.slots[1].told.len())?;
        self.layout.lay_out(plan)?;
        self.put(plan.results).map_err(|fault| BackendError::Device(fault.to_string()))
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.take(output).map_err(|fault| BackendError::Device(fault.to_string()))
    }

    fn runs_ahead(&self) -> bool {
        true
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

/// The linear layers of a step that asks for the most, each in as many layers
/// as it takes to read from memory.
fn kinds(config: &ModelConfig, model: &Model, buffers: &Buffers, limits: StepLimits) -> Vec<Kind> {
    let layers: Vec<[Product; 4]> = model
        .layers
        .iter()
        .map(|layer| LayerProducts::new(config, buffers, layer, limits.tokens).all())
        .collect();
    let kind = |index: usize| {
        let product = layers[0][index];
        let bytes = 2 * product.columns as usize * product.depth as usize;
        let weights = layers.iter().map(|products| products[index].weights);
        Kind { product, weights: weights.take(SEARCHED_BYTES.div_ceil(bytes)).collect() }
    };
    let head = head_product(config, buffers, model, limits.logit_rows);
    let head = Kind { product: head, weights: vec![head.weights] };
    (0..layers[0].len()).map(kind).chain([head]).collect()
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
    // Its tokens may be on the lists of what was generated before, as well.
    let block = block_bytes(config) + u64::from(BLOCK_TOKENS) * 8;
    u32::try_from(bytes / block).unwrap_or(u32::MAX).min(most_blocks(config))
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
    let useful = layout.longest_decode.div_ceil(PART_TOKENS).next_power_of_two();
    // A power of two, so that few kinds of steps are all there are.
    useful.min(1 << wanted.ilog2())
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
/// Of the memory that may be taken, what is left for graphs at most: about a
/// hundred of a few hundred launches each.
const GRAPH_BYTES: u64 = 256 << 20;
/// 160 MiB of f32.
const MOST_LOGITS: u32 = 40 << 20;
/// Sequences of the model's whole context that a cache is ever large enough for.
const MOST_SEQUENCES: u32 = 256;
/// Of each kind of matrix, some times what a card's cache holds.
const SEARCHED_BYTES: usize = 256 << 20;
/// 64 Mi tokens.
const MOST_BLOCKS: u32 = 4 << 20;
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;
/// Tokens of context that a part of attention reads at least.
const PART_TOKENS: u32 = 128;
