//! The JSON bodies of admin requests, read whole and checked, and the blocking work of
//! their handlers.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use http::request::Parts;
use serde::de::DeserializeOwned;

use crate::auth::KeyStoreError;
use crate::reply::ApiError;

/// A JSON body. Unknown fields are mistakes if `T` says so. The stack bounds the bytes.
pub(super) struct AdminBody<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for AdminBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let unreadable = |_| ApiError::malformed("The body of the request cannot be read.");
        let bytes = Bytes::from_request(request, state).await.map_err(unreadable)?;
        let json = serde_json::from_slice(&bytes);
        json.map(Self).map_err(|error| {
            // The error names the field and its place, and repeats at most a short part of it.
            let message: String = error.to_string().chars().take(MESSAGE_CHARS).collect();
            ApiError::malformed(format!("The body is not the expected JSON: {message}."))
        })
    }
}

/// The parameters of a query string.
pub(super) struct AdminQuery<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for AdminQuery<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = Query::<T>::from_request_parts(parts, state).await;
        // axum's own answer is plain text, and clients expect the API's JSON.
        query.map(|Query(query)| Self(query)).map_err(|error| {
            let message: String = error.body_text().chars().take(MESSAGE_CHARS).collect();
            ApiError::malformed(format!("The query string cannot be read: {message}."))
        })
    }
}

/// The parameters of a path.
pub(super) struct AdminPath<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for AdminPath<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<T>::from_request_parts(parts, state).await;
        // Bytes that are no text name nothing.
        path.map(|Path(path)| Self(path)).map_err(|_| ApiError::malformed("The path is no text."))
    }
}

/// Runs `work` on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KeyStoreError> + Send + 'static,
) -> Result<T, ApiError> {
    // A task of this kind fails only if it panics or the runtime stops.
    let done = tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::Internal)?;
    done.map_err(key_error)
}

/// Makes the answer to a failure of the key store.
fn key_error(error: KeyStoreError) -> ApiError {
    let message = sentence(&error);
    match error {
        KeyStoreError::Unknown(id) => ApiError::NotFound { what: "key", id: id.to_string() },
        KeyStoreError::UnknownAdmin(name) => {
            ApiError::NotFound { what: "admin", id: name.to_string() }
        }
        KeyStoreError::NotActive(_) => ApiError::invalid("key", message),
        KeyStoreError::Label => ApiError::invalid("label", message),
        KeyStoreError::Expired | KeyStoreError::ExpiresTooLate => {
            ApiError::invalid("expires_in_seconds", message)
        }
        KeyStoreError::OverlapTooLong => ApiError::invalid("overlap_seconds", message),
        KeyStoreError::AdminExists(_) | KeyStoreError::TooManyAdmins(_) => {
            ApiError::invalid("name", message)
        }
        KeyStoreError::Database(_)
        | KeyStoreError::Pepper { .. }
        | KeyStoreError::PepperReadable { .. }
        | KeyStoreError::PepperTorn { .. }
        | KeyStoreError::PepperMissing { .. }
        | KeyStoreError::PepperDiffers { .. }
        | KeyStoreError::Random(_) => {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "key store failed; an admin request was answered with 500");
            ApiError::Internal
        }
    }
}

/// Returns an error as a sentence.
pub(super) fn sentence(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    let mut letters = text.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().chain(letters).chain(['.']).collect())
        .unwrap_or_default()
}

/// Characters of a parser's message that an answer repeats.
const MESSAGE_CHARS: usize = 200;
