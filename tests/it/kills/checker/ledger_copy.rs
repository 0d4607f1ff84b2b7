//! Reads the ledger with its own SQL, from the tables that
//! `crates/ledger/src/schema.rs` documents, within one snapshot.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rusqlite::{Connection, OpenFlags, Row};
use sha2::{Digest, Sha256};

use super::journals::Owner;

/// The sums of one block by account, ns.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sums {
    pub device: i64,
    pub overhead: i64,
    pub idle: i64,
    pub loss: i64,
    pub shares: BTreeMap<Owner, i64>,
    /// The sum of its corrections.
    pub corrections: i64,
}

/// One incarnation of a worker in the ledger.
#[derive(Debug, Default)]
pub struct Incarnation {
    pub last_block: u64,
    pub ended: bool,
    pub blocks: BTreeMap<u64, Sums>,
}

/// An attempt's end in the worker's record, or its charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRow {
    /// Prompt, cached and completion tokens, attributed ns (0 in a charge), reference
    /// ns.
    pub figures: [i64; 5],
    pub reason: String,
    pub counted: bool,
    pub day: i64,
}

/// All rows that the checks need.
#[derive(Debug, Default)]
pub struct LedgerRows {
    pub incarnations: BTreeMap<String, Incarnation>,
    /// The end of each attempt, with its epoch and block.
    pub ended: HashMap<Owner, (String, u64, AttemptRow)>,
    pub charged: HashMap<Owner, AttemptRow>,
    pub caps: HashMap<Owner, [i64; 5]>,
    /// The payment for an attempt, summed over all entries.
    pub paid: HashMap<Owner, i64>,
    /// The measured time of an attempt.
    pub measured: HashMap<Owner, i64>,
    /// The ledger's daily sums: requests, three token counts, attributed, reference.
    pub daily: BTreeMap<(i64, String, String), [i64; 6]>,
    /// The daily sums as this module counts them.
    pub recount: BTreeMap<(i64, String, String), [i64; 6]>,
    /// The rows that no correct run writes.
    pub odd: Vec<String>,
}

