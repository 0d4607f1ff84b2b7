//! The run of a drill: measures the capacity if a rate needs it, then runs the
//! honest tenants alone, with the attackers, and alone again, and observes memory,
//! descriptors and shares of device time. The result is a [`Drill`];
//! [`crate::verdict`] judges it.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::runtime::{self, Runtime};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::client::{ClientError, Target};
use crate::clock;
use crate::scenario::{AttackKind, Scenario};

mod attack;
mod attackers;
mod capacity;
mod honest;
mod jobs;
mod random;
mod streams;
mod tally;
mod taught;
mod watch;
mod wire;

pub use attack::AttackerResult;
pub use capacity::MeasuredCapacity;
pub use honest::HonestSample;
pub use random::ShapeResult;
pub(crate) use tally::outcome as outcome_name;
pub use tally::{Live, Tally};
pub use watch::{GATEWAY, ProcessPoint, Shares, UsedPoint, held_by};

/// The gateway of a drill.
pub struct Stage {
    /// The keys of each tenant, as targets.
    pub keys: BTreeMap<String, Vec<Target>>,
    /// The admin listener with the gateway's metrics, if it is known.
    pub admin: Option<Target>,
    /// Processes of this machine that are observed, by name.
    pub processes: Vec<(String, u32)>,
    /// The log of the gateway and its workers, if it is a file of this machine.
    pub log: Option<PathBuf>,
    /// A host that may be attacked although it is not loopback.
    pub allowed_host: Option<String>,
}

impl Stage {
    /// Returns the process of the gateway, if it is among the observed ones.
    fn gateway_pid(&self) -> Option<u32> {
        let gateway = self.processes.iter().find(|(name, _)| name == GATEWAY);
        gateway.map(|(_, pid)| *pid)
    }
}

/// An error that stops a drill.
#[derive(Debug, thiserror::Error)]
pub enum DrillError {
    /// A tenant has too few keys.
    #[error("tenant {tenant} needs {wanted} keys and has {given}")]
    Keys {
        /// The tenant.
        tenant: String,
        /// The number of keys that the scenario uses.
        wanted: u32,
        /// The number of keys that were given.
        given: usize,
    },
    /// The target is not on this machine, and attacks on it were not allowed.
    #[error(
        "{host} is not this machine; attacks go to loopback only, unless \
         --allow-remote {host} confirms that the host is yours"
    )]
    NotLoopback {
        /// The target's host.
        host: String,
    },
    /// A connection failed before the drill.
    #[error("tenant {tenant}")]
    Connect {
        /// The tenant of the connection.
        tenant: String,
        /// The cause.
        source: ClientError,
    },
    /// The gateway answers no request, so there is nothing to measure.
    #[error("the gateway answers no request: {0}")]
    NothingAnswered(String),
    /// The threads of the attackers cannot be started.
    #[error("cannot start the attackers' threads")]
    Threads(#[source] io::Error),
    /// The log of the gateway cannot be read.
    #[error("cannot read the gateway's log")]
    Log(#[source] io::Error),
    /// The drill was stopped.
    #[error("stopped before the end, so there is no verdict")]
    Stopped,
}

/// A part of a run, in seconds from its start.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Span {
    /// The begin.
    pub from: f64,
    /// The end.
    pub to: f64,
}

impl Span {
    /// Returns true if `at` is within the span.
    pub fn holds(&self, at: f64) -> bool {
        self.from <= at && at < self.to
    }

    /// Returns the length in seconds.
    pub fn seconds(&self) -> f64 {
        self.to - self.from
    }
}

/// The observations of a drill.
#[derive(Debug)]
pub struct Drill {
    /// The time of the start.
    pub started: SystemTime,
    /// The phase of the honest tenants alone.
    pub alone: Span,
    /// The phase of the attack.
    pub attack: Span,
    /// The phase after the attack.
    pub after: Span,
    /// The capacity of the gateway, for each measured kind of request.
    pub capacity: Vec<MeasuredCapacity>,
    /// The honest requests.
    pub honest: Vec<HonestSample>,
    /// The attackers, in the scenario's order.
    pub attackers: Vec<AttackerResult>,
    /// Memory and descriptors of each process over time.
    pub processes: BTreeMap<String, Vec<ProcessPoint>>,
    /// The use of each tenant over time.
    pub shares: Shares,
    /// The lines of the gateway's log about panics, if the log is known.
    pub panics: Option<Vec<String>>,
}

/// The state that all senders share.
pub(crate) struct Ground {
    pub(crate) scenario: Scenario,
    pub(crate) live: Arc<Live>,
    pub(crate) started: Instant,
    pub(crate) stop: CancellationToken,
    /// The process of the gateway, if it runs on this machine and is observed.
    pub(crate) gateway_pid: Option<u32>,
    /// True if senders can use many addresses of this machine.
    pub(crate) may_choose_source: bool,
}

impl Ground {
    /// Returns the seconds since the start.
    pub(crate) fn at(&self, instant: Instant) -> f64 {
        instant.saturating_duration_since(self.started).as_secs_f64()
    }
}

/// Runs `scenario` on `stage`. `live` shows the progress; `stop` ends the drill
/// early, without a result.
///
/// # Errors
/// The drill cannot run there, or it was stopped.
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
    let started = clock::date();
    let ground = Arc::new(Ground {
        scenario: scenario.clone(),
        live,
        started: clock::now(),
        stop: stop.clone(),
        gateway_pid: stage.gateway_pid(),
        may_choose_source,
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
            let sender = honest::HonestSender::new(&ground, number, tenant, target, rate);
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
    let mut seen: Vec<(usize, AttackerResult)> = attacked;
    seen.sort_by_key(|(number, _)| *number);
    let mut samples: Vec<HonestSample> = asked.into_iter().flatten().collect();
    samples.sort_by(|a, b| a.due.total_cmp(&b.due));
    let panics = stage.log.as_deref().map(watch::panics_in);
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
        panics: panics.transpose().map_err(DrillError::Log)?,
    })
}

/// The threads of the attackers, which stand for other machines. On this machine
/// they have a lower priority than the honest tenants, the gateway and its workers.
/// Otherwise the attackers' own client work would delay honest requests.
struct Crowd(Option<Runtime>);

impl Crowd {
    /// The difference in niceness to the process. At half load the threads still
    /// get all the time that they need.
    const NICER: i32 = 10;

    fn gather() -> io::Result<Self> {
        let give_way = || {
            // Fails only if the lowest priority is reached already.
            let _ = rustix::process::nice(Self::NICER);
        };
        let threads = runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_name("attackers")
            .on_thread_start(give_way)
            .build()?;
        Ok(Self(Some(threads)))
    }

    #[expect(clippy::expect_used, reason = "only the drop takes the runtime")]
    fn on(&self) -> &runtime::Handle {
        self.0.as_ref().expect("there until it is dropped").handle()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // An asynchronous task must not wait for the threads.
        if let Some(threads) = self.0.take() {
            threads.shutdown_background();
        }
    }
}

/// Shows the current phase in the progress.
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

/// Returns true if the gateway is on this machine with an IPv4 address, so that
/// senders can use many addresses. Refuses any other host unless it is allowed.
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

/// Returns true if the attacker also sends before the attack.
pub(crate) fn plays_before(kind: AttackKind) -> bool {
    kind == AttackKind::RetryStorm
}

#[cfg(test)]
mod tests;
