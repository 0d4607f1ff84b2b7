//! The usage of a tenant: its statement, and the exact figures of one of its
//! requests. A request of another tenant looks like one that does not exist.

use std::borrow::Cow;
use std::time::Duration;

use axum::Json;
use axum::extract::Query;
use axum::response::{IntoResponse as _, Response};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;
use tokio::time::timeout;
use tollgate_domain::{FinishReason, KeyId, ModelName, RequestId, TenantId, Tier, UtcDay};
use tollgate_ledger::{
    EntryRow, GroupBy, LedgerError, RequestRow, RequestState, UsageQuery, UsageRow,
};
use tollgate_serving::in_flight::Stage;

use super::{Api, Call};
use crate::reply::ApiError;

/// The longest wait for the record of a request that has just ended.
const RECORD_TIMEOUT: Duration = Duration::from_secs(3);

/// The query parameters of `GET /v1/usage`.
#[derive(Debug, Default)]
struct Filters {
    /// The first day, such as `2026-11-20`.
    start: Option<String>,
    /// The last day, inclusive.
    end: Option<String>,
    model: Option<String>,
    key: Option<String>,
    /// The columns to group by, out of `model`, `day` and `key`, separated by commas.
    group_by: Option<String>,
}

/// The body of the response of `GET /v1/usage`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct UsageList {
    object: &'static str,
    tenant: String,
    start: Option<String>,
    end: Option<String>,
    #[schemars(with = "Vec<UsageRowSchema>")]
    data: Vec<UsageRow>,
}

/// Answers `GET /v1/usage`.
pub(crate) async fn list(api: Api, call: Call) -> Result<Response, ApiError> {
    let tenant = &call.caller.tenant.tenant().name;
    // As pairs, because a map would hide a parameter that comes twice.
    let Query(filters) = Query::<Vec<(String, String)>>::try_from_uri(call.request.uri())
        .map_err(|_| ApiError::malformed("The query string cannot be read."))?;
    let query = query(&Filters::of(filters)?, tenant)?;
    let (start, end) = (query.from, query.to);
    let data = read(&api, move |reader| reader.usage(&query)).await?;
    Ok(Json(UsageList {
        object: "list",
        tenant: tenant.as_str().to_owned(),
        start: start.map(|day| day.to_string()),
        end: end.map(|day| day.to_string()),
        data,
    })
    .into_response())
}

impl Filters {
    /// Reads the parameters. A misspelt name is refused, because ignoring it would
    /// silently widen the result.
    fn of(parameters: Vec<(String, String)>) -> Result<Self, ApiError> {
        let mut filters = Self::default();
        for (name, value) in parameters {
            let field = match name.as_str() {
                "start" => &mut filters.start,
                "end" => &mut filters.end,
                "model" => &mut filters.model,
                "key" => &mut filters.key,
                "group_by" => &mut filters.group_by,
                _ => {
                    let message = "There is no such parameter: 'start', 'end', 'model', 'key' and \
                        'group_by' are understood.";
                    // The name is the client's own text and goes back in the error.
                    return Err(ApiError::invalid(printable(&name), message));
                }
            };
            if field.replace(value).is_some() {
                return Err(ApiError::invalid(name, "The parameter comes twice."));
            }
        }
        Ok(filters)
    }
}

/// Returns the name of a parameter in a form that is safe to print.
fn printable(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(64).collect()
}

fn query(filters: &Filters, tenant: &TenantId) -> Result<UsageQuery, ApiError> {
    let Filters { start, end, model, key, group_by } = filters;
    let from = day("start", start.as_deref())?;
    let to = day("end", end.as_deref())?;
    if let (Some(from), Some(to)) = (from, to)
        && from > to
    {
        return Err(ApiError::invalid("end", "'end' is before 'start'."));
    }
    let model = model.as_deref().map(ModelName::new).transpose();
    let key = key.as_deref().map(KeyId::new).transpose();
    let mut group = Vec::new();
    for column in group_by.as_deref().unwrap_or("model,day").split(',') {
        let column = match column.trim() {
            "model" => GroupBy::Model,
            "day" => GroupBy::Day,
            "key" => GroupBy::Key,
            "tier" => GroupBy::Tier,
            "" => continue,
            _ => {
                return Err(ApiError::invalid(
                    "group_by",
                    "'group_by' must be of 'model', 'day', 'key' and 'tier', with commas between.",
                ));
            }
        };
        if !group.contains(&column) {
            group.push(column);
        }
    }
    Ok(UsageQuery {
        // The tenant comes from the credential, and never from a parameter.
        tenant: Some(tenant.clone()),
        key: key.map_err(|error| ApiError::invalid("key", error.to_string()))?,
        model: model.map_err(|error| ApiError::invalid("model", error.to_string()))?,
        class: None,
        from,
        to,
        group,
    })
}

