//! The key database on a PostgreSQL server: changes that a person makes with SQL, a server that
//! ends its connections, a wrong pepper, and the move from a file.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

#[path = "common/place.rs"]
#[allow(unused_macros, reason = "these tests have one store")]
mod place;

use std::sync::Arc;

use tollgate_domain::{AdminName, KeyId, TenantId, UtcTime};
use tollgate_ledger::DatabasePlace;
use tollgate_ledger::keys::{
    AdminRow, ChangeNumber, KeyDatabase, KeyDatabaseError, KeyEnd, KeyFacts, KeyRow,
};
use tollgate_sql::testing::TestServer;

use crate::place::OnServer;

impl OnServer {
    fn open(&self) -> KeyDatabase {
        KeyDatabase::open(self.place()).expect("opens")
    }
}

fn key(name: &str) -> KeyRow {
    let facts = KeyFacts {
        id: KeyId::new(name).expect("a name"),
        tenant: TenantId::new("acme").expect("a name"),
        mac: [1; 32],
        scopes: "{}".to_owned(),
        plan: None,
        end: KeyEnd::default(),
    };
    KeyRow { facts, label: "ci".to_owned(), created: UtcTime(1_000), rotated_from: None }
}

fn insert(database: &mut KeyDatabase, names: &[&str]) {
    let inserted: Result<(), KeyDatabaseError> = database
        .change("uid 0", |change| names.iter().try_for_each(|name| change.insert(&key(name))));
    inserted.expect("inserts");
}

fn ids(database: &mut KeyDatabase) -> Vec<String> {
    let keys = database.list(None).expect("reads");
    keys.into_iter().map(|key| key.facts.id.to_string()).collect()
}

#[test]
fn key_changed_by_hand_is_seen_and_recorded() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut database = place.open();
    insert(&mut database, &["k1", "k2"]);
    let mut version = database.data_version().expect("reads");
    for (text, operation) in [
        ("UPDATE keys SET revoked_at = 5, changed = 2 WHERE id = 'k1'", "key.revoked"),
        ("UPDATE keys SET scopes = 'no JSON', changed = 3 WHERE id = 'k1'", "key.changed"),
        ("DELETE FROM keys WHERE id = 'k2'", "key.deleted"),
    ] {
        place.sql(text);
        let now = database.data_version().expect("reads");
        assert_ne!(now, version, "{text}");
        version = now;
        let (_, action) = database.actions(10).expect("reads").pop().expect("an action");
        assert_eq!((action.operation.as_str(), action.actor.as_str()), (operation, "unknown"));
    }
    let truncated = place.server.connect(&place.database).execute_batch("TRUNCATE keys");
    let said = truncated.expect_err("refused").to_string();
    assert!(said.contains("would leave no records in the audit log"), "{said}");
}

/// A transaction that is not committed yet must not hide its change from a reader that asked
/// for the version meanwhile.
#[test]
fn version_changes_with_the_commit() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut database = place.open();
    insert(&mut database, &["k1"]);
    let before = database.data_version().expect("reads");
    let mut writer = place.server.connect(&place.database);
    let transaction = writer.begin(tollgate_sql::Begin::Write).expect("begins");
    let revoke = "UPDATE keys SET revoked_at = 5, changed = 2 WHERE id = 'k1'";
    transaction.connection().execute(revoke, ()).expect("writes");
    assert_eq!(database.data_version().expect("reads"), before);
    transaction.commit().expect("commits");
    assert_ne!(database.data_version().expect("reads"), before);
    let snapshot = database.snapshot().expect("reads");
    assert!(snapshot.latest_change().expect("reads") > ChangeNumber::default());
}

#[test]
fn server_that_ends_connections_is_reached_again() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut database = place.open();
    for round in 0..5 {
        place.server.cut_connections(&place.database);
        insert(&mut database, &[&format!("k{round}")]);
        place.server.cut_connections(&place.database);
        assert_eq!(ids(&mut database).len(), round + 1);
        place.server.cut_connections(&place.database);
        database.data_version().expect("reads");
        place.server.cut_connections(&place.database);
        assert_eq!(database.snapshot().expect("reads").count().expect("reads"), round + 1);
    }
}

#[test]
fn gateways_that_start_at_once_make_one_database() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    std::thread::scope(|scope| {
        let opening = [(); 6].map(|()| scope.spawn(|| insert_own(&place)));
        opening.into_iter().for_each(|opening| opening.join().expect("no panic"));
    });
    assert_eq!(ids(&mut place.open()).len(), 6);
}

fn insert_own(place: &OnServer) {
    let name = format!("{:?}", std::thread::current().id());
    let name: String = name.chars().filter(char::is_ascii_digit).collect();
    insert(&mut place.open(), &[&format!("k{name}")]);
}

#[test]
fn pepper_of_another_gateway_is_noticed() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    assert!(place.open().has_pepper_mark(&[1; 32]).expect("asks"), "the first one counts");
    assert!(!place.open().has_pepper_mark(&[2; 32]).expect("asks"));
    assert!(place.open().has_pepper_mark(&[1; 32]).expect("asks"));
}

#[test]
fn other_format_is_refused() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    drop(place.open());
    place.sql("UPDATE key_meta SET format = 9");
    let error = KeyDatabase::open(place.place()).err().expect("refused").to_string();
    assert!(error.contains("has format 9; this version reads format 1"), "{error}");
}

/// Keys, admins and what waits for the audit log are copied once and unchanged.
#[test]
fn keys_move_from_file_unchanged() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(Arc::clone(&server));
    let folder = tempfile::tempdir().expect("a folder");
    let file = DatabasePlace::File(folder.path().join("keys.db"));
    let mut file = KeyDatabase::open(file).expect("opens");
    insert(&mut file, &["k1", "k2", "k3"]);
    let numbers: Vec<i64> =
        file.actions(1).expect("reads").into_iter().map(|(number, _)| number).collect();
    file.forget_actions(&numbers).expect("forgets");
    let admin = AdminRow {
        name: AdminName::new("amy").expect("a name"),
        role: "viewer".to_owned(),
        mac: [3; 32],
        created: UtcTime(1_000),
    };
    let made: Result<(), KeyDatabaseError> =
        file.change("uid 0", |change| change.insert_admin(&admin));
    made.expect("inserts");

    // A gateway that started before the move made empty tables.
    let mut running = place.open();
    let version = running.data_version().expect("reads");
    assert!(file.copy_to_server(place.place()).expect("copies"));
    assert_ne!(running.data_version().expect("reads"), version);
    assert_eq!(running.list(None).expect("reads"), file.list(None).expect("reads"));
    assert_eq!(running.admins().expect("reads"), [admin]);
    let waiting = running.actions(10).expect("reads");
    assert_eq!(waiting, file.actions(10).expect("reads"), "no action for the copy");
    insert(&mut running, &["k4"]);
    let (number, action) = running.actions(10).expect("reads").pop().expect("an action");
    assert!(number > waiting.last().expect("some wait").0, "numbers go on");
    assert_eq!(action.operation, "key.created", "the triggers are on again");

    assert!(!file.copy_to_server(place.place()).expect("the same keys"), "an earlier call did it");
    insert(&mut file, &["k5"]);
    let refused = file.copy_to_server(place.place()).expect_err("another key").to_string();
    assert!(refused.contains("there are other keys already"), "{refused}");
    assert_eq!(ids(&mut running), ["k1", "k2", "k3", "k4"]);
}
