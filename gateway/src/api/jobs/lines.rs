//! Lines of batches, run as requests of the tenant and the key that made the batch: in
//! the batch tier, within the caps, and placed once for each request id.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tollgate_admission::Limit;
use tollgate_domain::block::Attempt;
use tollgate_domain::{Caller, DeviceClass, ModelName, RequestId, TenantId, Tier, Usage};
use tollgate_jobs::{
    BatchUsage, CallerState, CapRequest, Endpoint, FailureReply, LineAnswer, LineFailure,
    LinePlace, LineRequest, LineService, ScopedQuotas, ServiceFuture, TryCost, TryOutcome,
    TryUsage, Waiting,
};
use tollgate_ledger::{FaultCap, LedgerError};
use tollgate_openai::{CHAT, COMPLETIONS, Interface, Violation};
use tollgate_serving::admit::LineError;
use tollgate_serving::event::Failure;
use tollgate_serving::in_flight::Stage;
use tollgate_serving::pump::{OnEnd, RequestEnded};
use tollgate_serving::submit::{submit, while_unavailable};
use tollgate_serving::{ConfiguredTenant, Fault, Refusal, RequestError, route};

use super::quotas;
use crate::access_log::AccessFacts;
use crate::api::response::{Collected, collect};
use crate::api::{Api, JobFacts, Prepared, check_tier, parse};
use crate::client_ids::ClientIds;
use crate::record::RequestRecord;
use crate::reply::ApiError;

/// The wait after a refusal that names none.
const RETRY: Duration = Duration::from_secs(1);
/// Time that the record of an answered line may take. After that the line counts as lost.
const RECORD_TIMEOUT: Duration = Duration::from_secs(40);
/// Attempts to write a fault cap before the dispatcher tries again.
const CAP_ATTEMPTS: u32 = 20;

/// The service of the dispatcher.
#[derive(Clone)]
pub(crate) struct Lines {
    api: Api,
    /// Held while a line is parsed and tokenized: batches use one thread of the pool at most.
    preparing: Arc<Semaphore>,
}

/// The end of a request, as its task reports it.
struct LineEnd {
    usage: TryUsage,
    is_charged: bool,
}

impl Lines {
    pub(crate) fn new(api: Api) -> Self {
        Self { api, preparing: Arc::new(Semaphore::new(1)) }
    }

