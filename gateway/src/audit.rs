//! Admin actions on their way into the audit log. The ledger's writer records
//! each action once, however often it is submitted, because actions have ids.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use tollgate_config::{Change, Config, Loaded, Tenant};
use tollgate_domain::{TenantId, UtcTime, WorkerName};
use tollgate_ledger::gateways::{GatewayHome, OtherGateway};
use tollgate_ledger::{Act, AdminAction, LedgerError, LedgerHandle, PlansInForce};
use tollgate_serving::submit::submit;
use tollgate_serving::workers::Rest;

use crate::auth::{KeyStore, KeyStoreError};
use crate::raises::RaisedLimit;

/// Records `action` and returns once it is on the disk.
///
/// # Errors
/// The action is not recorded: the disk refuses the commit, or the ledger is
/// closed.
pub async fn record(ledger: &LedgerHandle, action: AdminAction) -> Result<(), LedgerError> {
    submit_while_busy(ledger, action).await
}

/// Records the plan of each tenant of `config` from `at` on, and returns once the
/// record is on the disk. Statements take their prices from these records.
///
/// # Errors
/// The errors of [`record`].
pub async fn plans_in_force(
    ledger: &LedgerHandle,
    config: &Config,
    actor: String,
    at: UtcTime,
) -> Result<(), LedgerError> {
    let action = AdminAction {
        // Of the time and the process, because the ledger ignores an id that it has already.
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

/// Signs the log and returns once the signature is on the disk. A stop calls
/// this last, so that the checkpoint covers every record.
///
/// # Errors
/// The errors of [`record`].
pub async fn sign(ledger: &LedgerHandle) -> Result<(), LedgerError> {
    submit_while_busy(ledger, Act::Sign).await
}

/// Submits `act`, again while the ledger is busy. An error of the disk is
/// returned at once: the caller reports it to an admin.
async fn submit_while_busy(ledger: &LedgerHandle, act: impl Into<Act>) -> Result<(), LedgerError> {
    let is_busy = |error: &LedgerError| matches!(error, LedgerError::Busy).then_some(BUSY_WAIT);
    submit(ledger, act, is_busy).await.map(|_| ())
}

/// Builds the action that `config` is in force from `at` on. `key` is the log's
/// public key.
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

/// Builds the action that a reload puts `config` in force from `at` on. `changes` are those
/// that take effect; `renewed` is true if clients see another certificate.
pub(crate) fn config_changed(
    config: &Config,
    changes: &[Change],
    renewed: bool,
    (actor, at): (&str, UtcTime),
) -> AdminAction {
    let Loaded { files_sha256, overrides } = config.loaded();
    let shown = |change: &Change| {
        let Change { key, old, new, place, effect: _ } = change;
        serde_json::json!({ "key": key, "old": old, "new": new, "place": place.to_string() })
    };
    let mut left = MOST_CHANGE_BYTES;
    let fits = |change: &serde_json::Value| {
        // The ledger replaces a longer detail by its hash, so the list is cut before that.
        left = left.saturating_sub(change.to_string().len());
        left > 0
    };
    let first: Vec<_> = changes.iter().map(shown).take_while(fits).collect();
    AdminAction {
        id: format!("config-{}-{}-{}", config.revision(), at.0, std::process::id()),
        at,
        operation: "config.changed".to_owned(),
        actor: actor.to_owned(),
        user: None,
        detail: serde_json::json!({
            "certificate_renewed": renewed,
            "changes": first,
            "changes_total": changes.len(),
            "config_sha256": files_sha256,
            "overrides": overrides,
        }),
    }
}

/// Builds the action that a raise of a limit begins or ends at `at`.
pub(crate) fn raise_changed(
    operation: &str,
    raise: &RaisedLimit,
    (actor, at): (&str, UtcTime),
) -> AdminAction {
    let RaisedLimit { tenant, limit, value, until, since: _, actor: _ } = raise;
    AdminAction {
        id: format!("{operation}-{tenant}-{limit}-{}-{}", at.0, std::process::id()),
        at,
        operation: operation.to_owned(),
        actor: actor.to_owned(),
        user: Some((tenant.to_string(), None)),
        detail: serde_json::json!({ "limit": limit, "value": value, "until_ns": until }),
    }
}

/// Builds the action that an admin lifts the penalties of `offender`, a tenant or
/// a source.
pub(crate) fn penalty_lifted(
    tenant: Option<&TenantId>,
    offender: &str,
    (actor, at): (&str, UtcTime),
) -> AdminAction {
    // Two removals at the same instant need different ids, or the ledger would ignore the second as
    // a repeat.
    static LIFTED: AtomicU64 = AtomicU64::new(0);
    let count = LIFTED.fetch_add(1, Ordering::Relaxed);
    AdminAction {
        id: format!("penalty-{}-{}-{count}", at.0, std::process::id()),
        at,
        operation: "penalty.lifted".to_owned(),
        actor: actor.to_owned(),
        user: tenant.map(|tenant| (tenant.to_string(), None)),
        detail: serde_json::json!({ "offender": offender }),
    }
}

/// Builds the action that an admin frees what a gateway has of the caps.
pub(crate) fn gateway_freed(gateway: &GatewayHome, (actor, at): (&str, UtcTime)) -> AdminAction {
    let GatewayHome { home, name, silent_ms, caps, state: _ } = gateway;
    AdminAction {
        id: format!("gateway-{home}-{}-{}", at.0, std::process::id()),
        at,
        operation: "gateway.freed".to_owned(),
        actor: actor.to_owned(),
        user: None,
        detail: serde_json::json!({
            "gateway": home, "name": name, "silent_ms": silent_ms, "caps": caps,
        }),
    }
}

/// Builds the action that a gateway is retired by another one.
pub(crate) fn gateway_retired(gateway: &OtherGateway, at: UtcTime) -> AdminAction {
    let OtherGateway { home, number, life, beat: _, workers: _, is_retired: _ } = gateway;
    AdminAction {
        id: format!("gateway-{home}-{number}-retired"),
        at,
        operation: "gateway.retired".to_owned(),
        actor: "gateway".to_owned(),
        user: None,
        detail: serde_json::json!({ "gateway": home, "number": number, "start": life }),
    }
}

/// Builds the action that an admin rests or wakes a worker.
pub(crate) fn worker_rest(
    worker: &WorkerName,
    rest: Rest,
    (actor, at): (&str, UtcTime),
) -> AdminAction {
    let operation = match rest {
        Rest::Resting => "worker.rested",
        Rest::Awake => "worker.woken",
    };
    AdminAction {
        id: format!("{operation}-{worker}-{}-{}", at.0, std::process::id()),
        at,
        operation: operation.to_owned(),
        actor: actor.to_owned(),
        user: None,
        detail: serde_json::json!({ "worker": worker }),
    }
}

/// Builds the action that an admin cancels a batch.
pub(crate) fn batch_cancelled(
    tenant: &TenantId,
    batch: &str,
    (actor, at): (&str, UtcTime),
) -> AdminAction {
    AdminAction {
        id: format!("batch.cancelled-{batch}-{}-{}", at.0, std::process::id()),
        at,
        operation: "batch.cancelled".to_owned(),
        actor: actor.to_owned(),
        user: None,
        detail: serde_json::json!({ "tenant": tenant, "batch": batch }),
    }
}

/// Moves actions on keys from the key database to the ledger, until `stop` and
/// once after it. Actions that cannot be moved stay in the key database; the
/// failure is logged once.
pub(crate) async fn follow_keys(keys: KeyStore, ledger: LedgerHandle, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        let last = tokio::select! {
            biased;
            // First, so that a stop is seen even if a tick is due. Then one more round moves the
            // rest.
            () = stop.cancelled() => true,
            _ = ticks.tick() => false,
        };
        match hand_over(&keys, &ledger).await {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot record changes of API keys in the audit log; trying again"
                );
            }
            // The failure is in the log already; four lines a second would fill the log.
            Err(_) => {}
        }
        if last {
            return;
        }
    }
}

