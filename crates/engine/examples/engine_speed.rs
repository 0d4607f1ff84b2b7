//! Measures the gain of batching: the same requests one at a time and all together,
//! through the whole engine, on a model folder. It also prints the measured cost table.
//!
//! `cargo run -p tollgate-engine --example engine_speed -- MODEL_DIR [CLIENTS [IN
//! [OUT]]]`

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]
#![allow(clippy::expect_used, reason = "a measuring program stops at what it does not expect")]

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, KeyId, MonotonicTime, RequestId, TenantId,
};
use tollgate_engine::backend::Backend;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::sample::{Sampler, SamplingPoint, TokenCounts};
use tollgate_engine::{
    Clock, Engine, EngineHandle, EngineOptions, Flow, GeneratedToken, ModelShape, PromptLogprob,
    RequestFigures, RequestOutcome, SamplingParams, StepJournal, StepRecord, Submission,
    SystemClock, Tier, TokenSink, calibrate, coarse,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("which model folder?")?);
    let mut number = |default: u32| arguments.next().map_or(Ok(default), |text| text.parse());
    let (clients, prompt, tokens) = (number(32)?, number(32)?, number(32)?);

    let files = ModelFiles::open(&folder)?;
    let mut backend = CpuBackend::new(&files, &CpuOptions::for_model(files.config(), 2 << 30))?;
    let shape = backend.shape().clone();
    sampling_speed(shape.vocabulary);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let rough = coarse(&mut backend, &*clock)?;
    println!("coarse: {} steps, {}", rough.steps, rough.device_time);
    let calibration = calibrate(&mut backend, &*clock)?;
    println!("calibrated: {} steps, {}", calibration.steps, calibration.device_time);
    println!("{:#?}", calibration.table.parts());

    let engine = Engine::start(
        Box::new(backend),
        EngineOptions::new(calibration.table),
        clock,
        Box::new(Summing::default()),
    )?;
    let handle = engine.handle();
    let ask = |number: u32| ask(&handle, number, prompt, tokens, &shape);
    let lone = timed(|| {
        for number in 0..clients.min(8) {
            answer(&ask(number));
        }
    });
    let lone_rate = f64::from(clients.min(8) * tokens) / lone.as_secs_f64();
    let together = timed(|| {
        let answers: Vec<Receiver<()>> = (0..clients).map(|n| ask(1_000 + n)).collect();
        answers.iter().for_each(answer);
    });
    let rate = f64::from(clients * tokens) / together.as_secs_f64();
    println!("one at a time  {lone_rate:9.1} tokens/s");
    println!("{clients:3} together   {rate:9.1} tokens/s   {:.2}x", rate / lone_rate);
    handle.drain();
    println!("{:?}", engine.join()?);
    Ok(())
}

/// Measures the time of sampling one row, for each kind of sampling.
fn sampling_speed(vocabulary: u32) {
    let row: Vec<f32> = (0..vocabulary).map(|i| ((i * 7_919) % 1_009) as f32 / 100.0).collect();
    let plain = SamplingParams::greedy(0);
    let ways = [
        ("greedy", plain.clone()),
        ("temperature 1", SamplingParams { temperature: 1.0, ..plain.clone() }),
        ("top_p 0.9", SamplingParams { temperature: 1.0, top_p: 0.9, ..plain.clone() }),
        ("greedy, 20 logprobs", SamplingParams { top_logprobs: Some(20), ..plain }),
    ];
    let (mut sampler, counts) = (Sampler::default(), TokenCounts::default());
    for (name, params) in ways {
        let best = (0..30)
            .map(|position| {
                timed(|| {
                    let point = SamplingPoint {
                        seed: 1,
                        position,
                        counts: &counts,
                        prompt: &[],
                        constraint: None,
                    };
                    std::hint::black_box(sampler.sample(&row, &params, point, None));
                })
            })
            .min();
        println!("draw of {vocabulary}, {name}: {:?}", best.unwrap_or_default());
    }
}

fn ask(
    handle: &EngineHandle,
    number: u32,
    prompt: u32,
    tokens: u32,
    shape: &ModelShape,
) -> Receiver<()> {
    let (sender, receiver) = sync_channel(1);
    let mut sampling = SamplingParams::greedy(u64::from(number));
    // Without end tokens every answer has its full length.
    sampling.logit_bias = shape.end_tokens.iter().map(|&token| (token, -100.0)).collect();
    let submission = Submission {
        request: RequestId::from_random(u128::from(number)),
        attempt: 0,
        caller: Caller {
            tenant: TenantId::new("bench").expect("a name"),
            key: KeyId::new("bench").expect("a name"),
        },
        pool: None,
        tier: Tier::Interactive,
        weight: 1.0,
        prompts: vec![(0..prompt).map(|i| (i * 31 + number * 17 + 5) % shape.vocabulary).collect()],
        choices: 1,
        max_tokens: tokens,
        sampling,
        budget: None,
        queue_deadline: Duration::from_secs(600),
        echo_logprobs: false,
        sink: Box::new(Sink(sender)),
    };
    if let Err(error) = handle.submit(submission) {
        eprintln!("refused: {error}");
    }
    receiver
}

fn answer(receiver: &Receiver<()>) {
    if receiver.recv().is_err() {
        eprintln!("no answer came");
    }
}

fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

struct Sink(SyncSender<()>);

impl TokenSink for Sink {
    fn prompt_logprobs(&mut self, _: u32, _: Vec<PromptLogprob>) {}
    fn token(&mut self, _: u32, _: GeneratedToken) -> Flow {
        Flow::Continue
    }
    fn finished(&mut self, _: u32, _: FinishReason, _: u32) {}
    fn done(&mut self, _: RequestOutcome) {
        // The receiver is gone if the run was aborted.
        self.0.try_send(()).ok();
    }
}

/// A journal that checks that shares add up, and stores nothing.
#[derive(Default)]
struct Summing(DeviceNanos);

impl StepJournal for Summing {
    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let sum: DeviceNanos = record.shares.iter().map(|share| share.attributed).sum();
        if sum != record.busy {
            return Err(io::Error::other("shares that are not the step"));
        }
        self.0 += sum;
        Ok(())
    }
    fn finished(&mut self, _: MonotonicTime, _: &[RequestFigures]) -> io::Result<()> {
        Ok(())
    }
    fn idle(&mut self, _: MonotonicTime) -> io::Result<()> {
        Ok(())
    }
}
