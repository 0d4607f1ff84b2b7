//! The manifest of the data folder: what the subcommands do when a database is
//! missing, empty or older than the folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tollgate_gateway::audit::record;
use tollgate_ledger::{AdminAction, DatabasePlace, LedgerHandle, Loss, Manifest, ManifestError};

use crate::common::now;

/// Finds the databases that have lost data since the last run.
///
/// # Errors
/// A database has lost data and `accept_loss` is false, or the manifest cannot be
/// read.
pub fn check(data: &Path, ledger: &DatabasePlace, accept_loss: bool) -> Result<Vec<Loss>> {
    let manifest = match Manifest::load(data) {
        Ok(manifest) => manifest,
        // The admin accepts that nothing is known of the databases.
        Err(error @ ManifestError::Torn { .. }) if accept_loss => {
            tracing::warn!(%error, "the manifest is damaged; a new one is written");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let losses = manifest.map_or(Vec::new(), |manifest| manifest.losses(data, ledger));
    match (losses.is_empty(), accept_loss) {
        (false, false) => bail!(refusal(data, &losses)),
        (true, true) => tracing::warn!("--accept-loss has no effect: no database has lost data"),
        _ => {}
    }
    for loss in &losses {
        tracing::warn!(
            file = loss.file,
            "{loss}; --accept-loss: the gateway starts without the lost data"
        );
    }
    Ok(losses)
}

/// Refuses to use keys that have lost data, for commands beside `up`: they must not make an
/// empty database in their place.
///
/// # Errors
/// The database is missing, empty or old, or the manifest cannot be read.
pub fn refuse_lost_keys(data: &Path, keys: &DatabasePlace) -> Result<()> {
    let manifest = Manifest::load(data)?;
    match manifest.and_then(|manifest| manifest.key_loss(keys)) {
        Some(loss) => bail!(refusal(data, &[loss])),
        None => Ok(()),
    }
}

/// Refuses to use a ledger that has lost data, as [`refuse_lost_keys`].
///
/// # Errors
/// As [`refuse_lost_keys`].
pub fn refuse_lost_ledger(data: &Path, ledger: &DatabasePlace) -> Result<()> {
    let manifest = Manifest::load(data)?;
    match manifest.and_then(|manifest| manifest.ledger_loss(ledger)) {
        Some(loss) => bail!(refusal(data, &[loss])),
        None => Ok(()),
    }
}

fn refusal(data: &Path, losses: &[Loss]) -> String {
    let losses: Vec<String> = losses.iter().map(ToString::to_string).collect();
    format!(
        "data folder {} has lost data: {}. Restore a backup (`tollgate ledger restore FILE` for ledger.db, a copy for the others), \
         or accept the loss with `tollgate up --accept-loss`, which the audit log records",
        data.display(),
        losses.join("; ")
    )
}

/// Records that an admin accepted `losses`, if there are any.
///
/// # Errors
/// The audit log cannot be written.
pub async fn record_losses(ledger: &LedgerHandle, losses: &[Loss]) -> Result<()> {
    if losses.is_empty() {
        return Ok(());
    }
    let at = now();
    let lost: Vec<_> =
        losses.iter().map(|Loss { file, what }| json!({ "file": file, "what": what })).collect();
    let action = AdminAction {
        id: format!("loss-{}-{}", at.0, std::process::id()),
        at,
        operation: "data.loss_accepted".to_owned(),
        actor: format!("uid {}", rustix::process::getuid().as_raw()),
        user: None,
        detail: json!({ "lost": lost }),
    };
    record(ledger, action).await.context("cannot write the audit log")
}

/// Writes the manifest of this start.
///
/// # Errors
/// A database or the manifest cannot be read or written.
pub async fn begin(data: &Path, ledger: &DatabasePlace) -> Result<()> {
    let (data, ledger) = (data.to_owned(), ledger.clone());
    // Reading and syncing files blocks.
    tokio::task::spawn_blocking(move || Manifest::begin(&data, &ledger))
        .await?
        .context("cannot write the manifest of the data folder")
}

/// Keeps the manifest up to date until `stop`. A failure is logged once: the old
/// manifest stays valid and says less.
pub async fn follow(data: PathBuf, ledger: DatabasePlace, stop: CancellationToken) {
    let mut failing = false;
    let mut ticks = tokio::time::interval(EVERY);
    // Missed ticks must not follow in a burst: each one reads three databases.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let result = refresh(&data, &ledger).await;
        if let (Err(error), false) = (&result, failing) {
            let error = format!("{error:#}");
            tracing::error!(error, "cannot write the manifest of the data folder; trying again");
        }
        failing = result.is_err();
    }
}

/// Writes the manifest if a checkpoint was signed or keys have changed since.
///
/// # Errors
/// As [`begin`].
pub async fn refresh(data: &Path, ledger: &DatabasePlace) -> Result<()> {
    let (data, ledger) = (data.to_owned(), ledger.clone());
    tokio::task::spawn_blocking(move || Manifest::refresh(&data, &ledger))
        .await?
        .context("cannot write the manifest of the data folder")
}

/// Time between two looks for a newer checkpoint: the time between two checkpoints.
const EVERY: Duration = Duration::from_secs(10);
