//! Checks that the time that an engine books is the time in which the device worked.
//! The booked time is compared with the wall clock and with the report of NVIDIA's own
//! tool.

#[path = "../shared/unwritten.rs"]
mod unwritten;

use std::error::Error;
use std::io::{self, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_domain::{Caller, FinishReason, KeyId, RequestId, TenantId};
use tollgate_engine::random_model::ModelSpec;
use tollgate_engine::{
    Backend as _, Engine, EngineHandle, EngineOptions, Flow, GeneratedToken, PromptLogprob,
    RequestOutcome, SamplingParams, Submission, SystemClock, Tier, TokenSink, coarse,
};

use crate::options::{self, Options, Way};
use unwritten::Unwritten;

/// The shares of time in which steps run, one phase each.
const DUTIES: [f64; 3] = [1.0, 0.5, 0.2];
/// The allowed difference of the two views. The tool reports whole percent of a period
/// that it chooses itself, up to a second.
const BOUND: f64 = 0.1;
/// The longest time of a round.
const ROUND_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn run(options: &Options) -> Result<Value, Box<dyn Error>> {
    let (spec, phase) = match options.is_quick {
        true => (options::tiny(), Duration::from_millis(600)),
        false => {
            let spec = ModelSpec::named("qwen2.5-7b").ok_or("no such shape")?;
            (spec, Duration::from_secs(10))
        }
    };
    let mut backend = options::with_noise(&spec, &options.backend(Way::WORKER, 256))?;
    let device = backend.device().clone();
    let clock = Arc::new(SystemClock::new());
    let table = coarse(&mut backend, &*clock)?.table;
    let journal = Box::new(Unwritten);
    let engine = Engine::start(Box::new(backend), EngineOptions::new(table), clock, journal)?;
    let mut load = Load { engine: engine.handle(), asked: 0 };
    let mut phases = Vec::new();
    for duty in DUTIES {
        eprintln!("{} % of the time for {} ms", duty * 100.0, phase.as_millis());
        let watch = Watch::start(options, &device.uuid);
        let report = load.measure(duty, phase)?;
        phases.push(compared(report, watch.and_then(Watch::stop)));
    }
    engine.handle().drain();
    let totals = engine.join()?;
    let passed = phases.iter().all(|phase| phase["passed"] == true);
    Ok(json!({
        "check": "meter", "passed": passed, "device": device.name, "uuid": device.uuid,
        "bound": BOUND, "phases": phases, "steps": totals.steps,
        "billed_ns": totals.billed.nanos(), "overhead_ns": totals.overhead.nanos(),
        "idle_ns": totals.idle.nanos(),
    }))
}

/// An engine that has work for a share of the time.
struct Load {
    engine: EngineHandle,
    asked: u32,
}

impl Load {
    /// Runs rounds of requests with pauses between them, and returns the engine's
    /// bookings.
    fn measure(&mut self, duty: f64, phase: Duration) -> Result<Value, Box<dyn Error>> {
        let before = self.engine.status();
        let began = Instant::now();
        while began.elapsed() < phase {
            let round = Instant::now();
            self.round()?;
            std::thread::sleep(round.elapsed().mul_f64(1.0 / duty - 1.0));
        }
        let (after, wall) = (self.engine.status(), began.elapsed());
        let busy = Duration::from_nanos(after.busy.nanos() - before.busy.nanos());
        Ok(json!({
            "duty": duty, "steps": after.steps - before.steps,
            "wall_ns": wall.as_nanos() as u64, "busy_ns": busy.as_nanos() as u64,
            "metered": busy.as_secs_f64() / wall.as_secs_f64(),
        }))
    }

    /// Runs eight requests at once, to their end.
    fn round(&mut self) -> Result<(), Box<dyn Error>> {
        const REQUESTS: usize = 8;
        let (sender, done) = sync_channel(REQUESTS);
        for _ in 0..REQUESTS {
            self.asked += 1;
            let submission = ask(self.asked, sender.clone())?;
            self.engine.submit(submission).map_err(|error| error.to_string())?;
        }
        for _ in 0..REQUESTS {
            done.recv_timeout(ROUND_TIMEOUT)??;
        }
        Ok(())
    }
}

fn ask(number: u32, done: SyncSender<Result<(), String>>) -> Result<Submission, Box<dyn Error>> {
    Ok(Submission {
        request: RequestId::new(&format!("req-{number}"))?,
        attempt: 0,
        caller: Caller { tenant: TenantId::new("check")?, key: KeyId::new("check")? },
        pool: None,
        tier: Tier::Interactive,
        weight: 1.0,
        prompts: vec![(number..number + 12).map(|token| token % 97 + 3).collect()],
        choices: 1,
        max_tokens: 24,
        sampling: SamplingParams { temperature: 1.0, ..SamplingParams::greedy(number.into()) },
        budget: None,
        queue_deadline: ROUND_TIMEOUT,
        echo_logprobs: false,
        sink: Box::new(Ear(done)),
    })
}

/// A sink that reports the end of a request.
struct Ear(SyncSender<Result<(), String>>);

impl TokenSink for Ear {
    fn prompt_logprobs(&mut self, _: u32, _: Vec<PromptLogprob>) {}

    fn token(&mut self, _: u32, _: GeneratedToken) -> Flow {
        Flow::Continue
    }

    fn finished(&mut self, _: u32, _: FinishReason, _: u32) {}

    fn done(&mut self, outcome: RequestOutcome) {
        let said = match outcome {
            RequestOutcome::Finished { .. } => Ok(()),
            RequestOutcome::Refused(refusal) => Err(refusal.message),
        };
        // The receiver is gone if the check has given up.
        let _ = self.0.send(said);
    }
}

/// Combines the metered time with the tool's report, if there is one.
fn compared(mut report: Value, samples: Result<Vec<f64>, String>) -> Value {
    let metered = report["metered"].as_f64().unwrap_or(f64::NAN);
    // The metered time must never exceed the wall clock, whatever the tool reports.
    let within_wall = metered <= 1.0;
    match samples {
        Err(why) => {
            report["why_no_tool"] = why.into();
            report["passed"] = within_wall.into();
        }
        Ok(samples) => {
            let mean = samples.iter().sum::<f64>() / samples.len() as f64 / 100.0;
            report["samples"] = samples.len().into();
            report["tool"] = mean.into();
            report["passed"] = (within_wall && (mean - metered).abs() <= BOUND).into();
        }
    }
    report
}

/// The tool, which prints the device's utilisation ten times a second.
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

    /// Stops the tool and returns its reports, percent. The first reports concern the
    /// time before the start and are dropped.
    fn stop(mut self) -> Result<Vec<f64>, String> {
        let failed = |error: io::Error| error.to_string();
        // The tool may have ended already; it has then printed a reason instead of
        // figures.
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
            true => Err(format!("it reports no figures: {:?}", text.lines().next())),
            false => Ok(samples),
        }
    }
}
