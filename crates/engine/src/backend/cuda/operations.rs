//! Times of each operation of a step, and the least memory traffic and arithmetic that
//! the operation needs. These figures are for comparing kernels with the limits of a
//! device; the engine does not call this module.

use tollgate_domain::DeviceNanos;

use super::CudaBackend;
use super::driver::{CudaEvent, DriverFault};
use super::forward::{CudaForward, LayerGemms, head_gemm};
use super::gemm::Gemm;
use super::kernels::Epilogue;
use crate::backend::{BackendError, StepPlan};
use crate::model::ModelConfig;

/// The measurement of one operation of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Name of the operation.
    pub name: &'static str,
    /// Time of one run: the mean over all layers, or over several runs if a step runs
    /// the operation once.
    pub time: DeviceNanos,
    /// Bytes that the operation must read and write at least.
    pub bytes: u64,
    /// Floating point operations; 0 if they are negligible.
    pub flop: u64,
}

impl CudaBackend {
    /// Measures each operation of a step by itself, in the order of a step. The cache
    /// content of the plan's sequences is lost.
    ///
    /// # Errors
    /// The same errors as [`Backend::begin`](crate::Backend::begin).
    pub fn time_operations(&mut self, plan: &StepPlan<'_>) -> Result<Vec<Operation>, BackendError> {
        assert_eq!(self.open, 0, "no step may be under way");
        plan.check(&self.shape, self.limits, self.cache.blocks)?;
        self.layout.lay_out(plan)?;
        // Every key of a span's context is read by at least one of its tokens.
        let keys: u64 = plan.spans.iter().map(|span| span.end()).sum();
        let pairs: u64 =
            plan.spans.iter().flat_map(|span| (u64::from(span.start) + 1)..=span.end()).sum();
        self.time_laid_out(AttentionLoad { keys, pairs })
            .map_err(|fault| BackendError::Device(fault.to_string()))
    }

    /// Measures the cost of timing a step: the device's time for the four events in its
    /// stream.
    ///
    /// # Errors
    /// [`DriverFault`] if the device fails.
    pub fn time_marks(&mut self) -> Result<DeviceNanos, DriverFault> {
        assert_eq!(self.open, 0, "no step may be under way");
        self.context.bind()?;
        let [watch, marks] = &self.slots;
        // The device is kept busy while the host queues the events; otherwise the
        // host's time would be measured.
        for _ in 0..MARKS {
            self.context.clear(&self.buffers.logits)?;
        }
        self.context.record(&watch.began)?;
        for _ in 0..MARKS {
            for mark in [&marks.began, &marks.loaded, &marks.computed, &marks.ended] {
                self.context.record(mark)?;
            }
        }
        self.context.record(&watch.ended)?;
        watch.ended.wait()?;
        Ok(DeviceNanos(watch.began.nanos_until(&watch.ended)? / MARKS))
    }

    fn time_laid_out(&mut self, load: AttentionLoad) -> Result<Vec<Operation>, DriverFault> {
        self.context.bind()?;
        let offsets = self.layout.pack(self.slots[0].plan.as_mut_slice());
        let (forward, [slot, before], _) = self.forward(offsets);
        let CudaForward { config, buffers, model, .. } = forward;
        forward.context.upload(forward.plan.address(), &slot.plan, 4 * offsets.end)?;
        let mut stopwatch =
            Stopwatch { forward, began: &slot.began, ended: &slot.ended, timed: Vec::new() };
        // Each element is read in 2 bytes and written in 4.
        let embedded = 6 * u64::from(stopwatch.forward.tokens()) * u64::from(config.hidden);
        stopwatch.once("embedding", [embedded, 0], |forward| forward.embed())?;
        stopwatch.layers(load)?;
        let rows = stopwatch.forward.layout.logit_rows.len() as u64;
        if rows > 0 {
            let head = head_gemm(config, buffers, model, rows as u32);
            stopwatch.once("head", needs(&head), CudaForward::head)?;
            let logits = 4 * rows * u64::from(config.vocabulary);
            stopwatch.once("sample", [logits, 0], |forward| {
                forward.sample(&slot.sampled, &before.sampled)
            })?;
        }
        Ok(stopwatch.timed)
    }
}

/// The work of attention in one layer of a step.
#[derive(Clone, Copy)]
struct AttentionLoad {
    /// Cached tokens that are read.
    keys: u64,
    /// Pairs of a new token and a token that it sees.
    pairs: u64,
}

