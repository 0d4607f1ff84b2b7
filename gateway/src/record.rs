//! The end of a request for work, as its tenant's figures count it: once, whatever becomes of
//! the request.

use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::TenantId;
use tollgate_serving::pump::{OnEnd, RequestEnded};
use tollgate_serving::timings::{FrontTimings, RequestTimings};

use crate::reply::ApiError;
use crate::telemetry::{Metrics, Outcome};

/// A request for work whose end is not counted yet. The drop counts it: a request whose
/// future is dropped was left by its client.
pub(crate) struct RequestRecord {
    metrics: Arc<Metrics>,
    tenant: TenantId,
    /// The outcome that a drop counts; `None` once the end is counted.
    if_dropped: Option<Outcome>,
}

impl RequestRecord {
    /// Begins the record of a request of `tenant`, which must be one of the config's.
    pub(crate) fn begin(metrics: &Arc<Metrics>, tenant: TenantId) -> Self {
        let metrics = Arc::clone(metrics);
        Self { metrics, tenant, if_dropped: Some(Outcome::Cancelled) }
    }

    /// Counts a request that was not admitted.
    pub(crate) fn failed(mut self, error: &ApiError) {
        if error.is_fault() {
            self.count(Outcome::Failed, None);
        } else {
            self.count(Outcome::Refused, Some(error.kind().0));
        }
    }

    /// Counts a request that got the answer of an earlier one.
    pub(crate) fn repeated(mut self) {
        self.count(Outcome::Repeated, None);
    }

    /// Returns the function that counts the end of the request, which is admitted now.
    pub(crate) fn on_end(mut self) -> OnEnd {
        // From here on only a panic of the request's task drops the record uncounted.
        self.if_dropped = Some(Outcome::Failed);
        Box::new(move |ended| self.ended(ended))
    }

    fn ended(mut self, ended: &RequestEnded<'_>) {
        let RequestEnded { job, failure, client_left, usage, timings } = *ended;
        let model = job.model();
        self.metrics.tenant_used(&self.tenant, &model.class, usage.attributed);
        let Some(failure) = failure else {
            let token = between_tokens(&timings, usage.completion_tokens, job.all_choices());
            self.metrics.answer((&model.name, &model.class), whole(&timings), token);
            return self.count(Outcome::Answered, None);
        };
        let error = ApiError::from(failure.clone());
        match error.is_fault() {
            _ if client_left => self.count(Outcome::Cancelled, None),
            // An answer that was cut, for example at its deadline, is no refusal.
            is_fault if is_fault || failure.is_charged => self.count(Outcome::Failed, None),
            _ => self.count(Outcome::Refused, Some(error.kind().0)),
        }
    }

    fn count(&mut self, outcome: Outcome, kind: Option<&'static str>) {
        self.if_dropped = None;
        self.metrics.tenant_request(&self.tenant, outcome, kind);
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if let Some(outcome) = self.if_dropped {
            self.count(outcome, None);
        }
    }
}

/// Returns the time from the arrival of the body to the last token.
fn whole(timings: &RequestTimings) -> Duration {
    let RequestTimings { front: FrontTimings { read, preprocess }, place, worker } = *timings;
    let stages = worker.stages;
    let worker = stages.queue_ns.saturating_add(stages.prefill_ns).saturating_add(stages.decode_ns);
    read + preprocess + place + Duration::from_nanos(worker)
}

/// Returns the mean time between two tokens of a choice; `None` if no choice has two. The
/// choices of a request run side by side.
fn between_tokens(timings: &RequestTimings, tokens: u64, choices: u64) -> Option<Duration> {
    let decode = timings.worker.stages.decode_ns.saturating_mul(choices);
    // The first token of each choice ends its prefill.
    decode.checked_div(tokens.saturating_sub(choices)).map(Duration::from_nanos)
}
