//! Each mistake is reported with its file, line and key, and all mistakes are
//! reported together.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::path::{Path, PathBuf};

use tollgate_config::{Config, Flags, Sources};

fn errors(text: &str) -> String {
    Config::from_toml(Path::new("t.toml"), text).expect_err(text).to_string()
}

/// One mistake, one line.
#[test]
#[allow(clippy::too_many_lines, reason = "one table of cases")]
fn mistakes_have_place_and_key() {
    let tenants = "[plans.p]\n[tenants.a]\nplan = \"p\"\n";
    for (text, expected) in [
        // Keys and kinds.
        (
            "[gateway]\nlisten_ = \"\"",
            "t.toml:2: gateway.listen_: unknown key; did you mean \"listen\"?",
        ),
        (
            "[gatway]\nlisten = \"127.0.0.1:1\"",
            "t.toml:1: gatway: unknown key; did you mean \"gateway\"?",
        ),
        (
            "[gateway.tls]\nzzz = 1",
            "t.toml:2: gateway.tls.zzz: unknown key; the keys are certificate, key",
        ),
        ("gateway = 3", "t.toml:1: gateway: expected a table, found 3"),
        (
            "[gateway]\nlisten = \"localhost\"",
            "t.toml:2: gateway.listen: expected an address and port such as \"127.0.0.1:8443\", found \"localhost\"",
        ),
        (
            "[gateway.proxies]\ntrusted = [\"10.0.0.0/33\"]",
            "t.toml:2: gateway.proxies.trusted: expected a network such as \"10.0.0.0/8\", \"192.0.2.7\" or \"2001:db8::/32\", found \"10.0.0.0/33\"",
        ),
        (
            "[gateway.cors]\norigins = [\"https://app.example/\"]",
            "t.toml:2: gateway.cors.origins: expected an origin such as \"https://app.example\" or \"http://localhost:5173\", or \"*\", found \"https://app.example/\"",
        ),
        (
            "[gateway.cors]\norigins = [\"https://app.example:443\"]",
            "t.toml:2: gateway.cors.origins: expected an origin such as \"https://app.example\" or \"http://localhost:5173\", or \"*\", found \"https://app.example:443\"",
        ),
        (
            "[gateway.proxies]\ntrusted = [\"::1\"]\nclient_from = \"forwarded\"",
            "t.toml:3: gateway.proxies.client_from: expected \"x-forwarded-for\" or \"proxy-v2\", found \"forwarded\"",
        ),
        (
            "[gateway.proxies]\nclient_from = \"proxy-v2\"",
            "t.toml:2: gateway.proxies.client_from: also needs gateway.proxies.trusted; otherwise no proxy is trusted",
        ),
        (
            "[gateway.jobs]\nfolder = \"batches\"",
            "t.toml:2: gateway.jobs.folder: also needs [cluster.postgres], which has the list of files and batches",
        ),
        (
            "[gateway.timeouts]\nidle = 5",
            "t.toml:2: gateway.timeouts.idle: expected a duration such as \"250ms\", \"2s\" or \"1h\", found 5",
        ),
        (
            "[gateway.timeouts]\nidle = \"0s\"",
            "t.toml:2: gateway.timeouts.idle: must be from \"1ms\" to \"1d\"",
        ),
        (
            "[gateway.requests]\nbody = \"much\"",
            "t.toml:2: gateway.requests.body: expected a size such as \"64KiB\" or \"2MiB\", found \"much\"",
        ),
        (
            "[gateway.requests]\n\n\nchoices = 0",
            "t.toml:4: gateway.requests.choices: must be from 1 to 128",
        ),
        (
            "[worker]\nmax_sequences = -1",
            "t.toml:2: worker.max_sequences: expected a whole number from 0 to 4294967295, found -1",
        ),
        (
            "[worker]\ndeterministic = 1",
            "t.toml:2: worker.deterministic: expected true or false, found 1",
        ),
        // Prices.
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nper_device_second = 0.1",
            "t.toml:4: prices.a.per_device_second: expected a price in quotes such as \"0.0025\", from 0 to 1000000 with at most nine digits after the point, found a number with a fraction",
        ),
        (
            "[prices.a]\nfrom = 2026-02-20T10:00:00Z\ncurrency = \"EUR\"",
            "t.toml:2: prices.a.from: expected a day from 1970 to 9999 such as 2026-12-01, found a date",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nbatch = \"0\"",
            "t.toml:4: prices.a.batch: expected a factor in quotes such as \"0.5\", more than 0 and at most 1 with at most nine digits after the point, found \"0\"",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nbatch = 0.5",
            "t.toml:4: prices.a.batch: expected a factor in quotes such as \"0.5\", more than 0 and at most 1 with at most nine digits after the point, found a number with a fraction",
        ),
        ("[prices.a]\nfrom = 2026-12-01", "t.toml:1: prices.a.currency: is required"),
        ("[prices.a]\ncurrency = \"EUR\"", "t.toml:1: prices.a.from: is required"),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"euro\"",
            "t.toml:3: prices.a.currency: expected a currency of three capital letters such as \"EUR\", found \"euro\"",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nplan = \"gold\"\n[plans.team]",
            "t.toml:4: prices.a.plan: unknown plan \"gold\"; known: demo, team",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\n[prices.b]\nfrom = \"2026-12-01\"\ncurrency = \"EUR\"",
            "t.toml:5: prices.b.from: prices.a.from begins on 2026-12-01, too (t.toml:2); a plan has one price list a day for a model",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nmodel = \"gone\"",
            "t.toml:4: prices.a.model: unknown model \"gone\"; known: tollgate-demo; for a model that is no longer served, set retired = true",
        ),
        (
            "[plans.p]\nbudget_per_month = { EUR = \"5\" }",
            "t.toml:2: plans.p.budget_per_month: also needs a price list in EUR ([prices.NAME])",
        ),
        (
            "[plans.p]\nbudget_per_month = { USD = 5 }\n[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"",
            "t.toml:2: plans.p.budget_per_month: no price list is in USD; the lists are in EUR",
        ),
        (
            "[plans.p]\nbudget_per_month = { EUR = \"5\", USD = \"5\" }",
            "t.toml:2: plans.p.budget_per_month: expected a table of one currency such as { EUR = \"500\" }, found a table",
        ),
        (
            "[plans.p]\nbudget_per_month = { EUR = 0.5 }",
            "t.toml:2: plans.p.budget_per_month.EUR: expected an amount in quotes such as \"500\", more than 0 and at most 1000000000, with at most nine digits after the point, found a number with a fraction",
        ),
        (
            "[plans.p]\nbudget_per_month = { EUR = \"0\" }",
            "t.toml:2: plans.p.budget_per_month.EUR: expected an amount in quotes such as \"500\", more than 0 and at most 1000000000, with at most nine digits after the point, found \"0\"",
        ),
        (
            "[plans.p]\nbudget_per_month = { euro = \"5\" }",
            "t.toml:2: plans.p.budget_per_month.euro: not a currency of three capital letters such as EUR",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nretired = true",
            "t.toml:4: prices.a.retired: also needs model",
        ),
        (
            "[plans.team]\n[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\nplan = \"team\"\n[prices.b]\nfrom = 2026-12-05\ncurrency = \"EUR\"\nmodel = \"tollgate-demo\"\n[prices.c]\nfrom = 2026-12-06\ncurrency = \"EUR\"\nplan = \"team\"\nmodel = \"tollgate-demo\"",
            "t.toml:9: prices.b.model: from 2026-12-05 on, prices.a (t.toml:5) applies to this model under plan \"team\", too; write a list with plan = \"team\" and model = \"tollgate-demo\" that begins by then",
        ),
        (
            "[prices.a]\nfrom = 2026-12-01\ncurrency = \"EUR\"\n[prices.b]\nfrom = 2027-01-01\ncurrency = \"USD\"",
            "t.toml:6: prices.b.currency: USD differs from prices.a.currency, EUR (t.toml:3); all lists must have the same currency",
        ),
        // Limits.
        (
            "[plans.p]\nrequests_per_minute = 0",
            "t.toml:2: plans.p.requests_per_minute: must be at least 1; 0 would refuse every request",
        ),
        (
            "[plans.p]\nrequests_per_minute = { limit = 60, burst = 0 }",
            "t.toml:2: plans.p.requests_per_minute.burst: must be at least 1; 0 would refuse every request",
        ),
        (
            "[plans.p]\ntokens_per_minute = { burst = 5 }",
            "t.toml:2: plans.p.tokens_per_minute: burst also needs limit",
        ),
        ("[plans.p]\nconcurrent = 0", "t.toml:2: plans.p.concurrent: must be from 1 to 1000000"),
        (
            "[plans.p]\nqueued = 5",
            "t.toml:2: plans.p.queued: also needs concurrent: without a limit no request waits",
        ),
        (
            "[plans.p]\nlargest_job = \"0s\"",
            "t.toml:2: plans.p.largest_job: expected a duration above 0, found \"0s\"",
        ),
        (
            "[plans.p]\nlargest_job = { \"no class\" = \"1s\" }",
            "t.toml:2: plans.p.largest_job.\"no class\": device class \"no class\" is not a name: use 1 to 128 of A-Z a-z 0-9 . _ - : / and start with a letter or digit",
        ),
        ("[plans.p]\nweight = 0", "t.toml:2: plans.p.weight: must be from 0.001 to 1000.0"),
        (
            "[plans.p]\ngrammar_time_per_minute = \"10ms\"",
            "t.toml:2: plans.p.grammar_time_per_minute: must allow 20ms at once: a request whose answer has a form takes that much in advance",
        ),
        // Limits that contradict one another.
        (
            "[plans.p]\nlargest_job = \"2h\"\ndevice_time_per_day = \"1h\"",
            "t.toml:2: plans.p.largest_job: 2h for every other class is more than plans.p.device_time_per_day allows, 1h (t.toml:3)",
        ),
        (
            "[plans.p]\nlargest_job = { h200 = \"30s\" }\ndevice_time_per_minute = { h200 = \"20s\" }",
            "t.toml:2: plans.p.largest_job: 30s for class h200 is more than plans.p.device_time_per_minute allows, 20s (t.toml:3)",
        ),
        (
            "[plans.p]\ndevice_time_per_day = \"2h\"\ndevice_time_per_month = { h200 = \"1h\" }",
            "t.toml:2: plans.p.device_time_per_day: 2h for class h200 is more than plans.p.device_time_per_month allows, 1h (t.toml:3)",
        ),
        (
            "[plans.p]\ndevice_time_per_day = { h200 = \"1h\", default = \"3h\" }\n\
             [plans.p.batches]\ndevice_time_per_day = \"2h\"",
            "t.toml:4: plans.p.batches.device_time_per_day: 2h for class h200 is more than plans.p.device_time_per_day allows, 1h (t.toml:2)",
        ),
        (
            "[plans.p]\ndevice_time_per_month = \"1h\"\n[plans.p.batches]\ndevice_time_per_day = \"2h\"",
            "t.toml:4: plans.p.batches.device_time_per_day: 2h for every other class is more than plans.p.device_time_per_month allows, 1h (t.toml:2)",
        ),
        (
            "[plans.p]\nlargest_job = \"2h\"\n[plans.s]\ndevice_time_per_day = \"1h\"\n[pools.q]\nplan = \"s\"\n\
             [tenants.a]\nplan = \"p\"\npool = \"q\"\n[tenants.b]\nplan = \"p\"\npool = \"q\"",
            "t.toml:2: plans.p.largest_job: 2h for every other class is more than plans.s.device_time_per_day allows, 1h (t.toml:4); tenants.a has both",
        ),
        (
            "[plans.p]\nlargest_job = \"30s\"\n[plans.s]\ndevice_time_per_minute = { h200 = { limit = \"1m\", burst = \"20s\" } }\n\
             [pools.q]\nplan = \"s\"\n[tenants.a]\nplan = \"p\"\npool = \"q\"",
            "t.toml:2: plans.p.largest_job: 30s for class h200 is more than plans.s.device_time_per_minute allows, 20s (t.toml:4); tenants.a has both",
        ),
        // Names.
        (
            "[tenants.a]\nplan = \"gold\"",
            "t.toml:2: tenants.a.plan: unknown plan \"gold\"; known: none",
        ),
        ("[tenants.a]", "t.toml:1: tenants.a: needs plan or pool"),
        (
            "[plans.p]\n[pools.q]\nplan = \"p\"\n[tenants.a]\nplan = \"x\"\npool = \"q\"",
            "t.toml:5: tenants.a.plan: unknown plan \"x\"; known: p",
        ),
        (
            "[models.tollgate-demo]\nplan = \"x\"",
            "t.toml:2: models.tollgate-demo.plan: unknown plan \"x\"; known: demo",
        ),
        (
            "[plans.p]\n[pools.q]\nplan = \"p\"\n[tenants.a]\npool = \"r\"",
            "t.toml:5: tenants.a.pool: unknown pool \"r\"; known: q",
        ),
        ("[pools.q]", "t.toml:1: pools.q.plan: is required"),
        (
            &format!("{tenants}models = [\"gpt\"]"),
            "t.toml:4: tenants.a.models: unknown model \"gpt\"; known: tollgate-demo",
        ),
        (
            &format!("{tenants}models = []"),
            "t.toml:4: tenants.a.models: expected a list of 1 to 1024 entries, found 0",
        ),
        (
            "[models.m]\n",
            "t.toml:1: models.m.path: is required; only tollgate-demo is part of the program and needs no folder",
        ),
        ("[models.m]\npath = \"/nowhere/m\"", "t.toml:2: models.m.path: /nowhere/m does not exist"),
        (
            "[models.tollgate-demo]\ndevices = [\"tpu\"]",
            "t.toml:2: models.tollgate-demo.devices: expected \"auto\", \"cpu\", \"cuda\", \"cuda:INDEX\" or \"cuda:UUID\", found \"tpu\"",
        ),
        // The synthetic engine.
        (
            "[worker]\nengine = \"real\"",
            "t.toml:2: worker.engine: expected \"model\" or \"synthetic\", found \"real\"",
        ),
        (
            "[worker.synthetic]\nsequence = \"100us\"",
            "t.toml:2: worker.synthetic.sequence: 100us is less than worker.synthetic.prefill_token, 210us (default); a sampled token costs at least as much as a prompt token",
        ),
        // Listeners and deadlines.
        (
            "[gateway]\nlisten = \"127.0.0.1:9000\"\nadmin_listen = \"127.0.0.1:9000\"",
            "t.toml:3: gateway.admin_listen: 127.0.0.1:9000 is already used by gateway.listen, 127.0.0.1:9000 (t.toml:2)",
        ),
        (
            "[gateway]\nlisten = \"0.0.0.0:8443\"",
            "t.toml:2: gateway.listen: 0.0.0.0:8443 can be reached from other hosts, but no tenant is configured; the demo tenant is for loopback only: configure tenants or listen on 127.0.0.1",
        ),
        (
            "[gateway.tls]\nkey = \"/\"",
            "t.toml:2: gateway.tls.key: also needs gateway.tls.certificate",
        ),
        (
            "[gateway.deadlines]\nqueue = \"20s\"\nrequest = \"10s\"",
            "t.toml:2: gateway.deadlines.queue: 20s is longer than gateway.deadlines.request, 10s (t.toml:3)",
        ),
        (
            "[gateway.connections]\nper_source = 5000",
            "t.toml:2: gateway.connections.per_source: 5000 is more than gateway.connections.total, 4096 (default)",
        ),
        // Issuers.
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"HS256\"]\nkeys = [\"/\"]",
            "t.toml:4: auth.jwt.i.algorithms: expected a signature with a public key: RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384 or EdDSA, found \"HS256\"",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\", \"ES256\"]\nkeys = [\"/\"]",
            "t.toml:4: auth.jwt.i.algorithms: needs one issuer for each key family (EC, RSA): one set of keys has one family",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]",
            "t.toml:1: auth.jwt.i: needs keys, jwks or jwks_url",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]\njwks_url = \"http://i/\"",
            "t.toml:5: auth.jwt.i.jwks_url: expected an address that begins with https://, found \"http://i/\"",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]\njwks = \"/\"\njwks_url = \"https://i/\"",
            "t.toml:5: auth.jwt.i.jwks: conflicts with auth.jwt.i.jwks_url (t.toml:6); an issuer has one source of keys",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]\njwks = \"/\"\njwks_ca = \"/\"",
            "t.toml:6: auth.jwt.i.jwks_ca: also needs jwks_url",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]\njwks = \"/\"\ntenants = [\"nobody\"]",
            "t.toml:6: auth.jwt.i.tenants: unknown tenant \"nobody\"; known: demo",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\nalgorithms = [\"RS256\"]\njwks = \"/\"",
            "t.toml:1: auth.jwt.i.audience: is required",
        ),
        (
            "[auth.jwt.i]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]\njwks = \"/\"\n\
             [auth.jwt.j]\nissuer = \"i\"\naudience = \"a\"\nalgorithms = [\"RS256\"]\njwks = \"/\"",
            "t.toml:7: auth.jwt.j.issuer: \"i\" with the same audience is also auth.jwt.i.issuer (t.toml:2)",
        ),
    ] {
        assert_eq!(errors(text), expected, "{text}");
    }
}

