//! Raises: higher limits of single tenants, laid over the plans of a config. The files stay
//! as they are.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};
use tollgate_domain::{ByClass, Rate, TenantId};

use crate::config::{Config, Plan, Tenant, grammar_time, plan_limits};
use crate::problem::Place;
use crate::read::{Reader, Section};
use crate::sections::RawPlan;
use crate::tree;

/// Higher values for some limits of a plan. They are written as in a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct RaisedLimits {
    /// The limits as they were given.
    limits: Map<String, Value>,
    raw: RawPlan,
}

/// A mistake in raised limits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RaiseError {
    /// No limit is named.
    #[error("name at least one limit")]
    Empty,
    /// A key or a value is none of a plan.
    #[error("{0}")]
    Malformed(String),
    /// The key is of a plan, but no limit.
    #[error("the key {0} is no limit, so it cannot be raised")]
    NoLimit(String),
    /// The tenant has no plan of its own.
    #[error("tenant {0} has no plan of its own; a raise changes no plan of a pool")]
    NoPlan(TenantId),
    /// The plan has no such limit, or one that is not lower.
    #[error("plan {plan} has no {key} below {value}, so there is nothing to raise")]
    NotHigher {
        /// The plan of the tenant.
        plan: String,
        /// The key of the limit.
        key: String,
        /// The value that was to be the higher one.
        value: String,
    },
}

impl RaisedLimits {
    /// Reads limits in JSON, with the keys and the values of a plan:
    /// `{"tokens_per_minute": 400000, "device_time_per_day": "2h"}`.
    ///
    /// # Errors
    /// There is no limit, or a key or value is not allowed in a plan.
    pub fn from_json(limits: &Map<String, Value>) -> Result<Self, RaiseError> {
        if limits.is_empty() {
            return Err(RaiseError::Empty);
        }
        // Written and read again as the text of a plan, so that the rules are those of a file.
        let mut text = String::new();
        for (key, value) in limits {
            if ["weight", "flex", "batches"].contains(&key.as_str()) {
                return Err(RaiseError::NoLimit(key.clone()));
            }
            let value =
                toml_of(value).ok_or_else(|| malformed(key, "must not be a list or null"))?;
            text.push_str(&format!("{} = {value}\n", quoted(key)));
        }
        let mut reader = Reader::default();
        let table = tree::parse(&Arc::new(PathBuf::new()), &text, &mut reader.problems);
        let node = tree::Node { place: Place::Default, value: tree::Value::Table(table) };
        let raw = RawPlan::read(Some(&node), "", &mut reader);
        if let Some(problem) = reader.problems.first() {
            return Err(malformed(&problem.key, &problem.message));
        }
        Ok(Self { limits: limits.clone(), raw })
    }

