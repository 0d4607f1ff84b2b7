//! The plan of a load: its tenants, rate and prompts. A seed fixes the due time of
//! each request before the first one is sent, so a slow server cannot slow the load
//! down.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::client::{Protocol, Target};
use crate::prompts::Prompts;
use crate::rates::Rates;

/// A load for one gateway.
#[derive(Clone)]
pub struct Load {
    /// The sending tenants. Each request is sent by a random one.
    pub tenants: Vec<Tenant>,
    /// The requested model.
    pub model: String,
    /// The requests a second over all tenants.
    pub rates: Rates,
    /// The time in which requests are due. The run waits for answers beyond it.
    pub duration: Duration,
    /// The distribution of the times between requests.
    pub arrivals: Arrivals,
    /// Percentage of requests with a streamed answer, 0 to 100.
    pub stream_percent: u8,
    /// The prompts.
    pub prompts: Prompts,
    /// The largest number of tokens in an answer, unless a prompt has its own.
    pub max_tokens: NonZeroU32,
    /// Connections of each tenant, opened before the run begins.
    pub connections: NonZeroU32,
    /// The HTTP version.
    pub protocol: Protocol,
    /// The largest number of requests in flight. A request that is due beyond it is
    /// not sent and counted as such.
    pub in_flight: NonZeroU32,
    /// The time after which a missing answer is an error.
    pub timeout: Duration,
    /// The random seed. The same seed gives the same due times and order.
    pub seed: u64,
}

/// A sending tenant.
#[derive(Clone)]
pub struct Tenant {
    /// The tenant's name in the report.
    pub name: String,
    /// The gateway, with the tenant's key.
    pub target: Target,
}

/// The spacing of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrivals {
    /// Exponential gaps, like independent callers.
    #[default]
    Poisson,
    /// Even gaps.
    Uniform,
}

impl Arrivals {
    /// Returns the seconds to the next request.
    pub(crate) fn gap(self, rate: f64, random: &mut Random) -> f64 {
        match self {
            Self::Uniform => 1.0 / rate,
            Self::Poisson => -(1.0 - random.unit()).ln() / rate,
        }
    }
}

/// A load that cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A number that is out of range.
    #[error("{0}")]
    Invalid(&'static str),
    /// A connection cannot be opened before the run.
    #[error("tenant {tenant}")]
    Connect {
        /// The tenant of the connection.
        tenant: String,
        /// The cause.
        source: crate::client::ClientError,
    },
}

/// A planned request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Due {
    /// The due time, from the start of the run.
    pub at: Duration,
    /// Index of the tenant.
    pub tenant: usize,
    /// The number of the prompt, from 0.
    pub prompt: usize,
    /// True if the answer is streamed.
    pub stream: bool,
}

/// The largest number of requests in a load.
const MOST_REQUESTS: usize = 5_000_000;

impl Load {
    /// Returns every request of the load in the order of due times.
    ///
    /// # Errors
    /// [`LoadError::Invalid`] if a number is out of range.
    pub fn schedule(&self) -> Result<Vec<Due>, LoadError> {
        self.check()?;
        let mut random = Random(self.seed);
        let times = self.rates.times(self.duration.as_secs_f64(), self.arrivals, &mut random);
        let due = times.into_iter().enumerate().map(|(number, at)| Due {
            at: Duration::from_secs_f64(at),
            tenant: random.below(self.tenants.len()),
            prompt: number,
            stream: random.below(100) < usize::from(self.stream_percent),
        });
        Ok(due.collect())
    }

    fn check(&self) -> Result<(), LoadError> {
        let seconds = self.duration.as_secs_f64();
        for (wrong, why) in [
            (self.tenants.is_empty(), "a load needs at least one tenant"),
            (self.prompts.is_empty(), "a load needs at least one prompt"),
            (self.duration.is_zero(), "the duration must be above 0"),
            (self.stream_percent > 100, "the streamed share must be 0 to 100 percent"),
        ] {
            if wrong {
                return Err(LoadError::Invalid(why));
            }
        }
        if let Some(why) = self.rates.mistake(seconds) {
            return Err(LoadError::Invalid(why));
        }
        if self.rates.count(seconds) > MOST_REQUESTS as f64 {
            return Err(LoadError::Invalid("rate x duration must not exceed 5,000,000 requests"));
        }
        Ok(())
    }
}

/// The random generator SplitMix64 (Steele, Lea, Flood: "Fast splittable
/// pseudorandom number generators", OOPSLA 2014). It is good enough for due times
/// and gives the same numbers on every host.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Puts `items` into a random order (Fisher and Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::prompts::Prompt;

    pub(crate) fn load(rate: f64, seconds: u64, arrivals: Arrivals, target: Target) -> Load {
        let tenant = |name: &str| Tenant { name: name.into(), target: target.clone() };
        Load {
            tenants: vec![tenant("a"), tenant("b")],
            model: "m".into(),
            rates: Rates::constant(rate),
            duration: Duration::from_secs(seconds),
            arrivals,
            stream_percent: 50,
            prompts: Prompts::InTurn(vec![Prompt::text("x")]),
            max_tokens: NonZeroU32::MIN,
            connections: NonZeroU32::MIN,
            protocol: Protocol::Either,
            in_flight: NonZeroU32::MAX,
            timeout: Duration::from_secs(5),
            seed: 1,
        }
    }

    fn nowhere() -> Target {
        let folder = tempfile::tempdir().expect("a folder");
        let ca = folder.path().join("ca.pem");
        let key = rcgen::KeyPair::generate().expect("a key");
        let made = rcgen::CertificateParams::new(vec!["localhost".to_owned()])
            .and_then(|parameters| parameters.self_signed(&key))
            .expect("a certificate");
        std::fs::write(&ca, made.pem()).expect("writes");
        Target::new("https://localhost:1", &ca, "key").expect("a target")
    }

    #[test]
    fn schedule_follows_rate_and_seed() {
        for arrivals in [Arrivals::Poisson, Arrivals::Uniform] {
            let load = load(100.0, 50, arrivals, nowhere());
            let due = load.schedule().expect("valid");
            // 5,000 are expected; the standard deviation of a Poisson count is its
            // root, 71.
            assert!((4_700..=5_300).contains(&due.len()), "{}", due.len());
            assert!(due.windows(2).all(|pair| pair[0].at <= pair[1].at));
            let first: usize = due.iter().filter(|d| d.tenant == 0).count();
            assert!((first as f64 / due.len() as f64 - 0.5).abs() < 0.05);
            assert_eq!(due, load.schedule().expect("valid"));
        }
    }

    #[test]
    fn schedule_refuses_invalid_loads() {
        let good = load(1.0, 1, Arrivals::Uniform, nowhere());
        type Spoil = fn(&mut Load);
        let cases: [(&str, Spoil); 5] = [
            ("tenant", |load| load.tenants.clear()),
            ("prompt", |load| load.prompts = Prompts::InTurn(Vec::new())),
            ("rate", |load| load.rates = Rates::constant(f64::NAN)),
            ("percent", |load| load.stream_percent = 101),
            ("5,000,000", |load| load.rates = Rates::constant(1e9)),
        ];
        for (named, spoil) in cases {
            let mut load = good.clone();
            spoil(&mut load);
            let error = load.schedule().expect_err(named).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
