//! The scopes that bind a caller, their order, and their spending after a restart.

use std::time::Duration;

use tollgate_admission::{AdmissionOptions, CapFigures, Estimate, Limit, MoneyEstimate, Reserve};
use tollgate_domain::{DeviceClass, DeviceNanos, RequestId, Tier, UtcTime};

use super::*;
use crate::test_support::{LIMITS_CONFIG, TestKeys, state_of};

fn config() -> Arc<Config> {
    Arc::new(Config::from_toml(std::path::Path::new("test.toml"), LIMITS_CONFIG).expect("a config"))
}

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

fn model(name: &str) -> ModelName {
    ModelName::new(name).expect("a name")
}

fn key(name: &str) -> KeyId {
    KeyId::new(name).expect("a name")
}

fn plan(name: &str) -> PlanName {
    PlanName::new(name).expect("a name")
}

fn limits(config: &Arc<Config>, keys: TestKeys) -> Limits {
    let admission = Admission::new(AdmissionOptions::default());
    Limits::new(admission, LiveConfig::new(Arc::clone(config)), Arc::new(keys))
}

/// The limits of a key of tenant `of` with `key_plan`.
fn context(limits: &Limits, of: &str, key_plan: Option<&str>) -> Result<CallerContext, Refusal> {
    let caller = Caller { tenant: tenant(of), key: key("k") };
    let config = limits.config.current();
    let found = ConfiguredTenant::find(&config, &caller.tenant).expect("a tenant");
    limits.caller_context(MonotonicTime(1), caller, key_plan.map(plan).as_ref(), found)
}

#[test]
fn scopes_stand_narrowest_first() {
    for (of, plan, of_model, kinds, pool, weight) in [
        ("acme", None, "fake", vec!["tenant", "pool"], None, 3.0),
        ("acme", Some("key"), "fake", vec!["key", "tenant", "pool"], None, 3.0),
        ("other", None, "fake", vec!["pool"], Some("trial"), 2.0),
        ("other", Some("key"), "tollgate-demo", vec!["key", "pool", "model"], Some("trial"), 2.0),
        ("acme", Some("key"), "tollgate-demo", vec!["key", "tenant", "pool", "model"], None, 3.0),
    ] {
        let limits = limits(&config(), TestKeys::default());
        let context = context(&limits, of, plan).expect("limits");
        let bound = limits.bind(&context, &model(of_model));
        let found: Vec<_> = bound.scopes.iter().map(|limited| limited.scope.kind()).collect();
        assert_eq!(found, kinds, "{of} {plan:?} {of_model}");
        // A tenant with a plan of its own has a share of its own, with that weight.
        let share = (bound.pool.as_ref().map(PoolName::as_str), bound.weight);
        assert_eq!(share, (pool, weight), "{of} {plan:?} {of_model}");
        let owner = match pool {
            Some(pool) => ShareOwner::Pool(PoolName::new(pool).expect("a name")),
            None => ShareOwner::Tenant(tenant(of)),
        };
        assert_eq!(context.share_owner(), owner);
    }
}

#[test]
fn key_with_missing_plan_is_refused() {
    let limits = limits(&config(), TestKeys::default());
    let refused = context(&limits, "acme", Some("gone")).expect_err("the plan is missing");
    assert_eq!(refused, Refusal::PlanNotConfigured { plan: plan("gone") });
}

