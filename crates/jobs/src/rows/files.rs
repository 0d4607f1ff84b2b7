//! Tables `blobs`, `files` and `ranges`.

use tollgate_domain::{PoolName, TenantId, UtcTime};
use tollgate_sql::{OptionalRow, Row, SqlError, params};

use super::{Tables, damaged, name, nanos, time};
use crate::error::JobError;
use crate::file::{BlobRange, FilePage, FileRow, Order, Page, Purpose};
use crate::ids::{BatchId, BlobId, FileId};
use crate::quota::QuotaScope;

const COLUMNS: &str = "id, tenant, pool, bytes, created, expires, filename, purpose, lines, sha256";

/// The kind of a blob.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BlobKind {
    Upload,
    Input,
    Segment,
}

impl BlobKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Upload => "upload",
            Self::Input => "input",
            Self::Segment => "segment",
        }
    }
}

/// A blob to insert.
pub(super) struct NewBlob<'a> {
    pub(super) id: BlobId,
    pub(super) tenant: &'a TenantId,
    pub(super) pool: Option<&'a PoolName>,
    pub(super) kind: BlobKind,
    pub(super) bytes: u64,
    pub(super) batch: Option<BatchId>,
}

/// Bytes, uploads and files of a scope.
#[derive(Default)]
pub(super) struct StoredSums {
    pub(super) stored: u64,
    pub(super) segments: u64,
    pub(super) uploads: u64,
    pub(super) files: u64,
}

pub(super) fn insert_blob(tables: Tables<'_>, blob: &NewBlob<'_>) -> Result<(), JobError> {
    let NewBlob { id, tenant, pool, kind, bytes, batch } = blob;
    tables
        .connection
        .prepare(
            "INSERT INTO blobs (id, tenant, pool, kind, bytes, batch)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute(params![
            id,
            tenant.as_str(),
            pool.map(PoolName::as_str),
            kind.as_str(),
            bytes,
            batch
        ])?;
    Ok(())
}

/// Returns the reserved bytes of an upload that runs.
pub(super) fn upload_bytes(tables: Tables<'_>, id: BlobId) -> Result<Option<u64>, JobError> {
    Ok(tables
        .connection
        .prepare(&format!(
            "SELECT bytes FROM blobs WHERE id = ?1 AND kind = 'upload'{}",
            tables.for_update()
        ))?
        .query_row([id], |row| row.get(0))
        .optional()?)
}

pub(super) fn set_blob(
    tables: Tables<'_>,
    id: BlobId,
    kind: BlobKind,
    bytes: u64,
) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE blobs SET kind = ?2, bytes = ?3 WHERE id = ?1")?
        .execute(params![id, kind.as_str(), bytes])?;
    Ok(())
}

pub(super) fn grow_blob(tables: Tables<'_>, id: BlobId, bytes: u64) -> Result<(), JobError> {
    tables
        .connection
        .prepare("UPDATE blobs SET bytes = bytes + ?2 WHERE id = ?1")?
        .send(params![id, bytes])?;
    Ok(())
}

pub(super) fn delete_blob(tables: Tables<'_>, id: BlobId) -> Result<(), JobError> {
    tables.connection.prepare("DELETE FROM blobs WHERE id = ?1")?.execute([id])?;
    Ok(())
}

/// Notes that this gateway writes an upload, where several gateways write.
pub(super) fn set_home(tables: Tables<'_>, id: BlobId) -> Result<(), JobError> {
    if let Some(home) = tables.home {
        let sql = "UPDATE blobs SET home = ?2 WHERE id = ?1";
        tables.connection.prepare(sql)?.send(params![id, home])?;
    }
    Ok(())
}

/// Deletes the uploads of this gateway.
pub(super) fn delete_uploads(tables: Tables<'_>) -> Result<(), JobError> {
    match tables.home {
        None => tables.connection.execute("DELETE FROM blobs WHERE kind = 'upload'", ())?,
        Some(home) => {
            let sql = "DELETE FROM blobs WHERE kind = 'upload' AND home = ?1";
            tables.connection.execute(sql, [home])?
        }
    };
    Ok(())
}

/// Deletes the uploads of gateways that have ended and were never started again.
pub(super) fn delete_lost_uploads(tables: Tables<'_>) -> Result<(), JobError> {
    if tables.home.is_some() {
        // No upload may take as long as that.
        let sql = "DELETE FROM blobs WHERE kind = 'upload'
             AND begun_at < clock_timestamp() - interval '2 days'";
        tables.connection.execute(sql, ())?;
    }
    Ok(())
}

