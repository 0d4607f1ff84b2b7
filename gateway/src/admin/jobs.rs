//! The batches of a tenant, as admins see and cancel them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use tollgate_domain::TenantId;
use tollgate_jobs::{BatchId, BatchPage};
use tollgate_openai::batches::BatchObject;
use tollgate_openai::files::ListObject;

use super::AdminState;
use super::actor::Actor;
use super::body::{AdminPath, AdminQuery};
use super::page::PageQuery;
use crate::api::jobs::batches::object;
use crate::api::jobs::named;
use crate::audit;
use crate::reply::ApiError;

/// Batches of one page.
const LISTED: u32 = 100;

/// Lists the batches of a tenant, newest first.
pub(super) async fn list(
    State(state): State<Arc<AdminState>>,
    AdminPath(tenant): AdminPath<String>,
    AdminQuery(query): AdminQuery<PageQuery>,
) -> Result<Json<ListObject<BatchObject>>, ApiError> {
    let after = query.after().map(batch_id).transpose()?;
    let page = BatchPage { after, limit: LISTED };
    let page = state.jobs.jobs.batches(tenant_id(&tenant)?, page).await;
    let page = page.map_err(|error| named(error, query.after().unwrap_or_default()))?;
    let batches = page.rows.into_iter().map(|row| object(&state.jobs, row)).collect();
    Ok(Json(ListObject::new(batches, page.has_more)))
}

/// Shows a batch of a tenant.
pub(super) async fn show(
    State(state): State<Arc<AdminState>>,
    AdminPath((tenant, id)): AdminPath<(String, String)>,
) -> Result<Json<BatchObject>, ApiError> {
    let batch = state.jobs.jobs.batch(tenant_id(&tenant)?, batch_id(&id)?).await;
    Ok(Json(object(&state.jobs, batch.map_err(|error| named(error, &id))?)))
}

/// Cancels a batch of a tenant.
pub(super) async fn cancel(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath((tenant, id)): AdminPath<(String, String)>,
) -> Result<Json<BatchObject>, ApiError> {
    let (tenant, batch) = (tenant_id(&tenant)?, batch_id(&id)?);
    let jobs = &state.jobs.jobs;
    // A batch that does not exist leaves no record in the audit log.
    jobs.batch(tenant.clone(), batch).await.map_err(|error| named(error, &id))?;
    let at = state.serving.clock().utc();
    let action = audit::batch_cancelled(&tenant, &id, (actor.as_record(), at));
    // Recorded first: no admin cancels a batch without a record.
    audit::record(state.serving.ledger(), action).await.map_err(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot record the cancel of a batch; the batch goes on"
        );
        ApiError::LedgerUnavailable
    })?;
    let cancelled = jobs.cancel(tenant.clone(), batch).await;
    let cancelled = cancelled.map_err(|error| named(error, &id))?;
    tracing::info!(actor = actor.as_record(), %tenant, batch = id, "an admin cancelled a batch");
    Ok(Json(object(&state.jobs, cancelled)))
}

fn tenant_id(name: &str) -> Result<TenantId, ApiError> {
    // Not looked up: the batches of a removed tenant are still there for a while.
    TenantId::new(name).map_err(|_| ApiError::NotFound { what: "tenant", id: name.to_owned() })
}

fn batch_id(text: &str) -> Result<BatchId, ApiError> {
    text.parse().map_err(|_| ApiError::NotFound { what: "batch", id: text.to_owned() })
}
