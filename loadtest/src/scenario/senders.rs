//! The senders of a scenario: the honest tenants, the tenant that measures the capacity,
//! and what all senders have in common, their rate and the content of their requests.

use std::time::Duration;

use serde::Deserialize;

use super::values::{hundred, names, sixteen, span, three_seconds, two};
use crate::plan::Arrivals;

/// The measurement of capacity: a closed loop before the first phase, which finds
/// the answered requests a second of a sender's kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The measuring tenant. It is no other sender's tenant, so that no other
    /// limits are used up.
    pub tenant: String,
    /// The plan of the tenants on the temporary gateway.
    pub plan: Option<String>,
    /// Concurrent requests.
    #[serde(default = "sixteen")]
    pub at_once: u32,
    /// The length of the measurement of each kind of request.
    #[serde(deserialize_with = "span", default = "three_seconds")]
    pub seconds: Duration,
}

/// Tenants that stay within their limits.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Honest {
    /// The names of the tenants; `name-{1..8}` stands for eight.
    #[serde(deserialize_with = "names")]
    pub tenants: Vec<String>,
    /// The plan of the tenants on the temporary gateway.
    pub plan: Option<String>,
    /// The rate of each tenant.
    #[serde(flatten)]
    pub rate: Rate,
    /// The distribution of the times between requests.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// The content of the requests.
    #[serde(flatten)]
    pub ask: Ask,
    /// Percentage of requests with a streamed answer.
    #[serde(default = "hundred")]
    pub stream: u8,
    /// The number of connections of each tenant.
    #[serde(default = "two")]
    pub connections: u32,
    /// True if each request comes on a new connection from an address of its own.
    #[serde(default)]
    pub newcomers: bool,
}

/// The requests a second. Exactly one of `rate`, `times_capacity` and `times_share`
/// is given.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Rate {
    /// Requests a second.
    pub rate: Option<f64>,
    /// A multiple of the gateway's capacity.
    pub times_capacity: Option<f64>,
    /// A multiple of an equal share of the capacity among all senders' tenants. A
    /// group of attackers counts as one tenant.
    pub times_share: Option<f64>,
    /// An upper limit of the rate that follows from a multiple.
    pub at_most: Option<f64>,
}

/// The content of requests.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Ask {
    /// The prompts, used in turn.
    #[serde(default)]
    pub prompts: Vec<String>,
    /// Filler words before each prompt.
    #[serde(default)]
    pub prompt_words: u32,
    /// The largest number of tokens in an answer.
    pub max_tokens: Option<u32>,
}

impl Honest {
    /// Returns the prompts.
    pub fn prompts(&self) -> Vec<String> {
        self.ask.texts("Count from 1 to 20.")
    }
}

impl Ask {
    pub(super) fn texts(&self, usual: &str) -> Vec<String> {
        let filling = "word ".repeat(self.prompt_words as usize);
        let usual = [usual.to_owned()];
        let prompts = if self.prompts.is_empty() { &usual[..] } else { &self.prompts };
        prompts.iter().map(|prompt| format!("{filling}{prompt}")).collect()
    }

    /// Returns the largest number of tokens in an answer.
    pub fn most_tokens(&self) -> u32 {
        self.max_tokens.unwrap_or(64)
    }
}

impl Rate {
    pub(super) fn is_given(self) -> bool {
        self.rate.or(self.times_capacity).or(self.times_share).is_some()
    }

    pub(super) fn check(self, has_capacity: bool) -> Result<(), String> {
        let Self { rate, times_capacity, times_share, at_most } = self;
        let given: Vec<f64> = [rate, times_capacity, times_share].into_iter().flatten().collect();
        let [figure] = given[..] else {
            return Err(
                "exactly one of rate, times_capacity and times_share is required".to_owned()
            );
        };
        let is_rate = |figure: f64| figure.is_finite() && figure > 0.0 && figure <= 100_000.0;
        if !is_rate(figure) || !at_most.is_none_or(is_rate) {
            return Err("a rate must be above 0 and at most 100,000".to_owned());
        }
        if rate.is_none() && !has_capacity {
            return Err("times_capacity and times_share need a [capacity]".to_owned());
        }
        Ok(())
    }

    /// Returns true if the rate needs the capacity.
    pub fn wants_capacity(self) -> bool {
        self.rate.is_none() && self.is_given()
    }

    /// Returns the requests a second at this capacity and this number of sharing
    /// tenants.
    pub fn per_second(self, capacity: f64, sharers: usize) -> f64 {
        let multiple = self.times_capacity.map(|times| times * capacity);
        let share = self.times_share.map(|times| times * capacity / sharers.max(1) as f64);
        let rate = self.rate.or(multiple).or(share).unwrap_or(1.0);
        rate.min(self.at_most.unwrap_or(f64::INFINITY)).clamp(0.01, 100_000.0)
    }
}
