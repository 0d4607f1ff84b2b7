//! Usage of all tenants, and a tenant's statement, from the ledger.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use tollgate_domain::{DeviceClass, KeyId, ModelName, PlanName, TenantId, UtcDay, UtcMonth};
use tollgate_ledger::{
    GroupBy, LedgerError, LedgerReader, PricedAs, StatementError, StatementQuery, UsageQuery,
    UsageRow,
};

use super::AdminState;
use super::body::{AdminPath, AdminQuery};
use super::page::{Page, PageQuery};
use crate::reply::ApiError;
use crate::statement;

/// The query of usage.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct UsageFilter {
    #[schemars(with = "Option<String>")]
    tenant: Option<TenantId>,
    #[schemars(with = "Option<String>")]
    key: Option<KeyId>,
    #[schemars(with = "Option<String>")]
    model: Option<ModelName>,
    #[schemars(with = "Option<String>")]
    class: Option<DeviceClass>,
    /// The first day, such as `2026-11-20`.
    start: Option<String>,
    /// The last day, inclusive.
    end: Option<String>,
    /// The columns to group by, separated by commas.
    group_by: Option<String>,
    after: Option<String>,
}

/// The query of a statement.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct StatementOptions {
    /// The plan whose prices apply to the whole month.
    #[schemars(with = "Option<String>")]
    plan: Option<PlanName>,
}

/// Answers with usage by group.
pub(super) async fn usage(
    State(state): State<Arc<AdminState>>,
    AdminQuery(filter): AdminQuery<UsageFilter>,
) -> Result<Json<Page<UsageRow>>, ApiError> {
    let UsageFilter { tenant, key, model, class, start, end, group_by, after } = filter;
    let query = UsageQuery {
        tenant,
        key,
        model,
        class,
        from: day("start", start.as_deref())?,
        to: day("end", end.as_deref())?,
        group: groups(group_by.as_deref().unwrap_or("tenant,key,model"))?,
    };
    let rows = read(&state, move |reader| reader.usage(&query)).await?;
    // A row has no name of its own, so its number stands for it.
    let numbered: Vec<(usize, UsageRow)> = rows.into_iter().enumerate().collect();
    let Page { rows, next } = PageQuery::new(after).cut(numbered, |(number, _)| number.to_string());
    Ok(Json(Page { rows: rows.into_iter().map(|(_, row)| row).collect(), next }))
}

/// Answers with a tenant's statement.
pub(super) async fn statement(
    State(state): State<Arc<AdminState>>,
    AdminPath((tenant, month)): AdminPath<(String, String)>,
    AdminQuery(StatementOptions { plan }): AdminQuery<StatementOptions>,
) -> Result<Json<Value>, ApiError> {
    let unknown = || ApiError::NotFound { what: "tenant", id: tenant.clone() };
    let tenant = TenantId::new(&tenant).map_err(|_| unknown())?;
    let month: UtcMonth = month
        .parse()
        .map_err(|_| ApiError::invalid("month", "The month must have the form 2026-11."))?;
    let config = state.reloader.config();
    let now = state.serving.clock().utc();
    let made = read(&state, move |reader| {
        // A mistake of the query is no error of the ledger, which the log would report.
        let Some(prices) = config.prices() else { return Ok(Err(NO_PRICES.into())) };
        let current = config.tenant(&tenant).and_then(|tenant| tenant.priced_as());
        let current = current.map(|plan| &plan.name);
        let priced_as = plan.as_ref().map_or(PricedAs::Told(current), PricedAs::Plan);
        let query = StatementQuery { tenant: &tenant, month, priced_as, prices, now };
        match reader.statement(query) {
            Ok(statement) => Ok(match statement::unknown_plan(&config, &statement) {
                None => Ok(statement::as_json(&statement)),
                Some(span) => Err(format!(
                    "The config does not define the plan {}, which sets the prices from {} to {}.",
                    span.plan, span.from, span.to
                )),
            }),
            Err(StatementError::Ledger(error)) => Err(error),
            Err(error) => Ok(Err(format!("There is no statement: {error}."))),
        }
    });
    made.await?.map(Json).map_err(|message| ApiError::invalid("month", message))
}

fn day(param: &'static str, text: Option<&str>) -> Result<Option<UtcDay>, ApiError> {
    let invalid = |_| ApiError::invalid(param, format!("'{param}' must be a day like 2026-11-20."));
    text.map(str::parse).transpose().map_err(invalid)
}

fn groups(text: &str) -> Result<Vec<GroupBy>, ApiError> {
    let mut groups = Vec::new();
    for column in text.split(',').map(str::trim).filter(|column| !column.is_empty()) {
        let column = match column {
            "tenant" => GroupBy::Tenant,
            "key" => GroupBy::Key,
            "model" => GroupBy::Model,
            "day" => GroupBy::Day,
            "tier" => GroupBy::Tier,
            _ => {
                let message = "'group_by' must be of 'tenant', 'key', 'model', 'day' and 'tier', with \
                               commas between.";
                return Err(ApiError::invalid("group_by", message));
            }
        };
        if !groups.contains(&column) {
            groups.push(column);
        }
    }
    Ok(groups)
}

/// Reads the ledger on a thread that may block.
async fn read<T: Send + 'static>(
    state: &AdminState,
    read: impl FnOnce(&LedgerReader) -> Result<T, LedgerError> + Send + 'static,
) -> Result<T, ApiError> {
    let reader = state.serving.ledger().reader().clone();
    let done = tokio::task::spawn_blocking(move || read(&reader)).await;
    done.map_err(|_| ApiError::Internal)?.map_err(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "the ledger cannot be read; an admin request was answered with 503"
        );
        ApiError::LedgerUnavailable
    })
}

const NO_PRICES: &str = "The config has no price list: write one under [prices.NAME].";
