//! Connections to a real server: values, statements that are sent together, large results,
//! and TLS.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tollgate_sql::testing::{Certificate, PASSWORD, TestServer};
use tollgate_sql::{
    Begin, Connection, OwnedValue, Server, ServerAddress, SqlError, params, take_server_lock,
};

const LIMIT: Duration = Duration::from_secs(20);

fn connect(server: &TestServer) -> Connection {
    let connection = server.connect(&server.new_database());
    connection
        .execute_batch("CREATE TABLE rows (id BIGINT PRIMARY KEY, text TEXT, bytes BYTEA)")
        .expect("runs");
    connection
}

#[test]
fn values_come_back_unchanged() {
    let Some(server) = TestServer::shared() else { return };
    let connection = connect(&server);
    let insert = "INSERT INTO rows (id, text, bytes) VALUES (?1, ?2, ?3)";
    let long = "\u{1f642}?1'".repeat(100_000);
    for (id, text, bytes) in [
        (i64::MIN, Some(""), Some(vec![])),
        (i64::MAX, None, Some(vec![0, 255, 10])),
        (0, Some(long.as_str()), None),
    ] {
        connection.execute(insert, params![id, text, bytes]).expect("inserts");
        let read = connection.query_row("SELECT * FROM rows WHERE id = ?1", [id], |row| {
            Ok((row.get::<i64>(0)?, row.get::<Option<String>>(1)?, row.get::<Option<Vec<u8>>>(2)?))
        });
        assert_eq!(read.expect("reads"), (id, text.map(str::to_owned), bytes));
    }
    let sum = "SELECT sum(id) FROM rows WHERE id > 0";
    assert_eq!(connection.query_row(sum, (), |row| row.get::<i64>(0)).expect("fits"), i64::MAX);
    let beyond = "SELECT sum(id) + 1 FROM rows WHERE id > 0";
    let error = connection.query_row(beyond, (), |row| row.get::<i64>(0)).expect_err("too large");
    assert!(error.is_about_content(), "{error}");
    let missing = connection.execute(insert, params![1, "a"]).expect_err("one is missing");
    assert!(matches!(missing, SqlError::Parameters { expected: 3, given: 2 }), "{missing}");
}

/// Statements that are sent together run in their order, and the first error is told.
#[test]
fn sent_statements_run_before_the_next_call() {
    let Some(server) = TestServer::shared() else { return };
    let mut connection = connect(&server);
    let count = |connection: &Connection| {
        connection.query_row("SELECT count(*) FROM rows", (), |row| row.get::<u32>(0))
    };
    let transaction = connection.begin(Begin::Write).expect("begins");
    let sent = |id: u32| {
        let insert = transaction.connection().prepare("INSERT INTO rows (id) VALUES (?1)");
        insert.expect("prepares").send([id])
    };
    (0..100).for_each(|id| sent(id).expect("sends"));
    assert_eq!(count(transaction.connection()).expect("counts"), 100);
    sent(100).expect("sends");
    transaction.commit().expect("commits");
    assert_eq!(count(&connection).expect("counts"), 101);

    let mut transaction = connection.begin(Begin::Write).expect("begins");
    let apart = transaction.run_apart(|connection| {
        for id in [200, 7, 201] {
            connection.prepare("INSERT INTO rows (id) VALUES (?1)")?.send([id])?;
        }
        Ok::<_, SqlError>(())
    });
    let refused = apart.expect("the transaction goes on").expect_err("7 is there already");
    assert!(refused.is_about_content() && refused.to_string().contains("duplicate"), "{refused}");
    // What was not sent yet when a transaction ends without a commit never runs.
    let insert = transaction.connection().prepare("INSERT INTO rows (id) VALUES (?1)");
    insert.expect("prepares").send([300]).expect("sends");
    drop(transaction);
    assert_eq!(count(&connection).expect("counts"), 101);
    let mut transaction = connection.begin(Begin::Write).expect("begins");
    let insert = "INSERT INTO rows (id) VALUES (7)";
    transaction.connection().prepare(insert).expect("prepares").send(()).expect("sends");
    let refused = transaction.run_apart(|_| Ok::<_, SqlError>(())).expect_err("a broken part");
    assert!(refused.is_about_content(), "{refused}");
    drop(transaction);
    let mut transaction = connection.begin(Begin::Write).expect("begins");
    let apart = transaction.run_apart(|connection| connection.execute(insert, ()));
    assert!(apart.expect("goes on").is_err());
    assert!(transaction.commit().is_ok(), "the part was undone, the rest commits");
}

