//! The caller as an extractor: a handler that names it runs for nobody else,
//! and an earlier extractor in its list runs before the body is read.

use axum::extract::{FromRef, FromRequestParts};
use http::HeaderMap;
use http::request::Parts;
use tollgate_domain::MonotonicTime;

use super::{AuthenticatedCaller, Authenticator};
use crate::listener::Peer;
use crate::penalties::Penalties;
use crate::source::Source;
use crate::{ApiError, Clock};

impl<S> FromRequestParts<S> for AuthenticatedCaller
where
    S: Send + Sync,
    Authenticator: FromRef<S>,
    Penalties: FromRef<S>,
    Clock: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let now = Clock::from_ref(state).now();
        identify(state, &parts.headers, parts.extensions.get(), now)
    }
}

/// Who shows these headers. It is remembered of a source that nobody is shown,
/// and of a connection that somebody is.
///
/// # Errors
/// When nobody that we know, or from a source that has guessed too often.
pub(crate) fn identify<S>(
    state: &S,
    headers: &HeaderMap,
    peer: Option<&Peer>,
    now: MonotonicTime,
) -> Result<AuthenticatedCaller, ApiError>
where
    Authenticator: FromRef<S>,
    Penalties: FromRef<S>,
    Clock: FromRef<S>,
{
    let utc = Clock::from_ref(state).utc_at(now);
    let address = peer.map(|peer| peer.client(headers));
    let caller =
        Authenticator::from_ref(state).authenticate(headers, address, utc).map_err(|error| {
            let source = address.map(Source::of);
            Penalties::from_ref(state).failed_authentication(now, source, error)
        })?;
    if let Some(peer) = peer {
        peer.vouch();
    }
    Ok(caller)
}