    async fn run_line(self, mut line: LineRequest) -> TryOutcome {
        let cancel = line.cancel.clone();
        // First, because the record of a refused line names its model as well.
        let model = model_of(&line.body);
        let prepared = tokio::select! {
            biased;
            () = cancel.cancelled() => return cancelled(None),
            prepared = self.prepare(&line) => prepared,
        };
        let (context, Prepared { job, meta, streamed: _ }) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return refused(&error, model),
        };
        let serving = &self.api.serving;
        // The dispatcher cancels a line at its deadline, so the task's own comes later.
        let time = context.config().gateway().jobs.line + LINE_GRACE;
        let admitted = match serving.admit_line(&context, job, time).await {
            Ok(admitted) => admitted,
            Err(LineError::IdKnown) => return TryOutcome::IdKnown,
            Err(LineError::Refused(error)) => return refused(&error.into(), model),
        };
        let place = line.place.take();
        let interface = interface(line.endpoint);
        let (end, ended) = oneshot::channel();
        let on_end = self.on_end(&line, end);
        let mut events = serving.run(admitted, on_end);
        // Asked for at once, because a request that is recorded leaves the table.
        let recorded = serving.in_flight().stage(&line.caller.tenant, &line.request);
        let collected = tokio::select! {
            // The cancel first: an answer that is not wanted any more must not be kept.
            biased;
            () = cancel.cancelled() => None,
            collected = collect(interface, meta, &mut events) => Some(collected),
        };
        // The next line runs while the ledger records this one: a record takes 100 ms.
        let free = || place.map(LinePlace::give_back);
        match collected {
            Some(Ok(Collected { body, receipt, reasoning_tokens })) => {
                free();
                if !is_recorded(recorded).await {
                    return TryOutcome::Lost;
                }
                TryOutcome::Answered(LineAnswer {
                    status: 200,
                    // The body is JSON that this process has written.
                    body: String::from_utf8_lossy(&body).into_owned(),
                    is_paid: true,
                    usage: self.try_usage(&receipt.usage, reasoning_tokens, &receipt.class),
                    model,
                })
            }
            Some(Err(failure)) => {
                let end = ended.await.ok();
                free();
                failed(failure, end.as_ref(), model, recorded).await
            }
            None => {
                // The end of the events asks the worker to stop at its next step.
                drop(events);
                // The task ended without a report, so the work that was done is unknown.
                let Ok(end) = ended.await else { return TryOutcome::Lost };
                free();
                if end.is_charged && !is_recorded(recorded).await {
                    return TryOutcome::Lost;
                }
                cancelled(Some(&end))
            }
        }
    }

    /// Finds the caller's limits, and parses and tokenizes the line.
    async fn prepare(
        &self,
        line: &LineRequest,
    ) -> Result<(tollgate_serving::CallerContext, Prepared), ApiError> {
        let api = &self.api;
        let config = api.config.current();
        let tenant = ConfiguredTenant::find(&config, &line.caller.tenant)
            .ok_or(ApiError::TenantNotServed)?;
        // Asked for each line, because the key may be revoked while the batch runs.
        let caller = api.authenticator.batch_caller(&line.caller).ok_or(ApiError::KeyRevoked)?;
        if !api.serving.can_record() {
            return Err(ApiError::LedgerUnavailable);
        }
        let limits = api.serving.limits();
        let context = limits.line_context(line.caller.clone(), caller.plan(), tenant.clone())?;
        let facts = LineFacts {
            id: line.request.clone(),
            interface: interface(line.endpoint),
            body: Arc::clone(&line.body),
            caller,
            tenant,
        };
        // Never closed, so that the permit comes.
        let _turn = self.preparing.acquire().await;
        let (owner, timeout) = (context.share_owner(), config.gateway().deadlines.queue);
        let (bytes, worker) = (line.body.len(), api.clone());
        let work = move |abandoned: &CancellationToken| facts.prepare(&worker, abandoned);
        let prepared = api.serving.tokenize_pool().run(&owner, timeout, bytes, work).await??;
        Ok((context, prepared))
    }

    /// Returns the receiver of the figures, which counts the line and reports its end.
    fn on_end(&self, line: &LineRequest, end: oneshot::Sender<LineEnd>) -> OnEnd {
        let mut record = RequestRecord::begin(&self.api.metrics, line.caller.clone());
        record.write_line(&self.api.access_log, || AccessFacts {
            request: line.request.clone(),
            endpoint: LABEL,
            caller: Some(line.caller.clone()),
            client: ClientIds::default(),
        });
        let counted = record.on_end();
        let lines = self.clone();
        Box::new(move |ended: &RequestEnded<'_>| {
            let is_charged = ended.failure.is_none_or(|failure| failure.is_charged);
            // Of an answer that nobody gets, the kinds of tokens are not told apart.
            let usage = lines.try_usage(&ended.usage, 0, &ended.job.model().class);
            // The dispatcher may have dropped the line.
            let _ = end.send(LineEnd { usage, is_charged });
            counted(ended);
        })
    }

    async fn cap_line(self, cap: CapRequest) -> bool {
        let CapRequest { caller, request, model } = cap;
        let class = self.class_of(&model);
        let cap = FaultCap {
            caller,
            // A try is placed once, so it has no other attempt.
            attempt: Attempt { request: request.clone(), attempt: 0 },
            model,
            class,
            // Zero, because a try without an answer is never paid.
            payable: Usage::default(),
            at: self.api.serving.clock().utc(),
            tier: Tier::Batch,
        };
        let mut left = CAP_ATTEMPTS;
        let retry = |error: &LedgerError| {
            left -= 1;
            while_unavailable(error).filter(|_| left > 0)
        };
        match submit(self.api.serving.ledger(), cap, retry).await {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(%request, %error, "ledger did not take the fault cap of a line; its batch waits");
                false
            }
        }
    }
}

