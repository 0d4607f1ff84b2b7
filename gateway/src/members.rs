//! The gateway's place among those that share its database server: it tells the others that it
//! runs and which keys it has read, and divides rates and places by their number.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tollgate_domain::MonotonicTime;
use tollgate_ledger::gateways::{Membership, MembershipError};
use tollgate_serving::Serving;
use tollgate_serving::limits::Limits;

use crate::auth::KeyStore;

/// Joins the gateways that share the server of `keys`; `None` if the keys are in a file. The
/// limits are divided before this gateway serves.
///
/// # Errors
/// The server cannot be used.
pub(crate) async fn join(
    keys: KeyStore,
    address: SocketAddr,
    limits: &Limits,
    now: MonotonicTime,
) -> Result<Option<Membership>, MembershipError> {
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = format!("{machine} {address}");
    // The server's answer is waited for in a blocking call.
    let joined = tokio::task::spawn_blocking(move || -> Result<_, MembershipError> {
        let Some(mut membership) = keys.join_gateways(&name)? else { return Ok(None) };
        let running = membership.beat(keys.generation())?;
        Ok(Some((membership, running)))
    });
    // A blocking task fails only while the runtime stops.
    let Ok(joined) = joined.await else { return Ok(None) };
    let Some((membership, running)) = joined? else { return Ok(None) };
    divide(limits, now, running);
    tracing::info!(
        number = membership.number(),
        gateways = running,
        "joined the gateways on the database server; rates and places are divided among them"
    );
    Ok(Some(membership))
}

/// Beats until `stop`, and divides the limits anew when the number of gateways has changed.
/// While the server does not answer, the last number counts. A failure is logged once.
pub(crate) async fn follow(
    mut membership: Membership,
    keys: KeyStore,
    serving: Arc<Serving>,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
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
            let running = membership.beat(generation);
            (membership, running)
        });
        let Ok((back, running)) = beaten.await else { return };
        membership = back;
        match running {
            Ok(running) => {
                (told, is_failing) = (Some(generation), false);
                if last != Some(running) {
                    divide(serving.limits(), serving.clock().now(), running);
                }
                if last.is_some_and(|last| last != running) {
                    tracing::info!(
                        gateways = running,
                        "the number of gateways has changed; rates and places are divided anew"
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

fn divide(limits: &Limits, now: MonotonicTime, gateways: u32) {
    limits.share_among(now, NonZeroU32::new(gateways).unwrap_or(NonZeroU32::MIN));
}

/// The time between two looks for keys that were read since.
const TICK: Duration = Duration::from_millis(250);
/// The looks between two beats. Other gateways count one as running for 10 s after a beat.
const TICKS_OF_A_BEAT: u32 = 4;
