//! The caller as an extractor: a handler that names it runs for nobody else,
//! and an earlier extractor in its list runs before the body is read.

use axum::extract::{FromRef, FromRequestParts};
use http::request::Parts;
use http::{Extensions, HeaderMap};

use super::{AuthenticatedCaller, Authenticator};
use crate::listener::Peer;
use crate::penalties::Penalties;
use crate::source::{Source, client_of};
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
        identify(state, &parts.headers, &parts.extensions)
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
    extensions: &Extensions,
) -> Result<AuthenticatedCaller, ApiError>
where
    Authenticator: FromRef<S>,
    Penalties: FromRef<S>,
    Clock: FromRef<S>,
{
    let clock = Clock::from_ref(state);
    let address = client_of(extensions, headers);
    let caller = Authenticator::from_ref(state)
        .authenticate(headers, address, clock.utc())
        .map_err(|error| {
            let source = address.map(Source::of);
            Penalties::from_ref(state).failed_authentication(clock.now(), source, error)
        })?;
    if let Some(peer) = extensions.get::<Peer>() {
        peer.vouch();
    }
    Ok(caller)
}