fn day(param: &'static str, text: Option<&str>) -> Result<Option<UtcDay>, ApiError> {
    let Some(text) = text else { return Ok(None) };
    match text.parse() {
        Ok(day) => Ok(Some(day)),
        Err(_) => {
            Err(ApiError::invalid(param, format!("'{param}' must be a day like 2026-11-20.")))
        }
    }
}

/// The body of the response of `GET /v1/usage/{request_id}`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RequestUsage {
    id: String,
    object: &'static str,
    /// `running` while the request runs, `pending` after its end until the ledger has
    /// its record, `posted` when the figures are final.
    state: &'static str,
    /// The header `x-client-request-id` of the request; null if it had none, or if the gateway no
    /// longer has it.
    client_request_id: Option<String>,
    /// The trace id in the header `traceparent` of the request; null as above.
    trace_id: Option<String>,
    #[serde(flatten)]
    figures: Option<RequestFigures>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RequestFigures {
    tenant: String,
    key: String,
    model: String,
    device_class: String,
    attempts: u32,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    attributed_ns: u64,
    reference_ns: u64,
    gpu_ns: u64,
    queue_ns: u64,
    prefill_ns: u64,
    decode_ns: u64,
    #[schemars(with = "Option<String>")]
    reason: Option<FinishReason>,
    /// The end of the request, in Unix seconds.
    finished: Option<u64>,
    #[schemars(with = "Vec<EntryRowSchema>")]
    entries: Vec<EntryRow>,
}

/// The schema of a [`UsageRow`]. A column that is not grouped by is absent.
pub(crate) struct UsageRowSchema;

impl JsonSchema for UsageRowSchema {
    fn schema_name() -> Cow<'static, str> {
        "UsageRow".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let (text, count) =
            (json!({ "type": "string" }), json!({ "type": "integer", "minimum": 0 }));
        json_schema!({
            "type": "object",
            "required": ["device_class", "requests", "prompt_tokens", "cached_tokens",
                "completion_tokens", "attributed_ns", "reference_ns", "gpu_ns", "energy_mj"],
            "properties": {
                "tenant": text, "key": text, "model": text,
                "day": { "type": "string", "format": "date" },
                "tier": { "enum": Tier::ALL },
                "device_class": text, "requests": count, "prompt_tokens": count,
                "cached_tokens": count, "completion_tokens": count, "attributed_ns": count,
                "reference_ns": count, "gpu_ns": count,
                "energy_mj": { "type": ["integer", "null"], "minimum": 0 },
            },
        })
    }
}

/// The schema of an [`EntryRow`].
struct EntryRowSchema;

impl JsonSchema for EntryRowSchema {
    fn schema_name() -> Cow<'static, str> {
        "EntryRow".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "required": ["id", "account", "amount_ns"],
            "properties": {
                "id": { "type": "string" },
                "account": { "enum": ["tenant", "loss"] },
                "amount_ns": { "type": "integer" },
            },
        })
    }
}

/// Answers `GET /v1/usage/{request_id}`.
pub(crate) async fn show(api: Api, call: Call) -> Result<Response, ApiError> {
    let Call { parameter: id, caller, .. } = call;
    let tenant = caller.tenant.tenant().name.clone();
    let request = request_id(&id).ok_or_else(|| not_found(&id))?;
    // Before the row is read: in the other order, a request that is recorded in between would be
    // found in neither place.
    let stage = stage(&api, &tenant, &request).await;
    let ids = api.client_ids.of(api.serving.clock().now(), &tenant, &request).unwrap_or_default();
    let wanted = request.clone();
    let row = read(&api, move |reader| reader.request(&tenant, &wanted)).await?;
    let state = match (&row, stage) {
        (None, None) => return Err(not_found(&id)),
        (_, Some(Stage::Running)) => "running",
        (Some(row), _) if row.state == RequestState::Posted => "posted",
        (_, Some(Stage::Ended | Stage::Recorded)) => "pending",
        (Some(_), None) => "running",
    };
    Ok(Json(RequestUsage {
        id: request.as_str().to_owned(),
        object: "usage.request",
        state,
        client_request_id: ids.request_id().map(str::to_owned),
        trace_id: ids.trace_id().map(str::to_owned),
        figures: row.map(RequestFigures::from),
    })
    .into_response())
}

/// Returns the stage of a running request. If the request has just ended, waits
/// until the ledger has its record, or until the wait takes too long.
async fn stage(api: &Api, tenant: &TenantId, request: &RequestId) -> Option<Stage> {
    let mut stage = api.serving.in_flight().stage(tenant, request)?;
    if *stage.borrow() == Stage::Ended {
        let recorded = stage.wait_for(|stage| *stage == Stage::Recorded);
        // An error means that the request is no longer in memory. Then the ledger
        // has its record.
        let _ = timeout(RECORD_TIMEOUT, recorded).await;
    }
    let now = *stage.borrow();
    Some(now)
}