#[test]
fn mistakes_are_reported_together_in_order() {
    let text = "\
[gateway]
listen = 5
[gateway.timeouts]
idel = \"1m\"
[plans.team]
concurrent = \"many\"
largest_job = \"2h\"
device_time_per_day = \"1h\"
[tenants.acme]
plan = \"teem\"
";
    insta::assert_snapshot!(errors(text), @r#"
    t.toml:2: gateway.listen: expected an address and port such as "127.0.0.1:8443", found 5
    t.toml:4: gateway.timeouts.idel: unknown key; did you mean "idle"?
    t.toml:6: plans.team.concurrent: expected a whole number from 0 to 4294967295, found "many"
    t.toml:7: plans.team.largest_job: 2h for every other class is more than plans.team.device_time_per_day allows, 1h (t.toml:8)
    t.toml:10: tenants.acme.plan: unknown plan "teem"; known: team
    "#);
}

#[test]
fn syntax_errors_have_lines() {
    let told = errors("[gateway]\nlisten = \n[plans.p]\nweight == 2\n");
    let lines: Vec<&str> = told.lines().collect();
    assert!(lines[0].starts_with("t.toml:2: "), "{told}");
    assert!(lines.iter().any(|line| line.starts_with("t.toml:4: ")), "{told}");
    let deep = format!("a = {}1{}", "[".repeat(60), "]".repeat(60));
    assert!(errors(&deep).contains("t.toml:1: nested too deeply"), "{}", errors(&deep));
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("a file");
    }
    folder
}

