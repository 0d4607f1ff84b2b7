//! Figures by tenant. The label `tenant` is bounded: only tenants of the config have one, of
//! these at most [`MOST_NAMED`], and the rest is `other`. Where the config has more, those
//! with the most device time today have a label.
//!
//! No counter of these goes back because a tenant loses its label: what a tenant without a
//! label does counts under `other`, and nothing is moved between the two.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tollgate_admission::{HeldRequests, Limit, LimitState};
use tollgate_config::Config;
use tollgate_domain::{DeviceClass, DeviceNanos, TenantId, UtcDay};

use super::gauge;

/// The end of a request for work, from the view of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// The request was answered whole.
    Answered,
    /// The request repeated an idempotency key and got the first answer.
    Repeated,
    /// The request was refused, for example by a limit.
    Refused,
    /// The gateway or a worker failed, or an answer that had begun was cut.
    Failed,
    /// The client left before the end.
    Cancelled,
}

impl Outcome {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Repeated => "repeated",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The figures of all tenants.
#[derive(Debug)]
pub(super) struct TenantMetrics {
    registry: Registry,
    requests: Family<OutcomeLabels, Counter>,
    refusals: Family<RefusalLabels, Counter>,
    device_seconds: Family<ClassLabels, Counter<f64, AtomicU64>>,
    waiting: Family<TenantLabel, Gauge>,
    running: Family<TenantLabel, Gauge>,
    weight: Family<TenantLabel, Gauge<f64, AtomicU64>>,
    cap_used: Family<CapLabels, Gauge<f64, AtomicU64>>,
    counts: Mutex<Counts>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantLabel {
    tenant: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    tenant: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    tenant: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabels {
    tenant: String,
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CapLabels {
    tenant: String,
    cap: &'static str,
    class: String,
}

/// The figures of tenants that a scrape reads from other components.
#[derive(Default)]
pub(crate) struct TenantReadings<'a> {
    /// The config in force; `None` shows nothing but counters.
    pub(crate) config: Option<&'a Config>,
    /// The requests of each tenant that run and wait.
    pub(crate) held: HashMap<TenantId, HeldRequests>,
    /// The classes of the connected devices.
    pub(crate) classes: Vec<DeviceClass>,
    /// Returns the state of a tenant's limits and of its pool's.
    pub(crate) limits: Option<&'a LimitsOf<'a>>,
    /// The UTC day of the scrape.
    pub(crate) today: UtcDay,
}

/// Returns the state of a tenant's limits.
pub(crate) type LimitsOf<'a> = dyn Fn(&TenantId) -> Vec<LimitState> + 'a;

/// The counts behind the families.
#[derive(Debug, Default)]
struct Counts {
    /// The tenants that have a label.
    named: HashMap<TenantId, TenantCounts>,
    /// The tenants that have none.
    other: TenantCounts,
    /// The device time of each tenant on `day`, ns. Bounded by the tenants of the config.
    today: HashMap<TenantId, u64>,
    day: UtcDay,
    /// The classes of devices that any figure has named.
    classes: BTreeSet<DeviceClass>,
}

/// The counts of one label.
#[derive(Debug, Default)]
struct TenantCounts {
    outcomes: BTreeMap<Outcome, u64>,
    refusals: BTreeMap<&'static str, u64>,
    device: BTreeMap<DeviceClass, DeviceNanos>,
}

impl TenantCounts {
    fn refused(&mut self, kind: &'static str) {
        // The last kind stands for all that come after it, so the series are bounded.
        let is_new = !self.refusals.contains_key(kind);
        let kind = if is_new && self.refusals.len() + 1 >= MOST_KINDS { OTHER } else { kind };
        *self.refusals.entry(kind).or_default() += 1;
    }
}

impl Counts {
    /// Returns the largest number of tenants with a label.
    fn most_named(&self) -> usize {
        // A class has its device time, a cap of the day and a cap of the month.
        let each = OUTCOMES + MOST_KINDS + GAUGES + 3 * self.classes.len();
        // One label is `other`.
        MOST_NAMED.min((MOST_SERIES / each).saturating_sub(1))
    }

    /// Returns the counts under which `tenant`, which must be one of the config's, counts.
    fn of(&mut self, tenant: &TenantId) -> &mut TenantCounts {
        // Until the next scrape chooses, labels go to the tenants that come first.
        let has_room = self.named.len() < self.most_named();
        if has_room && !self.named.contains_key(tenant) {
            self.named.insert(tenant.clone(), TenantCounts::default());
        }
        self.named.get_mut(tenant).unwrap_or(&mut self.other)
    }

    /// Chooses the tenants of `config` that have a label from now on.
    fn choose(&mut self, config: &Config, today: UtcDay) {
        if self.day != today {
            (self.day, self.today) = (today, HashMap::new());
        }
        let most = self.most_named();
        let mut ranked: Vec<_> = config
            .tenants()
            .map(|tenant| {
                let spent = self.today.get(&tenant.name).copied().unwrap_or(0);
                // Among equals those that have a label keep it, then names decide.
                let is_new = !self.named.contains_key(&tenant.name);
                (std::cmp::Reverse(spent), is_new, &tenant.name)
            })
            .collect();
        if ranked.len() > most {
            // Only the set counts, so the tenants need not be sorted.
            ranked.select_nth_unstable(most);
            ranked.truncate(most);
        }
        let chosen: HashSet<&TenantId> = ranked.iter().map(|(_, _, name)| *name).collect();
        self.named.retain(|name, _| chosen.contains(name));
        for name in chosen {
            if !self.named.contains_key(name) {
                self.named.insert(name.clone(), TenantCounts::default());
            }
        }
    }
}

impl TenantMetrics {
    pub(super) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("tollgate_tenant"),
            requests: Family::default(),
            refusals: Family::default(),
            device_seconds: Family::default(),
            waiting: Family::default(),
            running: Family::default(),
            weight: Family::default(),
            cap_used: Family::default(),
            counts: Mutex::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register("requests", "Requests for work, by their end", self.requests.clone());
        registry.register(
            "refusals",
            "Requests for work that were refused, by the limit or other reason",
            self.refusals.clone(),
        );
        registry.register_with_unit(
            "device",
            "Device time attributed to the tenant's requests",
            Unit::Seconds,
            self.device_seconds.clone(),
        );
        registry.register(
            "waiting",
            "Requests that wait for a place under a limit on concurrency",
            self.waiting.clone(),
        );
        registry.register(
            "running",
            "Requests that every limit lets run; they may wait at a worker",
            self.running.clone(),
        );
        registry.register(
            "weight",
            "Weight of the tenant's share of a contended device; a pool has one share for all its tenants",
            self.weight.clone(),
        );
        registry.register(
            "cap_used_ratio",
            "Part of a cap that is spent or held, of the tenant's own or of its pool's, the larger",
            self.cap_used.clone(),
        );
    }

    /// Counts a request for work. `tenant` must be one of the config's.
    pub(super) fn count(&self, tenant: &TenantId, outcome: Outcome, kind: Option<&'static str>) {
        let mut counts = self.lock();
        let of_tenant = counts.of(tenant);
        *of_tenant.outcomes.entry(outcome).or_default() += 1;
        if let Some(kind) = kind {
            of_tenant.refused(kind);
        }
    }

    /// Adds device time of `tenant`, which must be one of the config's.
    pub(super) fn used(&self, tenant: &TenantId, class: &DeviceClass, time: DeviceNanos) {
        if time == DeviceNanos::ZERO {
            return;
        }
        let mut counts = self.lock();
        counts.classes.insert(class.clone());
        let spent = counts.today.entry(tenant.clone()).or_default();
        *spent = spent.saturating_add(time.nanos());
        *counts.of(tenant).device.entry(class.clone()).or_default() += time;
    }

    /// Sets the families from the counts and `readings`, and returns the registry.
    pub(super) fn read(&self, readings: &TenantReadings<'_>) -> &Registry {
        let mut counts = self.lock();
        // Before the choice, because each class adds series to every label.
        counts.classes.extend(readings.classes.iter().cloned());
        if let Some(config) = readings.config {
            counts.choose(config, readings.today);
        }
        self.clear();
        for (name, of_tenant) in &counts.named {
            self.show_counts(name.as_str(), of_tenant);
        }
        self.show_counts(OTHER, &counts.other);
        if let Some(config) = readings.config {
            self.show_held(&counts, &readings.held);
            for name in counts.named.keys() {
                self.show_share(config, name, readings);
            }
        }
        &self.registry
    }

    /// Removes all series, so that a tenant without a label keeps none.
    fn clear(&self) {
        self.requests.clear();
        self.refusals.clear();
        self.device_seconds.clear();
        self.waiting.clear();
        self.running.clear();
        self.weight.clear();
        self.cap_used.clear();
    }

    fn show_counts(&self, tenant: &str, counts: &TenantCounts) {
        let name = || tenant.to_owned();
        for (outcome, count) in &counts.outcomes {
            let labels = OutcomeLabels { tenant: name(), outcome: outcome.as_str() };
            // Added, because a tenant may be named `other`.
            self.requests.get_or_create(&labels).inc_by(*count);
        }
        for (kind, count) in &counts.refusals {
            let labels = RefusalLabels { tenant: name(), kind };
            self.refusals.get_or_create(&labels).inc_by(*count);
        }
        for (class, time) in &counts.device {
            let labels = ClassLabels { tenant: name(), class: class.to_string() };
            self.device_seconds.get_or_create(&labels).inc_by(time.as_secs_f64());
        }
    }

    fn show_held(&self, counts: &Counts, held: &HashMap<TenantId, HeldRequests>) {
        let show = |tenant: &str, held: HeldRequests| {
            let label = TenantLabel { tenant: tenant.to_owned() };
            self.waiting.get_or_create(&label).inc_by(gauge(held.waiting));
            self.running.get_or_create(&label).inc_by(gauge(held.running));
        };
        for tenant in counts.named.keys() {
            show(tenant.as_str(), held.get(tenant).copied().unwrap_or_default());
        }
        // Also without such tenants, so that the series never vanishes.
        show(OTHER, HeldRequests::default());
        for (_, held) in held.iter().filter(|(tenant, _)| !counts.named.contains_key(*tenant)) {
            show(OTHER, *held);
        }
    }

    /// Shows the weight of a tenant and its use of caps.
    fn show_share(&self, config: &Config, name: &TenantId, readings: &TenantReadings<'_>) {
        let Some(tenant) = config.tenant(name) else { return };
        let label = TenantLabel { tenant: name.to_string() };
        self.weight.get_or_create(&label).set(tenant.weight);
        let Some(limits) = readings.limits else { return };
        for LimitState { limit, class, value, used, .. } in limits(name) {
            let Some(cap) = cap_label(limit) else { continue };
            // A budget counts the usage of all classes.
            let class = class.map_or_else(|| "all".to_owned(), |class| class.to_string());
            let labels = CapLabels { tenant: name.to_string(), cap, class };
            // A cap of nothing is used up.
            let ratio = if value == 0 { 1.0 } else { used as f64 / value as f64 };
            // A tenant and its pool share the label, and the cap that is nearer its end counts.
            let shown = self.cap_used.get_or_create(&labels);
            shown.set(ratio.max(shown.get()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Every change under the lock is complete before a panic could happen.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cap_label(limit: Limit) -> Option<&'static str> {
    match limit {
        Limit::DeviceTimePerDay => Some("day"),
        Limit::DeviceTimePerMonth => Some("month"),
        Limit::BudgetPerMonth => Some("budget"),
        _ => None,
    }
}

/// The label of all tenants that have none of their own, and of all kinds beyond the bound.
/// The figures of a tenant with this name and of such tenants are one.
const OTHER: &str = "other";

/// Labels of tenants at most, `other` not counted.
const MOST_NAMED: usize = 200;
/// Series of all tenants at most.
const MOST_SERIES: usize = 5_000;
/// Kinds of refusals of one label at most.
const MOST_KINDS: usize = 12;
/// Ends of requests.
const OUTCOMES: usize = 5;
/// Gauges of one label: waiting, running, weight.
const GAUGES: usize = 3;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use prometheus_client::encoding::text::encode_registry;

    use super::*;

    fn config(tenants: usize) -> Config {
        let mut text = String::from("[plans.p]\n");
        for number in 0..tenants {
            text += &format!("[tenants.t{number:04}]\nplan = \"p\"\n");
        }
        Config::from_toml(Path::new("test.toml"), &text).unwrap()
    }

    fn tenant(number: usize) -> TenantId {
        TenantId::new(&format!("t{number:04}")).unwrap()
    }

    fn scrape(metrics: &TenantMetrics, config: &Config, today: u32) -> String {
        let readings = TenantReadings {
            config: Some(config),
            classes: vec![DeviceClass::cpu()],
            today: UtcDay(today),
            ..TenantReadings::default()
        };
        let mut text = String::new();
        encode_registry(&mut text, metrics.read(&readings)).unwrap();
        text
    }

    fn value(text: &str, series: &str) -> Option<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(series))?;
        line.trim().parse().ok()
    }

    fn series(text: &str) -> usize {
        text.lines().filter(|line| !line.starts_with('#')).count()
    }

    #[test]
    fn tenants_of_small_config_have_labels_at_once() {
        let (metrics, config) = (TenantMetrics::new(), config(3));
        metrics.count(&tenant(1), Outcome::Refused, Some("requests_per_minute"));
        metrics.count(&tenant(1), Outcome::Answered, None);
        metrics.used(&tenant(1), &DeviceClass::cpu(), DeviceNanos::from_secs(2));
        let text = scrape(&metrics, &config, 1);
        for (name, expected) in [
            ("tollgate_tenant_requests_total{tenant=\"t0001\",outcome=\"refused\"}", Some(1.0)),
            ("tollgate_tenant_requests_total{tenant=\"t0001\",outcome=\"answered\"}", Some(1.0)),
            (
                "tollgate_tenant_refusals_total{tenant=\"t0001\",kind=\"requests_per_minute\"}",
                Some(1.0),
            ),
            ("tollgate_tenant_device_seconds_total{tenant=\"t0001\",class=\"cpu\"}", Some(2.0)),
            ("tollgate_tenant_running{tenant=\"t0002\"}", Some(0.0)),
            ("tollgate_tenant_weight{tenant=\"t0000\"}", Some(1.0)),
            ("tollgate_tenant_requests_total{tenant=\"other\",outcome=\"answered\"}", None),
        ] {
            assert_eq!(value(&text, name), expected, "{name} in:\n{text}");
        }
    }

    /// The rest counts as `other`, whose counters never go back, and tomorrow others may
    /// have a label.
    #[test]
    fn tenants_with_most_device_time_today_have_labels() {
        let (metrics, config) = (TenantMetrics::new(), config(300));
        let _ = scrape(&metrics, &config, 1);
        let answered = |text: &str, name: &str| {
            let series =
                format!("tollgate_tenant_requests_total{{tenant=\"{name}\",outcome=\"answered\"}}");
            value(text, &series)
        };
        for _ in 0..7 {
            metrics.count(&tenant(250), Outcome::Answered, None);
        }
        metrics.used(&tenant(250), &DeviceClass::cpu(), DeviceNanos(1));
        let text = scrape(&metrics, &config, 1);
        assert_eq!(answered(&text, "other"), Some(7.0), "counted before it had a label");
        metrics.count(&tenant(250), Outcome::Answered, None);
        let text = scrape(&metrics, &config, 1);
        assert_eq!((answered(&text, "t0250"), answered(&text, "other")), (Some(1.0), Some(7.0)));
        // The last of those that did nothing lost its label.
        assert!(text.contains("tenant=\"t0198\"") && !text.contains("tenant=\"t0199\""));
        // On a new day nothing changes until somebody uses a device.
        let text = scrape(&metrics, &config, 2);
        assert_eq!(answered(&text, "t0250"), Some(1.0));
    }

    #[test]
    fn tenants_that_left_the_config_have_no_label() {
        let metrics = TenantMetrics::new();
        metrics.count(&tenant(2), Outcome::Answered, None);
        assert!(scrape(&metrics, &config(3), 1).contains("t0002"));
        assert!(!scrape(&metrics, &config(2), 1).contains("t0002"));
    }

    #[test]
    fn series_of_tenants_stay_within_their_bound() {
        let (metrics, config) = (TenantMetrics::new(), config(1_000));
        let kinds: Vec<&'static str> = (0..40).map(|n| &*format!("kind_{n}").leak()).collect();
        for class in ["cpu", "h200", "b300"] {
            let class = DeviceClass::new(class).unwrap();
            for number in 0..1_000 {
                for kind in &kinds {
                    metrics.count(&tenant(number), Outcome::Refused, Some(kind));
                }
                for outcome in [Outcome::Answered, Outcome::Repeated, Outcome::Cancelled] {
                    metrics.count(&tenant(number), outcome, None);
                }
                metrics.used(&tenant(number), &class, DeviceNanos(7));
            }
        }
        let most = series(&scrape(&metrics, &config, 1));
        assert!((3_000..=MOST_SERIES).contains(&most), "{most}");
    }
}
