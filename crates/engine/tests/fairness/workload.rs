//! Workloads: tenants and their requests in order of time, made from a seed alone.

use std::time::Duration;

use tollgate_domain::Tier;
use tollgate_engine::backend::synthetic::StepCost;

/// A load on one engine.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) tenants: Vec<Tenant>,
    /// Requests in order of time.
    pub(crate) asks: Vec<Ask>,
    /// Duration of the load.
    pub(crate) lasts: Duration,
    /// Requests that a tenant other than a victim may have under way; others are refused before
    /// they reach the engine, as a plan's `concurrent` and `queued` do.
    pub(crate) most_open: Option<u32>,
    pub(crate) device: Device,
}

/// A device: its cost formula, and the tokens that its KV cache holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) cost: StepCost,
    pub(crate) kv_tokens: u32,
}

impl Default for Device {
    /// Returns the device of the figures in the literature: an A10G with 10,000 tokens.
    fn default() -> Self {
        Self { cost: StepCost::default(), kv_tokens: 10_000 }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    /// Pool that the tenant belongs to, if any.
    pub(crate) pool: Option<&'static str>,
    /// Weight of the tenant or of its pool.
    pub(crate) weight: f64,
    /// Class of service of the tenant's requests.
    pub(crate) tier: Tier,
    /// True for a victim, whose waits are measured.
    pub(crate) is_victim: bool,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ask {
    pub(crate) at: Duration,
    /// Index of the tenant.
    pub(crate) tenant: usize,
    pub(crate) key: u32,
    pub(crate) size: Size,
    /// Answers to the prompt, each of the same length.
    pub(crate) choices: u32,
    /// Wait after which the client cancels the request, if it does.
    pub(crate) patience: Option<Duration>,
}

/// The size of a request, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Size {
    pub(crate) prompt: u32,
    /// Tokens of the answer.
    pub(crate) answer: u32,
    /// Value of `max_tokens`.
    pub(crate) max_tokens: u32,
}

impl Size {
    /// Creates a size whose answer has as many tokens as requested.
    pub(crate) const fn of(prompt: u32, answer: u32) -> Self {
        Self { prompt, answer, max_tokens: answer }
    }
}

/// The load of one tenant: independent requests at a rate that may change.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    pub(crate) name: String,
    pub(crate) pool: Option<&'static str>,
    pub(crate) weight: f64,
    pub(crate) tier: Tier,
    pub(crate) is_victim: bool,
    pub(crate) keys: u32,
    pub(crate) size: Size,
    pub(crate) rate: Rate,
    /// Requests that are sent at the same moment. The rate counts all of them.
    pub(crate) burst: u32,
    pub(crate) choices: u32,
    /// Wait after which every second request is cancelled.
    pub(crate) patience: Option<Duration>,
}

/// A rate of requests per second over time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rate {
    Steady(f64),
    /// This rate in every other span of this length; the first span is silent.
    OffOn(f64, Duration),
    /// This rate up to this moment, and none after it.
    Until(f64, Duration),
    /// Linear growth from the first rate to the second.
    Rising(f64, f64),
}

impl Sender {
    pub(crate) fn new(name: &str, rate: f64, size: Size) -> Self {
        let rate = Rate::Steady(rate);
        let name = name.to_owned();
        Self {
            name,
            pool: None,
            weight: 1.0,
            tier: Tier::Interactive,
            is_victim: false,
            keys: 1,
            size,
            rate,
            burst: 1,
            choices: 1,
            patience: None,
        }
    }
}

impl Workload {
    /// Creates the requests of all senders over `lasts`, drawn with `seed`.
    pub(crate) fn new(senders: &[Sender], lasts: Duration, seed: u64) -> Self {
        let mut asks = Vec::new();
        for (tenant, sender) in senders.iter().enumerate() {
            // Each sender has its own generator, so more requests of one sender change no
            // other.
            let mut random = Random(seed.wrapping_mul(1_000_003).wrapping_add(tenant as u64));
            asks.extend(sender.asks(tenant, lasts, &mut random));
        }
        asks.sort_by_key(|ask| (ask.at, ask.tenant));
        let tenants = senders.iter().map(|sender| Tenant {
            name: sender.name.clone(),
            pool: sender.pool,
            weight: sender.weight,
            tier: sender.tier,
            is_victim: sender.is_victim,
        });
        Self { tenants: tenants.collect(), asks, lasts, most_open: None, device: Device::default() }
    }

    /// Adds a tenant whose `lines` requests of one size all come at the start.
    pub(crate) fn with_file(mut self, name: &str, tier: Tier, (lines, size): (u32, Size)) -> Self {
        let tenant = self.tenants.len();
        self.tenants.push(Tenant {
            name: name.to_owned(),
            pool: None,
            weight: 1.0,
            tier,
            is_victim: false,
        });
        let line = Ask { at: Duration::ZERO, tenant, key: 0, size, choices: 1, patience: None };
        self.asks.splice(0..0, std::iter::repeat_n(line, lines as usize));
        self
    }
}

impl Sender {
    /// Poisson arrivals, thinned where the rate is below its maximum.
    fn asks(&self, tenant: usize, lasts: Duration, random: &mut Random) -> Vec<Ask> {
        let mut asks = Vec::new();
        let mut at = 0.0;
        loop {
            at -= ln(1.0 - random.unit()) / self.rate.highest() * f64::from(self.burst);
            if at >= lasts.as_secs_f64() {
                return asks;
            }
            let kept = random.unit() * self.rate.highest() < self.rate.at(at, lasts);
            for _ in 0..self.burst {
                let key = random.below(self.keys);
                let patience = self.patience.filter(|_| random.below(2) == 0);
                if kept {
                    let at = Duration::from_secs_f64(at);
                    let &Self { size, choices, .. } = self;
                    asks.push(Ask { at, tenant, key, size, choices, patience });
                }
            }
        }
    }
}

impl Rate {
    fn highest(self) -> f64 {
        match self {
            Self::Steady(rate) | Self::OffOn(rate, _) | Self::Until(rate, _) => rate,
            Self::Rising(from, to) => from.max(to),
        }
    }

    fn at(self, at: f64, lasts: Duration) -> f64 {
        match self {
            Self::Steady(rate) => rate,
            Self::OffOn(rate, span) => {
                let is_on = (at / span.as_secs_f64()) as u64 % 2 == 1;
                if is_on { rate } else { 0.0 }
            }
            Self::Until(rate, end) => {
                if at < end.as_secs_f64() {
                    rate
                } else {
                    0.0
                }
            }
            Self::Rising(from, to) => from + (to - from) * at / lasts.as_secs_f64(),
        }
    }
}

/// Returns the natural logarithm of a number above 0, with sums and products only. A
/// library function may differ in its last bit between machines, and the whole load with
/// it.
fn ln(x: f64) -> f64 {
    let exponent = i32::try_from(x.to_bits() >> 52).expect("eleven bits") - 1_023;
    let mantissa = f64::from_bits(x.to_bits() & (u64::MAX >> 12) | 1_023 << 52);
    // ln m = 2 artanh((m - 1) / (m + 1)), and the argument is below a third.
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let square = ratio * ratio;
    let series = (0..20).rev().fold(0.0, |sum, n| sum * square + 1.0 / f64::from(2 * n + 1));
    f64::from(exponent) * std::f64::consts::LN_2 + 2.0 * ratio * series
}

/// The SplitMix64 generator (Steele, Lea, Flood: "Fast splittable pseudorandom number
/// generators", OOPSLA 2014): the same on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
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

    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u32
    }
}
