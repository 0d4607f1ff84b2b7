//! Quotas of files and batches: what a tenant or a pool may keep and have waiting.

use std::time::Duration;

use tollgate_domain::{PlanName, PoolName, TenantId};

/// The quotas of one plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// Batches that have not ended; 0 for none.
    pub queued: u64,
    /// Batches with lines on workers.
    pub running: u64,
    /// Lines without an answer, over all batches.
    pub lines: u64,
    /// Lines on workers at once.
    pub in_flight: u64,
    /// Bytes of inputs.
    pub stored: u64,
    /// Bytes of results.
    pub results: u64,
    /// Files; a batch takes two for its results.
    pub files: u64,
    /// Uploads at once.
    pub uploads: u64,
    /// Longest life of a file and of an ended batch.
    pub kept: Duration,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            queued: 100,
            running: 4,
            lines: 200_000,
            in_flight: 32,
            stored: 1 << 30,
            results: 2 << 30,
            files: 1_000,
            uploads: 4,
            kept: Duration::from_secs(7 * 86_400),
        }
    }
}

/// The tenants over which a quota counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QuotaScope {
    /// One tenant.
    Tenant(TenantId),
    /// All tenants of a pool.
    Pool(PoolName),
}

impl std::fmt::Display for QuotaScope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tenant(name) => write!(f, "Tenant '{name}'"),
            Self::Pool(name) => write!(f, "Pool '{name}'"),
        }
    }
}

/// Quotas and the tenants over which they count. An operation takes a list of them,
/// narrowest first, and obeys all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopedQuotas {
    /// The tenants.
    pub scope: QuotaScope,
    /// The plan that sets the quotas, for messages.
    pub plan: PlanName,
    /// The quotas.
    pub quotas: Quotas,
}

/// The present use of the quotas of a scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaUse {
    /// Batches that have not ended.
    pub queued: u64,
    /// Lines without an answer.
    pub lines: u64,
    /// Bytes of inputs, reserved ones included.
    pub stored: u64,
    /// Bytes of results, reserved ones included.
    pub results: u64,
    /// Files, uploads and two for each batch that has not ended.
    pub files: u64,
    /// Uploads that run.
    pub uploads: u64,
}