/// An error that keeps actions in the key database.
#[derive(Debug, thiserror::Error)]
enum HandOverError {
    #[error("cannot read or update the key database")]
    Keys(#[from] KeyStoreError),
    #[error("the ledger did not record an action")]
    Ledger(#[from] LedgerError),
    #[error("the runtime is stopping")]
    Stopping,
}

/// Moves all waiting actions, in batches.
async fn hand_over(keys: &KeyStore, ledger: &LedgerHandle) -> Result<(), HandOverError> {
    loop {
        let store = keys.clone();
        let waiting = tokio::task::spawn_blocking(move || store.actions(AT_ONCE)).await;
        let waiting = waiting.map_err(|_| HandOverError::Stopping)??;
        if waiting.is_empty() {
            return Ok(());
        }
        // Submits all actions in order before it awaits the first, so that they
        // share a commit.
        let (mut submitted, mut numbers) = (Vec::new(), Vec::new());
        for (number, action) in waiting {
            let mut recorded = ledger.submit(action);
            numbers.push(number);
            // A full queue refuses at once. The actions behind the refused one must
            // wait with it, or the log would have them in another order.
            match (&mut recorded).now_or_never() {
                None => submitted.push(recorded),
                Some(result) => {
                    result?;
                }
            }
        }
        for recorded in submitted {
            recorded.await?;
        }
        // Deleted only now: after a crash in between, the ledger ignores the
        // repeated ids.
        let store = keys.clone();
        let forgotten = tokio::task::spawn_blocking(move || store.forget_actions(&numbers)).await;
        forgotten.map_err(|_| HandOverError::Stopping)??;
    }
}

/// Bytes of the changes that one record lists.
const MOST_CHANGE_BYTES: usize = 12 * 1024;

/// Interval between two looks for waiting actions.
const POLL: Duration = Duration::from_millis(250);

/// Actions in one batch: fewer than the ledger's queue holds.
const AT_ONCE: usize = 100;

/// Wait before an action is submitted again to a busy ledger.
const BUSY_WAIT: Duration = Duration::from_millis(5);
