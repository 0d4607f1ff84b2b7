//! The counters of the webhook.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::ReasonLabel;

/// The counters of the webhook's messages and attempts.
#[derive(Debug, Default)]
pub(crate) struct WebhookMetrics {
    messages: Family<OutcomeLabel, Counter>,
    attempts_failed: Family<ReasonLabel, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

impl WebhookMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let Self { messages, attempts_failed } = self;
        registry.register(
            "webhook_messages",
            "Messages of the webhook that have ended: delivered, failed or dropped",
            messages.clone(),
        );
        registry.register(
            "webhook_attempts_failed",
            "Attempts to deliver a message of the webhook that failed",
            attempts_failed.clone(),
        );
    }

    /// Counts a message that has ended.
    pub(crate) fn message(&self, outcome: &'static str) {
        self.messages.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a failed attempt to deliver a message.
    pub(crate) fn attempt_failed(&self, reason: &'static str) {
        self.attempts_failed.get_or_create(&ReasonLabel { reason }).inc();
    }
}