fn load(path: PathBuf, environment: &[(&str, &str)], flags: Flags) -> Result<Config, String> {
    let environment =
        environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    Config::load(&Sources { path: Some(path), environment, flags }).map_err(|e| e.to_string())
}

#[test]
fn folder_files_merge_and_names_are_unique() {
    let good = folder(&[
        ("a.toml", "[gateway]\nlisten = \"127.0.0.1:1\"\n[plans.p]\nconcurrent = 2\n"),
        ("b.toml", "[gateway]\nadmin_listen = \"127.0.0.1:2\"\n[tenants.t]\nplan = \"p\"\n"),
        (".hidden.toml", "nonsense"),
        ("c.txt", "nonsense"),
    ]);
    let config = load(good.path().into(), &[], Flags::default()).expect("it merges");
    assert_eq!(config.gateway().listen.port(), 1);
    assert_eq!(config.gateway().admin_listen.port(), 2);
    let tenant = config.tenants().next().expect("one tenant");
    let limits = &tenant.plan.as_ref().expect("its own").limits;
    assert_eq!((limits.concurrent, limits.queued), (Some(2), Some(0)));
    assert!(!config.is_demo());

    let twice = folder(&[
        ("a.toml", "[gateway]\nlisten = \"127.0.0.1:1\"\n[plans.p]\nconcurrent = 2\n"),
        ("b.toml", "[gateway]\nlisten = \"127.0.0.1:2\"\n[plans.p]\nqueued = 2\n"),
    ]);
    let told = load(twice.path().into(), &[], Flags::default()).expect_err("given twice");
    let path = twice.path().display();
    assert_eq!(
        told,
        format!(
            "{path}/b.toml:2: gateway.listen: given twice; also given at {path}/a.toml:2\n\
             {path}/b.toml:3: plans.p: given twice; also given at {path}/a.toml:3"
        )
    );
    assert!(load("/nowhere.toml".into(), &[], Flags::default()).is_err());
    let empty = folder(&[]);
    let told = load(empty.path().into(), &[], Flags::default()).expect_err("nothing there");
    assert!(told.ends_with("the folder contains no *.toml file"), "{told}");
    // An endless device is read up to the bound.
    let told = load("/dev/zero".into(), &[], Flags::default()).expect_err("it has no end");
    assert!(told.ends_with("larger than 16 MiB"), "{told}");
}

