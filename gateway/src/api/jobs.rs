//! Files and batches over HTTP: the routes of OpenAI's Files and Batches, and the
//! service through which the dispatcher runs lines.

pub(crate) mod batches;
pub(crate) mod files;
pub(crate) mod form;
mod lines;
mod page;

use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use http::HeaderMap;
use tollgate_admission::{Admission, Scope, ScopeLimits};
use tollgate_config::{BatchQuotas, Plan};
use tollgate_domain::MonotonicTime;
use tollgate_jobs::{JobError, Jobs, QuotaScope, Quotas, ScopedQuotas};
use tollgate_serving::{ConfiguredTenant, IdempotencyRefusal};

pub(crate) use self::lines::Lines;
use super::{KnownCaller, idempotent};
use crate::members::Peers;
use crate::reply::{ApiError, JobsError};

/// Bytes of a form beside its file.
pub(crate) const LARGEST_FORM: u64 = 64 * 1024;

/// The refusal of a repeat that differs from the first request with its `Idempotency-Key`.
const OTHER_BODY: ApiError = ApiError::Idempotency(IdempotencyRefusal::OtherBody);

/// Files and batches, with the rate at which they are made. Clones share both.
#[derive(Clone)]
pub(crate) struct JobsApi {
    pub(crate) jobs: Jobs,
    /// Admission of its own: its requests are the files and batches that are made.
    made: Admission,
    peers: Peers,
    /// True if the gateways share files and batches.
    is_shared: bool,
}

impl JobsApi {
    pub(crate) fn new(jobs: Jobs, peers: Peers, is_shared: bool) -> Self {
        Self { jobs, made: Admission::new(Default::default()), peers, is_shared }
    }

    /// Returns true if the gateways share files and batches.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Returns the gateways that share a server with this one.
    pub(crate) fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Divides the rate at which files and batches are made by the number of gateways, if they
    /// share files and batches.
    pub(crate) fn share_among_peers(&self, now: MonotonicTime) {
        if self.is_shared {
            self.made.share_among(now, self.peers.gateways());
        }
    }

    /// Divides the quotas of what runs on this gateway's workers, if gateways share batches. At
    /// least one batch with one line runs.
    fn own_part(&self, mut quotas: Vec<ScopedQuotas>) -> Vec<ScopedQuotas> {
        if self.is_shared {
            let gateways = u64::from(self.peers.gateways().get());
            for ScopedQuotas { quotas, .. } in &mut quotas {
                quotas.running = (quotas.running / gateways).max(1);
                quotas.in_flight = (quotas.in_flight / gateways).max(1);
            }
        }
        quotas
    }

    /// Takes one file or batch from the rates of the tenant and of its pool.
    ///
    /// # Errors
    /// 429: a rate is spent.
    fn take(&self, now: MonotonicTime, tenant: &ConfiguredTenant) -> Result<(), ApiError> {
        // The number of the configuration, so that a slow request cannot bring old rates back.
        let revision = tenant.config().revision();
        let limits = |(scope, plan): (QuotaScope, &Arc<Plan>)| ScopeLimits {
            scope: match scope {
                QuotaScope::Tenant(name) => Scope::Tenant(name),
                QuotaScope::Pool(name) => Scope::Pool(name),
            },
            limits: Arc::clone(&plan.made),
            revision,
        };
        let scopes: Vec<ScopeLimits> = plans(tenant).map(limits).collect();
        self.made.take_request(now, &scopes).map_err(|refusal| {
            let rate = refusal.value;
            let message = format!(
                "Limit reached: {rate} files and batches a minute for {}. Try again later.",
                refusal.scope
            );
            JobsError::Quota { message, retry_after: refusal.retry_after }.into()
        })
    }
}

/// Returns the plans with quotas that bind a tenant, narrowest first.
fn plans(tenant: &ConfiguredTenant) -> impl Iterator<Item = (QuotaScope, &Arc<Plan>)> {
    let of = tenant.tenant();
    let own = of.plan.iter().map(|plan| (QuotaScope::Tenant(of.name.clone()), plan));
    let pool = of.pool.iter().map(|pool| (QuotaScope::Pool(pool.name.clone()), &pool.plan));
    own.chain(pool)
}

