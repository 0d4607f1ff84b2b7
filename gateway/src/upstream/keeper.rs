//! The task that keeps one worker: connect, learn, follow, and again.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{DeviceNanos, WorkerEpoch};
use tollgate_wire::v1::{AnnounceRequest, StatusRequest, WorkerStatus};
use tonic::Streaming;

use super::announce::{self, Announced};
use super::assets::Assets;
use super::journal::Books;
use super::{CALL_TIMEOUT, Heard, Load, Online, Trust, UpstreamError, WorkerEndpoint, connect};

/// The first wait before connecting again; it doubles ...
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// ... up to this.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// A worker that lied is asked again only after this.
const WAIT_AFTER_LIE: Duration = Duration::from_secs(10);

pub(super) struct Keeper {
    pub(super) endpoint: WorkerEndpoint,
    pub(super) assets: Arc<Assets>,
    pub(super) books: Books,
    pub(super) trust: Trust,
    pub(super) publish: watch::Sender<Option<Arc<Online>>>,
    pub(super) hear: watch::Sender<Option<Heard>>,
}

impl Keeper {
    /// Keeps the worker until `stop`.
    pub(super) async fn keep(self, stop: CancellationToken) {
        let mut wait = FIRST_WAIT;
        while !stop.is_cancelled() {
            let ended = tokio::select! {
                () = stop.cancelled() => break,
                Err(error) = self.follow() => error,
            };
            if let Some(online) = self.publish.send_replace(None) {
                wait = FIRST_WAIT;
                self.trust.counters.losses.fetch_add(1, Ordering::Relaxed);
                if online.load().draining || is_orderly(&ended) {
                    tracing::info!(worker = %self.endpoint.name, "worker ended");
                } else {
                    tracing::warn!(worker = %self.endpoint.name, error = %report(&ended), "worker lost");
                }
            } else {
                tracing::debug!(worker = %self.endpoint.name, error = %report(&ended), "worker not reached");
            }
            if matches!(
                ended,
                UpstreamError::Lied(_) | UpstreamError::CostTable(_) | UpstreamError::Text(_)
            ) {
                self.trust.counters.lies.fetch_add(1, Ordering::Relaxed);
                tracing::error!(worker = %self.endpoint.name, error = %report(&ended), "worker refused");
                wait = WAIT_AFTER_LIE;
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(wait) => {}
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
        self.publish.send_replace(None);
    }

    /// One connection, from its beginning to its end.
    async fn follow(&self) -> Result<Infallible, UpstreamError> {
        let mut client = connect::connect(&self.endpoint.socket).await?;
        let announcement = timeout(CALL_TIMEOUT, client.announce(AnnounceRequest {}))
            .await
            .map_err(|_| UpstreamError::Silent("announcing"))??
            .into_inner();
        let Announced { epoch, class, device, models } =
            announce::learn(&self.endpoint, announcement, &client, &self.assets).await?;
        let mut statuses = timeout(CALL_TIMEOUT, client.status(StatusRequest {}))
            .await
            .map_err(|_| UpstreamError::Silent("reporting its status"))??
            .into_inner();
        let first = timeout(CALL_TIMEOUT, next_load(&mut statuses, epoch))
            .await
            .map_err(|_| UpstreamError::Silent("reporting its status"))??;
        self.heard(epoch);
        let (load_sender, load) = watch::channel(first);
        let online = Arc::new(Online {
            name: self.endpoint.name.clone(),
            epoch,
            class,
            device,
            models,
            client: client.clone(),
            load,
            placed: Arc::new(AtomicU64::new(0)),
            orders: self.books.orders.clone(),
            trust: self.trust.clone(),
        });
        // Nothing is placed before what its journal holds counts in the caps.
        let taken = || {
            tracing::info!(worker = %online.name, epoch = %epoch, class = %online.class, "worker ready");
            self.publish.send_replace(Some(Arc::clone(&online)));
        };
        let follow_status = async {
            loop {
                load_sender.send_replace(next_load(&mut statuses, epoch).await?);
                self.heard(epoch);
            }
        };
        let follow_journal = self.books.follow(&online, client, taken);
        tokio::select! {
            ended = follow_status => ended,
            ended = follow_journal => ended,
        }
    }

    /// Counts a sign of life.
    fn heard(&self, epoch: WorkerEpoch) {
        self.hear.send_modify(|heard| {
            let before = heard.filter(|heard| heard.epoch == epoch).map_or(0, |heard| heard.times);
            *heard = Some(Heard { epoch, times: before + 1 });
        });
    }
}

async fn next_load(
    statuses: &mut Streaming<WorkerStatus>,
    expected: WorkerEpoch,
) -> Result<Load, UpstreamError> {
    let Some(status) = statuses.message().await? else {
        return Err(UpstreamError::Ended("status"));
    };
    let WorkerStatus {
        epoch,
        queued,
        running,
        kv_blocks_total: _, // the worker's own business
        kv_blocks_free: _,
        backlog_ns,
        draining,
        steps: _, // the journal says it exactly
        busy_ns: _,
        health,
    } = status;
    if WorkerEpoch::try_from(epoch) != Ok(expected) {
        return Err(UpstreamError::Lied("its status is of another epoch than it announced"));
    }
    Ok(Load { queued, running, backlog: DeviceNanos(backlog_ns), draining, health })
}

/// Whether the worker closed its streams itself, as it does when it is told to
/// end; one that dies breaks them off.
fn is_orderly(ended: &UpstreamError) -> bool {
    matches!(ended, UpstreamError::Ended("status" | "journal"))
}

/// An error with its causes, on one line.
fn report(error: &UpstreamError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