#[test]
fn restored_spend_counts_in_every_scope() {
    let config = config();
    let ids = ["a", "b", "c"].map(key);
    let keys =
        TestKeys { plans: [(ids[0].clone(), plan("key")), (ids[2].clone(), plan("gone"))].into() };
    let limits = limits(&config, keys);
    let row = |of, key: usize, of_model, seconds| SpendRow {
        caller: Caller { tenant: tenant(of), key: ids[key].clone() },
        model: model(of_model),
        class: DeviceClass::cpu(),
        reference: DeviceNanos::from_secs(seconds),
    };
    let day = vec![
        row("acme", 0, "fake", 1),
        row("acme", 0, "tollgate-demo", 2),
        row("acme", 1, "fake", 4),
        row("other", 2, "tollgate-demo", 8),
        row("nobody", 2, "tollgate-demo", 16),
    ];
    let month = vec![row("acme", 0, "fake", 9), row("acme", 1, "fake", 10)];
    let now = UtcTime(1_795_132_800 * 1_000_000_000);
    limits.restore_spend(Spending { day, month, priced: Vec::new() }, now.day());

    let left = |found: Option<CapFigures>| found.map(|cap| cap.remaining.nanos() / 1_000_000_000);
    let acme = context(&limits, "acme", None).expect("limits");
    let scopes = limits.bind(&acme, &model("tollgate-demo")).scopes;
    let keys = ids.iter().map(|id| key_limits(&config, id, &plan("key")).expect("a plan"));
    let found: Vec<_> = keys
        .chain(scopes)
        .zip(1..)
        .map(|(limited, number)| {
            let name = limited.scope.kind();
            let figures = state_of(limits.admission(), number, limited, now);
            (name, left(figures.day), left(figures.month))
        })
        .collect();
    assert_eq!(
        found,
        [
            ("key", Some(7), None),
            ("key", Some(10), None), // the key has no plan, so no spending is kept for it
            ("key", Some(10), None), // the key's plan is missing: its requests are refused
            ("tenant", Some(13), Some(21)),
            ("pool", Some(15), None),
            ("model", Some(24), None),
        ]
    );
}

/// Each day's usage has the prices of its plan and model on that day, and counts in every
/// scope with a budget.
#[test]
fn restored_money_counts_in_every_budget() {
    let text = r#"
        [plans.small]
        budget_per_month = { EUR = "100" }
        [plans.large]
        budget_per_month = { EUR = "1000" }
        [plans.free]
        [pools.all]
        plan = "large"
        [tenants.acme]
        plan = "small"
        pool = "all"
        [tenants.other]
        pool = "all"
        [tenants.open]
        plan = "free"
        [prices.first]
        from = 2026-11-01
        currency = "EUR"
        per_device_second = { cpu = "1" }
        per_million_prompt_tokens = "1000000"
        [prices.second]
        from = 2026-11-10
        currency = "EUR"
        per_device_second = { cpu = "2" }
        batch = "0.5"
        [prices.small]
        from = 2026-11-10
        plan = "small"
        currency = "EUR"
        per_device_second = { cpu = "4" }
    "#;
    let config = Config::from_toml(std::path::Path::new("test.toml"), text).expect("a config");
    let limits = limits(&Arc::new(config), TestKeys::default());
    let row = |of: &str, day: &str, plan: Option<&str>, class: &str| PricedRow {
        caller: Caller { tenant: tenant(of), key: key("k") },
        model: model("tollgate-demo"),
        class: DeviceClass::new(class).expect("a name"),
        tier: Tier::Interactive,
        day: day.parse().expect("a day"),
        plan: plan.map(self::plan),
        used: Priced { reference_ns: 3_000_000_000, prompt_tokens: 2, completion_tokens: 9 },
    };
    let priced = vec![
        row("acme", "2026-11-09", None, "cpu"),          // 3 + 2
        row("acme", "2026-11-10", None, "cpu"),          // 12
        row("acme", "2026-11-11", Some("large"), "cpu"), // 6: it had another plan
        row("acme", "2026-11-11", None, "h200"),         // no price
        row("other", "2026-11-20", None, "cpu"),         // 6
        PricedRow { tier: Tier::Batch, ..row("other", "2026-11-20", None, "cpu") }, // 3
        row("open", "2026-11-20", None, "cpu"),
        row("nobody", "2026-11-20", None, "cpu"),
    ];
    let now = UtcTime(1_795_132_800 * 1_000_000_000);
    assert_eq!(now.day().to_string(), "2026-11-20");
    let spending = Spending { priced, ..Spending::default() };
    limits.restore_spend(spending, now.day());
    let scopes = ["acme", "other", "open"].map(|of| context(&limits, of, None).expect("limits"));
    let scopes: Vec<_> = scopes.into_iter().flat_map(|context| context.scopes).collect();
    let states = limits.states(Moment::new(MonotonicTime(1), now), &scopes, &[]);
    let budgets = states.iter().filter(|it| it.limit == Limit::BudgetPerMonth);
    let used: Vec<_> = budgets.map(|it| (it.scope.to_string(), it.used)).collect();
    let eur = |count: u64| count * 1_000_000_000;
    let pool = ("pool all".to_owned(), eur(32));
    assert_eq!(used, [("tenant acme".to_owned(), eur(23)), pool.clone(), pool]);
}

