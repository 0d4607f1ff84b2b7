//! Plays a scenario: finds capacity where a rate asks for it, then the honest
//! alone, with the attackers, and alone again, while memory, descriptors and
//! shares of device time are watched. What it saw is a [`Drill`]; whether it
//! is good is [`crate::verdict`]'s to say.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::runtime::{self, Runtime};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::client::{ClientError, Target};
use crate::scenario::{Kind, Scenario};

mod attackers;
mod capacity;
mod honest;
mod tally;
mod watch;
mod wire;

pub use attackers::AttackerSeen;
pub use capacity::Found;
pub use honest::HonestSample;
pub(crate) use tally::outcome as outcome_name;
pub use tally::{Live, Tally};
pub use watch::{GATEWAY, ProcessPoint, Shares, held_by};

/// Where a scenario is played.
pub struct Stage {
    /// Each tenant's keys, each as a target of the gateway.
    pub keys: BTreeMap<String, Vec<Target>>,
    /// The admin listener, whose `/metrics` says what the gateway holds.
    pub admin: Option<Target>,
    /// Processes of this machine that are watched beside it, by name.
    pub processes: Vec<(String, u32)>,
    /// A host that is attacked although it is not loopback.
    pub allowed_host: Option<String>,
}

/// Why a scenario could not be played.
#[derive(Debug, thiserror::Error)]
pub enum DrillError {
    /// A tenant has no key, or too few.
    #[error("tenant {tenant} wants {wanted} keys and has {given}")]
    Keys {
        /// Whose.
        tenant: String,
        /// How many are used.
        wanted: u32,
        /// How many there are.
        given: usize,
    },
    /// The target is not on this machine, and nobody allowed that.
    #[error(
        "{host} is not this machine: attacks go to loopback only, unless --allow-remote {host} \
         says that this very host is yours to attack"
    )]
    NotLoopback {
        /// Whose host.
        host: String,
    },
    /// The gateway cannot be reached before the start.
    #[error("tenant {tenant}")]
    Connect {
        /// Whose connection.
        tenant: String,
        /// Why.
        source: ClientError,
    },
    /// It answers nothing, so that there is nothing to measure.
    #[error("the gateway answers nothing: {0}")]
    NothingAnswered(String),
    /// The system gives no threads to attack with.
    #[error("no threads for the attackers")]
    Threads(#[source] io::Error),
    /// It was told to stop.
    #[error("stopped before its end: nothing can be said")]
    Stopped,
}

/// A part of a run, in seconds from its start.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Span {
    /// Its begin.
    pub from: f64,
    /// Its end.
    pub to: f64,
}

impl Span {
    /// Whether `at` lies in it.
    pub fn holds(&self, at: f64) -> bool {
        self.from <= at && at < self.to
    }

    /// Its length in seconds.
    pub fn seconds(&self) -> f64 {
        self.to - self.from
    }
}

/// Everything that a run saw.
#[derive(Debug)]
pub struct Drill {
    /// When it began.
    pub started: SystemTime,
    /// The honest alone.
    pub alone: Span,
    /// With the attackers.
    pub attack: Span,
    /// The honest alone again.
    pub after: Span,
    /// What the gateway can do, for each kind of request that was asked for.
    pub capacity: Vec<Found>,
    /// Every honest request.
    pub honest: Vec<HonestSample>,
    /// Every attacker, in the scenario's order.
    pub attackers: Vec<AttackerSeen>,
    /// Memory and descriptors of each process over time.
    pub processes: BTreeMap<String, Vec<ProcessPoint>>,
    /// Device time of each tenant over time.
    pub shares: Shares,
}

/// What senders share.
pub(crate) struct Ground {
    pub(crate) scenario: Scenario,
    pub(crate) live: Arc<Live>,
    pub(crate) started: Instant,
    pub(crate) stop: CancellationToken,
}

impl Ground {
    /// Seconds since the start.
    pub(crate) fn at(&self, instant: Instant) -> f64 {
        instant.saturating_duration_since(self.started).as_secs_f64()
    }
}

