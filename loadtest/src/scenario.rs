//! A scenario: honest tenants, attackers, three phases and expectations, in a TOML
//! file. The built-in scenarios are part of the program. An unknown key, a duration
//! without a unit or a sender without a tenant is an error that names its place.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::plan::Arrivals;

mod shipped;

pub use shipped::{SHIPPED, Shipped};

/// A scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The name in reports: the name of the file.
    #[serde(skip)]
    pub name: String,
    /// A description in one or two sentences.
    pub about: String,
    /// The requested model.
    #[serde(default = "demo_model")]
    pub model: String,
    /// The random seed. The same seed sends the same requests at the same times.
    #[serde(default = "one")]
    pub seed: u64,
    /// The lengths of the phases.
    pub phases: Phases,
    /// The measurement of capacity, if a rate needs it.
    pub capacity: Option<Capacity>,
    /// The honest tenants, which must not be harmed.
    pub honest: Vec<Honest>,
    /// The attackers.
    #[serde(default)]
    pub attackers: Vec<Attacker>,
    /// The expectations.
    #[serde(default)]
    pub hold: Hold,
    /// The temporary gateway, which is started if none is given.
    #[serde(default)]
    pub gateway: OwnGateway,
}

/// The three phases of a run.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phases {
    /// The honest tenants alone, as a baseline.
    #[serde(deserialize_with = "span")]
    pub alone: Duration,
    /// The honest tenants with the attackers.
    #[serde(deserialize_with = "span")]
    pub attack: Duration,
    /// The honest tenants alone again.
    #[serde(deserialize_with = "span")]
    pub after: Duration,
}

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
    /// Early leavers: the longest time after which a client leaves.
    #[serde(default, deserialize_with = "some_span")]
    pub leave_within: Option<Duration>,
    /// Slowloris: the part that is slow.
    #[serde(default)]
    pub slow: Slow,
    /// Rapid reset: the time after which complete requests are reset, instead of at
    /// once.
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
}

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

/// The temporary gateway of a scenario.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnGateway {
    /// The config without its tenants, which follow from the senders.
    #[serde(default)]
    pub config: String,
}

/// An error in a scenario.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// No built-in scenario has the name.
    #[error("unknown scenario {0:?}; the built-in scenarios are: {names}", names = shipped::names())]
    Unknown(String),
    /// The file cannot be read.
    #[error("scenario {name}")]
    Read {
        /// The scenario.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The text is not a valid scenario.
    #[error("scenario {name}: {reason}")]
    Invalid {
        /// The scenario.
        name: String,
        /// The mistake and its place.
        reason: String,
    },
}

impl Scenario {
    /// Returns the built-in scenario of this name, or reads the file at this path.
    ///
    /// # Errors
    /// There is no such scenario, or it is invalid.
    pub fn find(name: &str) -> Result<Self, ScenarioError> {
        if let Some(shipped) = SHIPPED.iter().find(|shipped| shipped.name == name) {
            return Self::parse(name, shipped.text);
        }
        if !name.ends_with(".toml") && !name.contains('/') {
            return Err(ScenarioError::Unknown(name.to_owned()));
        }
        let text = std::fs::read_to_string(name)
            .map_err(|source| ScenarioError::Read { name: name.to_owned(), source })?;
        let stem = Path::new(name).file_stem().map(|stem| stem.to_string_lossy().into_owned());
        Self::parse(&stem.unwrap_or_else(|| name.to_owned()), &text)
    }

    /// Parses a scenario.
    ///
    /// # Errors
    /// The scenario is invalid; the first mistake is reported.
    pub fn parse(name: &str, text: &str) -> Result<Self, ScenarioError> {
        let invalid = |reason: String| ScenarioError::Invalid { name: name.to_owned(), reason };
        let mut scenario: Self =
            toml::from_str(text).map_err(|error| invalid(error.to_string()))?;
        scenario.name = name.to_owned();
        scenario.check().map_err(invalid)?;
        Ok(scenario)
    }

    fn check(&self) -> Result<(), String> {
        if self.honest.is_empty() {
            return Err("at least one [[honest]] is required".to_owned());
        }
        if self.phases.alone.is_zero() || self.whole() > Duration::from_secs(86_400) {
            return Err("phases: alone must be above 0, and all of them at most a day".to_owned());
        }
        if !self.attackers.is_empty() && self.phases.attack.is_zero() {
            return Err("phases: attack must be above 0 if there are attackers".to_owned());
        }
        for honest in &self.honest {
            honest.rate.check(self.capacity.is_some()).map_err(|e| format!("[[honest]]: {e}"))?;
            if honest.stream > 100 {
                return Err("[[honest]]: stream must be 0 to 100 percent".to_owned());
            }
        }
        for attacker in &self.attackers {
            attacker.check(self.capacity.is_some()).map_err(|e| format!("[[attackers]]: {e}"))?;
        }
        let rates = self.honest.iter().map(|one| one.rate);
        let mut rates = rates.chain(self.attackers.iter().map(|one| one.rate));
        if self.hold.goodput.is_some() && !rates.any(Rate::wants_capacity) {
            let why = "it is measured only if a rate is a multiple of it";
            return Err(format!("[hold]: goodput is a part of capacity; {why}"));
        }
        let mut seen = BTreeSet::new();
        match self.tenants().into_iter().find(|tenant| !seen.insert(tenant.name.to_owned())) {
            Some(twice) => Err(format!("tenant {} is in two places", twice.name)),
            None => Ok(()),
        }
    }

