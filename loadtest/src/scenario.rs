//! A scenario: honest tenants, attackers, three phases, and what must hold. It
//! is a TOML file; the shipped ones are part of the program. Nothing is read
//! leniently: an unknown key, a span without unit, a sender without a tenant
//! is an error that says where.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::plan::Arrivals;

mod shipped;

pub use shipped::{SHIPPED, Shipped};

/// A scenario that can be played.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name in the report: its file's.
    #[serde(skip)]
    pub name: String,
    /// What it shows, in a sentence or two.
    pub about: String,
    /// The model that is asked.
    #[serde(default = "demo_model")]
    pub model: String,
    /// The same seed sends the same requests at the same times.
    #[serde(default = "one")]
    pub seed: u64,
    /// How long each part takes.
    pub phases: Phases,
    /// How it is found out what the gateway can do, where a rate asks for it.
    pub capacity: Option<Capacity>,
    /// Who must not be harmed.
    pub honest: Vec<Honest>,
    /// Who tries.
    #[serde(default)]
    pub attackers: Vec<Attacker>,
    /// What must hold.
    #[serde(default)]
    pub hold: Hold,
    /// The gateway that is started where none is named.
    #[serde(default)]
    pub gateway: OwnGateway,
}

/// The three parts of a run.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phases {
    /// The honest alone: their own baseline.
    #[serde(deserialize_with = "span")]
    pub alone: Duration,
    /// With the attackers.
    #[serde(deserialize_with = "span")]
    pub attack: Duration,
    /// The honest alone again.
    #[serde(deserialize_with = "span")]
    pub after: Duration,
}

/// A closed loop before the first phase, which finds how many requests of a
/// sender's kind are answered a second.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// Who asks; not one of the others, so that nobody's limits are spent.
    pub tenant: String,
    /// Its plan on a gateway of our own.
    pub plan: Option<String>,
    /// Requests at once.
    #[serde(default = "sixteen")]
    pub at_once: u32,
    /// For how long, for each kind of request.
    #[serde(deserialize_with = "span", default = "three_seconds")]
    pub seconds: Duration,
}

/// Tenants that ask what they may.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Honest {
    /// Their names; `name-{1..8}` stands for eight.
    #[serde(deserialize_with = "names")]
    pub tenants: Vec<String>,
    /// Their plan on a gateway of our own.
    pub plan: Option<String>,
    /// How much each of them sends.
    #[serde(flatten)]
    pub rate: Rate,
    /// How their requests are spaced.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// What they ask.
    #[serde(flatten)]
    pub ask: Ask,
    /// Percent of requests that stream.
    #[serde(default = "hundred")]
    pub stream: u8,
    /// Connections of each.
    #[serde(default = "two")]
    pub connections: u32,
}

/// How many requests a second; exactly one of these is given.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Rate {
    /// So many.
    pub rate: Option<f64>,
    /// So many times what the gateway can do.
    pub times_capacity: Option<f64>,
    /// So many times an equal share of it among all senders' tenants (a group
    /// of attackers counts as one).
    pub times_share: Option<f64>,
    /// Never more than this, whatever the multiple says.
    pub at_most: Option<f64>,
}

/// What a request asks.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Ask {
    /// The questions, in turn.
    #[serde(default)]
    pub prompts: Vec<String>,
    /// Words of filling in front of the question.
    #[serde(default)]
    pub prompt_words: u32,
    /// The most tokens an answer may have.
    pub max_tokens: Option<u32>,
}

/// What an attacker does.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Far more requests than its share.
    Flood,
    /// The same from many addresses.
    ManySources,
    /// The longest prompts that the model takes.
    CostlyPrompts,
    /// Small answers that reserve the largest.
    Hogs,
    /// Answers as long as can be.
    EndlessOutputs,
    /// Many keys or many tenants.
    Sybils,
    /// Leaves before the answer ends.
    EarlyLeavers,
    /// Sends again at once whatever is refused.
    RetryStorm,
    /// Asks for a stream and does not read it.
    SlowReaders,
    /// Connections that say nothing, or one header or byte at a time.
    Slowloris,
    /// Opens and resets HTTP/2 streams as fast as it can.
    RapidReset,
}