impl Lines {
    /// Returns the work of a try that has ended now on a device of `class`.
    fn try_usage(&self, usage: &Usage, reasoning_tokens: u64, class: &DeviceClass) -> TryUsage {
        TryUsage {
            tokens: BatchUsage {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens,
                completion_tokens: usage.completion_tokens,
                reasoning_tokens,
            },
            cost: Some(TryCost {
                day: self.api.serving.clock().utc().day(),
                class: class.clone(),
                reference: usage.reference,
            }),
        }
    }

    /// Returns the class of device that serves a model. Where no worker serves the model any
    /// more, a batch must still end: a cap of zero charges nothing, whatever its class.
    fn class_of(&self, model: &ModelName) -> DeviceClass {
        let workers = self.api.serving.workers();
        let any = || {
            workers.connected().find_map(|worker| {
                worker.identity.models.values().next().map(|served| served.class.clone())
            })
        };
        let served = route::offer(workers, model.as_str()).map(|served| served.class.clone());
        served.or_else(any).unwrap_or_else(DeviceClass::cpu)
    }
}

impl LineService for Lines {
    fn run(&self, line: LineRequest) -> ServiceFuture<TryOutcome> {
        Box::pin(self.clone().run_line(line))
    }

    fn cap(&self, cap: CapRequest) -> ServiceFuture<bool> {
        Box::pin(self.clone().cap_line(cap))
    }

    fn failure(&self, failure: LineFailure) -> FailureReply {
        let error = match failure {
            LineFailure::Late(deadline) => ApiError::DeadlineExceeded { deadline },
            LineFailure::WorkersLost => ApiError::WorkerLost { charged: false },
        };
        let (status, body) = reply(&error);
        FailureReply { status, body }
    }

    fn caller(&self, caller: &Caller) -> CallerState {
        let authenticator = &self.api.authenticator;
        let is_known = self.api.config.current().tenant(&caller.tenant).is_some();
        match authenticator.batch_caller(caller) {
            Some(_) if is_known => CallerState::Active,
            None if is_known && authenticator.keys().has_key(&caller.key) => {
                CallerState::KeyRevoked
            }
            // Another gateway may have read a newer config, or a key that was made just now.
            _ if self.api.jobs.is_shared() => CallerState::Unknown,
            _ if is_known => CallerState::KeyRevoked,
            _ => CallerState::TenantGone,
        }
    }

    fn quotas(&self, tenant: &TenantId) -> Vec<ScopedQuotas> {
        let config = self.api.config.current();
        let whole = ConfiguredTenant::find(&config, tenant)
            .map(|tenant| quotas(&tenant))
            .unwrap_or_default();
        self.api.jobs.own_part(whole)
    }

    fn capacity(&self) -> usize {
        let queue = self.api.config.current().worker().queue_capacity as usize;
        let workers = self.api.serving.workers().connected().count();
        // Batch work fills a quarter of a worker's queue at most.
        workers * (queue / 4).max(1)
    }
}

/// The facts of a line, on the thread that parses and tokenizes it.
struct LineFacts {
    id: RequestId,
    interface: &'static dyn Interface,
    body: Arc<str>,
    caller: crate::auth::AuthenticatedCaller,
    tenant: ConfiguredTenant,
}

impl LineFacts {
    fn prepare(self, api: &Api, abandoned: &CancellationToken) -> Result<Prepared, ApiError> {
        let Self { id, interface, body, caller, tenant } = self;
        let began = now();
        let parsed = parse(tenant.config(), body.as_bytes(), interface)?;
        if parsed.stream.is_some() {
            let message = "'stream' must be false in a line of a batch.";
            return Err(Violation::field("stream", message).into());
        }
        // A line runs in the batch tier in any case. Only a tier that it asks for needs the plan.
        check_tier(&caller, &tenant, parsed.tier)?;
        let facts = JobFacts {
            id,
            interface,
            caller: &caller,
            tenant: &tenant,
            // The body came with the file of the batch, so nothing is read here.
            read: Duration::ZERO,
            began,
            tier: Tier::Batch,
        };
        api.job(parsed, facts, abandoned)
    }
}

