//! Archives: everything that the first records of the log tell of leaves the
//! database once it is copied elsewhere. The sums by day stay, so usage, caps and
//! statements do not change. Sums are kept of the rest that is still needed: where
//! a device's time went, what a day's records summed to, which attempts ended, and
//! the tree over the records, from which the log goes on.
//!
//! A prefix of the log leaves, up to a checkpoint, never rows by their date. So each
//! record is either in the archive or here, and the two follow one another.

use std::path::Path;

use tollgate_domain::{UtcDay, UtcMonth, UtcTime};

use super::chain::{Chain, frontier, hash_before};
use super::check::audit::start_keys;
use super::migrate::{LinesSha256, describe_unrecorded, open_writer};
use super::wal_rewrite::WalRewriter;
use super::{plans, post};
use crate::act::AdminAction;
use crate::error::LedgerError;
use crate::rows::archives::ArchiveRow;
use crate::rows::schema::FORMAT;
use crate::rows::{Tables, archive_moves, archives, records};
use crate::rules::statement::SETTLING_NS;

/// The records that can leave the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Archivable {
    /// The first record that is still here.
    pub from: u64,
    /// The first record that stays: the size of a checkpoint.
    pub to: u64,
}

/// The reason why nothing can be archived.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The ledger cannot be read or written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// Usage of these months may still come in.
    #[error("{month} cannot be archived yet: it is settled a day after its end")]
    Unsettled {
        /// The last of the months.
        month: UtcMonth,
    },
    /// No checkpoint covers old records only.
    #[error(
        "nothing to archive: no checkpoint covers records of earlier months alone, all of them settled, that are not archived yet"
    )]
    Nothing,
    /// Rows that are older than the audit log have no records to archive.
    #[error("rows that are older than the audit log cannot be archived")]
    OlderThanTheLog,
}

/// Refuses months that are not settled at `now`.
pub(crate) fn refuse_unsettled(before: UtcMonth, now: UtcTime) -> Result<(), ArchiveError> {
    let first = before.first_day();
    // Blocks of a month's last hours arrive after the month's end.
    if now.0 < first.start().0.saturating_add(SETTLING_NS) {
        let last = UtcDay(first.0.saturating_sub(1));
        return Err(ArchiveError::Unsettled { month: last.month() });
    }
    Ok(())
}

/// Returns the records of the months before `before` that can leave.
pub(crate) fn archivable(tables: Tables<'_>, before: UtcMonth) -> Result<Archivable, ArchiveError> {
    // Rows without a record would stay behind when their neighbours leave.
    if !describe_unrecorded(tables, FORMAT)?.is_nothing() {
        return Err(ArchiveError::OlderThanTheLog);
    }
    let from = archives::first_record(tables)?;
    // A checkpoint at `from` would make an archive without records.
    let to = last_checkpoint(tables, before.first_day())?.filter(|to| *to > from);
    to.map(|to| Archivable { from, to }).ok_or(ArchiveError::Nothing)
}

/// Returns the size of the last checkpoint that covers nothing of `day` or later
/// and nothing that has not ended.
fn last_checkpoint(tables: Tables<'_>, day: UtcDay) -> Result<Option<u64>, LedgerError> {
    let mut bound = archives::first_record_that_stays(tables, day.0, day.start().0)?;
    loop {
        let Some(size) = archives::checkpoint_up_to(tables, bound)? else { return Ok(None) };
        // A cap leaves only together with the entries that it corrects and the charge
        // that it lowers.
        match archives::first_split_by(tables, size)? {
            None => return Ok(Some(size)),
            // The bound falls each time, so the loop ends.
            Some(first) => bound = first,
        }
    }
}

/// Takes the records before `to` out of the ledger at `path`, with everything that
/// they tell of, and records `action` with the archive's figures in its detail.
///
/// # Errors
/// [`LedgerError`]; nothing has changed then.
pub(crate) fn compact(path: &Path, to: u64, mut action: AdminAction) -> Result<(), LedgerError> {
    let mut database = open_writer(path, None, &WalRewriter::default())?;
    let transaction = database.begin()?;
    let tables = transaction.tables();
    let mut chain = Chain::load(tables)?;
    // These are read before the records leave; the tree goes on from them.
    let last = hash_before(tables, to)?;
    let frontier = frontier(tables, to)?;
    let keys = start_keys(tables)?.keys;
    archive_moves::run(tables, to)?;
    // Every later root and path needs the peaks at the cut, whatever their level.
    for peak in frontier.nodes() {
        records::insert_node(tables, &peak)?;
    }
    // The next record is the one that tells of this archive.
    archives::insert(tables, &ArchiveRow { size: to, last, record: chain.size() })?;
    action.detail["to"] = to.into();
    action.detail["audit_keys"] = keys.into();
    action.detail["sums_sha256"] = sums_sha256(tables)?.into();
    post::record_action(tables, &mut chain, &action)?;
    plans::record_after_archive(tables, &mut chain, &action)?;
    transaction.commit()?;
    // After the commit: a crash before it leaves a large but sound file.
    database.shrink()
}

/// Returns the SHA-256 over the archives' sums, a line for each row.
pub(crate) fn sums_sha256(tables: Tables<'_>) -> Result<String, LedgerError> {
    let mut lines = LinesSha256::new();
    archives::each_sum(tables, |line| lines.add(line))?;
    Ok(lines.finish())
}
