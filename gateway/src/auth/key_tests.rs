//! Tests of API keys: guesses, revocation by another process, rotation (threats T20
//! and T23).

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use http::{HeaderMap, HeaderValue, header};

use tollgate_ledger::DatabasePlace;

use super::*;

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

fn at(seconds: u64) -> UtcTime {
    UtcTime(seconds * 1_000_000_000)
}

fn show(credential: &str) -> HeaderMap {
    let value = HeaderValue::from_str(&format!("Bearer {credential}")).expect("a header value");
    HeaderMap::from_iter([(header::AUTHORIZATION, value)])
}

fn door(data: &Path) -> (Authenticator, KeyStore) {
    let keys = KeyStore::open(data).expect("opens");
    (Authenticator::new(keys.clone(), Vec::new()).expect("no issuers"), keys)
}

fn created(keys: &KeyStore, options: KeyOptions) -> NewKey {
    keys.create(&tenant("acme"), options, at(100)).expect("creates")
}

#[test]
fn valid_key_names_tenant() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let scopes = Scopes {
        models: Some(vec![ModelName::new("small").expect("a name")]),
        endpoints: Some(vec![Endpoint::Chat]),
        sources: None,
    };
    let new = created(&keys, KeyOptions { scopes, ..KeyOptions::default() });
    let caller = door.authenticate(&show(new.secret.expose()), None, at(101)).expect("good");
    assert_eq!(caller.tenant(), &tenant("acme"));
    assert_eq!(caller.key(), &new.record.id);
    assert!(caller.may_use_model(&ModelName::new("small").expect("a name")));
    assert!(!caller.may_use_model(&ModelName::new("large").expect("a name")));
    assert!(caller.may_use_endpoint(Endpoint::Chat));
    assert!(!caller.may_use_endpoint(Endpoint::Usage));
}

/// Unknown, revoked and expired keys cause the same error, so clients get the same
/// answer.
#[test]
fn inactive_keys_get_equal_errors() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let revoked = created(&keys, KeyOptions::default());
    keys.revoke(&revoked.record.id, UnderWay::Finish, at(150)).expect("revokes");
    let expires = Some(at(200));
    let expired = created(&keys, KeyOptions { expires, ..KeyOptions::default() });
    assert!(door.authenticate(&show(expired.secret.expose()), None, at(199)).is_ok());
    let unknown = KeySecret::draw().expect("random numbers");
    for secret in [&revoked.secret, &expired.secret, &unknown] {
        let error = door.authenticate(&show(secret.expose()), None, at(200)).expect_err("refused");
        assert_eq!(error, AuthError::Rejected);
        assert_eq!(ApiError::from(error), ApiError::InvalidCredential);
    }
    let mut misspelt = revoked.secret.expose().to_owned();
    misspelt.pop();
    let error = door.authenticate(&show(&misspelt), None, at(200)).expect_err("refused");
    assert_eq!(ApiError::from(error), ApiError::InvalidCredential);
}

/// T20, with 200 000 guesses: half are well formed, a quarter name an existing key.
#[test]
fn guessed_keys_never_authenticate() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let new = created(&keys, KeyOptions::default());
    let mut hits = 0;
    for guess in 0..200_000_u32 {
        let drawn = KeySecret::draw().expect("random numbers");
        let credential = match guess % 4 {
            0 => drawn.expose().to_owned(),
            1 => drawn.with_id(new.record.id.as_str()).expose().to_owned(),
            2 => format!("{}{}", &new.secret.expose()[..45], &drawn.expose()[45..]),
            _ => format!("{}0", &drawn.expose()[..52]),
        };
        if credential != new.secret.expose() {
            hits += u32::from(door.authenticate(&show(&credential), None, at(101)).is_ok());
        }
    }
    assert_eq!(hits, 0);
    assert!(door.authenticate(&show(new.secret.expose()), None, at(101)).is_ok(), "the control");
}

/// T23 without waiting: the next refresh sees a change of another process, and
/// `follow_changes` refreshes four times a second.
#[test]
fn refresh_sees_changes_of_other_process() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let other = KeyStore::open(data.path()).expect("opens beside it");
    let new = created(&other, KeyOptions::default());
    assert!(door.authenticate(&show(new.secret.expose()), None, at(101)).is_err());
    keys.refresh().expect("reads");
    let caller = door.authenticate(&show(new.secret.expose()), None, at(101)).expect("good");
    assert_eq!(caller.key(), &new.record.id);
    other.revoke(&new.record.id, UnderWay::Finish, at(102)).expect("revokes");
    keys.refresh().expect("reads");
    assert!(door.authenticate(&show(new.secret.expose()), None, at(103)).is_err());
}

