//! Runs whole requests through the engine, including scheduling, metering and sampling,
//! one after the other or all at once.

#[path = "../shared/unwritten.rs"]
mod unwritten;

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_domain::{Caller, DeviceNanos, FinishReason, KeyId, RequestId, TenantId};
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::{
    Backend, Clock, DeviceInfo, Engine, EngineHandle, EngineOptions, Flow, GeneratedToken,
    ModelShape, PromptLogprob, RequestOutcome, SamplingParams, Submission, SystemClock, Tier,
    TokenSink, calibrate,
};

use crate::Obeys;
use unwritten::Unwritten;

pub(crate) struct Requests {
    handle: EngineHandle,
    /// The engine; dropping it would end its thread.
    _engine: Engine,
    shape: ModelShape,
    device: DeviceInfo,
    calibration: DeviceNanos,
    asked: u32,
}

impl Requests {
    pub(crate) fn new(files: &ModelFiles) -> Result<Self, Box<dyn Error>> {
        let mut backend = CpuBackend::new(files, &CpuOptions::for_model(files.config(), KV_BYTES))?;
        let (shape, device) = (backend.shape().clone(), backend.device().clone());
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let calibration = calibrate(&mut backend, &*clock)?;
        let options = EngineOptions::new(calibration.table);
        let engine = Engine::start(Box::new(backend), options, clock, Box::new(Unwritten))?;
        let calibration = calibration.device_time;
        Ok(Self { handle: engine.handle(), _engine: engine, shape, device, calibration, asked: 0 })
    }

    fn alone(&mut self, count: u32, prompt: u32, tokens: u32) -> Result<Value, Box<dyn Error>> {
        let began = Instant::now();
        let mut generated = 0;
        for _ in 0..count {
            generated += answered(&self.ask(prompt, tokens)?)?;
        }
        Ok(json!({ "tokens": generated, "seconds": began.elapsed().as_secs_f64() }))
    }

    fn together(&mut self, count: u32, prompt: u32, tokens: u32) -> Result<Value, Box<dyn Error>> {
        let began = Instant::now();
        let asked: Vec<Receiver<u64>> =
            (0..count).map(|_| self.ask(prompt, tokens)).collect::<Result<_, _>>()?;
        let generated = asked.iter().map(answered).sum::<Result<u64, _>>()?;
        Ok(json!({ "tokens": generated, "seconds": began.elapsed().as_secs_f64() }))
    }

    /// Submits one greedy request. The receiver gets its number of generated tokens at
    /// its end.
    fn ask(&mut self, prompt: u32, tokens: u32) -> Result<Receiver<u64>, Box<dyn Error>> {
        let (sender, receiver) = sync_channel(1);
        let number = self.asked;
        self.asked += 1;
        let vocabulary = self.shape.vocabulary;
        self.handle.submit(Submission {
            request: RequestId::from_random(u128::from(number)),
            attempt: 0,
            caller: Caller { tenant: TenantId::new("bench")?, key: KeyId::new("bench")? },
            pool: None,
            tier: Tier::Interactive,
            weight: 1.0,
            prompts: vec![(0..prompt).map(|i| (i * 31 + number * 17 + 5) % vocabulary).collect()],
            choices: 1,
            max_tokens: tokens,
            sampling: SamplingParams {
                // Without end tokens every answer has its full length.
                logit_bias: self.shape.end_tokens.iter().map(|&token| (token, -100.0)).collect(),
                ..SamplingParams::greedy(number.into())
            },
            budget: None,
            queue_deadline: Duration::from_secs(600),
            echo_logprobs: false,
            sink: Box::new(Sink { generated: 0, done: sender }),
        })?;
        Ok(receiver)
    }
}

impl Obeys for Requests {
    fn obey(&mut self, words: &[&str]) -> Result<Value, Box<dyn Error>> {
        match *words {
            ["alone", count, prompt, tokens] => {
                self.alone(count.parse()?, prompt.parse()?, tokens.parse()?)
            }
            ["together", count, prompt, tokens] => {
                self.together(count.parse()?, prompt.parse()?, tokens.parse()?)
            }
            _ => Err(format!("cannot {}", words.join(" ")).into()),
        }
    }

    fn about(&self) -> Value {
        json!({
            "engine": "tollgate", "version": env!("CARGO_PKG_VERSION"),
            "device": self.device.name, "threads": self.device.threads,
            "calibration_ns": self.calibration.nanos(),
        })
    }
}

fn answered(receiver: &Receiver<u64>) -> Result<u64, String> {
    receiver.recv().map_err(|_| "a request was not answered".to_owned())
}

/// A sink that counts tokens. A refused request drops the sink, which closes its
/// channel.
struct Sink {
    generated: u64,
    done: SyncSender<u64>,
}

impl TokenSink for Sink {
    fn prompt_logprobs(&mut self, _: u32, _: Vec<PromptLogprob>) {}
    fn token(&mut self, _: u32, _: GeneratedToken) -> Flow {
        self.generated += 1;
        Flow::Continue
    }
    fn finished(&mut self, _: u32, _: FinishReason, _: u32) {}
    fn done(&mut self, outcome: RequestOutcome) {
        if matches!(outcome, RequestOutcome::Finished { .. }) {
            // The receiver is gone if the run was aborted.
            self.done.try_send(self.generated).ok();
        }
    }
}

/// The default of a worker.
const KV_BYTES: u64 = 512 << 20;
