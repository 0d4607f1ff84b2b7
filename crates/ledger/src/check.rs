//! Does the ledger hold? Every invariant, counted again from its rows.

mod blocks;
mod file;
pub(crate) mod wal;

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;
use serde::Serialize;

use crate::audit::check::{chain, log};
use crate::post::Amounts;
use crate::query::{balance_of, energy_of};
use crate::schema::account;
use crate::{Ledger, LedgerError, LedgerReader, archive};

/// The most findings that are listed.
const LISTED: usize = 100;
/// The most entries of a ledger that is checked whole at a start.
const WHOLE_AT_START: u64 = 500_000;
/// How often a write-ahead log that seems torn is looked at again.
const LOOKS: u32 = 5;
/// How long after.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Something that should not be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which invariant is broken: `file`, `block`, `balance`, `tiling`,
    /// `daily`, `cap`, `charge`, `refused`, `audit`, `archive`.
    pub kind: &'static str,
    /// Where and how, for people.
    pub message: String,
}

impl Finding {
    /// Whether the ledger is whole and this says what happened to it, rather
    /// than that it is damaged.
    pub fn is_remark(&self) -> bool {
        self.kind == "refused"
    }
}

/// What a check has looked at, and what it found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Blocks of workers' journals.
    pub blocks: u64,
    /// Entries of device time.
    pub entries: u64,
    /// Attempts that are charged.
    pub charges: u64,
    /// Records of the audit log.
    pub records: u64,
    /// How many of them are signed.
    pub signed: u64,
    /// What should not be, the first 100.
    pub findings: Vec<Finding>,
}

impl Checked {
    /// Whether nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(Finding::is_remark)
    }
}

impl Ledger {
    /// What must hold before a ledger is written again: all that
    /// [`Self::check_file`] looks at, or, where that would take minutes, the
    /// file, its write-ahead log and the chain of records. A last commit that
    /// is torn is what a power cut leaves; it was never acknowledged, and is
    /// logged.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`] with the first finding. No ledger is no error,
    /// nor is one that cannot be opened: whoever opens it hears why.
    pub fn check_start(path: &Path) -> Result<(), LedgerError> {
        let log = wal::beside(path);
        match torn(path)?.map(|torn| (torn.message(&log), torn)) {
            Some((found, wal::Torn::AtTheEnd { .. })) => {
                tracing::warn!(found, "the ledger goes on from the commit before");
            }
            Some((found, _)) => return Err(LedgerError::Damaged(found)),
            None => {}
        }
        let Ok(reader) = Self::open_read_only(path) else {
            return Ok(());
        };
        let findings = reader.checked(|connection| {
            let entries: u64 =
                connection.query_row("SELECT count(*) FROM entries", [], |row| row.get(0))?;
            if entries <= WHOLE_AT_START {
                return Ok(&CHECKS);
            }
            tracing::warn!(entries, "the ledger is large: of its rows the audit log alone is checked; `tollgate ledger check` checks the rest");
            Ok(&CHECKS_OF_THE_LARGE)
        });
        match findings.into_iter().find(|finding| !finding.is_remark()) {
            Some(first) => Err(LedgerError::Damaged(first.message)),
            None => Ok(()),
        }
    }

