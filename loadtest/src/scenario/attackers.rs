//! The attackers of a scenario: the kinds of attacks, and the keys that each kind has.

use std::time::Duration;

use serde::Deserialize;

use super::senders::{Ask, Rate};
use super::values::{eight, five, four, hundred, names, one_u32, some_span};
use crate::shape::Shape;

/// The kind of an attack.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum AttackKind {
    /// Far more requests than a fair share.
    Flood,
    /// A flood from many addresses.
    ManySources,
    /// Prompts as long as the model accepts.
    CostlyPrompts,
    /// Requests that reserve long answers and get short ones.
    Hogs,
    /// Answers as long as possible.
    EndlessOutputs,
    /// Many keys or many tenants of one attacker.
    Sybils,
    /// Clients that leave before the answer ends.
    EarlyLeavers,
    /// Clients that repeat refused requests at once.
    RetryStorm,
    /// Clients that request a stream and do not read it.
    SlowReaders,
    /// Connections that send nothing, or one header or byte at a time.
    Slowloris,
    /// HTTP/2 streams that are opened and reset as fast as possible.
    RapidReset,
    /// Authenticated connections that are kept open with a request now and then.
    HoldConnections,
    /// HTTP/2 streams with bodies that are sent except for a rest.
    BodyFlood,
    /// Requests that are refused after the gateway has worked on them.
    RefusedWork,
    /// HTTP/2 answers that are not read, beside a request that is sent slowly.
    UnreadBesideDrip,
    /// Many one-token answers, which teach a low estimate, then long answers at
    /// once.
    TaughtEstimates,
    /// Valid requests of extreme shapes.
    OddShapes,
    /// Random requests, sent and left in random ways, one after the other.
    RandomShapes,
    /// A storm of files and batches, as many as the gateway takes.
    JobStorm,
    /// Batches that are cancelled at once.
    CancelStorm,
    /// Inputs of batches with one giant, deep or repeated line.
    GiantLines,
}

impl AttackKind {
    /// Returns true if the attack has connections instead of a rate of requests.
    pub fn is_by_connections(self) -> bool {
        match self {
            Self::SlowReaders
            | Self::Slowloris
            | Self::RapidReset
            | Self::HoldConnections
            | Self::BodyFlood
            | Self::UnreadBesideDrip
            | Self::TaughtEstimates
            | Self::RandomShapes
            | Self::JobStorm
            | Self::CancelStorm
            | Self::GiantLines => true,
            Self::Flood
            | Self::ManySources
            | Self::CostlyPrompts
            | Self::Hogs
            | Self::EndlessOutputs
            | Self::Sybils
            | Self::EarlyLeavers
            | Self::RetryStorm
            | Self::RefusedWork
            | Self::OddShapes => false,
        }
    }
}

/// One attacker, or several equal ones.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attacker {
    /// The kind of the attack.
    pub kind: AttackKind,
    /// The tenants of the attacker's keys; `trial-{1..50}` stands for fifty.
    #[serde(deserialize_with = "names")]
    pub tenants: Vec<String>,
    /// The plan of the tenants on the temporary gateway.
    pub plan: Option<String>,
    /// The pool of the tenants on the temporary gateway.
    pub pool: Option<String>,
    /// The number of keys of each tenant.
    #[serde(default = "one_u32")]
    pub keys: u32,
    /// The rate of all of them together.
    #[serde(flatten)]
    pub rate: Rate,
    /// The content of the requests.
    #[serde(flatten)]
    pub ask: Ask,
    /// Percentage of requests with a streamed answer.
    #[serde(default = "hundred")]
    pub stream: u8,
    /// The number of source addresses (loopback targets only).
    #[serde(default = "one_u32")]
    pub sources: u32,
    /// The number of connections; at least one for each key and each address.
    #[serde(default = "four")]
    pub connections: u32,
    /// Retry storm: the number of times that a refused request is repeated.
    #[serde(default = "five")]
    pub retries: u32,
    /// The shapes of the requests, used in turn. Without shapes the prompts are used.
    #[serde(default)]
    pub shapes: Vec<Shape>,
    /// Body flood, unread beside drip, taught estimates: the number of HTTP/2 streams
    /// at once, on each connection or, for taught estimates, in all.
    #[serde(default = "eight")]
    pub streams: u32,
    /// Random shapes: the number of shapes.
    #[serde(default)]
    pub requests: u32,
    /// Early leavers and odd shapes: the longest time after which a client leaves.
    #[serde(default, deserialize_with = "some_span")]
    pub leave_within: Option<Duration>,
    /// Slowloris: the part that is slow.
    #[serde(default)]
    pub slow: Slow,
    /// Rapid reset: the time after which complete requests are reset, instead of at
    /// once. Hold connections: the time between two requests. Body flood, unread
    /// beside drip: the time between two pieces of a slow body. Attacks on batches: the
    /// time between two batches of a connection.
    #[serde(default, deserialize_with = "some_span")]
    pub pace: Option<Duration>,
    /// Expectation: the gateway closes each connection within this time.
    #[serde(default, deserialize_with = "some_span")]
    pub closed_within: Option<Duration>,
}

/// The part of a connection that a slowloris attack draws out.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Slow {
    /// Nothing is sent, not even TLS.
    #[default]
    Silent,
    /// One header a second.
    Headers,
    /// One byte of body a second.
    Body,
    /// One byte a second of the file in an upload.
    Upload,
}

impl Attacker {
    pub(super) fn check(&self, has_capacity: bool) -> Result<(), String> {
        let kind = self.kind;
        if !kind.is_by_connections() {
            self.rate.check(has_capacity)?;
        } else if self.rate.is_given() {
            return Err(format!("{kind:?} has connections, not a rate"));
        }
        for (wrong, why) in [
            (self.stream > 100, "stream must be 0 to 100 percent"),
            (self.keys == 0 || self.sources == 0, "keys and sources must be above 0"),
            (self.connections == 0, "connections must be above 0"),
            (
                self.keys > 1_000 || self.connections > 10_000,
                "at most 1,000 keys, 10,000 connections",
            ),
            (self.sources > 65_000, "at most 65,000 sources"),
            (
                (kind == AttackKind::RandomShapes) != (1..=100_000).contains(&self.requests),
                "random shapes, and only these, need requests from 1 to 100,000",
            ),
            (self.streams == 0 || self.streams > 1_000, "streams must be 1 to 1,000"),
            (
                kind.is_by_connections() && !self.shapes.is_empty(),
                "only attacks with a rate have shapes",
            ),
            (
                matches!(kind, AttackKind::RefusedWork | AttackKind::OddShapes)
                    && self.shapes.is_empty(),
                "refused work and odd shapes need shapes",
            ),
            (
                kind == AttackKind::EarlyLeavers && self.leave_within.is_none(),
                "early leavers need leave_within",
            ),
        ] {
            if wrong {
                return Err(why.to_owned());
            }
        }
        Ok(())
    }

    /// Returns the prompts; each kind of attack has its own default.
    pub fn prompts(&self) -> Vec<String> {
        let usual = match self.kind {
            AttackKind::EndlessOutputs
            | AttackKind::SlowReaders
            | AttackKind::UnreadBesideDrip
            | AttackKind::TaughtEstimates => "Count from 1 to 400.",
            AttackKind::Hogs => "What is 2 plus 2?",
            _ => "Tell me a story.",
        };
        self.ask.texts(usual)
    }
}
