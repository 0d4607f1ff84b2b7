//! A model on an NVIDIA GPU, which the backend reaches through the driver alone.
//!
//! The `probe` module finds and opens the device, and the `setup` module takes all memory
//! before the first step. A step uploads the plan, runs the kernels and downloads the
//! samples. Two events around these measure the step's device time. The next step can be
//! given to the device while one step runs, with the samples of that step as its input.
//! After any failure the state of the device is unknown, and the backend must not be used
//! again.

mod capacity;
mod code;
mod driver;
mod forward;
mod gemm;
mod graphs;
mod kernel_module;
pub mod kernels;
mod layout;
mod memory;
mod operations;
mod options;
mod probe;
mod samples;
mod setup;
mod weights;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::DeviceNanos;

use super::{
    Backend, BackendError, BlockCopy, DeviceInfo, ModelShape, Results, StepLimits, StepOutput,
    StepPlan, Transfers,
};
use crate::model::{ModelConfig, ModelFiles};

use driver::{Context, CudaEvent, DeviceMemory, Pinned};
use forward::CudaForward;
use gemm::GemmRunner;
use graphs::{GraphKey, Graphs};
use kernel_module::{KernelModule, SOURCE};
use kernels::{CopyBlockArgs, HeadDim};
use layout::{PlanLayout, PlanOffsets};
use memory::{DeviceBuffers, DeviceCache, Slot};
use samples::SampledLayout;
use setup::Setup;
use weights::{DeviceModel, Origin};

pub use code::{CodeError, CodeFolders};
pub use driver::DriverFault;
pub use operations::Operation;
pub use options::{CudaError, CudaOptions, KernelChoice, Launches};
pub use probe::{DeviceSelector, NoDevice, device_class};

/// A model on an NVIDIA GPU.
pub struct CudaBackend {
    config: ModelConfig,
    shape: ModelShape,
    device: DeviceInfo,
    limits: StepLimits,
    head_dim: HeadDim,
    multiprocessors: u32,
    context: Arc<Context>,
    module: KernelModule,
    gemms: GemmRunner,
    model: DeviceModel,
    cache: DeviceCache,
    buffers: DeviceBuffers,
    layout: PlanLayout,
    /// The packed plan of the current step, on the device.
    plan: DeviceMemory,
    /// Host and device memory of two steps. The next step takes the first slot, then
    /// the slots are swapped.
    slots: [Slot; 2],
    /// Number of steps that were begun and not finished.
    open: usize,
    /// Pinned host memory for rows of logits, allocated on first use.
    host_logits: Option<Pinned>,
    /// Captured graphs; `None` if every step launches its kernels one by one.
    graphs: Option<Graphs>,
    /// The failure of a block copy, which the next step returns.
    failed: Option<DriverFault>,
    notes: Vec<String>,
}

/// Returns the UUID of the selected device. The device is not opened.
///
/// # Errors
/// [`NoDevice`], one sentence for people.
pub fn find_device(selector: &DeviceSelector) -> Result<String, NoDevice> {
    probe::find(selector).map(|listed| listed.uuid)
}

/// Opens the selected device, returns its description, and closes it.
///
/// # Errors
/// [`NoDevice`], one sentence for people.
pub fn describe_device(selector: &DeviceSelector) -> Result<DeviceInfo, NoDevice> {
    probe::open(selector).map(|opened| setup::info(&opened))
}

/// Compiles the kernels for every supported device generation into the folder `out` and
/// returns the written files. This needs the vendor's compiler, but no device.
///
/// # Errors
/// [`CodeError`] if there is no compiler, if the compiler fails, or if a file cannot be
/// written.
pub fn build_kernels(out: &Path, libraries: &[PathBuf]) -> Result<Vec<PathBuf>, CodeError> {
    code::build(&SOURCE, out, libraries)
}

impl CudaBackend {
    /// Opens the device, loads kernels and weights, and takes all memory.
    ///
    /// # Errors
    /// [`CudaError`], one sentence for people.
    pub fn new(files: &ModelFiles, options: &CudaOptions) -> Result<Self, CudaError> {
        Self::with(files.config(), files.hash(), &Origin::Files(files.weights()), options)
    }

