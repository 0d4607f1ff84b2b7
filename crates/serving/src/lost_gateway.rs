//! The end of a gateway that is lost, on behalf of which another one settles: what it ordered is
//! waited for at the workers, and what it has not spent of the caps goes back.

use std::collections::HashSet;
use std::num::NonZeroU32;

use tollgate_admission::{CapCall, CapName};
use tollgate_domain::{MonotonicTime, UtcTime};
use tollgate_ledger::LedgerError;
use tollgate_ledger::caps::{Slices, SlicesError};
use tollgate_ledger::gateways::OtherGateway;

use crate::caps::{ask, name_of};
use crate::limits::Limits;
use crate::serving::Serving;

/// A reason why a lost gateway keeps what it has for now.
#[derive(Debug, thiserror::Error)]
pub enum RetireError {
    /// One of its workers is not connected, or its connection broke, or this gateway does not use it.
    #[error("not every worker of it has told that its work is in the ledger")]
    Worker,
    /// The ledger cannot be read.
    #[error("what the gateway has spent cannot be read")]
    Ledger(#[from] LedgerError),
    /// The slices cannot be read or written.
    #[error(transparent)]
    Slices(#[from] SlicesError),
    /// The gateway stops.
    #[error("the gateway stops")]
    Stopping,
}

impl Serving {
    /// Waits until no worker takes work of the retired gateway `lost`, and all that it ordered is
    /// in the ledger.
    ///
    /// # Errors
    /// [`RetireError::Worker`]
    pub async fn settle_lost(&self, lost: &OtherGateway) -> Result<(), RetireError> {
        let is_settled = self.workers().settle(lost).await;
        is_settled.then_some(()).ok_or(RetireError::Worker)
    }

    /// Gives back what a retired gateway has not spent of the caps, after [`Self::settle_lost`],
    /// and voids what it left open. Returns the number of caps; `None` if it has started again.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn free_lost(&self, lost: OtherGateway) -> Result<Option<usize>, RetireError> {
        let Some(address) = self.caps_address() else { return Ok(None) };
        let (limits, reader) = (self.limits().apart(), self.ledger().reader().clone());
        let utc = self.clock().utc();
        // The server's answers are waited for in a blocking call.
        let freed = tokio::task::spawn_blocking(move || {
            let Some(slices) = Slices::take_over(&address, &lost)? else { return Ok(None) };
            let spent = reader.spending_of(&lost.home, utc.day())?;
            limits.share_caps(slices.home().life);
            limits.restore_spend(spent, utc.day());
            Ok(Some(give_back(slices, &limits, utc)?))
        });
        let freed = freed.await.unwrap_or(Err(RetireError::Stopping))?;
        if freed.is_some() {
            self.settlement().close_left_open().await;
        }
        Ok(freed)
    }
}

/// Ends all slices at what was spent of them, as a gateway does that starts and stops. `limits`
/// know the spending.
fn give_back(mut slices: Slices, limits: &Limits, utc: UtcTime) -> Result<usize, SlicesError> {
    let admission = limits.admission();
    admission.settle_earlier_lives();
    let unspent = slices.all_unspent()?;
    // The ledger does not tell the lines of batches apart, so their caps stay as they are until
    // the day ends.
    let is_known = |cap: &CapName| !cap.scope.is_of_batches();
    let caps: Vec<CapName> = unspent.iter().filter_map(name_of).filter(is_known).collect();
    admission.remember_slices(&caps);
    // The first calls of a life do not give back, because it does not know its slices.
    let now = MonotonicTime::default();
    let first = admission.calls_at_beat(now, utc, &HashSet::new());
    answered(&mut slices, limits, &first)?;
    let last = admission.calls_at_stop(utc);
    answered(&mut slices, limits, &last)?;
    Ok(caps.len())
}

fn answered(slices: &mut Slices, limits: &Limits, calls: &[CapCall]) -> Result<(), SlicesError> {
    let answers = ask(slices, calls, NonZeroU32::MIN)?;
    let answered = calls.iter().zip(answers);
    let answered = answered.filter_map(|(call, answer)| Some((call, answer?)));
    limits.admission().caps_answered(MonotonicTime::default(), answered);
    Ok(())
}
