//! The live view: the state of the gateway at one moment, once or each second. It has names
//! and figures, and nothing of any request's content.

mod history;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::unfold;
use http::{HeaderMap, HeaderValue, header};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tollgate_admission::HeldRequests;
use tollgate_domain::{KeyId, TenantId, UtcTime};

use self::history::{History, Point, Reading};
use super::tenants::TenantRow;
use super::{AdminState, WorkerStatus};
use crate::reply::ApiError;
use crate::telemetry::{MinuteTotals, RecentRefusal, RefusedRow, RequestTotals};

/// The state that live views share: the history and the places of streams.
pub(crate) struct LiveState {
    history: Mutex<History>,
    streams: Arc<Semaphore>,
}

impl LiveState {
    pub(crate) fn new() -> Self {
        Self { history: Mutex::default(), streams: Arc::new(Semaphore::new(MOST_STREAMS as usize)) }
    }

    fn history(&self) -> MutexGuard<'_, History> {
        // Every change under the lock is complete before a panic could happen.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of the gateway at one moment.
#[derive(Serialize, JsonSchema)]
pub(super) struct LiveView {
    #[schemars(with = "u64")]
    now_ns: UtcTime,
    #[schemars(with = "u64")]
    started_ns: UtcTime,
    ready: bool,
    draining: bool,
    totals: Totals,
    workers: Vec<WorkerStatus>,
    /// The busiest tenants, at most [`MOST_TENANTS`].
    tenants: Vec<LiveTenant>,
    /// The refusals of the last hour by tenant and kind, most first, at most
    /// [`MOST_REFUSED_ROWS`].
    refusals: Vec<RefusedRow>,
    /// The last refusals, the oldest first. A stream has only those since its event before.
    recent_refusals: Vec<RefusalRow>,
    /// The last fifteen minutes. A stream has only the points since its event before.
    history: Vec<Point>,
}

/// The requests for work since the start, and those of the moment.
#[derive(Serialize, JsonSchema)]
struct Totals {
    #[serde(flatten)]
    ended: RequestTotals,
    running: usize,
    waiting: usize,
}

/// A tenant with requests that run, wait or ended within the last minute.
#[derive(Serialize, JsonSchema)]
struct LiveTenant {
    #[serde(flatten)]
    row: TenantRow,
    last_minute: MinuteTotals,
}

/// One refusal.
#[derive(Serialize, JsonSchema)]
struct RefusalRow {
    #[schemars(with = "u64")]
    at_ns: UtcTime,
    #[schemars(with = "String")]
    tenant: TenantId,
    #[schemars(with = "String")]
    key: KeyId,
    kind: &'static str,
    /// The owner of the limit: `tenant acme`, or `pool trials` for a shared one; null if no
    /// limit refused.
    scope: Option<String>,
    /// The wait that the client was told; null if time alone does not help.
    retry_after_ms: Option<u64>,
}

impl From<RecentRefusal> for RefusalRow {
    fn from(refusal: RecentRefusal) -> Self {
        let RecentRefusal { number: _, at, caller, kind, scope, retry_after } = refusal;
        Self {
            at_ns: at,
            tenant: caller.tenant,
            key: caller.key,
            kind,
            scope: scope.map(|scope| scope.to_string()),
            retry_after_ms: retry_after
                .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

/// The newest entries that a stream has sent.
#[derive(Clone, Copy, Default)]
struct Seen {
    refusal: u64,
    point: UtcTime,
}

/// Answers with the state of this moment, or with a stream that has one event a second.
pub(super) async fn live(
    State(state): State<Arc<AdminState>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    if !wants_events(&headers) {
        return Ok(Json(state.live_view(&mut Seen::default())).into_response());
    }
    let place = Arc::clone(&state.live.streams).try_acquire_owned();
    let place = place.map_err(|_| ApiError::LiveStreams { most: MOST_STREAMS })?;
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let events =
        LiveStream { state, credential: headers, ticks, seen: Seen::default(), _place: place };
    let events = unfold(events, |mut events| async move {
        let event = events.next().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(EVENT_STREAM));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// A stream of live views.
struct LiveStream {
    state: Arc<AdminState>,
    /// The headers of the request, which carry the admin's key.
    credential: HeaderMap,
    ticks: Interval,
    seen: Seen,
    /// The place of the stream among all of them.
    _place: OwnedSemaphorePermit,
}

impl LiveStream {
    /// Returns the next event; `None` if the gateway stops or the admin was revoked.
    async fn next(&mut self) -> Option<Bytes> {
        // Without this, an open stream would hold up the end of the listener.
        let ticked = self.state.closing.run_until_cancelled(self.ticks.tick()).await;
        ticked?;
        // Every role may read, so the key alone decides.
        self.state.admin_of(&self.credential).ok()?;
        let view = self.state.live_view(&mut self.seen);
        // The view is made of names and numbers, which serialise.
        let json = serde_json::to_string(&view).ok()?;
        Some(format!("data: {json}\n\n").into())
    }
}

impl AdminState {
    /// Adds the figures of this moment to the history, at most once each few seconds.
    pub(crate) fn record_history(&self) {
        let status = self.serving.limits().status();
        let reports = self.worker_reports().into_iter();
        let busy = reports.filter_map(|report| Some((report.name, report.load?.busy)));
        self.live.history().record(Reading {
            at: self.serving.clock().utc(),
            totals: self.metrics.activity().totals(),
            running: status.running,
            waiting: status.queued,
            busy: busy.collect(),
        });
    }

    /// Returns the state of this moment, with the entries after `seen`, and moves `seen` to
    /// the newest.
    fn live_view(&self, seen: &mut Seen) -> LiveView {
        let (metrics, status) = (&self.metrics, self.serving.limits().status());
        let recent = metrics.activity().refusals_after(seen.refusal);
        seen.refusal = recent.last().map_or(seen.refusal, |refusal| refusal.number);
        let history = self.live.history().after(seen.point);
        seen.point = history.last().map_or(seen.point, Point::at);
        let mut refusals = metrics.refused().list(None);
        refusals.truncate(MOST_REFUSED_ROWS);
        LiveView {
            now_ns: self.serving.clock().utc(),
            started_ns: self.serving.started(),
            ready: self.readiness().is_ready(),
            draining: self.draining.is_cancelled(),
            totals: Totals {
                ended: metrics.activity().totals(),
                running: status.running,
                waiting: status.queued,
            },
            workers: self.worker_reports().into_iter().map(WorkerStatus::from).collect(),
            tenants: self.busy_tenants(),
            refusals,
            recent_refusals: recent.into_iter().map(RefusalRow::from).collect(),
            history,
        }
    }

    /// Returns the tenants with requests that run, wait or ended within the last minute, the
    /// busiest first.
    fn busy_tenants(&self) -> Vec<LiveTenant> {
        let config = self.reloader.config();
        let mut minutes = self.metrics.activity().last_minute();
        let mut tenants: HashMap<TenantId, (HeldRequests, MinuteTotals)> = HashMap::new();
        for (name, held) in self.serving.limits().held_by_tenant() {
            let minute = minutes.remove(&name).unwrap_or_default();
            tenants.insert(name, (held, minute));
        }
        // What is left belongs to tenants without a request that runs or waits.
        let ended = minutes.into_iter();
        tenants.extend(ended.map(|(name, minute)| (name, (HeldRequests::default(), minute))));
        let mut ranked: Vec<_> = tenants.into_iter().collect();
        ranked.sort_unstable_by(|(a_name, a), (b_name, b)| {
            let load = |(held, minute): &(HeldRequests, MinuteTotals)| {
                (held.running + held.waiting, minute.ended)
            };
            // Names decide among equals, because the order of a hash map changes.
            load(b).cmp(&load(a)).then_with(|| a_name.cmp(b_name))
        });
        let row = |(name, (held, last_minute))| {
            // A reload may have removed the tenant.
            let tenant = config.tenant(&name)?;
            Some(LiveTenant { row: TenantRow::of(tenant, Some(held)), last_minute })
        };
        ranked.into_iter().filter_map(row).take(MOST_TENANTS).collect()
    }
}

/// Returns true if the client asks for server-sent events.
fn wants_events(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|media| {
        let name = media.split(';').next().unwrap_or_default();
        name.trim().eq_ignore_ascii_case(EVENT_STREAM)
    })
}

const EVENT_STREAM: &str = "text/event-stream";
/// Streams of all admins at one time.
const MOST_STREAMS: u32 = 16;
/// Tenants of one view.
const MOST_TENANTS: usize = 50;
/// Rows of refusals of one view.
const MOST_REFUSED_ROWS: usize = 50;