#[test]
fn flags_override_environment_overrides_files() {
    let files = folder(&[(
        "a.toml",
        "data = \"d\"\n[gateway]\nlisten = \"127.0.0.1:1\"\nadmin_listen = \"127.0.0.1:2\"\n\
         [gateway.requests]\nchoices = 3\n[plans.my-plan]\n[tenants.t]\nplan = \"my-plan\"\n",
    )]);
    let environment = [
        ("TOLLGATE_GATEWAY__LISTEN", "127.0.0.1:11"),
        ("TOLLGATE_GATEWAY__ADMIN_LISTEN", "127.0.0.1:12"),
        ("TOLLGATE_GATEWAY__TIMEOUTS__IDLE", "9s"),
        ("TOLLGATE_PLANS__MY_PLAN__CONCURRENT", "7"),
        ("TOLLGATE_PLANS__MY_PLAN__LARGEST_JOB", "{ h200 = \"2s\", default = \"3s\" }"),
        ("TOLLGATE_TENANTS__T__MODELS", "tollgate-demo"),
        ("TOLLGATE_LOG", "debug"),
        ("PATH", "/bin"),
    ];
    let flags = Flags { listen: Some("127.0.0.1:21".into()), ..Flags::default() };
    let config = load(files.path().into(), &environment, flags.clone()).expect("it is a config");
    assert_eq!(config.data(), files.path().join("d"));
    assert_eq!(config.gateway().listen.port(), 21);
    assert_eq!(config.gateway().admin_listen.port(), 12);
    assert_eq!(config.gateway().timeouts.idle.as_secs(), 9);
    assert_eq!(config.gateway().requests.choices, 3);
    let tenant = config.tenants().next().expect("one tenant");
    let limits = &tenant.plan.as_ref().expect("its own").limits;
    assert_eq!(limits.concurrent, Some(7));
    assert_eq!(limits.largest_job.classes.len(), 1);
    assert_eq!(tenant.models.as_ref().map(std::collections::BTreeSet::len), Some(1));
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let sources =
        Sources { path: Some(files.path().into()), environment: environment.to_vec(), flags };
    let shown = Config::show(&sources).expect("it is a config");
    for line in [
        "listen = \"127.0.0.1:21\"                           # --listen",
        "concurrent = 7                                    # environment TOLLGATE_PLANS__MY_PLAN__CONCURRENT",
        "handshake = \"5s\"                                  # default",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }

    let told = load(
        files.path().into(),
        &[("TOLLGATE_GATEWAY__LISTN", "x"), ("TOLLGATE_GATEWAY__HTTP2__STREAMS", "many")],
        Flags { listen: Some("here".into()), ..Flags::default() },
    );
    assert_eq!(
        told.expect_err("three mistakes"),
        "environment TOLLGATE_GATEWAY__HTTP2__STREAMS: gateway.http2.streams: expected a whole number from 0 to 4294967295, found \"many\"\n\
         environment TOLLGATE_GATEWAY__LISTN: gateway.listn: unknown key; did you mean \"listen\"?\n\
         --listen: gateway.listen: expected an address and port such as \"127.0.0.1:8443\", found \"here\""
    );
}

