//! Submits acts to the ledger, and submits them again while the ledger is busy
//! or its disk refuses. Every loop of the gateway that waits for the ledger is
//! this one.

use std::time::Duration;

use tollgate_ledger::{Act, LedgerError, LedgerHandle, Posted};

/// Wait before an act is submitted again to a ledger with a full queue.
pub const BUSY_WAIT: Duration = Duration::from_millis(20);
/// Wait before an act is submitted again while the disk refuses.
pub const STORAGE_WAIT: Duration = Duration::from_millis(500);

/// Submits `act` until the ledger has done it or `retry` gives up. `retry`
/// returns how long to wait after an error, or `None` to give up.
///
/// # Errors
/// The error for which `retry` gave up.
pub async fn submit(
    ledger: &LedgerHandle,
    act: impl Into<Act>,
    mut retry: impl FnMut(&LedgerError) -> Option<Duration>,
) -> Result<Posted, LedgerError> {
    let act = act.into();
    loop {
        // A clone shares the act's block, so that an attempt costs no copy.
        let error = match ledger.submit(act.clone()).await {
            Ok(posted) => return Ok(posted),
            Err(error) => error,
        };
        match retry(&error) {
            Some(wait) => tokio::time::sleep(wait).await,
            None => return Err(error),
        }
    }
}

/// Returns the wait after an error that goes away by itself: a full queue or a
/// disk that refuses. `None` for an error that stays.
pub fn while_unavailable(error: &LedgerError) -> Option<Duration> {
    match error {
        LedgerError::Busy => Some(BUSY_WAIT),
        error if error.is_of_the_disk() => Some(STORAGE_WAIT),
        _ => None,
    }
}
