//! The admin behind a request: found once, by the guard of all closed routes.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::request::Parts;

use super::{AdminState, Origin};
use crate::auth::{AdminRecord, Right, Role};
use crate::reply::ApiError;

/// An authenticated admin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Actor {
    /// The name in records: `admin alice`, or `admin key` for the key of the data folder.
    record: Arc<str>,
    role: Role,
}

impl Actor {
    /// Returns the holder of the key in `admin.key`.
    pub(super) fn key_file() -> Self {
        Self { record: "admin key".into(), role: Role::Admin }
    }

    /// Returns a named admin.
    pub(super) fn named(admin: AdminRecord) -> Self {
        Self { record: format!("admin {}", admin.name).into(), role: admin.role }
    }

    /// Returns the actor as the audit log names it.
    pub(super) fn as_record(&self) -> &str {
        &self.record
    }

    /// Checks that the admin's role has `right`.
    fn check(&self, right: Right) -> Result<(), ApiError> {
        if self.role.has(right) {
            return Ok(());
        }
        let (needed, has) = (right.roles(), self.role.as_str());
        let message = format!("This needs the role {needed}; {} has the role {has}.", self.record);
        Err(ApiError::Permission { message: message.into() })
    }
}

/// Takes the admin that [`require_admin`] has found. A route outside of that guard gets 500.
impl<S: Send + Sync> FromRequestParts<S> for Actor {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        parts.extensions.get().cloned().ok_or(ApiError::Internal)
    }
}

/// Lets requests of admins pass and refuses all others.
pub(super) async fn require_admin(
    State(state): State<Arc<AdminState>>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(origin) = request.extensions().get::<Origin>().copied() else {
        // The stack gives every request its origin.
        return ApiError::Internal.into_response();
    };
    match state.admitted(request.headers(), origin) {
        Ok(actor) => {
            request.extensions_mut().insert(actor);
            next.run(request).await
        }
        Err(refused) => refused.into_response(),
    }
}

/// Lets requests of admins with `right` pass.
pub(super) async fn require_right(
    State(right): State<Right>,
    actor: Actor,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    actor.check(right)?;
    Ok(next.run(request).await)
}
