//! Which models there are, for this caller: those that config names or a
//! worker announced, and that tenant and key may use.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use tollgate_config::Tenant;
use tollgate_domain::ModelName;

use crate::api::Api;
use crate::auth::{AuthenticatedCaller, Endpoint};
use crate::reply::ApiError;
use crate::route;

/// A model as clients list it.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct ModelBody {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

/// All of them.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelBody>,
}

/// `GET /v1/models`
pub(crate) async fn list(
    State(api): State<Api>,
    caller: AuthenticatedCaller,
) -> Result<Json<ModelList>, ApiError> {
    let tenant = api.tenant(&caller, Endpoint::Models)?;
    let data = usable(&api, &caller, tenant).map(|name| body(&api, &name)).collect();
    Ok(Json(ModelList { object: "list", data }))
}

/// `GET /v1/models/{model}`
pub(crate) async fn show(
    State(api): State<Api>,
    caller: AuthenticatedCaller,
    model: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelBody>, ApiError> {
    // What is not even text names no model.
    let model = model.map(|Path(model)| model).unwrap_or_default();
    let tenant = api.tenant(&caller, Endpoint::Models)?;
    match usable(&api, &caller, tenant).find(|name| name.as_str() == model) {
        Some(name) => Ok(Json(body(&api, &name))),
        None => Err(ApiError::ModelNotFound { model }),
    }
}

fn usable<'a>(
    api: &Api,
    caller: &'a AuthenticatedCaller,
    tenant: &'a Tenant,
) -> impl Iterator<Item = ModelName> + use<'a> {
    let mut names = route::offered(&api.serving.workers);
    names.extend(api.config.models().map(|model| model.name.clone()));
    names.sort_unstable();
    names.dedup();
    names.into_iter().filter(|name| tenant.allows(name) && caller.may_use_model(name))
}

fn body(api: &Api, name: &ModelName) -> ModelBody {
    ModelBody {
        id: name.as_str().to_owned(),
        object: "model",
        created: api.serving.started.unix_seconds(),
        owned_by: "tollgate",
    }
}
