//! Named admins: listed, created and revoked.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_domain::AdminName;

use super::AdminState;
use super::actor::Actor;
use super::body::{AdminBody, AdminPath, AdminQuery, blocking};
use super::page::{Page, PageQuery};
use crate::auth::{AdminRecord, NewAdmin, Role};
use crate::reply::ApiError;

/// The body of a request for a new admin.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    #[schemars(with = "String")]
    name: AdminName,
    role: Role,
}

/// A new admin with the key, which is shown only here.
#[derive(Serialize, JsonSchema)]
pub(super) struct CreatedAdmin {
    #[serde(flatten)]
    record: AdminRecord,
    secret: String,
}

/// Lists the named admins.
pub(super) async fn list(
    State(state): State<Arc<AdminState>>,
    AdminQuery(page): AdminQuery<PageQuery>,
) -> Result<Json<Page<AdminRecord>>, ApiError> {
    let keys = state.keys.clone();
    let admins = blocking(move || keys.admins()).await?;
    Ok(Json(page.cut(admins, |admin| admin.name.to_string())))
}

/// Creates an admin.
pub(super) async fn create(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminBody(Wanted { name, role }): AdminBody<Wanted>,
) -> Result<(StatusCode, Json<CreatedAdmin>), ApiError> {
    let (keys, now) = (state.keys.acting_as(actor.as_record()), state.serving.clock().utc());
    let new = blocking(move || keys.create_admin(&name, role, now)).await?;
    let NewAdmin { record, secret } = new;
    tracing::info!(actor = actor.as_record(), admin = %record.name, role = record.role.as_str(), "an admin was created");
    let secret = secret.expose().to_owned();
    Ok((StatusCode::CREATED, Json(CreatedAdmin { record, secret })))
}

/// Revokes an admin.
pub(super) async fn revoke(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
) -> Result<Json<AdminRecord>, ApiError> {
    // Text that is no name names no admin.
    let unknown = || ApiError::NotFound { what: "admin", id: name.clone() };
    let name = AdminName::new(&name).map_err(|_| unknown())?;
    let keys = state.keys.acting_as(actor.as_record());
    let record = blocking(move || keys.revoke_admin(&name)).await?;
    tracing::info!(actor = actor.as_record(), admin = %record.name, "an admin was revoked");
    Ok(Json(record))
}
