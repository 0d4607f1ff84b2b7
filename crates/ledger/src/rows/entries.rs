//! Table `entries`: device time and energy, in double entry.

use tollgate_domain::Tier;
use tollgate_sql::{SqlError, Statement, params};

use super::{AttemptKey, BlockKey, CallerId, EpochId, Tables, TierColumn};
use crate::error::LedgerError;

/// Kinds of account, as `entries.account` has them.
pub(crate) mod account {
    /// The device's wall time; always a credit.
    pub(crate) const DEVICE: i64 = 0;
    /// The tenant of the entry's caller.
    pub(crate) const TENANT: i64 = 1;
    /// `platform.overhead`
    pub(crate) const OVERHEAD: i64 = 2;
    /// `platform.idle`
    pub(crate) const IDLE: i64 = 3;
    /// `platform.loss`
    pub(crate) const LOSS: i64 = 4;
}

/// `entries.kind` of an entry that a worker measured.
pub(crate) const METERED: i64 = 0;
/// `entries.kind` of an entry that a fault cap moved afterwards.
pub(crate) const CORRECTION: i64 = 1;

/// Device time in ns, and the energy in mJ that was drawn in it. Both are signed:
/// a debit is positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amounts {
    pub(crate) amount_ns: i64,
    /// `None` where the device reported no energy.
    pub(crate) energy_mj: Option<i64>,
}

/// The payer and the work of an entry.
#[derive(Clone, Copy)]
pub(crate) struct EntryOwner<'a> {
    pub(crate) attempt: AttemptKey<'a>,
    pub(crate) sequence: i64,
    pub(crate) tier: Tier,
}

/// One line of `entries` without its key.
pub(crate) struct Entry<'a> {
    pub(crate) kind: i64,
    pub(crate) account: i64,
    pub(crate) amounts: Amounts,
    /// `None` for the device and the platform.
    pub(crate) owner: Option<EntryOwner<'a>>,
}

/// A metered entry of an attempt, with the day's sums that it belongs to.
pub(crate) struct MeteredEntry {
    pub(crate) key: BlockKey,
    pub(crate) sequence: i64,
    pub(crate) amounts: Amounts,
    pub(crate) day: u32,
    pub(crate) model: String,
    pub(crate) class: String,
    pub(crate) tier: Tier,
}

/// An entry of a block as it is read again.
pub(crate) struct StoredEntry {
    pub(crate) kind: i64,
    pub(crate) account: i64,
    pub(crate) amounts: Amounts,
    /// Present for entries of tenants.
    pub(crate) owner: Option<StoredOwner>,
}

/// The owner of a stored entry.
pub(crate) struct StoredOwner {
    pub(crate) caller: CallerId,
    pub(crate) sequence: u64,
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) tier: Tier,
}

/// A tenant's entry, for a statement's records.
pub(crate) struct TenantEntry {
    pub(crate) block: i64,
    pub(crate) ordinal: i64,
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) amounts: Amounts,
    pub(crate) tier: Tier,
}

/// Inserts entries with a statement that is prepared once.
pub(crate) struct EntryWriter<'c>(Statement<'c>);

impl<'c> EntryWriter<'c> {
    /// Prepares the statement.
    pub(crate) fn new(tables: Tables<'c>) -> Result<Self, LedgerError> {
        Ok(Self(tables.connection.prepare(
            "INSERT INTO entries (epoch_id, block, ordinal, kind, account, amount_ns,
               caller_id, sequence, request_id, attempt, energy_mj, tier)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        )?))
    }

    /// Inserts an entry at `ordinal` of its block.
    pub(crate) fn insert(
        &mut self,
        key: BlockKey,
        ordinal: i64,
        entry: &Entry<'_>,
    ) -> Result<(), LedgerError> {
        // All fields by name: a new field must not be forgotten in the statement.
        let Entry { kind, account, amounts: Amounts { amount_ns, energy_mj }, owner } = entry;
        self.0.send(params![
            key.epoch,
            key.block,
            ordinal,
            kind,
            account,
            amount_ns,
            owner.map(|owner| owner.attempt.caller),
            owner.map(|owner| owner.sequence),
            owner.map(|owner| owner.attempt.attempt.request.as_str()),
            owner.map(|owner| owner.attempt.attempt.attempt),
            energy_mj,
            // An entry of the device or the platform has no tier; the column needs a value.
            TierColumn(owner.map_or(Tier::Interactive, |owner| owner.tier))
        ])?;
        Ok(())
    }
}

