//! The whole path of a request without HTTP: a real ledger, admission and wire, and
//! a fake worker.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use tempfile::TempDir;
use tollgate_admission::{AdmissionOptions, CapReached, Limit, Offence};
use tollgate_config::Config;
use tollgate_domain::{
    Caller, DeviceClass, KeyId, ModelName, RequestId, Sampling, SamplingDefaults, StopReason,
    TenantId, Tier, Usage,
};
use tollgate_ledger::Ledger;
use tollgate_text::Prompt;
use tollgate_wire::v1::CancelReason;

use super::*;
use crate::ConfiguredTenant;
use crate::error::{Refusal, RequestError};
use crate::fuzz::TOKENIZER;
use crate::job::Delivery;
use crate::model::{BuiltTokenizer, ServedModel};
use crate::observer::NoObserver;
use crate::route;
use crate::test_support::{FakeWorker, MODEL, TestKeys};
use crate::timings::RequestTimings;
use crate::tokenize::{TokenizeRequest, tokenize};

const CONFIG: &str = r#"
[plans.two]
requests_per_minute = { limit = 1, burst = 2 }
[tenants.acme]
plan = "two"
"#;

struct Setup {
    serving: Arc<Serving>,
    worker: FakeWorker,
    /// A worker besides, if the test asked for one.
    second: Option<FakeWorker>,
    tenant: ConfiguredTenant,
    context: CallerContext,
    stopping: CancellationToken,
    folder: TempDir,
}

/// The parts of a setup that few tests choose.
struct SetupOptions {
    config: &'static str,
    has_second_worker: bool,
    observer: Arc<dyn Observer>,
}

impl Default for SetupOptions {
    fn default() -> Self {
        Self { config: CONFIG, has_second_worker: false, observer: Arc::new(NoObserver) }
    }
}

/// An observer that counts first tokens.
#[derive(Default)]
struct FirstTokens(AtomicU32);

impl Observer for FirstTokens {
    fn usage(&self, _: &ModelName, _: &DeviceClass, _: &Usage) {}
    fn first_token(&self, _: &ModelName, _: &DeviceClass, _: Duration) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn timings(&self, _: &RequestTimings) {}
    fn block_committed(&self, _: Duration) {}
    fn penalty_began(&self, _: Offence) {}
    fn cap_reached(&self, _: &CapReached) {}
}

impl Setup {
    /// Starts serving with one connected worker, for a caller with two requests.
    async fn start() -> Self {
        Self::start_with(SetupOptions::default()).await
    }

    async fn start_with(options: SetupOptions) -> Self {
        let SetupOptions { config, has_second_worker, observer } = options;
        let folder = tempfile::tempdir().expect("a folder");
        let worker = FakeWorker::start(folder.path(), "a");
        let second = has_second_worker.then(|| FakeWorker::start(folder.path(), "b"));
        let config = Config::from_toml(Path::new("test.toml"), config).expect("a config");
        let config = Arc::new(config);
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("a ledger");
        let clock = Clock::system();
        let (options, reader) = (config.gateway().idempotency.clone(), ledger.reader().clone());
        let idempotency = Idempotency::open(folder.path(), options, reader, clock.clone());
        let stopping = CancellationToken::new();
        let workers = [&worker].into_iter().chain(&second);
        let serving = Serving::start(ServingOptions {
            workers: workers.map(|worker| worker.endpoint.clone()).collect(),
            ledger,
            admission: Admission::new(AdmissionOptions::default()),
            config: LiveConfig::new(Arc::clone(&config)),
            keys: Arc::new(TestKeys::default()),
            clock,
            idempotency: idempotency.expect("a store"),
            observer,
            stopping: stopping.clone(),
            shared: None,
            caps: None,
            rates: None,
        });
        while !serving.workers().all_connected() {
            serving.workers().changed().await;
        }
        let tenant = TenantId::new("acme").expect("a name");
        let caller = Caller { tenant: tenant.clone(), key: KeyId::new("k").expect("a name") };
        let tenant = ConfiguredTenant::find(&config, &tenant).expect("a tenant");
        let now = serving.clock().now();
        let context = serving.limits().caller_context(now, caller, None, tenant.clone());
        let context = context.expect("limits");
        Self { serving, worker, second, tenant, context, stopping, folder }
    }