impl LedgerRows {
    /// Reads the ledger at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn read(path: &Path) -> rusqlite::Result<Self> {
        let ledger = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        ledger.busy_timeout(std::time::Duration::from_secs(10))?;
        ledger.execute_batch("PRAGMA query_only = 1; BEGIN")?;
        let mut copy = Self::default();
        copy.incarnations(&ledger)?;
        copy.entries(&ledger)?;
        copy.attempts(&ledger)?;
        copy.charges(&ledger)?;
        copy.days(&ledger)?;
        copy.oddities(&ledger)?;
        copy.chain(&ledger)?;
        Ok(copy)
    }

    fn incarnations(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        each(ledger, "SELECT epoch, last_block, ended FROM epochs", |row| {
            let incarnation = Incarnation {
                last_block: row.get(1)?,
                ended: row.get(2)?,
                ..Incarnation::default()
            };
            self.incarnations.insert(row.get(0)?, incarnation);
            Ok(())
        })?;
        each(ledger, "SELECT epoch, block FROM blocks JOIN epochs ON id = epoch_id", |row| {
            let incarnation = self.incarnations.entry(row.get(0)?).or_default();
            incarnation.blocks.insert(row.get(1)?, Sums::default());
            Ok(())
        })
    }

    fn entries(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        let query = "SELECT e.epoch, n.block, n.kind, n.account, n.amount_ns, b.day,
              n.request_id, c.tenant, c.key, n.attempt
            FROM entries n JOIN epochs e ON e.id = n.epoch_id
            LEFT JOIN blocks b ON b.epoch_id = n.epoch_id AND b.block = n.block
            LEFT JOIN callers c ON c.id = n.caller_id";
        each(ledger, query, |row| {
            let (epoch, block): (String, u64) = (row.get(0)?, row.get(1)?);
            let (kind, account, amount): (i64, i64, i64) = (row.get(2)?, row.get(3)?, row.get(4)?);
            let incarnation = self.incarnations.entry(epoch.clone()).or_default();
            let Some(sums) = incarnation.blocks.get_mut(&block) else {
                self.odd.push(format!("an entry of block {block} of {epoch}, which is not there"));
                return Ok(());
            };
            if kind == 1 {
                sums.corrections += amount;
            }
            match (kind, account) {
                (0, 0) => sums.device += amount,
                (0, 2) => sums.overhead += amount,
                (0, 3) => sums.idle += amount,
                (0, 4) => sums.loss += amount,
                (_, 1) => {
                    let owner = owner(row, 6)?;
                    if kind == 0 {
                        *sums.shares.entry(owner.clone()).or_default() += amount;
                        *self.measured.entry(owner.clone()).or_default() += amount;
                    }
                    let key = (row.get(5)?, owner.tenant.clone(), owner.key.clone());
                    self.recount.entry(key).or_default()[4] += amount;
                    *self.paid.entry(owner).or_default() += amount;
                }
                (1, 4) => {}
                _ => self.odd.push(format!("an entry of kind {kind} for account {account}")),
            }
            Ok(())
        })
    }

    fn attempts(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        let query = "SELECT request_id, tenant, key, attempt, prompt_tokens, cached_tokens,
              completion_tokens, attributed_ns, reference_ns, reason, epoch, block
            FROM attempts JOIN callers ON callers.id = caller_id
            JOIN epochs ON epochs.id = epoch_id";
        each(ledger, query, |row| {
            let attempt =
                AttemptRow { figures: figures(row)?, reason: row.get(9)?, counted: true, day: 0 };
            let owner = owner(row, 0)?;
            let (epoch, block): (String, u64) = (row.get(10)?, row.get(11)?);
            if let Some((before, ..)) = self.ended.insert(owner.clone(), (epoch, block, attempt)) {
                self.odd.push(format!("{owner:?} ended twice, once in {before}"));
            }
            Ok(())
        })?;
        let query = "SELECT request_id, tenant, key, attempt, prompt_tokens, cached_tokens,
              completion_tokens, attributed_ns, reference_ns
            FROM fault_caps JOIN callers ON callers.id = caller_id";
        each(ledger, query, |row| {
            self.caps.insert(owner(row, 0)?, figures(row)?);
            Ok(())
        })
    }

    fn charges(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        let query = "SELECT request_id, tenant, key, attempt, prompt_tokens, cached_tokens,
              completion_tokens, 0, reference_ns, reason, counted, day
            FROM requests JOIN callers ON callers.id = caller_id";
        each(ledger, query, |row| {
            let owner = owner(row, 0)?;
            let attempt = AttemptRow {
                figures: figures(row)?,
                reason: row.get(9)?,
                counted: row.get(10)?,
                day: row.get(11)?,
            };
            let key = (attempt.day, owner.tenant.clone(), owner.key.clone());
            let recount = self.recount.entry(key).or_default();
            let [prompt, cached, completion, _, reference] = attempt.figures;
            for (sum, more) in recount.iter_mut().zip([
                attempt.counted.into(),
                prompt,
                cached,
                completion,
                0,
                reference,
            ]) {
                *sum += more;
            }
            self.charged.insert(owner, attempt);
            Ok(())
        })
    }

    fn days(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        let query = "SELECT day, tenant, key, sum(requests), sum(prompt_tokens),
              sum(cached_tokens), sum(completion_tokens), sum(attributed_ns), sum(reference_ns)
            FROM daily JOIN callers ON callers.id = caller_id GROUP BY 1, 2, 3";
        each(ledger, query, |row| {
            let mut sums = [0; 6];
            for (place, sum) in sums.iter_mut().enumerate() {
                *sum = row.get(3 + place)?;
            }
            self.daily.insert((row.get(0)?, row.get(1)?, row.get(2)?), sums);
            Ok(())
        })
    }

    /// Collects rejected blocks: the ledger accepts every block of an honest worker.
    fn oddities(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        for table in ["struck_blocks", "refused_blocks"] {
            each(ledger, &format!("SELECT block, reason FROM {table}"), |row| {
                let (block, reason): (u64, String) = (row.get(0)?, row.get(1)?);
                self.odd.push(format!("{table}: {block}: {reason}"));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Checks the audit log: numbers start at 0, each record contains the hash of the
    /// record before, its own hash is right, and each action has a record.
    fn chain(&mut self, ledger: &Connection) -> rusqlite::Result<()> {
        let (mut next, mut before) = (0_u64, "0".repeat(64));
        each(ledger, "SELECT seq, hash, record FROM records ORDER BY seq", |row| {
            let (seq, hash, record): (u64, Vec<u8>, String) =
                (row.get(0)?, row.get(1)?, row.get(2)?);
            let begins = format!("{{\"seq\":{next},\"prev\":\"{before}\",");
            let body = record.strip_prefix('{').unwrap_or_default();
            let made = Sha256::new().chain_update([0]).chain_update(&begins).chain_update(body);
            if seq != next || body.is_empty() || hash != made.finalize().as_slice() {
                self.odd.push(format!("audit: record {seq} does not follow the one before"));
            }
            (next, before) = (seq + 1, hash.iter().map(|byte| format!("{byte:02x}")).collect());
            Ok(())
        })?;
        for (table, operation) in
            [("blocks", "metering"), ("attempts", "inference"), ("fault_caps", "correction")]
        {
            let query = format!(
                "SELECT (SELECT count(*) FROM {table}), (SELECT count(*) FROM records
                 WHERE record LIKE '%\"operation.type\":\"{operation}\"%')"
            );
            each(ledger, &query, |row| {
                let (rows, records): (u64, u64) = (row.get(0)?, row.get(1)?);
                if rows != records {
                    self.odd.push(format!("audit: {records} records of {rows} {table}"));
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

fn each(
    ledger: &Connection,
    query: &str,
    mut take: impl FnMut(&Row<'_>) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let mut statement = ledger.prepare(query)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        take(row)?;
    }
    Ok(())
}

fn owner(row: &Row<'_>, at: usize) -> rusqlite::Result<Owner> {
    Ok(Owner {
        request: row.get(at)?,
        tenant: row.get(at + 1)?,
        key: row.get(at + 2)?,
        attempt: row.get(at + 3)?,
    })
}

fn figures(row: &Row<'_>) -> rusqlite::Result<[i64; 5]> {
    let mut figures = [0; 5];
    for (place, figure) in figures.iter_mut().enumerate() {
        *figure = row.get(4 + place)?;
    }
    Ok(figures)
}
