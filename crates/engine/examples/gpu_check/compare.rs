//! Compares whole models on the GPU with the same models on the CPU, logit by logit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use serde_json::{Value, json};
use tollgate_engine::backend::Backend as _;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::cuda::{CudaBackend, KernelChoice, Launches};
use tollgate_engine::random_model::ModelSpec;

use crate::agree::{BLOCKS, LONG_CONTEXT, Pair, everything, far_into_a_context, models, open};
use crate::options::{Options, Way};
use crate::{determinism, sampling};

/// A model, and the way in which it is computed.
struct Case {
    name: &'static str,
    spec: ModelSpec,
    window: Option<u32>,
    way: Way,
}

impl Case {
    fn title(&self) -> String {
        format!("{}/{}", self.name, self.way)
    }
}

/// Returns tiny models in every way that may change results, and one real-size model in
/// the ways that change the matrix kernels.
fn cases(options: &Options) -> Vec<Case> {
    let with = |(name, spec, window): (&'static str, ModelSpec, Option<u32>), ways: &[Way]| {
        let case = |&way| Case { name, spec: spec.clone(), window, way };
        ways.iter().map(case).collect::<Vec<_>>()
    };
    // Most steps of a real-size model read prompts, which are launched one by one in
    // any case.
    let ways: Vec<Way> =
        Way::ALL.into_iter().filter(|way| way.launches != Launches::Single).collect();
    let mut cases: Vec<Case> = models().into_iter().flat_map(|model| with(model, &ways)).collect();
    if !options.is_quick
        && let Some(spec) = ModelSpec::named("qwen2.5-0.5b")
    {
        cases.extend(with(("qwen2.5-0.5b", spec, None), &[Way::WORKER, Way::OWN]));
    }
    cases
}

/// Returns the names of all cases.
pub(crate) fn titles(options: &Options) -> Vec<String> {
    cases(options).iter().map(Case::title).collect()
}

/// Compares the case of this name. Returns `None` for an unknown name.
pub(crate) fn run(options: &Options, title: &str) -> Option<Value> {
    let case = cases(options).into_iter().find(|case| case.title() == title)?;
    let began = Instant::now();
    let found = catch_unwind(AssertUnwindSafe(|| compare(&case, options)));
    let mut said = match found {
        Ok(Ok(said)) => said,
        Ok(Err(error)) => json!({ "passed": false, "why": error }),
        Err(panic) => json!({ "passed": false, "why": text(&*panic) }),
    };
    said["case"] = title.into();
    said["seconds"] = began.elapsed().as_secs_f64().into();
    Some(said)
}

fn compare(case: &Case, options: &Options) -> Result<Value, String> {
    let Case { spec, window, way, .. } = case;
    let (_folder, files) = open(spec, *window, 7);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = CpuOptions { threads, kv_tokens: BLOCKS * 16, step_tokens: 256, instructions: None };
    let mut cpu = CpuBackend::new(&files, &cpu).map_err(|error| error.to_string())?;
    let mut cuda =
        CudaBackend::new(&files, &options.backend(*way, 256)).map_err(|error| error.to_string())?;
    let (device, notes) = (cuda.device().name.clone(), cuda.notes().to_vec());
    let mut pair = Pair::new(&mut cpu, &mut cuda);
    everything(&mut pair, spec.vocabulary);
    if spec.context == LONG_CONTEXT && !options.is_quick {
        far_into_a_context(&mut pair, spec.vocabulary);
    }
    let Pair { rows, clear, worst, .. } = pair;
    let draws = sampling::check(&mut cuda, spec.vocabulary);
    let differing = determinism::differing(&mut cuda, spec.vocabulary);
    // The logits must be the same whatever else is in a step, so the steps of this
    // check share no graph.
    let graphs = cuda.graphs();
    let as_promised = match way {
        Way { kernels: KernelChoice::Deterministic, .. } => differing == 0,
        Way { .. } => graphs > 0,
    };
    Ok(json!({
        "passed": rows > 300 && draws > 300 && as_promised,
        "device": device, "notes": notes, "vendor_products": cuda.has_vendor_gemm(),
        "rows": rows, "rows_with_a_clear_choice": clear,
        "largest_difference": worst, "bound": crate::agree::BOUND,
        "draws": draws, "graphs": graphs, "logits_that_differ_among_others": differing,
    }))
}

/// Returns the text of a panic.
fn text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "it panicked".to_owned())
}
