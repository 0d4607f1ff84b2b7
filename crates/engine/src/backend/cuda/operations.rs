//! How long each operation of a step takes on its own, and what it cannot do
//! without: bytes that it must read or write, and arithmetic. For who compares
//! kernels with what a card can do; no engine calls it.

use tollgate_domain::DeviceNanos;

use super::CudaBackend;
use super::driver::{DriverFault, Event};
use super::forward::{Forward, LayerProducts, head_product};
use super::kernels::Finish;
use super::products::Product;
use crate::backend::{BackendError, StepPlan};
use crate::model::ModelConfig;

/// One operation of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// What a step calls it.
    pub name: &'static str,
    /// How long it took: the mean over all layers, or over some runs where a
    /// step has it once.
    pub time: DeviceNanos,
    /// Bytes that it reads and writes at least.
    pub bytes: u64,
    /// Floating point operations; 0 where they do not count.
    pub flop: u64,
}

impl CudaBackend {
    /// Times the operations of a step by themselves, in the order of a step.
    /// What the plan's sequences hold in the cache is of no use afterwards.
    ///
    /// # Errors
    /// As [`Backend::begin`](crate::Backend::begin).
    pub fn time_operations(&mut self, plan: &StepPlan<'_>) -> Result<Vec<Operation>, BackendError> {
        assert_eq!(self.open, 0, "no step is under way");
        plan.check(&self.shape, self.limits, self.cache.blocks)?;
        self.layout.lay_out(plan)?;
        // Every key of every span's context is read by one of its tokens.
        let read: u64 = plan.spans.iter().map(|span| span.end()).sum();
        let pairs: u64 =
            plan.spans.iter().flat_map(|span| (u64::from(span.start) + 1)..=span.end()).sum();
        self.time_laid_out(read, pairs).map_err(|fault| BackendError::Device(fault.to_string()))
    }

    /// What timing a step costs: the device's time for the four marks in its
    /// stream.
    ///
    /// # Errors
    /// [`DriverFault`].
    pub fn time_marks(&mut self) -> Result<DeviceNanos, DriverFault> {
        assert_eq!(self.open, 0, "no step is under way");
        self.context.bind()?;
        let [watch, marks] = &self.slots;
        // Meanwhile the host sets marks, or it would be what is timed.
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

    fn time_laid_out(&mut self, read: u64, pairs: u64) -> Result<Vec<Operation>, DriverFault> {
        self.context.bind()?;
        let places = self.layout.pack(self.slots[0].plan.as_mut_slice());
        let (forward, [slot, before], _) = self.parts(places);
        let Forward { config, buffers, model, .. } = forward;
        forward.context.upload(forward.plan.address(), &slot.plan, 4 * places.end)?;
        let mut stopwatch =
            Stopwatch { forward, began: &slot.began, ended: &slot.ended, timed: Vec::new() };
        let embedded = 6 * u64::from(stopwatch.forward.tokens()) * u64::from(config.hidden);
        stopwatch.once("embedding", [embedded, 0], |forward| forward.embed())?;
        stopwatch.layers(read, pairs)?;
        let rows = stopwatch.forward.layout.logit_rows.len() as u64;
        if rows > 0 {
            let head = head_product(config, buffers, model, rows as u32);
            stopwatch.once("head", needs(&head), Forward::head)?;
            let logits = 4 * rows * u64::from(config.vocabulary);
            stopwatch
                .once("draw", [logits, 0], |forward| forward.draw(&slot.drawn, &before.drawn))?;
        }
        Ok(stopwatch.timed)
    }
}

struct Stopwatch<'a> {
    forward: Forward<'a>,
    began: &'a Event,
    ended: &'a Event,
    timed: Vec<Operation>,
}

impl<'a> Stopwatch<'a> {
    /// What every layer does.
    fn layers(&mut self, read: u64, pairs: u64) -> Result<(), DriverFault> {
        let Forward { config, buffers, model, .. } = self.forward;
        let tokens = self.forward.tokens();
        let ModelConfig { hidden, intermediate, heads, head_dim, .. } = *config;
        let [hidden, intermediate] = [hidden, intermediate].map(u64::from);
        let (queries, keys) = (config.query_width() as u64, config.kv_width() as u64);
        let many = u64::from(tokens);
        let products = LayerProducts::new(config, buffers, &model.layers[0], tokens);
        let [qkv, output, gate_up, down] = products.all().map(|product| needs(&product));
        let of = |index: usize| LayerProducts::new(config, buffers, &model.layers[index], tokens);

        self.each("norm", [many * hidden * 6, 0], |forward, index| {
            forward.normalise(&model.layers[index].input_norm, 0, tokens)
        })?;
        self.each("qkv", qkv, |forward, index| forward.product(of(index).qkv))?;
        let positions = many * (4 * (queries + 2 * keys) + 2 * queries + 4 * keys);
        self.each("positions", [positions, 0], |forward, index| {
            forward.rope(&model.layers[index], index)
        })?;
        let attention = [
            4 * keys * read + 4 * queries * many,
            4 * u64::from(heads) * u64::from(head_dim) * pairs,
        ];
        self.each("attention", attention, |forward, index| {
            forward.attend(&model.layers[index], index)
        })?;
        self.each("output", output, |forward, index| forward.product(of(index).output))?;
        self.each("gate and up", gate_up, |forward, index| forward.product(of(index).gate_up))?;
        self.each("gate", [many * intermediate * 6, 0], |forward, _| forward.gate())?;
        self.each("down", down, |forward, index| forward.product(of(index).down))
    }

    /// Runs `work` in each layer, once all of them have run before.
    fn each(
        &mut self,
        name: &'static str,
        needs: [u64; 2],
        mut work: impl FnMut(&mut Forward<'a>, usize) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        let layers = self.forward.model.layers.len();
        self.time(name, needs, layers, |forward| (0..layers).try_for_each(|at| work(forward, at)))
    }

    /// Runs `work` a few times, once it has run before.
    fn once(
        &mut self,
        name: &'static str,
        needs: [u64; 2],
        mut work: impl FnMut(&mut Forward<'a>) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        self.time(name, needs, RUNS, |forward| (0..RUNS).try_for_each(|_| work(forward)))
    }

    fn time(
        &mut self,
        name: &'static str,
        [bytes, flop]: [u64; 2],
        runs: usize,
        mut work: impl FnMut(&mut Forward<'a>) -> Result<(), DriverFault>,
    ) -> Result<(), DriverFault> {
        work(&mut self.forward)?;
        let context = self.forward.context;
        // As one graph, or the host would be what is timed.
        let graph = context.capture(|| work(&mut self.forward))?;
        context.record(self.began)?;
        // SAFETY: it points to the backend's own buffers, which live.
        unsafe { context.replay(&graph) }?;
        context.record(self.ended)?;
        self.ended.wait()?;
        let time = DeviceNanos(self.began.nanos_until(self.ended)? / runs as u64);
        self.timed.push(Operation { name, time, bytes, flop });
        Ok(())
    }
}

/// Bytes and arithmetic of a linear layer: weights, input and output once, and
/// what it adds to.
fn needs(product: &Product) -> [u64; 2] {
    let [rows, columns, depth] = [product.rows, product.columns, product.depth].map(u64::from);
    let output = match product.finish {
        Finish::Bf16 => 2,
        Finish::F32 => 4,
        Finish::Add => 8,
    };
    let bytes = 2 * columns * depth + 2 * rows * depth + output * rows * columns;
    [bytes, 2 * rows * columns * depth]
}

const RUNS: usize = 8;
const MARKS: u64 = 100;