/// One attacker, or several alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attacker {
    /// What it does.
    pub kind: Kind,
    /// Whose keys it has; `trial-{1..50}` stands for fifty tenants.
    #[serde(deserialize_with = "names")]
    pub tenants: Vec<String>,
    /// Their plan on a gateway of our own.
    pub plan: Option<String>,
    /// Their pool on a gateway of our own.
    pub pool: Option<String>,
    /// Keys of each tenant.
    #[serde(default = "one_u32")]
    pub keys: u32,
    /// How much they send together.
    #[serde(flatten)]
    pub rate: Rate,
    /// What they ask.
    #[serde(flatten)]
    pub ask: Ask,
    /// Percent of requests that stream.
    #[serde(default = "hundred")]
    pub stream: u8,
    /// Addresses they come from (loopback targets only).
    #[serde(default = "one_u32")]
    pub sources: u32,
    /// Connections; at least one for each key and each address.
    #[serde(default = "four")]
    pub connections: u32,
    /// Retry storm: how often one request is sent again.
    #[serde(default = "five")]
    pub retries: u32,
    /// Early leavers: they leave at a random time up to this.
    #[serde(default, deserialize_with = "some_span")]
    pub leave_within: Option<Duration>,
    /// Slowloris: what is slow.
    #[serde(default)]
    pub slow: Slow,
    /// Rapid reset: whole requests, reset after this time, instead of at once.
    #[serde(default, deserialize_with = "some_span")]
    pub pace: Option<Duration>,
    /// What must hold: the gateway closes each connection within this time.
    #[serde(default, deserialize_with = "some_span")]
    pub closed_within: Option<Duration>,
}

/// The part of a connection that a slowloris draws out.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Slow {
    /// Not a byte, not even TLS.
    #[default]
    Silent,
    /// A header a second.
    Headers,
    /// A byte of body a second.
    Body,
}

/// What must hold; what is not given is not asked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hold {
    /// The part of honest requests, in and after the attack, answered whole.
    pub success: Option<f64>,
    /// Time to the first token in the attack, against alone.
    pub first_token: Option<Times>,
    /// Time between tokens in the attack, against alone.
    pub between_tokens: Option<Times>,
    /// How many times as long as the honest the attackers must wait for their
    /// first token (medians, in the attack): whoever asks too much waits, not
    /// whoever comes after him.
    pub ahead_of_attackers: Option<f64>,
    /// How soon after the attack the honest are as they were.
    #[serde(default, deserialize_with = "some_span")]
    pub recovery: Option<Duration>,
    /// By how much the gateway's memory may grow at most.
    #[serde(default, deserialize_with = "some_size")]
    pub memory_growth: Option<u64>,
    /// How many descriptors more than before may be open at the end.
    pub descriptors_growth: Option<u64>,
    /// Attackers' answered requests a second in the attack, as a multiple of
    /// those in the first phase, in which a retry storm plays without retries.
    pub accepted: Option<f64>,
    /// Answered tokens a second in the attack, as a part of capacity.
    pub goodput: Option<f64>,
    /// The largest part of device time in the attack that all attackers
    /// together may have had.
    pub attackers_share: Option<f64>,
}

/// Bounds on a latency, as multiples of the same alone.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// Half of them.
    pub p50: Option<f64>,
    /// The slowest hundredth.
    pub p99: Option<f64>,
    /// A growth up to this is fine whatever the multiple.
    #[serde(default, deserialize_with = "some_span")]
    pub or_added: Option<Duration>,
}

/// A gateway of our own for a scenario.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnGateway {
    /// Its config without the tenants, which follow from the senders.
    #[serde(default)]
    pub config: String,
}

/// A scenario that cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// No such file, nor a shipped one of the name.
    #[error("no scenario {0:?}; shipped are: {names}", names = shipped::names())]
    Unknown(String),
    /// The file cannot be read.
    #[error("scenario {name}")]
    Read {
        /// Which.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not a scenario.
    #[error("scenario {name}: {reason}")]
    Invalid {
        /// Which.
        name: String,
        /// What is wrong, and where.
        reason: String,
    },
}

impl Scenario {
    /// The shipped scenario of that name, or the file at that path.
    ///
    /// # Errors
    /// There is none, or it is not a scenario.
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

