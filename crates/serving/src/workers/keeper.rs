//! The task that keeps one worker connected: connect, learn, follow, and again.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tollgate_config::Health;
use tollgate_domain::{DeviceNanos, StepCounts, WorkerEpoch};
use tollgate_wire::WorkerAddress;
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_wire::v1::{
    self, AnnounceRequest, EchoMessage, HealthTerms, SettleRequest, StatusRequest, WorkerStatus,
};
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use super::announce;
use super::assets::Assets;
use super::{
    BatchPlaces, CALL_TIMEOUT, ConnectedWorker, DeviceLoad, Heartbeat, Load, WorkerEndpoint,
};
use crate::error::with_causes;
use crate::serving::SharedLedger;
use crate::settlement::Settlement;
use crate::worker_identity::{ProtocolViolations, Trust, WorkerError};

/// The first wait before the worker is connected again. Each failure doubles it.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait before the worker is connected again.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// The wait after a worker sent an invalid report.
const WAIT_AFTER_VIOLATION: Duration = Duration::from_secs(10);
/// The time between two measurements of the connection.
const ECHO_EVERY: Duration = Duration::from_secs(5);
/// Bytes of a message that measures the connection.
const ECHO_BYTES: usize = 64;

pub(super) struct Keeper {
    pub(super) endpoint: WorkerEndpoint,
    pub(super) assets: Arc<Assets>,
    pub(super) settlement: Settlement,
    pub(super) trust: Trust,
    pub(super) violations: ProtocolViolations,
    pub(super) losses: Arc<AtomicU64>,
    pub(super) health: watch::Receiver<Health>,
    pub(super) batch_places: BatchPlaces,
    pub(super) shared: Option<SharedLedger>,
    /// Set once what earlier starts of this gateway have ordered at the worker is in the ledger.
    pub(super) settle: watch::Sender<bool>,
    pub(super) publish: watch::Sender<Option<Arc<ConnectedWorker>>>,
    pub(super) beat: watch::Sender<Option<Heartbeat>>,
}

