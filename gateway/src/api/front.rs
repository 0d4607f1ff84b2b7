//! What the head of a request for work decides: who asks, and whether the
//! limits that bind all of their requests let one pass now. Most refusals of a
//! busy tenant are found here, before routes and bodies; what is found out is
//! handed on to the handlers.

use axum::extract::Request;
use http::{Extensions, HeaderMap, Method};
use tollgate_admission::ScopeLimits;

use super::{Api, CHAT_COMPLETIONS, COMPLETIONS};
use crate::auth::{AuthenticatedCaller, Endpoint, identify};
use crate::limits;
use crate::reply::ApiError;

/// A caller who may ask.
#[derive(Clone)]
pub(crate) struct Asking {
    pub(crate) caller: AuthenticatedCaller,
    /// What binds every request of theirs, narrowest first.
    pub(crate) scopes: Vec<ScopeLimits>,
}

impl Api {
    /// Refuses a request for work by its head, or notes on it who asks. What
    /// asks for something else passes.
    ///
    /// # Errors
    /// When the caller is nobody, may not use the endpoint, has a penalty, or
    /// has spent a rate of requests.
    pub(crate) fn look_at_head(&self, request: &mut Request) -> Result<(), ApiError> {
        let endpoint = match request.uri().path() {
            CHAT_COMPLETIONS => Endpoint::Chat,
            COMPLETIONS => Endpoint::Completions,
            _ => return Ok(()),
        };
        if request.method() != Method::POST {
            return Ok(());
        }
        let asking = self.who_asks(request.headers(), request.extensions(), endpoint)?;
        request.extensions_mut().insert(asking);
        Ok(())
    }

    /// Who asks at `endpoint`, as it was noted; looked at now where nobody has.
    pub(super) fn asking(
        &self,
        request: &mut Request,
        endpoint: Endpoint,
    ) -> Result<Asking, ApiError> {
        match request.extensions_mut().remove() {
            Some(asking) => Ok(asking),
            None => self.who_asks(request.headers(), request.extensions(), endpoint),
        }
    }

    fn who_asks(
        &self,
        headers: &HeaderMap,
        extensions: &Extensions,
        endpoint: Endpoint,
    ) -> Result<Asking, ApiError> {
        let caller = identify(self, headers, extensions)?;
        if self.draining.is_cancelled() {
            return Err(ApiError::Draining);
        }
        let tenant = self.tenant(&caller, endpoint)?;
        let now = self.serving.clock.now();
        let penalties = &self.serving.penalties;
        let scopes = penalties.check(now, caller.tenant()).and_then(|()| {
            let scopes = limits::of_caller(&self.config, &caller, tenant)?;
            match self.serving.admission.look_ahead(now, &scopes) {
                Some(refusal) => Err(ApiError::Limit(refusal)),
                None => Ok(scopes),
            }
        });
        // For ever coming back all the same there is a penalty.
        let scopes = scopes.inspect_err(|error| penalties.answered(now, &tenant.name, error))?;
        Ok(Asking { caller, scopes })
    }
}
