//! A request for a new API key, as the admin API takes it and as the command line makes it:
//! checked against the config before a key is created.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_config::Config;
use tollgate_domain::{ModelName, Network, PlanName, TenantId, UtcTime};

use super::key_store::KeyOptions;
use super::scopes::{Endpoint, Scopes};

/// The wanted properties of a new key. Absent and empty lists restrict nothing.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyRequest {
    /// The tenant that the key will belong to.
    #[schemars(with = "String")]
    pub tenant: TenantId,
    /// A name for people.
    #[serde(default)]
    pub label: String,
    /// The models that the key may use.
    #[schemars(with = "Vec<String>")]
    #[serde(default)]
    pub models: Vec<ModelName>,
    /// The endpoints that the key may use.
    #[serde(default)]
    pub endpoints: Vec<Endpoint>,
    /// The networks that the key may be used from.
    #[schemars(with = "Vec<String>")]
    #[serde(default)]
    pub sources: Vec<Network>,
    /// A plan with limits for this key alone.
    #[schemars(with = "Option<String>")]
    #[serde(default)]
    pub plan: Option<PlanName>,
    /// Time until the key expires.
    #[serde(default)]
    pub expires_in_seconds: Option<u64>,
}

/// A name in a [`KeyRequest`] that the config does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {field} {name}; {known}")]
pub struct UnknownInRequest {
    /// The field of the request: `tenant`, `model` or `plan`.
    pub field: &'static str,
    name: String,
    known: String,
}

impl KeyRequest {
    /// Checks the names against `config` and returns the options of the key.
    ///
    /// # Errors
    /// The config has no such tenant, model or plan.
    pub fn check(
        self,
        config: &Config,
        now: UtcTime,
    ) -> Result<(TenantId, KeyOptions), UnknownInRequest> {
        let Self { tenant, label, models, endpoints, sources, plan, expires_in_seconds } = self;
        if config.tenant(&tenant).is_none() {
            let names = config.tenants().map(|tenant| tenant.name.as_str());
            return Err(unknown("tenant", tenant.as_str(), names));
        }
        // A key for models that do not exist would be refused at every request.
        if let Some(name) = models.iter().find(|name| config.model(name).is_none()) {
            let names = config.models().map(|model| model.name.as_str());
            return Err(unknown("model", name.as_str(), names));
        }
        if let Some(name) = plan.as_ref().filter(|name| config.plan(name).is_none()) {
            let names = config.plans().map(|plan| plan.name.as_str());
            return Err(unknown("plan", name.as_str(), names));
        }
        let expires = expires_in_seconds.map(|seconds| {
            let nanos = u64::try_from(Duration::from_secs(seconds).as_nanos());
            UtcTime(now.0.saturating_add(nanos.unwrap_or(u64::MAX)))
        });
        let scopes =
            Scopes { models: some(models), endpoints: some(endpoints), sources: some(sources) };
        Ok((tenant, KeyOptions { label, scopes, expires, plan }))
    }
}

/// Returns `None` for an empty list: the key store writes the absence of a restriction so.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn unknown<'a>(
    field: &'static str,
    name: &str,
    known: impl Iterator<Item = &'a str>,
) -> UnknownInRequest {
    // The first few are enough to notice a typing error; there may be thousands.
    let known: Vec<&str> = known.take(8).collect();
    let known = format!("the config has: {}", known.join(", "));
    UnknownInRequest { field, name: name.to_owned(), known }
}
