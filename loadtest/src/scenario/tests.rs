//! Tests of scenario files: the built-in ones are valid, and mistakes are reported.

use super::*;

const SMALL: &str = r#"
about = "x"
[phases]
alone = "1s"
attack = "500ms"
after = "1s"
[[honest]]
tenants = ["a"]
plan = "p"
rate = 1.0
[[attackers]]
kind = "flood"
tenants = ["t-{1..3}"]
pool = "q"
rate = 5.0
"#;

#[test]
fn built_in_scenarios_are_valid() {
    for shipped in SHIPPED {
        let scenario = Scenario::find(shipped.name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(scenario.name, shipped.name);
        assert!(scenario.hold.success.is_some(), "{} asks for nothing", shipped.name);
        assert!(!scenario.attackers.is_empty() && scenario.about.len() > 20, "{}", shipped.name);
    }
}

#[test]
fn name_ranges_become_tenants() {
    let scenario = Scenario::parse("small", SMALL).expect("valid");
    assert_eq!(scenario.attackers[0].tenants, ["t-1", "t-2", "t-3"]);
    assert_eq!(scenario.phases.attack, Duration::from_millis(500));
    let config = scenario.own_config();
    assert!(config.contains("[tenants.a]\nplan = \"p\"\n"), "{config}");
    assert!(config.contains("[tenants.t-3]\npool = \"q\"\n"), "{config}");
}

#[test]
fn scenario_mistakes_are_reported() {
    let cases = [
        ("rate = 1.0", "rate = 0.0", "above 0"),
        ("rate = 1.0", "", "one of rate"),
        ("rate = 1.0", "rate = 1.0\ntimes_share = 2.0", "one of rate"),
        ("rate = 1.0", "times_share = 2.0", "[capacity]"),
        ("rate = 1.0", "rate = 1.0\nrat = 2", "rat"),
        ("alone = \"1s\"", "alone = \"1\"", "250ms"),
        ("alone = \"1s\"", "alone = \"0s\"", "above 0"),
        ("kind = \"flood\"", "kind = \"flod\"", "flod"),
        ("kind = \"flood\"", "kind = \"slowloris\"", "not a rate"),
        ("kind = \"flood\"", "kind = \"early_leavers\"", "leave_within"),
        ("t-{1..3}", "t-{3..1}", "t-{3..1}"),
        ("t-{1..3}", "a", "two places"),
        ("rate = 5.0", "rate = 5.0\nstream = 101", "percent"),
        ("rate = 5.0", "rate = 5.0\nkeys = 0", "above 0"),
        ("rate = 5.0", "rate = 5.0\nstreams = 0", "1 to 1,000"),
        ("rate = 5.0", "rate = 5.0\nrequests = 9", "random shapes"),
        ("rate = 5.0", "rate = 5.0\nshapes = [\"flat\"]", "flat"),
        ("kind = \"flood\"", "kind = \"odd_shapes\"", "need shapes"),
        ("kind = \"flood\"", "kind = \"hold_connections\"", "not a rate"),
        ("rate = 5.0", "rate = 5.0\n[hold]\ngoodput = 0.9", "goodput"),
    ];
    for (good, bad, named) in cases {
        let text = SMALL.replacen(good, bad, 1);
        let error = Scenario::parse("small", &text).expect_err(bad).to_string();
        assert!(error.contains(named), "{bad}: {error}");
    }
    let unknown = Scenario::find("nothing").expect_err("none").to_string();
    assert!(unknown.contains("flood") && unknown.contains("nothing"), "{unknown}");
}

#[test]
fn requests_set_length_of_random_attack() {
    let mut scenario = Scenario::find("random_shapes").expect("shipped");
    scenario.set_requests(1_000).expect("allowed");
    assert_eq!(scenario.phases.attack, Duration::from_secs(152));
    assert!(scenario.set_requests(100_001).is_err());
    let mut other = Scenario::find("flood").expect("shipped");
    assert!(other.set_requests(10).expect_err("no shapes").contains("--requests"));
}

#[test]
fn multiples_become_rates() {
    let rate = |times_share, at_most| Rate { times_share, at_most, ..Rate::default() };
    assert_eq!(rate(Some(20.0), None).per_second(90.0, 3), 600.0);
    assert_eq!(rate(Some(20.0), Some(100.0)).per_second(90.0, 3), 100.0);
    let rate = Rate { times_capacity: Some(10.0), ..Rate::default() };
    assert_eq!(rate.per_second(40.0, 3), 400.0);
}

#[test]
fn scenario_can_start_from_shipped_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("own.toml");
    let shipped = Shipped::find("flood").expect("shipped");
    std::fs::write(&path, shipped.text).expect("writes");
    let own = Scenario::find(&path.to_string_lossy()).expect("valid");
    let flood = Scenario::find("flood").expect("valid");
    assert_eq!((own.name.as_str(), own.about), ("own", flood.about));
    let error = Shipped::find("flod").expect_err("unknown").to_string();
    assert!(error.contains("flod") && error.contains("many_sources"), "{error}");
}
