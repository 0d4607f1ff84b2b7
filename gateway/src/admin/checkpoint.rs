//! The newest signed checkpoint of the audit log, and the key that signs it:
//! for a watcher elsewhere, who keeps what it is told and shows later that the
//! log was rewritten, if it was.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header;

use crate::gateway::Gateway;
use crate::reply::ApiError;

/// The signed note as it stands, byte for byte.
pub(super) async fn newest(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    let reader = gateway.serving.books.ledger.reader().clone();
    match tokio::task::spawn_blocking(move || reader.checkpoint()).await {
        Ok(Ok(Some(note))) => Ok(plain(note)),
        Ok(Ok(None)) => Err(none("checkpoint")),
        failed => {
            tracing::error!(?failed, "the newest checkpoint cannot be read");
            Err(ApiError::LedgerUnavailable)
        }
    }
}

/// The public key, as `tollgate audit verify --key` takes it. A watcher learns
/// it once, from whom it trusts, not each time from here.
pub(super) async fn key(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    let key = gateway.serving.books.ledger.verifier().ok_or_else(|| none("key"))?;
    Ok(plain(format!("{key}\n")))
}

fn plain(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
}

fn none(what: &'static str) -> ApiError {
    ApiError::NotFound { what, id: "audit".to_owned() }
}
