//! Whole models on the GPU beside the same on the CPU, logit by logit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use serde_json::{Value, json};
use tollgate_engine::backend::Backend as _;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::cuda::{CudaBackend, KernelChoice};
use tollgate_engine::random_model::ModelSpec;

use crate::agree::{BLOCKS, Pair, everything, models, open};
use crate::options::Options;
use crate::{alike, drawing};

/// Every model with every choice of kernels; the first that differs does not
/// stop the others.
pub(crate) fn run(options: &Options) -> Value {
    let mut all = models();
    if !options.is_quick
        && let Some(spec) = ModelSpec::named("qwen2.5-0.5b")
    {
        all.push(("qwen2.5-0.5b", spec, None));
    }
    let mut compared = Vec::new();
    for (name, spec, window) in &all {
        for kernels in KernelChoice::ALL {
            eprintln!("{name}, {kernels} kernels");
            let began = Instant::now();
            let found = catch_unwind(AssertUnwindSafe(|| one(spec, *window, options, kernels)));
            let said = match found {
                Ok(Ok(said)) => said,
                Ok(Err(error)) => json!({ "passed": false, "why": error }),
                Err(panic) => json!({ "passed": false, "why": text(&*panic) }),
            };
            compared.push(json!({
                "model": name, "kernels": kernels.to_string(),
                "seconds": began.elapsed().as_secs_f64(), "result": said,
            }));
        }
    }
    let passed = compared.iter().all(|one| one["result"]["passed"] == true);
    json!({ "check": "agree", "passed": passed, "compared": compared })
}

fn one(
    spec: &ModelSpec,
    window: Option<u32>,
    options: &Options,
    kernels: KernelChoice,
) -> Result<Value, String> {
    let (_folder, files) = open(spec, window, 7);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = CpuOptions { threads, kv_tokens: BLOCKS * 16, step_tokens: 256, instructions: None };
    let mut cpu = CpuBackend::new(&files, &cpu).map_err(|error| error.to_string())?;
    let mut cuda = CudaBackend::new(&files, &options.backend(kernels, 256))
        .map_err(|error| error.to_string())?;
    let (device, notes) = (cuda.device().name.clone(), cuda.notes().to_vec());
    let mut pair = Pair::new(&mut cpu, &mut cuda);
    everything(&mut pair, spec.vocabulary);
    let Pair { rows, clear, worst, .. } = pair;
    let draws = drawing::check(&mut cuda, spec.vocabulary);
    let graphs = cuda.graphs();
    // Whatever else is in a step, or not: no kind of step is another's graph.
    let is_deterministic = kernels == KernelChoice::Deterministic;
    let differing = alike::differing(&mut cuda, spec.vocabulary);
    let as_promised = if is_deterministic { differing == 0 } else { graphs > 0 };
    Ok(json!({
        "passed": rows > 300 && draws > 300 && as_promised, "device": device, "notes": notes,
        "logits_that_differ_among_others": differing,
        "rows": rows, "rows_with_a_clear_choice": clear,
        "largest_difference": worst, "bound": crate::agree::BOUND,
        "draws": draws, "graphs": graphs,
    }))
}

/// What a panic said.
fn text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "it panicked".to_owned())
}