    /// Checks the ledger at `path`, also beside the process that writes it:
    /// the file as it lies there first, then as [`LedgerReader::check`].
    ///
    /// # Errors
    /// There is no ledger, or one of another version.
    pub fn check_file(path: &Path) -> Result<Checked, LedgerError> {
        let mut findings = Findings::default();
        if let Some(torn) = torn(path)? {
            findings.add("file", torn.message(&wal::beside(path)));
        }
        let reader = match Self::open_read_only(path) {
            Ok(reader) => reader,
            // A file that cannot even be opened as a database is a finding.
            Err(LedgerError::Open { source, .. }) if path.exists() => {
                findings.add("file", source.to_string());
                return Ok(Checked::nothing(findings.0));
            }
            Err(error) => return Err(error),
        };
        findings.0.extend(reader.check());
        let counted = reader.read(|connection| {
            let count = |query: &str| connection.query_row(query, [], |row| row.get::<_, u64>(0));
            Ok(Checked {
                blocks: count("SELECT count(*) FROM blocks")?,
                entries: count("SELECT count(*) FROM entries")?,
                charges: count("SELECT count(*) FROM requests")?,
                records: count("SELECT count(*) FROM records")?,
                signed: count("SELECT coalesce(max(size), 0) FROM checkpoints")?,
                findings: Vec::new(),
            })
        });
        // A table that cannot be counted is among the findings.
        let counted = counted.unwrap_or_else(|_| Checked::nothing(Vec::new()));
        Ok(Checked { findings: findings.0, ..counted })
    }
}

impl Checked {
    fn nothing(findings: Vec<Finding>) -> Self {
        Self { blocks: 0, entries: 0, charges: 0, records: 0, signed: 0, findings }
    }
}

/// What is wrong with the write-ahead log at `path`, and still is when it is
/// looked at again: a writer in the middle of a commit looks torn as well.
fn torn(path: &Path) -> Result<Option<wal::Torn>, LedgerError> {
    let look = || wal::look(path).map_err(|error| LedgerError::Damaged(error.to_string()));
    let mut seen = look()?;
    for _ in 0..LOOKS {
        if seen.is_none() {
            break;
        }
        std::thread::sleep(LOOK_AGAIN);
        let again = look()?;
        if again == seen {
            break;
        }
        seen = again;
    }
    Ok(seen)
}

impl LedgerReader {
    /// Checks everything; empty means sound. It reads every row: seconds for
    /// a million entries. What is too torn to be read is a finding as well.
    pub fn check(&self) -> Vec<Finding> {
        self.checked(|_| Ok(&CHECKS))
    }

    /// Does the checks that are chosen.
    fn checked(
        &self,
        choose: impl FnOnce(&Connection) -> Result<&'static [(&'static str, Check)], LedgerError>,
    ) -> Vec<Finding> {
        let mut findings = Findings::default();
        let checked = self.read(|connection| {
            for (kind, check) in choose(connection)? {
                if let Err(error) = check(connection, &mut findings) {
                    findings.add(kind, in_full(&error));
                }
            }
            Ok(())
        });
        if let Err(error) = checked {
            findings.add("file", in_full(&error));
        }
        findings.0
    }
}

type Check = fn(&Connection, &mut Findings) -> Result<(), LedgerError>;

/// Every check, with the kind of finding that it is when it cannot be done.
const CHECKS: [(&str, Check); 10] = [
    ("file", |connection, findings| {
        file::check(connection, &mut |message| findings.add("file", message))
    }),
    ("block", blocks::made_again),
    ("balance", balances),
    ("tiling", tiling),
    ("daily", daily),
    ("cap", caps),
    ("charge", charges),
    ("audit", |connection, findings| {
        log(connection, &mut |message| findings.add("audit", message))
    }),
    ("archive", |connection, findings| {
        archive::check(connection, &mut |message| findings.add("archive", message))
    }),
    ("refused", refused),
];

/// What is checked of a ledger too large for all of [`CHECKS`].
const CHECKS_OF_THE_LARGE: [(&str, Check); 2] = [
    ("file", |connection, findings| {
        file::quick_check(connection, &mut |message| findings.add("file", message))
    }),
    ("audit", |connection, findings| {
        chain(connection, &mut |message| findings.add("audit", message))
    }),
];

/// An error with its cause.
fn in_full(error: &LedgerError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, kind: &'static str, message: String) {
        if self.0.len() < LISTED {
            self.0.push(Finding { kind, message });
        }
    }
}

