//! Table `batches`.

use std::time::Duration;

use tollgate_domain::{KeyId, ModelName, PoolName, TenantId, UtcTime};
use tollgate_sql::{OptionalRow, Row, SqlError, params};

use super::files::scope_column;
use super::{Tables, damaged, name, nanos, time};
use crate::batch::{
    BatchPage, BatchRow, BatchState, BatchUsage, CancelReason, Cause, Counts, Endpoint,
    FailureCode, InputError, Times,
};
use crate::error::JobError;
use crate::file::Page;
use crate::ids::{BatchId, FileId};
use crate::quota::QuotaScope;
use crate::store::{Most, StoredFigures};

const COLUMNS: &str = "id, tenant, pool, key, input, endpoint, metadata, created, expires,
  results_kept, state, cause, model, total, completed, failed, prompt_tokens, cached_tokens,
  completion_tokens, errors, output, error, running_at, ending_at, ended_at, claim,
  reasoning_tokens";

/// Batches, lines and reserved bytes of a scope.
#[derive(Default)]
pub(super) struct OpenSums {
    pub(super) queued: u64,
    pub(super) lines: u64,
    pub(super) room: u64,
}

pub(super) fn insert(
    tables: Tables<'_>,
    batch: &BatchRow,
    kept: Duration,
    room: u64,
) -> Result<(), JobError> {
    tables
        .connection
        .prepare(
            "INSERT INTO batches (id, tenant, pool, key, input, endpoint, metadata, created,
               expires, results_kept, kept, state, total, room)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 'validating', ?12, ?13)",
        )?
        .execute(params![
            batch.id,
            batch.tenant.as_str(),
            batch.pool.as_ref().map(PoolName::as_str),
            batch.key.as_str(),
            batch.input,
            batch.endpoint.path(),
            batch.metadata,
            nanos(batch.created),
            nanos(batch.expires),
            batch.results_kept.as_secs(),
            kept.as_secs(),
            batch.counts.total,
            room
        ])?;
    Ok(())
}

pub(super) fn find(tables: Tables<'_>, id: BatchId) -> Result<Option<BatchRow>, JobError> {
    let sql = format!("SELECT {COLUMNS} FROM batches WHERE id = ?1");
    let row = tables.connection.prepare(&sql)?.query_row([id], raw).optional()?;
    row.map(RawBatch::check).transpose()
}

pub(super) fn page(
    tables: Tables<'_>,
    tenant: &TenantId,
    page: &BatchPage,
) -> Result<Page<BatchRow>, JobError> {
    let BatchPage { after, limit } = page;
    let after = after.map(|id| {
        tables
            .connection
            // With the tenant: the place of another tenant's batch in the list would tell when it
            // was made.
            .prepare("SELECT seq FROM batches WHERE id = ?1 AND tenant = ?2")?
            .query_row(params![id, tenant.as_str()], |row| row.get::<i64>(0))
            .optional()?
            .ok_or(JobError::NoSuchBatch)
    });
    let after = after.transpose()?;
    let sql = format!(
        "SELECT {COLUMNS} FROM batches WHERE tenant = ?1 AND (CAST(?2 AS BIGINT) IS NULL OR seq < ?2)
         ORDER BY seq DESC LIMIT ?3"
    );
    let mut statement = tables.connection.prepare(&sql)?;
    // One more, which tells if rows follow.
    let most = u64::from(*limit) + 1;
    let rows = statement.query_map(params![tenant.as_str(), after, most], raw)?;
    let mut found = Vec::new();
    for row in rows {
        found.push(row?.check()?);
    }
    let has_more = found.len() > *limit as usize;
    found.truncate(*limit as usize);
    Ok(Page { rows: found, has_more })
}

/// Returns the open batches without a live lease: those that only have to be ended first,
/// then one of each tenant, then the second of each tenant.
pub(super) fn claimable(
    tables: Tables<'_>,
    now: UtcTime,
    most: Most,
) -> Result<Vec<BatchRow>, JobError> {
    let sql = format!(
        // In turns, so that a tenant with a thousand batches does not fill the list.
        "SELECT {COLUMNS} FROM (
           SELECT *, (state = 'ending' OR expires <= ?1) AS must_end,
             row_number() OVER (PARTITION BY tenant ORDER BY expires, seq) AS turn
           FROM batches WHERE state <> 'ended' AND (lease IS NULL OR lease <= ?1)) AS open
         ORDER BY must_end DESC, turn, expires, seq LIMIT ?2"
    );
    let mut statement = tables.connection.prepare(&sql)?;
    let rows = statement.query_map(params![nanos(now), most.0], raw)?;
    let mut found = Vec::new();
    for row in rows {
        found.push(row?.check()?);
    }
    Ok(found)
}