/// A cap that begins with a reload counts the spend of the ledger; one that goes on does
/// not count it again.
#[test]
fn cap_begun_by_reload_counts_ledger_once() {
    let now = UtcTime(1_795_132_800 * 1_000_000_000);
    let row = |seconds| SpendRow {
        caller: Caller { tenant: tenant("other"), key: key("k") },
        model: model("fake"),
        class: DeviceClass::cpu(),
        reference: DeviceNanos::from_secs(seconds),
    };
    let spending = || Spending { day: vec![row(8)], month: vec![row(9)], priced: Vec::new() };
    let limits = limits(&config(), TestKeys::default());
    limits.restore_spend(spending(), now.day());
    let text = LIMITS_CONFIG.replace("[tenants.other]", "[tenants.other]\nplan = \"own\"");
    let new = Config::from_toml(std::path::Path::new("test.toml"), &text).expect("a config");
    let past = PastSpending { ledger: spending(), batches: Vec::new() };
    limits.adopt(MonotonicTime(1), &new, past, now.day());
    let other = new.tenant(&tenant("other")).expect("a tenant");
    let left = |found: Option<CapFigures>| found.map(|cap| cap.remaining.nanos() / 1_000_000_000);
    let found: Vec<_> = tenant_limits(&new, other)
        .zip(1..)
        .map(|(limited, number)| {
            let name = limited.scope.kind();
            let figures = state_of(limits.admission(), number, limited, now);
            (name, left(figures.day), left(figures.month))
        })
        .collect();
    assert_eq!(found, [("tenant", Some(12), Some(31)), ("pool", Some(22), None)]);
}

/// The cap on the lines of batches binds lines alone, counts what their lines spent before a
/// restart, and begins with a reload.
#[test]
fn batch_cap_binds_lines_alone() {
    let now = UtcTime(1_795_132_800 * 1_000_000_000);
    let text = r#"
        [plans.own]
        [plans.own.batches]
        device_time_per_day = "20s"
        [plans.shared]
        [plans.shared.batches]
        device_time_per_day = { default = "50s" }
        [plans.free]
        [pools.all]
        plan = "shared"
        [tenants.acme]
        plan = "own"
        pool = "all"
        [tenants.other]
        pool = "all"
        [tenants.open]
        plan = "free"
    "#;
    let parsed = |text: &str| {
        Arc::new(Config::from_toml(std::path::Path::new("test.toml"), text).expect("a config"))
    };
    let config = parsed(text);
    let limits = limits(&config, TestKeys::default());
    let spent = |of: &str, seconds| BatchSpend {
        tenant: tenant(of),
        class: DeviceClass::cpu(),
        reference: DeviceNanos::from_secs(seconds),
    };
    limits.restore_batches(&[spent("acme", 8), spent("other", 3), spent("gone", 9)], now.day());
    let of_line = |of: &str| {
        let caller = Caller { tenant: tenant(of), key: key("k") };
        let found = ConfiguredTenant::find(&config, &caller.tenant).expect("a tenant");
        limits.line_context(caller, None, found).expect("limits").scopes
    };
    let left = |scopes: &[ScopeLimits]| -> Vec<(String, u64)> {
        let states =
            limits.states(Moment::new(MonotonicTime(1), now), scopes, &[DeviceClass::cpu()]);
        let caps = states.iter().filter(|state| state.limit == Limit::DeviceTimePerDay);
        caps.map(|state| (state.scope.to_string(), state.remaining / 1_000_000_000)).collect()
    };
    let named = |name: &str, seconds| (name.to_owned(), seconds);
    let pool = named("the batches of pool all", 39);
    assert_eq!(left(&of_line("acme")), [named("the batches of tenant acme", 12), pool.clone()]);
    assert_eq!(left(&of_line("other")), [pool]);
    assert_eq!(left(&of_line("open")), []);
    // The control: a request that is no line of a batch has no such scope.
    assert_eq!(left(&context(&limits, "acme", None).expect("limits").scopes), []);
    // A cap that begins counts what was spent; one that goes on does not count it again.
    let new =
        parsed(&text.replace("[plans.free]", "[plans.free.batches]\ndevice_time_per_day = \"9s\""));
    let batches = vec![spent("acme", 8), spent("open", 2)];
    let past = PastSpending { ledger: Spending::default(), batches };
    limits.adopt(MonotonicTime(2), &new, past, now.day());
    let of = |of: &str| {
        let tenant = new.tenant(&tenant(of)).expect("a tenant");
        left(&batch_limits(&new, tenant).collect::<Vec<_>>())
    };
    assert_eq!(of("open"), [named("the batches of tenant open", 7)]);
    assert_eq!(of("acme")[0].1, 12);
}

