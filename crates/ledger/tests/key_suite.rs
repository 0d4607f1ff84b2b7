//! The suite that every store of API keys must pass: a file, and a database of a PostgreSQL
//! server. It reads and changes keys through the façade only. `Place` is the one thing here
//! that names a store.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

#[path = "common/place.rs"]
#[macro_use]
mod place;

use tollgate_domain::{AdminName, KeyId, PlanName, TenantId, UtcTime};
use tollgate_ledger::keys::{
    AdminRow, ChangeNumber, KeyChange, KeyDatabase, KeyDatabaseError, KeyEnd, KeyFacts, KeyRow,
};
use tollgate_sql::testing::TestServer;

use crate::place::Place;

impl Place {
    /// Opens the store. A second connection sees what the first one committed.
    fn open(&self) -> KeyDatabase {
        KeyDatabase::open(self.of("keys.db")).expect("opens")
    }
}

for_every_store!(
    key_is_read_as_written,
    list_is_by_tenant_and_age,
    changes_are_followed_by_number,
    data_version_tells_of_other_connections,
    snapshot_is_of_one_time,
    failed_change_leaves_no_trace,
    concurrent_changes_are_all_followed,
    actions_wait_until_they_are_forgotten,
    admins_are_made_and_revoked,
);

const ACTOR: &str = "uid 7";

fn id(name: &str) -> KeyId {
    KeyId::new(name).expect("a name")
}

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

/// A key of acme that was created at `created` nanoseconds.
fn key(name: &str, created: u64) -> KeyRow {
    KeyRow {
        facts: KeyFacts {
            id: id(name),
            tenant: tenant("acme"),
            mac: [7; 32],
            scopes: "{}".to_owned(),
            plan: None,
            end: KeyEnd::default(),
        },
        label: String::new(),
        created: UtcTime(created),
        rotated_from: None,
    }
}

/// A key with a value in every column.
fn full_key(name: &str, created: u64) -> KeyRow {
    let mut full = key(name, created);
    full.facts.plan = Some(PlanName::new("team").expect("a name"));
    full.facts.scopes = r#"{"models":["small"]}"#.to_owned();
    full.facts.end = KeyEnd {
        expires: Some(UtcTime(9_000)),
        revoked: Some(UtcTime(8_000)),
        ends_requests: true,
    };
    full.label = "a label".to_owned();
    full.rotated_from = Some(id("k0"));
    full
}

