//! The ledger's check: every invariant, counted again from the rows.

pub(crate) mod audit;
mod blocks;
mod file;
mod totals;

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use super::archive::sums_sha256;
use super::migrate::LinesSha256;
use super::wal;
use crate::error::LedgerError;
use crate::rows::schema::Depth;
use crate::rows::{Tables, archives, consistency, entries};

/// The most findings that are listed.
pub(super) const LISTED: usize = 100;
/// The most entries of a ledger that is checked whole at a start.
const WHOLE_AT_START: u64 = 500_000;
/// Number of looks at a write-ahead log that seems torn.
const LOOKS: u32 = 5;
/// Time between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The invariant: `file`, `block`, `balance`, `tiling`, `daily`, `cap`, `charge`,
    /// `refused`, `audit`, `archive`.
    pub kind: &'static str,
    /// Place and nature of the damage, for people.
    pub message: String,
}

impl Finding {
    /// Returns true if the ledger is whole and the finding only tells of an event,
    /// such as a block that was skipped or posted in part.
    pub fn is_remark(&self) -> bool {
        self.kind == "refused"
    }
}

/// The extent of a check, and its findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Number of blocks.
    pub blocks: u64,
    /// Number of entries of device time.
    pub entries: u64,
    /// Number of attempts that are charged.
    pub charges: u64,
    /// Number of audit records.
    pub records: u64,
    /// Number of audit records that are signed.
    pub signed: u64,
    /// The first 100 findings.
    pub findings: Vec<Finding>,
}

impl Checked {
    /// Returns true if nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(Finding::is_remark)
    }

    /// Returns a check that counted nothing.
    pub(crate) fn nothing(findings: Vec<Finding>) -> Self {
        Self { blocks: 0, entries: 0, charges: 0, records: 0, signed: 0, findings }
    }

    /// Counts the rows that a check covers.
    pub(crate) fn count(tables: Tables<'_>) -> Result<Self, LedgerError> {
        let consistency::RowCounts { blocks, entries, charges, records, signed } =
            consistency::count_rows(tables)?;
        Ok(Self { blocks, entries, charges, records, signed, findings: Vec::new() })
    }
}

/// The findings so far, at most [`LISTED`].
#[derive(Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    pub(crate) fn add(&mut self, kind: &'static str, message: String) {
        // A badly damaged file could otherwise fill the memory with findings.
        if self.0.len() < LISTED {
            self.0.push(Finding { kind, message });
        }
    }

    pub(crate) fn into_list(self) -> Vec<Finding> {
        self.0
    }
}

/// One check, with the kind of finding that its own failure is.
pub(crate) type Check = (&'static str, fn(Tables<'_>, &mut Findings) -> Result<(), LedgerError>);

/// Every check.
pub(crate) const CHECKS: &[Check] = &[
    // First, because a start reports the first finding, and a torn file causes many others.
    ("file", |tables, findings| file::check(tables, Depth::Full, findings)),
    ("block", blocks::rebuild_all),
    ("balance", totals::balances),
    ("tiling", totals::tiling),
    ("daily", totals::days),
    ("cap", totals::caps),
    ("charge", totals::charges),
    ("audit", audit::log),
    ("archive", check_archives),
    ("refused", totals::refused),
];

/// The checks of a ledger that is too large for all [`CHECKS`] at a start.
const CHECKS_OF_THE_LARGE: &[Check] = &[
    ("file", |tables, findings| file::check(tables, Depth::Quick, findings)),
    ("audit", audit::chain),
];

/// Runs the checks. A check that cannot run, for instance because a table is too
/// torn to be read, is a finding itself.
pub(crate) fn run(tables: Tables<'_>, checks: &[Check], findings: &mut Findings) {
    for (kind, check) in checks {
        if let Err(error) = check(tables, findings) {
            findings.add(kind, with_cause(&error));
        }
    }
}

/// Returns the checks that a start can afford.
pub(crate) fn checks_at_start(tables: Tables<'_>) -> Result<&'static [Check], LedgerError> {
    let entries = entries::count(tables)?;
    if entries <= WHOLE_AT_START {
        return Ok(CHECKS);
    }
    tracing::warn!(
        entries,
        "the ledger is large: the start checks the audit log but no other rows; `tollgate ledger check` checks all rows"
    );
    Ok(CHECKS_OF_THE_LARGE)
}

/// Reads the write-ahead log beside the database at `path` and returns its damage.
/// The look is repeated, because a writer in the middle of a commit looks torn too.
pub(crate) fn find_torn_log(path: &Path) -> Result<Option<wal::Torn>, LedgerError> {
    // A log that cannot be read may hold acknowledged commits, so it counts as damage.
    let look = || wal::look(path).map_err(|error| LedgerError::Damaged(error.to_string()));
    let mut seen = look()?;
    for _ in 0..LOOKS {
        if seen.is_none() {
            break;
        }
        std::thread::sleep(LOOK_AGAIN);
        let again = look()?;
        // The same damage twice: no writer is at work.
        if again == seen {
            break;
        }
        seen = again;
    }
    Ok(seen)
}

/// Checks that the archives' sums are what the newest archive's record states.
fn check_archives(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    let stated = match archives::newest(tables)? {
        None => None,
        Some(archive) => archives::stated_sums(tables, archive.record)?,
    };
    // Without an archive there are no sums: the hash of no lines.
    if sums_sha256(tables)? != stated.unwrap_or_else(|| LinesSha256::new().finish()) {
        let message = "the sums of the archived records are not those that were recorded";
        findings.add("archive", message.to_owned());
    }
    Ok(())
}

/// Returns an error's text with its cause.
pub(crate) fn with_cause(error: &LedgerError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
