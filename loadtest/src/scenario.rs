//! A scenario: honest tenants, attackers, three phases and expectations, in a TOML
//! file. The built-in scenarios are part of the program. An unknown key, a duration
//! without a unit or a sender without a tenant is an error that names its place.
//!
//! This file reads and checks a whole scenario; the modules have its sections.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

mod attackers;
mod expectations;
mod senders;
mod shipped;
mod values;

pub use attackers::{AttackKind, Attacker, Slow};
pub use expectations::{Hold, Times};
pub use senders::{Ask, Capacity, Honest, Rate};
pub use shipped::{SHIPPED, Shipped};

use values::{demo_model, one, span};

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
        let is_file = name.ends_with(".toml") || name.contains('/');
        if !is_file {
            return Self::parse(name, Shipped::find(name)?.text);
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

    /// Sets the number of random shapes, with an attack that is long enough for them
    /// on a small machine.
    ///
    /// # Errors
    /// The scenario plays no random shapes, or the number is not allowed.
    pub fn set_requests(&mut self, requests: u32) -> Result<(), String> {
        let mut attackers = self.attackers.iter_mut();
        let attacker = attackers.find(|attacker| attacker.kind == AttackKind::RandomShapes);
        let attacker = attacker.ok_or("only a scenario with random shapes takes --requests")?;
        attacker.requests = requests;
        self.phases.attack = TIME_OF_SHAPE * requests + Duration::from_secs(2);
        self.check()
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

/// Time that a random shape takes at most on average on a small machine.
const TIME_OF_SHAPE: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests;
