//! A reload applies what needs no restart, lists the rest, and changes nothing if the
//! new files have a mistake.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::fs;

use tempfile::TempDir;
use tollgate_config::{Config, Effect, Sources};
use tollgate_domain::{ModelName, PlanName, TenantId};

const BASE: &str = r#"
[gateway]
listen = "127.0.0.1:8443"
[plans.team]
concurrent = 4
[plans.trial]
requests_per_minute = 60
[pools.trial]
plan = "trial"
[tenants.acme]
plan = "team"
[tenants."new.customer"]
pool = "trial"
[models.tollgate-demo]
"#;

/// A config file and the sources that name it.
struct File {
    folder: TempDir,
    sources: Sources,
}

impl File {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let sources =
            Sources { path: Some(folder.path().join("tollgate.toml")), ..Sources::default() };
        let file = Self { folder, sources };
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        fs::write(self.folder.path().join("tollgate.toml"), text).expect("writes the file");
    }

    fn load(&self) -> Config {
        Config::load(&self.sources).expect("it is a config")
    }

    /// Reloads `running` from `text` and returns the changes as lines without the folder.
    fn changes(&self, running: &Config, text: &str) -> Vec<String> {
        self.write(text);
        let reload = running.reload().expect("it is a config");
        let folder = format!("{}/", self.folder.path().display());
        reload.changes.iter().map(|change| change.to_string().replace(&folder, "")).collect()
    }
}

#[test]
fn difference_names_key_values_place_and_effect() {
    let file = File::new(BASE);
    let running = file.load();
    let check = |edit: (&str, &str), expected: &[&str]| {
        let text = BASE.replace(edit.0, edit.1);
        assert_ne!(text, BASE, "{}", edit.0);
        assert_eq!(file.changes(&running, &text), expected);
    };
    check(
        ("concurrent = 4", "concurrent = 8"),
        &["plans.team.concurrent: 4 -> 8 (tollgate.toml:5, live)"],
    );
    check(("concurrent = 4", ""), &["plans.team.concurrent: 4 -> not set (default, live)"]);
    check(
        ("[tenants.acme]", "[tenants.apex]"),
        &[
            "tenants.acme.plan: \"team\" -> not set (default, live)",
            "tenants.apex.plan: not set -> \"team\" (tollgate.toml:11, live)",
        ],
    );
    // The defaults of a new entry say nothing.
    check(
        (
            "[models.tollgate-demo]",
            "[prices.next]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nper_device_second = \"1\"\n\
             per_million_prompt_tokens = \"0\"\nper_million_completion_tokens = \"0\"\n\
             [models.tollgate-demo]",
        ),
        &[
            "prices.next.currency: not set -> \"EUR\" (tollgate.toml:16, live)",
            "prices.next.from: not set -> 2026-12-01 (tollgate.toml:15, live)",
            "prices.next.per_device_second: not set -> \"1\" (tollgate.toml:17, live)",
            "prices.next.per_million_completion_tokens: not set -> \"0\" (tollgate.toml:19, live)",
            "prices.next.per_million_prompt_tokens: not set -> \"0\" (tollgate.toml:18, live)",
        ],
    );
    check(
        ("pool = \"trial\"", "plan = \"trial\""),
        &[
            "tenants.\"new.customer\".plan: not set -> \"trial\" (tollgate.toml:13, live)",
            "tenants.\"new.customer\".pool: \"trial\" -> not set (default, live)",
        ],
    );
    check(
        ("[models.tollgate-demo]", "[models.tollgate-demo]\nplan = \"trial\"\ndevices = [\"cpu\"]"),
        &[
            "models.tollgate-demo.devices: [\"auto\"] -> [\"cpu\"] (tollgate.toml:16, restart)",
            "models.tollgate-demo.plan: not set -> \"trial\" (tollgate.toml:15, live)",
        ],
    );
    check(
        (
            "[models.tollgate-demo]",
            "[gateway.idempotency]\nkept = \"2h\"\n[gateway.timeouts]\nidle = \"7s\"\n\
             [worker.health]\nhot = 90\nnvml = \"nvml.so\"\n[models.tollgate-demo]",
        ),
        &[
            "gateway.idempotency.kept: \"1d\" -> \"2h\" (tollgate.toml:15, restart)",
            "gateway.timeouts.idle: \"1m\" -> \"7s\" (tollgate.toml:17, live)",
            "worker.health.hot: 85 -> 90 (tollgate.toml:19, live)",
            "worker.health.nvml: not set -> \"nvml.so\" (tollgate.toml:20, restart)",
        ],
    );
    check(
        ("127.0.0.1:8443", "127.0.0.1:9000"),
        &["gateway.listen: \"127.0.0.1:8443\" -> \"127.0.0.1:9000\" (tollgate.toml:3, restart)"],
    );
    assert!(file.changes(&running, BASE).is_empty());
}

