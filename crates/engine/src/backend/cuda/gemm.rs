//! The choice of kernel for each matrix product (GEMM): our own kernel for few rows,
//! the vendor's library for many, and our own tiled kernel without that library. With
//! the library, the start measures which one is fastest.

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate_domain::DeviceNanos;

use super::driver::{Address, Blas, Context, CudaEvent, DriverFault, GemmPlan, GemmShape};
use super::kernel_module::KernelModule;
use super::kernels::{self, Epilogue, Launch, LinearArgs};

/// The vendor's library, if it was found, and the plans made so far.
pub(super) struct GemmRunner {
    blas: Option<Blas>,
    /// Plans by shape; `None` means that our own kernel runs the product. The map is
    /// bounded by the model's matrices times the buckets of rows.
    plans: BTreeMap<GemmShape, Option<GemmPlan>>,
    /// The launch of our own kernel for the arguments and the epilogue.
    own: fn(LinearArgs, Epilogue) -> Launch<LinearArgs>,
}

/// A matrix product of one step.
#[derive(Clone, Copy)]
pub(super) struct Gemm {
    /// bf16, `depth` elements a row.
    pub(super) input: Address,
    /// bf16, `depth` elements a row.
    pub(super) weights: Address,
    /// `columns` elements a row, of the epilogue's type.
    pub(super) output: Address,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) depth: u32,
    pub(super) epilogue: Epilogue,
}

/// A matrix product of every step with the most rows that it can have. The weights are
/// those of several layers, so that a measurement reads them from memory, as a step
/// does, and not from the cache.
pub(super) struct GemmKind {
    pub(super) gemm: Gemm,
    pub(super) weights: Vec<Address>,
}

impl Gemm {
    /// Returns the product's shape for the vendor's library.
    fn shape(&self) -> GemmShape {
        GemmShape {
            rows: bucket(self.rows),
            outputs: self.columns,
            inputs: self.depth,
            is_f32: self.epilogue != Epilogue::Bf16,
            adds: self.epilogue == Epilogue::Add,
        }
    }

    fn args(&self) -> LinearArgs {
        let &Self { input, weights, output, rows, columns, depth, epilogue: _ } = self;
        let [output, input, weights] = [output, input, weights].map(Address::raw);
        LinearArgs { output, input, weights, rows, columns, depth }
    }
}

impl GemmRunner {
    pub(super) fn new(blas: Option<Blas>) -> Self {
        Self { blas, plans: BTreeMap::new(), own: kernels::linear }
    }

    /// Returns a runner with one kernel for any number of rows, which sums in a fixed
    /// order.
    pub(super) fn deterministic() -> Self {
        Self { own: kernels::skinny, ..Self::new(None) }
    }

    /// Returns true if the vendor's library was found.
    pub(super) fn has_vendor_library(&self) -> bool {
        self.blas.is_some()
    }

    /// Measures the fastest way for each kind of product and each bucket of rows, for
    /// at most `allowed` of the device's time. Products that were not reached run in
    /// the way that the library estimates to be fastest. Returns the number of measured
    /// products.
    ///
    /// # Safety
    /// The conditions of [`Self::run`] must hold for each kind, with all its weights
    /// and its largest number of rows.
    ///
    /// # Errors
    /// [`DriverFault`] if the device cannot be timed.
    pub(super) unsafe fn search(
        &mut self,
        context: &Arc<Context>,
        module: &KernelModule,
        kinds: &[GemmKind],
        allowed: DeviceNanos,
    ) -> Result<usize, DriverFault> {
        let Some(blas) = &self.blas else { return Ok(0) };
        let watch = Watch { context, began: context.event()?, ended: context.event()? };
        let most = kinds.iter().map(|kind| kind.gemm.rows).max().unwrap_or(0);
        let mut spent = 0;
        for rows in buckets(most) {
            for kind in kinds.iter().filter(|kind| bucket(kind.gemm.rows) >= rows) {
                // The limit is checked between products, so one measurement may exceed
                // it.
                if spent > allowed.nanos() {
                    return Ok(self.plans.len());
                }
                let gemm = Gemm { rows, ..kind.gemm };
                // SAFETY: the caller vouches for the addresses.
                let (plan, took) = unsafe { fastest(blas, module, &watch, gemm, &kind.weights) };
                spent += took;
                self.plans.insert(gemm.shape(), plan);
            }
        }
        Ok(self.plans.len())
    }