    /// Returns a request of one short prompt, and the model.
    fn request(&self, number: u128) -> (TokenizeRequest, Arc<ServedModel>) {
        let model = route::offer(self.serving.workers(), MODEL).expect("a model");
        let SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty } =
            model.defaults;
        let request = TokenizeRequest {
            id: RequestId::from_random(number),
            prompt: Prompt::Texts(vec!["Hello there".to_owned()]),
            prompt_field: "prompt",
            form_field: "response_format",
            choices: 1,
            max_tokens: Some(4),
            default_max_tokens: 16,
            sampling: Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty: 0.0,
                frequency_penalty: 0.0,
                logit_bias: Default::default(),
                seed: None,
                top_logprobs: None,
                stop_tokens: Vec::new(),
                ignores_end: false,
                grammar: None,
            },
            stop: Vec::new(),
            shown_markers: &[],
            delivery: Delivery::Streamed,
            echo: false,
            tier: Tier::Interactive,
            now: self.serving.clock().utc(),
            read: Duration::ZERO,
            parsing_began: Instant::now(),
        };
        (request, model)
    }

    /// Tokenizes a request of one short prompt.
    async fn job(&self, number: u128) -> Job {
        self.job_of(self.request(number)).await
    }

    /// Tokenizes a request whose answer goes out in one piece.
    async fn whole_job(&self, number: u128) -> Job {
        let (request, model) = self.request(number);
        self.job_of((TokenizeRequest { delivery: Delivery::Whole, ..request }, model)).await
    }

    async fn job_of(&self, (request, model): (TokenizeRequest, Arc<ServedModel>)) -> Job {
        let owner = self.context.share_owner();
        let work = move |abandoned: &CancellationToken| tokenize(request, model, abandoned);
        let tokenized =
            self.serving.tokenize_pool().run(&owner, Duration::from_secs(60), 0, work).await;
        tokenized.expect("a thread").expect("a job").job
    }

    /// Waits for the requests' tasks and checks that no hold is left.
    async fn settle(self) {
        settle(&self.serving).await;
        drop(self.folder);
    }
}

async fn settle(serving: &Serving) {
    serving.tasks().close();
    serving.tasks().wait().await;
    let status = serving.limits().status();
    assert_eq!((status.running, status.queued), (0, 0));
}

/// Returns the error that ends a request, within a time far below the waits for a worker.
async fn error_of(events: &mut mpsc::Receiver<Event>) -> RequestError {
    let last = tokio::time::timeout(Duration::from_secs(5), events.recv()).await;
    match last.expect("the request ends at once") {
        Some(Event::Failed(failure)) => failure.error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn prompts_of_client_that_left_are_not_tokenized() {
    let setup = Setup::start().await;
    let (request, model) = setup.request(1);
    let token = CancellationToken::new();
    let tokenized = |token| tokenize(request.clone(), Arc::clone(&model), token);
    assert!(tokenized(&token).is_ok(), "the control: the client waits");
    token.cancel();
    assert_eq!(tokenized(&token).err(), Some(RequestError::INTERNAL));
    setup.settle().await;
}

/// A prompt with a gap is refused by the name of the field, unless the model's tokenizer has
/// the tokens around a gap.
#[tokio::test]
async fn suffix_needs_tokens_of_the_model() {
    let setup = Setup::start().await;
    let (mut request, model) = setup.request(1);
    let before = vec!["one".to_owned(), "two".to_owned()];
    request.prompt = Prompt::Infill { before, after: " four".to_owned() };
    let token = CancellationToken::new();
    let refused = tokenize(request.clone(), Arc::clone(&model), &token).err();
    let refusal = refused.expect("this tokenizer has no such tokens");
    let RequestError::Refused(Refusal::InvalidField { field, message }) = refusal else {
        panic!("{refusal:?}")
    };
    assert_eq!(field, "suffix");
    assert!(message.contains("cannot fill in the middle"), "{message}");
    let mut json: serde_json::Value = serde_json::from_str(TOKENIZER).expect("JSON");
    for (name, id) in ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"].iter().zip(1..) {
        let added = json["added_tokens"].as_array_mut().expect("tokens");
        added.push(serde_json::json!({ "id": id, "content": name, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true }));
    }
    let text = BuiltTokenizer::from_json(json.to_string().as_bytes()).expect("a tokenizer");
    let able = ServedModel {
        name: model.name.clone(),
        hash: model.hash.clone(),
        class: model.class.clone(),
        text: Arc::new(text),
        template: None,
        context_length: model.context_length,
        vocabulary: 4,
        table: model.table.clone(),
        defaults: model.defaults,
    };
    request.prompt = Prompt::Infill { before: vec!["aa".to_owned()], after: "a".to_owned() };
    let job = tokenize(request, Arc::new(able), &token).expect("a job").job;
    assert_eq!(job.prompts, [[1, 0, 0, 2, 0, 3]]);
    setup.settle().await;
}

#[tokio::test]
async fn submit_returns_events_and_a_receipt() {
    let mut setup = Setup::start().await;
    let job = setup.job(1).await;
    let mut events = setup.serving.submit(&setup.context, job).await.expect("admitted");
    setup.worker.run().await.answer("Hi.").await;
    let Some(Event::Delta(delta)) = events.recv().await else { panic!("no text") };
    assert_eq!(delta.text, "Hi.");
    let finished = Event::ChoiceFinished { choice: 0, reason: StopReason::Stop };
    assert_eq!(events.recv().await, Some(finished));
    let Some(Event::Finished(receipt)) = events.recv().await else { panic!("no receipt") };
    assert_eq!((receipt.usage.completion_tokens, receipt.usage.attributed.nanos()), (1, 100));
    assert_eq!(events.recv().await, None, "the receipt is the last event");
    setup.settle().await;
}

#[tokio::test]
async fn spent_request_rate_refuses_next_context() {
    let mut setup = Setup::start().await;
    let again = |setup: &Setup| {
        let (caller, tenant) = (setup.context.caller().clone(), setup.tenant.clone());
        let (now, limits) = (setup.serving.clock().now(), setup.serving.limits());
        limits.caller_context(now, caller, None, tenant)
    };
    let second = again(&setup).expect("the second request");
    for (number, context) in [(1, &setup.context), (2, &second)] {
        let job = setup.job(number).await;
        let _events = setup.serving.submit(context, job).await.expect("admitted");
        setup.worker.run().await.answer("Hi.").await;
    }
    let refused = again(&setup).expect_err("the burst is spent");
    let Refusal::Limit(refusal) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal.limit, Limit::Requests);
    setup.settle().await;
}

