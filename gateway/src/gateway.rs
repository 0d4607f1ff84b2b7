//! The composition root: what the gateway is made of, built once, in order,
//! and the service that runs it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_admission::{Admission, AdmissionOptions};
use tollgate_config::Config;
use tollgate_ledger::{LedgerError, LedgerHandle};

use crate::admin::{self, AdminKey, AdminKeyError, Readiness};
use crate::api::{self, Api};
use crate::auth::{Authenticator, IssuerError, IssuerOptions, KeyStore};
use crate::idempotency::{Idempotency, IntentsError};
use crate::listener::{GateOptions, Listener, ListenerOptions};
use crate::serving::{Serving, ServingOptions};
use crate::source::{Proxies, SourceOptions, SourceRing};
use crate::stack::{self, Stack, StackOptions, public_endpoint};
use crate::telemetry::{Metrics, Readings};
use crate::tls::{TlsError, TlsIdentity, TlsSource};
use crate::upstream::{WorkerEndpoint, WorkerReport};
use crate::{Clock, audit, limits};

/// What a gateway is made of.
pub struct GatewayOptions {
    /// Everything that admins write; also where it listens.
    pub config: Arc<Config>,
    /// The data folder, which the caller has locked.
    pub data: PathBuf,
    /// Where the workers listen.
    pub workers: Vec<WorkerEndpoint>,
    /// Where usage is recorded.
    pub ledger: LedgerHandle,
    /// The API keys.
    pub keys: KeyStore,
    /// What one network source may ask.
    pub sources: SourceOptions,
    /// The clock of limits and records.
    pub clock: Clock,
}

