//! Tests of the checks before a drill.

use super::*;

fn target(url: &str) -> Target {
    let folder = tempfile::tempdir().expect("a folder");
    let ca = folder.path().join("ca.pem");
    let key = rcgen::KeyPair::generate().expect("a key");
    let made = rcgen::CertificateParams::new(vec!["localhost".to_owned()])
        .and_then(|parameters| parameters.self_signed(&key))
        .expect("a certificate");
    std::fs::write(&ca, made.pem()).expect("writes");
    Target::new(url, &ca, "key").expect("a target")
}

fn stage(url: &str, allowed_host: Option<&str>) -> (Scenario, Stage) {
    let scenario = Scenario::find("rapid_reset").expect("shipped");
    let target = target(url);
    let keys = scenario
        .tenants()
        .iter()
        .map(|wanted| (wanted.name.to_owned(), vec![target.clone(); wanted.keys as usize]))
        .collect();
    let allowed_host = allowed_host.map(str::to_owned);
    (scenario, Stage { keys, admin: None, processes: Vec::new(), log: None, allowed_host })
}

async fn refused(scenario: &Scenario, stage: &Stage) -> DrillError {
    let played = play(scenario, stage, Arc::default(), CancellationToken::new()).await;
    played.map(|_| ()).expect_err("refused")
}

/// The address is reserved for documentation: nothing is ever sent to it.
#[tokio::test]
async fn attacks_stay_on_this_machine() {
    for allowed in [None, Some("example.org")] {
        let (scenario, stage) = stage("https://192.0.2.1:1", allowed);
        let error = refused(&scenario, &stage).await;
        assert!(
            matches!(&error, DrillError::NotLoopback { host } if host == "192.0.2.1"),
            "{error}"
        );
    }
    let (scenario, stage) = stage("https://192.0.2.1:1", Some("192.0.2.1"));
    assert_eq!(check_target(&scenario, &stage).await.ok(), Some(false), "no choice of address");
    let (scenario, stage) = self::stage("https://127.0.0.1:1", None);
    assert_eq!(check_target(&scenario, &stage).await.ok(), Some(true));
}

#[tokio::test]
async fn missing_key_is_named_in_the_error() {
    let (scenario, mut stage) = stage("https://127.0.0.1:1", None);
    stage.keys.remove("mallory");
    let error = refused(&scenario, &stage).await;
    assert_eq!(error.to_string(), "tenant mallory needs 1 keys and has 0");
}

#[test]
fn attackers_have_addresses_of_their_own() {
    let (scenario, stage) = stage("https://127.0.0.1:1", None);
    let mut attacker = scenario.attackers[0].clone();
    attacker.sources = 300;
    let targets = attackers::targets(&attacker, 2, &stage, true);
    assert_eq!(targets.len(), 300, "a connection for each address");
    let sources: std::collections::BTreeSet<_> = targets.iter().map(Target::source).collect();
    assert_eq!(sources.len(), 300);
    assert!(sources.contains(&Some(IpAddr::from([127, 3, 1, 44]))), "{sources:?}");
}

#[test]
fn log_with_panic_names_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let line = "thread 'main' panicked at src/a.rs:1:2:";
    std::fs::write(&log, format!("{{\"level\":\"INFO\"}}\n{line}\n\u{fe}oops\n")).expect("writes");
    assert_eq!(watch::panics_in(&log).expect("readable"), [line]);
    std::fs::write(&log, "{\"level\":\"INFO\"}\n").expect("writes");
    assert!(watch::panics_in(&log).expect("readable").is_empty());
    assert!(watch::panics_in(folder.path().join("none").as_path()).is_err());
}
