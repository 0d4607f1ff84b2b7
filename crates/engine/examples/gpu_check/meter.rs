//! Whether the time that steps are billed for is the time in which the card
//! worked: the meter's figure beside the wall clock's and beside what NVIDIA's
//! own tool says of the card meanwhile.

use std::error::Error;
use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_engine::SamplingParams;
use tollgate_engine::backend::cuda::CudaBackend;
use tollgate_engine::backend::{Backend, Draw, DrawToken, LogitRows, Span, StepOutput, StepPlan};
use tollgate_engine::model::ModelConfig;
use tollgate_engine::random_model::ModelSpec;
use tollgate_engine::weights::Element;

use crate::options::Options;

/// Parts of the time in which steps run, one phase each.
const DUTIES: [f64; 3] = [1.0, 0.5, 0.2];
/// How far the two views may be apart. The tool tells whole percent of a period
/// that it chooses itself, up to a second.
const BOUND: f64 = 0.1;

pub(crate) fn run(options: &Options) -> Result<Value, Box<dyn Error>> {
    let (spec, phase) = match options.is_quick {
        true => {
            let tiny = ModelSpec { head_dim: 32, heads: 4, kv_heads: 2, ..ModelSpec::tiny() };
            (tiny, Duration::from_millis(600))
        }
        false => {
            let spec = ModelSpec::named("qwen2.5-7b").ok_or("no such shape")?;
            (spec, Duration::from_secs(10))
        }
    };
    let config = spec.config(Element::Bf16).to_string();
    let config = ModelConfig::parse("config.json".as_ref(), config.as_bytes())?;
    let mut backend = CudaBackend::with_noise(&config, &options.backend(true, 256))?;
    let mut phases = Vec::new();
    for duty in DUTIES {
        eprintln!("{} % of the time for {} ms", duty * 100.0, phase.as_millis());
        phases.push(measure(&mut backend, options, duty, phase)?);
    }
    let passed = phases.iter().all(|phase| phase["passed"] == true);
    let device = backend.device();
    Ok(json!({
        "check": "meter", "passed": passed, "device": device.name, "uuid": device.uuid,
        "bound": BOUND, "phases": phases,
    }))
}

/// Runs steps for that part of the time, and compares.
fn measure(
    backend: &mut CudaBackend,
    options: &Options,
    duty: f64,
    phase: Duration,
) -> Result<Value, Box<dyn Error>> {
    let watch = Watch::start(options, &backend.device().uuid);
    let (mut busy, mut steps) = (Duration::ZERO, 0_u32);
    let began = Instant::now();
    while began.elapsed() < phase {
        let step = Instant::now();
        busy += step_of(backend)?;
        steps += 1;
        std::thread::sleep(step.elapsed().mul_f64(1.0 / duty - 1.0));
    }
    let wall = began.elapsed();
    let metered = busy.as_secs_f64() / wall.as_secs_f64();
    let mut told = json!({
        "duty": duty, "steps": steps, "wall_ns": wall.as_nanos() as u64,
        "busy_ns": busy.as_nanos() as u64, "metered": metered,
    });
    // Never busier than time passes, whatever the tool says.
    let within_wall = busy <= wall;
    match watch.and_then(Watch::stop) {
        Err(why) => {
            told["why_no_tool"] = why.into();
            told["passed"] = within_wall.into();
        }
        Ok(samples) => {
            let mean = samples.iter().sum::<f64>() / samples.len() as f64 / 100.0;
            told["samples"] = samples.len().into();
            told["tool"] = mean.into();
            told["passed"] = (within_wall && (mean - metered).abs() <= BOUND).into();
        }
    }
    Ok(told)
}

/// How long the device says that a step of eight sequences took.
fn step_of(backend: &mut CudaBackend) -> Result<Duration, Box<dyn Error>> {
    const CONTEXT: u32 = 256;
    let params = SamplingParams::greedy(0);
    let draws: Vec<Draw<'_>> =
        (0..8).map(|row| Draw { row, params: &params, token: DrawToken::first() }).collect();
    let tables: Vec<Vec<u32>> = (0..8).map(|one| (one * 17..(one + 1) * 17).collect()).collect();
    let spans: Vec<Span<'_>> = tables
        .iter()
        .map(|blocks| Span { tokens: &[5], start: CONTEXT, blocks, logits: LogitRows::Last })
        .collect();
    let mut output = StepOutput::default();
    backend.step(&StepPlan::draws(&spans, &draws), &mut output)?;
    let time = output.device_time().ok_or("a step without a time")?;
    Ok(Duration::from_nanos(time.nanos()))
}

/// The tool, which prints the card's use ten times a second.
struct Watch(Child);

impl Watch {
    fn start(options: &Options, uuid: &str) -> Result<Self, String> {
        let tool = options.nvidia_smi.as_deref().unwrap_or("nvidia-smi".as_ref());
        Command::new(tool)
            .args(["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"])
            .args(["--loop-ms=100", "--id", uuid])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map(Self)
            .map_err(|error| format!("{} does not run: {error}", tool.display()))
    }

    /// What it said, percent. The first few are of the time before.
    fn stop(mut self) -> Result<Vec<f64>, String> {
        let failed = |error: std::io::Error| error.to_string();
        // It may have ended by itself; then it has said why in place of figures.
        let _ = self.0.kill();
        let mut text = String::new();
        if let Some(mut out) = self.0.stdout.take() {
            out.read_to_string(&mut text).map_err(failed)?;
        }
        self.0.wait().map_err(failed)?;
        let mut samples: Vec<f64> =
            text.lines().filter_map(|line| line.trim().parse().ok()).collect();
        samples.drain(..samples.len() / 5);
        match samples.is_empty() {
            true => Err(format!("it told no figures: {:?}", text.lines().next())),
            false => Ok(samples),
        }
    }
}