/// Returns the figures of all batches. The bytes are those of rooms only.
pub(super) fn figures(tables: Tables<'_>) -> Result<StoredFigures, JobError> {
    let mut figures = StoredFigures::default();
    let mut statement = tables.connection.prepare(
        "SELECT state, count(*), coalesce(sum(total - completed - failed), 0),
           coalesce(sum(room), 0), min(created) FROM batches GROUP BY state",
    )?;
    let mut rows = statement.query(())?;
    while let Some(row) = rows.next()? {
        let count: u64 = row.get(1)?;
        let state: String = row.get(0)?;
        match &*state {
            "validating" => figures.validating = count,
            "running" => figures.running = count,
            "ending" => figures.ending = count,
            _ => {
                // An ended batch has no open lines and no room, and its age does not count.
                figures.ended = count;
                continue;
            }
        }
        figures.lines += row.get::<u64>(2)?;
        figures.results += row.get::<u64>(3)?;
        let oldest = time(row.get(4)?);
        figures.oldest = Some(figures.oldest.map_or(oldest, |known| known.min(oldest)));
    }
    Ok(figures)
}

pub(super) fn sums(tables: Tables<'_>, scope: &QuotaScope) -> Result<OpenSums, JobError> {
    let (column, value) = scope_column(scope);
    let sql = format!(
        "SELECT count(*), coalesce(sum(total - completed - failed), 0), coalesce(sum(room), 0)
         FROM batches WHERE {column} = ?1 AND state <> 'ended'"
    );
    Ok(tables.connection.prepare(&sql)?.query_row([value], |row| {
        Ok(OpenSums { queued: row.get(0)?, lines: row.get(1)?, room: row.get(2)? })
    })?)
}

/// Writes a new state and the time at which it began.
pub(super) fn set_state(
    tables: Tables<'_>,
    id: BatchId,
    state: BatchState,
    now: UtcTime,
) -> Result<(), JobError> {
    let (text, cause, column) = match state {
        // No change leads back to this state.
        BatchState::Validating => ("validating", None, "created"),
        BatchState::Running => ("running", None, "running_at"),
        BatchState::Ending(cause) => ("ending", Some(cause), "ending_at"),
        BatchState::Ended(cause) => ("ended", Some(cause), "ended_at"),
    };
    let sql = format!("UPDATE batches SET state = ?2, cause = ?3, {column} = ?4 WHERE id = ?1");
    tables.connection.prepare(&sql)?.execute(params![
        id,
        text,
        cause.map(cause_text),
        nanos(now)
    ])?;
    Ok(())
}

/// Writes the mistakes of an input. No line of it counts.
pub(super) fn set_invalid(
    tables: Tables<'_>,
    id: BatchId,
    errors: &[InputError],
) -> Result<(), JobError> {
    let errors = serde_json::to_string(errors).map_err(|error| damaged(error.to_string()))?;
    tables
        .connection
        .prepare("UPDATE batches SET errors = ?2, total = 0, room = 0 WHERE id = ?1")?
        .execute(params![id, errors])?;
    Ok(())
}

/// The change of a batch by a commit of answers.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) completed: u64,
    pub(super) failed: u64,
    pub(super) usage: BatchUsage,
    pub(super) room: u64,
}

pub(super) fn add(tables: Tables<'_>, id: BatchId, progress: &Progress) -> Result<(), JobError> {
    let Progress { completed, failed, usage, room } = progress;
    tables
        .connection
        .prepare(
            // The answers of the present claim are counted apart: a claim that brings some is not
            // barren.
            "UPDATE batches SET completed = completed + ?2, failed = failed + ?3,
               prompt_tokens = prompt_tokens + ?4, cached_tokens = cached_tokens + ?5,
               completion_tokens = completion_tokens + ?6,
               reasoning_tokens = reasoning_tokens + ?7,
               room = CASE WHEN room > ?8 THEN room - ?8 ELSE 0 END,
               claim_answers = claim_answers + ?2 + ?3 WHERE id = ?1",
        )?
        .send(params![
            id,
            completed,
            failed,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            room
        ])?;
    Ok(())
}

/// Notes a model that answered a line. A second model clears the first.
pub(super) fn set_model(
    tables: Tables<'_>,
    id: BatchId,
    model: &ModelName,
) -> Result<(), JobError> {
    tables
        .connection
        .prepare(
            // The difference is remembered: a later line of the first model must not bring its name
            // back.
            "UPDATE batches SET
               models_differ = CASE WHEN models_differ <> 0 OR model <> ?2 THEN 1 ELSE 0 END,
               model = CASE WHEN models_differ <> 0 OR model <> ?2 THEN NULL ELSE ?2 END
             WHERE id = ?1",
        )?
        .send(params![id, model.as_str()])?;
    Ok(())
}

pub(super) fn add_room(tables: Tables<'_>, id: BatchId, room: u64) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE batches SET room = room + ?2 WHERE id = ?1")?
        .execute(params![id, room])?;
    Ok(())
}

/// Reserves the least room for each line without an answer, and nothing else.
pub(super) fn reset_room(tables: Tables<'_>, id: BatchId, each: u64) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE batches SET room = (total - completed - failed) * ?2 WHERE id = ?1")?
        .execute(params![id, each])?;
    Ok(())
}

