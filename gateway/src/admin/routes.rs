//! The table of the admin listener's routes, each with the right that it asks for, and the
//! router made of the table. A path that is not in the table is closed.

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodFilter, MethodRouter, on};
use http::Method;
use schemars::SchemaGenerator;

use super::actor::{require_admin, require_right};
use super::{
    AdminState, admins, checkpoint, gateways, healthz, jobs, keys, live, operations, penalties,
    raises, readyz, reload, scrape, status, tenants, usage, workers,
};
use crate::auth::Right;
use crate::openapi::{RouteOperation, admin as openapi};
use crate::read_limit::{AdminReadLimit, limit_admins};
use crate::stack::{method_not_allowed, unknown_route};

/// One route of the admin listener.
pub(super) struct AdminRoute {
    pub(super) method: Method,
    /// The path, with parameters in braces.
    pub(super) path: &'static str,
    /// The right that the route asks for; `None` if the route is open to everyone.
    pub(super) right: Option<Right>,
    handler: MethodRouter<Arc<AdminState>>,
}

/// Returns the table of all routes.
pub(super) fn routes() -> Vec<AdminRoute> {
    use Right::{Administer, Operate, Read, ReadMoney};
    vec![
        open("/healthz", healthz),
        open("/readyz", readyz),
        open("/metrics", scrape::metrics),
        get("/openapi.json", Read, openapi::show),
        get("/v1/status", Read, status),
        get("/v1/live", Read, live::live),
        get("/audit/checkpoint", Read, checkpoint::newest),
        get("/audit/key", Read, checkpoint::key),
        get("/v1/penalties", Read, penalties::list),
        delete("/v1/penalties/tenant/{*name}", Operate, penalties::lift_tenant),
        delete("/v1/penalties/source/{*name}", Operate, penalties::lift_source),
        get("/config/difference", Read, reload::difference),
        post("/config/reload", Operate, reload::reload),
        get("/v1/admins", Read, admins::list),
        post("/v1/admins", Administer, admins::create),
        delete("/v1/admins/{name}", Administer, admins::revoke),
        get("/v1/gateways", Read, gateways::list),
        post("/v1/gateways/{home}/free", Administer, gateways::free),
        get("/v1/keys", Read, keys::list),
        post("/v1/keys", Administer, keys::create),
        post("/v1/keys/{key}/rotate", Administer, keys::rotate),
        delete("/v1/keys/{key}", Administer, keys::revoke),
        get("/v1/usage", Read, usage::usage),
        get("/v1/tenants", Read, tenants::list),
        get("/v1/refusals", Read, tenants::refusals),
        get("/v1/tenants/{tenant}", Read, tenants::show),
        post("/v1/tenants/{tenant}/raises", Administer, raises::create),
        delete("/v1/tenants/{tenant}/raises", Administer, raises::end),
        get("/v1/tenants/{tenant}/statements/{month}", ReadMoney, usage::statement),
        get("/v1/tenants/{tenant}/batches", Read, jobs::list),
        get("/v1/tenants/{tenant}/batches/{batch}", Read, jobs::show),
        post("/v1/tenants/{tenant}/batches/{batch}/cancel", Operate, jobs::cancel),
        post("/v1/workers/{worker}/rest", Operate, workers::rest),
        post("/v1/workers/{worker}/wake", Operate, workers::wake),
    ]
}

/// A route as the OpenAPI document has it.
pub(crate) struct DocumentedRoute {
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    /// The roles that may use the route; `None` if it needs no key.
    pub(crate) roles: Option<String>,
    pub(crate) operation: Option<RouteOperation>,
}

/// Returns all routes with their operations.
pub(crate) fn documented_routes(
    schemas: &mut SchemaGenerator,
) -> impl Iterator<Item = DocumentedRoute> {
    routes().into_iter().map(|AdminRoute { method, path, right, handler: _ }| {
        let roles = right.map(|right| match right {
            Right::Read => "every role".to_owned(),
            right => format!("the role {}", right.roles()),
        });
        let operation = operations::of(&format!("{method} {path}"), schemas);
        DocumentedRoute { method, path, roles, operation }
    })
}

/// Builds the router of all routes.
pub(super) fn router(state: Arc<AdminState>, limit: AdminReadLimit) -> Router {
    let (mut open, mut guarded) = (Router::new(), Router::new());
    for AdminRoute { method: _, path, right, handler } in routes() {
        match right {
            Some(right) => {
                // The guard below runs first, and gives the request its admin.
                let handler = handler.route_layer(from_fn_with_state(right, require_right));
                guarded = guarded.route(path, handler);
            }
            None => open = open.route(path, handler),
        }
    }
    let guarded = guarded
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(limit, limit_admins))
        // The guard also covers unknown paths: a client without a key must not learn
        // which paths exist.
        .layer(from_fn_with_state(Arc::clone(&state), require_admin));
    open.method_not_allowed_fallback(method_not_allowed)
        .fallback_service(guarded.with_state(Arc::clone(&state)))
        .with_state(state)
}