#[expect(clippy::disallowed_methods, reason = "the stages of a request are measured")]
fn now() -> Instant {
    Instant::now()
}

fn interface(endpoint: Endpoint) -> &'static dyn Interface {
    match endpoint {
        Endpoint::ChatCompletions => CHAT,
        Endpoint::Completions => COMPLETIONS,
    }
}

/// Returns the model that a line names, whatever else is wrong with the line.
fn model_of(body: &str) -> Option<ModelName> {
    // Only this field: a line can have megabytes.
    #[derive(serde::Deserialize)]
    struct Named<'a> {
        #[serde(borrow)]
        model: Option<std::borrow::Cow<'a, str>>,
    }
    let named: Named<'_> = serde_json::from_str(body).ok()?;
    ModelName::new(&named.model?).ok()
}

/// Returns the outcome of a line that was not admitted.
fn refused(error: &ApiError, model: Option<ModelName>) -> TryOutcome {
    let waits = |reason, retry_after: Option<Duration>, holds_batch| {
        let retry_after = retry_after.unwrap_or(RETRY);
        TryOutcome::NotPlaced(Waiting { reason, retry_after, holds_batch })
    };
    match error {
        // The other lines would meet the same limit, so the whole batch waits.
        ApiError::Limit(refusal) if refusal.retry_after.is_some() => {
            let reason = match refusal.limit {
                // Other gateways hold the rest of the cap for a moment.
                _ if refusal.is_held_cap() => "cap_held",
                limit if limit.is_cap() => "cap_spent",
                _ => "limit",
            };
            waits(reason, refusal.retry_after, true)
        }
        // The limit has room when another request has ended.
        ApiError::Limit(refusal) if !refusal.permanent => TryOutcome::HeldBack {
            reason: match refusal.limit {
                limit if limit.is_cap() => "cap_held",
                Limit::Capacity => "overloaded",
                _ => "limit",
            },
        },
        ApiError::NoWorker { .. } => waits("no_worker", error.told_wait(), true),
        ApiError::Overloaded { .. } => waits("overloaded", error.told_wait(), false),
        ApiError::LedgerUnavailable => waits("ledger_unavailable", None, true),
        // The dispatcher looks at the caller itself, and cancels the batch of one that is gone.
        ApiError::Draining | ApiError::TenantNotServed | ApiError::KeyRevoked => {
            waits("caller", None, true)
        }
        error if error.is_fault() => waits("fault", None, false),
        error => {
            let (status, body) = reply(error);
            let usage = TryUsage::default();
            TryOutcome::Answered(LineAnswer { status, body, is_paid: false, usage, model })
        }
    }
}

/// Returns the outcome of a line that was admitted and has failed.
async fn failed(
    failure: Failure,
    end: Option<&LineEnd>,
    model: Option<ModelName>,
    recorded: Option<watch::Receiver<Stage>>,
) -> TryOutcome {
    let Failure { error, is_charged } = failure;
    match &error {
        // A drain and a lost worker are no answer: the line runs again.
        RequestError::Failed(Fault::WorkerLost { .. } | Fault::Internal) => TryOutcome::Lost,
        RequestError::Refused(Refusal::Draining) if is_charged => TryOutcome::Lost,
        RequestError::Refused(Refusal::KeyRevoked) => {
            if is_charged && !is_recorded(recorded).await {
                return TryOutcome::Lost;
            }
            cancelled(end)
        }
        _ if is_charged => {
            if !is_recorded(recorded).await {
                return TryOutcome::Lost;
            }
            let (status, body) = reply(&error.into());
            let usage = end.map(|end| end.usage.clone()).unwrap_or_default();
            TryOutcome::Answered(LineAnswer { status, body, is_paid: true, usage, model })
        }
        _ => refused(&error.into(), model),
    }
}