/// Returns the highest ordinal of a block's entries.
pub(crate) fn last_ordinal(tables: Tables<'_>, key: BlockKey) -> Result<i64, LedgerError> {
    // The maximum is never NULL: the device's entry is written first and always stands.
    Ok(tables
        .connection
        .prepare("SELECT max(ordinal) FROM entries WHERE epoch_id = ?1 AND block = ?2")?
        .query_row(params![key.epoch, key.block], |row| row.get(0))?)
}

/// Returns the sums over a block's entries, ns and mJ.
pub(crate) fn sums_of_block(tables: Tables<'_>, key: BlockKey) -> Result<(i64, i64), LedgerError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT sum(amount_ns), coalesce(sum(energy_mj), 0) FROM entries
             WHERE epoch_id = ?1 AND block = ?2",
        )?
        .query_row(params![key.epoch, key.block], |row| Ok((row.get(0)?, row.get(1)?)))?)
}

// The plus sign keeps SQLite from the index by caller, with which it would read all entries of the
// caller for the few of one request.
/// Sums what an attempt pays. `sum` of no rows is NULL, and an attempt may have no entry yet.
const PAID: &str = "SELECT coalesce(sum(amount_ns), 0) FROM entries
     WHERE request_id = ?1 AND +caller_id = ?2 AND attempt = ?3 AND account = ?4";

/// Finds the metered entries of an attempt. A cap pays the earliest work, so the order decides which
/// entries are corrected.
const METERED_OF: &str = "SELECT entries.epoch_id, entries.block, sequence, amount_ns, day, model,
       device_class, energy_mj, entries.tier
     FROM entries
     JOIN blocks USING (epoch_id, block)
     JOIN epochs ON epochs.id = entries.epoch_id
     WHERE request_id = ?1 AND +caller_id = ?2 AND attempt = ?3 AND kind = ?4
     ORDER BY entries.epoch_id, entries.block, ordinal";

/// Returns the time that the tenant pays for an attempt as the entries stand, ns.
pub(crate) fn paid_ns(tables: Tables<'_>, key: AttemptKey<'_>) -> Result<i64, LedgerError> {
    Ok(tables.connection.prepare(PAID)?.query_row(
        params![key.attempt.request.as_str(), key.caller, key.attempt.attempt, account::TENANT],
        |row| row.get(0),
    )?)
}

/// Returns the metered entries of an attempt in the order of the device's work.
pub(crate) fn metered_of(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
) -> Result<Vec<MeteredEntry>, LedgerError> {
    let mut statement = tables.connection.prepare(METERED_OF)?;
    let rows = statement.query_map(
        params![key.attempt.request.as_str(), key.caller, key.attempt.attempt, METERED],
        |row| {
            Ok(MeteredEntry {
                key: BlockKey { epoch: row.get(0)?, block: row.get(1)? },
                sequence: row.get(2)?,
                amounts: Amounts { amount_ns: row.get(3)?, energy_mj: row.get(7)? },
                day: row.get(4)?,
                model: row.get(5)?,
                class: row.get(6)?,
                tier: row.get::<TierColumn>(8)?.0,
            })
        },
    )?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Calls `each` with every entry of a block, by ordinal.
pub(crate) fn each_of_block(
    tables: Tables<'_>,
    key: BlockKey,
    mut each: impl FnMut(StoredEntry) -> Result<(), LedgerError>,
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT kind, account, amount_ns, caller_id, sequence, request_id, attempt, energy_mj,
           tier
         FROM entries WHERE epoch_id = ?1 AND block = ?2 ORDER BY ordinal",
    )?;
    let mut rows = statement.query(params![key.epoch, key.block])?;
    while let Some(row) = rows.next()? {
        let kind = row.get(0)?;
        let account = row.get(1)?;
        let is_platform =
            matches!(account, account::DEVICE | account::OVERHEAD | account::IDLE | account::LOSS);
        // A correction's owner is not read: only its amounts are summed.
        let owner = if kind != METERED || is_platform {
            None
        } else {
            Some(StoredOwner {
                caller: row.get(3)?,
                sequence: row.get(4)?,
                request: row.get(5)?,
                attempt: row.get(6)?,
                tier: row.get::<TierColumn>(8)?.0,
            })
        };
        let amounts = Amounts { amount_ns: row.get(2)?, energy_mj: row.get(7)? };
        each(StoredEntry { kind, account, amounts, owner })?;
    }
    Ok(())
}