impl Keeper {
    /// Keeps the worker connected until `stop`.
    pub(super) async fn keep(self, stop: CancellationToken) {
        let mut wait = FIRST_WAIT;
        let mut told = None;
        while !stop.is_cancelled() {
            let ended = tokio::select! {
                () = stop.cancelled() => break,
                Err(error) = self.follow() => error,
            };
            let worker = &self.endpoint.name;
            // Taken back first, so that no request is placed on a connection that has ended.
            if let Some(connected) = self.publish.send_replace(None) {
                // The worker was reachable, so the back-off starts again.
                wait = FIRST_WAIT;
                told = None;
                self.losses.fetch_add(1, Ordering::Relaxed);
                if connected.load().draining || is_orderly(&ended) {
                    tracing::info!(%worker, "worker ended; connecting again");
                } else {
                    tracing::warn!(%worker, error = %with_causes(&ended), "lost the worker; its requests are placed again or fail");
                }
            } else {
                self.tell_unreachable(&ended, &mut told);
            }
            if ended.is_violation() {
                self.violations.add_one();
                tracing::error!(%worker, error = %with_causes(&ended), "worker broke the protocol; connecting again later");
                // The same worker will most likely send the same report again.
                wait = WAIT_AFTER_VIOLATION;
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(wait) => {}
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
        // No request may be placed on a worker that is no longer followed.
        self.publish.send_replace(None);
    }

    /// Logs why the worker cannot be reached, each reason once: the next attempt comes
    /// within seconds. A worker of this machine that starts is no news.
    fn tell_unreachable(&self, ended: &WorkerError, told: &mut Option<String>) {
        let (worker, address) = (&self.endpoint.name, &self.endpoint.address);
        let error = with_causes(ended).to_string();
        let is_remote = matches!(address, WorkerAddress::Remote(_));
        if is_remote && told.as_ref() != Some(&error) {
            tracing::warn!(%worker, %address, error, "cannot reach the worker; it gets no requests until it is connected");
            *told = Some(error);
        } else {
            tracing::debug!(%worker, error, "cannot reach the worker; connecting again");
        }
    }

    /// Follows one connection from its beginning to its end.
    async fn follow(&self) -> Result<Infallible, WorkerError> {
        let connected = tollgate_wire::connect(&self.endpoint.address).await;
        let mut client = connected.map_err(WorkerError::Connect)?;
        let ledger = self.shared.as_ref().map_or_else(String::new, |it| it.name.clone());
        let announce = AnnounceRequest { ledger, probe: false };
        let announcement = timeout(CALL_TIMEOUT, client.announce(announce))
            .await
            .map_err(|_| WorkerError::Timeout("announcing"))??
            .into_inner();
        // Only this gateway reaches the worker of its own machine.
        let is_shared = self.endpoint.is_shareable && self.shared.is_some();
        let known = (&*self.assets, &self.trust, is_shared);
        let identity = announce::learn(&self.endpoint, announcement, &client, known).await?;
        let epoch = identity.epoch;
        let mut statuses = timeout(CALL_TIMEOUT, client.status(StatusRequest {}))
            .await
            .map_err(|_| WorkerError::Timeout("reporting its status"))??
            .into_inner();
        // The first load is awaited, so that placement never sees an unknown one.
        let first = timeout(CALL_TIMEOUT, next_load(&mut statuses, epoch))
            .await
            .map_err(|_| WorkerError::Timeout("reporting its status"))??;
        self.count_heartbeat(epoch);
        let (load_sender, load) = watch::channel(first);
        let identity = Arc::new(identity);
        let orders = self.settlement.orders().clone();
        let (client_of_worker, places) = (client.clone(), self.batch_places.clone());
        let worker =
            ConnectedWorker::new(Arc::clone(&identity), client_of_worker, load, orders, places);
        let worker = Arc::new(worker);
        // The worker is published only when the records in its journal count in the
        // caps. Before that, a tenant could spend more than a cap allows.
        let ingested = || {
            tracing::info!(worker = %identity.name, %epoch, class = %identity.class, "worker is ready; requests go to the worker");
            self.publish.send_replace(Some(Arc::clone(&worker)));
        };
        let follow_status = async {
            loop {
                load_sender.send_replace(next_load(&mut statuses, epoch).await?);
                self.count_heartbeat(epoch);
            }
        };
        let follow_health = self.tell_health(client.clone());
        let measure = measure(&worker, client.clone());
        let settle = self.settle(client.clone());
        let follow_journal = self.settlement.follow(&identity, client, ingested);
        // The end of one ends the connection: all speak with one process.
        tokio::select! {
            ended = follow_health => ended,
            ended = follow_status => ended,
            ended = follow_journal => ended,
            ended = measure => ended,
            ended = settle => ended,
        }
    }

    /// Sends the terms of the health checks, now and after each change.
    async fn tell_health(
        &self,
        mut client: WorkerClient<Channel>,
    ) -> Result<Infallible, WorkerError> {
        let mut health = self.health.clone();
        loop {
            let terms = health_terms(&health.borrow_and_update());
            timeout(CALL_TIMEOUT, client.set_health_terms(terms))
                .await
                .map_err(|_| WorkerError::Timeout("taking the terms of its health checks"))??;
            // Only the gateway's end drops the sender, and that ends the keeper, too.
            if health.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until everything that earlier starts of this gateway have ordered at the worker is in
    /// the ledger, whichever gateway records it.
    async fn settle(&self, mut client: WorkerClient<Channel>) -> Result<Infallible, WorkerError> {
        let earlier = self.shared.as_ref().map(|shared| shared.earlier.clone());
        let is_known = match earlier.filter(|_| !*self.settle.borrow()) {
            Some(gateways) => match client.settle(SettleRequest { gateways }).await {
                Ok(_) => true,
                // A worker of an earlier version, which serves this gateway alone.
                Err(status) if status.code() == Code::Unimplemented => false,
                Err(status) => return Err(status.into()),
            },
            None => false,
        };
        if !is_known {
            // The journal of a worker of this gateway alone is read before it is published.
            let mut published = self.publish.subscribe();
            // The sender lives as long as `self`, so an error cannot come.
            let _ = published.wait_for(Option::is_some).await;
        }
        self.settle.send_replace(true);
        std::future::pending().await
    }

    fn count_heartbeat(&self, epoch: WorkerEpoch) {
        self.beat.send_modify(|beat| {
            // A new epoch is a new process, so its count starts again.
            let before = beat.filter(|beat| beat.epoch == epoch).map_or(0, |beat| beat.times);
            *beat = Some(Heartbeat { epoch, times: before + 1 });
        });
    }
}

/// Measures the time of a message to `worker` and back, again and again.
#[expect(clippy::disallowed_methods, reason = "the time of a message is measured")]
async fn measure(
    worker: &ConnectedWorker,
    mut client: WorkerClient<Channel>,
) -> Result<Infallible, WorkerError> {
    let mut ticks = interval(ECHO_EVERY);
    // After a pause one measurement is enough.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let sent = Instant::now();
        let payload = vec![0; ECHO_BYTES];
        let answer = timeout(CALL_TIMEOUT, client.echo(EchoMessage { payload })).await;
        match answer.map_err(|_| WorkerError::Timeout("answering a message"))? {
            Ok(_) => worker.record_round_trip(sent.elapsed()),
            // A worker of an earlier version does not know the call.
            Err(status) if status.code() == Code::Unimplemented => std::future::pending().await,
            Err(status) => return Err(status.into()),
        }
    }
}

async fn next_load(
    statuses: &mut Streaming<WorkerStatus>,
    expected: WorkerEpoch,
) -> Result<Load, WorkerError> {
    let Some(status) = statuses.message().await? else {
        return Err(WorkerError::StreamEnded(STATUS));
    };
    let WorkerStatus {
        epoch,
        queued,
        running,
        kv_blocks_total,
        kv_blocks_free,
        backlog_ns,
        draining,
        steps,
        busy_ns,
        health,
        preemptions,
        step_counts,
        waiting_interactive_ns,
        waiting_batch_ns,
    } = status;
    if WorkerEpoch::try_from(epoch) != Ok(expected) {
        return Err(WorkerError::InvalidReport("its status is of another epoch than it announced"));
    }
    let device = DeviceLoad {
        // Saturating, because the report of a worker is not trusted.
        kv_blocks_used: kv_blocks_total.saturating_sub(kv_blocks_free),
        kv_blocks_free,
        steps,
        busy: DeviceNanos(busy_ns),
        counts: step_counts.map(|counts| checked_counts(counts, steps)).transpose()?,
        preemptions,
        waiting_interactive: DeviceNanos(waiting_interactive_ns),
        waiting_batch: DeviceNanos(waiting_batch_ns),
    };
    Ok(Load { queued, running, backlog: DeviceNanos(backlog_ns), device, draining, health })
}

/// Returns the counts of `steps` steps.
fn checked_counts(counts: v1::StepCounts, steps: u64) -> Result<StepCounts, WorkerError> {
    let v1::StepCounts { by_time, by_sequences, sequences } = counts;
    match StepCounts::from_parts(&by_time, &by_sequences, sequences) {
        Ok(counts) if counts.steps() == steps => Ok(counts),
        _ => Err(WorkerError::InvalidReport("its counts of steps do not add up")),
    }
}

/// Returns the message for a worker.
fn health_terms(health: &Health) -> HealthTerms {
    // The library is opened once, at the start of the worker.
    let Health { every, hot, cooled, well_for, busy, busy_for, memory, leak, nvml: _ } = health;
    // Config bounds every duration by a day.
    let nanos = |duration: &Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    HealthTerms {
        every_ns: nanos(every),
        hot_celsius: *hot,
        cooled_celsius: *cooled,
        well_for_ns: nanos(well_for),
        busy_percent: *busy,
        busy_for_ns: nanos(busy_for),
        memory_percent: *memory,
        leak_bytes: leak.0,
    }
}

/// True if the worker closed its streams itself, as a worker does at shutdown. A
/// worker that dies breaks them off.
fn is_orderly(ended: &WorkerError) -> bool {
    matches!(ended, WorkerError::StreamEnded(STATUS | crate::settlement::JOURNAL))
}

/// The name of the status stream in errors.
const STATUS: &str = "status";