/// However many trial tenants there are, together they get the limits of their
/// pool, on one share of its weight, and admission remembers the pool alone.
#[test]
fn pool_limits_thousands_of_tenants_together() {
    const TENANTS: usize = 3_000;
    for (plan_limit, admitted, running, later) in [
        // Forty at once, and one a second from then on.
        ("requests_per_minute = { limit = 60, burst = 40 }", 40, 40, 10),
        ("concurrent = 8\nqueued = 16", 24, 8, 0),
        // Each request may cost 30 ms; the last one gets the remainder.
        ("device_time_per_day = \"1s\"", 34, 34, 0),
    ] {
        let mut text = format!(
            "[plans.trial]\nweight = 0.5\n{plan_limit}\n[pools.trial]\nplan = \"trial\"\n[models.fake]\npath = \"/\"\n"
        );
        let names: Vec<String> = (0..TENANTS).map(|number| format!("trial-{number}")).collect();
        names.iter().for_each(|name| text += &format!("[tenants.{name}]\npool = \"trial\"\n"));
        let config = Config::from_toml(std::path::Path::new("test.toml"), &text).expect("a config");
        let config = Arc::new(config);
        let limits = limits(&config, TestKeys::default());
        let admission = limits.admission().clone();
        let mut holds = Vec::new();
        let ask = |number: usize, seconds: u64| {
            let now = MonotonicTime(seconds * 1_000_000_000);
            let caller = Caller { tenant: tenant(&names[number % TENANTS]), key: key("k") };
            let found = ConfiguredTenant::find(&config, &caller.tenant).expect("a tenant");
            let context = limits.caller_context(now, caller, None, found).ok()?;
            let bound = limits.bind(&context, &model("fake"));
            let share = (bound.pool.as_ref().map(PoolName::as_str), bound.weight);
            assert_eq!(share, (Some("trial"), 0.5), "all requests run on one share");
            let cost = DeviceNanos(30_000_000);
            let reserve = Reserve {
                id: RequestId::from_random(number as u128),
                requester: context.requester(),
                tier: Tier::Interactive,
                is_line: false,
                scopes: bound.scopes,
                counted: bound.counted,
                class: DeviceClass::cpu(),
                estimate: Estimate {
                    tokens: 1,
                    most_tokens: 1,
                    expected: cost,
                    most: cost,
                    worst: cost,
                    least: DeviceNanos(1),
                    grammar_time: Duration::ZERO,
                    money: MoneyEstimate::default(),
                },
                queue_deadline: MonotonicTime(u64::MAX),
                expires: MonotonicTime(u64::MAX),
            };
            admission.reserve(now, UtcTime(1), reserve).ok()
        };
        holds.extend((0..TENANTS).filter_map(|number| ask(number, 1)));
        assert_eq!(holds.len(), admitted, "{plan_limit}");
        let budget: u64 = holds.iter().filter_map(|h| h.budget()).map(DeviceNanos::nanos).sum();
        assert!(budget <= 1_000_000_000, "{plan_limit}: {budget} ns held of a second");
        let status = admission.status();
        assert_eq!((status.running, status.queued), (running, admitted - running), "{plan_limit}");
        assert_eq!(status.scopes, 1, "{plan_limit}");
        let more = (0..TENANTS).filter_map(|number| ask(TENANTS + number, 11));
        let more: Vec<_> = more.collect();
        assert_eq!(more.len(), later, "{plan_limit}");
    }
}
