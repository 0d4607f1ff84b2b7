//! Tests of verdicts on made-up drills: each bound holds and breaks.

use std::time::SystemTime;

use super::*;
use crate::drill::{MeasuredCapacity, Shares, Tally};
use crate::outcome::Outcome;

const PHASES: &str = r#"
about = "x"
[phases]
alone = "20s"
attack = "20s"
after = "10s"
[[honest]]
tenants = ["a"]
rate = 10.0
[[attackers]]
kind = "slowloris"
tenants = ["m"]
closed_within = "6s"
[hold]
"#;

fn scenario(hold: &str) -> Scenario {
    Scenario::parse("made-up", &format!("{PHASES}{hold}")).expect("valid")
}

fn sample(due: f64, first_ms: u64, end: End) -> HonestSample {
    let ms = Duration::from_millis;
    let outcome = Outcome {
        tenant: 0,
        end,
        late: Some(ms(1)),
        first_token: Some(ms(first_ms)),
        gaps: vec![ms(2); 4],
        whole: ms(first_ms + 8),
        tokens: 5,
        at_worker: None,
    };
    HonestSample { tenant: "a".into(), due, outcome }
}

/// Ten requests a second; `slow` says how long the first token took at a time.
pub(super) fn drill(slow: impl Fn(f64) -> u64) -> Drill {
    let due = (0..500).map(|number| f64::from(number) / 10.0);
    Drill {
        started: SystemTime::UNIX_EPOCH,
        alone: Span { from: 0.0, to: 20.0 },
        attack: Span { from: 20.0, to: 40.0 },
        after: Span { from: 40.0, to: 50.0 },
        capacity: Vec::<MeasuredCapacity>::new(),
        honest: due.map(|at| sample(at, slow(at), End::Done)).collect(),
        attackers: vec![AttackerResult {
            kind: AttackKind::Slowloris,
            who: "m".into(),
            rate: None,
            tally: Tally::default(),
            tokens: 0,
            first_tokens: Vec::new(),
            closed_after: vec![5.0],
            oldest_open: 0.0,
            shapes: Vec::new(),
        }],
        processes: BTreeMap::new(),
        shares: Shares::new(),
        panics: None,
    }
}

fn verdict(hold: &str, drill: &Drill, named: &str) -> Verdict {
    let report = DrillReport::new(&scenario(hold), drill);
    let found = report.checks.iter().find(|check| check.what.contains(named));
    found.unwrap_or_else(|| panic!("no {named} in {:#?}", report.checks)).verdict
}

#[test]
fn latency_is_compared_with_own_baseline() {
    let hold = "first_token = { p99 = 2.0 }\n";
    let fine = drill(|at| if (20.0..40.0).contains(&at) { 19 } else { 10 });
    assert_eq!(verdict(hold, &fine, "p99"), Verdict::Holds);
    let slow = drill(|at| if (20.0..40.0).contains(&at) { 21 } else { 10 });
    assert_eq!(verdict(hold, &slow, "p99"), Verdict::Broken);
    let added = "first_token = { p99 = 2.0, or_added = \"15ms\" }\n";
    assert_eq!(verdict(added, &slow, "p99"), Verdict::Holds);
    let mut late = slow;
    late.honest.iter_mut().for_each(|s| s.outcome.late = Some(Duration::from_millis(80)));
    assert_eq!(verdict(hold, &late, "p99"), Verdict::Unclear);
}

#[test]
fn too_few_samples_are_unclear() {
    let mut few = drill(|_| 10);
    few.honest.retain(|sample| sample.due < 5.0 || sample.due > 20.0);
    let report = DrillReport::new(&scenario("first_token = { p50 = 2.0, p99 = 2.0 }\n"), &few);
    let check = |named: &str| {
        let found = report.checks.iter().find(|check| check.what.ends_with(named));
        found.expect("asked for").clone()
    };
    assert_eq!(check("p50").verdict, Verdict::Holds);
    assert_eq!(check("p99").verdict, Verdict::Unclear);
    assert!(check("p99").observed.contains("50 samples, 100 needed"), "{}", check("p99").observed);
    assert_eq!(report.verdict, Verdict::Unclear);
}

