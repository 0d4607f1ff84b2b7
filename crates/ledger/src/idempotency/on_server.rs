//! The records on a database server, for all gateways that share it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tollgate_domain::{RequestId, TenantId, UtcTime};
use tollgate_sql::ServerAddress;

use super::{
    FoundRecord, IdempotencyLimits, IdempotencyRecord, IdempotencyStoreError, KeyDigest, PutRecord,
    RecordMaker,
};
use crate::caps::Home;
use crate::error::StorageError;
use crate::rows::idempotency::StoredIntent;
use crate::rows::intents::{self, FoundIntent, NewIntent, Owner};
use crate::server_connection::{ServerConnection, ServerFailure};

/// The records of one gateway's requests beside those of the others.
pub(super) struct ServerIntents {
    home: Home,
    limits: IdempotencyLimits,
    inner: Mutex<Inner>,
}

struct Inner {
    connection: ServerConnection,
    /// The number of records of each tenant, and the time of the count. Counted again after a
    /// moment, because other gateways write, too.
    counts: HashMap<TenantId, (u32, UtcTime)>,
    /// The time at which old records were last deleted.
    swept: UtcTime,
}

/// A record on the server that no version writes.
#[derive(Debug, thiserror::Error)]
#[error("a record has an invalid fingerprint or request id")]
struct Invalid;

impl ServerIntents {
    pub(super) fn new(address: ServerAddress, home: Home, limits: IdempotencyLimits) -> Self {
        let connection = ServerConnection::new(address);
        let inner = Inner { connection, counts: HashMap::new(), swept: UtcTime(0) };
        Self { home, limits, inner: Mutex::new(inner) }
    }

    /// Takes over the records of a file, which are of this gateway.
    pub(super) fn adopt(&self, records: &[StoredIntent]) -> Result<(), IdempotencyStoreError> {
        // Of the life before: this one has begun no request yet.
        let owner = Owner { home: &self.home.id, life: self.home.life.saturating_sub(1) };
        Ok(self.lock().connection.run(|connection| {
            for StoredIntent { digest, fingerprint, tenant, request, began } in records {
                let new = NewIntent {
                    digest,
                    fingerprint,
                    tenant,
                    request,
                    owner,
                    began: *began,
                    oldest: i64::MIN,
                    replaces: None,
                };
                intents::adopt(connection, &new)?;
            }
            Ok(())
        })?)
    }

    pub(super) fn find(
        &self,
        digest: &KeyDigest,
        now: UtcTime,
    ) -> Result<Option<FoundRecord>, IdempotencyStoreError> {
        let oldest = self.limits.oldest(now);
        let mut inner = self.lock();
        let found = inner.connection.run(|connection| intents::find(connection, digest, oldest))?;
        let Some(FoundIntent { fingerprint, request, home, is_settled }) = found else {
            return Ok(None);
        };
        let fingerprint = <[u8; 32]>::try_from(fingerprint).ok();
        let record = fingerprint.zip(RequestId::new(&request).ok());
        let Some((fingerprint, request)) = record else {
            let address = inner.connection.address().to_string();
            let source = StorageError::new(Invalid, false);
            return Err(IdempotencyStoreError::Server { address, source });
        };
        let maker = match home == self.home.id {
            true => RecordMaker::ThisGateway,
            false if is_settled => RecordMaker::SettledGateway,
            false => RecordMaker::OtherGateway,
        };
        Ok(Some(FoundRecord { record: IdempotencyRecord { fingerprint, request }, maker }))
    }

    pub(super) fn put(
        &self,
        digest: &KeyDigest,
        tenant: &TenantId,
        (record, replaces): (&IdempotencyRecord, Option<&RequestId>),
        now: UtcTime,
    ) -> Result<PutRecord, IdempotencyStoreError> {
        let oldest = self.limits.oldest(now);
        let mut inner = self.lock();
        inner.sweep(now, oldest)?;
        if inner.count(tenant, now, oldest)? >= self.limits.keys_per_tenant {
            return Ok(PutRecord::TooMany);
        }
        let new = NewIntent {
            digest,
            fingerprint: &record.fingerprint,
            tenant,
            request: record.request.as_str(),
            owner: Owner { home: &self.home.id, life: self.home.life },
            began: i64::try_from(now.0).unwrap_or(i64::MAX),
            oldest,
            replaces: replaces.map(RequestId::as_str),
        };
        // The same statement once more finds the record written, so a repeat is harmless.
        if inner.connection.run(|connection| intents::put(connection, &new))? {
            if let Some((count, _)) = inner.counts.get_mut(tenant) {
                *count = count.saturating_add(1);
            }
            return Ok(PutRecord::Taken);
        }
        drop(inner);
        match self.find(digest, now)? {
            Some(FoundRecord { record, .. }) => Ok(PutRecord::Other(record.request)),
            // The other request was freed in between; its client tries again.
            None => Ok(PutRecord::Other(record.request.clone())),
        }
    }

    pub(super) fn remove(
        &self,
        digest: &KeyDigest,
        request: &RequestId,
    ) -> Result<(), IdempotencyStoreError> {
        let mut inner = self.lock();
        let request = request.as_str();
        Ok(inner.connection.run(|connection| intents::remove(connection, digest, request))?)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A holder that panicked leaves a connection that is checked at its next use.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Deletes old records now and then.
    fn sweep(&mut self, now: UtcTime, oldest: i64) -> Result<(), ServerFailure> {
        if now.0.saturating_sub(self.swept.0) < SWEEP_EVERY_NS {
            return Ok(());
        }
        self.connection.run(|connection| intents::forget(connection, oldest))?;
        // Bounds the map by the tenants of a moment.
        self.counts.retain(|_, (_, counted)| now.0.saturating_sub(counted.0) < SWEEP_EVERY_NS);
        self.swept = now;
        Ok(())
    }

    /// Returns the number of a tenant's records, as it was a moment ago.
    fn count(
        &mut self,
        tenant: &TenantId,
        now: UtcTime,
        oldest: i64,
    ) -> Result<u32, ServerFailure> {
        if let Some((count, counted)) = self.counts.get(tenant)
            && now.0.saturating_sub(counted.0) < COUNT_HOLDS_NS
        {
            return Ok(*count);
        }
        let count =
            self.connection.run(|connection| intents::count_of(connection, tenant, oldest))?;
        self.counts.insert(tenant.clone(), (count, now));
        Ok(count)
    }
}

impl From<ServerFailure> for IdempotencyStoreError {
    fn from(ServerFailure { address, source }: ServerFailure) -> Self {
        Self::Server { address, source }
    }
}

/// The time between two deletions of old records.
const SWEEP_EVERY_NS: u64 = 10_000_000_000;
/// The time for which a count of a tenant's records holds.
const COUNT_HOLDS_NS: u64 = 1_000_000_000;