#[tokio::test(start_paused = true)]
async fn revocation_takes_effect_within_one_second() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, _) = door(data.path());
    let other = KeyStore::open(data.path()).expect("opens beside it");
    let new = created(&other, KeyOptions::default());
    let stop = CancellationToken::new();
    let following =
        tokio_util::task::TaskTracker::new().spawn(door.clone().follow_changes(stop.clone()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(door.authenticate(&show(new.secret.expose()), None, at(101)).is_ok());
    other.revoke(&new.record.id, UnderWay::Finish, at(102)).expect("revokes");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(door.authenticate(&show(new.secret.expose()), None, at(103)).is_err());
    stop.cancel();
    following.await.expect("ends");
}

#[test]
fn rotation_overlaps_and_revocation_is_final() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let old = created(&keys, KeyOptions { label: "ci".into(), ..KeyOptions::default() });
    let new = keys.rotate(&old.record.id, Duration::from_secs(60), at(200)).expect("rotates");
    assert_eq!(new.record.rotated_from, Some(old.record.id.clone()));
    assert_eq!(new.record.label, "ci");
    for (secret, time, good) in
        [(&old.secret, 259, true), (&old.secret, 260, false), (&new.secret, 10_000, true)]
    {
        assert_eq!(
            door.authenticate(&show(secret.expose()), None, at(time)).is_ok(),
            good,
            "{time}"
        );
    }
    let again = keys.rotate(&old.record.id, Duration::ZERO, at(300));
    assert!(matches!(again, Err(KeyStoreError::NotActive(_))), "{again:?}");
    let first = keys.revoke(&new.record.id, UnderWay::Finish, at(400)).expect("revokes");
    let second = keys.revoke(&new.record.id, UnderWay::Finish, at(500)).expect("changes nothing");
    assert_eq!(first, second);
    let unknown = KeySecret::draw().expect("random numbers").id();
    assert!(matches!(
        keys.revoke(&unknown, UnderWay::Finish, at(1)),
        Err(KeyStoreError::Unknown(_))
    ));
}

#[test]
fn key_store_reopens_without_secrets_on_disk() {
    let data = tempfile::tempdir().expect("a folder");
    let new = created(&KeyStore::open(data.path()).expect("opens"), KeyOptions::default());
    let (door, keys) = door(data.path());
    assert!(door.authenticate(&show(new.secret.expose()), None, at(101)).is_ok());
    assert_eq!(keys.list(Some(&tenant("acme"))).expect("reads"), std::slice::from_ref(&new.record));
    assert!(keys.list(Some(&tenant("other"))).expect("reads").is_empty());
    let secret = &new.secret.expose().as_bytes()[14..46];
    for entry in data.path().read_dir().expect("a folder") {
        let path = entry.expect("an entry").path();
        let bytes = std::fs::read(&path).expect("readable");
        assert!(!bytes.windows(secret.len()).any(|part| part == secret), "{path:?}");
        let mode = path.metadata().expect("metadata").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{path:?}");
    }
    for shown in [format!("{door:?}"), format!("{keys:?}"), format!("{new:?}")] {
        assert!(!shown.contains(&new.secret.expose()[14..46]), "{shown}");
    }
}

#[test]
fn damaged_key_store_names_damage() {
    let data = tempfile::tempdir().expect("a folder");
    let new = created(&KeyStore::open(data.path()).expect("opens"), KeyOptions::default());
    let database = data.path().join("keys.db");
    let pepper = data.path().join("pepper");
    let open = || KeyStore::open(data.path()).map(|_| ()).expect_err("refused").to_string();
    let sql = |text: &str| {
        rusqlite::Connection::open(&database).and_then(|c| c.execute_batch(text)).expect("runs");
    };

    sql("UPDATE keys SET scopes = '{'");
    assert_eq!(open(), format!("key {}: column scopes is damaged", new.record.id));
    sql("UPDATE keys SET scopes = '{}', mac = x'00'");
    assert_eq!(open(), format!("key {}: column mac is damaged", new.record.id));
    sql("DELETE FROM keys; PRAGMA user_version = 7;");
    assert!(open().contains("format 7; this version reads format 2"), "{}", open());
    sql("PRAGMA user_version = 2;");
    let mode = |bits| std::fs::Permissions::from_mode(bits);
    std::fs::set_permissions(&pepper, mode(0o644)).expect("changes");
    assert!(open().contains("mode 644 lets other users read"), "{}", open());
    std::fs::set_permissions(&pepper, mode(0o600)).expect("changes");
    std::fs::write(&pepper, b"short").expect("writes");
    assert!(open().contains("pepper is damaged"), "{}", open());
    std::fs::remove_file(&pepper).expect("removes");
    created(&KeyStore::open(data.path()).expect("no key needs the old one"), KeyOptions::default());
    std::fs::remove_file(&pepper).expect("removes");
    assert!(open().contains("pepper is missing"), "{}", open());
}