    /// Builds a model of this shape with random weights. The time of a step does not
    /// depend on the values of weights, so such a model serves for measurements.
    ///
    /// # Errors
    /// The same errors as [`Self::new`].
    pub fn with_noise(config: &ModelConfig, options: &CudaOptions) -> Result<Self, CudaError> {
        let backend = Self::with(config, "noise", &Origin::noise(), options)?;
        // Arithmetic on zeros takes less power and runs faster than arithmetic on real
        // values.
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
        let head_dim = setup::head_dim_of(config).map_err(CudaError::Model)?;
        let mut setup = Setup::open(config, options)?;
        let mut loaded = setup.load(origin)?;
        let step = setup.take_buffers(&mut loaded)?;
        let (cache, capacity) = setup.take_cache(&step)?;
        let context = setup.context;
        Ok(Self {
            shape: setup::shape_of(config, hash, cache.blocks),
            layout: PlanLayout::new(capacity),
            plan: context.allocate(4 * capacity.words())?,
            slots: [Slot::new(&context, &capacity)?, Slot::new(&context, &capacity)?],
            open: 0,
            host_logits: None,
            graphs: setup.has_graphs.then(Graphs::default),
            gemms: loaded.gemms,
            multiprocessors: setup.multiprocessors,
            failed: None,
            config: config.clone(),
            device: setup.device,
            limits: step.limits,
            head_dim,
            context,
            module: loaded.module,
            model: loaded.model,
            cache,
            buffers: step.buffers,
            notes: setup.notes,
        })
    }

