//! The reload of the config, and its difference without effect.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AdminState;
use super::actor::Actor;
use super::body::AdminQuery;
use crate::reload::{ReloadError, ReloadRun};
use crate::reply::ApiError;

/// The query of a reload.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Options {
    /// `true` or no value: the difference is shown and nothing changes.
    #[serde(default)]
    dry_run: DryRun,
}

/// The values of `dry_run`. The parameter alone, without a value, is `true`.
#[derive(Clone, Copy, Default, Deserialize, JsonSchema)]
enum DryRun {
    #[serde(rename = "true", alias = "")]
    True,
    #[default]
    #[serde(rename = "false")]
    False,
}

/// The answer to a config that cannot be put in force.
#[derive(Serialize, JsonSchema)]
pub(super) struct Mistaken {
    error: Mistakes,
}

#[derive(Serialize, JsonSchema)]
struct Mistakes {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    code: &'static str,
    /// The mistakes, each with its place.
    mistakes: Vec<String>,
}

/// Reloads the config, or shows the difference.
pub(super) async fn reload(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminQuery(options): AdminQuery<Options>,
) -> Response {
    let run = match options.dry_run {
        DryRun::True => ReloadRun::Dry,
        DryRun::False => ReloadRun::Apply,
    };
    answer(&state, &actor, run).await
}

/// Shows the difference that a reload would make.
pub(super) async fn difference(State(state): State<Arc<AdminState>>, actor: Actor) -> Response {
    answer(&state, &actor, ReloadRun::Dry).await
}

async fn answer(state: &AdminState, actor: &Actor, run: ReloadRun) -> Response {
    match state.reloader.reload(actor.as_record(), run).await {
        Ok(report) => Json(report).into_response(),
        Err(ReloadError::Ledger(_)) => ApiError::LedgerUnavailable.into_response(),
        Err(ReloadError::Stopping) => ApiError::Draining.into_response(),
        Err(error) => {
            let mistakes = error.mistakes();
            let message = format!("The config in force stays: {}", mistakes.join("; "));
            let (kind, code) = ("invalid_request_error", "invalid_config");
            let error = Mistakes { message, kind, code, mistakes };
            (StatusCode::UNPROCESSABLE_ENTITY, Json(Mistaken { error })).into_response()
        }
    }
}