#[test]
fn concurrent_starts_share_one_pepper() {
    let data = tempfile::tempdir().expect("a folder");
    let news: Vec<NewKey> = std::thread::scope(|scope| {
        let start = |_| {
            scope.spawn(|| {
                KeyStore::open(data.path()).map(|keys| created(&keys, KeyOptions::default()))
            })
        };
        let starts: Vec<_> = (0..8).map(start).collect();
        starts.into_iter().map(|s| s.join().expect("no panic").expect("opens")).collect()
    });
    let (door, _) = door(data.path());
    for new in news {
        assert!(door.authenticate(&show(new.secret.expose()), None, at(101)).is_ok());
    }
    let left = data.path().read_dir().expect("a folder").filter(|entry| {
        entry.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().contains(".new-"))
    });
    assert_eq!(left.count(), 0, "nothing half made is left");
}

/// The plan of a key is stored, is part of the caller, and passes to the rotated key.
#[test]
fn key_plan_survives_rotation() {
    let data = tempfile::tempdir().expect("a folder");
    let plan = PlanName::new("small").expect("a name");
    let old = {
        let (_, keys) = door(data.path());
        created(&keys, KeyOptions { plan: Some(plan.clone()), ..KeyOptions::default() })
    };
    let (door, keys) = door(data.path());
    let new = keys.rotate(&old.record.id, Duration::from_secs(60), at(200)).expect("rotates");
    for key in [&old, &new] {
        let caller = door.authenticate(&show(key.secret.expose()), None, at(201)).expect("good");
        assert_eq!(caller.plan(), Some(&plan));
    }
    assert!(
        keys.list(None).expect("reads").iter().all(|record| record.plan.as_ref() == Some(&plan))
    );
    let free = created(&keys, KeyOptions::default());
    let caller = door.authenticate(&show(free.secret.expose()), None, at(201)).expect("good");
    assert_eq!(caller.plan(), None);
}

/// A key with a list of networks works from these networks only.
#[test]
fn key_works_from_allowed_networks_only() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let networks = ["10.0.0.0/8", "2001:db8::/32"].map(|text| text.parse().expect("a network"));
    let scopes = Scopes { sources: Some(networks.to_vec()), ..Scopes::default() };
    let bound = created(&keys, KeyOptions { scopes, ..KeyOptions::default() });
    let free = created(&keys, KeyOptions::default());
    for (from, good) in [
        (Some("10.1.2.3"), true),
        (Some("::ffff:10.1.2.3"), true),
        (Some("2001:db8::1"), true),
        (Some("11.0.0.1"), false),
        (Some("2001:db9::1"), false),
        (None, false),
    ] {
        let from = from.map(|address| address.parse().expect("an address"));
        let found = door.authenticate(&show(bound.secret.expose()), from, at(101));
        assert_eq!(found.err(), (!good).then_some(AuthError::Elsewhere), "{from:?}");
        assert!(door.authenticate(&show(free.secret.expose()), from, at(101)).is_ok());
    }
    let guess = KeySecret::draw().expect("random numbers").with_id(bound.record.id.as_str());
    let found = door.authenticate(&show(guess.expose()), None, at(101));
    assert_eq!(found.err(), Some(AuthError::Rejected), "only who has the key learns of its list");
}

#[test]
fn second_revocation_can_end_requests() {
    let data = tempfile::tempdir().expect("a folder");
    let (_, keys) = door(data.path());
    let other = KeyStore::open(data.path()).expect("opens beside it");
    let id = created(&keys, KeyOptions::default()).record.id;
    let revoked = other.revoke(&id, UnderWay::Finish, at(150)).expect("revokes");
    keys.refresh().expect("reads");
    assert!(!keys.ends_requests(&id));
    let ended = other.revoke(&id, UnderWay::End, at(160)).expect("revokes");
    assert_eq!(ended, KeyRecord { ends_requests: true, ..revoked });
    assert!(!keys.ends_requests(&id));
    keys.refresh().expect("reads");
    assert!(keys.ends_requests(&id));
    assert_eq!(other.revoke(&id, UnderWay::Finish, at(170)).expect("changes nothing"), ended);
    assert!(!keys.ends_requests(&KeyId::new("jwt:user").expect("a name")));
}

