//! The durable record of the request that each key stands for, written once for each request
//! that brings a key: a database file of its own, or a table on the server that several gateways
//! share. It holds no key, prompt or answer.

mod on_server;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_domain::{RequestId, TenantId, UtcTime};

use tollgate_sql::ServerAddress;

use self::on_server::ServerIntents;
use crate::caps::Home;
use crate::error::StorageError;
use crate::operations::wal_rewrite::WalRewriter;
use crate::rows::idempotency::{FORMAT, IdempotencyLimits, IdempotencyRows};
pub use crate::rows::idempotency::{IdempotencyRecord, KeyDigest};

/// Reasons why the records cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum IdempotencyStoreError {
    /// The database failed.
    #[error("{path}: the database of idempotency keys failed")]
    Database {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: StorageError,
    },
    /// The database's write-ahead log cannot be rewritten.
    #[error("{path}: the log of the idempotency keys cannot be rewritten")]
    Log {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The database server failed.
    #[error("{address}: the table of idempotency keys failed")]
    Server {
        /// User, host and database, without the password.
        address: String,
        /// The cause.
        source: StorageError,
    },
    /// The records of an earlier version's file cannot be moved aside.
    #[error("{path}: the file of idempotency keys was moved to the server and cannot be renamed")]
    Moved {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The database is damaged, or of a format that this version does not know.
    #[error("{path}: not a database of idempotency keys of format {FORMAT}")]
    Format {
        /// The file.
        path: PathBuf,
    },
}

/// The store of records.
pub struct IdempotencyStore {
    rows: Rows,
}

enum Rows {
    File { path: PathBuf, rows: Mutex<IdempotencyRows> },
    Server(ServerIntents),
}

/// A record that was found, and what is known of its gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundRecord {
    /// The record.
    pub record: IdempotencyRecord,
    /// The gateway that made it.
    pub maker: RecordMaker,
}

/// The gateway that made a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordMaker {
    /// This gateway, in this life or an earlier one.
    ThisGateway,
    /// Another gateway, which may still run the request.
    OtherGateway,
    /// Another gateway that has started again since. All that it did before is in the ledger.
    SettledGateway,
}

/// The result of writing a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PutRecord {
    /// The key stands for the request now.
    Taken,
    /// The tenant has as many keys as it may.
    TooMany,
    /// The key stands for another request since a moment ago.
    Other(RequestId),
}

impl IdempotencyStore {
    /// Opens the records on a database server. Those of `idempotency.db` in the folder `data`
    /// are moved there. `home` is the identity of the data folder; the other parameters are those
    /// of [`Self::open`].
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn on_server(
        address: &ServerAddress,
        home: Home,
        data: &Path,
        (kept, keys_per_tenant): (Duration, u32),
    ) -> Result<Self, IdempotencyStoreError> {
        let limits = limits(kept, keys_per_tenant);
        let intents = ServerIntents::new(address.clone(), home, limits);
        let path = data.join(FILE);
        if path.exists() {
            let rows = open_file(&path, limits)?;
            let failed = |source| IdempotencyStoreError::Database { path: path.clone(), source };
            intents.adopt(&rows.all().map_err(failed)?)?;
            drop(rows);
            std::fs::rename(&path, data.join(format!("{FILE}.moved")))
                .map_err(|source| IdempotencyStoreError::Moved { path, source })?;
        }
        Ok(Self { rows: Rows::Server(intents) })
    }

    /// Opens `idempotency.db` in the folder `data`, or makes it. A record holds for
    /// `kept`; a tenant has at most `keys_per_tenant` records.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn open(
        data: &Path,
        kept: Duration,
        keys_per_tenant: u32,
    ) -> Result<Self, IdempotencyStoreError> {
        let path = data.join(FILE);
        let rows = Mutex::new(open_file(&path, limits(kept, keys_per_tenant))?);
        Ok(Self { rows: Rows::File { path, rows } })
    }

    /// Returns the record of a key, unless it was made too long before `now`.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn find(
        &self,
        digest: &KeyDigest,
        now: UtcTime,
    ) -> Result<Option<FoundRecord>, IdempotencyStoreError> {
        let (path, rows) = match &self.rows {
            Rows::File { path, rows } => (path, rows),
            Rows::Server(intents) => return intents.find(digest, now),
        };
        let found = lock(rows).find(digest, now).map_err(|source| failed(path, source))?;
        let Some((fingerprint, request)) = found else { return Ok(None) };
        // Ids are checked before they are written, so an invalid id means a damaged file.
        let request = RequestId::new(&request)
            .map_err(|_| IdempotencyStoreError::Format { path: path.clone() })?;
        let record = IdempotencyRecord { fingerprint, request };
        Ok(Some(FoundRecord { record, maker: RecordMaker::ThisGateway }))
    }

    /// Records the request that a key stands for from now on. `replaces` is the request that
    /// the key stood for before, if it was found and does not count any more.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn put(
        &self,
        digest: &KeyDigest,
        tenant: &TenantId,
        (record, replaces): (&IdempotencyRecord, Option<&RequestId>),
        now: UtcTime,
    ) -> Result<PutRecord, IdempotencyStoreError> {
        match &self.rows {
            // Of one gateway: the memory has decided that the key is free.
            Rows::File { path, rows } => match lock(rows).put(digest, tenant, record, now) {
                Ok(true) => Ok(PutRecord::Taken),
                Ok(false) => Ok(PutRecord::TooMany),
                Err(source) => Err(failed(path, source)),
            },
            Rows::Server(intents) => intents.put(digest, tenant, (record, replaces), now),
        }
    }

    /// Deletes the record of a key if the key stands for `request`.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn remove(
        &self,
        digest: &KeyDigest,
        request: &RequestId,
    ) -> Result<(), IdempotencyStoreError> {
        match &self.rows {
            Rows::File { path, rows } => {
                lock(rows).remove(digest, request).map_err(|source| failed(path, source))
            }
            Rows::Server(intents) => intents.remove(digest, request),
        }
    }
}

fn limits(kept: Duration, keys_per_tenant: u32) -> IdempotencyLimits {
    // A duration beyond `u64` nanoseconds, 584 years, is as good as forever.
    let kept_ns = u64::try_from(kept.as_nanos()).unwrap_or(u64::MAX);
    IdempotencyLimits { kept_ns, keys_per_tenant }
}

fn open_file(
    path: &Path,
    limits: IdempotencyLimits,
) -> Result<IdempotencyRows, IdempotencyStoreError> {
    // An earlier process may have acknowledged commits whose log pages never
    // reached the disk. As for the ledger, the log is written again before use.
    WalRewriter::default()
        .rewrite(path)
        .map_err(|source| IdempotencyStoreError::Log { path: path.to_owned(), source })?;
    let opened = IdempotencyRows::open(path, limits).map_err(|source| failed(path, source))?;
    opened.ok_or_else(|| IdempotencyStoreError::Format { path: path.to_owned() })
}

fn failed(path: &Path, source: StorageError) -> IdempotencyStoreError {
    IdempotencyStoreError::Database { path: path.to_owned(), source }
}

fn lock(rows: &Mutex<IdempotencyRows>) -> MutexGuard<'_, IdempotencyRows> {
    // SQLite keeps the rows whole even if a holder of the lock panicked.
    rows.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The file of the records in the data folder.
const FILE: &str = "idempotency.db";