#[test]
fn mistaken_variables_name_the_right_ones() {
    let files = folder(&[("a.toml", "[plans.p]\n[tenants.t]\nplan = \"p\"\n")]);
    let told = load(
        files.path().into(),
        &[("TOLLGATE_LISTEN", "127.0.0.1:1"), ("TOLLGATE_CONFIG", "a.toml"), ("LISTEN", "x")],
        Flags::default(),
    );
    assert_eq!(
        told.expect_err("two mistakes"),
        "environment TOLLGATE_CONFIG: no such variable; use --config\n\
         environment TOLLGATE_LISTEN: no such variable; use TOLLGATE_GATEWAY__LISTEN or --listen"
    );
    // Kubernetes sets such variables for a service named tollgate.
    load(files.path().into(), &[("TOLLGATE_PORT", "tcp://10.0.0.1:8443")], Flags::default())
        .expect("no mistake");
}

/// A tenant has limits of its own, shared limits, or both. Its pool's plan may
/// allow less than its own.
#[test]
fn tenant_has_own_and_pool_limits() {
    let text = "\
        [plans.own]\nweight = 3\ndevice_time_per_day = \"2h\"\n\
        [plans.shared]\nweight = 2\ndevice_time_per_day = \"1h\"\n\
        [pools.q]\nplan = \"shared\"\n\
        [tenants.alone]\nplan = \"own\"\n\
        [tenants.both]\nplan = \"own\"\npool = \"q\"\n\
        [tenants.member]\npool = \"q\"\n\
        [models.tollgate-demo]\nplan = \"shared\"\n";
    let config = Config::from_toml(Path::new("t.toml"), text).expect("it is a config");
    let found: Vec<_> = config
        .tenants()
        .map(|tenant| {
            let own = tenant.plan.as_ref().map(|plan| plan.name.as_str());
            let shared = tenant.pool.as_ref().map(|pool| pool.plan.name.as_str());
            (tenant.name.as_str(), own, shared, tenant.weight)
        })
        .collect();
    assert_eq!(
        found,
        [
            ("alone", Some("own"), None, 3.0),
            ("both", Some("own"), Some("shared"), 3.0),
            ("member", None, Some("shared"), 2.0),
        ]
    );
    let model = config.models().next().expect("one model");
    assert_eq!(model.plan.as_ref().map(|plan| plan.name.as_str()), Some("shared"));
}