fn cancelled(end: Option<&LineEnd>) -> TryOutcome {
    let charged = end.filter(|end| end.is_charged);
    TryOutcome::Cancelled {
        is_paid: charged.is_some(),
        usage: charged.map(|end| end.usage.clone()).unwrap_or_default(),
    }
}

/// Waits until the ledger has the record of the line. Returns false if none came in time:
/// the answer would then have no bill.
async fn is_recorded(stage: Option<watch::Receiver<Stage>>) -> bool {
    let Some(mut stage) = stage else { return false };
    let recorded = stage.wait_for(|stage| *stage == Stage::Recorded);
    matches!(tokio::time::timeout(RECORD_TIMEOUT, recorded).await, Ok(Ok(_)))
}

fn reply(error: &ApiError) -> (u16, String) {
    let body = String::from_utf8_lossy(&error.envelope().to_json()).into_owned();
    (error.status().as_u16(), body)
}

/// Time that a line's task outlasts the dispatcher's own deadline.
const LINE_GRACE: Duration = Duration::from_secs(60);
/// The label of lines in the access log.
const LABEL: &str = "batch_line";

#[cfg(test)]
mod tests {
    use tollgate_admission::{Figures, Refusal, Scope};

    use super::*;
    use crate::api::tests::test_gateway::{PLAIN, TestGateway};

    #[tokio::test]
    async fn line_with_flex_needs_plan_with_flex() {
        let gateway = TestGateway::open(TestGateway::folder(), PLAIN, &[]).await;
        let line = |tier: &str| {
            let lines = Lines::new(gateway.api.clone());
            lines.run(LineRequest {
                request: RequestId::from_random(1),
                caller: gateway.caller("acme").caller().clone(),
                endpoint: Endpoint::ChatCompletions,
                body: format!(
                    r#"{{"model":"m","service_tier":"{tier}","messages":[{{"role":"user","content":"Hi"}}]}}"#
                )
                .into(),
                place: None,
                cancel: CancellationToken::new(),
            })
        };
        let status = async |tier| match line(tier).await {
            TryOutcome::Answered(answer) => (answer.status, answer.body),
            other => panic!("{other:?}"),
        };
        let (refused, body) = status("flex").await;
        assert!(refused == 400 && body.contains("does not allow service_tier"), "{body}");
        // The control is checked further, and names a model that does not exist.
        assert_eq!(status("default").await.0, 404);
    }

    fn refusal(limit: Limit, retry_after: Option<Duration>, permanent: bool) -> ApiError {
        ApiError::Limit(Box::new(Refusal {
            limit,
            scope: Scope::TenantBatches(TenantId::new("acme").expect("a name")),
            class: Some(DeviceClass::cpu()),
            currency: None,
            value: 20_000_000,
            largest: 20_000_000,
            asked: 30_000_000,
            remaining: 5_000_000,
            retry_after,
            resets: None,
            permanent,
            figures: Figures::default(),
        }))
    }

    #[test]
    fn line_waits_only_for_what_passes() {
        let hour = Some(Duration::from_secs(3_600));
        let spent = refused(&refusal(Limit::DeviceTimePerDay, hour, true), None);
        assert!(matches!(spent, TryOutcome::NotPlaced(wait) if wait.reason == "cap_spent"));
        // Other gateways may give some of the cap back.
        let second = Some(Duration::from_secs(1));
        let shared = refused(&refusal(Limit::DeviceTimePerDay, second, false), None);
        assert!(matches!(shared, TryOutcome::NotPlaced(wait) if wait.reason == "cap_held"));
        for (limit, reason) in [
            (Limit::DeviceTimePerDay, "cap_held"),
            (Limit::BudgetPerMonth, "cap_held"),
            (Limit::GrammarTime, "limit"),
            (Limit::Capacity, "overloaded"),
        ] {
            let held = refused(&refusal(limit, None, false), None);
            assert_eq!(held, TryOutcome::HeldBack { reason });
        }
        let never = refused(&refusal(Limit::DeviceTimePerDay, None, true), None);
        assert!(matches!(never, TryOutcome::Answered(answer) if answer.status == 429));
    }
}