/// The client leaves while its job has a place and no worker yet.
#[tokio::test]
async fn job_of_client_that_left_reaches_no_worker() {
    let mut setup = Setup::start().await;
    // On one thread, so the job's task has not begun when the client leaves.
    let (caller, limits) = (setup.context.caller().clone(), setup.serving.limits());
    let now = setup.serving.clock().now();
    let second = limits.caller_context(now, caller, None, setup.tenant.clone());
    for (number, context) in [(1, &setup.context), (2, &second.expect("the second request"))] {
        let job = setup.job(number).await;
        drop(setup.serving.submit(context, job).await.expect("admitted"));
        setup.serving.tasks().close();
        setup.serving.tasks().wait().await;
        setup.serving.tasks().reopen();
        assert!(setup.worker.runs.try_recv().is_err(), "a worker got the job");
    }
    setup.settle().await;
}

#[tokio::test]
async fn dropped_events_cancel_the_work() {
    let mut setup = Setup::start().await;
    let job = setup.job(1).await;
    let events = setup.serving.submit(&setup.context, job).await.expect("admitted");
    let mut run = setup.worker.run().await;
    drop(events);
    assert_eq!(run.cancels.recv().await, Some(CancelReason::Client));
    run.end(0, 0).await;
    setup.settle().await;
}

#[tokio::test]
async fn given_back_job_leaves_no_hold() {
    let setup = Setup::start().await;
    let job = setup.job(1).await;
    let arrival = setup.serving.arrive(&setup.context).await.expect("a place");
    let admitted = setup.serving.admit(&setup.context, arrival, job).await.expect("admitted");
    assert_eq!(setup.serving.limits().status().running, 1);
    setup.serving.give_back(admitted);
    setup.settle().await;
}

/// The only worker is gone, so the request waits for it as long as it may wait in a queue.
#[tokio::test]
async fn request_that_waits_for_worker_ends_at_shutdown() {
    let setup = Setup::start().await;
    let job = setup.job(1).await;
    let Setup { serving, worker, context, stopping, folder, .. } = setup;
    drop(worker);
    while serving.workers().is_ready() {
        serving.workers().changed().await;
    }
    let mut events = serving.submit(&context, job).await.expect("admitted");
    // On one thread, so the job's task now waits for a worker.
    tokio::task::yield_now().await;
    stopping.cancel();
    assert_eq!(error_of(&mut events).await, Refusal::Draining.into());
    settle(&serving).await;
    drop(folder);
}

/// The only worker has lost the request, so the request waits for another one.
#[tokio::test]
async fn request_that_waits_for_worker_has_deadline() {
    const DEADLINE: &str = "[gateway.deadlines]\nqueue = \"100ms\"\nrequest = \"200ms\"\n\
                            [tenants.acme]\nplan = \"open\"\n[plans.open]\n";
    let options = SetupOptions { config: DEADLINE, ..SetupOptions::default() };
    let mut setup = Setup::start_with(options).await;
    let job = setup.whole_job(1).await;
    let mut events = setup.serving.submit(&setup.context, job).await.expect("admitted");
    drop(setup.worker.run().await);
    let deadline = Duration::from_millis(200);
    assert_eq!(error_of(&mut events).await, Refusal::DeadlineExceeded { deadline }.into());
    setup.settle().await;
}

#[tokio::test]
async fn first_token_of_restarted_request_counts_once() {
    let first_tokens = Arc::new(FirstTokens::default());
    let observer = Arc::clone(&first_tokens) as Arc<dyn Observer>;
    let options = SetupOptions { has_second_worker: true, observer, ..SetupOptions::default() };
    let mut setup = Setup::start_with(options).await;
    let job = setup.whole_job(1).await;
    let mut events = setup.serving.submit(&setup.context, job).await.expect("admitted");
    let second = setup.second.as_mut().expect("a second worker");
    // Both workers are idle, so either may be chosen first.
    let (run, other) = tokio::select! {
        run = setup.worker.run() => (run, second),
        run = second.run() => (run, &mut setup.worker),
    };
    run.token(0, "half an ans", 100).await;
    assert!(matches!(events.recv().await, Some(Event::Delta(_))));
    drop(run);
    assert_eq!(events.recv().await, Some(Event::Restarted));
    other.run().await.answer("Hi.").await;
    while events.recv().await.is_some() {}
    assert_eq!(first_tokens.0.load(Ordering::Relaxed), 1);
    setup.settle().await;
}