    /// Checks that each of these limits is higher than the one that `tenant` has.
    ///
    /// # Errors
    /// The tenant has no plan of its own, or no such limit, or a limit that is not lower.
    pub fn check(&self, config: &Config, tenant: &Tenant) -> Result<(), RaiseError> {
        let plan = config.configured_plan(tenant);
        let plan = plan.ok_or_else(|| RaiseError::NoPlan(tenant.name.clone()))?;
        for (key, value) in &self.limits {
            // One by one: among others, a limit that raises nothing would not be noticed.
            let alone = Self::from_json(&Map::from_iter([(key.clone(), value.clone())]))?;
            if alone.applied_to(plan) == **plan {
                return Err(RaiseError::NotHigher {
                    plan: plan.name.to_string(),
                    key: key.clone(),
                    value: value.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Returns `plan` with the higher value of each limit that the plan has.
    fn applied_to(&self, plan: &Plan) -> Plan {
        let (to, mut limits) = (plan_limits(&self.raw), (*plan.limits).clone());
        raise_rate(&mut limits.requests, to.requests);
        raise_rate(&mut limits.tokens, to.tokens);
        raise_by_class(&mut limits.device_time, &to.device_time, raise_rate);
        // Not the default, which raises nothing.
        raise_rate(&mut limits.grammar_time, grammar_time(&self.raw));
        let times = [
            (&mut limits.device_time_per_day, &to.device_time_per_day),
            (&mut limits.device_time_per_month, &to.device_time_per_month),
            (&mut limits.largest_job, &to.largest_job),
        ];
        for (limit, to) in times {
            raise_by_class(limit, to, raise);
        }
        if let (Some(limit), Some(to)) = (&mut limits.budget_per_month, to.budget_per_month)
            // Amounts of two currencies cannot be compared.
            && to.currency == limit.currency
        {
            limit.nanos = limit.nanos.max(to.nanos);
        }
        raise(&mut limits.concurrent, to.concurrent);
        // A plan that limits running requests has a queue, if only of length 0.
        raise(&mut limits.queued, self.raw.queued);
        let mut connections = plan.connections;
        raise(&mut connections, self.raw.connections);
        Plan { limits: Arc::new(limits), connections, ..plan.clone() }
    }
}

impl Config {
    /// Returns this config with raised limits in place of those that it has now. Raises of
    /// tenants that the config does not have, or that have no plan of their own, change
    /// nothing.
    pub fn with_raises<'r>(
        &self,
        raises: impl IntoIterator<Item = (&'r TenantId, &'r RaisedLimits)>,
    ) -> Self {
        let mut config = self.clone();
        config.revision += 1;
        // Raises are laid over the plans of the files, never over earlier raises.
        for (name, tenant) in std::mem::take(&mut config.unraised) {
            if let Some(place) = config.tenant_places.get(&name) {
                config.tenants[*place] = tenant;
            }
        }
        for (name, raised) in raises {
            let Some(&place) = config.tenant_places.get(name) else { continue };
            let tenant = Arc::clone(&config.tenants[place]);
            let Some(plan) = &tenant.plan else { continue };
            let plan = Some(Arc::new(raised.applied_to(plan)));
            config.tenants[place] = Arc::new(Tenant { plan, ..(*tenant).clone() });
            // Not replaced: at a second raise of one tenant, `tenant` is no longer as in the files.
            config.unraised.entry(name.clone()).or_insert(tenant);
        }
        config
    }

    /// Returns the plan of `tenant` as the files have it, without raises.
    fn configured_plan<'c>(&'c self, tenant: &'c Tenant) -> Option<&'c Arc<Plan>> {
        self.unraised.get(&tenant.name).map_or(tenant, Arc::as_ref).plan.as_ref()
    }
}

/// Replaces `limit` by `to` if there is a limit and `to` is higher.
fn raise<T: PartialOrd>(limit: &mut Option<T>, to: Option<T>) {
    if let (Some(limit), Some(to)) = (limit, to)
        && to > *limit
    {
        *limit = to;
    }
}

/// Raises a rate and, apart from it, its burst.
fn raise_rate(limit: &mut Option<Rate>, to: Option<Rate>) {
    if let (Some(limit), Some(to)) = (limit, to) {
        limit.per_minute = limit.per_minute.max(to.per_minute);
        limit.burst = limit.burst.max(to.burst);
    }
}

/// Raises the limit of each device class that either side names, and the default.
fn raise_by_class<T: Copy>(
    limit: &mut ByClass<T>,
    to: &ByClass<T>,
    raise: impl Fn(&mut Option<T>, Option<T>),
) {
    let named: Vec<_> = limit.classes.keys().chain(to.classes.keys()).cloned().collect();
    // Before the default is raised: a class that only `to` names starts from the old default.
    for class in named {
        let mut of_class = limit.limit(&class);
        raise(&mut of_class, to.limit(&class));
        if let Some(of_class) = of_class {
            limit.classes.insert(class, of_class);
        }
    }
    raise(&mut limit.default, to.default);
}

fn malformed(key: &str, message: &str) -> RaiseError {
    RaiseError::Malformed(format!("limit {key}: {message}"))
}

/// Returns `value` as TOML; `None` for a list or null, which no limit has.
fn toml_of(value: &Value) -> Option<String> {
    match value {
        Value::Null | Value::Array(_) => None,
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        Value::String(text) => Some(quoted(text)),
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| {
                Some(format!("{} = {}", quoted(key), toml_of(value)?))
            };
            let fields: Option<Vec<String>> = fields.iter().map(field).collect();
            Some(format!("{{ {} }}", fields?.join(", ")))
        }
    }
}

/// Returns `text` as a string of TOML, which JSON's escapes are, too.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;
    use tollgate_domain::{DeviceClass, DeviceNanos};

    use super::*;

    const CONFIG: &str = r#"
        [plans.team]
        requests_per_minute = { limit = 60, burst = 100 }
        concurrent = 4
        budget_per_month = { EUR = "5" }
        device_time_per_day = { h200 = "1h", default = "10h" }
        [tenants.acme]
        plan = "team"
        [tenants.other]
        plan = "team"
        [prices.standard]
        from = 2026-11-01
        currency = "EUR"
        per_device_second = "0.0025"
    "#;

    fn config() -> Config {
        Config::from_toml(Path::new("test.toml"), CONFIG).expect("a config")
    }

    fn raised(limits: Value) -> RaisedLimits {
        RaisedLimits::from_json(limits.as_object().expect("an object")).expect("limits")
    }

    fn refused(limits: Value) -> String {
        let limits = limits.as_object().expect("an object").clone();
        let config = config();
        let tenant = config.tenant(&acme()).expect("the tenant");
        let checked =
            RaisedLimits::from_json(&limits).and_then(|raised| raised.check(&config, tenant));
        checked.expect_err("no raise").to_string()
    }

    fn acme() -> TenantId {
        TenantId::new("acme").expect("a name")
    }

    fn plan(config: &Config, tenant: &str) -> Plan {
        let tenant = config.tenant(&TenantId::new(tenant).expect("a name")).expect("the tenant");
        (**tenant.plan.as_ref().expect("a plan")).clone()
    }

    #[test]
    fn raises_change_one_tenant_until_replaced() {
        let config = config();
        let raises = raised(json!({ "requests_per_minute": 90, "queued": 7,
            "budget_per_month": { "EUR": "6.5" },
            "device_time_per_day": { "h200": "2h", "a100": "11h", "default": "9h" } }));
        let acme = acme();
        let higher = config.with_raises([(&acme, &raises)]);
        let limits = plan(&higher, "acme").limits;
        assert_eq!(limits.requests, Some(Rate { per_minute: 90, burst: 100 }));
        assert_eq!((limits.concurrent, limits.queued), (Some(4), Some(7)));
        assert_eq!(limits.budget_per_month.map(|budget| budget.nanos), Some(6_500_000_000));
        let hours = |class: &str| {
            let class = DeviceClass::new(class).expect("a class");
            limits.device_time_per_day.limit(&class).map(|DeviceNanos(ns)| ns / 3_600_000_000_000)
        };
        assert_eq!((hours("h200"), hours("a100"), hours("cpu")), (Some(2), Some(11), Some(10)));
        assert_eq!(plan(&higher, "other"), plan(&config, "other"));
        assert!(higher.revision() > config.revision());

        let other = raised(json!({ "concurrent": 9 }));
        let replaced = higher.with_raises([(&acme, &other)]);
        assert_eq!(plan(&replaced, "acme").limits.requests, plan(&config, "acme").limits.requests);
        assert_eq!(plan(&replaced, "acme").limits.concurrent, Some(9));
        assert_eq!(plan(&replaced.with_raises([]), "acme"), plan(&config, "acme"));
    }

    #[test]
    fn raises_that_raise_nothing_are_refused() {
        assert_eq!(refused(json!({})), "name at least one limit");
        assert_eq!(
            refused(json!({ "weight": 2 })),
            "the key weight is no limit, so it cannot be raised"
        );
        assert!(refused(json!({ "flex": true })).contains("no limit"));
        for limits in [
            json!({ "concurrent": 4 }),
            json!({ "tokens_per_minute": 5 }),
            json!({ "budget_per_month": { "USD": "9" } }),
        ] {
            assert!(refused(limits.clone()).contains("nothing to raise"), "{limits}");
        }
        assert!(refused(json!({ "concurent": 8 })).contains("did you mean"));
        assert!(refused(json!({ "concurrent": "many" })).starts_with("limit concurrent: "));
        assert!(refused(json!({ "concurrent": [8] })).contains("must not be a list"));
        // A key must not smuggle other keys into the text that is parsed.
        refused(json!({ "concurrent\"=9\n[x": 8 }));
    }

    #[test]
    fn raises_are_checked_against_the_files() {
        let (config, acme) = (config(), acme());
        let first = raised(json!({ "concurrent": 9 }));
        let higher = config.with_raises([(&acme, &first)]);
        let lower = raised(json!({ "concurrent": 6 }));
        // A raise replaces an earlier one, so only the plan counts.
        assert_eq!(lower.check(&higher, higher.tenant(&acme).expect("the tenant")), Ok(()));
    }
}
