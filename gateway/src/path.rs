//! Where the time of an answered request went, on its way from the client to
//! the device and back. Host time by stage, for the answer's usage and the
//! metrics; nobody pays by it.

use std::time::Duration;

use tollgate_domain::Transfers;
use tollgate_domain::block::Stages;

/// The stages before a request is admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFront {
    /// Its body came in.
    pub(crate) read: Duration,
    /// It was parsed and became tokens, the turn for that included.
    pub(crate) preprocess: Duration,
}

/// The stages in a worker, as it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InWorker {
    pub(crate) stages: Stages,
    /// `None` where the device is the host.
    pub(crate) transfers: Option<Transfers>,
}

/// All stages up to the last token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) in_front: InFront,
    /// From admission until a worker that answered it was chosen.
    pub(crate) place: Duration,
    pub(crate) in_worker: InWorker,
}

impl Path {
    /// Each stage that there was, by the name that its metric has.
    pub(crate) fn stages(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let Self { in_front: InFront { read, preprocess }, place, in_worker } = *self;
        let InWorker { stages: Stages { queue_ns, prefill_ns, decode_ns }, transfers } = in_worker;
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
    }
}