/// Returns the quotas that bind a tenant, narrowest first.
fn quotas(tenant: &ConfiguredTenant) -> Vec<ScopedQuotas> {
    let scoped = |(scope, plan): (QuotaScope, &Arc<Plan>)| ScopedQuotas {
        scope,
        plan: plan.name.clone(),
        quotas: of_plan(&plan.batches),
    };
    plans(tenant).map(scoped).collect()
}

fn of_plan(quotas: &BatchQuotas) -> Quotas {
    let BatchQuotas {
        queued,
        running,
        lines,
        in_flight,
        made_per_minute: _, // a rate, which admission counts
        stored,
        results,
        files,
        uploads,
        device_time_per_day: _, // a cap, which admission counts
        kept,
    } = quotas;
    Quotas {
        queued: u64::from(*queued),
        running: u64::from(*running),
        lines: *lines,
        in_flight: u64::from(*in_flight),
        stored: stored.0,
        results: results.0,
        files: u64::from(*files),
        uploads: u64::from(*uploads),
        kept: *kept,
    }
}

/// Returns the bits of the id that a request with an `Idempotency-Key` makes; `None` without
/// the header. A repeat finds the same id, also after a restart.
///
/// # Errors
/// 400: the header is not valid.
fn repeatable_id(
    kind: &str,
    headers: &HeaderMap,
    caller: &KnownCaller,
) -> Result<Option<u128>, ApiError> {
    let Some(key) = idempotent::key(headers)? else { return Ok(None) };
    let caller = caller.caller.caller();
    let mut hash = Context::new(&SHA256);
    // The same header from another tenant or API key stands for another request.
    for part in [kind, caller.tenant.as_str(), caller.key.as_str()] {
        hash.update(part.as_bytes());
        // No name has this byte, so that two lists of parts never look alike.
        hash.update(&[0]);
    }
    hash.update(key.as_bytes());
    let digest = hash.finish();
    // An id has 128 bits, which is half of the digest.
    let half = digest.as_ref().iter().take(16);
    Ok(Some(half.fold(0, |bits, byte| bits << 8 | u128::from(*byte))))
}

impl From<JobError> for ApiError {
    fn from(error: JobError) -> Self {
        let refused = match error {
            JobError::Quota(refusal) => {
                JobsError::Quota { message: refusal.message, retry_after: None }
            }
            // The handlers name the id, which this error does not know.
            JobError::NoSuchFile => return Self::NotFound { what: "file", id: String::new() },
            JobError::NoSuchBatch => return Self::NotFound { what: "batch", id: String::new() },
            // Only a request with an `Idempotency-Key` asks for an id.
            JobError::FileExists(_) => return OTHER_BODY,
            JobError::FileInUse => JobsError::Conflict {
                code: "file_in_use",
                message: "A batch that has not ended needs the file. Cancel the batch first.",
            },
            JobError::BatchEnded => JobsError::Conflict {
                code: "batch_ended",
                message: "The batch has ended, or is about to end.",
            },
            JobError::WrongPurpose => {
                return Self::invalid("input_file_id", "The purpose of the file must be 'batch'.");
            }
            JobError::TooLarge(message) => JobsError::TooLarge { message },
            JobError::NoSpace => {
                JobsError::Storage { message: "The server has no room for files." }
            }
            error => {
                let error = tollgate_serving::with_causes(&error);
                tracing::error!(
                    error,
                    "files and batches cannot be stored or read; the request gets 503"
                );
                JobsError::Storage { message: "Files and batches cannot be stored or read now." }
            }
        };
        refused.into()
    }
}

/// Replaces the missing name in a 404 by the client's text.
pub(crate) fn named(error: JobError, id: &str) -> ApiError {
    match ApiError::from(error) {
        ApiError::NotFound { what, .. } => ApiError::NotFound { what, id: id.to_owned() },
        other => other,
    }
}
