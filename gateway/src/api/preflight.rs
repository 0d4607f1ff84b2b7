//! The head check of a request to the API: it finds the caller and the tenant,
//! and for work it counts the request against the caller's rates of requests.
//! Most refusals of a busy tenant are made here, before a body is read.

use axum::extract::Request;
use http::HeaderMap;
use tollgate_domain::{Caller, MonotonicTime, RequestId};
use tollgate_serving::{CallerContext, ConfiguredTenant};

use super::Api;
use crate::auth::{AuthenticatedCaller, Endpoint};
use crate::record::RequestRecord;
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
    /// The route's label in metrics.
    pub(crate) label: &'static str,
    pub(crate) caller: KnownCaller,
    /// The decoded part of the path that the route leaves open, such as a
    /// model's name. Empty on routes without such a part.
    pub(crate) parameter: String,
}

/// A caller, its tenant and its limits, looked up once for each request.
#[derive(Clone)]
pub(crate) struct KnownCaller {
    pub(crate) caller: AuthenticatedCaller,
    /// The tenant, with the config that the request keeps to its end.
    pub(crate) tenant: ConfiguredTenant,
    /// The limits of the request, whose rates of requests have counted it. `None`
    /// on read-only routes, which no plan limits.
    pub(crate) context: Option<CallerContext>,
}

/// The kinds of routes that the head check treats differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// The route runs a model: plans limit it, a drain refuses it.
    Work,
    /// The route reads what is known: it stays open during a drain.
    ReadOnly,
    /// The route makes or changes files and batches: quotas limit it, a drain refuses it.
    Change,
}

impl Api {
    /// Authenticates the caller of a request to `endpoint` and checks
    /// everything that the head of the request decides.
    ///
    /// # Errors
    /// The credential does not authenticate or may not use the endpoint, or its
    /// owner has too many connections; for work also: the gateway drains, the ledger takes no record, the tenant has a
    /// penalty, or a rate of requests is spent.
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
        let known = self.check_caller((kind, endpoint), caller.clone(), peer, now);
        let tenant = caller.tenant();
        if let Err(error) = &known
            && kind == RouteKind::Work
            // The metrics of tenants have labels of the config alone.
            && self.config.current().tenant(tenant).is_some()
        {
            // The stack writes the line of the access log.
            RequestRecord::begin(&self.metrics, caller.caller().clone()).failed(error);
        }
        known
    }

    /// Checks the head of a request of `caller`.
    fn check_caller(
        &self,
        (kind, endpoint): (RouteKind, Endpoint),
        caller: AuthenticatedCaller,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<KnownCaller, ApiError> {
        if kind != RouteKind::ReadOnly && self.draining.is_cancelled() {
            return Err(ApiError::Draining);
        }
        let tenant = self.tenant(&caller, endpoint)?;
        if let Some(peer) = peer {
            // The connection then leaves the places of its source to clients that are
            // not known yet.
            self.owner_numbers.authenticate(peer, &caller, &tenant)?;
        }
        // Before the request is counted: a full disk is not the tenant's.
        if kind == RouteKind::Work && !self.serving.may_begin_work() {
            return Err(ApiError::LedgerUnavailable);
        }
        let context = match kind {
            RouteKind::ReadOnly | RouteKind::Change => None,
            RouteKind::Work => Some(self.limited(&caller, &tenant, now)?),
        };
        Ok(KnownCaller { caller, tenant, context })
    }

    /// Returns the caller of a request that was refused, if its credential is valid. Counts
    /// nothing.
    pub(crate) fn caller_of(
        &self,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Option<Caller> {
        let utc = self.serving.clock().utc_at(now);
        let address = peer.map(|peer| peer.client(headers));
        let known = self.authenticator.authenticate(headers, address, utc).ok()?;
        Some(known.caller().clone())
    }

    /// Authenticates the credential in `headers`. Counts a failure against the
    /// source address.
    fn identify(
        &self,
        headers: &HeaderMap,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<AuthenticatedCaller, ApiError> {
        let utc = self.serving.clock().utc_at(now);
        let address = peer.map(|peer| peer.client(headers));
        self.authenticator.authenticate(headers, address, utc).map_err(|error| {
            let source = address.map(Source::of);
            self.source_penalties.failed_authentication(now, source, error)
        })
    }

    /// Returns the caller's tenant if the caller may use `endpoint`.
    fn tenant(
        &self,
        caller: &AuthenticatedCaller,
        endpoint: Endpoint,
    ) -> Result<ConfiguredTenant, ApiError> {
        if !caller.may_use_endpoint(endpoint) {
            return Err(ApiError::Permission {
                message: format!("This key may not use '{}'.", endpoint.as_str()).into(),
            });
        }
        // Read once, so that a reload cannot show one request two configurations.
        let config = self.config.current();
        ConfiguredTenant::find(&config, caller.tenant()).ok_or(ApiError::TenantNotServed)
    }

    /// Finds the limits of the request and counts it against their rates of
    /// requests, if the tenant has no penalty and no such rate is spent.
    fn limited(
        &self,
        caller: &AuthenticatedCaller,
        tenant: &ConfiguredTenant,
        now: MonotonicTime,
    ) -> Result<CallerContext, ApiError> {
        let serving = &self.serving;
        // The penalty is checked first, so that a penalised tenant spends none of its rate.
        let checked = serving.penalties().check(now, caller.tenant()).and_then(|()| {
            let (caller, plan) = (caller.caller().clone(), caller.plan());
            serving.limits().caller_context(now, caller, plan, tenant.clone())
        });
        // Clients that ignore `retry-after` accumulate a penalty.
        checked
            .map_err(ApiError::from)
            .inspect_err(|error| self.count_refusal(now, &tenant.tenant().name, error))
    }
}
