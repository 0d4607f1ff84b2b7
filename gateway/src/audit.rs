//! What admins do, on its way into the audit log: told by whoever does it,
//! recorded by the ledger's writer, once for each id.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tollgate_config::{Config, Loaded, Tenant};
use tollgate_domain::{TenantId, UtcTime};
use tollgate_ledger::{Act, AdminAction, LedgerError, LedgerHandle, PlansInForce};
use tollgate_serving::submit::submit;

use crate::auth::{KeyStore, KeyStoreError};

/// Records `action` and returns once it is on the disk.
///
/// # Errors
/// It is not recorded: the disk refuses, or the ledger is closed.
pub async fn record(ledger: &LedgerHandle, action: AdminAction) -> Result<(), LedgerError> {
    submit_while_busy(ledger, action).await
}

/// Tells the ledger which plan each tenant of `config` has from `at` on, and
/// returns once that is on the disk: statements go by it.
///
/// # Errors
/// As [`record`].
pub async fn plans_in_force(
    ledger: &LedgerHandle,
    config: &Config,
    actor: String,
    at: UtcTime,
) -> Result<(), LedgerError> {
    let action = AdminAction {
        id: format!("plans-{}-{}", at.0, std::process::id()),
        at,
        operation: "plans.in_force".to_owned(),
        actor,
        user: None,
        detail: serde_json::Value::Null,
    };
    let priced = |tenant: &Tenant| Some((tenant.name.clone(), tenant.priced_as()?.name.clone()));
    let plans = config.tenants().filter_map(priced).collect();
    let in_force = PlansInForce { action, plans };
    submit_while_busy(ledger, in_force).await
}

/// Signs what is recorded and returns once that is on the disk: the last thing
/// that a stop does.
///
/// # Errors
/// As [`record`].
pub async fn sign(ledger: &LedgerHandle) -> Result<(), LedgerError> {
    submit_while_busy(ledger, Act::Sign).await
}

/// Submits `act`, again while the ledger is busy. An error of the disk is
/// returned at once: the caller reports it to an admin.
async fn submit_while_busy(ledger: &LedgerHandle, act: impl Into<Act>) -> Result<(), LedgerError> {
    let is_busy = |error: &LedgerError| matches!(error, LedgerError::Busy).then_some(BUSY_WAIT);
    submit(ledger, act, is_busy).await.map(|_| ())
}

/// That `config` is in force from `at` on; `key` is the log's public key.
pub fn config_loaded(config: &Config, key: &str, actor: String, at: UtcTime) -> AdminAction {
    let Loaded { files_sha256, overrides } = config.loaded();
    AdminAction {
        id: format!("config-{}-{}", at.0, std::process::id()),
        at,
        operation: "config.loaded".to_owned(),
        actor,
        user: None,
        detail: serde_json::json!({
            "audit_key": key,
            "config_sha256": files_sha256,
            "overrides": overrides,
            "version": env!("CARGO_PKG_VERSION"),
        }),
    }
}

/// That an admin takes away what `offender` has earned, a tenant or a source.
pub(crate) fn penalty_lifted(
    tenant: Option<&TenantId>,
    offender: &str,
    at: UtcTime,
) -> AdminAction {
    static LIFTED: AtomicU64 = AtomicU64::new(0);
    let count = LIFTED.fetch_add(1, Ordering::Relaxed);
    AdminAction {
        id: format!("penalty-{}-{}-{count}", at.0, std::process::id()),
        at,
        operation: "penalty.lifted".to_owned(),
        actor: "admin key".to_owned(),
        user: tenant.map(|tenant| (tenant.to_string(), None)),
        detail: serde_json::json!({ "offender": offender }),
    }
}

/// Hands what was done to the keys to the ledger, until `stop` and once more.
/// What cannot be handed over stays where it is, and is logged once.
pub(crate) async fn follow_keys(keys: KeyStore, ledger: LedgerHandle, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        let last = tokio::select! {
            biased;
            () = stop.cancelled() => true,
            _ = ticks.tick() => false,
        };
        match hand_over(&keys, &ledger).await {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "what was done to the keys is not recorded yet"
                );
            }
            Err(_) => {}
        }
        if last {
            return;
        }
    }
}

/// Why actions wait.
#[derive(Debug, thiserror::Error)]
enum HandOverError {
    #[error("the key database")]
    Keys(#[from] KeyStoreError),
    #[error("the ledger")]
    Ledger(#[from] LedgerError),
    #[error("the runtime is stopping")]
    Stopping,
}

async fn hand_over(keys: &KeyStore, ledger: &LedgerHandle) -> Result<(), HandOverError> {
    loop {
        let store = keys.clone();
        let waiting = tokio::task::spawn_blocking(move || store.actions(AT_ONCE)).await;
        let waiting = waiting.map_err(|_| HandOverError::Stopping)??;
        if waiting.is_empty() {
            return Ok(());
        }
        // All are sent, in their order, before the first answer is waited for:
        // they share a commit.
        let (mut submitted, mut numbers) = (Vec::new(), Vec::new());
        for (number, action) in waiting {
            submitted.push(ledger.submit(action));
            numbers.push(number);
        }
        for recorded in submitted {
            recorded.await?;
        }
        let store = keys.clone();
        let forgotten = tokio::task::spawn_blocking(move || store.forget_actions(&numbers)).await;
        forgotten.map_err(|_| HandOverError::Stopping)??;
    }
}

/// How often the keys' actions are looked for.
const POLL: Duration = Duration::from_millis(250);

/// How many are handed over at once: fewer than the ledger's queue holds.
const AT_ONCE: usize = 100;

const BUSY_WAIT: Duration = Duration::from_millis(5);