#[test]
fn success_and_recovery_can_break() {
    let mut run = drill(|at| if (40.0..43.0).contains(&at) { 100 } else { 10 });
    assert_eq!(verdict("success = 0.999\n", &run, "answered"), Verdict::Holds);
    assert_eq!(verdict("recovery = \"5s\"\n", &run, "again"), Verdict::Holds);
    assert_eq!(verdict("recovery = \"2s\"\n", &run, "again"), Verdict::Broken);
    run.honest[250].outcome.end = End::TimedOut;
    assert_eq!(verdict("success = 0.999\n", &run, "answered"), Verdict::Broken);
    assert_eq!(verdict("success = 0.99\n", &run, "answered"), Verdict::Holds);
}

#[test]
fn memory_and_descriptors_are_compared_with_baseline() {
    let hold = "memory_growth = \"50MiB\"\ndescriptors_growth = 4\n";
    let mut run = drill(|_| 10);
    assert_eq!(verdict(hold, &run, "memory"), Verdict::Unclear, "nothing was observed");
    let point = |at, memory: u64, descriptors| ProcessPoint {
        at,
        memory: memory << 20,
        descriptors,
        cpu_seconds: None,
    };
    let points = vec![point(1.0, 100, 30), point(30.0, 140, 300), point(50.0, 120, 33)];
    run.processes.insert("gateway".into(), points);
    assert_eq!(verdict(hold, &run, "memory of the gateway"), Verdict::Holds);
    assert_eq!(verdict(hold, &run, "descriptors"), Verdict::Holds);
    run.processes.insert("gateway".into(), vec![point(1.0, 100, 30), point(50.0, 151, 35)]);
    assert_eq!(verdict(hold, &run, "memory of the gateway"), Verdict::Broken);
    let kept = |most: u32| verdict(&format!("memory_kept = \"{most}MiB\"\n"), &run, "at the end");
    assert_eq!((kept(50), kept(51)), (Verdict::Broken, Verdict::Holds));
    assert_eq!(verdict(hold, &run, "descriptors"), Verdict::Broken);
}

#[test]
fn slow_connections_must_be_ended() {
    let mut run = drill(|_| 10);
    assert_eq!(verdict("", &run, "is closed"), Verdict::Holds);
    run.attackers[0].closed_after.push(9.0);
    assert_eq!(verdict("", &run, "is closed"), Verdict::Broken);
    run.attackers[0].closed_after.clear();
    assert_eq!(verdict("", &run, "is closed"), Verdict::Unclear);
    run.attackers[0].oldest_open = 12.0;
    assert_eq!(verdict("", &run, "is closed"), Verdict::Broken);
}

#[test]
fn accepted_load_goodput_and_shares() {
    let mut run = drill(|_| 10);
    let seen = &mut run.attackers[0];
    for second in 0..20 {
        seen.tally.add(f64::from(second), "answered");
        seen.tally.add(f64::from(second) + 20.0, "answered");
    }
    assert_eq!(verdict("accepted = 1.1\n", &run, "accepted"), Verdict::Holds);
    (0..4).for_each(|_| run.attackers[0].tally.add(30.0, "answered"));
    assert_eq!(verdict("accepted = 1.1\n", &run, "accepted"), Verdict::Broken);

    assert_eq!(verdict("attackers_share = 0.5\n", &run, "part of the device"), Verdict::Unclear);
    let used = |at, attributed_ns| UsedPoint { at, attributed_ns, ..UsedPoint::default() };
    run.shares.insert("a".into(), vec![used(19.0, 0), used(40.0, 600)]);
    run.shares.insert("m".into(), vec![used(19.0, 0), used(40.0, 400)]);
    assert_eq!(verdict("attackers_share = 0.5\n", &run, "part of the device"), Verdict::Holds);
    assert_eq!(verdict("attackers_share = 0.3\n", &run, "part of the device"), Verdict::Broken);

    let text = format!("{PHASES}goodput = 0.9\n").replace("rate = 10.0", "times_share = 1.0");
    let text = text.replace("[[honest]]", "[capacity]\ntenant = \"s\"\n[[honest]]");
    let scenario = Scenario::parse("made-up", &text).expect("valid");
    let report = DrillReport::new(&scenario, &run);
    assert!(report.checks.iter().any(|check| check.what.contains("capacity")));
    assert_eq!(report.verdict, Verdict::Unclear, "it was not measured: {report}");
}

