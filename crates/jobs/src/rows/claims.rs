//! Tables `claims` and `tries`, and the columns of the latest claim in `batches`.

use tollgate_domain::UtcTime;
use tollgate_sql::{OptionalRow, params};

use super::{Bits, Tables, nanos};
use crate::claim::{Claim, ClaimNumber, ClaimSeed, OpenTry};
use crate::error::JobError;
use crate::ids::BatchId;

/// The latest claim of a batch.
pub(super) struct Latest {
    pub(super) number: u64,
    pub(super) lease: Option<i64>,
    /// True if the claim was given up, or if there was none.
    pub(super) was_released: bool,
    pub(super) answers: u64,
    pub(super) barren: u32,
}

/// Returns the latest claim of a batch, which the caller has locked.
pub(super) fn latest(tables: Tables<'_>, batch: BatchId) -> Result<Option<Latest>, JobError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT claim, lease, claim_bits IS NULL, claim_answers, barren FROM batches
             WHERE id = ?1",
        )?
        .query_row([batch], |row| {
            Ok(Latest {
                number: row.get(0)?,
                lease: row.get(1)?,
                was_released: row.get(2)?,
                answers: row.get(3)?,
                barren: row.get(4)?,
            })
        })
        .optional()?)
}

/// Makes `claim` the latest of its batch.
pub(super) fn insert(
    tables: Tables<'_>,
    claim: &Claim,
    lease: UtcTime,
    barren: u32,
) -> Result<(), JobError> {
    let Claim { batch, number, seed: ClaimSeed { bits, id_bits } } = claim;
    tables
        .connection
        .prepare(
            "UPDATE batches SET claim = ?2, claim_bits = ?3, lease = ?4, claim_answers = 0,
               barren = ?5 WHERE id = ?1",
        )?
        .execute(params![batch, number.0, Bits::new(*bits), nanos(lease), barren])?;
    tables
        .connection
        .prepare("INSERT INTO claims (batch, number, bits, id_bits) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![batch, number.0, Bits::new(*bits), Bits::new(*id_bits)])?;
    Ok(())
}

/// Checks that `claim` is the latest of its batch.
///
/// # Errors
/// [`JobError::StaleClaim`].
pub(super) fn check(tables: Tables<'_>, claim: &Claim) -> Result<(), JobError> {
    let for_update = tables.for_update();
    let sql = format!(
        "SELECT 1 FROM batches
         WHERE id = ?1 AND claim = ?2 AND claim_bits = ?3 AND state <> 'ended'{for_update}"
    );
    let bits = Bits::new(claim.seed.bits);
    let is_latest =
        tables.connection.prepare(&sql)?.exists(params![claim.batch, claim.number.0, bits])?;
    is_latest.then_some(()).ok_or(JobError::StaleClaim)
}

pub(super) fn set_lease(
    tables: Tables<'_>,
    batch: BatchId,
    lease: UtcTime,
) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE batches SET lease = ?2 WHERE id = ?1")?
        .execute(params![batch, nanos(lease)])?;
    Ok(())
}

/// Ends the latest claim. Without its random bits no commit passes under it.
pub(super) fn release(tables: Tables<'_>, batch: BatchId) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE batches SET lease = NULL, claim_bits = NULL WHERE id = ?1")?
        .execute([batch])?;
    Ok(())
}

pub(super) fn end_leases(tables: Tables<'_>) -> Result<(), JobError> {
    // The claims keep their random bits: a claim without them counts as given up, and these have
    // died.
    tables.connection.execute("UPDATE batches SET lease = NULL WHERE state <> 'ended'", ())?;
    Ok(())
}

pub(super) fn begun(tables: Tables<'_>, batch: BatchId, number: u64) -> Result<u64, JobError> {
    let begun = tables
        .connection
        .prepare("SELECT begun FROM claims WHERE batch = ?1 AND number = ?2")?
        .query_row(params![batch, number], |row| row.get(0))
        .optional()?;
    // A claim that settled all its tries has no row.
    Ok(begun.unwrap_or(0))
}

pub(super) fn set_begun(tables: Tables<'_>, claim: &Claim, begun: u64) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE claims SET begun = ?3 WHERE batch = ?1 AND number = ?2")?
        .execute(params![claim.batch, claim.number.0, begun])?;
    Ok(())
}

pub(super) fn set_try(
    tables: Tables<'_>,
    claim: &Claim,
    line: u64,
    number: u32,
) -> Result<(), JobError> {
    tables
        .connection
        .prepare(
            // Only the last try of a line can be open: a line runs again after its earlier tries
            // are settled.
            "INSERT INTO tries (batch, claim, line, number) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (batch, claim, line) DO UPDATE SET number =
               CASE WHEN tries.number < excluded.number THEN excluded.number ELSE tries.number END",
        )?
        .execute(params![claim.batch, claim.number.0, line, number])?;
    Ok(())
}

/// Deletes the claims before `below` and their tries: all of them are settled.
pub(super) fn delete_below(
    tables: Tables<'_>,
    batch: BatchId,
    below: ClaimNumber,
) -> Result<(), JobError> {
    for table in ["claims WHERE batch = ?1 AND number", "tries WHERE batch = ?1 AND claim"] {
        tables
            .connection
            .prepare(&format!("DELETE FROM {table} < ?2"))?
            .send(params![batch, below.0])?;
    }
    Ok(())
}

/// Returns the last try, in each claim before `claim`, of each line that was begun and has
/// no answer.
pub(super) fn open_tries(tables: Tables<'_>, claim: &Claim) -> Result<Vec<OpenTry>, JobError> {
    let mut statement = tables.connection.prepare(
        "SELECT number, bits, id_bits, begun FROM claims
         WHERE batch = ?1 AND number < ?2 AND begun > 0 ORDER BY number",
    )?;
    let earlier = statement
        .query_map(params![claim.batch, claim.number.0], |row| {
            let (bits, id_bits) = (row.get::<Bits>(1)?, row.get::<Bits>(2)?);
            let seed = ClaimSeed { bits: bits.number(), id_bits: id_bits.number() };
            let number = ClaimNumber(row.get(0)?);
            Ok((Claim { batch: claim.batch, number, seed }, row.get::<u64>(3)?))
        })?
        .collect::<Result<Vec<_>, _>>()?;
    // The lines come from a generator, because a first try has no row of its own.
    let mut statement = tables.connection.prepare(
        "WITH RECURSIVE lines (line) AS (
           SELECT CAST(0 AS BIGINT) UNION ALL SELECT line + 1 FROM lines WHERE line + 1 < ?3)
         SELECT lines.line, coalesce(tries.number, 0) FROM lines
         LEFT JOIN tries ON tries.batch = ?1 AND tries.claim = ?2 AND tries.line = lines.line
         WHERE NOT EXISTS (SELECT 1 FROM answers
                           WHERE answers.batch = ?1 AND answers.line = lines.line)",
    )?;
    let mut open = Vec::new();
    for (earlier, begun) in earlier {
        let tries = statement
            .query_map(params![earlier.batch, earlier.number.0, begun], |row| {
                Ok((row.get::<u64>(0)?, row.get::<u32>(1)?))
            })?
            .collect::<Result<Vec<_>, _>>()?;
        open.extend(
            tries
                .into_iter()
                .map(|(line, number)| OpenTry { line, request: earlier.request_id(line, number) }),
        );
    }
    Ok(open)
}
