//! The gateway's place among those that share its database server: it tells the others that it
//! runs and which keys it has read, and divides rates and places by their number.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{MonotonicTime, UtcTime, WorkerName};
use tollgate_ledger::caps::Home;
use tollgate_ledger::gateways::{
    Beat, GatewayStart, Membership, MembershipError, OtherGateway, Silence,
};
use tollgate_serving::boot_clock::BootTime;
use tollgate_serving::limits::Limits;
use tollgate_serving::{Clock, Serving};

use crate::api::jobs::JobsApi;
use crate::auth::KeyStore;

/// The last answer of the server that several gateways share: their number, and its clock.
/// Clones share it. Before the first answer, and without a server, there is one gateway and its
/// own clock.
#[derive(Clone)]
pub(crate) struct Peers(Arc<LastBeat>);

struct LastBeat {
    gateways: AtomicU32,
    /// The server's clock minus this machine's, in nanoseconds.
    ahead: AtomicI64,
    clock: Clock,
}

impl Peers {
    pub(crate) fn new(clock: Clock) -> Self {
        Self(Arc::new(LastBeat { gateways: AtomicU32::new(1), ahead: AtomicI64::new(0), clock }))
    }

    /// Returns the number of gateways that run, at least 1.
    pub(crate) fn gateways(&self) -> NonZeroU32 {
        // Relaxed: the number guards no other memory.
        NonZeroU32::new(self.0.gateways.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
    }

    /// Returns the time by the server's clock, which all gateways share.
    pub(crate) fn utc(&self) -> UtcTime {
        let ahead = self.0.ahead.load(Ordering::Relaxed);
        UtcTime(self.0.clock.utc().0.saturating_add_signed(ahead))
    }

    fn set(&self, beat: Beat) {
        let own = i128::from(self.0.clock.utc().0);
        let ahead = i64::try_from(i128::from(beat.time.0) - own).unwrap_or(0);
        self.0.ahead.store(ahead, Ordering::Relaxed);
        self.0.gateways.store(beat.gateways, Ordering::Relaxed);
    }
}

/// The limits that are divided among gateways.
pub(crate) struct Divided<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) jobs: &'a JobsApi,
    pub(crate) now: MonotonicTime,
}

/// Joins the gateways that share the server of `keys`; `None` if the keys are in a file. The
/// limits are divided before this gateway serves. `home` is the identity of its data folder, and
/// `workers` are given if other gateways may use all of them.
///
/// # Errors
/// The server cannot be used.
pub(crate) async fn join(
    keys: &KeyStore,
    (address, home, workers): (SocketAddr, Option<&Home>, Option<Vec<WorkerName>>),
    divided: Divided<'_>,
) -> Result<Option<Membership>, MembershipError> {
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = format!("{machine} {address}");
    let (keys, home) = (keys.clone(), home.map(|home| (home.id.clone(), home.life)));
    // The server's answer is waited for in a blocking call.
    let joined = tokio::task::spawn_blocking(move || -> Result<_, MembershipError> {
        let workers = workers.as_deref();
        let start = home.as_ref().map(|(home, life)| GatewayStart { home, life: *life, workers });
        let Some(mut membership) = keys.join_gateways(&name, start.as_ref())? else {
            return Ok(None);
        };
        let beat = membership.beat(keys.generation())?;
        Ok(Some((membership, beat)))
    });
    // A blocking task fails only while the runtime stops.
    let Ok(joined) = joined.await else { return Ok(None) };
    let Some((membership, beat)) = joined? else { return Ok(None) };
    divided.jobs.peers().set(beat);
    divide(&divided);
    tracing::info!(
        number = membership.number(),
        gateways = beat.gateways,
        "joined the gateways on the database server; they share limits"
    );
    Ok(Some(membership))
}

/// Beats until `stop`, and divides the limits anew when the number of gateways has changed.
/// While the server does not answer, the last number counts. A failure is logged once.
pub(crate) async fn follow(
    mut membership: Membership,
    keys: KeyStore,
    (serving, jobs): (Arc<Serving>, JobsApi),
    watched: Option<Watched>,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut silence = Silence::default();
    let (mut told, mut last, mut since, mut is_failing) = (None, None, 0, false);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => {}
        }
        let generation = keys.generation();
        since += 1;
        // At once after new keys, because an admin waits to hear of a revocation.
        if told == Some(generation) && since < TICKS_OF_A_BEAT {
            continue;
        }
        since = 0;
        let beaten = tokio::task::spawn_blocking(move || {
            let beat = membership.beat(generation);
            let beat = beat.and_then(|beat| Ok((beat, membership.others()?)));
            (membership, beat)
        });
        let Ok((back, beat)) = beaten.await else { return };
        membership = back;
        match beat {
            Ok((beat, _)) if beat.is_retired => {
                tracing::error!(
                    "another gateway has taken this one for lost, because it did not reach the database server for long; it ends, and must be started again"
                );
                watched.iter().for_each(|watched| watched.retired.cancel());
                break;
            }
            Ok((beat, others)) => {
                watched.iter().for_each(|watched| watched.tell_lost(&mut silence, &others));
                (told, is_failing) = (Some(generation), false);
                jobs.peers().set(beat);
                let running = jobs.peers().gateways();
                if last != Some(running) {
                    let (limits, now) = (serving.limits(), serving.clock().now());
                    divide(&Divided { limits, jobs: &jobs, now });
                    serving.workers().share_among(running);
                }
                if last.is_some_and(|last| last != running) {
                    tracing::info!(
                        gateways = running,
                        "the number of gateways has changed; what they divide is divided anew"
                    );
                }
                last = Some(running);
            }
            Err(error) if !is_failing => {
                is_failing = true;
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot tell the other gateways that this one runs; the limits stay divided as they are"
                );
            }
            // The failure is in the log already.
            Err(_) => {}
        }
    }
    let left = tokio::task::spawn_blocking(move || membership.leave());
    if let Ok(Err(error)) = left.await {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "cannot leave the other gateways; they count this one for 10 s more"
        );
    }
}

/// The receivers of what the list of gateways shows.
pub(crate) struct Watched {
    /// Cancelled if another gateway has taken this one for lost.
    pub(crate) retired: CancellationToken,
    /// The gateways that are lost.
    pub(crate) lost: mpsc::Sender<Vec<OtherGateway>>,
}

impl Watched {
    /// Passes on which of the `others` are lost, and which a gateway has begun to retire.
    fn tell_lost(&self, silence: &mut Silence, others: &[OtherGateway]) {
        let beats: Vec<(u32, u64)> = others.iter().map(|it| (it.number, it.beat)).collect();
        let lost = silence.look(BootTime::now().since_start(), &beats);
        let is_lost = |it: &&OtherGateway| it.is_retired || lost.contains(&it.number);
        let lost: Vec<OtherGateway> = others.iter().filter(is_lost).cloned().collect();
        if !lost.is_empty() {
            // While some are being retired, the next beat tells again.
            let _ = self.lost.try_send(lost);
        }
    }
}

fn divide(Divided { limits, jobs, now }: &Divided<'_>) {
    limits.share_among(*now, jobs.peers().gateways());
    jobs.share_among_peers(*now);
}

/// The time between two looks for keys that were read since.
const TICK: Duration = Duration::from_millis(250);
/// The looks between two beats. Other gateways count one as running for 10 s after a beat.
const TICKS_OF_A_BEAT: u32 = 4;