#[test]
fn stream_reads_results_of_any_size() {
    let Some(server) = TestServer::shared() else { return };
    let mut connection = connect(&server);
    connection
        .execute_batch("INSERT INTO rows SELECT n, 'x', NULL FROM generate_series(1, 2500) AS n")
        .expect("inserts");
    let transaction = connection.begin(Begin::Read).expect("begins");
    for least in [0, 1_500, 2_500] {
        let query = "SELECT id, text FROM rows WHERE id > ?1 ORDER BY id";
        let mut statement = transaction.connection().prepare(query).expect("prepares");
        let mut rows = statement.stream([least]).expect("runs");
        let mut read = least;
        while let Some(row) = rows.next().expect("reads") {
            read += 1;
            assert_eq!(row.get::<i64>(0).expect("a number"), read);
            // Another query may run before the next row is read.
            let other = "SELECT text FROM rows WHERE id = ?1";
            let text =
                transaction.connection().query_row(other, [read], |row| row.get::<OwnedValue>(0));
            assert_eq!(text.expect("reads"), OwnedValue::Text("x".to_owned()));
        }
        assert_eq!(read, 2_500);
    }
}

#[test]
fn tls_checks_authority_and_name() {
    let authority = |name: &str| {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("valid");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signs")
    };
    let (ours, other) = (authority("ours"), authority("other"));
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("valid");
    let leaf = params.signed_by(&key, &ours).expect("signs");
    let (chain, key) = (leaf.pem(), key.serialize_pem());
    let certificate = Certificate { chain: &chain, key: &key };
    let Some(server) = TestServer::start_with_tls(&certificate) else { return };
    let connect = |host: &str, authority: &str| {
        let url = format!("postgres://tollgate@{host}:{}/postgres", server.port());
        let address = ServerAddress::new(&url, Some(PASSWORD), Some(authority.as_bytes()));
        Server::connect(&address.expect("valid"), LIMIT)
    };
    let connection = Connection::from(connect("localhost", &ours.pem()).expect("connects"));
    let is_used = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    assert!(connection.query_row(is_used, (), |row| row.get::<bool>(0)).expect("reads"));
    for (host, authority, said) in [
        ("localhost", other.pem(), "UnknownIssuer"),
        ("127.0.0.1", ours.pem(), "not valid for name"),
    ] {
        let error = connect(host, &authority).err().expect("refused").to_string();
        assert!(error.contains(said), "{error}");
    }
    // A server without TLS is refused, not spoken to in the clear.
    let Some(plain) = TestServer::shared() else { return };
    let url = format!("postgres://tollgate@localhost:{}/postgres", plain.port());
    let address = ServerAddress::new(&url, Some(PASSWORD), Some(ours.pem().as_bytes()));
    let error = Server::connect(&address.expect("valid"), LIMIT).err().expect("refused");
    assert!(error.to_string().contains("does not support TLS"), "{error}");
}

/// A process that is stopped in a transaction holds its locks for three seconds at most.
#[test]
fn stopped_writer_loses_its_locks() {
    let Some(server) = TestServer::shared() else { return };
    let mut stopped = connect(&server);
    let name = stopped.query_row("SELECT current_database()::text", (), |row| row.get::<String>(0));
    let mut other = server.connect(&name.expect("a name"));
    let transaction = stopped.begin(Begin::Write).expect("begins");
    take_server_lock(transaction.connection(), 7).expect("is free");
    let waiting = other.begin(Begin::Write).expect("begins");
    take_server_lock(waiting.connection(), 7).expect("is free before the wait ends");
    waiting.commit().expect("commits");
    transaction.commit().expect_err("the server has ended it");
}