struct Stopwatch<'a> {
    forward: CudaForward<'a>,
    began: &'a CudaEvent,
    ended: &'a CudaEvent,
    timed: Vec<Operation>,
}

impl<'a> Stopwatch<'a> {
    /// Measures the operations that every layer has.
    fn layers(&mut self, load: AttentionLoad) -> Result<(), DriverFault> {
        let CudaForward { config, buffers, model, .. } = self.forward;
        let tokens = self.forward.tokens();
        let ModelConfig { hidden, intermediate, heads, head_dim, .. } = *config;
        let [hidden, intermediate] = [hidden, intermediate].map(u64::from);
        let (queries, keys) = (config.query_width() as u64, config.kv_width() as u64);
        let many = u64::from(tokens);
        let gemms = LayerGemms::new(config, buffers, &model.layers[0], tokens);
        let [qkv, output, gate_up, down] = gemms.all().map(|gemm| needs(&gemm));
        let of = |index: usize| LayerGemms::new(config, buffers, &model.layers[index], tokens);

        self.each("norm", [many * hidden * 6, 0], |forward, index| {
            forward.normalise(&model.layers[index].input_norm, 0, tokens)
        })?;
        self.each("qkv", qkv, |forward, index| forward.gemm(of(index).qkv))?;
        // QKV is read in f32; queries, keys and values are written in bf16.
        let positions = many * (4 * (queries + 2 * keys) + 2 * queries + 4 * keys);
        self.each("positions", [positions, 0], |forward, index| {
            forward.rope(&model.layers[index], index)
        })?;
        // Keys, values, queries and output take 2 bytes an element each.
        let attention = [
            4 * keys * load.keys + 4 * queries * many,
            4 * u64::from(heads) * u64::from(head_dim) * load.pairs,
        ];
        self.each("attention", attention, |forward, index| {
            forward.attend(&model.layers[index], index)
        })?;
        self.each("output", output, |forward, index| forward.gemm(of(index).output))?;
        self.each("gate and up", gate_up, |forward, index| forward.gemm(of(index).gate_up))?;
        self.each("gate", [many * intermediate * 6, 0], |forward, _| forward.gate())?;
        self.each("down", down, |forward, index| forward.gemm(of(index).down))
    }

    /// Measures `work` over all layers, after one warm-up.
    fn each(
        &mut self,
        name: &'static str,
        needs: [u64; 2],
        mut work: impl FnMut(&mut CudaForward<'a>, usize) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        let layers = self.forward.model.layers.len();
        self.time(name, needs, layers, |forward| (0..layers).try_for_each(|at| work(forward, at)))
    }

    /// Measures several runs of `work`, after one warm-up.
    fn once(
        &mut self,
        name: &'static str,
        needs: [u64; 2],
        mut work: impl FnMut(&mut CudaForward<'a>) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        self.time(name, needs, RUNS, |forward| (0..RUNS).try_for_each(|_| work(forward)))
    }

    fn time(
        &mut self,
        name: &'static str,
        [bytes, flop]: [u64; 2],
        runs: usize,
        mut work: impl FnMut(&mut CudaForward<'a>) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        // A first run outside of the capture makes the plans of the matrix products.
        work(&mut self.forward)?;
        let context = self.forward.context;
        // The runs are one graph; otherwise the host's launches would be measured.
        let graph = context.capture(|| work(&mut self.forward))?;
        context.record(self.began)?;
        // SAFETY: the graph refers to the backend's own buffers, which live.
        unsafe { context.replay(&graph) }?;
        context.record(self.ended)?;
        self.ended.wait()?;
        let time = DeviceNanos(self.began.nanos_until(self.ended)? / runs as u64);
        self.timed.push(Operation { name, time, bytes, flop });
        Ok(())
    }
}

/// Returns the bytes and the arithmetic of a matrix product: weights, input and output
/// once, and the old output if the product is added to it.
fn needs(gemm: &Gemm) -> [u64; 2] {
    let [rows, columns, depth] = [gemm.rows, gemm.columns, gemm.depth].map(u64::from);
    let output = match gemm.epilogue {
        Epilogue::Bf16 => 2,
        Epilogue::F32 => 4,
        Epilogue::Add => 8,
    };
    let bytes = 2 * columns * depth + 2 * rows * depth + output * rows * columns;
    [bytes, 2 * rows * columns * depth]
}

const RUNS: usize = 8;
const MARKS: u64 = 100;