    /// Returns lines for the log about the device, the kernels and the memory.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the bytes of the model's weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        weights::bytes_of(&self.config)
    }

    /// Copies the keys of the whole cache over the values. Returns the number of bytes
    /// read, which is also the number of bytes written, and the device's time. The
    /// result is the memory bandwidth to compare steps with. The content of the cache
    /// is lost.
    ///
    /// # Errors
    /// [`DriverFault`] if the copy fails.
    pub fn time_copy(&mut self) -> Result<(u64, DeviceNanos), DriverFault> {
        self.context.bind()?;
        let Slot { began, ended, .. } = &self.slots[0];
        self.context.record(began)?;
        let bytes = self.context.copy(&self.cache.values, &self.cache.keys)?;
        self.context.record(ended)?;
        self.context.wait()?;
        Ok((bytes as u64, DeviceNanos(began.nanos_until(ended)?)))
    }

    /// Returns true if the vendor's library computes matrix products.
    pub fn has_vendor_gemm(&self) -> bool {
        self.gemms.has_vendor_library()
    }

    /// Returns the number of step shapes that were captured as graphs so far.
    pub fn graphs(&self) -> usize {
        self.graphs.as_ref().map_or(0, Graphs::len)
    }

    /// Gives the plan that was laid out to the device.
    fn launch(&mut self, results: Results<'_>) -> Result<(), DriverFault> {
        // `copy_block` cannot return an error, so its failure is returned here.
        if let Some(fault) = self.failed.take() {
            return Err(fault);
        }
        self.context.bind()?;
        // Before the plan is packed, because the padding is part of the plan.
        let key = self.pad_to_graph();
        // The slot's step was finished before, so the device no longer reads this
        // memory.
        let offsets = self.layout.pack(self.slots[0].plan.as_mut_slice());
        let (mut forward, [slot, before], graphs) = self.forward(offsets);
        let context = forward.context;
        // A capture runs nothing on the device. It happens before the first event, so
        // that no request pays for its time.
        let graph = match (key, graphs) {
            (Some(key), Some(graphs)) => graphs.of(key, || forward.capture()),
            _ => None,
        };
        context.record(&slot.began)?;
        context.upload(forward.plan.address(), &slot.plan, 4 * offsets.end)?;
        context.record(&slot.loaded)?;
        // Not in the graph: the two slots take turns, and a graph has fixed addresses.
        forward.feed(&before.sampled)?;
        match graph {
            // SAFETY: the captured addresses belong to buffers that live as long as the
            // graph, and this plan has the same key: as many tokens, attention parts
            // and rows.
            Some(graph) => unsafe { context.replay(graph) }?,
            None => forward.run()?,
        }
        // Zero unless the plan asks for logits; `collect` reads as many rows.
        slot.rows = 0;
        slot.top_counts.clear();
        match results {
            Results::Samples(_) => {
                forward.sample(&slot.sampled, &before.sampled)?;
                context.record(&slot.computed)?;
                slot.top_counts.extend_from_slice(forward.layout.samples.top_counts());
                let bytes = SampledLayout::of(slot.top_counts.len()).wanted(&slot.top_counts);
                context.download(&mut slot.host_sampled, slot.sampled.address(), bytes)?;
            }
            Results::Logits => self.copy_logits_to_host()?,
        }
        self.context.record(&self.slots[0].ended)?;
        self.slots.swap(0, 1);
        self.open += 1;
        Ok(())
    }

    /// Returns the forward pass of a plan whose lists begin at `offsets`, and the
    /// fields that a step needs beside it.
    fn forward(
        &mut self,
        offsets: PlanOffsets,
    ) -> (CudaForward<'_>, &mut [Slot; 2], &mut Option<Graphs>) {
        let forward = CudaForward {
            context: &self.context,
            module: &self.module,
            gemms: &mut self.gemms,
            config: &self.config,
            head_dim: self.head_dim,
            model: &self.model,
            cache: &self.cache,
            buffers: &self.buffers,
            plan: &self.plan,
            layout: &self.layout,
            offsets,
            splits: splits(&self.config, self.multiprocessors, &self.layout),
            samples_at_once: self.limits.logit_rows as usize,
        };
        (forward, &mut self.slots, &mut self.graphs)
    }

    /// Queues the copy of the rows of logits to the host.
    fn copy_logits_to_host(&mut self) -> Result<(), DriverFault> {
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

    /// Pads a step that only decodes to a size that graphs exist for. Returns the
    /// graph's key, or `None` if the step must launch its kernels one by one.
    fn pad_to_graph(&mut self) -> Option<GraphKey> {
        let decodes = self.layout.decodes.len() as u32;
        let tokens = graphs::rounded(decodes);
        // The padding must not exceed the buffers of a step.
        let fits = tokens <= self.limits.tokens.min(self.limits.logit_rows);
        if self.graphs.is_none() || decodes == 0 || !self.layout.only_decodes() || !fits {
            return None;
        }
        self.layout.pad(tokens as usize);
        // Padding tokens change the number of thread blocks, so the parts are counted
        // after padding.
        let splits = splits(&self.config, self.multiprocessors, &self.layout);
        Some(GraphKey { tokens, splits, has_rows: !self.layout.logit_rows.is_empty() })
    }

    /// Waits for the oldest step that was begun, and reads its results.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), DriverFault> {
        assert!(self.open > 0, "a step that was begun");
        // The slots were swapped after each launch: the newest step is in the second
        // slot, an older one in the first.
        let slot = &self.slots[2 - self.open];
        self.open -= 1;
        slot.ended.wait()?;
        let rows = output.reset([slot.rows, self.config.vocabulary as usize]);
        if let Some(host) = &self.host_logits {
            for (to, from) in rows.iter_mut().zip(host.as_slice().as_chunks::<4>().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        let offsets = SampledLayout::of(slot.top_counts.len());
        output.set_sampled(offsets.read(slot.host_sampled.as_slice(), &slot.top_counts));
        let between = |from: &CudaEvent, to: &CudaEvent| from.nanos_until(to).map(DeviceNanos);
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
        // The stream may still use memory that the fields are about to free.
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

    fn copy_block(&mut self, BlockCopy { from, to }: BlockCopy) {
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
            unsafe { self.module.launch(&self.context, &launch) }
        });
        if let Err(fault) = copied {
            // The first failure is the cause; later ones are its consequences.
            self.failed.get_or_insert(fault);
        }
    }

    fn begin(&mut self, plan: &StepPlan<'_>, _: &mut StepOutput) -> Result<(), BackendError> {
        assert!(self.open < self.slots.len(), "one step more than the one that runs");
        let samples = matches!(plan.results, Results::Samples(_));
        // There is one host buffer for logits; a second step would overwrite it.
        assert!(samples || self.open == 0, "rows of logits have one place on the host");
        plan.check(&self.shape, self.limits, self.cache.blocks)?;
        plan.check_feedback(self.slots[1].top_counts.len())?;
        self.layout.lay_out(plan)?;
        self.launch(plan.results).map_err(|fault| BackendError::Device(fault.to_string()))
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        self.collect(output).map_err(|fault| BackendError::Device(fault.to_string()))
    }

    fn runs_ahead(&self) -> bool {
        true
    }
}

/// Returns the number of parts that the attention of single tokens is split into. More
/// parts keep the whole device busy; each part must be worth its launch.
fn splits(config: &ModelConfig, multiprocessors: u32, layout: &PlanLayout) -> u32 {
    let blocks = layout.decodes.len() as u32 * config.kv_heads;
    if blocks == 0 {
        return 1;
    }
    let wanted = (BLOCKS_PER_MULTIPROCESSOR * multiprocessors).div_ceil(blocks);
    let useful = layout.longest_decode.div_ceil(PART_TOKENS).next_power_of_two();
    // A power of two, so that few graph keys occur.
    useful.min(1 << wanted.ilog2())
}

/// Thread blocks that keep one multiprocessor busy.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;
/// The fewest tokens of context that one part of attention reads.
const PART_TOKENS: u32 = 128;