#[test]
fn options_are_checked() {
    let data = tempfile::tempdir().expect("a folder");
    let (_, keys) = door(data.path());
    let label = |label: &str| KeyOptions { label: label.into(), ..KeyOptions::default() };
    for options in [
        label(&"x".repeat(201)),
        label("a\nb"),
        label("\u{1b}[2J"),
        KeyOptions { expires: Some(at(100)), ..KeyOptions::default() },
        KeyOptions { expires: Some(UtcTime(u64::MAX)), ..KeyOptions::default() },
    ] {
        let error = keys.create(&tenant("acme"), options.clone(), at(100)).expect_err("refused");
        let good = matches!(
            error,
            KeyStoreError::Label | KeyStoreError::Expired | KeyStoreError::ExpiresTooLate
        );
        assert!(good, "{options:?}: {error}");
    }
    assert!(keys.list(None).expect("reads").is_empty(), "all or none");
    let key = created(&keys, label(&"ä".repeat(200)));
    let error = keys.rotate(&key.record.id, Duration::from_nanos(u64::MAX), at(100));
    assert!(matches!(error, Err(KeyStoreError::OverlapTooLong)), "{error:?}");
}

/// An update of the snapshot reads only the changed rows and misses none, not even
/// a row that was deleted by hand.
#[test]
fn snapshot_agrees_with_key_table() {
    let data = tempfile::tempdir().expect("a folder");
    let (door, keys) = door(data.path());
    let other =
        KeyStore::open_to_change(data.path(), DatabasePlace::File(data.path().join("keys.db")))
            .expect("opens beside it");
    let wanted = (0..300).map(|_| (tenant("acme"), KeyOptions::default()));
    let mut news = other.create_all(wanted, at(100)).expect("creates");
    news.push(created(&keys, KeyOptions::default()));
    news.push(created(&other, KeyOptions::default()));
    other.revoke(&news[7].record.id, UnderWay::Finish, at(101)).expect("revokes");
    keys.refresh().expect("reads");
    let beside = Authenticator::new(other.clone(), Vec::new()).expect("no issuers");
    let shown = show(news[10].secret.expose());
    assert!(beside.authenticate(&shown, None, at(102)).is_err(), "it checks nobody");
    assert_eq!(other.list(None).expect("reads"), keys.list(None).expect("reads"));
    let works = |new: &NewKey| door.authenticate(&show(new.secret.expose()), None, at(102)).is_ok();
    for (number, new) in news.iter().enumerate() {
        assert_eq!(works(new), number != 7, "{number}");
    }
    let database = rusqlite::Connection::open(data.path().join("keys.db")).expect("opens");
    database.execute("DELETE FROM keys WHERE id = ?1", [news[9].record.id.as_str()]).expect("runs");
    keys.refresh().expect("reads");
    assert!(!works(&news[9]));
    assert!(works(&news[10]));
}

/// Every change of a key waits for the audit log, with this process as its actor.
#[test]
fn key_changes_are_queued_for_audit_log() {
    let data = tempfile::tempdir().expect("a folder");
    let keys = KeyStore::open(data.path()).expect("opens");
    let first =
        created(&keys, KeyOptions { label: "a secret name".into(), ..KeyOptions::default() });
    let second = keys.rotate(&first.record.id, Duration::from_secs(60), at(200)).expect("rotates");
    let revoked = keys.revoke(&first.record.id, UnderWay::End, at(300)).expect("revokes");
    // A second revocation changes nothing, so it is no action.
    assert_eq!(keys.revoke(&revoked.id, UnderWay::End, at(301)).expect("revokes"), revoked);
    // A refused change is no action.
    assert!(keys.rotate(&revoked.id, Duration::ZERO, at(302)).is_err());

    let waiting = keys.actions(100).expect("reads");
    let ours = format!("uid {}", rustix::process::getuid().as_raw());
    let ours = ours.as_str();
    let (one, two) = (first.record.id.as_str(), second.record.id.as_str());
    let told: Vec<_> = waiting
        .iter()
        .map(|(_, action)| {
            let (tenant, key) = action.user.as_ref().expect("it is a tenant's");
            let key = key.as_deref().expect("a key");
            (action.operation.as_str(), tenant.as_str(), key, action.actor.as_str())
        })
        .collect();
    assert_eq!(
        told,
        [
            ("key.created", "acme", one, ours),
            ("key.rotated", "acme", two, ours),
            ("key.changed", "acme", one, ours),
            ("key.revoked", "acme", one, ours),
        ]
    );
    assert_eq!(waiting[1].1.detail["rotated_from"], one);
    assert_eq!(waiting[3].1.detail["ends_requests"], true);
    let text = format!("{waiting:?}");
    assert!(!text.contains("secret name") && !text.contains(first.secret.expose()), "{text}");
    let numbers: Vec<i64> = waiting.iter().map(|(number, _)| *number).collect();
    keys.forget_actions(&numbers).expect("forgets");
    assert_eq!(keys.actions(100).expect("reads"), vec![]);
}