#[test]
fn work_and_use_of_attackers_are_bounded() {
    let mut run = drill(|_| 10);
    assert_eq!(verdict("worked_on = 2\n", &run, "worked on"), Verdict::Unclear, "no request");
    for what in ["429 rate_limit_exceeded", "503 overloaded", "400 too_long", "answered"] {
        run.attackers[0].tally.add(25.0, what);
    }
    assert_eq!(verdict("worked_on = 2\n", &run, "worked on"), Verdict::Holds);
    assert_eq!(verdict("worked_on = 1\n", &run, "worked on"), Verdict::Broken);
    let tokens = "attackers_tokens = 400\n";
    let reference = "attackers_reference = \"2s\"\n";
    assert_eq!(verdict(tokens, &run, "tokens"), Verdict::Unclear);
    let used = |at, tokens| UsedPoint {
        at,
        tokens,
        reference_ns: tokens * 5_000_000,
        ..UsedPoint::default()
    };
    run.shares.insert("m".into(), vec![used(19.0, 10), used(40.0, 410), used(45.0, 900)]);
    assert_eq!(verdict(tokens, &run, "tokens"), Verdict::Holds);
    assert_eq!(verdict(reference, &run, "reference cost"), Verdict::Holds);
    run.shares.insert("m".into(), vec![used(19.0, 10), used(40.0, 411)]);
    assert_eq!(verdict(tokens, &run, "tokens"), Verdict::Broken);
    assert_eq!(verdict(reference, &run, "reference cost"), Verdict::Broken);
}

#[test]
fn processor_time_is_compared_with_baseline() {
    let hold = "gateway_cpu = 0.2\n";
    let mut run = drill(|_| 10);
    assert_eq!(verdict(hold, &run, "processor time"), Verdict::Unclear);
    let point = |at, cpu| ProcessPoint { at, memory: 1, descriptors: 1, cpu_seconds: Some(cpu) };
    // A tenth of a core before the attack.
    let before = [point(0.0, 5.0), point(10.0, 6.0)];
    let with =
        |then: f64| [before.as_slice(), &[point(20.0, 7.0), point(30.0, 7.0 + then)]].concat();
    run.processes.insert(GATEWAY.into(), with(2.9));
    assert_eq!(verdict(hold, &run, "processor time"), Verdict::Holds);
    run.processes.insert(GATEWAY.into(), with(3.1));
    assert_eq!(verdict(hold, &run, "processor time"), Verdict::Broken);
}

#[test]
fn attackers_must_wait_longer_than_honest_tenants() {
    let hold = "ahead_of_attackers = 3.0\n";
    let mut run = drill(|_| 10);
    assert_eq!(verdict(hold, &run, "wait for the first token"), Verdict::Unclear);
    run.attackers[0].first_tokens = vec![31.0; 20];
    assert_eq!(verdict(hold, &run, "wait for the first token"), Verdict::Holds);
    run.attackers[0].first_tokens = vec![29.0; 20];
    assert_eq!(verdict(hold, &run, "wait for the first token"), Verdict::Broken);
}

#[test]
fn faults_are_not_counted_as_refusals() {
    let mut run = drill(|_| 10);
    run.attackers[0].tally.add(25.0, "429 rate_limit_exceeded");
    run.attackers[0].tally.add(25.0, "503 overloaded");
    assert_eq!(verdict("", &run, "refusals are clear"), Verdict::Holds);
    run.attackers[0].tally.add(25.0, "500 server_error");
    assert_eq!(verdict("", &run, "refusals are clear"), Verdict::Broken);
}

