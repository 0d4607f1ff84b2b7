//! The expectations of a scenario: what must hold for honest tenants, and how much the
//! attackers may use.

use std::time::Duration;

use serde::Deserialize;

use super::values::{some_size, some_span};

/// The expectations. An expectation that is not given is not checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hold {
    /// The least part of honest requests, in and after the attack, with complete
    /// answers.
    pub success: Option<f64>,
    /// The time to the first token in the attack, compared with the phase before.
    pub first_token: Option<Times>,
    /// The time between tokens in the attack, compared with the phase before.
    pub between_tokens: Option<Times>,
    /// The least ratio between the attackers' and the honest tenants' wait for the
    /// first token (medians, in the attack): the cost of too many requests must
    /// fall on their sender.
    pub ahead_of_attackers: Option<f64>,
    /// The longest time after the attack until honest requests are as fast as
    /// before.
    #[serde(default, deserialize_with = "some_span")]
    pub recovery: Option<Duration>,
    /// The largest growth of the gateway's memory.
    #[serde(default, deserialize_with = "some_size")]
    pub memory_growth: Option<u64>,
    /// The largest growth of the gateway's memory that is left at the end.
    #[serde(default, deserialize_with = "some_size")]
    pub memory_kept: Option<u64>,
    /// The largest part of one core that the gateway uses in the attack beyond its
    /// use before.
    pub gateway_cpu: Option<f64>,
    /// The most attackers' requests in the attack that are not refused with 429, 503
    /// or 413.
    pub worked_on: Option<u64>,
    /// The most tokens that attackers use in the attack, of prompts and answers.
    pub attackers_tokens: Option<u64>,
    /// The most reference cost that attackers use in the attack.
    #[serde(default, deserialize_with = "some_span")]
    pub attackers_reference: Option<Duration>,
    /// The largest number of additional descriptors at the end.
    pub descriptors_growth: Option<u64>,
    /// The largest ratio between attackers' answered requests in the attack and in
    /// the first phase, in which a retry storm sends no retries.
    pub accepted: Option<f64>,
    /// The least answered tokens a second in the attack, as a part of the capacity.
    pub goodput: Option<f64>,
    /// The largest part of device time in the attack for all attackers together.
    pub attackers_share: Option<f64>,
}

/// Limits of a latency, as multiples of its value before the attack.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// The limit of the median.
    pub p50: Option<f64>,
    /// The limit of the 99th percentile.
    pub p99: Option<f64>,
    /// A growth that is always accepted, whatever the multiple.
    #[serde(default, deserialize_with = "some_span")]
    pub or_added: Option<Duration>,
}
