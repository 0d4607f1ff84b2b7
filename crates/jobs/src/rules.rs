//! The decisions about files and batches, without a store: quotas and changes of state.

use std::time::Duration;

use tollgate_domain::UtcTime;

use crate::batch::{BatchState, CancelReason, Cause, FailureCode};
use crate::error::{JobError, QuotaRefusal};
use crate::quota::{QuotaScope, QuotaUse, ScopedQuotas};
use crate::store::GatewayStored;

/// Bytes of results that each line without an answer may need at the end: the fixed part
/// of an error line, and a `custom_id` of the largest size.
pub(crate) const ROOM_OF_A_LINE: u64 = 256 + LONGEST_CUSTOM_ID as u64;
/// Bytes of the longest `custom_id`, as it stands in the line.
pub(crate) const LONGEST_CUSTOM_ID: usize = 512;
/// Claims in turn that sent lines and died without an answer, after which a batch fails.
pub(crate) const MOST_BARREN_CLAIMS: u32 = 5;

/// Checks the quotas of an upload that has `held` bytes reserved and wants `bytes`.
pub(crate) fn check_upload(
    scoped: &ScopedQuotas,
    used: &QuotaUse,
    upload: UploadGrowth,
) -> Result<(), JobError> {
    let ScopedQuotas { scope, plan, quotas } = scoped;
    let refuse = |quota, has: String, allowed: u64| {
        let allowed = grouped(allowed);
        let message = format!("{scope} has {has} and plan '{plan}' allows {allowed}.");
        Err(refusal(quota, message, Some(scope.clone())))
    };
    if upload.is_new && used.uploads >= quotas.uploads {
        let has = format!("{} uploads running; this is one more,", grouped(used.uploads));
        return refuse("uploads", has, quotas.uploads);
    }
    if upload.is_new && used.files >= quotas.files {
        let has = format!(
            "{} files, two of them for each batch that has not ended; this is one more,",
            grouped(used.files)
        );
        return refuse("files", has, quotas.files);
    }
    // The sum has the upload's own reservation in it, which the new size replaces.
    let others = used.stored.saturating_sub(upload.held);
    if others.saturating_add(upload.bytes) > quotas.stored {
        let has = format!(
            "{} bytes of input files; this file needs {},",
            grouped(others),
            grouped(upload.bytes)
        );
        return refuse("stored", has, quotas.stored);
    }
    Ok(())
}

/// The growth of the reservation of an upload.
#[derive(Clone, Copy)]
pub(crate) struct UploadGrowth {
    /// True if the upload begins.
    pub(crate) is_new: bool,
    /// Bytes that are reserved.
    pub(crate) held: u64,
    /// Bytes that are wanted in all.
    pub(crate) bytes: u64,
}

/// Checks the limit on the inputs of all tenants.
pub(crate) fn check_gateway(
    all: GatewayStored,
    stored: u64,
    upload: UploadGrowth,
) -> Result<(), JobError> {
    let others = stored.saturating_sub(upload.held);
    if others.saturating_add(upload.bytes) <= all.0 {
        return Ok(());
    }
    let message = "The gateway has no room for more input files now.".to_owned();
    Err(refusal("gateway.jobs.stored", message, None))
}

/// Checks the quotas of a new batch of `lines` lines.
pub(crate) fn check_batch(
    scoped: &ScopedQuotas,
    used: &QuotaUse,
    lines: u64,
) -> Result<(), JobError> {
    let ScopedQuotas { scope, plan, quotas } = scoped;
    let refuse = |quota, has: String, allowed: u64| {
        let allowed = grouped(allowed);
        let message = format!("{scope} has {has} and plan '{plan}' allows {allowed}.");
        Err(refusal(quota, message, Some(scope.clone())))
    };
    if used.queued >= quotas.queued {
        let has =
            format!("{} batches that have not ended; this is one more,", grouped(used.queued));
        return refuse("queued", has, quotas.queued);
    }
    if used.lines.saturating_add(lines) > quotas.lines {
        let (has, more) = (grouped(used.lines), grouped(lines));
        return refuse(
            "lines",
            format!("{has} unanswered lines; this file has {more}"),
            quotas.lines,
        );
    }
    // Checked at the creation, so that a batch that ends always has its places for files.
    if used.files.saturating_add(2) > quotas.files {
        let has = format!("{} files; a batch takes two for its results", grouped(used.files));
        return refuse("files", has, quotas.files);
    }
    // Each line may end as an error line, so this much room is reserved before any line runs.
    check_room(scoped, used, lines.saturating_mul(ROOM_OF_A_LINE))
}

/// Checks the room for results.
pub(crate) fn check_room(
    scoped: &ScopedQuotas,
    used: &QuotaUse,
    room: u64,
) -> Result<(), JobError> {
    let ScopedQuotas { scope, plan, quotas } = scoped;
    if used.results.saturating_add(room) <= quotas.results {
        return Ok(());
    }
    let (has, more, allowed) = (grouped(used.results), grouped(room), grouped(quotas.results));
    let message = format!(
        "{scope} has {has} bytes of results; {more} more are needed and plan '{plan}' allows {allowed}. Delete result files."
    );
    Err(refusal("results", message, Some(scope.clone())))
}

