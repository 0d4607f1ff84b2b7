//! The head check of a request to the API: it finds the caller and the tenant,
//! and for work it asks the limits that bind all of the caller's requests.
//! Most refusals of a busy tenant are made here, before a body is read.

use std::sync::Arc;

use axum::extract::Request;
use http::HeaderMap;
use tollgate_config::Tenant;
use tollgate_domain::{MonotonicTime, RequestId};
use tollgate_serving::CallerContext;

use super::Api;
use crate::auth::{AuthenticatedCaller, Endpoint};
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
    pub(crate) caller: KnownCaller,
    /// The decoded part of the path that the route leaves open, such as a
    /// model's name. Empty on routes without such a part.
    pub(crate) parameter: String,
}

/// A caller, its tenant and its limits, looked up once for each request.
#[derive(Clone)]
pub(crate) struct KnownCaller {
    pub(crate) caller: AuthenticatedCaller,
    pub(crate) tenant: Arc<Tenant>,
    /// The limits of every request of this caller. `None` on read-only routes,
    /// which no plan limits.
    pub(crate) context: Option<CallerContext>,
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
    pub(crate) fn known_caller(
        &self,
        kind: RouteKind,
        endpoint: Endpoint,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<KnownCaller, ApiError> {
        // First, so that a client without a valid credential learns nothing about a drain.
        let caller = self.identify(headers, peer, now)?;
        if kind == RouteKind::Work && self.draining.is_cancelled() {
            return Err(ApiError::Draining);
        }
        let tenant = Arc::clone(self.tenant(&caller, endpoint)?);
        let context = match kind {
            RouteKind::ReadOnly => None,
            RouteKind::Work => Some(self.limited(&caller, &tenant, now)?),
        };
        Ok(KnownCaller { caller, tenant, context })
    }

    /// Authenticates the credential in `headers`. Counts a failure against the
    /// source address; marks the connection as authenticated on success.
    fn identify(
        &self,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<AuthenticatedCaller, ApiError> {
        let utc = self.serving.clock().utc_at(now);
        let address = peer.map(|peer| peer.client(headers));
        let caller = self.authenticator.authenticate(headers, address, utc).map_err(|error| {
            let source = address.map(Source::of);
            self.source_penalties.failed_authentication(now, source, error)
        })?;
        if let Some(peer) = peer {
            // The connection then leaves the places of its source to clients that are not known
            // yet.
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

    /// Finds the limits of every request of the caller, if the tenant has no
    /// penalty and no rate of requests is spent.
    fn limited(
        &self,
        caller: &AuthenticatedCaller,
        tenant: &Arc<Tenant>,
        now: MonotonicTime,
    ) -> Result<CallerContext, ApiError> {
        let serving = &self.serving;
        // The penalty is checked first, so that a penalised tenant spends none of its rate.
        let checked = serving.penalties().check(now, caller.tenant()).and_then(|()| {
            let (caller, plan) = (caller.caller().clone(), caller.plan());
            let context = serving.limits().caller_context(caller, plan, Arc::clone(tenant))?;
            serving.limits().check_request_rate(now, &context)?;
            Ok(context)
        });
        // Clients that ignore `retry-after` accumulate a penalty.
        checked.map_err(ApiError::from).inspect_err(|error| self.count_refusal(&tenant.name, error))
    }
}
