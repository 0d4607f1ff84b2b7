//! The whole path of a request without HTTP: a real ledger, admission and wire, and
//! a fake worker.

use std::path::Path;
use std::time::Instant;

use tempfile::TempDir;
use tollgate_admission::{AdmissionOptions, Limit};
use tollgate_domain::{Caller, KeyId, RequestId, Sampling, SamplingDefaults, StopReason, TenantId};
use tollgate_ledger::Ledger;
use tollgate_text::Prompt;
use tollgate_wire::v1::CancelReason;

use super::*;
use crate::error::Refusal;
use crate::job::Delivery;
use crate::observer::NoObserver;
use crate::route;
use crate::test_support::{FakeWorker, MODEL, TestKeys};
use crate::tokenize::TokenizeRequest;

const CONFIG: &str = r#"
[plans.two]
requests_per_minute = { limit = 1, burst = 2 }
[tenants.acme]
plan = "two"
"#;

struct Setup {
    serving: Arc<Serving>,
    worker: FakeWorker,
    context: CallerContext,
    folder: TempDir,
}

impl Setup {
    /// Starts serving with one connected worker, for a caller with two requests.
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let worker = FakeWorker::start(folder.path(), "w0");
        let config = Config::from_toml(Path::new("test.toml"), CONFIG).expect("a config");
        let config = Arc::new(config);
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("a ledger");
        let clock = Clock::system();
        let (options, reader) = (config.gateway().idempotency.clone(), ledger.reader().clone());
        let idempotency = Idempotency::open(folder.path(), options, reader, clock.clone());
        let serving = Serving::start(ServingOptions {
            workers: vec![worker.endpoint.clone()],
            ledger,
            admission: Admission::new(AdmissionOptions::default()),
            config: Arc::clone(&config),
            keys: Arc::new(TestKeys::default()),
            clock,
            idempotency: idempotency.expect("a store"),
            observer: Arc::new(NoObserver),
            stopping: CancellationToken::new(),
        });
        while !serving.workers().is_ready() {
            serving.workers().changed().await;
        }
        let tenant = TenantId::new("acme").expect("a name");
        let caller = Caller { tenant: tenant.clone(), key: KeyId::new("k").expect("a name") };
        let tenant = Arc::clone(config.tenant(&tenant).expect("a tenant"));
        let context = serving.limits().caller_context(caller, None, tenant).expect("limits");
        Self { serving, worker, context, folder }
    }

    /// Tokenizes a request of one short prompt.
    async fn job(&self, number: u128) -> Job {
        let model = route::offer(self.serving.workers(), MODEL).expect("a model");
        let SamplingDefaults { temperature, top_k, top_p, repetition_penalty } = model.defaults;
        let request = TokenizeRequest {
            id: RequestId::from_random(number),
            prompt: Prompt::Texts(vec!["Hello there".to_owned()]),
            prompt_field: "prompt",
            choices: 1,
            max_tokens: Some(4),
            default_max_tokens: 16,
            sampling: Sampling {
                temperature,
                top_k,
                top_p,
                repetition_penalty,
                presence_penalty: 0.0,
                frequency_penalty: 0.0,
                logit_bias: Default::default(),
                seed: None,
                top_logprobs: None,
            },
            stop: Vec::new(),
            delivery: Delivery::Streamed,
            echo: false,
            now: self.serving.clock().utc(),
            read: Duration::ZERO,
            parsing_began: Instant::now(),
        };
        let owner = self.context.share_owner();
        let tokenized = self.serving.tokenize_pool().tokenize(owner, request, model).await;
        tokenized.expect("a job").job
    }

    /// Waits for the requests' tasks and checks that no hold is left.
    async fn settle(self) {
        self.serving.tasks().close();
        self.serving.tasks().wait().await;
        let status = self.serving.limits().status();
        assert_eq!((status.running, status.queued), (0, 0));
        drop(self.folder);
    }
}

#[tokio::test]
async fn submit_returns_events_and_a_receipt() {
    let mut setup = Setup::start().await;
    let job = setup.job(1).await;
    let mut events = setup.serving.submit(&setup.context, job).expect("admitted");
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
async fn submit_refuses_by_limit_and_holds_nothing() {
    let mut setup = Setup::start().await;
    for number in 1..=2 {
        let job = setup.job(number).await;
        let _events = setup.serving.submit(&setup.context, job).expect("admitted");
        setup.worker.run().await.answer("Hi.").await;
    }
    let job = setup.job(3).await;
    let refused = setup.serving.submit(&setup.context, job).expect_err("the burst is spent");
    let RequestError::Refused(Refusal::Limit(refusal)) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal.limit, Limit::Requests);
    setup.settle().await;
}

#[tokio::test]
async fn dropped_events_cancel_the_work() {
    let mut setup = Setup::start().await;
    let job = setup.job(1).await;
    let events = setup.serving.submit(&setup.context, job).expect("admitted");
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
    let admitted = setup.serving.admit(&setup.context, job).expect("admitted");
    assert_eq!(setup.serving.limits().status().running, 1);
    setup.serving.give_back(admitted);
    setup.settle().await;
}