/// Returns the label of a path in metrics.
pub(super) fn label(path: &str) -> &'static str {
    let mut segments = path.trim_start_matches('/').split('/');
    match (segments.next(), segments.next()) {
        (Some("healthz"), None) => "healthz",
        (Some("readyz"), None) => "readyz",
        (Some("metrics"), None) => "metrics",
        (Some("openapi.json"), None) => "admin_openapi",
        (Some("v1"), Some("status")) => "admin_status",
        (Some("v1"), Some("live")) => "admin_live",
        (Some("v1"), Some("penalties")) => "admin_penalties",
        (Some("v1"), Some("admins")) => "admin_admins",
        (Some("v1"), Some("gateways")) => "admin_gateways",
        (Some("v1"), Some("keys")) => "admin_keys",
        (Some("v1"), Some("refusals" | "tenants")) => "admin_tenants",
        (Some("v1"), Some("usage")) => "admin_usage",
        (Some("v1"), Some("workers")) => "admin_workers",
        (Some("audit"), _) => "admin_audit",
        (Some("config"), Some("difference" | "reload")) => "admin_reload",
        _ => "admin_other",
    }
}

fn open<T: 'static>(path: &'static str, handler: impl Handler<T, Arc<AdminState>>) -> AdminRoute {
    let (method, handler) = (Method::GET, on(MethodFilter::GET, handler));
    AdminRoute { method, path, right: None, handler }
}

fn get<T: 'static>(
    path: &'static str,
    right: Right,
    handler: impl Handler<T, Arc<AdminState>>,
) -> AdminRoute {
    let (method, handler) = (Method::GET, on(MethodFilter::GET, handler));
    AdminRoute { method, path, right: Some(right), handler }
}

fn post<T: 'static>(
    path: &'static str,
    right: Right,
    handler: impl Handler<T, Arc<AdminState>>,
) -> AdminRoute {
    let (method, handler) = (Method::POST, on(MethodFilter::POST, handler));
    AdminRoute { method, path, right: Some(right), handler }
}

fn delete<T: 'static>(
    path: &'static str,
    right: Right,
    handler: impl Handler<T, Arc<AdminState>>,
) -> AdminRoute {
    let (method, handler) = (Method::DELETE, on(MethodFilter::DELETE, handler));
    AdminRoute { method, path, right: Some(right), handler }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::auth::Role;
    use crate::gateway::tests::RunningGateway;

    const DOCUMENT: &str = include_str!("../../../docs/admin-api.md");

    /// Reads the documented routes: `| \`GET /path\` | roles | ...`.
    fn documented() -> BTreeMap<String, String> {
        let rows = DOCUMENT.lines().filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
            let route = cells.next()?.trim_end_matches('`');
            route.contains(" /").then(|| (route.to_owned(), cells.next().unwrap_or("").to_owned()))
        });
        rows.collect()
    }

    #[test]
    fn every_route_is_documented_with_roles() {
        let roles = |right: Option<Right>| match right {
            None => "no key".to_owned(),
            Some(Right::Read) => "every role".to_owned(),
            Some(right) => right.roles(),
        };
        let expected: BTreeMap<String, String> = routes()
            .iter()
            .map(|route| (format!("{} {}", route.method, route.path), roles(route.right)))
            .collect();
        assert_eq!(documented(), expected, "docs/admin-api.md and gateway/src/admin/routes.rs");
    }

    /// T54: every route with every role, without a key, and with keys that open nothing.
    #[tokio::test]
    async fn every_route_checks_role() {
        // Each request has a connection of its own.
        let open = "[gateway.reads]\nrequests_per_second = 1000\nrequest_burst = 10000\n\
            [gateway.connections]\nnew_per_second = 10000\nnew_burst = 10000\n\
            [gateway.penalties]\nfailed_authentications_per_minute = 10000\n";
        let gateway = RunningGateway::plain(open).await;
        let admin_key = gateway.admin_key();
        let mut keys: Vec<(Option<Role>, Option<String>)> = vec![
            (None, None),
            (None, Some("wrong".to_owned())),
            (None, Some(format!("tga-{}", "0".repeat(64)))),
            (None, Some(gateway.key.clone())),
            (Some(Role::Admin), Some(admin_key.clone())),
        ];
        for role in Role::ALL {
            let body = json!({ "name": format!("the-{}", role.as_str()), "role": role });
            let ask = ("POST", "/v1/admins");
            let made = gateway.send(gateway.admin, ask, Some(&admin_key), &body.to_string()).await;
            assert_eq!(made.status.as_u16(), 201, "{}", made.body);
            let made: Value = serde_json::from_str(&made.body).expect("JSON");
            keys.push((Some(role), Some(made["secret"].as_str().expect("a key").to_owned())));
        }
        for AdminRoute { method, path, right, .. } in routes() {
            let path = path.replace(['{', '}', '*'], "");
            for (role, key) in &keys {
                let ask = (method.as_str(), path.as_str());
                let answer = gateway.send(gateway.admin, ask, key.as_deref(), "").await;
                let expected = match (right, role) {
                    (None, _) => None,
                    (Some(_), None) => Some(401),
                    (Some(right), Some(role)) => (!role.has(right)).then_some(403),
                };
                let status = answer.status.as_u16();
                let refused = [401, 403].contains(&status).then_some(status);
                assert_eq!(refused, expected, "{method} {path} {role:?} {}", answer.body);
                if status == 403 {
                    let needed = right.expect("a closed route").roles();
                    let sentence = format!("This needs the role {needed}; admin the-");
                    assert!(answer.body.contains(&sentence), "{}", answer.body);
                }
            }
        }
        gateway.close().await;
    }
}
