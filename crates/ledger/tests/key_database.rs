//! The file of the key database: its mode, its formats, damage, and changes that
//! another program makes with SQL.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rusqlite::Connection;
use tollgate_domain::{KeyId, TenantId, UtcTime};
use tollgate_ledger::DatabasePlace;
use tollgate_ledger::keys::{KeyDatabase, KeyDatabaseError, KeyEnd, KeyFacts, KeyRow};

fn file_in(data: &Path) -> DatabasePlace {
    DatabasePlace::File(data.join("keys.db"))
}

fn sql(data: &Path, text: &str) {
    Connection::open(data.join("keys.db")).and_then(|it| it.execute_batch(text)).expect("runs");
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

fn insert(database: &mut KeyDatabase, key: &KeyRow) {
    let inserted = database.change("uid 0", |change| change.insert(key));
    let inserted: Result<(), KeyDatabaseError> = inserted;
    inserted.expect("inserts");
}

/// Reads the facts of all keys, as a gateway does when it starts.
fn load(data: &Path) -> Result<(), KeyDatabaseError> {
    let mut database = KeyDatabase::open(file_in(data))?;
    let snapshot = database.snapshot()?;
    snapshot.changed_since(Default::default(), |_| Ok(()))
}

#[test]
fn new_file_is_closed_to_other_users() {
    let data = tempfile::tempdir().expect("a folder");
    let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
    insert(&mut database, &key("k1"));
    let mut files = 0;
    for entry in data.path().read_dir().expect("a folder") {
        let path = entry.expect("an entry").path();
        let mode = path.metadata().expect("metadata").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{path:?}");
        files += 1;
    }
    assert_eq!(files, 3, "the database, its log and the index of the log");
}

/// SQLite does not wait when several connections switch a file to a write-ahead log.
#[test]
fn new_file_opens_for_several_at_once() {
    for _ in 0..20 {
        let data = tempfile::tempdir().expect("a folder");
        std::thread::scope(|scope| {
            let open = || KeyDatabase::open(file_in(data.path())).map(drop);
            let opening = [(); 8].map(|()| scope.spawn(open));
            for opened in opening.map(|opening| opening.join().expect("no panic")) {
                opened.expect("opens");
            }
        });
    }
}

#[test]
fn foreign_file_is_refused_and_not_written() {
    let data = tempfile::tempdir().expect("a folder");
    sql(data.path(), "CREATE TABLE things (x)");
    let error = KeyDatabase::open(file_in(data.path())).err().expect("another program's database");
    assert!(matches!(error, KeyDatabaseError::Format { found: 0, .. }), "{error}");
    let path = data.path().join("keys.db");
    let count = "SELECT count(*) FROM sqlite_schema";
    let tables = Connection::open(&path).and_then(|it| it.query_row(count, [], |row| row.get(0)));
    assert_eq!(tables, Ok(1));
}

/// Format 1 had neither change numbers nor actions. Two processes open it at once.
#[test]
fn format_1_is_migrated_once() {
    let data = tempfile::tempdir().expect("a folder");
    sql(data.path(), include_str!("fixtures/keys-1.sql"));
    let opened = std::thread::scope(|scope| {
        let open = || KeyDatabase::open(file_in(data.path())).expect("opens");
        let opening = [(); 2].map(|()| scope.spawn(open));
        opening.map(|opening| opening.join().expect("no panic"))
    });
    let mut second = key("k2");
    second.facts.mac = [2; 32];
    second.facts.scopes = r#"{"models":["small"]}"#.to_owned();
    second.facts.plan = Some("team".to_owned().try_into().expect("a name"));
    second.facts.end = KeyEnd {
        expires: Some(UtcTime(9_000)),
        revoked: Some(UtcTime(3_000)),
        ends_requests: false,
    };
    second.created = UtcTime(2_000);
    second.rotated_from = Some(KeyId::new("k1").expect("a name"));
    for mut database in opened {
        assert_eq!(database.list(None).expect("reads"), [key("k1"), second.clone()]);
        let snapshot = database.snapshot().expect("reads");
        let mut found = 0;
        let count = |_| {
            found += 1;
            Ok::<_, KeyDatabaseError>(())
        };
        snapshot.changed_since(Default::default(), count).expect("reads");
        assert_eq!(found, 2, "a gateway that starts finds every key");
    }
    let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
    // The log is told once of keys that are older than the log.
    let waiting = database.actions(10).expect("reads");
    let operations: Vec<&str> = waiting.iter().map(|(_, it)| it.operation.as_str()).collect();
    assert_eq!(operations, ["key.found", "key.found"]);
    assert_eq!(waiting[1].1.detail["scopes"]["models"][0], "small");
    insert(&mut database, &key("k3"));
    assert_eq!(database.actions(10).expect("reads")[2].1.operation, "key.created");
}

/// The first builds of format 2 had no actions, and no format number tells so.
#[test]
fn format_2_without_actions_gets_them() {
    let data = tempfile::tempdir().expect("a folder");
    insert(&mut KeyDatabase::open(file_in(data.path())).expect("opens"), &key("k1"));
    sql(
        data.path(),
        "DROP TRIGGER key_made; DROP TRIGGER key_changed; DROP TRIGGER key_deleted;
         DROP TABLE actions;",
    );
    for _ in 0..2 {
        let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
        let waiting = database.actions(10).expect("reads");
        assert_eq!(waiting.len(), 1);
        assert_eq!(waiting[0].1.operation, "key.found");
        assert_eq!(database.list(None).expect("reads"), [key("k1")]);
    }
}

#[test]
fn unknown_format_is_refused_unchanged() {
    let data = tempfile::tempdir().expect("a folder");
    sql(data.path(), "CREATE TABLE other (id); PRAGMA user_version = 7;");
    let error =
        KeyDatabase::open(file_in(data.path())).map(|_| ()).expect_err("refused").to_string();
    let path = data.path().join("keys.db");
    let expected = "the key database has format 7; this version reads format 2";
    assert_eq!(error, format!("{}: {expected}", path.display()));
    let tables: i64 = Connection::open(path)
        .and_then(|it| it.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)))
        .expect("reads");
    assert_eq!(tables, 1);
}

