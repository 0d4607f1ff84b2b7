//! The receivers of what serving observes: the metrics, and the webhook for events.

use std::sync::Arc;
use std::time::Duration;

use tollgate_admission::{CapReached, Offence};
use tollgate_domain::{DeviceClass, ModelName, Usage};
use tollgate_serving::Observer;
use tollgate_serving::timings::RequestTimings;

use crate::telemetry::Metrics;
use crate::webhook::Webhook;

/// Everything that serving reports to.
pub(crate) struct GatewayObserver {
    metrics: Arc<Metrics>,
    webhook: Webhook,
}

impl GatewayObserver {
    /// Makes the observer that reports to `metrics` and `webhook`.
    pub(crate) fn new(metrics: &Arc<Metrics>, webhook: Webhook) -> Self {
        Self { metrics: Arc::clone(metrics), webhook }
    }
}

impl Observer for GatewayObserver {
    fn usage(&self, model: &ModelName, class: &DeviceClass, usage: &Usage) {
        self.metrics.usage(model, class, usage);
    }

    fn first_token(&self, model: &ModelName, class: &DeviceClass, elapsed: Duration) {
        self.metrics.first_token(model, class, elapsed);
    }

    fn timings(&self, timings: &RequestTimings) {
        self.metrics.timings(timings);
    }

    fn block_committed(&self, elapsed: Duration) {
        self.metrics.block_committed(elapsed);
    }

    fn penalty_began(&self, offence: Offence) {
        // The metrics have a function of the same name for offences of sources.
        Observer::penalty_began(&*self.metrics, offence);
    }

    fn cap_reached(&self, reached: &CapReached) {
        self.metrics.cap_reached(reached);
        self.webhook.cap_reached(reached);
    }
}