#[test]
fn logged_panic_breaks_a_drill() {
    let mut run = drill(|_| 10);
    run.panics = Some(Vec::new());
    assert_eq!(verdict("", &run, "panics"), Verdict::Holds);
    run.panics = Some(vec!["thread 'main' panicked at src/a.rs:1:2:".to_owned()]);
    assert_eq!(verdict("", &run, "panics"), Verdict::Broken);
}

#[test]
fn accepted_growth_is_shown_as_difference() {
    let observed = |hold: &str, then: u64| {
        let run = drill(|at| if (20.0..40.0).contains(&at) { then } else { 2 });
        let report = DrillReport::new(&scenario(hold), &run);
        let found = report.checks.iter().find(|check| check.what.contains("p99"));
        found.expect("a check").observed.clone()
    };
    let added = "first_token = { p99 = 2.0, or_added = \"10ms\" }\n";
    assert_eq!(observed(added, 3), "2.0 ms before, 3.0 ms in the attack: 1.50 x");
    assert_eq!(observed(added, 11), "2.0 ms before, 11.0 ms in the attack: 9.0 ms more");
    assert_eq!(observed(added, 20), "2.0 ms before, 20.0 ms in the attack: 10.00 x");
    let multiple = "first_token = { p99 = 6.0 }\n";
    assert_eq!(observed(multiple, 11), "2.0 ms before, 11.0 ms in the attack: 5.50 x");
}

#[test]
fn latency_is_compared_with_slower_quiet_time() {
    let hold = "first_token = { p50 = 2.0 }\n";
    // The machine became slower in the attack and stayed so.
    let run = |settled: u64| {
        drill(move |at| match at {
            0.0..20.0 => 10,
            20.0..40.0 => 50,
            // What is left of the attack is no quiet time.
            40.0..45.0 => 90,
            _ => settled,
        })
    };
    assert_eq!(verdict(hold, &run(24), "p50"), Verdict::Broken);
    assert_eq!(verdict(hold, &run(26), "p50"), Verdict::Holds);
    let report = DrillReport::new(&scenario(hold), &run(26));
    let check = report.checks.iter().find(|check| check.what.contains("p50")).expect("a check");
    let observed = "10.0 ms before, 26.0 ms well after, 50.0 ms in the attack: 1.92 x";
    assert_eq!(check.observed, observed);
}

#[test]
fn page_explains_marks_and_machine() {
    let mut run = drill(|_| 10);
    let used = |at: u32, attributed_ns| UsedPoint {
        at: f64::from(at),
        attributed_ns,
        ..UsedPoint::default()
    };
    // The honest tenant uses 50 ms a second; the attacker the rest of the device in the attack.
    let honest = (0..=50).map(|at| used(at, u64::from(at) * 50_000_000));
    let attacker = (0..=50).map(|at| used(at, u64::from(at.clamp(20, 40) - 20) * 950_000_000));
    run.shares.insert("a".into(), honest.collect());
    run.shares.insert("m".into(), attacker.collect());
    run.attackers[0].tally.add(25.0, "429 rate_limit_exceeded");
    let report = DrillReport::new(&scenario(""), &run);
    let page = crate::page::html(&report);
    for text in [
        "class=\"level\"",
        "asked for by the honest tenants",
        "The honest tenants ask for 50 ms/s",
        "</svg>a request without an answer",
        concat!("tollgate ", env!("CARGO_PKG_VERSION"), "; load from a machine with"),
        "no time between them, so a median near 0 is usual",
    ] {
        assert!(page.contains(text), "no {text:?} in {page}");
    }
    // A colour of a tenant marks nothing but tenants.
    let section = |title: &str| {
        let (_, rest) = page.split_once(title).expect("a section");
        rest.split_once("</section>").expect("its end").0
    };
    assert!(section("Device time by tenant").contains("var(--c0)"));
    for title in ["time to first token", "Outcomes of the attackers' requests"] {
        assert!(!section(title).contains("var(--c"), "{title}");
    }
    assert_eq!(Quantile::Known(0.04).to_string(), "< 0.1 ms");
}
