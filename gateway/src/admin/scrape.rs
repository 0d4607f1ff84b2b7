//! `GET /metrics`: the figures of all parts at one moment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, header};
use tollgate_admission::{Moment, Offence};
use tollgate_domain::{DeviceClass, TenantId};
use tollgate_jobs::JobFigures;
use tollgate_serving::limits::tenant_limits;
use tollgate_serving::workers::WorkerReport;

use super::AdminState;
use crate::telemetry::{Readings, StateReadings, TenantReadings, TextFormat};

/// Answers with the metrics, in the text format that the client asks for.
pub(super) async fn metrics(State(state): State<Arc<AdminState>>, headers: HeaderMap) -> Response {
    let format = TextFormat::asked_by(&headers);
    // A store that fails shows no batches, and everything else is shown.
    let jobs = state.jobs.jobs.figures().await.unwrap_or_default();
    ([(header::CONTENT_TYPE, format.content_type())], state.scrape(format, jobs)).into_response()
}

impl AdminState {
    fn scrape(&self, format: TextFormat, jobs: JobFigures) -> String {
        let (workers, limits) = (self.serving.workers(), self.serving.limits());
        let (config, clock) = (self.reloader.config(), self.serving.clock());
        let moment = Moment::new(clock.now(), clock.utc());
        let (reports, status) = (workers.report(), limits.status());
        let books = self.serving.settlement().books().report();
        let waited = books.oldest_pending().map(|arrived| moment.now.since(arrived));
        let classes = classes(&reports);
        let limits_of = |name: &TenantId| {
            let tenant = config.tenant(name);
            let scopes: Vec<_> =
                tenant.into_iter().flat_map(|tenant| tenant_limits(&config, tenant)).collect();
            limits.states(moment, &scopes, &classes)
        };
        let tenants = TenantReadings {
            config: Some(&config),
            held: limits.held_by_tenant(),
            classes: classes.clone(),
            limits: Some(&limits_of),
            today: moment.utc.day(),
        };
        let host_work_waiting = self.serving.tokenize_pool().waiting();
        let readings = Readings {
            tenants,
            jobs,
            state: StateReadings {
                waiting: [
                    ("limits", i64::try_from(status.queued).unwrap_or(i64::MAX)),
                    ("tokenizer", i64::try_from(host_work_waiting).unwrap_or(i64::MAX)),
                    ("", 0), // the metrics add the workers' own queues
                ],
                ..self.state_readings(waited)
            },
            books,
            now: moment.utc,
            ready: self.readiness().is_ready(),
            ledger_writable: self.serving.can_record(),
            workers: reports,
            worker_protocol_violations: workers.protocol_violations(),
            worker_losses: workers.losses(),
            holds: status.running + status.queued,
            gateways: status.gateways,
            caps: self.serving.cap_figures(),
            parts: self.serving.part_figures(),
            body_bytes: self.bodies.taken(),
            host_work_waiting,
        };
        self.metrics.scrape(readings, format)
    }

    fn state_readings(&self, ledger_lag: Option<Duration>) -> StateReadings {
        let now = self.serving.clock().now();
        let of_tenants = Offence::ALL.into_iter().zip(self.serving.penalties().held(now));
        let of_sources = Offence::ALL.into_iter().zip(self.source_penalties.held(now));
        let mut penalties = BTreeMap::new();
        for (offence, held) in of_tenants.chain(of_sources) {
            *penalties.entry(offence).or_default() += held;
        }
        StateReadings {
            waiting: Default::default(),
            penalties,
            ledger_lag: ledger_lag.unwrap_or_default(),
            audit_unsigned: self.serving.settlement().ledger().unsigned_for(),
            // The data folder cannot change while the gateway runs.
            disk_free: rustix::fs::statvfs(self.reloader.config().data())
                .ok()
                // `f_bavail` leaves out the blocks that are kept for root.
                .map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
            certificate_expires: self.reloader.certificate_expires(),
        }
    }
}

/// Returns the classes of the connected devices.
fn classes(workers: &[WorkerReport]) -> Vec<DeviceClass> {
    let classes: BTreeSet<&DeviceClass> =
        workers.iter().filter_map(|report| report.class.as_ref()).collect();
    classes.into_iter().cloned().collect()
}