fn balances(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare("SELECT id, epoch FROM epochs ORDER BY id")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let balance = balance_of(connection, row.get(0)?)?;
        if !balance.is_exact() {
            let epoch: String = row.get(1)?;
            findings.add("balance", format!("epoch {epoch} does not balance: {balance:?}"));
        }
        let energy = energy_of(connection, row.get(0)?)?;
        if let Some(energy) = energy.filter(|energy| !energy.is_exact()) {
            let epoch: String = row.get(1)?;
            findings.add("balance", format!("epoch {epoch} does not balance: {energy:?}"));
        }
    }
    Ok(())
}

/// Blocks are numbered without gaps and their steps follow one another.
fn tiling(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT epoch, epochs.last_block, epochs.last_step,
           (SELECT count(*) FROM blocks WHERE epoch_id = epochs.id)
             + (SELECT count(*) FROM refused_blocks WHERE epoch_id = epochs.id)
             + coalesce(gone.blocks, 0),
           max(coalesce((SELECT max(blocks.last_step) FROM blocks WHERE epoch_id = epochs.id), 0),
             coalesce(gone.last_step, 0)),
           epochs.ended = max(coalesce(gone.ended, 0),
             coalesce((SELECT max(last_of_epoch) FROM blocks WHERE epoch_id = epochs.id), 0))
         FROM epochs LEFT JOIN archived_epochs AS gone ON gone.epoch_id = epochs.id
         ORDER BY epochs.id",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let epoch: String = row.get(0)?;
        let (last_block, last_step): (i64, i64) = (row.get(1)?, row.get(2)?);
        let (blocks, steps): (i64, i64) = (row.get(3)?, row.get(4)?);
        if !row.get::<_, bool>(5)? {
            findings
                .add("tiling", format!("epoch {epoch} has ended, or has not: its blocks differ"));
        }
        if (blocks, steps) != (last_block, last_step) {
            findings.add(
                "tiling",
                format!(
                    "epoch {epoch}: {blocks} of {last_block} blocks, step {steps} of {last_step}"
                ),
            );
        }
    }
    let mut statement = connection.prepare(
        "SELECT epoch, block FROM (
           SELECT epoch_id, block, first_step, max(last_step) OVER (
             PARTITION BY epoch_id ORDER BY block
             ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM blocks)
         JOIN epochs ON epochs.id = epoch_id WHERE first_step > 0 AND first_step <= before",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (epoch, block): (String, i64) = (row.get(0)?, row.get(1)?);
        findings.add("tiling", format!("block {block} of {epoch} has steps of one before it"));
    }
    Ok(())
}

/// The sums by day are those of the entries and the requests.
fn daily(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "WITH recount AS (
           SELECT blocks.day AS day, caller_id, model, device_class, 0 AS requests,
             0 AS prompt, 0 AS cached, 0 AS completion, amount_ns AS attributed, 0 AS reference,
             0 AS charges, 1 AS entries, energy_mj AS energy, 0 AS is_said
           FROM entries JOIN blocks USING (epoch_id, block)
             JOIN epochs ON epochs.id = entries.epoch_id
           WHERE account = 1
           UNION ALL
           SELECT day, caller_id, model, device_class, counted, prompt_tokens, cached_tokens,
             completion_tokens, 0, reference_ns, 1, 0, NULL, 0 FROM requests
           UNION ALL
           SELECT day, caller_id, model, device_class, requests, prompt_tokens, cached_tokens,
             completion_tokens, attributed_ns, reference_ns, charges, entries, energy_mj, 0
           FROM archived_days
           UNION ALL
           SELECT day, caller_id, model, device_class, -requests, -prompt_tokens, -cached_tokens,
             -completion_tokens, -attributed_ns, -reference_ns, -charges, -entries, -energy_mj,
             1
           FROM daily)
         SELECT day, caller_id, model, device_class FROM recount GROUP BY 1, 2, 3, 4
         HAVING sum(requests) <> 0 OR sum(prompt) <> 0 OR sum(cached) <> 0
           OR sum(completion) <> 0 OR sum(attributed) <> 0 OR sum(reference) <> 0
           OR sum(charges) <> 0 OR sum(entries) <> 0 OR coalesce(sum(energy), 0) <> 0
           OR max(energy IS NOT NULL AND is_said) <> max(energy IS NOT NULL AND NOT is_said)",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (day, caller): (u32, i64) = (row.get(0)?, row.get(1)?);
        let (model, class): (String, String) = (row.get(2)?, row.get(3)?);
        let day = tollgate_domain::UtcDay(day);
        findings.add("daily", format!("the sums of {day}, caller {caller}, {model} on {class} are not those of its entries"));
    }
    Ok(())
}

