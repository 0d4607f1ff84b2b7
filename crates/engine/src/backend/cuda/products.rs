//! Who runs a linear layer: our kernel for few rows, the vendor's library for
//! many, our own tiles where there is no library. Where there is one, what is
//! fastest is measured at the start.

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate_domain::DeviceNanos;

use super::driver::{Address, Blas, Context, DriverFault, Event, Matrices, Plan};
use super::kernels::{self, Finish, Launch, LinearArgs};
use super::machine::Machine;

/// The library, if there is one, and what is known of it so far.
pub(super) struct Products {
    blas: Option<Blas>,
    /// By shape; without a plan our own kernel runs it. Bounded by the model's
    /// matrices times the buckets of rows.
    plans: BTreeMap<Matrices, Option<Plan>>,
    /// Our own kernel, by the arguments and what becomes of the products.
    own: fn(LinearArgs, Finish) -> Launch<LinearArgs>,
}

/// A linear layer of one step.
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// bf16, `depth` a row.
    pub(super) input: Address,
    /// bf16, `depth` a row.
    pub(super) weights: Address,
    /// `columns` a row.
    pub(super) output: Address,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) depth: u32,
    pub(super) finish: Finish,
}

/// A linear layer of every step: what it has at most, and the same in further
/// layers, so that a measurement reads from memory as a step does.
pub(super) struct Kind {
    pub(super) product: Product,
    pub(super) weights: Vec<Address>,
}

impl Product {
    /// As the vendor's library is asked for it.
    fn matrices(&self) -> Matrices {
        Matrices {
            rows: bucket(self.rows),
            outputs: self.columns,
            inputs: self.depth,
            is_f32: self.finish != Finish::Bf16,
            adds: self.finish == Finish::Add,
        }
    }

    fn args(&self) -> LinearArgs {
        let &Self { input, weights, output, rows, columns, depth, finish: _ } = self;
        let [output, input, weights] = [output, input, weights].map(Address::raw);
        LinearArgs { output, input, weights, rows, columns, depth }
    }
}

impl Products {
    pub(super) fn new(blas: Option<Blas>) -> Self {
        Self { blas, plans: BTreeMap::new(), own: kernels::linear }
    }

    /// One kernel for any number of rows, which adds in one order.
    pub(super) fn deterministic() -> Self {
        Self { own: kernels::skinny, ..Self::new(None) }
    }

    /// Whether there is the vendor's library.
    pub(super) fn has_vendors(&self) -> bool {
        self.blas.is_some()
    }

    /// Measures which way is the fastest for each kind of product and number
    /// of rows, for `allowed` of the device's time; what it does not come to is
    /// run as the library guesses.
    ///
    /// # Safety
    /// As [`Self::run`], for each kind, with all its weights and as many rows
    /// as it has at most.
    ///
    /// # Errors
    /// When the device cannot be timed.
    pub(super) unsafe fn search(
        &mut self,
        context: &Arc<Context>,
        machine: &Machine,
        kinds: &[Kind],
        allowed: DeviceNanos,
    ) -> Result<usize, DriverFault> {
        let Some(blas) = &self.blas else { return Ok(0) };
        let watch = Watch { context, began: context.event()?, ended: context.event()? };
        let most = kinds.iter().map(|kind| kind.product.rows).max().unwrap_or(0);
        let mut spent = 0;
        for rows in buckets(most) {
            for kind in kinds.iter().filter(|kind| bucket(kind.product.rows) >= rows) {
                if spent > allowed.nanos() {
                    return Ok(self.plans.len());
                }
                let product = Product { rows, ..kind.product };
                // SAFETY: the caller vouches for the places.
                let (plan, took) =
                    unsafe { fastest(blas, machine, &watch, product, &kind.weights) };
                spent += took;
                self.plans.insert(product.matrices(), plan);
            }
        }
        Ok(self.plans.len())
    }

    /// Puts the layer into the stream.
    ///
    /// # Safety
    /// As [`Machine::launch`]; input and output have room for a whole
    /// [bucket](bucket) of rows.
    pub(super) unsafe fn run(
        &mut self,
        context: &Context,
        machine: &Machine,
        product: Product,
    ) -> Result<(), DriverFault> {
        let Product { input, weights, output, rows, finish, .. } = product;
        if let Some(blas) = &self.blas {
            let matrices = product.matrices();
            if rows > kernels::SKINNY_ROWS {
                self.plans.entry(matrices).or_insert_with(|| blas.plan(matrices).ok());
            }
            if let Some(kept) = self.plans.get_mut(&matrices) {
                while let Some(plan) = kept {
                    // SAFETY: the caller vouches for the places.
                    let ran = unsafe { blas.run(plan, input, weights, output) };
                    // What it proposes and then refuses was not measured.
                    match ran {
                        Err(fault) if fault.is_refusal() => {
                            *kept = kept.take().and_then(Plan::next)
                        }
                        ran => return ran,
                    }
                }
            }
        }
        // SAFETY: the caller vouches for the places.
        unsafe { machine.launch(context, &(self.own)(product.args(), finish)) }
    }
}

/// The fastest way for one product: a plan, or none for our own kernel; and the
/// device's time that this took, ns. A way that fails is left out.
///
/// # Safety
/// As [`Products::run`], with all these weights.
unsafe fn fastest(
    blas: &Blas,
    machine: &Machine,
    watch: &Watch<'_>,
    product: Product,
    weights: &[Address],
) -> (Option<Plan>, u64) {
    let mut times: Vec<(u64, Option<usize>)> = Vec::new();
    let mut tried = |way, took: Result<u64, DriverFault>| {
        times.extend(took.ok().map(|took| (took, way)));
    };
    if product.rows <= kernels::SKINNY_ROWS {
        let own = watch.time(weights, |weights| {
            let args = Product { weights, ..product }.args();
            // SAFETY: the caller vouches for the places.
            unsafe { machine.launch(watch.context, &kernels::linear(args, product.finish)) }
        });
        tried(None, own);
    }
    let Ok(mut plan) = blas.plan(product.matrices()) else { return (None, 0) };
    for way in 0..plan.ways() {
        plan.choose(way);
        let theirs = watch.time(weights, |weights| {
            // SAFETY: the caller vouches for the places.
            unsafe { blas.run(&plan, product.input, weights, product.output) }
        });
        tried(Some(way), theirs);
    }
    let spent = RUNS * times.iter().map(|(took, _)| took).sum::<u64>();
    let best = times.into_iter().min().and_then(|(_, way)| way);
    let plan = best.map(|way| {
        plan.choose(way);
        plan
    });
    (plan, spent)
}

/// Times what is put into a stream.
struct Watch<'a> {
    context: &'a Arc<Context>,
    began: Event,
    ended: Event,
}

impl Watch<'_> {
    /// Nanoseconds of `work` over all weights, once it has run before, the least of
    /// some runs: as one graph where that can be, or the host would be what is
    /// timed.
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
                // SAFETY: the caller vouches for the places that `work` is given.
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

/// Every number of rows up to that of a whole step, which comes first.
fn buckets(most: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (1..=most).map(bucket).collect();
    all.dedup();
    let whole = all.pop();
    whole.into_iter().chain(all).collect()
}

/// Rows are rounded up to one of few counts, so that few plans serve: what is
/// computed behind the last row is never read.
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
    fn buckets_are_few_and_large_enough() {
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
