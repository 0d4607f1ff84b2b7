//! Reads of the ledger's check: each query counts again, over whole tables, and
//! returns the rows that do not agree.

use tollgate_domain::{Tier, UtcDay};

use super::entries::Amounts;
use super::{CallerId, Tables, TierColumn};
use crate::error::LedgerError;

/// An epoch beside what its blocks sum to.
pub(crate) struct EpochTiling {
    pub(crate) epoch: String,
    pub(crate) last_block: i64,
    pub(crate) last_step: i64,
    /// The number of its blocks, skipped and archived ones included.
    pub(crate) blocks: i64,
    /// The last step of its blocks.
    pub(crate) last_step_of_blocks: i64,
    /// True if the epoch has ended exactly when its last block says so.
    pub(crate) agrees_on_end: bool,
}

/// A day with other sums than those of its rows.
pub(crate) struct WrongDay {
    pub(crate) day: UtcDay,
    pub(crate) caller: CallerId,
    pub(crate) model: String,
    pub(crate) class: String,
    pub(crate) tier: Tier,
}

/// An attempt that pays another amount than its cap and its entries allow.
pub(crate) struct WrongPayment {
    pub(crate) request: String,
    pub(crate) attempt: i64,
    pub(crate) paid_ns: i64,
    pub(crate) payable_ns: i64,
}

/// A correction beside a metered entry that it may correct.
pub(crate) struct Correction {
    pub(crate) epoch: String,
    pub(crate) block: i64,
    pub(crate) ordinal: i64,
    pub(crate) account: i64,
    pub(crate) moved: Amounts,
    /// `None` where no metered entry fits.
    pub(crate) metered: Option<Amounts>,
}

/// The numbers of rows that a check reports.
pub(crate) struct RowCounts {
    pub(crate) blocks: u64,
    pub(crate) entries: u64,
    pub(crate) charges: u64,
    pub(crate) records: u64,
    pub(crate) signed: u64,
}

/// Counts the rows of the large tables.
pub(crate) fn count_rows(tables: Tables<'_>) -> Result<RowCounts, LedgerError> {
    let count = |query: &str| tables.connection.query_row(query, (), |row| row.get::<u64>(0));
    Ok(RowCounts {
        blocks: count("SELECT count(*) FROM blocks")?,
        entries: count("SELECT count(*) FROM entries")?,
        charges: count("SELECT count(*) FROM requests")?,
        records: count("SELECT count(*) FROM records")?,
        // A checkpoint signs a prefix of the log, so the largest size counts the signed records.
        signed: count("SELECT coalesce(max(size), 0) FROM checkpoints")?,
    })
}

