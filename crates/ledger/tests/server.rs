//! A ledger on a PostgreSQL server: several writers at once, and a server that breaks
//! connections, is killed, stands still, or cannot be used.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use common::{action, block, finished, parts, post, share, usage};
use futures_executor::block_on;
use tollgate_domain::{Block, BlockParts, WorkerEpoch, WorkerName};
use tollgate_ledger::{
    Act, ArchiveError, AuditKey, DatabasePlace, Health, Ledger, LedgerError, LedgerHandle,
    LedgerOptions, Posted,
};
use tollgate_sql::testing::{PASSWORD, TestServer};
use tollgate_sql::{ServerAddress, SqlError};

fn options(server: &TestServer, database: &str) -> LedgerOptions {
    LedgerOptions {
        retry: Duration::from_millis(20),
        // Far above the time of a statement on a busy machine.
        server_limit: Duration::from_secs(2),
        ..LedgerOptions::at(DatabasePlace::Server(server.address(database)))
    }
}

fn open(server: &TestServer, database: &str) -> LedgerHandle {
    Ledger::open_with(options(server, database)).expect("opens")
}

/// Block `number` of the worker `worker`, with one finished attempt.
fn block_of(worker: u64, number: u64) -> Block {
    let request = u128::from(worker * 1_000_000 + number);
    let done = finished("acme", request, usage(100, 90));
    let parts = parts(number, vec![share("acme", request, 100)], vec![done]);
    let worker_name = WorkerName::new(&worker.to_string()).expect("a name");
    let parts = BlockParts { epoch: WorkerEpoch(worker.into()), worker: worker_name, ..parts };
    Block::try_from(parts).expect("it balances")
}

/// Submits a block until the ledger has it, as a gateway does.
fn post_until_done(ledger: &LedgerHandle, block: &Block) -> Posted {
    loop {
        match block_on(ledger.submit(block.clone())) {
            Ok(posted) => return posted,
            Err(error) if error.is_of_the_disk() => thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error:?}"),
        }
    }
}

fn assert_whole(ledger: &LedgerHandle, workers: u64, blocks: u64) {
    for worker in 1..=workers {
        let balance = ledger.reader().balance(WorkerEpoch(worker.into())).expect("reads");
        assert_eq!(balance.tenants_ns, 100 * blocks as i64, "worker {worker}");
        assert!(balance.is_exact());
    }
    assert_eq!(ledger.reader().check(), vec![]);
}

#[test]
fn writers_append_to_one_log() {
    let Some(server) = TestServer::shared() else { return };
    let database = server.new_database();
    let key = Arc::new(AuditKey::from_seed("tollgate", &[7; 32]).expect("a key"));
    let blocks = 40;
    // All open at once, so they race to make the tables too.
    let start = Barrier::new(3);
    thread::scope(|scope| {
        for worker in 1..=3 {
            let (server, database, start) = (&server, &database, &start);
            let key = Some(Arc::clone(&key));
            scope.spawn(move || {
                start.wait();
                let options = LedgerOptions {
                    key,
                    // Signatures between the blocks of the others.
                    checkpoint_records: 5,
                    ..options(server, database)
                };
                let ledger = Ledger::open_with(options).expect("opens");
                for number in 1..=blocks {
                    let posted = post(&ledger, block_of(worker, number)).expect("posts");
                    assert_eq!(posted, Posted::New);
                    let id = format!("{worker}-{number}");
                    let acted = block_on(ledger.submit(action(&id, "test"))).expect("records");
                    assert_eq!(acted, Posted::New);
                }
                block_on(ledger.submit(Act::Sign)).expect("signs");
            });
        }
    });
    let ledger = open(&server, &database);
    assert_whole(&ledger, 3, blocks);
    let checked = Ledger::open_read_only(DatabasePlace::Server(server.address(&database)));
    let signed = checked.expect("opens").checkpoint().expect("reads");
    assert!(signed.is_some(), "a checkpoint was signed");
}

/// Two gateways may follow the journal of one worker for a while.
#[test]
fn writers_post_the_same_block_once() {
    let Some(server) = TestServer::shared() else { return };
    let database = server.new_database();
    let blocks = 40;
    let ledgers = [open(&server, &database), open(&server, &database)];
    let new: usize = thread::scope(|scope| {
        let writers: Vec<_> = ledgers
            .iter()
            .map(|ledger| {
                scope.spawn(move || {
                    let posted =
                        (1..=blocks).map(|number| post_until_done(ledger, &block_of(1, number)));
                    posted.filter(|posted| *posted == Posted::New).count()
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().expect("a writer")).sum()
    });
    assert_eq!(new, blocks as usize);
    assert_whole(&ledgers[0], 1, blocks);
}

#[test]
fn broken_connections_lose_and_double_nothing() {
    post_over_cuts(12);
}

/// A connection may break before a commit, in it, or behind it.
fn post_over_cuts(most: u64) {
    let Some(server) = TestServer::shared() else { return };
    let database = server.new_database();
    let ledger = open(&server, &database);
    let (is_done, cuts) = (AtomicBool::new(false), AtomicU64::new(0));
    let blocks = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                server.cut_connections(&database);
                let cuts = cuts.fetch_add(1, Ordering::Relaxed);
                // Another time in the course of a commit each time.
                thread::sleep(Duration::from_millis(20 + cuts % 41));
            }
        });
        let mut blocks = 0;
        // As many cuts on a fast machine as on a slow one.
        while blocks < 60 || cuts.load(Ordering::Relaxed) < most {
            blocks += 1;
            post_until_done(&ledger, &block_of(1, blocks));
        }
        is_done.store(true, Ordering::Relaxed);
        blocks
    });
    assert_whole(&open(&server, &database), 1, blocks);
}