fn refusal(quota: &'static str, message: String, scope: Option<QuotaScope>) -> JobError {
    JobError::Quota(Box::new(QuotaRefusal { quota, message, scope }))
}

/// Returns the life of a file or an ended batch: what the client asked for, at most the
/// shortest `kept` of its quotas.
pub(crate) fn life(asked: Option<Duration>, quotas: &[ScopedQuotas]) -> Duration {
    let kept = quotas.iter().map(|scoped| scoped.quotas.kept);
    kept.chain(asked).min().unwrap_or(Duration::ZERO)
}

/// Returns the time a span after `time`, at most the largest time.
pub(crate) fn after(time: UtcTime, span: Duration) -> UtcTime {
    UtcTime(time.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
}

/// Returns the state after a client's cancel; `None` if the cancel changes nothing.
///
/// # Errors
/// [`JobError::BatchEnded`] if the batch ends for another cause.
pub(crate) fn cancel(state: BatchState) -> Result<Option<BatchState>, JobError> {
    match state {
        BatchState::Validating | BatchState::Running => {
            Ok(Some(BatchState::Ending(Cause::Cancelled(CancelReason::Asked))))
        }
        BatchState::Ending(Cause::Cancelled(_)) | BatchState::Ended(Cause::Cancelled(_)) => {
            Ok(None)
        }
        BatchState::Ending(_) | BatchState::Ended(_) => Err(JobError::BatchEnded),
    }
}

/// Returns the state after a cause to end; `None` if an earlier cause stands.
pub(crate) fn begin_end(state: BatchState, cause: Cause) -> Option<BatchState> {
    matches!(state, BatchState::Validating | BatchState::Running)
        .then_some(BatchState::Ending(cause))
}

/// Returns the state after the check of the input.
pub(crate) fn validated(state: BatchState, is_valid: bool) -> BatchState {
    match state {
        BatchState::Validating if is_valid => BatchState::Running,
        BatchState::Validating => BatchState::Ended(Cause::Failed(FailureCode::InvalidInput)),
        // A cancel during the check stays.
        other => other,
    }
}

/// The claim before a new one.
#[derive(Clone, Copy)]
pub(crate) struct EarlierClaim {
    /// True if it was given up in order, or if there was none.
    pub(crate) was_released: bool,
    /// True if it may have sent a line.
    pub(crate) has_sent: bool,
    /// The answers that it brought.
    pub(crate) answers: u64,
}

/// Returns the claims in turn that sent lines and died without an answer, up to `earlier`.
/// `barren` is their number before `earlier`.
pub(crate) fn barren(earlier: EarlierClaim, barren: u32) -> u32 {
    let EarlierClaim { was_released, has_sent, answers } = earlier;
    if was_released || answers > 0 {
        return 0;
    }
    // A claim that died before it sent a line neither adds to the row nor ends it: else a
    // crash in each second claim would go on for ever.
    barren.saturating_add(u32::from(has_sent))
}

/// Writes a number with a comma between each three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use tollgate_domain::{PlanName, TenantId};

    use super::*;
    use crate::quota::Quotas;

    #[test]
    fn refusal_names_tenant_figures_and_plan() {
        let scoped = ScopedQuotas {
            scope: QuotaScope::Tenant(TenantId::new("acme").expect("a name")),
            plan: PlanName::new("team").expect("a name"),
            quotas: Quotas::default(),
        };
        let used = QuotaUse { lines: 199_000, ..QuotaUse::default() };
        let error = check_batch(&scoped, &used, 2_000).expect_err("too many lines");
        assert_eq!(
            error.to_string(),
            "Tenant 'acme' has 199,000 unanswered lines; this file has 2,000 and plan 'team' allows 200,000."
        );
        check_batch(&scoped, &used, 1_000).expect("exactly the quota");
    }

    #[test]
    fn barren_claims_add_up_until_an_answer() {
        let claim = |has_sent, answers| EarlierClaim { was_released: false, has_sent, answers };
        assert_eq!(barren(claim(true, 0), 1), 2);
        assert_eq!(barren(claim(false, 0), 2), 2, "a claim that died unsent ends no row");
        assert_eq!(barren(claim(true, 1), 4), 0);
        let released = EarlierClaim { was_released: true, ..claim(true, 0) };
        assert_eq!(barren(released, 4), 0, "a drain is no death");
    }

    #[test]
    fn first_cause_stays() {
        let done = BatchState::Ending(Cause::Done);
        assert_eq!(begin_end(done, Cause::Expired), None);
        assert!(matches!(cancel(done), Err(JobError::BatchEnded)));
        let cancelled = cancel(BatchState::Running).expect("it runs").expect("a change");
        assert_eq!(begin_end(cancelled, Cause::Done), None);
        assert!(matches!(cancel(cancelled), Ok(None)), "a second cancel changes nothing");
        assert_eq!(validated(cancelled, true), cancelled);
    }
}
