//! One try of a line, from the moment it is sent: its deadline, and the cap that follows a
//! lost worker.

use std::sync::Arc;
use std::time::Duration;

use super::source::NextTry;
use crate::service::{CapRequest, LineRequest, LineService, TryOutcome};

/// Time that a cancelled try has to give its figures. A worker that is silent for longer
/// is not waited for.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// Wait before the ledger is asked again for a cap.
const CAP_WAIT: Duration = Duration::from_secs(1);

/// Something that has happened to a line.
pub(super) enum LineEvent {
    /// A try has ended.
    Ran(NextTry, RanTry),
    /// The ledger has the cap of a line's last try.
    Capped(NextTry, AfterCap),
}

impl LineEvent {
    /// Returns true if the try may have held a part of a limit until now.
    pub(super) fn ends_hold(&self) -> bool {
        match self {
            Self::Ran(_, RanTry::Late(_)) => true,
            Self::Ran(_, RanTry::InTime(outcome)) => match outcome {
                TryOutcome::Answered(answer) => answer.is_paid,
                TryOutcome::Lost | TryOutcome::Cancelled { .. } => true,
                _ => false,
            },
            Self::Capped(..) => false,
        }
    }
}

/// The end of a try.
pub(super) enum RanTry {
    /// The service has given the outcome in time.
    InTime(TryOutcome),
    /// The try took too long. `None` if the worker was silent after that, too.
    Late(Option<TryOutcome>),
}

/// The plan for a line after the cap of its last try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterCap {
    /// The line runs again.
    Retry,
    /// The line has taken too long.
    FailLate,
}

/// Runs a try to its end.
pub(super) async fn run_try(
    service: Arc<dyn LineService>,
    (next, request): (NextTry, LineRequest),
    limit: Duration,
) -> LineEvent {
    let cancel = request.cancel.clone();
    let mut run = service.run(request);
    let ran = tokio::select! {
        biased;
        // First, so that an outcome that comes with the deadline is still in time.
        outcome = &mut run => RanTry::InTime(outcome),
        () = tokio::time::sleep(limit) => {
            cancel.cancel();
            RanTry::Late(tokio::time::timeout(SILENCE, run).await.ok())
        }
    };
    LineEvent::Ran(next, ran)
}

/// Waits until the ledger has the cap of a try.
pub(super) async fn cap(service: &dyn LineService, request: CapRequest) {
    while !service.cap(request.clone()).await {
        tokio::time::sleep(CAP_WAIT).await;
    }
}