#[test]
fn model_flag_serves_only_that_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("Qwen2.5-0.5B");
    std::fs::create_dir(&model).expect("a folder");
    let flags =
        Flags { model: Some(model.clone()), device: Some("cpu".into()), ..Flags::default() };
    let config = Config::load(&Sources { flags, ..Sources::default() }).expect("it is a config");
    let models: Vec<_> = config.models().collect();
    assert_eq!(models.len(), 1);
    assert_eq!(models[0].name.as_str(), "Qwen2.5-0.5B");
    assert_eq!(models[0].path.as_deref(), Some(model.as_path()));
    assert_eq!(models[0].devices[0].to_string(), "cpu");

    let flags = Flags { device: Some("cuda:GPU-1".into()), ..Flags::default() };
    let config = Config::load(&Sources { flags, ..Sources::default() }).expect("it is a config");
    let model = config.models().next().expect("the demo model");
    assert_eq!(model.name.as_str(), "tollgate-demo");
    assert_eq!(model.devices[0].to_string(), "cuda:GPU-1");
}

#[test]
fn demo_tenant_exists_without_other_tenants() {
    let config = Config::load(&Sources::default()).expect("the defaults are a config");
    assert!(config.is_demo());
    let tenant = config.tenants().next().expect("the demo tenant");
    assert_eq!(tenant.name.as_str(), "demo");
    let limits = &tenant.plan.as_ref().expect("its own").limits;
    assert_eq!(limits.requests.map(|rate| rate.per_minute), Some(600));
    assert_eq!(limits.concurrent, Some(8));
    assert!(limits.device_time_per_day.default.is_none());
    assert_eq!(config.models().next().map(|model| model.name.as_str()), Some("tollgate-demo"));
}