/// Writes the result files of a batch that ends.
pub(super) fn set_results(
    tables: Tables<'_>,
    id: BatchId,
    output: Option<FileId>,
    error: Option<FileId>,
) -> Result<(), JobError> {
    tables
        .connection
        .prepare(
            "UPDATE batches SET output = ?2, error = ?3, room = 0, lease = NULL WHERE id = ?1",
        )?
        .execute(params![id, output, error])?;
    Ok(())
}

/// Deletes the batches that ended too long ago.
pub(super) fn delete_old(tables: Tables<'_>, now: UtcTime) -> Result<(), JobError> {
    tables
        .connection
        .prepare(
            // `kept` is in seconds, the times are in nanoseconds.
            "DELETE FROM batches WHERE state = 'ended' AND ended_at <= ?1 - kept * 1000000000",
        )?
        .execute([nanos(now)])?;
    Ok(())
}

/// A row before the check of its texts.
struct RawBatch {
    id: BatchId,
    tenant: String,
    pool: Option<String>,
    key: String,
    input: FileId,
    endpoint: String,
    metadata: Option<String>,
    created: i64,
    expires: i64,
    results_kept: u64,
    state: String,
    cause: Option<String>,
    model: Option<String>,
    counts: Counts,
    usage: BatchUsage,
    errors: String,
    output: Option<FileId>,
    error: Option<FileId>,
    times: [Option<i64>; 3],
    claim: u64,
}

fn raw(row: &Row<'_>) -> Result<RawBatch, SqlError> {
    Ok(RawBatch {
        id: row.get(0)?,
        tenant: row.get(1)?,
        pool: row.get(2)?,
        key: row.get(3)?,
        input: row.get(4)?,
        endpoint: row.get(5)?,
        metadata: row.get(6)?,
        created: row.get(7)?,
        expires: row.get(8)?,
        results_kept: row.get(9)?,
        state: row.get(10)?,
        cause: row.get(11)?,
        model: row.get(12)?,
        counts: Counts { total: row.get(13)?, completed: row.get(14)?, failed: row.get(15)? },
        usage: BatchUsage {
            prompt_tokens: row.get(16)?,
            cached_tokens: row.get(17)?,
            completion_tokens: row.get(18)?,
            reasoning_tokens: row.get(26)?,
        },
        errors: row.get(19)?,
        output: row.get(20)?,
        error: row.get(21)?,
        times: [row.get(22)?, row.get(23)?, row.get(24)?],
        claim: row.get(25)?,
    })
}

impl RawBatch {
    fn check(self) -> Result<BatchRow, JobError> {
        let id = self.id;
        let wrong = |column: &str| damaged(format!("column {column} of {id}"));
        let cause = self.cause.map(|text| cause_of(&text).ok_or_else(|| wrong("cause")));
        let state = match (&*self.state, cause.transpose()?) {
            ("validating", None) => BatchState::Validating,
            ("running", None) => BatchState::Running,
            ("ending", Some(cause)) => BatchState::Ending(cause),
            ("ended", Some(cause)) => BatchState::Ended(cause),
            // An end has a cause and nothing else has one, so any other pair is damage.
            _ => return Err(wrong("state")),
        };
        let [running, ending, ended] = self.times.map(|at| at.map(time));
        Ok(BatchRow {
            id,
            tenant: name(TenantId::new(&self.tenant))?,
            pool: self.pool.map(|pool| name(PoolName::new(&pool))).transpose()?,
            key: name(KeyId::new(&self.key))?,
            input: self.input,
            endpoint: Endpoint::of_path(&self.endpoint).ok_or_else(|| wrong("endpoint"))?,
            metadata: self.metadata,
            created: time(self.created),
            expires: time(self.expires),
            results_kept: Duration::from_secs(self.results_kept),
            state,
            model: self.model.map(|model| name(ModelName::new(&model))).transpose()?,
            counts: self.counts,
            usage: self.usage,
            errors: serde_json::from_str(&self.errors).map_err(|_| wrong("errors"))?,
            output: self.output,
            error: self.error,
            times: Times { running, ending, ended },
            is_claimed: self.claim > 0,
        })
    }
}

/// The causes and their texts in the column.
const CAUSES: [(Cause, &str); 7] = [
    (Cause::Done, "done"),
    (Cause::Cancelled(CancelReason::Asked), "cancelled"),
    (Cause::Cancelled(CancelReason::KeyRevoked), "key_revoked"),
    (Cause::Cancelled(CancelReason::TenantGone), "tenant_gone"),
    (Cause::Expired, "expired"),
    (Cause::Failed(FailureCode::InvalidInput), "invalid_input"),
    (Cause::Failed(FailureCode::Internal), "internal_error"),
];

fn cause_text(cause: Cause) -> &'static str {
    let text = CAUSES.iter().find(|(known, _)| *known == cause);
    text.map_or("internal_error", |(_, text)| text)
}

fn cause_of(text: &str) -> Option<Cause> {
    CAUSES.iter().find(|(_, known)| *known == text).map(|(cause, _)| *cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_text_is_read_back() {
        for (cause, text) in CAUSES {
            assert_eq!(cause_text(cause), text);
            assert_eq!(cause_of(text), Some(cause));
        }
    }
}
