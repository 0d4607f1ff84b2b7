//! API keys over the admin API: listed, created, rotated and revoked.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_domain::{KeyId, TenantId, UtcTime};

use super::AdminState;
use super::actor::Actor;
use super::body::{AdminBody, AdminPath, AdminQuery, blocking, sentence};
use super::page::{MOST_ROWS, Page};
use crate::auth::{HeardBy, KeyRecord, KeyRequest, NewKey, UnderWay};
use crate::reply::ApiError;

/// The query of the list of keys.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct KeysQuery {
    #[schemars(with = "Option<String>")]
    tenant: Option<TenantId>,
    #[schemars(with = "Option<String>")]
    after: Option<KeyId>,
}

/// A key in a list.
#[derive(Serialize, JsonSchema)]
pub(super) struct KeyListRow {
    #[serde(flatten)]
    record: KeyRecord,
    state: &'static str,
    /// The last use since the gateway started; null if there was none.
    #[schemars(with = "Option<u64>")]
    last_used_ns: Option<UtcTime>,
}

/// A revoked key.
#[derive(Serialize, JsonSchema)]
pub(super) struct RevokedKey {
    #[serde(flatten)]
    record: KeyRecord,
    /// The gateways that have read the revocation. Absent if the keys are not on a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    gateways: Option<HeardBy>,
}

/// A new key with its secret, which is shown only here.
#[derive(Serialize, JsonSchema)]
pub(super) struct CreatedKey {
    #[serde(flatten)]
    record: KeyRecord,
    secret: String,
}

/// The body of a rotation.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rotation {
    /// Seconds for which the old key stays valid.
    overlap_seconds: u64,
}

/// The query of a revocation.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Revocation {
    /// True if the running requests of the key must end.
    #[serde(default)]
    end_streams: bool,
}

/// Lists keys by id, a page at a time.
pub(super) async fn list(
    State(state): State<Arc<AdminState>>,
    AdminQuery(KeysQuery { tenant, after }): AdminQuery<KeysQuery>,
) -> Result<Json<Page<KeyListRow>>, ApiError> {
    Ok(Json(page(&state, tenant, after).await?))
}

/// Returns one page of the keys of `tenant`, or of all tenants.
pub(super) async fn page(
    state: &AdminState,
    tenant: Option<TenantId>,
    after: Option<KeyId>,
) -> Result<Page<KeyListRow>, ApiError> {
    let (keys, now) = (state.keys.clone(), state.serving.clock().utc());
    // One row more than the page, which tells if there is a next page.
    let found = blocking(move || keys.list_page(tenant.as_ref(), after.as_ref(), MOST_ROWS + 1));
    let rows = found.await?.into_iter().map(|record| KeyListRow {
        state: record.state(now),
        last_used_ns: state.keys.last_used(&record.id),
        record,
    });
    Ok(Page::first(rows.collect(), |row| row.record.id.to_string()))
}

/// Creates a key.
pub(super) async fn create(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminBody(request): AdminBody<KeyRequest>,
) -> Result<(StatusCode, Json<CreatedKey>), ApiError> {
    let now = state.serving.clock().utc();
    // Against the config in force, so that no key is made for a tenant that is not served.
    let checked = request.check(&state.reloader.config(), now);
    let (tenant, options) =
        checked.map_err(|error| ApiError::invalid(error.field, sentence(&error)))?;
    let keys = state.keys.acting_as(actor.as_record());
    let new = blocking(move || keys.create(&tenant, options, now)).await?;
    tracing::info!(actor = actor.as_record(), key = %new.record.id, tenant = %new.record.tenant, "a key was created");
    Ok((StatusCode::CREATED, Json(new.into())))
}

/// Creates a key that replaces another one.
pub(super) async fn rotate(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(id): AdminPath<String>,
    AdminBody(Rotation { overlap_seconds }): AdminBody<Rotation>,
) -> Result<(StatusCode, Json<CreatedKey>), ApiError> {
    let id = key_id(&id)?;
    let (overlap, now) = (Duration::from_secs(overlap_seconds), state.serving.clock().utc());
    let keys = state.keys.acting_as(actor.as_record());
    let new = blocking(move || keys.rotate(&id, overlap, now)).await?;
    tracing::info!(actor = actor.as_record(), key = %new.record.id, tenant = %new.record.tenant, "a key was rotated");
    Ok((StatusCode::CREATED, Json(new.into())))
}

/// Revokes a key for ever.
pub(super) async fn revoke(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(id): AdminPath<String>,
    AdminQuery(Revocation { end_streams }): AdminQuery<Revocation>,
) -> Result<Json<RevokedKey>, ApiError> {
    let id = key_id(&id)?;
    let under_way = if end_streams { UnderWay::End } else { UnderWay::Finish };
    let (keys, now) = (state.keys.acting_as(actor.as_record()), state.serving.clock().utc());
    let revoked = blocking(move || {
        let record = keys.revoke(&id, under_way, now)?;
        // The key is revoked, also if nobody can say who has heard of it.
        let gateways = keys.wait_until_heard().ok().flatten();
        Ok(RevokedKey { record, gateways })
    });
    let revoked = revoked.await?;
    let record = &revoked.record;
    tracing::info!(actor = actor.as_record(), key = %record.id, tenant = %record.tenant, "a key was revoked");
    Ok(Json(revoked))
}

impl From<NewKey> for CreatedKey {
    fn from(new: NewKey) -> Self {
        let NewKey { record, secret } = new;
        Self { record, secret: secret.expose().to_owned() }
    }
}

/// Returns the id that `text` spells. Text that is no id names no key.
fn key_id(text: &str) -> Result<KeyId, ApiError> {
    KeyId::new(text).map_err(|_| ApiError::NotFound { what: "key", id: text.to_owned() })
}