fn change<T>(
    database: &mut KeyDatabase,
    change: impl FnOnce(&KeyChange<'_>) -> Result<T, KeyDatabaseError>,
) -> T {
    database.change(ACTOR, change).expect("changes")
}

fn insert(database: &mut KeyDatabase, keys: &[KeyRow]) {
    change(database, |change| keys.iter().try_for_each(|key| change.insert(key)));
}

fn revoke(database: &mut KeyDatabase, name: &str, at: u64) {
    let end = KeyEnd { revoked: Some(UtcTime(at)), ..KeyEnd::default() };
    change(database, |change| change.update_end(&id(name), &end));
}

/// Returns the number of the latest change, and the ids of the keys that changed after
/// `since`.
fn changed_since(database: &mut KeyDatabase, since: ChangeNumber) -> (ChangeNumber, Vec<String>) {
    let snapshot = database.snapshot().expect("reads");
    let mut ids = Vec::new();
    let take = |facts: KeyFacts| {
        ids.push(facts.id.to_string());
        Ok::<_, KeyDatabaseError>(())
    };
    snapshot.changed_since(since, take).expect("reads");
    ids.sort();
    (snapshot.latest_change().expect("reads"), ids)
}

fn operations(database: &mut KeyDatabase) -> Vec<String> {
    let waiting = database.actions(100).expect("reads");
    waiting.into_iter().map(|(_, action)| action.operation).collect()
}

fn key_is_read_as_written(place: &Place) {
    let mut database = place.open();
    let (plain, full) = (key("k1", 1_000), full_key("k2", 2_000));
    insert(&mut database, &[plain.clone(), full.clone()]);
    for mut database in [database, place.open()] {
        assert_eq!(database.list(None).expect("reads"), [plain.clone(), full.clone()]);
        let mut facts = Vec::new();
        let snapshot = database.snapshot().expect("reads");
        let take = |found: KeyFacts| {
            facts.push(found);
            Ok::<_, KeyDatabaseError>(())
        };
        snapshot.changed_since(ChangeNumber::default(), take).expect("reads");
        facts.sort_by_key(|facts| facts.id.to_string());
        assert_eq!(facts, [plain.facts.clone(), full.facts.clone()]);
        assert_eq!(snapshot.count().expect("reads"), 2);
        drop(snapshot);
        change(&mut database, |change| {
            assert_eq!(change.find(&id("k2"))?, Some(full.clone()));
            assert_eq!(change.find(&id("k3"))?, None);
            Ok(())
        });
    }
}

fn list_is_by_tenant_and_age(place: &Place) {
    let mut database = place.open();
    let mut other = key("k1", 1_000);
    other.facts.tenant = tenant("beta");
    insert(&mut database, &[other, key("k4", 2_000), key("k3", 3_000), key("k2", 3_000)]);
    let mut listed = |of: Option<&str>| -> Vec<String> {
        let rows = database.list(of.map(tenant).as_ref()).expect("reads");
        rows.iter().map(|row| row.facts.id.to_string()).collect()
    };
    assert_eq!(listed(None), ["k4", "k2", "k3", "k1"]);
    assert_eq!(listed(Some("acme")), ["k4", "k2", "k3"]);
    assert_eq!(listed(Some("beta")), ["k1"]);
    assert_eq!(listed(Some("gamma")), [""; 0]);
}

/// Only the facts about the end of a key change, and the changed key is read again.
fn changes_are_followed_by_number(place: &Place) {
    let (mut database, mut other) = (place.open(), place.open());
    let (none, ids) = changed_since(&mut database, ChangeNumber::default());
    assert_eq!((none, ids), (ChangeNumber::default(), vec![]));
    insert(&mut database, &[key("k1", 1_000), key("k2", 2_000)]);
    let (first, ids) = changed_since(&mut database, none);
    assert_eq!(ids, ["k1", "k2"]);
    revoke(&mut other, "k1", 3_000);
    let (second, ids) = changed_since(&mut database, first);
    assert!(second > first && first > none, "{none:?} {first:?} {second:?}");
    assert_eq!(ids, ["k1"]);
    assert_eq!(changed_since(&mut database, second), (second, vec![]));
    let mut revoked = key("k1", 1_000);
    revoked.facts.end.revoked = Some(UtcTime(3_000));
    assert_eq!(database.list(None).expect("reads"), [revoked, key("k2", 2_000)]);
}

/// Unfounded versions would make a gateway read all keys four times a second.
fn data_version_tells_of_other_connections(place: &Place) {
    let (mut database, mut other) = (place.open(), place.open());
    let version = database.data_version().expect("reads");
    insert(&mut database, &[key("k1", 1_000)]);
    let own = database.data_version().expect("reads");
    assert!(database.is_shared() || own == version, "its own change");
    let version = own;
    other.list(None).expect("reads");
    assert_eq!(database.data_version().expect("reads"), version, "a read");
    revoke(&mut other, "k1", 2_000);
    assert_ne!(database.data_version().expect("reads"), version);
}

/// A snapshot does not see what is committed after its first read.
fn snapshot_is_of_one_time(place: &Place) {
    let (mut database, mut other) = (place.open(), place.open());
    let snapshot = database.snapshot().expect("reads");
    assert_eq!(snapshot.count().expect("reads"), 0);
    insert(&mut other, &[key("k1", 1_000)]);
    assert_eq!(snapshot.count().expect("reads"), 0);
    assert_eq!(snapshot.latest_change().expect("reads"), ChangeNumber::default());
    drop(snapshot);
    assert_eq!(database.snapshot().expect("reads").count().expect("reads"), 1);
}

type Attempt = fn(&KeyChange<'_>, &KeyEnd) -> Result<(), KeyDatabaseError>;

fn failed_change_leaves_no_trace(place: &Place) {
    let mut database = place.open();
    insert(&mut database, &[key("k1", 1_000)]);
    let before = changed_since(&mut database, ChangeNumber::default());
    let late = KeyEnd { expires: Some(UtcTime(u64::MAX)), ..KeyEnd::default() };
    let attempts: [Attempt; 3] = [
        // The id exists.
        |change, _| change.insert(&key("k1", 3_000)),
        // The time fits no column.
        |change, late| change.update_end(&id("k1"), late),
        // The caller gives up.
        |_, _| Err(KeyDatabaseError::Time),
    ];
    for (number, fails) in attempts.into_iter().enumerate() {
        let result = database.change(ACTOR, |change| {
            change.insert(&key("k2", 2_000))?;
            fails(change, &late)
        });
        let is_database = matches!(result, Err(KeyDatabaseError::Database { .. }));
        let is_time = matches!(result, Err(KeyDatabaseError::Time));
        assert!(if number == 0 { is_database } else { is_time }, "{number}: {result:?}");
        assert_eq!(database.list(None).expect("reads"), [key("k1", 1_000)]);
        assert_eq!(changed_since(&mut database, ChangeNumber::default()), before);
        assert_eq!(operations(&mut database), ["key.created"]);
    }
}

/// Several processes change keys at the same time. Each change gets a number of its
/// own, so a process that follows misses none.
fn concurrent_changes_are_all_followed(place: &Place) {
    let mut database = place.open();
    let write = |thread| {
        let mut database = place.open();
        for at in 0..8 {
            insert(&mut database, &[key(&format!("k{thread}-{at}"), 1_000)]);
        }
    };
    let (mut latest, mut followed) = (ChangeNumber::default(), Vec::new());
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4).map(|thread| scope.spawn(move || write(thread))).collect();
        // The last turn begins after all writers have ended.
        let mut is_last = false;
        while !is_last {
            is_last = writers.iter().all(|writer| writer.is_finished());
            let (number, ids) = changed_since(&mut database, latest);
            assert!(number > latest || ids.is_empty(), "{number:?} {ids:?}");
            latest = number;
            followed.extend(ids);
        }
    });
    followed.sort();
    let expected: Vec<String> =
        (0..4).flat_map(|thread| (0..8).map(move |at| format!("k{thread}-{at}"))).collect();
    assert_eq!(followed, expected);
}

