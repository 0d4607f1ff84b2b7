//! The reload: the config is read again while the gateway runs, compared with the one in
//! force, and swapped as a whole. A mistake changes nothing. Requests that have begun keep
//! the config that they began with.

mod raises;

pub(crate) use raises::RaiseRefusal;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tollgate_config::{Change, Config, ConfigErrors, LiveConfig, Reload};
use tollgate_domain::{UtcDay, UtcTime};
use tollgate_edge::tls::{PreparedCertificate, TlsError, TlsIdentity};
use tollgate_jobs::{JobError, Jobs};
use tollgate_ledger::LedgerError;
use tollgate_serving::{PastSpending, Serving, with_causes};

use crate::auth::{Authenticator, IssuerError, PreparedIssuers};
use crate::doors::Doors;
use crate::gateway::{SpendReader, issuers, spent_by_batches, tls_source};
use crate::raises::{RaisedLimit, apply as with_raises};
use crate::source_penalties::SourcePenalties;
use crate::telemetry::Metrics;
use crate::{admin_certificate, audit};

/// The component that replaces the config in force. Clones share it.
#[derive(Clone)]
pub struct Reloader {
    parts: Arc<ReloadParts>,
    /// Held by the reload that runs, because two of them would mix their changes.
    turn: Arc<Mutex<()>>,
}

/// The components that a reload changes.
pub(crate) struct ReloadParts {
    pub(crate) config: LiveConfig,
    /// The data folder, which has the development certificate.
    pub(crate) data: PathBuf,
    pub(crate) serving: Arc<Serving>,
    pub(crate) jobs: Jobs,
    pub(crate) spending: SpendReader,
    pub(crate) source_penalties: SourcePenalties,
    pub(crate) authenticator: Authenticator,
    pub(crate) tls: TlsIdentity,
    pub(crate) metrics: Arc<Metrics>,
    /// The limits in front of requests.
    pub(crate) doors: Doors,
    /// Kept apart from the config, whose files do not have them.
    pub(crate) raises: ArcSwap<Vec<RaisedLimit>>,
}

/// The two kinds of reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadRun {
    /// The new config is checked and compared, and nothing changes.
    Dry,
    /// The new config is put in force.
    Apply,
}

/// The result of a reload without mistakes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ReloadReport {
    /// True if the live changes are in force now.
    pub applied: bool,
    /// True if new connections see another certificate than before.
    pub certificate_renewed: bool,
    /// Every key whose new value differs from the one in force before.
    pub changes: Vec<ChangeRow>,
}

/// A changed key as admins read it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChangeRow {
    /// The dotted key.
    pub key: String,
    /// The value in force before, as TOML; null if it was not set.
    pub old: Option<String>,
    /// The new value; null if it is not set.
    pub new: Option<String>,
    /// The place of the new value, such as `plans.toml:12`.
    pub place: String,
    /// `live` or `restart`.
    pub effect: &'static str,
}