/// Why a gateway could not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// No usable certificate.
    #[error("cannot use the certificate")]
    Tls(#[from] TlsError),
    /// No usable admin key.
    #[error(transparent)]
    AdminKey(#[from] AdminKeyError),
    /// A token issuer cannot be used.
    #[error("cannot use a token issuer")]
    Issuer(#[from] IssuerError),
    /// What has been spent cannot be read.
    #[error("cannot read from the ledger what has been spent")]
    Spending(#[source] LedgerError),
    /// What idempotency keys stand for cannot be read.
    #[error(transparent)]
    Idempotency(#[from] IntentsError),
    /// An address cannot be bound.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why: in use, or not ours.
        #[source]
        source: std::io::Error,
    },
}

/// What the gateway's rooms share.
pub struct Gateway {
    pub(crate) serving: Arc<Serving>,
    pub(crate) admin_key: AdminKey,
    metrics: Arc<Metrics>,
    /// Cancelled when no new work is taken: running work ends by itself.
    draining: CancellationToken,
}

/// A gateway whose sockets are bound and that serves once it runs.
pub struct GatewayService {
    gateway: Arc<Gateway>,
    authenticator: Authenticator,
    sources: SourceRing,
    config: Arc<Config>,
    tls: TlsIdentity,
    public: Bound,
    admin: Bound,
    /// Cancelled when running work must end now.
    stopping: CancellationToken,
}

/// A listener and its address.
struct Bound {
    listener: Listener,
    address: SocketAddr,
}

impl GatewayService {
    /// Builds everything and binds both addresses; connections wait in the
    /// kernel until [`Self::run`].
    ///
    /// # Errors
    /// When a part cannot be had: certificate, admin key, issuers, the ledger's
    /// figures, an address.
    pub async fn bind(options: GatewayOptions) -> Result<Self, GatewayError> {
        let GatewayOptions { config, data, workers, ledger, keys, sources, clock } = options;
        let metrics = Metrics::new();
        let tls = TlsIdentity::load(tls_source(&config, &data))?;
        let admin_key = AdminKey::load(&data)?;
        let authenticator = Authenticator::new(keys, issuers(&config))?;
        let admission = Admission::new(AdmissionOptions::default());
        let today = clock.utc().day();
        let spending = ledger.reader().spending(today).map_err(GatewayError::Spending)?;
        limits::tell_of_missing_plans(&config, authenticator.keys());
        limits::restore_spend(&admission, &config, authenticator.keys(), spending, today);

        let kept = config.gateway().idempotency.clone();
        let idempotency = Idempotency::open(&data, kept, ledger.reader().clone(), clock.clone())?;

        // Addresses before workers: a port in use is found before work begins.
        let listen = config.gateway();
        let public = bind(listen.listen, listen.into(), &tls, &metrics)?;
        let admin = bind(listen.admin_listen, admin_listener(listen.into()), &tls, &metrics)?;

        let stopping = CancellationToken::new();
        let serving = Serving::start(ServingOptions {
            workers,
            ledger,
            admission,
            config: Arc::clone(&config),
            keys: authenticator.keys().clone(),
            clock,
            idempotency,
            deadlines: config.gateway().deadlines.clone(),
            metrics: Arc::clone(&metrics),
            stopping: stopping.clone(),
        });
        let draining = CancellationToken::new();
        let gateway = Arc::new(Gateway { serving, admin_key, metrics, draining });
        let sources = SourceRing::new(&sources);
        Ok(Self { gateway, authenticator, sources, config, tls, public, admin, stopping })
    }

    /// Where the API is served.
    pub fn local_addr(&self) -> SocketAddr {
        self.public.address
    }

    /// Where health, metrics and administration are served.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.address
    }

    /// What is shared, to ask it how things stand.
    pub fn gateway(&self) -> Arc<Gateway> {
        Arc::clone(&self.gateway)
    }

    /// The certificate, to read it again while the gateway runs.
    pub fn tls(&self) -> TlsIdentity {
        self.tls.clone()
    }

    /// Serves until `shutdown`, then drains: no new connections or requests,
    /// running ones end by themselves within the drain's bound, then are cut;
    /// every request is settled before it returns.
    ///
    /// `end_workers` runs between the last request and the last look at the
    /// workers' journals: workers that it ends hand over their last blocks.
    pub async fn run(self, shutdown: CancellationToken, end_workers: impl Future<Output = ()>) {
        let Self { gateway, authenticator, sources, config, tls: _, public, admin, stopping } =
            self;
        let drain = config.gateway().timeouts.drain;
        let api = Api {
            serving: Arc::clone(&gateway.serving),
            config,
            authenticator: authenticator.clone(),
            draining: gateway.draining.clone(),
        };
        let largest_body = api.config.gateway().requests.body.0;
        let public_stack = Stack::new(
            stack::public(api::routes(api.clone())),
            StackOptions {
                metrics: Arc::clone(&gateway.metrics),
                sources: Some(sources.clone()),
                largest_body,
                front: Some(api),
                endpoint: public_endpoint,
            },
            gateway.serving.clock.clone(),
        );
        let admin_stack = Stack::new(
            admin::routes(Arc::clone(&gateway)),
            StackOptions {
                metrics: Arc::clone(&gateway.metrics),
                sources: None,
                largest_body: ADMIN_BODY,
                front: None,
                endpoint: admin::endpoint,
            },
            gateway.serving.clock.clone(),
        );
        // The admin listener outlasts the public one, so that probes see the
        // drain; both have ended when `listeners` is empty.
        let listeners = TaskTracker::new();
        let close_admin = CancellationToken::new();
        let public_done =
            listeners.spawn(public.listener.serve(public_stack, gateway.draining.clone()));
        listeners.spawn(admin.listener.serve(admin_stack, close_admin.clone()));
        let upkeep = TaskTracker::new();
        let end_upkeep = CancellationToken::new();
        upkeep.spawn(authenticator.clone().follow_changes(end_upkeep.clone()));
        upkeep.spawn(end_upkeep.clone().run_until_cancelled_owned(sweep(sources)));
        upkeep.spawn(audit::follow_keys(
            authenticator.keys().clone(),
            gateway.serving.books.ledger.clone(),
            end_upkeep.clone(),
        ));

        shutdown.cancelled().await;
        tracing::info!("draining");
        gateway.draining.cancel();
        // Requests end, or at the drain's bound are told to; the listener cuts
        // its connections at the same bound.
        let pumps = &gateway.serving.pumps;
        pumps.close();
        if timeout(drain, pumps.wait()).await.is_err() {
            tracing::warn!(requests = pumps.len(), "cutting requests that outlast the drain");
            stopping.cancel();
        }
        if public_done.await.is_err() {
            tracing::error!("the listener panicked");
        }
        pumps.wait().await;
        end_workers.await;
        gateway.serving.stop().await;
        close_admin.cancel();
        end_upkeep.cancel();
        listeners.close();
        upkeep.close();
        listeners.wait().await;
        upkeep.wait().await;
    }
}

impl Gateway {
    /// Whether requests will succeed, and what stands in the way.
    pub fn readiness(&self) -> Readiness {
        Readiness {
            worker: self.serving.workers.is_ready(),
            ledger: self.serving.can_record(),
            draining: self.draining.is_cancelled(),
        }
    }

    /// Each worker as it stands.
    pub fn worker_reports(&self) -> Vec<WorkerReport> {
        self.serving.workers.report()
    }

    /// The metrics in Prometheus's text format.
    pub(crate) fn scrape(&self) -> String {
        let workers = &self.serving.workers;
        self.metrics.scrape(Readings {
            ready: self.readiness().is_ready(),
            ledger_writable: self.serving.can_record(),
            workers: workers.report(),
            worker_lies: workers.lies(),
            worker_losses: workers.losses(),
            holds: {
                let status = self.serving.admission.status();
                status.running + status.queued
            },
        })
    }
}

fn bind(
    address: SocketAddr,
    options: ListenerOptions,
    tls: &TlsIdentity,
    metrics: &Arc<Metrics>,
) -> Result<Bound, GatewayError> {
    let listen = |source| GatewayError::Listen { address, source };
    let listener = Listener::bind(address, options, tls.server_config()?, Arc::clone(metrics))
        .map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    Ok(Bound { listener, address })
}

/// Few come here, and none of them stays long.
fn admin_listener(options: ListenerOptions) -> ListenerOptions {
    let gate = GateOptions { connections: ADMIN_CONNECTIONS, ..options.gate };
    // No proxy stands before it: probes and admins come themselves.
    let proxies = Proxies::default();
    ListenerOptions { gate, proxies, drain: ADMIN_DRAIN, ..options }
}

fn tls_source(config: &Config, data: &std::path::Path) -> TlsSource {
    let tls = &config.gateway().tls;
    match (&tls.certificate, &tls.key) {
        (Some(certificate), Some(key)) => {
            TlsSource::Files { certificate: certificate.clone(), key: key.clone() }
        }
        // Config refuses one without the other.
        _ => TlsSource::Development { folder: data.join("tls") },
    }
}

fn issuers(config: &Config) -> Vec<IssuerOptions> {
    config.issuers().iter().map(IssuerOptions::from).collect()
}

/// Keeps the source ring small.
async fn sweep(sources: SourceRing) {
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        sources.sweep();
    }
}

/// Connections of the admin listener.
const ADMIN_CONNECTIONS: usize = 256;

/// How long an admin's requests may go on.
const ADMIN_DRAIN: Duration = Duration::from_secs(1);

/// Bytes of an admin request.
const ADMIN_BODY: u64 = 64 * 1024;

#[cfg(test)]
mod tests;