/// Every change of a key waits for the audit log, in order and with its actor.
/// Forgotten actions are gone, and their numbers are never used again.
fn actions_wait_until_they_are_forgotten(place: &Place) {
    let mut database = place.open();
    insert(&mut database, &[full_key("k0", 1_000)]);
    let mut rotated = key("k1", 2_000);
    rotated.rotated_from = Some(id("k0"));
    insert(&mut database, &[rotated]);
    let end = KeyEnd { expires: Some(UtcTime(5_000)), ..KeyEnd::default() };
    database.change("uid 8", |change| change.update_end(&id("k1"), &end)).expect("changes");
    revoke(&mut database, "k1", 4_000);

    let waiting = place.open().actions(100).expect("reads");
    assert_eq!(waiting, database.actions(100).expect("reads"));
    let told: Vec<_> = waiting
        .iter()
        .map(|(_, action)| {
            let (tenant, key) = action.user.as_ref().expect("it is a tenant's");
            let key = key.as_deref().expect("a key");
            (action.operation.as_str(), action.actor.as_str(), tenant.as_str(), key)
        })
        .collect();
    assert_eq!(
        told,
        [
            ("key.rotated", ACTOR, "acme", "k0"),
            ("key.rotated", ACTOR, "acme", "k1"),
            ("key.changed", "uid 8", "acme", "k1"),
            ("key.revoked", ACTOR, "acme", "k1"),
        ]
    );
    assert_eq!(waiting[1].1.detail["rotated_from"], "k0");
    assert_eq!(waiting[2].1.detail["expires_utc_ns"], 5_000);
    assert_eq!(waiting[3].1.detail["revoked_utc_ns"], 4_000);
    assert!(!format!("{waiting:?}").contains("a label"), "the log cannot be redacted");

    assert_eq!(database.actions(2).expect("reads"), waiting[..2]);
    let numbers: Vec<i64> = waiting.iter().map(|(number, _)| *number).collect();
    database.forget_actions(&numbers[..2]).expect("forgets");
    assert_eq!(database.actions(100).expect("reads"), waiting[2..]);
    database.forget_actions(&numbers).expect("forgets again");
    assert_eq!(database.actions(100).expect("reads"), vec![]);
    insert(&mut database, &[key("k2", 6_000)]);
    let (number, action) = database.actions(100).expect("reads").remove(0);
    assert!(number > numbers[3], "{number}");
    assert!(waiting.iter().all(|(_, earlier)| earlier.id != action.id));
}

/// Admins are listed by name, each change waits for the audit log, and a name is free again.
fn admins_are_made_and_revoked(place: &Place) {
    let (mut database, mut other) = (place.open(), place.open());
    let admin = |name: &str, mac: u8| AdminRow {
        name: AdminName::new(name).expect("a name"),
        role: "viewer".to_owned(),
        mac: [mac; 32],
        created: UtcTime(1_000),
    };
    let version = other.data_version().expect("reads");
    for admin in [admin("zoe", 1), admin("Amy", 2)] {
        change(&mut database, |change| change.insert_admin(&admin));
    }
    assert_ne!(other.data_version().expect("reads"), version);
    assert_eq!(other.admins().expect("reads"), [admin("Amy", 2), admin("zoe", 1)]);
    let taken = database.change(ACTOR, |change| change.insert_admin(&admin("zoe", 3)));
    let taken: Result<(), KeyDatabaseError> = taken;
    assert!(matches!(taken, Err(KeyDatabaseError::Database { .. })), "{taken:?}");
    change(&mut database, |change| change.delete_admin(&admin("zoe", 1).name));
    change(&mut database, |change| change.insert_admin(&admin("zoe", 3)));
    assert_eq!(other.admins().expect("reads"), [admin("Amy", 2), admin("zoe", 3)]);
    let waiting = database.actions(10).expect("reads");
    let told: Vec<_> = waiting
        .iter()
        .map(|(_, action)| (action.operation.as_str(), action.detail["admin"].as_str()))
        .collect();
    let (made, revoked) = ("admin.created", "admin.revoked");
    let expected = [(made, "zoe"), (made, "Amy"), (revoked, "zoe"), (made, "zoe")];
    assert_eq!(told, expected.map(|(operation, name)| (operation, Some(name))));
    assert_eq!(waiting[0].1.detail["role"], "viewer");
    assert!(waiting.iter().all(|(_, action)| action.actor == ACTOR && action.user.is_none()));
}