#[test]
fn schema_has_every_key() {
    let schema = Config::schema();
    insta::assert_snapshot!("schema", serde_json::to_string_pretty(&schema).expect("JSON"));
}

mod garbage {
    use std::path::Path;

    use proptest::prelude::*;
    use tollgate_config::Config;

    const WHOLE: &str = include_str!("team.toml");

    proptest! {
        /// Any change of a config's text gives a config or reported mistakes, and
        /// never a panic.
        #[test]
        fn never_panics(
            from in 0..WHOLE.len(), length in 0_usize..40, put in "[\\PC\n]{0,12}",
        ) {
            let until = (from + length).min(WHOLE.len());
            let text = format!("{}{put}{}", &WHOLE[..from], &WHOLE[until..]);
            match Config::from_toml(Path::new("t.toml"), &text) {
                Ok(config) => prop_assert!(config.tenants().count() > 0),
                Err(errors) => prop_assert!(!errors.problems().is_empty()),
            }
        }
    }
}

#[test]
fn hub_id_as_model_says_what_to_name() {
    let flags = Flags { model: Some("Qwen/Qwen2.5-0.5B".into()), ..Flags::default() };
    let told = Config::load(&Sources { flags, ..Sources::default() });
    assert_eq!(
        told.expect_err("no such folder").to_string(),
        "--model: models.\"Qwen2.5-0.5B\".path: Qwen/Qwen2.5-0.5B does not exist; models are not \
         downloaded: name the folder of one"
    );
}

#[test]
fn localhost_is_an_address_of_listeners() {
    let flags = Flags { listen: Some("localhost:8000".into()), ..Flags::default() };
    let config = Config::load(&Sources { flags, ..Sources::default() });
    assert_eq!(config.expect("valid").gateway().listen.to_string(), "127.0.0.1:8000");
}
