//! What the head of a request for work decides: who asks, and whether the
//! limits that bind all of their requests let one pass now. Most refusals of a
//! busy tenant are found here, before routes and bodies; what is found out is
//! handed on to the handlers.

use axum::extract::Request;
use http::{HeaderMap, Method};
use tollgate_admission::ScopeLimits;
use tollgate_domain::MonotonicTime;

use super::{Api, CHAT_COMPLETIONS, COMPLETIONS};
use crate::auth::{AuthenticatedCaller, Endpoint, identify};
use crate::limits;
use crate::listener::Peer;
use crate::reply::ApiError;

/// A caller who may ask.
#[derive(Clone)]
pub(crate) struct Asking {
    pub(crate) caller: AuthenticatedCaller,
    /// What binds every request of theirs, narrowest first.
    pub(crate) scopes: Vec<ScopeLimits>,
}

impl Api {
    /// Refuses a request for work by its head, or says who asks; `None` of what
    /// asks for something else.
    ///
    /// # Errors
    /// When the caller is nobody, may not use the endpoint, has a penalty, or
    /// has spent a rate of requests.
    pub(crate) fn look_at_head(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<Option<Asking>, ApiError> {
        let endpoint = match path {
            CHAT_COMPLETIONS => Endpoint::Chat,
            COMPLETIONS => Endpoint::Completions,
            _ => return Ok(None),
        };
        if method != Method::POST {
            return Ok(None);
        }
        self.who_asks(headers, peer, endpoint, now).map(Some)
    }

    /// Who asks at `endpoint`, as the request says that has been looked at; found
    /// out now where nobody has.
    pub(super) fn asking(
        &self,
        request: &mut Request,
        endpoint: Endpoint,
    ) -> Result<Asking, ApiError> {
        match request.extensions_mut().remove() {
            Some(asking) => Ok(asking),
            None => {
                let now = self.serving.clock.now();
                self.who_asks(request.headers(), request.extensions().get(), endpoint, now)
            }
        }
    }

    fn who_asks(
        &self,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        endpoint: Endpoint,
        now: MonotonicTime,
    ) -> Result<Asking, ApiError> {
        let caller = identify(self, headers, peer, now)?;
        if self.draining.is_cancelled() {
            return Err(ApiError::Draining);
        }
        let tenant = self.tenant(&caller, endpoint)?;
        let penalties = &self.serving.penalties;
        let scopes = penalties.check(now, caller.tenant()).and_then(|()| {
            let scopes = limits::of_caller(&self.config, &caller, tenant)?;
            match self.serving.admission.check_request_rate(now, &scopes) {
                Some(refusal) => Err(ApiError::Limit(refusal)),
                None => Ok(scopes),
            }
        });
        // For ever coming back all the same there is a penalty.
        let scopes = scopes.inspect_err(|error| penalties.answered(now, &tenant.name, error))?;
        Ok(Asking { caller, scopes })
    }
}
