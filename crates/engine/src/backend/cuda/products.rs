//! Who runs a linear layer: our kernel for few rows, the vendor's library for
//! many, our own tiles where there is no library.

use std::collections::BTreeMap;

use super::driver::{Address, Blas, Context, DriverFault, Matrices, Plan};
use super::kernels::{self, Finish, LinearArgs};
use super::machine::Machine;

/// The library, if there is one, and what was searched in it so far.
pub(super) struct Products {
    blas: Option<Blas>,
    /// By shape; one that the library cannot run has no plan. Bounded by the
    /// model's matrices times the buckets of rows.
    plans: BTreeMap<Matrices, Option<Plan>>,
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

impl Products {
    pub(super) fn new(blas: Option<Blas>) -> Self {
        Self { blas, plans: BTreeMap::new() }
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
        let Product { input, weights, output, rows, columns, depth, finish } = product;
        if rows > kernels::SKINNY_ROWS
            && let Some(blas) = &self.blas
        {
            let matrices = Matrices {
                rows: bucket(rows),
                outputs: columns,
                inputs: depth,
                is_f32: finish != Finish::Bf16,
                adds: finish == Finish::Add,
            };
            let plan = self.plans.entry(matrices).or_insert_with(|| blas.plan(matrices).ok());
            if let Some(plan) = plan {
                // SAFETY: the caller vouches for the places.
                return unsafe { blas.run(plan, input, weights, output) };
            }
        }
        let args = LinearArgs {
            output: output.raw(),
            input: input.raw(),
            weights: weights.raw(),
            rows,
            columns,
            depth,
        };
        // SAFETY: the caller vouches for the places.
        unsafe { machine.launch(context, &kernels::linear(args, finish)) }
    }
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
    }
}