/// Plays `scenario` on `stage`; `live` says meanwhile how it goes, `stop` ends
/// it early, without a result.
///
/// # Errors
/// It cannot be played there, or was stopped.
pub async fn play(
    scenario: &Scenario,
    stage: &Stage,
    live: Arc<Live>,
    stop: CancellationToken,
) -> Result<Drill, DrillError> {
    check_keys(scenario, stage)?;
    let may_choose_source = check_target(scenario, stage).await?;
    live.enter("finding capacity", Duration::ZERO);
    let capacity = tokio::select! {
        found = capacity::find(scenario, stage) => found?,
        () = stop.cancelled() => return Err(DrillError::Stopped),
    };
    let started = SystemTime::now();
    let ground = Arc::new(Ground {
        scenario: scenario.clone(),
        live,
        started: Instant::now(),
        stop: stop.clone(),
    });
    let watching = watch::Watch::start(&ground, stage);
    let sharers = scenario.honest.iter().map(|group| group.tenants.len()).sum::<usize>()
        + scenario.attackers.len();
    let mut honest = JoinSet::new();
    for (number, group) in scenario.honest.iter().enumerate() {
        let found = capacity::of(&capacity, &group.prompts(), group.ask.most_tokens());
        let rate = group.rate.per_second(found, sharers);
        for tenant in &group.tenants {
            let target = stage.keys[tenant][0].clone();
            let sender = honest::Sender::new(&ground, number, tenant, target, rate);
            honest.spawn(sender.run(Arc::clone(&ground)));
        }
    }
    let crowd = Crowd::gather().map_err(DrillError::Threads)?;
    let mut attackers = JoinSet::new();
    for (number, attacker) in scenario.attackers.iter().enumerate() {
        let found = capacity::of(&capacity, &attacker.prompts(), attacker.ask.most_tokens());
        let rate = attacker.rate.per_second(found, sharers);
        let targets = attackers::targets(attacker, number, stage, may_choose_source);
        attackers.spawn_on(attackers::run(Arc::clone(&ground), number, targets, rate), crowd.on());
    }
    let alone = scenario.phases.alone;
    let phases = follow_phases(Arc::clone(&ground));
    let (attacked, asked, ()) = tokio::join!(attackers.join_all(), honest.join_all(), phases);
    let (processes, shares) = watching.end().await;
    if stop.is_cancelled() {
        return Err(DrillError::Stopped);
    }
    let mut seen: Vec<(usize, AttackerSeen)> = attacked;
    seen.sort_by_key(|(number, _)| *number);
    let mut samples: Vec<HonestSample> = asked.into_iter().flatten().collect();
    samples.sort_by(|a, b| a.due.total_cmp(&b.due));
    let end_of = |span: Duration| span.as_secs_f64();
    let (first, second) = (end_of(alone), end_of(alone + scenario.phases.attack));
    Ok(Drill {
        started,
        alone: Span { from: 0.0, to: first },
        attack: Span { from: first, to: second },
        after: Span { from: second, to: end_of(scenario.whole()) },
        capacity,
        honest: samples,
        attackers: seen.into_iter().map(|(_, seen)| seen).collect(),
        processes,
        shares,
    })
}

/// Where attackers run. They stand for other people's machines: on this one
/// their threads give way to those of the honest, of the gateway and of its
/// workers, or else it is their own client's work that makes the honest wait.
struct Crowd(Option<Runtime>);

impl Crowd {
    /// How much nicer than the process its threads are: at half load they
    /// still get all that they want.
    const NICER: i32 = 10;

    fn gather() -> io::Result<Self> {
        let give_way = || {
            // Refused only where nobody can be nicer any more.
            let _ = rustix::process::nice(Self::NICER);
        };
        let threads = runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_name("attackers")
            .on_thread_start(give_way)
            .build()?;
        Ok(Self(Some(threads)))
    }

    fn on(&self) -> &runtime::Handle {
        self.0.as_ref().expect("there until it is dropped").handle()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // Waiting for its threads is not possible where tasks run.
        if let Some(threads) = self.0.take() {
            threads.shutdown_background();
        }
    }
}

/// Tells whoever watches which phase it is.
async fn follow_phases(ground: Arc<Ground>) {
    let phases = ground.scenario.phases;
    let mut end = ground.started;
    for (name, span) in
        [("alone", phases.alone), ("attack", phases.attack), ("after", phases.after)]
    {
        ground.live.enter(name, span);
        end += span;
        tokio::select! {
            () = tokio::time::sleep_until(end) => {}
            () = ground.stop.cancelled() => return,
        }
    }
    ground.live.enter("last answers", Duration::ZERO);
}

fn check_keys(scenario: &Scenario, stage: &Stage) -> Result<(), DrillError> {
    for wanted in scenario.tenants() {
        let given = stage.keys.get(wanted.name).map_or(0, Vec::len);
        if given < wanted.keys as usize {
            let tenant = wanted.name.to_owned();
            return Err(DrillError::Keys { tenant, wanted: wanted.keys, given });
        }
    }
    Ok(())
}

/// Whether the gateway is on this machine by an IPv4 address, so that senders
/// may come from many addresses. Attackers go nowhere else unless allowed.
async fn check_target(scenario: &Scenario, stage: &Stage) -> Result<bool, DrillError> {
    let mut all_loopback = true;
    for wanted in scenario.tenants() {
        let target = &stage.keys[wanted.name][0];
        let tenant = wanted.name.to_owned();
        let found = target.addresses().await;
        let addresses = found.map_err(|source| DrillError::Connect { tenant, source })?;
        let is_v4_loopback = |ip: IpAddr| ip.is_loopback() && ip.is_ipv4();
        all_loopback &= addresses.iter().any(|address| is_v4_loopback(address.ip()));
        let host = target.host();
        let is_here = addresses.iter().all(|address| address.ip().is_loopback());
        let is_allowed = stage.allowed_host.as_deref() == Some(host);
        if !scenario.attackers.is_empty() && !is_here && !is_allowed {
            return Err(DrillError::NotLoopback { host: host.to_owned() });
        }
        all_loopback &= is_here;
    }
    Ok(all_loopback)
}

/// Whether the attacker plays before the attack, too.
pub(crate) fn plays_before(kind: Kind) -> bool {
    kind == Kind::RetryStorm
}

#[cfg(test)]
mod tests;
