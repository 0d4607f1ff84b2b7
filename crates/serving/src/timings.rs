//! Time that an answered request spent in each stage, from its client to the
//! device and back. All of it is host time, for the answer's usage and for
//! metrics; bills do not depend on it.

use std::time::Duration;

use tollgate_domain::Transfers;
use tollgate_domain::block::Stages;

/// Time before a request was admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontTimings {
    /// Time in which the body arrived.
    pub read: Duration,
    /// Time in which the body was parsed and tokenized, the wait included.
    pub preprocess: Duration,
}

/// Time in a worker, as the worker reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerTimings {
    /// Queue, prefill and decode.
    pub stages: Stages,
    /// Transfers to and from the device; `None` if the device is the host.
    pub transfers: Option<Transfers>,
    /// Processor and waiting time of the host for the request's grammar, beside the other
    /// stages; `None` without a grammar.
    pub grammar: Option<Duration>,
}

/// Time in all stages up to the last token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTimings {
    /// Time before admission.
    pub front: FrontTimings,
    /// Time from admission until the worker that answered was chosen.
    pub place: Duration,
    /// Time in that worker.
    pub worker: WorkerTimings,
}

impl RequestTimings {
    /// Returns each stage that took place, by the name of its metric label.
    pub fn stages(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let Self { front: FrontTimings { read, preprocess }, place, worker } = *self;
        let WorkerTimings { stages, transfers, grammar } = worker;
        let Stages { queue_ns, prefill_ns, decode_ns } = stages;
        let moved = transfers.map(|Transfers { to_device, to_host }| {
            [("to_device", to_device), ("to_host", to_host)]
                .map(|(name, time)| (name, Duration::from_nanos(time.nanos())))
        });
        [
            ("read", read),
            ("preprocess", preprocess),
            ("place", place),
            ("queue", Duration::from_nanos(queue_ns)),
            ("prefill", Duration::from_nanos(prefill_ns)),
            ("decode", Duration::from_nanos(decode_ns)),
        ]
        .into_iter()
        .chain(moved.into_iter().flatten())
        .chain(grammar.map(|time| ("grammar", time)))
    }
}