    /// Queues a product in the stream.
    ///
    /// # Safety
    /// The conditions of [`KernelModule::launch`] must hold, and input and output must
    /// have room for a whole [bucket](bucket) of rows.
    ///
    /// # Errors
    /// [`DriverFault`] if the launch fails.
    pub(super) unsafe fn run(
        &mut self,
        context: &Context,
        module: &KernelModule,
        gemm: Gemm,
    ) -> Result<(), DriverFault> {
        let Gemm { input, weights, output, rows, epilogue, .. } = gemm;
        if let Some(blas) = &self.blas {
            let shape = gemm.shape();
            // Few rows use the library only if the search found it faster than our own
            // kernel.
            if rows > kernels::SKINNY_ROWS {
                self.plans.entry(shape).or_insert_with(|| blas.plan(shape).ok());
            }
            if let Some(kept) = self.plans.get_mut(&shape) {
                while let Some(plan) = kept {
                    // SAFETY: the caller vouches for the addresses.
                    let ran = unsafe { blas.run(plan, input, weights, output) };
                    // The library sometimes refuses an algorithm that it proposed. A
                    // measured algorithm has run before; an unmeasured one may be
                    // refused here, so the next one is tried.
                    match ran {
                        Err(fault) if fault.is_refusal() => {
                            *kept = kept.take().and_then(GemmPlan::next)
                        }
                        ran => return ran,
                    }
                }
            }
        }
        // SAFETY: the caller vouches for the addresses.
        unsafe { module.launch(context, &(self.own)(gemm.args(), epilogue)) }
    }
}

/// Measures one product. Returns the fastest plan, or `None` if our own kernel is
/// fastest, and the device time of the measurement in nanoseconds. Algorithms that fail
/// are skipped.
///
/// # Safety
/// The conditions of [`GemmRunner::run`] must hold with all these weights.
unsafe fn fastest(
    blas: &Blas,
    module: &KernelModule,
    watch: &Watch<'_>,
    gemm: Gemm,
    weights: &[Address],
) -> (Option<GemmPlan>, u64) {
    let mut times: Vec<(u64, Option<usize>)> = Vec::new();
    let mut tried = |way, took: Result<u64, DriverFault>| {
        times.extend(took.ok().map(|took| (took, way)));
    };
    if gemm.rows <= kernels::SKINNY_ROWS {
        let own = watch.time(weights, |weights| {
            let args = Gemm { weights, ..gemm }.args();
            // SAFETY: the caller vouches for the addresses.
            unsafe { module.launch(watch.context, &kernels::linear(args, gemm.epilogue)) }
        });
        tried(None, own);
    }
    let Ok(mut plan) = blas.plan(gemm.shape()) else { return (None, 0) };
    for way in 0..plan.ways() {
        plan.choose(way);
        let theirs = watch.time(weights, |weights| {
            // SAFETY: the caller vouches for the addresses.
            unsafe { blas.run(&plan, gemm.input, weights, gemm.output) }
        });
        tried(Some(way), theirs);
    }
    // Each way ran `RUNS` times; failed ways and warm-ups are not counted.
    let spent = RUNS * times.iter().map(|(took, _)| took).sum::<u64>();
    let best = times.into_iter().min().and_then(|(_, way)| way);
    let plan = best.map(|way| {
        plan.choose(way);
        plan
    });
    (plan, spent)
}

/// A stopwatch for work that is queued in a stream.
struct Watch<'a> {
    context: &'a Arc<Context>,
    began: CudaEvent,
    ended: CudaEvent,
}

impl Watch<'_> {
    /// Returns the nanoseconds of `work` over all weights: the least of some runs,
    /// after one warm-up. The work runs as one graph if possible; otherwise the host's
    /// launches would be measured.
    fn time(
        &self,
        weights: &[Address],
        mut work: impl FnMut(Address) -> Result<(), DriverFault>,
    ) -> Result<u64, DriverFault> {
        work(weights[0])?;
        let mut all = || weights.iter().try_for_each(|&at| work(at));
        let graph = self.context.capture(&mut all).ok();
        let mut least = u64::MAX;
        for _ in 0..RUNS {
            self.context.record(&self.began)?;
            match &graph {
                // SAFETY: the caller vouches for the addresses that `work` is given.
                Some(graph) => unsafe { self.context.replay(graph) }?,
                None => all()?,
            }
            self.context.record(&self.ended)?;
            self.ended.wait()?;
            least = least.min(self.began.nanos_until(&self.ended)?);
        }
        Ok(least)
    }
}

const RUNS: u64 = 2;

/// Returns every bucket of rows up to `most`. The largest comes first, because it
/// matters most if the time runs out.
fn buckets(most: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (1..=most).map(bucket).collect();
    all.dedup();
    let whole = all.pop();
    whole.into_iter().chain(all).collect()
}

/// Rounds a number of rows up to one of few counts, so that few plans serve all.
/// Results behind the last row are never read.
pub(super) fn bucket(rows: u32) -> u32 {
    let step = match rows {
        0..=64 => 8,
        65..=512 => 32,
        _ => 128,
    };
    rows.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_few_and_cover_their_rows() {
        let mut all = std::collections::BTreeSet::new();
        for rows in 1..=8_192 {
            assert!(bucket(rows) >= rows && bucket(bucket(rows)) == bucket(rows));
            all.insert(bucket(rows));
        }
        assert!(all.len() <= 8 + 14 + 60, "{}", all.len());
        assert_eq!(buckets(90), [96, 8, 16, 24, 32, 40, 48, 56, 64]);
        assert!(buckets(0).is_empty());
    }
}