/// Each attempt pays what was measured, or its cap where that is less.
fn caps(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "WITH paid AS (
           SELECT request_id, caller_id, attempt, sum(amount_ns) AS paid,
             sum(CASE kind WHEN 0 THEN amount_ns ELSE 0 END) AS measured
           FROM entries WHERE account = 1 GROUP BY 1, 2, 3)
         SELECT paid.request_id, paid.attempt, paid,
           min(measured, coalesce(attributed_ns, iif(gone.request_id IS NULL, measured, 0)))
             AS payable
         FROM paid LEFT JOIN archived_attempts AS gone ON gone.request_id = paid.request_id
           AND gone.caller_id = paid.caller_id AND gone.attempt = paid.attempt
         LEFT JOIN fault_caps ON fault_caps.request_id = paid.request_id
           AND fault_caps.caller_id = paid.caller_id AND fault_caps.attempt = paid.attempt
         WHERE paid <> payable",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (request, attempt): (String, i64) = (row.get(0)?, row.get(1)?);
        let (paid, payable): (i64, i64) = (row.get(2)?, row.get(3)?);
        findings.add(
            "cap",
            format!("attempt {attempt} of {request} pays {paid} ns where {payable} are payable"),
        );
    }
    corrections(connection, findings)
}

/// An entry by its epoch, block and ordinal.
type Place = (String, i64, i64);

/// Each correction is of an entry of its block, and moves the energy of the
/// time that it moves.
fn corrections(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT epoch, moved.block, moved.ordinal, moved.account, moved.amount_ns,
           moved.energy_mj, metered.amount_ns, metered.energy_mj
         FROM entries AS moved JOIN epochs ON epochs.id = moved.epoch_id
         LEFT JOIN entries AS metered ON metered.request_id = moved.request_id
           AND metered.epoch_id = moved.epoch_id AND metered.block = moved.block
           AND metered.kind = 0 AND metered.caller_id = moved.caller_id
           AND metered.sequence = moved.sequence AND metered.attempt = moved.attempt
         WHERE moved.kind <> 0",
    )?;
    let mut rows = statement.query([])?;
    // What may be wrong with each; a block may have two entries alike.
    let mut all = Vec::<(Place, Option<&str>)>::new();
    while all.len() <= LISTED
        && let Some(row) = rows.next()?
    {
        let moved = Amounts { amount_ns: row.get(4)?, energy_mj: row.get(5)? };
        let energy_mj = row.get(7)?;
        let wrong = match row.get::<_, Option<i64>>(6)? {
            None => Some("corrects none that is there"),
            Some(amount_ns) => {
                (!is_moved_from(Amounts { amount_ns, energy_mj }, moved, row.get(3)?))
                    .then_some("moves other energy than its time had")
            }
        };
        let key = (row.get(0)?, row.get(1)?, row.get(2)?);
        match all.last_mut().filter(|last| last.0 == key) {
            Some(last) => last.1 = last.1.and(wrong),
            None => {
                all.pop_if(|last| last.1.is_none());
                all.push((key, wrong));
            }
        }
    }
    for ((epoch, block, ordinal), wrong) in all {
        if let Some(wrong) = wrong {
            findings.add("cap", format!("entry {ordinal} of block {block} of {epoch} {wrong}"));
        }
    }
    Ok(())
}

