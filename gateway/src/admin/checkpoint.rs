//! The newest signed checkpoint of the audit log, and the key that verifies
//! its signature. A monitor on another machine keeps the checkpoints that it
//! fetches, and proves with them later that the log was not rewritten.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header;

use super::AdminState;
use crate::reply::ApiError;

/// Answers with the signed note, byte for byte.
pub(super) async fn newest(State(state): State<Arc<AdminState>>) -> Result<Response, ApiError> {
    let reader = state.serving.ledger().reader().clone();
    // A query blocks its thread, which must not be one that serves.
    match tokio::task::spawn_blocking(move || reader.checkpoint()).await {
        Ok(Ok(Some(note))) => Ok(plain(note)),
        Ok(Ok(None)) => Err(none("checkpoint")),
        Ok(Err(error)) => Err(unreadable(&error)),
        Err(error) => Err(unreadable(&error)),
    }
}

fn unreadable(error: &(dyn std::error::Error + 'static)) -> ApiError {
    tracing::error!(error, "cannot read the newest checkpoint; the request was refused");
    ApiError::LedgerUnavailable
}

/// Answers with the public key, as `tollgate audit verify --key` takes it. A
/// monitor must get the key once from a source that it trusts, and not fetch
/// it here each time.
pub(super) async fn key(State(state): State<Arc<AdminState>>) -> Result<Response, ApiError> {
    let key = state.serving.ledger().verifier().ok_or_else(|| none("key"))?;
    Ok(plain(format!("{key}\n")))
}

fn plain(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
}

fn none(what: &'static str) -> ApiError {
    ApiError::NotFound { what, id: "audit".to_owned() }
}
