//! The lease of a claim, which is renewed while the batch runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tollgate_domain::UtcTime;

use super::DispatchContext;
use crate::batch::BatchState;
use crate::claim::Claim;
use crate::error::JobError;
use crate::rules;

/// Time after which another dispatcher may claim a batch.
pub(super) const LEASE: Duration = Duration::from_secs(15);
/// Wait before a failed renewal is repeated.
const RENEWAL_WAIT: Duration = Duration::from_secs(1);

/// The end of a claim's lease. Clones share it.
#[derive(Clone)]
pub(super) struct Lease(Arc<AtomicU64>);

impl Lease {
    pub(super) fn new(until: UtcTime) -> Self {
        Self(Arc::new(AtomicU64::new(until.0)))
    }

    /// Returns true if another dispatcher may have claimed the batch.
    pub(super) fn is_over(&self, now: UtcTime) -> bool {
        // Relaxed: the time guards no other memory.
        now.0 >= self.0.load(Ordering::Relaxed)
    }

    /// Renews the lease until the claim is lost. Cancels `ending` when the batch is found
    /// to be ending.
    pub(super) async fn keep(
        &self,
        context: &DispatchContext,
        claim: Claim,
        ending: &CancellationToken,
    ) -> JobError {
        let mut wait = context.options.renewal;
        loop {
            tokio::time::sleep(wait).await;
            // Taken before the call, so that a slow commit does not lengthen the lease.
            let until = rules::after(context.jobs.now(), LEASE);
            match context.store(move |store| store.renew(&claim, until)).await {
                Ok(batch) => {
                    self.0.store(until.0, Ordering::Relaxed);
                    if matches!(batch.state, BatchState::Ending(_)) {
                        ending.cancel();
                    }
                    wait = context.options.renewal;
                }
                Err(JobError::StaleClaim) => return JobError::StaleClaim,
                // Until then no other dispatcher can have the batch, so a failed renewal is
                // repeated.
                Err(error) if self.is_over(context.jobs.now()) => return error,
                Err(_) => wait = RENEWAL_WAIT,
            }
        }
    }
}