    /// Reads a scenario.
    ///
    /// # Errors
    /// The first thing that is wrong.
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
            return Err("no [[honest]]: without them nothing can be harmed".to_owned());
        }
        if self.phases.alone.is_zero() || self.whole() > Duration::from_secs(86_400) {
            return Err("phases: alone must be above 0, and all of them at most a day".to_owned());
        }
        if !self.attackers.is_empty() && self.phases.attack.is_zero() {
            return Err("phases: attackers want an attack that is longer than 0".to_owned());
        }
        for honest in &self.honest {
            honest.rate.check(self.capacity.is_some()).map_err(|e| format!("[[honest]]: {e}"))?;
            if honest.stream > 100 {
                return Err("[[honest]]: stream is 0 to 100 percent".to_owned());
            }
        }
        for attacker in &self.attackers {
            attacker.check(self.capacity.is_some()).map_err(|e| format!("[[attackers]]: {e}"))?;
        }
        let rates = self.honest.iter().map(|one| one.rate);
        let mut rates = rates.chain(self.attackers.iter().map(|one| one.rate));
        if self.hold.goodput.is_some() && !rates.any(Rate::wants_capacity) {
            let why = "no rate is a multiple of it, so that it is not measured";
            return Err(format!("[hold]: goodput is a part of capacity; {why}"));
        }
        let mut seen = BTreeSet::new();
        match self.tenants().into_iter().find(|tenant| !seen.insert(tenant.name.to_owned())) {
            Some(twice) => Err(format!("tenant {} stands in two places", twice.name)),
            None => Ok(()),
        }
    }

    /// All phases together.
    pub fn whole(&self) -> Duration {
        let Phases { alone, attack, after } = self.phases;
        alone + attack + after
    }

    /// Every tenant that a key is wanted of.
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

    /// The config of a gateway of our own, its tenants among it.
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
    /// Its name.
    pub name: &'a str,
    /// Its plan on a gateway of our own.
    pub plan: Option<String>,
    /// Its pool there.
    pub pool: Option<String>,
    /// How many keys of it are used.
    pub keys: u32,
}

impl Attacker {
    fn check(&self, has_capacity: bool) -> Result<(), String> {
        let kind = self.kind;
        let by_rate = !matches!(kind, Kind::SlowReaders | Kind::Slowloris | Kind::RapidReset);
        if by_rate {
            self.rate.check(has_capacity)?;
        } else if self.rate.is_given() {
            return Err(format!("{kind:?} has connections, not a rate"));
        }
        for (wrong, why) in [
            (self.stream > 100, "stream is 0 to 100 percent"),
            (self.keys == 0 || self.sources == 0, "keys and sources must be above 0"),
            (self.connections == 0, "connections must be above 0"),
            (
                self.keys > 1_000 || self.connections > 10_000,
                "at most 1,000 keys, 10,000 connections",
            ),
            (self.sources > 65_000, "at most 65,000 sources"),
            (
                kind == Kind::EarlyLeavers && self.leave_within.is_none(),
                "early leavers want leave_within",
            ),
        ] {
            if wrong {
                return Err(why.to_owned());
            }
        }
        Ok(())
    }

    /// The questions; each kind has its own where none is given.
    pub fn prompts(&self) -> Vec<String> {
        let usual = match self.kind {
            Kind::EndlessOutputs | Kind::SlowReaders => "Count from 1 to 400.",
            Kind::Hogs => "What is 2 plus 2?",
            _ => "Tell me a story.",
        };
        self.ask.texts(usual)
    }
}

impl Honest {
    /// The questions.
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

    /// The most tokens of an answer.
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
            return Err("one of rate, times_capacity and times_share is wanted".to_owned());
        };
        let is_rate = |figure: f64| figure.is_finite() && figure > 0.0 && figure <= 100_000.0;
        if !is_rate(figure) || !at_most.is_none_or(is_rate) {
            return Err("a rate is above 0 and at most 100,000".to_owned());
        }
        if rate.is_none() && !has_capacity {
            return Err("times_capacity and times_share want a [capacity]".to_owned());
        }
        Ok(())
    }

    /// Whether capacity must be known for it.
    pub fn wants_capacity(self) -> bool {
        self.rate.is_none() && self.is_given()
    }

    /// Requests a second, where `capacity` are answered and `sharers` share.
    pub fn per_second(self, capacity: f64, sharers: usize) -> f64 {
        let multiple = self.times_capacity.map(|times| times * capacity);
        let share = self.times_share.map(|times| times * capacity / sharers.max(1) as f64);
        let rate = self.rate.or(multiple).or(share).unwrap_or(1.0);
        rate.min(self.at_most.unwrap_or(f64::INFINITY)).clamp(0.01, 100_000.0)
    }
}

/// A list of names in which `a-{1..3}` stands for three.
fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let mut all = Vec::new();
    for name in Vec::<String>::deserialize(deserializer)? {
        match expand(&name) {
            Some(several) => all.extend(several),
            None => {
                return Err(serde::de::Error::custom(format!("{name:?} is no name nor a range")));
            }
        }
    }
    if all.is_empty() {
        return Err(serde::de::Error::custom("at least one tenant is wanted"));
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
    let wrong = || serde::de::Error::custom(format!("{text:?} is not a span such as 10s or 250ms"));
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

/// A whole number and what its unit stands for.
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
            _ => Err(serde::de::Error::custom("arrivals are \"poisson\" or \"uniform\"")),
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
