//! The end of a request for work, as its tenant's figures and the access log tell it: once,
//! whatever becomes of the request.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tollgate_domain::{Caller, RequestId, Usage};
use tollgate_serving::Clock;
use tollgate_serving::pump::{OnEnd, RequestEnded};
use tollgate_serving::timings::{FrontTimings, RequestTimings};

use crate::access_log::{AccessEnd, AccessFacts, AccessLog, WorkDone};
use crate::client_ids::{ClientIdTable, ClientIds};
use crate::reply::ApiError;
use crate::telemetry::{Metrics, Outcome};

/// A request for work whose end is not counted yet. The drop counts it: a request whose
/// future is dropped was left by its client.
pub(crate) struct RequestRecord {
    metrics: Arc<Metrics>,
    caller: Caller,
    /// The outcome that a drop counts; `None` once the end is counted.
    if_dropped: Option<Outcome>,
    line: Option<RecordLine>,
    ids: Option<KeptFacts>,
}

/// The client's own ids of a request, and the table that keeps them once it is admitted.
pub(crate) struct KeptFacts {
    pub(crate) table: ClientIdTable,
    pub(crate) clock: Clock,
    pub(crate) request: RequestId,
    pub(crate) ids: ClientIds,
}

/// The log and the facts of a request's line.
struct RecordLine {
    log: AccessLog,
    facts: AccessFacts,
}

impl RequestRecord {
    /// Begins the record of a request of `caller`. The config must have the caller's tenant.
    pub(crate) fn begin(metrics: &Arc<Metrics>, caller: Caller) -> Self {
        let metrics = Arc::clone(metrics);
        Self { metrics, caller, if_dropped: Some(Outcome::Cancelled), line: None, ids: None }
    }

    /// Makes the record write the line of the access log, too, if the log is on.
    pub(crate) fn write_line(&mut self, log: &AccessLog, facts: impl FnOnce() -> AccessFacts) {
        self.line = log.is_on().then(|| RecordLine { log: log.clone(), facts: facts() });
    }

    /// Makes the record keep the client's own ids, if the request is admitted. Others have no
    /// usage to show.
    pub(crate) fn keep_ids(&mut self, facts: KeptFacts) {
        self.ids = Some(facts);
    }

    /// Counts a request that was not admitted.
    pub(crate) fn failed(mut self, error: &ApiError) {
        let (status, error_kind) = (Some(error.status()), Some(error.kind().0));
        self.write(AccessEnd { status, error: error_kind, work: None });
        if error.is_fault() {
            self.count(Outcome::Failed, None);
        } else {
            self.count(Outcome::Refused, Some(error));
        }
    }

    /// Counts a request that got the answer of an earlier one.
    pub(crate) fn repeated(mut self) {
        self.write(AccessEnd { status: Some(StatusCode::OK), error: None, work: None });
        self.count(Outcome::Repeated, None);
    }

    /// Returns the function that counts the end of the request, which is admitted now.
    pub(crate) fn on_end(mut self) -> OnEnd {
        // From here on only a panic of the request's task drops the record uncounted.
        self.if_dropped = Some(Outcome::Failed);
        if let Some(KeptFacts { table, clock, request, ids }) = self.ids.take() {
            table.keep(clock.now(), &self.caller.tenant, &request, ids);
        }
        Box::new(move |ended| self.ended(ended))
    }

    fn ended(mut self, ended: &RequestEnded<'_>) {
        let RequestEnded { job, failure, client_left, answer_began, usage, timings } = *ended;
        let model = job.model();
        let error = failure.map(|failure| ApiError::from(failure.clone()));
        let status = match &error {
            // The head of a stream goes out with its first part.
            Some(error) if !answer_began => error.status(),
            _ => StatusCode::OK,
        };
        self.write(AccessEnd {
            // A client that left before the head was sent no status.
            status: (!client_left || answer_began).then_some(status),
            error: match client_left {
                true => Some(CLIENT_LEFT),
                false => error.as_ref().map(|error| error.kind().0),
            },
            work: Some(WorkDone {
                model: model.name.clone(),
                class: model.class.clone(),
                usage,
                timings,
            }),
        });
        self.metrics.tenant_used(&self.caller.tenant, &model.class, usage.attributed);
        let (Some(failure), Some(error)) = (failure, error) else {
            let token = between_tokens(&timings, &usage, job.all_choices());
            self.metrics.answer((&model.name, &model.class), whole(&timings), token);
            return self.count(Outcome::Answered, None);
        };
        match error.is_fault() {
            _ if client_left => self.count(Outcome::Cancelled, None),
            // An answer that was cut, for example at its deadline, is no refusal.
            is_fault if is_fault || failure.is_charged => self.count(Outcome::Failed, None),
            _ => self.count(Outcome::Refused, Some(&error)),
        }
    }

    fn write(&mut self, end: AccessEnd) {
        if let Some(RecordLine { log, facts }) = self.line.take() {
            log.write(&end, || facts);
        }
    }

    fn count(&mut self, outcome: Outcome, refusal: Option<&ApiError>) {
        self.if_dropped = None;
        self.metrics.tenant_request(&self.caller, outcome, refusal);
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if let Some(outcome) = self.if_dropped {
            let error = Some(if outcome == Outcome::Cancelled { CLIENT_LEFT } else { "internal" });
            self.write(AccessEnd { status: None, error, work: None });
            self.count(outcome, None);
        }
    }
}

/// The kind of error in the line of a request that its client left.
const CLIENT_LEFT: &str = "client_left";

/// Returns the time from the arrival of the body to the last token.
fn whole(timings: &RequestTimings) -> Duration {
    let RequestTimings { front: FrontTimings { read, preprocess }, place, worker } = *timings;
    let stages = worker.stages;
    let worker = stages.queue_ns.saturating_add(stages.prefill_ns).saturating_add(stages.decode_ns);
    read + preprocess + place + Duration::from_nanos(worker)
}

/// Returns the mean time between two tokens of a choice; `None` if no choice has two. The
/// choices of a request run side by side.
fn between_tokens(timings: &RequestTimings, usage: &Usage, choices: u64) -> Option<Duration> {
    let decode = timings.worker.stages.decode_ns.saturating_mul(choices);
    // The first token of each choice ends its prefill.
    decode.checked_div(usage.completion_tokens.saturating_sub(choices)).map(Duration::from_nanos)
}
