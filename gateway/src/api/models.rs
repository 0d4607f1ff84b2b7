//! The models that a caller may use: those that the config names or a worker
//! announced, and that the tenant and the key allow.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::{ModelName, SamplingDefaults};
use tollgate_serving::route;

use super::{Api, Call, KnownCaller};
use crate::reply::ApiError;

/// One model in a response.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Model")]
pub(crate) struct ModelBody {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Tokens that the model takes, prompt and answer together; absent while no worker
    /// serves the model. The name is vLLM's.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,
    /// The sampling parameters of requests that name none; absent while no worker
    /// serves the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    sampling_defaults: Option<DefaultsBody>,
}

/// A model's sampling defaults as clients see them.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "SamplingDefaults")]
struct DefaultsBody {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
}

impl From<SamplingDefaults> for DefaultsBody {
    fn from(defaults: SamplingDefaults) -> Self {
        let SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty } = defaults;
        Self { temperature, top_k, top_p, min_p, repetition_penalty }
    }
}

/// The body of the response of `GET /v1/models`.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelBody>,
}

/// Answers `GET /v1/models`.
pub(crate) async fn list(api: Api, call: Call) -> Result<Response, ApiError> {
    let data = usable(&api, &call.caller).map(|name| body(&api, &name)).collect();
    Ok(Json(ModelList { object: "list", data }).into_response())
}

/// Answers `GET /v1/models/{model}`.
pub(crate) async fn show(api: Api, call: Call) -> Result<Response, ApiError> {
    let Call { parameter: model, caller, .. } = call;
    // Only usable models are searched, so that a forbidden model looks like a missing one.
    match usable(&api, &caller).find(|name| name.as_str() == model) {
        Some(name) => Ok(Json(body(&api, &name)).into_response()),
        None => Err(ApiError::ModelNotFound { model }),
    }
}

/// Returns the models that `caller` may use.
pub(super) fn usable<'a>(
    api: &Api,
    caller: &'a KnownCaller,
) -> impl Iterator<Item = ModelName> + use<'a> {
    let KnownCaller { caller, tenant, context: _ } = caller;
    let mut names = route::offered(api.serving.workers());
    names.extend(tenant.config().models().map(|model| model.name.clone()));
    // The config and the workers may name the same model; `dedup` finds only neighbours.
    names.sort_unstable();
    names.dedup();
    names.into_iter().filter(|name| tenant.tenant().allows(name) && caller.may_use_model(name))
}

fn body(api: &Api, name: &ModelName) -> ModelBody {
    let served = route::offer(api.serving.workers(), name.as_str());
    ModelBody {
        id: name.as_str().to_owned(),
        object: "model",
        created: api.serving.started().unix_seconds(),
        owned_by: "tollgate",
        max_model_len: served.as_ref().map(|served| served.context_length),
        sampling_defaults: served.map(|served| served.defaults.into()),
    }
}
