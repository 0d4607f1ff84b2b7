//! Table `intents` of a server: the requests that idempotency keys stand for, of all gateways that
//! share it.

use tollgate_domain::TenantId;
use tollgate_sql::{Connection, OptionalRow, SqlError, params};

use super::idempotency::KeyDigest;

/// The gateway whose request a key stands for: its data folder and the life.
#[derive(Clone, Copy)]
pub(crate) struct Owner<'a> {
    pub(crate) home: &'a str,
    pub(crate) life: u64,
}

/// The record of a key.
pub(crate) struct FoundIntent {
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) request: String,
    pub(crate) home: String,
    /// True if everything that the gateway's life did is in the ledger: a later life has read
    /// all journals.
    pub(crate) is_settled: bool,
}

/// A record to write.
pub(crate) struct NewIntent<'a> {
    pub(crate) digest: &'a KeyDigest,
    pub(crate) fingerprint: &'a [u8; 32],
    pub(crate) tenant: &'a TenantId,
    pub(crate) request: &'a str,
    pub(crate) owner: Owner<'a>,
    /// The time at which the request began, and the beginning of the oldest record that holds,
    /// in nanoseconds.
    pub(crate) began: i64,
    pub(crate) oldest: i64,
    /// The request that the key stood for before, and does no more.
    pub(crate) replaces: Option<&'a str>,
}

/// Returns the record of a key that began at `oldest` or later.
pub(crate) fn find(
    connection: &Connection,
    digest: &KeyDigest,
    oldest: i64,
) -> Result<Option<FoundIntent>, SqlError> {
    let query = "SELECT fingerprint, request_id, intents.home,
           coalesce(homes.life > intents.life AND homes.is_settled, false)
         FROM intents LEFT JOIN homes ON homes.home = intents.home
         WHERE key_digest = ?1 AND began_utc_ns >= ?2";
    let found = connection.query_row(query, params![&digest[..], oldest], |row| {
        Ok(FoundIntent {
            fingerprint: row.get(0)?,
            request: row.get(1)?,
            home: row.get(2)?,
            is_settled: row.get(3)?,
        })
    });
    found.optional()
}

/// Writes a record if the key is free, or stands for the request that is replaced. Returns false
/// if it stands for another one.
pub(crate) fn put(connection: &Connection, new: &NewIntent<'_>) -> Result<bool, SqlError> {
    let put = "INSERT INTO intents (key_digest, fingerprint, tenant, request_id, home, life,
           began_utc_ns)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT (key_digest) DO UPDATE SET fingerprint = excluded.fingerprint,
           tenant = excluded.tenant, request_id = excluded.request_id, home = excluded.home,
           life = excluded.life, began_utc_ns = excluded.began_utc_ns
         WHERE intents.request_id IN (excluded.request_id, ?8) OR intents.began_utc_ns < ?9";
    let NewIntent { digest, fingerprint, tenant, request, owner, began, oldest, replaces } = new;
    let written = connection.execute(
        put,
        params![
            &digest[..],
            &fingerprint[..],
            tenant.as_str(),
            request,
            owner.home,
            owner.life,
            began,
            // No request has an empty id.
            replaces.unwrap_or(""),
            oldest
        ],
    )?;
    Ok(written > 0)
}

/// Writes a record of an earlier version's file if the key has none.
pub(crate) fn adopt(connection: &Connection, new: &NewIntent<'_>) -> Result<(), SqlError> {
    // An empty `replaces` and the oldest possible time replace nothing.
    put(connection, &NewIntent { oldest: i64::MIN, replaces: None, ..*new }).map(drop)
}

/// Deletes the record of a key if the key stands for `request`.
pub(crate) fn remove(
    connection: &Connection,
    digest: &KeyDigest,
    request: &str,
) -> Result<(), SqlError> {
    let remove = "DELETE FROM intents WHERE key_digest = ?1 AND request_id = ?2";
    connection.execute(remove, params![&digest[..], request])?;
    Ok(())
}

/// Returns the number of a tenant's records that began at `oldest` or later.
pub(crate) fn count_of(
    connection: &Connection,
    tenant: &TenantId,
    oldest: i64,
) -> Result<u32, SqlError> {
    let query = "SELECT count(*) FROM intents WHERE tenant = ?1 AND began_utc_ns >= ?2";
    connection.query_row(query, params![tenant.as_str(), oldest], |row| row.get(0))
}

/// Deletes at most a thousand records that began before `oldest`.
pub(crate) fn forget(connection: &Connection, oldest: i64) -> Result<(), SqlError> {
    // Rows that another gateway deletes at this moment are left to it.
    let forget = "DELETE FROM intents WHERE key_digest IN (
           SELECT key_digest FROM intents WHERE began_utc_ns < ?1
           LIMIT 1000 FOR UPDATE SKIP LOCKED)";
    connection.execute(forget, [oldest])?;
    Ok(())
}

pub(crate) const DEFINITION: &str = r#"
CREATE TABLE intents (
  key_digest BYTEA PRIMARY KEY,
  fingerprint BYTEA NOT NULL,
  tenant TEXT COLLATE "C" NOT NULL,
  request_id TEXT COLLATE "C" NOT NULL,
  home TEXT COLLATE "C" NOT NULL,
  life BIGINT NOT NULL,
  began_utc_ns BIGINT NOT NULL
);
CREATE INDEX intents_by_tenant ON intents (tenant, began_utc_ns);
CREATE INDEX intents_by_age ON intents (began_utc_ns);
"#;
