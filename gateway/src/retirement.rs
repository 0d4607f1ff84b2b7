//! The retirement of gateways that are lost: one that runs settles for them, so that what they had
//! of the caps is free, and what they left open costs no tenant anything.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tollgate_ledger::gateways::{MembershipError, OtherGateway};
use tollgate_serving::Serving;
use tollgate_serving::lost_gateway::RetireError;

use crate::admin::Neighbours;
use crate::audit;

/// The longest time for one gateway. Its requests may run on at the workers if it was only cut off
/// from the database server. After that time the next one has its turn, and this one later again.
const LONGEST: Duration = Duration::from_secs(60);

/// Retires the lost gateways that come over `lost`, one after the other.
pub(crate) async fn run(
    mut lost: mpsc::Receiver<Vec<OtherGateway>>,
    neighbours: Neighbours,
    serving: Arc<Serving>,
) {
    while let Some(found) = lost.recv().await {
        for gateway in found {
            let (home, number) = (gateway.home.clone(), gateway.number);
            let retired = timeout(LONGEST, retire(gateway, &neighbours, &serving));
            match retired.await.unwrap_or(Err(RetirementError::Late)) {
                Ok(Some(caps)) => tracing::warn!(
                    home,
                    number,
                    caps,
                    "a gateway was lost; what it had ordered is in the ledger, and what it had of the caps is free"
                ),
                // It was heard of again.
                Ok(None) => {}
                Err(error) => tracing::warn!(
                    home,
                    number,
                    error = &error as &dyn std::error::Error,
                    "a gateway is lost, and cannot be settled yet; what it has of the caps stays with it"
                ),
            }
        }
    }
}

/// A reason why a lost gateway could not be retired now.
#[derive(Debug, thiserror::Error)]
enum RetirementError {
    #[error("its requests still run, or the servers are slow")]
    Late,
    #[error("it cannot be recorded in the audit log")]
    Record,
    #[error(transparent)]
    Server(#[from] MembershipError),
    #[error(transparent)]
    Retire(#[from] RetireError),
}

/// Retires one gateway. Returns the number of caps of which it had something; `None` if it has
/// been heard of again.
async fn retire(
    lost: OtherGateway,
    neighbours: &Neighbours,
    serving: &Serving,
) -> Result<Option<usize>, RetirementError> {
    let (noted, is_begun) = (lost.clone(), lost.is_retired);
    // From here on it ends itself at its next beat, so it cannot be left half retired.
    let may = neighbours.call(move |homes| Ok(is_begun || homes.retire(&noted)?)).await?;
    if !may {
        return Ok(None);
    }
    serving.settle_lost(&lost).await?;
    // Recorded first: nothing is freed without a record.
    let action = audit::gateway_retired(&lost, serving.clock().utc());
    audit::record(serving.ledger(), action).await.map_err(|_| RetirementError::Record)?;
    let freed = serving.free_lost(lost.clone()).await?;
    if freed.is_some() {
        neighbours.call(move |homes| homes.stop_retired(&lost)).await?;
    }
    Ok(freed)
}
