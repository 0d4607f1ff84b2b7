//! Changes of the raised limits in force. They take the way of a reload: recorded in the
//! audit log, kept, and swapped as a whole.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::{MissedTickBehavior, interval};
use tollgate_config::{RaiseError, RaisedLimits};
use tollgate_domain::{TenantId, UtcTime};
use tollgate_jobs::JobError;
use tollgate_ledger::LedgerError;

use super::{ReloadError, Reloader};
use crate::audit;
use crate::raises::{self, RaiseFileError, RaisedLimit};

/// A reason for which raises were not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RaiseRefusal {
    /// The config has no such tenant.
    #[error("the config has no tenant {0}")]
    UnknownTenant(TenantId),
    /// The tenant has no such raise.
    #[error("no raise of {0}")]
    NoRaise(String),
    /// The limits cannot be raised so.
    #[error(transparent)]
    Limits(#[from] RaiseError),
    /// The end is past, or too far away.
    #[error("a raise must end in the future and within 366 days")]
    Until,
    /// There are as many raises as there may be.
    #[error("there are {} raises, and no more are kept", raises::MOST)]
    TooMany,
    /// The file of raises cannot be written.
    #[error("cannot keep the raises")]
    File(#[from] RaiseFileError),
    /// The change cannot be recorded.
    #[error("cannot record the change")]
    Ledger(#[source] LedgerError),
    /// The store of batches does not tell what their lines have spent.
    #[error("the batches cannot be read")]
    Jobs(#[source] JobError),
    /// The gateway stops.
    #[error("the gateway stops")]
    Stopping,
}

/// The two ways in which raises change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RaiseChange {
    Raised,
    Ended,
}

impl Reloader {
    /// Returns the raises that were made and have not ended.
    pub(crate) fn raises(&self) -> Arc<Vec<RaisedLimit>> {
        self.parts.raises.load_full()
    }

    /// Raises `limits` of `tenant` until `until`. Returns the new raises, which are in force
    /// then. `actor` is the name in the audit log.
    ///
    /// # Errors
    /// Nothing changes then; see [`RaiseRefusal`].
    pub(crate) async fn raise(
        &self,
        actor: &str,
        tenant: TenantId,
        limits: Map<String, Value>,
        until: UtcTime,
    ) -> Result<Vec<RaisedLimit>, RaiseRefusal> {
        let actor = actor.to_owned();
        self.in_turn(move |reloader| async move {
            let since = reloader.parts.serving.clock().utc();
            let longest = raises::LONGEST.as_nanos() as u64; // 366 days fit
            if until <= since || until.0 - since.0 > longest {
                return Err(RaiseRefusal::Until);
            }
            let config = reloader.config();
            let known = config.tenant(&tenant);
            let known = known.ok_or_else(|| RaiseRefusal::UnknownTenant(tenant.clone()))?;
            RaisedLimits::from_json(&limits)?.check(&config, known)?;
            let raise = |(limit, value): (String, Value)| {
                let (tenant, actor) = (tenant.clone(), actor.clone());
                RaisedLimit { tenant, limit, value, until, since, actor }
            };
            let new: Vec<RaisedLimit> = limits.into_iter().map(raise).collect();
            let all = raises::with(&reloader.raises(), &new);
            if all.len() > raises::MOST {
                return Err(RaiseRefusal::TooMany);
            }
            reloader.replace_raises(&actor, RaiseChange::Raised, &new, all).await?;
            Ok(new)
        })
        .await
    }

    /// Ends the raise of `limit`, or all raises, of `tenant` before their time, and returns
    /// them.
    ///
    /// # Errors
    /// Nothing changes then; see [`RaiseRefusal`].
    pub(crate) async fn end_raises(
        &self,
        actor: &str,
        tenant: TenantId,
        limit: Option<String>,
    ) -> Result<Vec<RaisedLimit>, RaiseRefusal> {
        let actor = actor.to_owned();
        self.in_turn(move |reloader| async move {
            let is_meant = |raise: &RaisedLimit| {
                raise.tenant == tenant && limit.as_ref().is_none_or(|limit| raise.limit == *limit)
            };
            let (ended, kept) = raises::split(&reloader.raises(), is_meant);
            if ended.is_empty() {
                let what = limit.unwrap_or_else(|| format!("tenant {tenant}"));
                return Err(RaiseRefusal::NoRaise(what));
            }
            reloader.replace_raises(&actor, RaiseChange::Ended, &ended, kept).await?;
            Ok(ended)
        })
        .await
    }

    /// Ends each raise at its time; never returns.
    pub(crate) async fn follow_raises(self) {
        let mut ticks = interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let now = self.parts.serving.clock().utc();
            if !self.raises().iter().any(|raise| raise.until <= now) {
                continue;
            }
            let ended = self.in_turn(move |reloader| async move {
                // Looked at again in turn, because an admin may have ended one meanwhile.
                let (ended, kept) = raises::split(&reloader.raises(), |raise| raise.until <= now);
                reloader.replace_raises("clock", RaiseChange::Ended, &ended, kept).await
            });
            if let Err(error) = ended.await {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot end a raise whose time is over; the next look tries again"
                );
            }
        }
    }

    /// Runs `change` alone, also to its end if the caller stops waiting for it.
    async fn in_turn<T: Send + 'static, F>(
        &self,
        change: impl FnOnce(Self) -> F + Send + 'static,
    ) -> Result<T, RaiseRefusal>
    where
        F: Future<Output = Result<T, RaiseRefusal>> + Send,
    {
        let (reloader, tasks) = (self.clone(), self.parts.serving.tasks());
        let task = tasks.spawn(async move {
            let turn = Arc::clone(&reloader.turn);
            let _turn = turn.lock().await;
            change(reloader).await
        });
        task.await.map_err(|_| RaiseRefusal::Stopping)?
    }

    /// Records the change of some raises, keeps `all` and puts them in force.
    async fn replace_raises(
        &self,
        actor: &str,
        change: RaiseChange,
        changed: &[RaisedLimit],
        all: Vec<RaisedLimit>,
    ) -> Result<(), RaiseRefusal> {
        let parts = Arc::clone(&self.parts);
        let at = parts.serving.clock().utc();
        let operation = match change {
            RaiseChange::Raised => "limits.raised",
            RaiseChange::Ended => "limits.raise_ended",
        };
        let today = at.day();
        // Read before anything is recorded or kept, because it can fail.
        let past = parts.past_spending(today).await.map_err(unread)?;
        // Recorded before it takes effect: no change without a record.
        for raise in changed {
            let action = audit::raise_changed(operation, raise, (actor, at));
            audit::record(parts.serving.ledger(), action).await.map_err(RaiseRefusal::Ledger)?;
        }
        // Read again, because a new cap counts the spend that is posted by now.
        let past = parts.past_spending(today).await.unwrap_or(past);
        let work = move || {
            // Before the raises act, so that a restart loses none that was in force.
            raises::write(&parts.data, &all)?;
            let config = Arc::new(raises::apply(&parts.config.current(), &all, at));
            parts.adopt(&config, past, today);
            parts.config.replace(config);
            parts.raises.store(Arc::new(all));
            // After the swap: lines that try again must meet the new limits.
            parts.jobs.end_waits();
            Ok(())
        };
        // Files are written, which blocks.
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| RaiseRefusal::Stopping).flatten()?;
        for RaisedLimit { tenant, limit, value, .. } in changed {
            let (tenant, value) = (tenant.as_str(), value.to_string());
            match change {
                RaiseChange::Raised => {
                    tracing::info!(actor, tenant, limit, value, "a limit was raised");
                }
                RaiseChange::Ended => {
                    tracing::info!(actor, tenant, limit, "a raise ended; the plan's limit applies");
                }
            }
        }
        Ok(())
    }
}

/// Returns the refusal if the past spending cannot be read.
fn unread(error: ReloadError) -> RaiseRefusal {
    match error {
        ReloadError::Ledger(error) => RaiseRefusal::Ledger(error),
        ReloadError::Jobs(error) => RaiseRefusal::Jobs(error),
        // A read has no other errors.
        _ => RaiseRefusal::Stopping,
    }
}

/// Interval between two looks for raises whose time is over.
const LOOK: Duration = Duration::from_secs(1);
