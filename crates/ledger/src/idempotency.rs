//! The durable record of the request that each key stands for: a database of its
//! own, written once for each request that brings a key. The database holds no
//! key, prompt or answer.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_domain::{RequestId, TenantId, UtcTime};

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
    /// The database is damaged, or of a format that this version does not know.
    #[error("{path}: not a database of idempotency keys of format {FORMAT}")]
    Format {
        /// The file.
        path: PathBuf,
    },
}

/// The database of records.
pub struct IdempotencyStore {
    path: PathBuf,
    rows: Mutex<IdempotencyRows>,
}

impl IdempotencyStore {
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
        let path = data.join("idempotency.db");
        // An earlier process may have acknowledged commits whose log pages never
        // reached the disk. As for the ledger, the log is written again before use.
        WalRewriter::default()
            .rewrite(&path)
            .map_err(|source| IdempotencyStoreError::Log { path: path.clone(), source })?;
        // A duration beyond `u64` nanoseconds, 584 years, is as good as forever.
        let kept_ns = u64::try_from(kept.as_nanos()).unwrap_or(u64::MAX);
        let opened =
            IdempotencyRows::open(&path, IdempotencyLimits { kept_ns, keys_per_tenant })
                .map_err(|source| IdempotencyStoreError::Database { path: path.clone(), source })?;
        match opened {
            Some(rows) => Ok(Self { path, rows: Mutex::new(rows) }),
            None => Err(IdempotencyStoreError::Format { path }),
        }
    }

    /// Returns the record of a key, unless it was made too long before `now`.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn find(
        &self,
        digest: &KeyDigest,
        now: UtcTime,
    ) -> Result<Option<IdempotencyRecord>, IdempotencyStoreError> {
        let found = self.lock().find(digest, now).map_err(|source| self.failed(source))?;
        let Some((fingerprint, request)) = found else { return Ok(None) };
        // Ids are checked before they are written, so an invalid id means a damaged file.
        let request = RequestId::new(&request)
            .map_err(|_| IdempotencyStoreError::Format { path: self.path.clone() })?;
        Ok(Some(IdempotencyRecord { fingerprint, request }))
    }

    /// Records the request that a key stands for from now on. Returns false if the
    /// tenant has as many keys as it may.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn put(
        &self,
        digest: &KeyDigest,
        tenant: &TenantId,
        record: &IdempotencyRecord,
        now: UtcTime,
    ) -> Result<bool, IdempotencyStoreError> {
        let mut rows = self.lock();
        rows.put(digest, tenant, record, now).map_err(|source| self.failed(source))
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
        let mut rows = self.lock();
        rows.remove(digest, request).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: StorageError) -> IdempotencyStoreError {
        IdempotencyStoreError::Database { path: self.path.clone(), source }
    }

    fn lock(&self) -> MutexGuard<'_, IdempotencyRows> {
        // SQLite keeps the rows whole even if a holder of the lock panicked.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
