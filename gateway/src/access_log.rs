//! The access log: one line a request, in the log of the process. A line has ids, figures and
//! names, and never a prompt, an answer or a secret. The log's formats escape control
//! characters, so no client can forge a line.

use std::sync::{Arc, Mutex, PoisonError};

use http::StatusCode;
use tollgate_config::{AccessLog as AccessLogConfig, AccessLogRequests, LiveConfig};
use tollgate_domain::{Caller, DeviceClass, ModelName, MonotonicTime, RequestId, Usage};
use tollgate_serving::Clock;
use tollgate_serving::timings::{FrontTimings, RequestTimings};

use crate::client_ids::ClientIds;

/// The access log of both listeners. Clones share its rate.
#[derive(Clone)]
pub(crate) struct AccessLog {
    config: LiveConfig,
    clock: Clock,
    rate: Arc<Mutex<Sampler>>,
}

/// The facts of a request that its head tells.
#[derive(Clone, Debug)]
pub(crate) struct AccessFacts {
    pub(crate) request: RequestId,
    /// The label of the route in metrics.
    pub(crate) endpoint: &'static str,
    /// The caller, if the credential authenticated.
    pub(crate) caller: Option<Caller>,
    pub(crate) client: ClientIds,
}

/// The end of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct AccessEnd {
    /// The status that the client was sent; `None` if the client left before.
    pub(crate) status: Option<StatusCode>,
    /// The kind of the error, if the request was not answered whole.
    pub(crate) error: Option<&'static str>,
    /// The figures of an admitted request.
    pub(crate) work: Option<WorkDone>,
}

/// The figures of an admitted request.
#[derive(Clone, Debug)]
pub(crate) struct WorkDone {
    pub(crate) model: ModelName,
    pub(crate) class: DeviceClass,
    pub(crate) usage: Usage,
    pub(crate) timings: RequestTimings,
}

impl AccessLog {
    pub(crate) fn new(config: LiveConfig, clock: Clock) -> Self {
        Self { config, clock, rate: Arc::default() }
    }

    /// Returns a log that writes nothing.
    #[cfg(test)]
    pub(crate) fn off() -> Self {
        let config = "[plans.p]\n[tenants.acme]\nplan = \"p\"\n";
        let config = tollgate_config::Config::from_toml(std::path::Path::new("test.toml"), config);
        Self::new(LiveConfig::new(Arc::new(config.expect("a config"))), Clock::system())
    }

    /// Returns true if requests that were refused, or all requests, have lines now.
    pub(crate) fn is_on(&self) -> bool {
        self.config.current().gateway().access_log.requests != AccessLogRequests::Off
    }

    /// Writes the line of a request, unless the config asks for none or the lines of this
    /// second are spent. `facts` is called only for a line.
    pub(crate) fn write(&self, end: &AccessEnd, facts: impl FnOnce() -> AccessFacts) {
        let config = self.config.current();
        let AccessLogConfig { requests, lines_per_second } = &config.gateway().access_log;
        let wanted = match requests {
            AccessLogRequests::Off => false,
            AccessLogRequests::Refusals => end.error.is_some(),
            AccessLogRequests::All => true,
        };
        if !wanted {
            return;
        }
        let now = self.clock.now();
        let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left_out) = rate.take(now, *lines_per_second) else { return };
        // The log may wait for its reader, and others must not wait with it.
        drop(rate);
        line(end, &facts(), left_out);
    }
}

/// The rate of lines: the first of each second are written.
#[derive(Debug, Default)]
struct Sampler {
    second: u64,
    lines: u32,
    left_out: u64,
}

impl Sampler {
    /// Takes a line. Returns the number of requests without a line since the last line, or
    /// `None` if this request has none.
    fn take(&mut self, now: MonotonicTime, most: u32) -> Option<u64> {
        let second = now.0 / 1_000_000_000;
        if second != self.second {
            (self.second, self.lines) = (second, 0);
        }
        if self.lines >= most {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        // The next line tells the number, so that the log shows its gap.
        Some(std::mem::take(&mut self.left_out))
    }
}

fn line(end: &AccessEnd, facts: &AccessFacts, left_out: u64) {
    let AccessFacts { request, endpoint, caller, client } = facts;
    let AccessEnd { status, error, work } = end;
    let (tenant, key) =
        (caller.as_ref().map(|it| it.tenant.as_str()), caller.as_ref().map(|it| it.key.as_str()));
    let usage = work.as_ref().map(|work| work.usage);
    let stages = work.as_ref().map(|work| {
        let RequestTimings { front: FrontTimings { read, preprocess }, place, worker } =
            work.timings;
        (read, preprocess, place, worker.stages)
    });
    let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    tracing::info!(
        target: TARGET,
        %request,
        endpoint,
        tenant,
        key,
        model = work.as_ref().map(|work| work.model.as_str()),
        status = status.map(|status| status.as_u16()),
        error = *error,
        prompt_tokens = usage.map(|usage| usage.prompt_tokens),
        completion_tokens = usage.map(|usage| usage.completion_tokens),
        device_class = work.as_ref().map(|work| work.class.as_str()),
        attributed_ns = usage.map(|usage| usage.attributed.nanos()),
        reference_ns = usage.map(|usage| usage.reference.nanos()),
        read_ns = stages.map(|(read, ..)| nanos(read)),
        preprocess_ns = stages.map(|(_, preprocess, ..)| nanos(preprocess)),
        place_ns = stages.map(|(_, _, place, _)| nanos(place)),
        queue_ns = stages.map(|(.., worker)| worker.queue_ns),
        prefill_ns = stages.map(|(.., worker)| worker.prefill_ns),
        decode_ns = stages.map(|(.., worker)| worker.decode_ns),
        client_request_id = client.request_id(),
        trace_id = client.trace_id(),
        left_out = (left_out > 0).then_some(left_out),
        "a request ended"
    );
}

/// The target of the lines, by which a log collector finds them.
const TARGET: &str = "tollgate_access";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampler_counts_what_it_leaves_out() {
        let mut sampler = Sampler::default();
        let at = |millis: u64| MonotonicTime(millis * 1_000_000);
        let taken: Vec<Option<u64>> =
            [0, 10, 20, 30, 1_000].map(|millis| sampler.take(at(millis), 2)).to_vec();
        assert_eq!(taken, [Some(0), Some(0), None, None, Some(2)]);
        assert_eq!(sampler.take(at(1_001), 2), Some(0));
    }
}
