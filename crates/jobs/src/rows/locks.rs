//! Locks on a server, where the transactions of several gateways run at the same time. In a
//! file one transaction writes at a time, so nothing is locked there.
//!
//! A transaction that takes several locks takes them in this order: the row of a batch,
//! tenants, pools, the gateway's total, files.

use super::Tables;
use crate::error::JobError;
use crate::ids::{BatchId, FileId};
use crate::quota::{QuotaScope, ScopedQuotas};

/// The namespace of the locks of scopes.
const SCOPES: i32 = 0x6a6f_6273;
/// The lock of the bytes of all tenants.
const ALL: &str = "all";

impl Tables<'_> {
    /// Returns the words that lock the rows of a query, where that is possible.
    pub(super) fn for_update(self) -> &'static str {
        match self.is_writing && self.connection.server().is_some() {
            true => " FOR UPDATE",
            false => "",
        }
    }

    /// Locks the sums of scopes until the end of the transaction. Two transactions that check
    /// the quotas of one scope come one after the other.
    pub(super) fn lock_scopes(self, quotas: &[ScopedQuotas]) -> Result<(), JobError> {
        for scoped in quotas {
            match &scoped.scope {
                QuotaScope::Tenant(name) => self.lock_scope(&format!("tenant {name}"))?,
                QuotaScope::Pool(name) => self.lock_scope(&format!("pool {name}"))?,
            }
        }
        Ok(())
    }

    /// Locks the bytes of all tenants until the end of the transaction.
    pub(super) fn lock_all(self) -> Result<(), JobError> {
        self.lock_scope(ALL)
    }

    fn lock_scope(self, scope: &str) -> Result<(), JobError> {
        if self.connection.server().is_none() {
            return Ok(());
        }
        // The lock's own result has no type that this program reads.
        let sql = format!("SELECT pg_advisory_xact_lock({SCOPES}, hashtext(?1)) IS NULL");
        Ok(self.connection.query_row(&sql, [scope], |_| Ok(()))?)
    }

    /// Locks a batch until the end of the transaction.
    pub(super) fn lock_batch(self, id: BatchId) -> Result<(), JobError> {
        self.lock_row("SELECT 1 FROM batches WHERE id = ?1 FOR UPDATE", id.as_bytes())
    }

    /// Locks a file for a delete: until the end of the transaction no batch begins to need it.
    pub(super) fn lock_file(self, id: FileId) -> Result<(), JobError> {
        self.lock_row("SELECT 1 FROM files WHERE id = ?1 FOR UPDATE", id.as_bytes())
    }

    /// Keeps a file until the end of the transaction. Other transactions may do the same.
    pub(super) fn keep_file(self, id: FileId) -> Result<(), JobError> {
        self.lock_row("SELECT 1 FROM files WHERE id = ?1 FOR SHARE", id.as_bytes())
    }

    fn lock_row(self, sql: &str, id: &[u8; 16]) -> Result<(), JobError> {
        if self.connection.server().is_some() {
            self.connection.prepare(sql)?.exists([id])?;
        }
        Ok(())
    }
}