/// Whether a correction of a metered entry takes what it has to from a tenant,
/// or gives it to loss. Of absurd amounts, which only a damaged file has, others
/// find what is wrong.
fn is_moved_from(metered: Amounts, moved: Amounts, account: i64) -> bool {
    let (excess_ns, sign) = match account {
        account::TENANT => (moved.amount_ns.wrapping_neg(), -1),
        _ => (moved.amount_ns, 1),
    };
    if !(0..=metered.amount_ns).contains(&excess_ns) {
        return false;
    }
    let due = metered.beyond(metered.amount_ns - excess_ns).energy_mj;
    moved.energy_mj == due.map(|energy| energy.wrapping_mul(sign))
}

/// What an attempt is charged is what its worker recorded, or its cap where
/// that is less. A cap that came first is charged as it stands: who set it
/// knew of no more than the worker recorded later.
fn charges(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT requests.request_id, requests.attempt FROM requests
         LEFT JOIN attempts AS done ON done.request_id = requests.request_id
           AND done.caller_id = requests.caller_id AND done.attempt = requests.attempt
         LEFT JOIN fault_caps AS cap ON cap.request_id = requests.request_id
           AND cap.caller_id = requests.caller_id AND cap.attempt = requests.attempt
         WHERE (done.request_id IS NULL AND cap.request_id IS NULL)
           OR ((requests.prompt_tokens, requests.cached_tokens, requests.completion_tokens,
               requests.reference_ns) <> (
             min(coalesce(done.prompt_tokens, cap.prompt_tokens),
               coalesce(cap.prompt_tokens, done.prompt_tokens)),
             min(coalesce(done.cached_tokens, cap.cached_tokens),
               coalesce(cap.cached_tokens, done.cached_tokens)),
             min(coalesce(done.completion_tokens, cap.completion_tokens),
               coalesce(cap.completion_tokens, done.completion_tokens)),
             min(coalesce(done.reference_ns, cap.reference_ns),
               coalesce(cap.reference_ns, done.reference_ns)))
             AND (cap.request_id IS NULL
               OR (requests.prompt_tokens, requests.cached_tokens, requests.completion_tokens,
                 requests.reference_ns) <> (cap.prompt_tokens, cap.cached_tokens,
                 cap.completion_tokens, cap.reference_ns)))
           OR (requests.queue_ns, requests.prefill_ns, requests.decode_ns) <> (
             coalesce(done.queue_ns, 0), coalesce(done.prefill_ns, 0),
             coalesce(done.decode_ns, 0))
           OR requests.reason <> CASE WHEN cap.request_id IS NULL THEN done.reason ELSE 'fault' END
           OR (requests.finished_utc_ns <> coalesce(done.finished_utc_ns, cap.at_utc_ns)
             AND requests.finished_utc_ns <> coalesce(cap.at_utc_ns, done.finished_utc_ns))
           OR requests.day <> requests.finished_utc_ns / 86400000000000
           OR requests.counted <> (requests.reason <> 'fault'
             OR (requests.prompt_tokens, requests.cached_tokens, requests.completion_tokens,
               coalesce(cap.attributed_ns, done.attributed_ns), requests.reference_ns)
               <> (0, 0, 0, 0, 0))",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (request, attempt): (String, i64) = (row.get(0)?, row.get(1)?);
        findings.add(
            "charge",
            format!("attempt {attempt} of {request} is charged other than it was recorded"),
        );
    }
    Ok(())
}

fn refused(connection: &Connection, findings: &mut Findings) -> Result<(), LedgerError> {
    let mut statement = connection.prepare(
        "SELECT epoch, block, reason FROM refused_blocks JOIN epochs ON epochs.id = epoch_id",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (epoch, block, reason): (String, i64, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        findings.add("refused", format!("block {block} of {epoch} was passed over: {reason}"));
    }
    Ok(())
}