#[test]
fn damaged_column_is_named() {
    // (column, damaged value, true if the check of a request needs the column)
    for (column, value, is_checked) in [
        ("tenant", "'no name'", true),
        ("mac", "x'00'", true),
        ("plan", "''", true),
        ("expires_at", "-1", true),
        ("revoked_at", "-1", true),
        ("created_at", "-1", false),
        ("rotated_from", "'no name'", false),
    ] {
        let data = tempfile::tempdir().expect("a folder");
        insert(&mut KeyDatabase::open(file_in(data.path())).expect("opens"), &key("k1"));
        load(data.path()).expect("the control");
        sql(data.path(), &format!("UPDATE keys SET {column} = {value}"));
        let expected = format!("key k1: column {column} is damaged");
        let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
        assert_eq!(database.list(None).expect_err("refused").to_string(), expected);
        // A label or an age that cannot be shown keeps no gateway from its start.
        let loaded = load(data.path()).map_err(|error| error.to_string());
        assert_eq!(loaded, if is_checked { Err(expected) } else { Ok(()) }, "{column}");
    }
}

/// A file that is no database is refused with its path and the cause.
#[test]
fn file_of_other_kind_is_refused() {
    let data = tempfile::tempdir().expect("a folder");
    let path = data.path().join("keys.db");
    std::fs::write(&path, [b'x'; 4_096]).expect("writes");
    let error = KeyDatabase::open(file_in(data.path())).map(|_| ()).expect_err("refused");
    assert_eq!(error.to_string(), format!("{}: the key database failed", path.display()));
    let cause = std::error::Error::source(&error).expect("a cause");
    assert_eq!(cause.to_string(), "file is not a database; restore the file from a backup");
    assert!(cause.source().is_none(), "SQLite's own cause repeats the text");
}

/// With an equal number the change would stay hidden from other processes.
#[test]
fn change_beyond_last_number_is_refused() {
    let data = tempfile::tempdir().expect("a folder");
    let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
    insert(&mut database, &key("k1"));
    sql(data.path(), "UPDATE keys SET changed = 9223372036854775807");
    let result = database.change("uid 0", |change| change.insert(&key("k2")));
    assert!(matches!(result, Err(KeyDatabaseError::Database { .. })), "{result:?}");
    assert_eq!(database.list(None).expect("reads"), [key("k1")]);
}

/// A change made with SQL waits for the audit log, too, with an unknown actor. So does
/// a deleted key.
#[test]
fn change_by_sql_is_queued_for_audit_log() {
    let data = tempfile::tempdir().expect("a folder");
    let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
    insert(&mut database, &key("k1"));
    sql(data.path(), "UPDATE keys SET tenant = 'beta', mac = x'00'; DELETE FROM keys;");
    insert(&mut database, &key("k2"));
    let waiting = database.actions(100).expect("reads");
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
            ("key.created", "acme", "k1", "uid 0"),
            ("key.changed", "beta", "k1", "unknown"),
            ("key.deleted", "beta", "k1", "unknown"),
            ("key.created", "acme", "k2", "uid 0"),
        ]
    );
    assert_eq!(waiting[1].1.detail["was_tenant"], "acme");
    assert_eq!(waiting[1].1.detail["secret_changed"], true);
}

/// A row that cannot be converted would hold back every action behind it.
#[test]
fn damaged_action_holds_back_no_other() {
    let data = tempfile::tempdir().expect("a folder");
    let mut database = KeyDatabase::open(file_in(data.path())).expect("opens");
    insert(&mut database, &key("k1"));
    sql(data.path(), "UPDATE actions SET at_utc_ms = -5, detail = '{'");
    insert(&mut database, &key("k2"));
    let waiting = database.actions(100).expect("reads");
    assert_eq!(waiting.len(), 2);
    assert_eq!((waiting[0].1.at, waiting[0].1.detail.clone()), (UtcTime(0), ().into()));
}