/// Calls `each` with a caller's entries in blocks `first` to `last` of an epoch.
pub(crate) fn each_of_caller<E: From<LedgerError>>(
    tables: Tables<'_>,
    caller: CallerId,
    (epoch, first, last): (EpochId, i64, i64),
    mut each: impl FnMut(TenantEntry) -> Result<(), E>,
) -> Result<(), E> {
    let storage = |error: SqlError| E::from(LedgerError::from(error));
    let mut statement = tables
        .connection
        .prepare(
            // By block, because the statement looks up each block once.
            "SELECT block, ordinal, request_id, attempt, amount_ns, energy_mj, tier FROM entries
             WHERE caller_id = ?1 AND epoch_id = ?2 AND block BETWEEN ?3 AND ?4
               AND account = ?5
             ORDER BY block, ordinal",
        )
        .map_err(storage)?;
    let mut rows = statement
        .query_map(params![caller, epoch, first, last, account::TENANT], |row| {
            Ok(TenantEntry {
                block: row.get(0)?,
                ordinal: row.get(1)?,
                request: row.get(2)?,
                attempt: row.get(3)?,
                amounts: Amounts { amount_ns: row.get(4)?, energy_mj: row.get(5)? },
                tier: row.get::<TierColumn>(6)?.0,
            })
        })
        .map_err(storage)?;
    rows.try_for_each(|row| each(row.map_err(storage)?))
}

/// Returns the sum of time by account over an epoch's entries, ns.
pub(crate) fn time_by_account(
    tables: Tables<'_>,
    epoch: EpochId,
) -> Result<Vec<(i64, i64)>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT account, sum(amount_ns) FROM entries WHERE epoch_id = ?1 GROUP BY account",
    )?;
    let rows = statement.query_map([epoch], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the sum of energy by account over an epoch's entries, mJ. Accounts
/// without reported energy are left out.
pub(crate) fn energy_by_account(
    tables: Tables<'_>,
    epoch: EpochId,
) -> Result<Vec<(i64, i64)>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT account, sum(energy_mj) FROM entries
         WHERE epoch_id = ?1 AND energy_mj IS NOT NULL GROUP BY account",
    )?;
    let rows = statement.query_map([epoch], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the number of entries.
pub(crate) fn count(tables: Tables<'_>) -> Result<u64, LedgerError> {
    Ok(tables.connection.query_row("SELECT count(*) FROM entries", (), |row| row.get(0))?)
}

#[cfg(test)]
mod tests {
    use tollgate_sql::Connection;

    use super::*;
    use crate::rows::schema;

    /// A cap on one attempt must not take longer in a larger ledger.
    #[test]
    fn entries_of_attempt_are_found_by_request() {
        let memory = rusqlite::Connection::open_in_memory().expect("memory");
        let connection = Connection::from(memory);
        let tables = Tables { connection: &connection, home: None };
        schema::make_tables(tables).expect("tables");
        schema::add_audit_tables(tables).expect("tables");
        schema::bring_up_to_date(tables, None).expect("tables");
        schema::add_unnumbered(tables).expect("indexes");
        for query in [PAID, METERED_OF] {
            let explain = format!("EXPLAIN QUERY PLAN {query}");
            let parameters = params!["request", 1, 0, METERED];
            let mut statement = connection.prepare(&explain).expect("a query");
            let plan = statement.query_map(parameters, |row| row.get::<String>(3));
            let plan: Result<Vec<String>, _> = plan.expect("a query").collect();
            let plan = plan.expect("a plan");
            let by_request = "SEARCH entries USING INDEX entries_by_request (request_id=?)";
            assert!(plan.iter().any(|step| step == by_request), "{plan:?}");
        }
    }
}