#[test]
fn killed_server_keeps_what_was_acknowledged() {
    let Some(server) = TestServer::start() else { return };
    let database = server.new_database();
    let ledger = open(&server, &database);
    let mut number = 0;
    for _ in 0..3 {
        let is_down = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(150));
                server.kill();
                is_down.store(true, Ordering::Relaxed);
            });
            while !is_down.load(Ordering::Relaxed) {
                if post(&ledger, block_of(1, number + 1)).is_ok() {
                    number += 1;
                }
            }
        });
        assert!(matches!(ledger.health(), Health::Degraded { .. }), "{:?}", ledger.health());
        server.resume();
        number += 1;
        post_until_done(&ledger, &block_of(1, number));
        assert_eq!(ledger.health(), Health::Healthy);
        assert_eq!(ledger.reader().last_block(WorkerEpoch(1)).expect("reads"), number);
    }
    assert_whole(&open(&server, &database), 1, number);
}

/// A stopped server keeps its connections open, so only a time limit ends the wait.
#[test]
fn silent_server_degrades_the_ledger() {
    let Some(server) = TestServer::start() else { return };
    let database = server.new_database();
    let options =
        LedgerOptions { server_limit: Duration::from_millis(300), ..options(&server, &database) };
    let ledger = Ledger::open_with(options).expect("opens");
    post(&ledger, block_of(1, 1)).expect("posts");
    server.freeze();
    let refused = post(&ledger, block_of(1, 2)).expect_err("nobody answers");
    assert!(refused.is_of_the_disk(), "{refused:?}");
    let Health::Degraded { reason, .. } = ledger.health() else { panic!("the ledger is degraded") };
    assert!(reason.contains("has not answered"), "{reason}");
    // A caller that asks for its usage does not wait either.
    let begun = now();
    assert!(ledger.reader().last_block(WorkerEpoch(1)).is_err());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    server.thaw();
    post_until_done(&ledger, &block_of(1, 2));
    assert_whole(&ledger, 1, 2);
}

#[test]
fn unusable_servers_are_named() {
    let Some(server) = TestServer::shared() else { return };
    let database = server.new_database();
    let refusal = |address: ServerAddress| -> String {
        let options = LedgerOptions::at(DatabasePlace::Server(address));
        let error = Ledger::open_with(options).err().expect("it is refused");
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        assert!(!text.contains(PASSWORD), "{text}");
        text
    };
    let wrong = ServerAddress::new(&server.url(&database), Some("wrong"), None).expect("valid");
    let said = refusal(wrong);
    let expected =
        format!("the ledger on the database server tollgate@127.0.0.1/{database} cannot");
    assert!(said.starts_with(&expected), "{said}");
    assert!(said.contains("password authentication failed"), "{said}");

    let said = refusal(server.address("nowhere"));
    assert!(said.contains("database \"nowhere\" does not exist"), "{said}");

    // A port that nobody listens on any more.
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("one").port();
    let url = format!("postgres://tollgate@127.0.0.1:{port}/x");
    let said = refusal(ServerAddress::new(&url, Some(PASSWORD), None).expect("valid"));
    assert!(said.contains("Connection refused"), "{said}");

    server.run(&database, "CREATE TABLE meta (name TEXT, value TEXT)");
    let said = refusal(server.address(&database));
    assert!(said.contains("has format \"none\", this version reads format 6"), "{said}");
    server.run(&database, "INSERT INTO meta VALUES ('format', '99')");
    let said = refusal(server.address(&database));
    assert!(said.contains("has format \"99\", this version reads format 6"), "{said}");

    let read_only = server.new_database();
    server.run(
        &read_only,
        &format!("ALTER DATABASE {read_only} SET default_transaction_read_only = on"),
    );
    let said = refusal(server.address(&read_only));
    assert!(said.contains("read-only transaction"), "{said}");
}

/// A listener that accepts and never speaks must not hold a start for ever.
#[test]
fn mute_listener_is_given_up() {
    let mute = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("postgres://u@{}/x", mute.local_addr().expect("an address"));
    let address = ServerAddress::new(&url, None, None).expect("valid");
    let begun = now();
    let refused = tollgate_sql::Server::connect(&address, Duration::from_millis(200)).err();
    assert!(matches!(refused, Some(SqlError::Silent { .. })), "{refused:?}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn files_alone_can_be_compacted() {
    let Some(server) = TestServer::shared() else { return };
    let ledger = open(&server, &server.new_database());
    post(&ledger, block(1, vec![], vec![])).expect("posts");
    let month = "2026-11".parse().expect("a month");
    let archivable = ledger.reader().archivable(month, common::NOON);
    let is_refused = matches!(archivable, Err(ArchiveError::Ledger(LedgerError::NoFile)));
    assert!(is_refused, "{archivable:?}");
}

#[allow(clippy::disallowed_methods, reason = "a test waits by the real clock")]
fn now() -> Instant {
    Instant::now()
}

mod long {
    use super::*;

    #[test]
    #[ignore = "takes half a minute"]
    fn two_hundred_cuts_lose_and_double_nothing() {
        post_over_cuts(200);
    }
}