#[test]
fn reload_applies_live_keys_and_keeps_others() {
    let file = File::new(BASE);
    let running = file.load();
    let text = BASE
        .replace("concurrent = 4", "concurrent = 8")
        .replace("127.0.0.1:8443", "127.0.0.1:9000")
        .replace(
            "[models.tollgate-demo]",
            "[gateway.deadlines]\nqueue = \"7s\"\n[worker]\nthreads = 3\n[worker.health]\nhot = 90",
        );
    file.write(&text);
    let reload = running.reload().expect("it is a config");
    let config = &reload.config;
    let team = config.plan(&PlanName::new("team").expect("a name")).expect("a plan");
    assert_eq!(team.limits.concurrent, Some(8));
    assert_eq!(config.gateway().deadlines.queue.as_secs(), 7);
    assert_eq!(config.gateway().listen, running.gateway().listen);
    assert_eq!(config.worker().threads, running.worker().threads);
    assert_eq!(config.worker().health.hot, 90);
    assert_eq!(config.revision(), running.revision() + 1);
    assert_ne!(config.loaded().files_sha256, running.loaded().files_sha256);
    // The second reload finds only the keys that wait for the restart.
    let again = config.reload().expect("it is a config");
    assert!(again.changes.iter().all(|change| change.effect == Effect::Restart));
    let pending: Vec<&str> = again.pending().map(|change| change.key.as_str()).collect();
    assert_eq!(pending, ["gateway.listen", "worker.threads"]);
}

#[test]
fn model_added_by_reload_waits_for_restart() {
    let file = File::new(BASE);
    let running = file.load();
    let model = file.folder.path().join("second");
    fs::create_dir(&model).expect("makes the folder");
    let text = BASE.replace("[tenants.acme]", "[tenants.acme]\nmodels = [\"second\"]");
    file.write(&format!("{text}[models.second]\npath = \"second\"\nplan = \"trial\"\n"));
    let reload = running.reload().expect("it is a config");
    let second = ModelName::new("second").expect("a name");
    assert!(reload.config.model(&second).is_none());
    let acme = reload.config.tenant(&TenantId::new("acme").expect("a name")).expect("a tenant");
    assert!(acme.allows(&second));
    let pending: Vec<&str> = reload.pending().map(|change| change.key.as_str()).collect();
    assert_eq!(pending, ["models.second.path", "models.second.plan"]);
}

#[test]
fn reload_reports_every_mistake_of_new_files() {
    let file = File::new(BASE);
    let running = file.load();
    file.write(&BASE.replace("plan = \"team\"", "plan = \"gone\"").replace("= 4", "= 0"));
    let errors = running.reload().expect_err("two mistakes");
    let keys: Vec<&str> = errors.problems().iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys, ["plans.team.concurrent", "tenants.acme.plan"]);
}

#[test]
fn reload_keeps_plan_of_model_until_restart() {
    let file = File::new(&format!("{BASE}plan = \"trial\"\n"));
    let running = file.load();
    let text = BASE.replace("[models.tollgate-demo]", "[models.other]\npath = \".\"");
    let text = text.replace("trial", "free");
    file.write(&text);
    let errors = running.reload().expect_err("the served model needs its plan").to_string();
    assert!(errors.starts_with("default: models.tollgate-demo.plan: the model is served until"));
    file.write(&format!("{text}[plans.trial]\n"));
    running.reload().expect("the plan stays");
}

#[test]
fn reload_does_not_add_demo_tenant() {
    let file = File::new(BASE);
    let running = file.load();
    file.write("");
    let errors = running.reload().expect_err("no tenants").to_string();
    assert!(errors.contains("a reload does not add the demo tenant"), "{errors}");
    // A start from the demo goes on with it, and ends it with the first tenant.
    let demo = file.load();
    assert!(demo.reload().expect("the demo").config.is_demo());
    file.write(BASE);
    assert!(!demo.reload().expect("tenants").config.is_demo());
}