/// The reasons why a reload changes nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The config has mistakes.
    #[error("the config has mistakes")]
    Config(#[source] ConfigErrors),
    /// The certificate cannot be used.
    #[error("cannot use the certificate")]
    Certificate(#[source] TlsError),
    /// A token issuer cannot be used.
    #[error("cannot use a token issuer")]
    Issuer(#[source] IssuerError),
    /// The ledger does not record the change, or does not tell what tenants have spent.
    #[error("the ledger cannot be used")]
    Ledger(#[source] LedgerError),
    /// The store of batches does not tell what their lines have spent.
    #[error("the batches cannot be read")]
    Jobs(#[source] JobError),
    /// The gateway is about to stop.
    #[error("the gateway is stopping")]
    Stopping,
}

impl ReloadError {
    /// Returns the mistakes, each as a line that names its place.
    pub fn mistakes(&self) -> Vec<String> {
        if let Self::Config(errors) = self {
            return errors.problems().iter().map(ToString::to_string).collect();
        }
        vec![with_causes(self)]
    }

    /// Returns true if the same files may be put in force later.
    fn may_pass(&self) -> bool {
        match self {
            Self::Ledger(_) | Self::Jobs(_) | Self::Stopping => true,
            Self::Config(_) | Self::Certificate(_) | Self::Issuer(_) => false,
        }
    }
}

/// A new config that was read and checked, with the files that it names.
struct PreparedReload {
    reload: Reload,
    /// `None` if clients would see the same certificate.
    certificate: Option<PreparedCertificate>,
    /// `None` if the issuers stay as they are.
    issuers: Option<PreparedIssuers>,
}

impl PreparedReload {
    fn report(&self, run: ReloadRun) -> ReloadReport {
        ReloadReport {
            applied: run == ReloadRun::Apply,
            certificate_renewed: self.certificate.is_some(),
            changes: self.reload.changes.iter().map(ChangeRow::from).collect(),
        }
    }
}

impl From<&Change> for ChangeRow {
    fn from(change: &Change) -> Self {
        let Change { key, old, new, place, effect } = change.clone();
        Self { key, old, new, place: place.to_string(), effect: effect.as_str() }
    }
}

impl Reloader {
    pub(crate) fn new(parts: ReloadParts) -> Self {
        let at = parts.serving.clock().utc();
        parts.metrics.config_loaded(&parts.config.current().loaded().files_sha256, at);
        Self { parts: Arc::new(parts), turn: Arc::default() }
    }

    /// Returns the config in force.
    pub(crate) fn config(&self) -> Arc<Config> {
        self.parts.config.current()
    }

    /// Reads the config again and puts the changes in force that need no restart. `actor`
    /// is the name in the audit log. The reload runs to its end also if the caller stops
    /// waiting for it.
    ///
    /// # Errors
    /// Nothing changes then; see [`ReloadError`].
    pub async fn reload(&self, actor: &str, run: ReloadRun) -> Result<ReloadReport, ReloadError> {
        let (reloader, actor) = (self.clone(), actor.to_owned());
        // A client that leaves must not stop a reload between its record and its effect.
        let tasks = self.parts.serving.tasks();
        let task = tasks.spawn(async move { reloader.run(&actor, run).await });
        task.await.map_err(|_| ReloadError::Stopping)?
    }

    /// Returns the time at which the certificate in use expires, if it can be read.
    pub(crate) fn certificate_expires(&self) -> Option<UtcTime> {
        self.parts.tls.expires()
    }

    /// Looks every two seconds for changed files and reloads them; never returns.
    pub(crate) async fn follow_files(self) {
        let mut ticks = interval(POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The files may have changed since they were loaded: a ledger takes time to open.
        let mut known = Some(self.parts.config.current().files_at_load());
        loop {
            ticks.tick().await;
            let found = self.files_hash().await;
            if found == known {
                continue;
            }
            sleep(SETTLED).await;
            // An editor may still be writing; the next tick looks again.
            if self.files_hash().await == found {
                // The reload logs its result.
                let reloaded = self.reload("file", ReloadRun::Apply).await;
                let may_pass = reloaded.is_err_and(|error| error.may_pass());
                // A mistake is reported once. After any other error the next look tries again.
                known = if may_pass { None } else { found };
            }
        }
    }

    /// Returns the hash of the files; `None` while the runtime stops.
    async fn files_hash(&self) -> Option<[u8; 32]> {
        let config = self.parts.config.current();
        tokio::task::spawn_blocking(move || config.files_hash()).await.ok()
    }

    async fn run(&self, actor: &str, run: ReloadRun) -> Result<ReloadReport, ReloadError> {
        let _turn = self.turn.lock().await;
        let parts = Arc::clone(&self.parts);
        // Files are read, which blocks.
        let prepared = tokio::task::spawn_blocking(move || parts.prepare()).await;
        let prepared = prepared.map_err(|_| ReloadError::Stopping).flatten();
        // Before the log and the metric, which tell of real reloads alone.
        if run == ReloadRun::Dry {
            return Ok(prepared?.report(run));
        }
        let applied = match prepared {
            Ok(prepared) => self.apply(actor, prepared).await,
            Err(error) => Err(error),
        };
        match &applied {
            Ok(report) => log_report(actor, report),
            Err(error) => log_error(actor, error),
        }
        self.parts.metrics.config_read(applied.is_ok());
        applied
    }

    /// Records the change in the audit log and puts it in force.
    async fn apply(
        &self,
        actor: &str,
        prepared: PreparedReload,
    ) -> Result<ReloadReport, ReloadError> {
        let parts = &self.parts;
        let report = prepared.report(ReloadRun::Apply);
        let PreparedReload { reload, certificate, issuers } = prepared;
        let (old, new) = (parts.config.current(), Arc::clone(&reload.config));
        let live: Vec<Change> = reload.live().cloned().collect();
        let same_files = old.loaded().files_sha256 == new.loaded().files_sha256;
        // Other files without a live change go on, so that record and metrics name them.
        if live.is_empty() && certificate.is_none() && same_files {
            return Ok(report);
        }
        let at = parts.serving.clock().utc();
        let (today, ledger) = (at.day(), parts.serving.ledger());
        // Read before the records, because it can fail: a record of plans sets prices, also if
        // the plans never came into force.
        let past = parts.past_spending(today).await?;
        // Recorded before it takes effect: no change without a record.
        let action = audit::config_changed(&new, &live, certificate.is_some(), (actor, at));
        audit::record(ledger, action).await.map_err(ReloadError::Ledger)?;
        // Statements take their prices from these records.
        if plan_names(&old) != plan_names(&new) {
            let recorded = audit::plans_in_force(ledger, &new, actor.to_owned(), at).await;
            recorded.map_err(ReloadError::Ledger)?;
        }
        // Read again, because a new cap counts the spend that is posted by now.
        let past = parts.past_spending(today).await.unwrap_or(past);
        let (adopting, adopted) = (Arc::clone(parts), Arc::clone(&new));
        let adopt = move || adopting.adopt(&adopted, past, today);
        // The sums of many tenants take their time.
        tokio::task::spawn_blocking(adopt).await.map_err(|_| ReloadError::Stopping)?;
        let renewed = certificate.is_some();
        parts.swap(new, certificate, issuers);
        if renewed {
            let parts = Arc::clone(parts);
            // A file is written, which blocks.
            let published = move || admin_certificate::publish(&parts.data, &parts.tls);
            let published = tokio::task::spawn_blocking(published).await;
            // The new certificate is in force by now, so a failure can only be logged.
            if let Ok(Err(error)) = published {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot write the certificate to the data folder; commands on this host cannot reach the gateway"
                );
            }
        }
        Ok(report)
    }
}

impl ReloadParts {
    /// Reads and checks the config and the files that it names.
    fn prepare(&self) -> Result<PreparedReload, ReloadError> {
        let running = self.config.current();
        let mut reload = running.reload().map_err(ReloadError::Config)?;
        let (raises, now) = (self.raises.load(), self.serving.clock().utc());
        // The files have no raises, so those in force are laid over each new config.
        reload.config = Arc::new(with_raises(&reload.config, &raises, now));
        let source = tls_source(&reload.config, &self.data);
        let certificate = TlsIdentity::prepare(&source).map_err(ReloadError::Certificate)?;
        let certificate = self.tls.differs_from(&certificate).then_some(certificate);
        let issuers = if running.issuers() == reload.config.issuers() {
            None
        } else {
            let issuers = self.authenticator.prepare(issuers(&reload.config));
            Some(issuers.map_err(ReloadError::Issuer)?)
        };
        Ok(PreparedReload { reload, certificate, issuers })
    }

    /// Reads what was spent on `today` and in its month.
    async fn past_spending(&self, today: UtcDay) -> Result<PastSpending, ReloadError> {
        let batches = spent_by_batches(&self.jobs, today).await.map_err(ReloadError::Jobs)?;
        let ledger = self.spending.read(self.serving.ledger(), today).await;
        let ledger = ledger.map_err(ReloadError::Ledger)?;
        Ok(PastSpending { ledger, batches })
    }

    /// Applies the limits of `new` to the requests that run and wait. Cannot fail, because
    /// the change is recorded by now.
    fn adopt(&self, new: &Config, past: PastSpending, today: UtcDay) {
        let (limits, clock) = (self.serving.limits(), self.serving.clock());
        limits.adopt(clock.now(), new, past, today);
    }

    /// Puts everything in force. Nothing here can fail.
    fn swap(
        &self,
        new: Arc<Config>,
        certificate: Option<PreparedCertificate>,
        issuers: Option<PreparedIssuers>,
    ) {
        let penalties = &new.gateway().penalties;
        self.serving.penalties().set_terms(penalties);
        self.source_penalties.set_terms(penalties);
        self.doors.adopt(new.gateway());
        self.serving.workers().set_health(&new.worker().health);
        if let Some(certificate) = certificate {
            self.tls.renew(certificate);
        }
        // Before the config, whose tenants the tokens of new issuers name.
        if let Some(issuers) = issuers {
            self.authenticator.install(issuers);
        }
        let sha256 = new.loaded().files_sha256.clone();
        self.config.replace(new);
        self.metrics.config_loaded(&sha256, self.serving.clock().utc());
        self.serving.limits().log_missing_plans();
        // After the swap: lines that try again must meet the new limits.
        self.jobs.end_waits();
    }
}

/// Returns the name of the plan that sets each tenant's prices, in the order of tenants.
fn plan_names(config: &Config) -> Vec<(&str, Option<&str>)> {
    let tenants = config.tenants();
    let priced = tenants
        .map(|tenant| (tenant.name.as_str(), tenant.priced_as().map(|plan| plan.name.as_str())));
    priced.collect()
}

fn log_report(actor: &str, report: &ReloadReport) {
    let ReloadReport { applied: _, certificate_renewed, changes } = report;
    let pending = changes.iter().filter(|change| change.effect == "restart").count();
    let live = changes.len() - pending;
    tracing::info!(
        actor,
        live,
        pending,
        certificate_renewed,
        "config was reloaded; live changes are in force, pending ones wait for a restart"
    );
    for ChangeRow { key, old, new, place, effect } in changes.iter().take(MOST_LOGGED) {
        let (old, new) = (old.as_deref().unwrap_or("-"), new.as_deref().unwrap_or("-"));
        tracing::info!(key, old, new, place, effect, "config key changed");
    }
}

fn log_error(actor: &str, error: &ReloadError) {
    for mistake in error.mistakes().iter().take(MOST_LOGGED) {
        tracing::error!(
            actor,
            mistake,
            "config was not reloaded; the earlier config stays in force"
        );
    }
}

/// Interval between two looks for changed files.
const POLL: Duration = Duration::from_secs(2);

/// Time for which changed files must stay the same before they are read.
const SETTLED: Duration = Duration::from_millis(200);

/// Changes or mistakes of one reload that the log shows.
const MOST_LOGGED: usize = 50;

#[cfg(test)]
mod tests;