pub(super) fn blobs(tables: Tables<'_>) -> Result<Vec<BlobId>, JobError> {
    let mut statement = tables.connection.prepare("SELECT id FROM blobs")?;
    let rows = statement.query_map((), |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the finished blobs that no file and no open batch needs.
pub(super) fn unneeded_blobs(tables: Tables<'_>) -> Result<Vec<BlobId>, JobError> {
    let mut statement = tables.connection.prepare(
        // An upload has no range before it is finished, so without this test it would look
        // unneeded.
        "SELECT id FROM blobs WHERE kind <> 'upload'
           AND NOT EXISTS (SELECT 1 FROM ranges WHERE ranges.blob = blobs.id)
           AND NOT EXISTS (SELECT 1 FROM batches
                           WHERE batches.id = blobs.batch AND state <> 'ended')",
    )?;
    let rows = statement.query_map((), |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the bytes of all inputs, reserved ones included.
pub(super) fn stored_by_all(tables: Tables<'_>) -> Result<u64, JobError> {
    Ok(tables
        .connection
        .prepare("SELECT coalesce(sum(bytes), 0) FROM blobs WHERE kind <> 'segment'")?
        .query_row((), |row| row.get(0))?)
}

/// Returns the bytes of all inputs, reserved ones included, and of all results.
pub(super) fn stored_by_all_kinds(tables: Tables<'_>) -> Result<(u64, u64), JobError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT coalesce(sum(bytes) FILTER (WHERE kind <> 'segment'), 0),
               coalesce(sum(bytes) FILTER (WHERE kind = 'segment'), 0) FROM blobs",
        )?
        .query_row((), |row| Ok((row.get(0)?, row.get(1)?)))?)
}

/// Returns the sums of a scope.
pub(super) fn sums(tables: Tables<'_>, scope: &QuotaScope) -> Result<StoredSums, JobError> {
    // Only a column's name of this program is formatted in; the value is a parameter.
    let (column, value) = scope_column(scope);
    let sql = format!(
        "SELECT coalesce(sum(bytes) FILTER (WHERE kind <> 'segment'), 0),
           coalesce(sum(bytes) FILTER (WHERE kind = 'segment'), 0),
           count(*) FILTER (WHERE kind = 'upload') FROM blobs WHERE {column} = ?1"
    );
    let mut sums = tables.connection.prepare(&sql)?.query_row([value], |row| {
        Ok(StoredSums {
            stored: row.get(0)?,
            segments: row.get(1)?,
            uploads: row.get(2)?,
            files: 0,
        })
    })?;
    let sql = format!("SELECT count(*) FROM files WHERE {column} = ?1");
    sums.files = tables.connection.prepare(&sql)?.query_row([value], |row| row.get(0))?;
    Ok(sums)
}

/// Returns the column that a scope compares, and the value.
pub(super) fn scope_column(scope: &QuotaScope) -> (&'static str, &str) {
    match scope {
        QuotaScope::Tenant(name) => ("tenant", name.as_str()),
        QuotaScope::Pool(name) => ("pool", name.as_str()),
    }
}

pub(super) fn insert(
    tables: Tables<'_>,
    file: &FileRow,
    ranges: &[BlobRange],
) -> Result<(), JobError> {
    let FileRow { id, tenant, pool, bytes, created, expires, filename, purpose, lines, sha256 } =
        file;
    tables
        .connection
        .prepare(
            "INSERT INTO files (id, tenant, pool, bytes, created, expires, filename, purpose,
               lines, sha256) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        )?
        .execute(params![
            id,
            tenant.as_str(),
            pool.as_ref().map(PoolName::as_str),
            bytes,
            nanos(*created),
            nanos(*expires),
            filename,
            purpose_text(*purpose),
            lines,
            sha256.map(|hash| hash.to_vec())
        ])?;
    let mut statement = tables.connection.prepare(
        "INSERT INTO ranges (file, ordinal, blob, start, length) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?;
    // The bytes of a file are its ranges in this order.
    for (ordinal, range) in ranges.iter().enumerate() {
        let BlobRange { blob, offset, length } = range;
        statement.send(params![id, ordinal as u64, blob, offset, length])?;
    }
    Ok(())
}

/// Finds a file that has not expired; `tenant` is `None` for the dispatcher, which may
/// use an input until its batches have ended.
pub(super) fn find(
    tables: Tables<'_>,
    id: FileId,
    visible: Option<(&TenantId, UtcTime)>,
) -> Result<Option<FileRow>, JobError> {
    let sql = format!("SELECT {COLUMNS} FROM files WHERE id = ?1");
    let row = tables.connection.prepare(&sql)?.query_row([id], raw).optional()?;
    let Some(row) = row.map(RawFile::check).transpose()? else { return Ok(None) };
    // A file that has expired is gone for clients at once, and not only after the next sweep.
    let is_visible = visible.is_none_or(|(tenant, now)| row.tenant == *tenant && row.expires > now);
    Ok(is_visible.then_some(row))
}

pub(super) fn ranges(tables: Tables<'_>, id: FileId) -> Result<Vec<BlobRange>, JobError> {
    let mut statement = tables
        .connection
        .prepare("SELECT blob, start, length FROM ranges WHERE file = ?1 ORDER BY ordinal")?;
    let rows = statement.query_map([id], |row| {
        Ok(BlobRange { blob: row.get(0)?, offset: row.get(1)?, length: row.get(2)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn page(
    tables: Tables<'_>,
    now: UtcTime,
    tenant: &TenantId,
    page: &FilePage,
) -> Result<Page<FileRow>, JobError> {
    let FilePage { after, limit, order, purpose } = page;
    let (comparison, direction) = match order {
        Order::Ascending => (">", "ASC"),
        Order::Descending => ("<", "DESC"),
    };
    let after = after.map(|id| {
        tables
            .connection
            .prepare("SELECT seq FROM files WHERE id = ?1 AND tenant = ?2")?
            .query_row(params![id, tenant.as_str()], |row| row.get::<i64>(0))
            .optional()?
            .ok_or(JobError::NoSuchFile)
    });
    let after = after.transpose()?;
    let sql = format!(
        "SELECT {COLUMNS} FROM files WHERE tenant = ?1 AND expires > ?2
           AND (CAST(?3 AS TEXT) IS NULL OR purpose = ?3)
           AND (CAST(?4 AS BIGINT) IS NULL OR seq {comparison} ?4)
         ORDER BY seq {direction} LIMIT ?5"
    );
    let mut statement = tables.connection.prepare(&sql)?;
    let rows = statement.query_map(
        params![
            tenant.as_str(),
            nanos(now),
            purpose.map(purpose_text),
            after,
            // One more, which tells if rows follow.
            u64::from(*limit) + 1
        ],
        raw,
    )?;
    let mut found = Vec::new();
    for row in rows {
        found.push(row?.check()?);
    }
    let has_more = found.len() > *limit as usize;
    found.truncate(*limit as usize);
    Ok(Page { rows: found, has_more })
}

/// Returns true if a batch that has not ended needs the file as its input.
pub(super) fn is_needed(tables: Tables<'_>, id: FileId) -> Result<bool, JobError> {
    Ok(tables
        .connection
        .prepare("SELECT EXISTS (SELECT 1 FROM batches WHERE input = ?1 AND state <> 'ended')")?
        .query_row([id], |row| row.get(0))?)
}

pub(super) fn delete(tables: Tables<'_>, id: FileId) -> Result<(), JobError> {
    tables.connection.prepare("DELETE FROM files WHERE id = ?1")?.execute([id])?;
    tables.connection.prepare("DELETE FROM ranges WHERE file = ?1")?.execute([id])?;
    Ok(())
}

/// Returns the expired files that no open batch needs.
pub(super) fn expired(tables: Tables<'_>, now: UtcTime) -> Result<Vec<FileId>, JobError> {
    let mut statement = tables.connection.prepare(
        "SELECT id FROM files WHERE expires <= ?1
           AND NOT EXISTS (SELECT 1 FROM batches WHERE input = files.id AND state <> 'ended')",
    )?;
    let rows = statement.query_map([nanos(now)], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// A row before the check of its texts.
struct RawFile {
    id: FileId,
    tenant: String,
    pool: Option<String>,
    bytes: u64,
    created: i64,
    expires: i64,
    filename: String,
    purpose: String,
    lines: u64,
    sha256: Option<Vec<u8>>,
}

fn raw(row: &Row<'_>) -> Result<RawFile, SqlError> {
    Ok(RawFile {
        id: row.get(0)?,
        tenant: row.get(1)?,
        pool: row.get(2)?,
        bytes: row.get(3)?,
        created: row.get(4)?,
        expires: row.get(5)?,
        filename: row.get(6)?,
        purpose: row.get(7)?,
        lines: row.get(8)?,
        sha256: row.get(9)?,
    })
}

impl RawFile {
    fn check(self) -> Result<FileRow, JobError> {
        let Self { id, tenant, pool, bytes, created, expires, filename, purpose, lines, sha256 } =
            self;
        let sha256 = sha256
            .map(|hash| <[u8; 32]>::try_from(hash).map_err(|_| damaged(format!("hash of {id}"))));
        Ok(FileRow {
            id,
            tenant: name(TenantId::new(&tenant))?,
            pool: pool.map(|pool| name(PoolName::new(&pool))).transpose()?,
            bytes,
            created: time(created),
            expires: time(expires),
            filename,
            purpose: match &*purpose {
                "batch" => Purpose::Batch,
                "batch_output" => Purpose::BatchOutput,
                _ => return Err(damaged(format!("purpose of {id}"))),
            },
            lines,
            sha256: sha256.transpose()?,
        })
    }
}

fn purpose_text(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Batch => "batch",
        Purpose::BatchOutput => "batch_output",
    }
}