    /// Returns the length of all phases together.
    pub fn whole(&self) -> Duration {
        let Phases { alone, attack, after } = self.phases;
        alone + attack + after
    }

    /// Returns every tenant that needs keys.
    pub fn tenants(&self) -> Vec<Wanted<'_>> {
        let plan = |plan: &Option<String>| plan.clone();
        let mut wanted = Vec::new();
        for honest in &self.honest {
            wanted.extend(honest.tenants.iter().map(|name| Wanted {
                name,
                plan: plan(&honest.plan),
                pool: None,
                keys: 1,
            }));
        }
        for attacker in &self.attackers {
            wanted.extend(attacker.tenants.iter().map(|name| Wanted {
                name,
                plan: plan(&attacker.plan),
                pool: attacker.pool.clone(),
                keys: attacker.keys,
            }));
        }
        wanted.extend(self.capacity.as_ref().map(|capacity| Wanted {
            name: &capacity.tenant,
            plan: plan(&capacity.plan),
            pool: None,
            keys: 1,
        }));
        wanted
    }

    /// Returns the config of the temporary gateway with its tenants.
    pub fn own_config(&self) -> String {
        let mut config = self.gateway.config.clone();
        for Wanted { name, plan, pool, keys: _ } in self.tenants() {
            config.push_str(&format!("\n[tenants.{name}]\n"));
            for (key, value) in [("plan", plan), ("pool", pool)] {
                if let Some(value) = value {
                    config.push_str(&format!("{key} = {value:?}\n"));
                }
            }
        }
        config
    }
}

/// A tenant of a scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The tenant's name.
    pub name: &'a str,
    /// The plan of the tenants on the temporary gateway.
    pub plan: Option<String>,
    /// The pool on the temporary gateway.
    pub pool: Option<String>,
    /// The number of keys.
    pub keys: u32,
}

impl Attacker {
    fn check(&self, has_capacity: bool) -> Result<(), String> {
        let kind = self.kind;
        let by_rate = !matches!(
            kind,
            AttackKind::SlowReaders | AttackKind::Slowloris | AttackKind::RapidReset
        );
        if by_rate {
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
            AttackKind::EndlessOutputs | AttackKind::SlowReaders => "Count from 1 to 400.",
            AttackKind::Hogs => "What is 2 plus 2?",
            _ => "Tell me a story.",
        };
        self.ask.texts(usual)
    }
}

impl Honest {
    /// Returns the prompts.
    pub fn prompts(&self) -> Vec<String> {
        self.ask.texts("Count from 1 to 20.")
    }
}

impl Ask {
    fn texts(&self, usual: &str) -> Vec<String> {
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
    fn is_given(self) -> bool {
        self.rate.or(self.times_capacity).or(self.times_share).is_some()
    }

    fn check(self, has_capacity: bool) -> Result<(), String> {
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

/// Parses a list of names, in which `a-{1..3}` stands for three.
fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let mut all = Vec::new();
    for name in Vec::<String>::deserialize(deserializer)? {
        match expand(&name) {
            Some(several) => all.extend(several),
            None => {
                return Err(serde::de::Error::custom(format!(
                    "{name:?} is neither a name nor a range"
                )));
            }
        }
    }
    if all.is_empty() {
        return Err(serde::de::Error::custom("at least one tenant is required"));
    }
    Ok(all)
}

fn expand(name: &str) -> Option<Vec<String>> {
    let plain = |name: &str| {
        let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        !name.is_empty() && name.chars().all(fine)
    };
    let Some((stem, range)) = name.split_once('{') else {
        return plain(name).then(|| vec![name.to_owned()]);
    };
    let (first, last) = range.strip_suffix('}')?.split_once("..")?;
    let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
    let fits = plain(stem) && first <= last && last - first < 10_000;
    fits.then(|| (first..=last).map(|number| format!("{stem}{number}")).collect())
}

fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong =
        || serde::de::Error::custom(format!("{text:?} is not a duration such as 10s or 250ms"));
    let (number, nanos) = unit(
        &text,
        &[("ms", 1_000_000), ("s", 1_000_000_000), ("m", 60_000_000_000), ("h", 3_600_000_000_000)],
    )
    .ok_or_else(wrong)?;
    number.checked_mul(nanos).map(Duration::from_nanos).ok_or_else(wrong)
}

fn some_span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    span(deserializer).map(Some)
}

fn some_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong = || serde::de::Error::custom(format!("{text:?} is not a size such as 50MiB"));
    let (number, bytes) =
        unit(&text, &[("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)]).ok_or_else(wrong)?;
    number.checked_mul(bytes).map(Some).ok_or_else(wrong)
}

/// Splits a whole number from its unit. Returns the number and the unit's value.
fn unit(text: &str, units: &[(&str, u64)]) -> Option<(u64, u64)> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(end);
    let &(_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    Some((number.parse().ok()?, factor))
}

impl<'de> Deserialize<'de> for Arrivals {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "poisson" => Ok(Self::Poisson),
            "uniform" => Ok(Self::Uniform),
            _ => Err(serde::de::Error::custom("arrivals must be \"poisson\" or \"uniform\"")),
        }
    }
}

fn demo_model() -> String {
    "tollgate-demo".to_owned()
}

fn one() -> u64 {
    1
}

fn one_u32() -> u32 {
    1
}

fn two() -> u32 {
    2
}

fn four() -> u32 {
    4
}

fn five() -> u32 {
    5
}

fn sixteen() -> u32 {
    16
}

fn hundred() -> u8 {
    100
}

fn three_seconds() -> Duration {
    Duration::from_secs(3)
}

#[cfg(test)]
mod tests;