/// Returns every epoch beside its blocks.
pub(crate) fn tiling(tables: Tables<'_>) -> Result<Vec<EpochTiling>, LedgerError> {
    let mut statement = tables.connection.prepare(TILING)?;
    let rows = statement.query_map((), |row| {
        Ok(EpochTiling {
            epoch: row.get(0)?,
            last_block: row.get(1)?,
            last_step: row.get(2)?,
            blocks: row.get(3)?,
            last_step_of_blocks: row.get(4)?,
            agrees_on_end: row.get(5)?,
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns epoch and number of the blocks with steps of an earlier block.
pub(crate) fn overlapping_blocks(tables: Tables<'_>) -> Result<Vec<(String, i64)>, LedgerError> {
    let mut statement = tables.connection.prepare(OVERLAPPING)?;
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the first `limit` days with wrong sums.
pub(crate) fn wrong_days(tables: Tables<'_>, limit: usize) -> Result<Vec<WrongDay>, LedgerError> {
    let mut statement = tables.connection.prepare(WRONG_DAYS)?;
    let rows = statement.query_map((), |row| {
        Ok(WrongDay {
            day: UtcDay(row.get(0)?),
            caller: row.get(1)?,
            model: row.get(2)?,
            class: row.get(3)?,
            tier: row.get::<TierColumn>(4)?.0,
        })
    })?;
    // The limit also bounds the memory, because a damaged file may have any number of wrong days.
    Ok(rows.take(limit).collect::<Result<_, _>>()?)
}

/// Returns the first `limit` attempts that pay a wrong amount.
pub(crate) fn wrong_payments(
    tables: Tables<'_>,
    limit: usize,
) -> Result<Vec<WrongPayment>, LedgerError> {
    let mut statement = tables.connection.prepare(WRONG_PAYMENTS)?;
    let rows = statement.query_map((), |row| {
        Ok(WrongPayment {
            request: row.get(0)?,
            attempt: row.get(1)?,
            paid_ns: row.get(2)?,
            payable_ns: row.get(3)?,
        })
    })?;
    Ok(rows.take(limit).collect::<Result<_, _>>()?)
}

/// Calls `each` with every correction, once for each metered entry that it may
/// correct, until `each` returns false.
pub(crate) fn each_correction(
    tables: Tables<'_>,
    mut each: impl FnMut(Correction) -> bool,
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(CORRECTIONS)?;
    let mut rows = statement.stream(())?;
    while let Some(row) = rows.next()? {
        let energy_mj = row.get(7)?;
        // The columns are NULL where the join found no metered entry.
        let metered: Option<i64> = row.get(6)?;
        let correction = Correction {
            epoch: row.get(0)?,
            block: row.get(1)?,
            ordinal: row.get(2)?,
            account: row.get(3)?,
            moved: Amounts { amount_ns: row.get(4)?, energy_mj: row.get(5)? },
            metered: metered.map(|amount_ns| Amounts { amount_ns, energy_mj }),
        };
        // The caller's list is full, so the other rows need not be read.
        if !each(correction) {
            break;
        }
    }
    Ok(())
}

/// Returns request and attempt of the first `limit` charges that are not what
/// was recorded.
pub(crate) fn wrong_charges(
    tables: Tables<'_>,
    limit: usize,
) -> Result<Vec<(String, i64)>, LedgerError> {
    let mut statement = tables.connection.prepare(WRONG_CHARGES)?;
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.take(limit).collect::<Result<_, _>>()?)
}

const TILING: &str = "
SELECT epoch, epochs.last_block, epochs.last_step,
  (SELECT count(*) FROM blocks WHERE epoch_id = epochs.id)
    + (SELECT count(*) FROM refused_blocks WHERE epoch_id = epochs.id)
    + coalesce(gone.blocks, 0),
  (SELECT max(last_step) FROM (
     SELECT blocks.last_step AS last_step FROM blocks WHERE epoch_id = epochs.id
     UNION ALL SELECT coalesce(gone.last_step, 0)) AS steps),
  epochs.ended = (SELECT max(ended) FROM (
     SELECT last_of_epoch AS ended FROM blocks WHERE epoch_id = epochs.id
     UNION ALL SELECT coalesce(gone.ended, 0)) AS ends)
FROM epochs LEFT JOIN archived_epochs AS gone ON gone.epoch_id = epochs.id
ORDER BY epochs.id
";

const OVERLAPPING: &str = "
SELECT epoch, block FROM (
  SELECT epoch_id, block, first_step, max(last_step) OVER (
    PARTITION BY epoch_id ORDER BY block
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM blocks) AS steps
JOIN epochs ON epochs.id = epoch_id WHERE first_step > 0 AND first_step <= before
";

/// Adds up entries, charges and archived sums, less the sums by day: each group
/// must come to zero, and the energy must be known on both sides or on neither.
const WRONG_DAYS: &str = "
WITH recount AS (
  SELECT blocks.day AS day, caller_id, model, device_class, entries.tier AS tier, 0 AS requests,
    0 AS prompt, 0 AS cached, 0 AS completion, amount_ns AS attributed, 0 AS reference,
    0 AS charges, 1 AS entries, energy_mj AS energy, 0 AS is_said
  FROM entries JOIN blocks USING (epoch_id, block)
    JOIN epochs ON epochs.id = entries.epoch_id
  WHERE account = 1
  UNION ALL
  SELECT day, caller_id, model, device_class, tier, counted, prompt_tokens, cached_tokens,
    completion_tokens, 0, reference_ns, 1, 0, NULL, 0 FROM requests
  UNION ALL
  SELECT day, caller_id, model, device_class, tier, requests, prompt_tokens, cached_tokens,
    completion_tokens, attributed_ns, reference_ns, charges, entries, energy_mj, 0
  FROM archived_days
  UNION ALL
  SELECT day, caller_id, model, device_class, tier, -requests, -prompt_tokens, -cached_tokens,
    -completion_tokens, -attributed_ns, -reference_ns, -charges, -entries, -energy_mj,
    1
  FROM daily)
SELECT day, caller_id, model, device_class, tier FROM recount GROUP BY 1, 2, 3, 4, 5
HAVING sum(requests) <> 0 OR sum(prompt) <> 0 OR sum(cached) <> 0
  OR sum(completion) <> 0 OR sum(attributed) <> 0 OR sum(reference) <> 0
  OR sum(charges) <> 0 OR sum(entries) <> 0 OR coalesce(sum(energy), 0) <> 0
  OR (count(CASE WHEN is_said = 1 THEN energy END) = 0)
    <> (count(CASE WHEN is_said = 0 THEN energy END) = 0)
";

/// Compares what each attempt pays with what was measured, or with its cap where
/// the cap is less.
const WRONG_PAYMENTS: &str = "
WITH sums AS (
  SELECT request_id, caller_id, attempt, sum(amount_ns) AS paid,
    sum(CASE kind WHEN 0 THEN amount_ns ELSE 0 END) AS measured
  FROM entries WHERE account = 1 GROUP BY 1, 2, 3),
bounds AS (
  SELECT sums.request_id, sums.attempt, paid, measured,
    coalesce(attributed_ns, CASE WHEN gone.request_id IS NULL THEN measured ELSE 0 END) AS bound
  FROM sums LEFT JOIN archived_attempts AS gone ON gone.request_id = sums.request_id
    AND gone.caller_id = sums.caller_id AND gone.attempt = sums.attempt
  LEFT JOIN fault_caps ON fault_caps.request_id = sums.request_id
    AND fault_caps.caller_id = sums.caller_id AND fault_caps.attempt = sums.attempt)
SELECT request_id, attempt, paid, CASE WHEN measured < bound THEN measured ELSE bound END
FROM bounds WHERE paid <> CASE WHEN measured < bound THEN measured ELSE bound END
";

const CORRECTIONS: &str = "
SELECT epoch, moved.block, moved.ordinal, moved.account, moved.amount_ns,
  moved.energy_mj, metered.amount_ns, metered.energy_mj
FROM entries AS moved JOIN epochs ON epochs.id = moved.epoch_id
LEFT JOIN entries AS metered ON metered.request_id = moved.request_id
  AND metered.epoch_id = moved.epoch_id AND metered.block = moved.block
  AND metered.kind = 0 AND metered.caller_id = moved.caller_id
  AND metered.sequence = moved.sequence AND metered.attempt = moved.attempt
  AND metered.tier = moved.tier
WHERE moved.kind <> 0
";

/// Compares each charge with its worker's report, or with its cap where the cap is
/// less. A cap that came first is charged as it stands: the caller that set it
/// knew of no more than the worker reported later.
const WRONG_CHARGES: &str = "
SELECT requests.request_id, requests.attempt FROM requests
LEFT JOIN attempts AS done ON done.request_id = requests.request_id
  AND done.caller_id = requests.caller_id AND done.attempt = requests.attempt
LEFT JOIN fault_caps AS cap ON cap.request_id = requests.request_id
  AND cap.caller_id = requests.caller_id AND cap.attempt = requests.attempt
WHERE (done.request_id IS NULL AND cap.request_id IS NULL)
  OR ((requests.prompt_tokens, requests.cached_tokens, requests.completion_tokens,
      requests.reference_ns) <> (
    -- A comparison with NULL is not true, so each takes the side that is there.
    CASE WHEN cap.prompt_tokens < done.prompt_tokens OR done.prompt_tokens IS NULL
      THEN cap.prompt_tokens ELSE done.prompt_tokens END,
    CASE WHEN cap.cached_tokens < done.cached_tokens OR done.cached_tokens IS NULL
      THEN cap.cached_tokens ELSE done.cached_tokens END,
    CASE WHEN cap.completion_tokens < done.completion_tokens OR done.completion_tokens IS NULL
      THEN cap.completion_tokens ELSE done.completion_tokens END,
    CASE WHEN cap.reference_ns < done.reference_ns OR done.reference_ns IS NULL
      THEN cap.reference_ns ELSE done.reference_ns END)
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
  OR requests.tier NOT IN (coalesce(done.tier, cap.tier), coalesce(cap.tier, done.tier))
  OR requests.day <> requests.finished_utc_ns / 86400000000000
  OR (requests.counted <> 0) <> (requests.reason <> 'fault'
    OR (requests.prompt_tokens, requests.cached_tokens, requests.completion_tokens,
      coalesce(cap.attributed_ns, done.attributed_ns), requests.reference_ns)
      <> (0, 0, 0, 0, 0))
";
