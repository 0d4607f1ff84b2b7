//! Measures the speed of steps: decoding at several batch sizes and one step with a
//! prompt, for shapes of known models with random weights. The memory bandwidth of the
//! device is measured in the same run.

use std::error::Error;
use std::time::Instant;

use serde_json::{Value, json};
use tollgate_engine::SamplingParams;
use tollgate_engine::backend::cuda::{CudaBackend, CudaOptions, Operation};
use tollgate_engine::backend::{
    Backend, LogitRows, Results, SampleRequest, SampleTarget, Span, StepOutput, StepPlan,
};
use tollgate_engine::random_model::ModelSpec;

use crate::options::{self, Options, Way};

/// The measurements of a shape.
struct Plan {
    shapes: Vec<(&'static str, ModelSpec)>,
    /// Sequences of a decoding batch.
    batches: &'static [u32],
    /// Tokens that each sequence already has.
    context: u32,
    /// Tokens of a prompt.
    prompt: u32,
    /// Steps of each kind; the median is reported.
    steps: usize,
}

impl Plan {
    fn of(options: &Options) -> Self {
        if options.is_quick {
            return Self {
                shapes: vec![("tiny", options::tiny())],
                batches: &[1, 3],
                context: 40,
                prompt: 70,
                steps: 2,
            };
        }
        let shapes = ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3-8b"];
        Self {
            shapes: shapes
                .into_iter()
                .filter_map(|name| Some((name, ModelSpec::named(name)?)))
                .collect(),
            batches: &[1, 8, 32, 128],
            context: 1_024,
            prompt: 2_048,
            steps: 20,
        }
    }
}

/// Returns the names of all cases, the most valuable first.
pub(crate) fn titles(options: &Options) -> Vec<String> {
    let plan = Plan::of(options);
    let shapes = |way| plan.shapes.iter().map(move |(name, _)| format!("{name}/{way}"));
    Way::ALL.into_iter().flat_map(shapes).collect()
}

/// Measures the case of this name. Returns `None` for an unknown name.
pub(crate) fn run(options: &Options, wanted: &str) -> Option<Value> {
    let plan = Plan::of(options);
    let mut ways = plan.shapes.iter().flat_map(|shape| Way::ALL.map(|way| (shape, way)));
    let ((name, spec), way) = ways.find(|((name, _), way)| format!("{name}/{way}") == wanted)?;
    let options = options.backend(way, plan.prompt.max(256));
    let mut measured = shape(spec, &plan, &options)
        .unwrap_or_else(|error| json!({ "passed": false, "why": error.to_string() }));
    measured["case"] = wanted.into();
    measured["shape"] = (*name).into();
    measured["kernels"] = way.kernels.to_string().into();
    measured["launches"] = way.launches.to_string().into();
    Some(measured)
}

fn shape(spec: &ModelSpec, plan: &Plan, options: &CudaOptions) -> Result<Value, Box<dyn Error>> {
    let mut backend = options::with_noise(spec, options)?;
    let copy = copy(&mut backend)?;
    let mut told = json!({
        "device": backend.device().name, "uuid": backend.device().uuid,
        "notes": backend.notes(), "vendor_products": backend.has_vendor_gemm(),
        "context": plan.context, "weight_bytes": backend.weight_bytes(),
        "copy_bytes_per_second": copy, "marks_ns": backend.time_marks()?.nanos(),
    });
    let mut decode = Vec::new();
    for &batch in plan.batches {
        decode.push(measure_decode(&mut backend, plan, batch, copy)?);
    }
    told["decode"] = decode.into();
    told["prefill"] = measure_prefill(&mut backend, plan, copy)?;
    Ok(told)
}

/// Returns the bytes a second that a copy reads (and as many that it writes), the best
/// of five.
fn copy(backend: &mut CudaBackend) -> Result<f64, Box<dyn Error>> {
    let mut best: f64 = 0.0;
    for _ in 0..5 {
        let (bytes, time) = backend.time_copy()?;
        best = best.max(bytes as f64 / (time.nanos().max(1) as f64 / 1e9));
    }
    Ok(best)
}

fn measure_decode(
    backend: &mut CudaBackend,
    plan: &Plan,
    batch: u32,
    copy: f64,
) -> Result<Value, Box<dyn Error>> {
    let blocks = (plan.context + 1).div_ceil(16);
    if batch * blocks > backend.kv_blocks() {
        return Ok(json!({ "batch": batch, "why_not": "the KV cache is too small" }));
    }
    let tables: Vec<Vec<u32>> =
        (0..batch).map(|one| (one * blocks..(one + 1) * blocks).collect()).collect();
    let vocabulary = backend.shape().vocabulary;
    let tokens: Vec<[u32; 1]> = (0..batch).map(|one| [(one * 37 + 5) % vocabulary]).collect();
    let spans: Vec<Span<'_>> = tokens
        .iter()
        .zip(&tables)
        .map(|(tokens, blocks)| Span {
            tokens,
            start: plan.context,
            blocks,
            logits: LogitRows::Last,
        })
        .collect();
    let (device, wall) = median(backend, &spans, plan.steps)?;
    let ahead = ahead(backend, &spans, plan.steps)?;
    let marks = backend.time_marks()?.nanos() as f64;
    let read = backend.weight_bytes() as f64
        + f64::from(batch) * f64::from(plan.context) * backend.shape().kv_bytes_per_token as f64;
    // A copy reads and writes, so it moves twice its bytes.
    let share = read / (device / 1e9) / (2.0 * copy);
    Ok(json!({
        "batch": batch, "device_ns": device, "wall_ns": wall,
        "tokens_per_device_second": f64::from(batch) / (device / 1e9),
        "tokens_per_second_in_turn": f64::from(batch) / (wall / 1e9),
        "tokens_per_second": f64::from(batch) / (ahead / 1e9),
        "bytes_read_over_copy": share, "timing_over_step": marks / device,
        "operations": operations(backend, &spans, copy)?,
    }))
}

/// Measures each operation by itself, with random sampling: memory traffic relative to
/// a copy, and arithmetic.
fn operations(
    backend: &mut CudaBackend,
    spans: &[Span<'_>],
    copy: f64,
) -> Result<Value, Box<dyn Error>> {
    let params = SamplingParams { temperature: 1.0, top_p: 0.9, ..SamplingParams::greedy(0) };
    let draws = draws(&params, spans.len());
    let timed = backend.time_operations(&StepPlan::samples(spans, &draws))?;
    let told = timed.into_iter().map(|Operation { name, time, bytes, flop }| {
        let seconds = time.nanos().max(1) as f64 / 1e9;
        json!({
            "operation": name, "device_ns": time.nanos(), "bytes": bytes, "flop": flop,
            "bytes_over_copy": bytes as f64 / seconds / (2.0 * copy),
            "tflop_per_second": flop as f64 / seconds / 1e12,
        })
    });
    Ok(told.collect())
}

fn measure_prefill(
    backend: &mut CudaBackend,
    plan: &Plan,
    copy: f64,
) -> Result<Value, Box<dyn Error>> {
    let vocabulary = backend.shape().vocabulary;
    let tokens: Vec<u32> = (0..plan.prompt).map(|at| (at * 7 + 3) % vocabulary).collect();
    let blocks: Vec<u32> = (0..plan.prompt.div_ceil(16)).collect();
    let span = Span { tokens: &tokens, start: 0, blocks: &blocks, logits: LogitRows::Last };
    let (device, wall) = median(backend, &[span], plan.steps.min(8))?;
    let operations = operations(backend, &[span], copy)?;
    Ok(json!({
        "operations": operations,
        "tokens": plan.prompt, "device_ns": device, "wall_ns": wall,
        "tokens_per_device_second": f64::from(plan.prompt) / (device / 1e9),
        "tokens_per_second": f64::from(plan.prompt) / (wall / 1e9),
    }))
}

/// Returns nanoseconds of the device and of the wall clock: medians of `steps` steps
/// after two warm-up steps.
pub(crate) fn median(
    backend: &mut CudaBackend,
    spans: &[Span<'_>],
    steps: usize,
) -> Result<(f64, f64), Box<dyn Error>> {
    let params = SamplingParams::greedy(0);
    let draws = draws(&params, spans.len());
    let mut output = StepOutput::default();
    let (mut device, mut wall) = (Vec::new(), Vec::new());
    for step in 0..steps + 2 {
        let began = Instant::now();
        backend.step(&StepPlan::samples(spans, &draws), &mut output)?;
        let took = began.elapsed().as_nanos() as f64;
        if step >= 2 {
            wall.push(took);
            device.push(output.device_time().ok_or("a step without a time")?.nanos() as f64);
        }
    }
    Ok((middle(device), middle(wall)))
}

/// Returns the wall clock's nanoseconds of one step. Each step begins before the last
/// is finished and takes the last step's samples as its input.
fn ahead(
    backend: &mut CudaBackend,
    spans: &[Span<'_>],
    steps: usize,
) -> Result<f64, Box<dyn Error>> {
    let params = SamplingParams::greedy(0);
    let draws = draws(&params, spans.len());
    let feeds: Vec<u32> = (0..spans.len() as u32).collect();
    let plan = StepPlan { spans, results: Results::Samples(&draws), token_feedback: &feeds };
    let mut output = StepOutput::default();
    backend.begin(&StepPlan { token_feedback: &[], ..plan }, &mut output)?;
    let began = Instant::now();
    for _ in 0..steps {
        backend.begin(&plan, &mut output)?;
        backend.finish(&mut output)?;
    }
    let took = began.elapsed().as_nanos() as f64;
    backend.finish(&mut output)?;
    Ok((took / steps as f64).max(1.0))
}

/// Returns greedy sample requests for each row.
fn draws(params: &SamplingParams, rows: usize) -> Vec<SampleRequest<'_>> {
    (0..rows as u32)
        .map(|row| SampleRequest { row, params, token: SampleTarget::first() })
        .collect()
}

fn middle(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2].max(1.0)
}
