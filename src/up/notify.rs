//! Messages to systemd (sd_notify): ready, reloading, stopping, and the watchdog. Without
//! systemd nothing is sent.

use std::convert::Infallible;

use sd_notify::NotifyState;
use tokio::time::{MissedTickBehavior, interval};

/// Tells systemd that requests succeed from now on.
pub async fn ready() {
    send(vec![NotifyState::Ready]).await;
}

/// Tells systemd that a reload begins. [`ready`] ends it.
pub async fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => send(vec![NotifyState::Reloading, now]).await,
        Err(error) => {
            tracing::warn!(%error, "cannot read the clock; systemd does not see the reload")
        }
    }
}

/// Tells systemd that the gateway drains.
pub async fn stopping() {
    send(vec![NotifyState::Stopping]).await;
}

/// Tells systemd's watchdog again and again that the runtime runs tasks; never returns.
/// systemd restarts a gateway that stays silent.
pub async fn feed_watchdog() -> Infallible {
    let Some(bound) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    // Half of the bound, as sd_watchdog_enabled(3) recommends.
    let mut ticks = interval(bound / 2);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        send(vec![NotifyState::Watchdog]).await;
    }
}

/// Sends on a thread for blocking work: the socket takes few messages, and a sender waits until
/// systemd has read them.
async fn send(state: Vec<NotifyState<'static>>) {
    let sent = tokio::task::spawn_blocking(move || sd_notify::notify(&state)).await;
    let error = match sent {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::warn!(error, "cannot notify systemd; it does not see the state of the gateway");
}
