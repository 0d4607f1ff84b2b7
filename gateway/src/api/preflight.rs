//! The head check of a request to the API: it finds the caller and the tenant,
//! and for work it asks the limits that bind all of the caller's requests.
//! Most refusals of a busy tenant are made here, before a body is read.

use std::sync::Arc;

use axum::extract::Request;
use http::HeaderMap;
use tollgate_admission::ScopeLimits;
use tollgate_config::Tenant;
use tollgate_domain::{MonotonicTime, RequestId};

use super::Api;
use crate::auth::{AuthenticatedCaller, Endpoint};
use crate::limits;
use crate::reply::ApiError;
use tollgate_edge::Peer;
use tollgate_edge::source::Source;

/// A request that passed the head check, with every fact that its handler
/// needs. Facts travel in this value and nowhere else.
pub(crate) struct Call {
    pub(crate) request: Request,
    /// The id of the request, drawn by the gateway; ids of clients are ignored.
    pub(crate) id: RequestId,
    /// The part of the API that the route belongs to.
    pub(crate) endpoint: Endpoint,
    pub(crate) caller: CallerContext,
    /// The decoded part of the path that the route leaves open, such as a
    /// model's name. Empty on routes without such a part.
    pub(crate) parameter: String,
}

/// A caller, its tenant and its limits, looked up once for each request.
#[derive(Clone)]
pub(crate) struct CallerContext {
    pub(crate) caller: AuthenticatedCaller,
    pub(crate) tenant: Arc<Tenant>,
    /// The limits of every request of this caller, narrowest first. Empty on
    /// read-only routes, which no plan limits.
    pub(crate) scopes: Vec<ScopeLimits>,
}

/// The kinds of routes that the head check treats differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// The route runs a model: plans limit it, a drain refuses it.
    Work,
    /// The route reads what is known: it stays open during a drain.
    ReadOnly,
}

impl Api {
    /// Authenticates the caller of a request to `endpoint` and checks
    /// everything that the head of the request decides.
    ///
    /// # Errors
    /// The credential does not authenticate or may not use the endpoint; for
    /// work also: the gateway drains, the tenant has a penalty, or a rate of
    /// requests is spent.
    pub(crate) fn caller_context(
        &self,
        kind: RouteKind,
        endpoint: Endpoint,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<CallerContext, ApiError> {
        let caller = self.identify(headers, peer, now)?;
        if kind == RouteKind::Work && self.draining.is_cancelled() {
            return Err(ApiError::Draining);
        }
        let tenant = Arc::clone(self.tenant(&caller, endpoint)?);
        let scopes = match kind {
            RouteKind::ReadOnly => Vec::new(),
            RouteKind::Work => self.scopes(&caller, &tenant, now)?,
        };
        Ok(CallerContext { caller, tenant, scopes })
    }

    /// Authenticates the credential in `headers`. Counts a failure against the
    /// source address; marks the connection as authenticated on success.
    fn identify(
        &self,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<AuthenticatedCaller, ApiError> {
        let utc = self.serving.clock.utc_at(now);
        let address = peer.map(|peer| peer.client(headers));
        let caller = self.authenticator.authenticate(headers, address, utc).map_err(|error| {
            let source = address.map(Source::of);
            self.serving.penalties.failed_authentication(now, source, error)
        })?;
        if let Some(peer) = peer {
            peer.mark_authenticated();
        }
        Ok(caller)
    }

    /// Returns the caller's tenant if the caller may use `endpoint`.
    fn tenant(
        &self,
        caller: &AuthenticatedCaller,
        endpoint: Endpoint,
    ) -> Result<&Arc<Tenant>, ApiError> {
        if !caller.may_use_endpoint(endpoint) {
            return Err(ApiError::Permission {
                message: format!("This key may not use '{}'.", endpoint.as_str()).into(),
            });
        }
        self.config.tenant(caller.tenant()).ok_or(ApiError::Permission {
            message: "The tenant of this credential is not served here.".into(),
        })
    }

    /// Returns the limits of every request of the caller, if the tenant has no
    /// penalty and no rate of requests is spent.
    fn scopes(
        &self,
        caller: &AuthenticatedCaller,
        tenant: &Tenant,
        now: MonotonicTime,
    ) -> Result<Vec<ScopeLimits>, ApiError> {
        let penalties = &self.serving.penalties;
        let checked = penalties.check(now, caller.tenant()).and_then(|()| {
            let scopes = limits::of_caller(&self.config, caller, tenant)?;
            match self.serving.admission.check_request_rate(now, &scopes) {
                Some(refusal) => Err(ApiError::Limit(refusal)),
                None => Ok(scopes),
            }
        });
        // Clients that ignore `retry-after` accumulate a penalty.
        checked.inspect_err(|error| penalties.answered(now, &tenant.name, error))
    }
}