impl From<RequestRow> for RequestFigures {
    fn from(row: RequestRow) -> Self {
        let RequestRow {
            request: _, // the field `id` beside these figures
            caller,
            model,
            class,
            state: _, // the field `state` beside these figures
            attempts,
            usage,
            stages,
            reason,
            finished,
            entries,
        } = row;
        let attributed_ns = usage.attributed.nanos();
        Self {
            tenant: caller.tenant.into(),
            key: caller.key.into(),
            model: model.into(),
            // A client that adds up `gpu_ns` must not count the time of CPUs.
            gpu_ns: if class.is_gpu() { attributed_ns } else { 0 },
            device_class: class.into(),
            attempts,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.total_tokens(),
            attributed_ns,
            reference_ns: usage.reference.nanos(),
            queue_ns: stages.queue_ns,
            prefill_ns: stages.prefill_ns,
            decode_ns: stages.decode_ns,
            reason,
            finished: finished.map(|finished| finished.unix_seconds()),
            entries,
        }
    }
}

/// Returns the id of a request from its form in the header or in a response body.
fn request_id(text: &str) -> Option<RequestId> {
    let bare = text.strip_prefix("chatcmpl-").or_else(|| text.strip_prefix("cmpl-"));
    match bare {
        Some(bare) => RequestId::new(&format!("req-{bare}")).ok(),
        None => RequestId::new(text).ok(),
    }
}

fn not_found(id: &str) -> ApiError {
    ApiError::NotFound { what: "request", id: id.to_owned() }
}

/// Reads the ledger on a blocking thread.
async fn read<T: Send + 'static>(
    api: &Api,
    read: impl FnOnce(&tollgate_ledger::LedgerReader) -> Result<T, LedgerError> + Send + 'static,
) -> Result<T, ApiError> {
    let reader = api.serving.ledger().reader().clone();
    // A query blocks its thread, which must not be one that serves.
    match tokio::task::spawn_blocking(move || read(&reader)).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the ledger cannot be read; answering with 503"
            );
            Err(ApiError::LedgerUnavailable)
        }
        // The query panicked, or the runtime is stopping.
        Err(_) => Err(ApiError::Internal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_accepts_body_and_header_form() {
        for (text, expected) in [
            ("req-0a", Some("req-0a")),
            ("chatcmpl-0a", Some("req-0a")),
            ("cmpl-0a", Some("req-0a")),
            ("", None),
            ("req 0a", None),
            ("req-0a\u{0}", None),
        ] {
            assert_eq!(request_id(text).as_ref().map(RequestId::as_str), expected, "{text:?}");
        }
    }

    #[test]
    fn usage_parameters_are_known_and_unique() {
        let of = |names: &[&str]| {
            let pairs = names.iter().map(|&name| (name.to_owned(), "x".to_owned())).collect();
            match Filters::of(pairs) {
                Ok(_) => Ok(()),
                Err(ApiError::Invalid { param, .. }) => Err(param.expect("a name").into_owned()),
                Err(error) => panic!("{error:?}"),
            }
        };
        assert_eq!(of(&["start", "end", "model", "key", "group_by"]), Ok(()));
        assert_eq!(of(&["start", "form"]), Err("form".into()));
        assert_eq!(of(&["tenant"]), Err("tenant".into()));
        assert_eq!(of(&["end", "end"]), Err("end".into()));
        assert_eq!(of(&["\u{1b}[2J"]), Err("[2J".into()));
    }

    #[test]
    fn usage_filters_are_checked() {
        let tenant = TenantId::new("acme").expect("a name");
        let filters = |start: &str, end: &str, group_by: &str| Filters {
            start: Some(start.into()).filter(|start: &String| !start.is_empty()),
            end: Some(end.into()).filter(|end: &String| !end.is_empty()),
            group_by: Some(group_by.into()),
            ..Filters::default()
        };
        for (filters, expected) in [
            (filters("2026-11-20", "2026-11-20", "model,day,key,tier"), Ok(4)),
            (filters("", "", ""), Ok(0)),
            (filters("", "", "day,day"), Ok(1)),
            (filters("20.11.2026", "", "day"), Err("start")),
            (filters("", "2026-02-30", "day"), Err("end")),
            (filters("2026-11-21", "2026-11-20", "day"), Err("end")),
            (filters("", "", "tenant"), Err("group_by")),
        ] {
            let found = match query(&filters, &tenant) {
                Ok(query) => Ok(query.group.len()),
                Err(ApiError::Invalid { param, .. }) => Err(param.expect("a field").into_owned()),
                Err(error) => panic!("{error:?}"),
            };
            assert_eq!(found, expected.map_err(str::to_owned), "{filters:?}");
        }
    }
}
