//! The records of idempotency keys that several gateways share on a database server.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

#[path = "common/place.rs"]
#[allow(unused_macros, reason = "these tests have one store")]
mod place;

use std::time::Duration;

use tollgate_domain::{RequestId, TenantId, UtcDay, UtcTime};
use tollgate_ledger::caps::{Home, Slices};
use tollgate_ledger::idempotency::{IdempotencyRecord, IdempotencyStore, PutRecord, RecordMaker};
use tollgate_sql::testing::TestServer;

use crate::place::OnServer;

/// A gateway's records, with its data folder.
struct Member {
    data: tempfile::TempDir,
    slices: Slices,
    store: IdempotencyStore,
}

impl OnServer {
    fn member(&self) -> Member {
        self.member_in(tempfile::tempdir().expect("a folder"))
    }

    fn member_in(&self, data: tempfile::TempDir) -> Member {
        let address = self.server.address(&self.database);
        let home = Home::begin_life(data.path()).expect("a home");
        let slices = Slices::open(&address, home, UtcDay(20_777)).expect("opens");
        let home = slices.home().clone();
        let limits = (Duration::from_secs(10), 2);
        let store = IdempotencyStore::on_server(&address, home, data.path(), limits);
        Member { data, slices, store: store.expect("opens") }
    }
}

fn at(seconds: u64) -> UtcTime {
    UtcTime((1_000 + seconds) * 1_000_000_000)
}

fn request(number: u8) -> RequestId {
    RequestId::from_random(u128::from(number))
}

fn acme() -> TenantId {
    TenantId::new("acme").expect("a name")
}

impl Member {
    fn put(&self, key: u8, number: u8, seconds: u64) -> PutRecord {
        self.put_over(key, (number, None), seconds)
    }

    fn put_over(&self, key: u8, (number, replaces): (u8, Option<u8>), seconds: u64) -> PutRecord {
        let record = IdempotencyRecord { fingerprint: [key; 32], request: request(number) };
        let replaces = replaces.map(request);
        let put = (&record, replaces.as_ref());
        self.store.put(&[key; 32], &acme(), put, at(seconds)).expect("writes")
    }

    fn find(&self, key: u8, seconds: u64) -> Option<(RequestId, RecordMaker)> {
        let found = self.store.find(&[key; 32], at(seconds)).expect("reads")?;
        assert_eq!(found.record.fingerprint, [key; 32]);
        Some((found.record.request, found.maker))
    }
}

#[test]
fn key_of_other_gateway_is_not_taken() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let (first, second) = (place.member(), place.member());
    assert_eq!(first.find(1, 0), None);
    assert_eq!(first.put(1, 1, 0), PutRecord::Taken);
    assert_eq!(first.put(1, 1, 0), PutRecord::Taken, "a repeat after a lost answer");
    assert_eq!(first.find(1, 0), Some((request(1), RecordMaker::ThisGateway)));
    assert_eq!(second.find(1, 0), Some((request(1), RecordMaker::OtherGateway)));
    assert_eq!(second.put(1, 2, 0), PutRecord::Other(request(1)));
    // Only the request itself frees its key.
    second.store.remove(&[1; 32], &request(2)).expect("writes");
    assert_eq!(second.put(1, 2, 0), PutRecord::Other(request(1)));
    first.store.remove(&[1; 32], &request(1)).expect("writes");
    assert_eq!(second.put(1, 2, 0), PutRecord::Taken);
    assert_eq!(first.find(1, 9), Some((request(2), RecordMaker::OtherGateway)));
    assert_eq!(first.find(1, 11), None, "the record is too old");
    assert_eq!(first.put(1, 3, 11), PutRecord::Taken);
}

/// A gateway that has started again and read all journals runs nothing of its earlier lives.
#[test]
fn key_of_settled_gateway_is_replaced_once() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let first = place.member();
    let (second, third) = (place.member(), place.member());
    assert_eq!(first.put(1, 1, 0), PutRecord::Taken);
    let Member { data, .. } = first;
    let mut again = place.member_in(data);
    assert_eq!(again.find(1, 0), Some((request(1), RecordMaker::ThisGateway)));
    assert_eq!(second.find(1, 0), Some((request(1), RecordMaker::OtherGateway)));
    again.slices.settle_earlier_lives().expect("writes");
    assert_eq!(second.find(1, 0), Some((request(1), RecordMaker::SettledGateway)));
    assert_eq!(third.find(1, 0), Some((request(1), RecordMaker::SettledGateway)));
    assert_eq!(second.put_over(1, (2, Some(1)), 0), PutRecord::Taken);
    assert_eq!(third.put_over(1, (3, Some(1)), 0), PutRecord::Other(request(2)));
    // A record of the present life is not settled.
    assert_eq!(again.put(2, 4, 0), PutRecord::Taken);
    assert_eq!(third.find(2, 0), Some((request(4), RecordMaker::OtherGateway)));
}

#[test]
fn key_is_taken_once_of_many_at_once() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut members: Vec<Member> = (0..4).map(|_| place.member()).collect();
    for key in 0..20 {
        let taken: usize = std::thread::scope(|scope| {
            let putting = members.iter_mut().enumerate().map(|(number, member)| {
                scope.spawn(move || member.put(key, number as u8, u64::from(key) * 20))
            });
            let putting: Vec<_> = putting.collect();
            let results = putting.into_iter().map(|putting| putting.join().expect("no panic"));
            results.filter(|result| *result == PutRecord::Taken).count()
        });
        assert_eq!(taken, 1, "key {key}");
    }
}

#[test]
fn keys_of_tenant_are_bounded_over_gateways() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let (first, second) = (place.member(), place.member());
    assert_eq!(first.put(1, 1, 0), PutRecord::Taken);
    assert_eq!(second.put(2, 2, 0), PutRecord::Taken);
    // The first gateway counts again after a second.
    assert_eq!(first.put(3, 3, 1), PutRecord::TooMany);
    assert_eq!(second.put(3, 3, 1), PutRecord::TooMany);
    assert_eq!(first.put(3, 3, 11), PutRecord::Taken, "the older ones hold no more");
}

#[test]
fn keys_of_file_are_moved_to_server() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let data = tempfile::tempdir().expect("a folder");
    let file = IdempotencyStore::open(data.path(), Duration::from_secs(10), 2).expect("opens");
    let record = IdempotencyRecord { fingerprint: [1; 32], request: request(1) };
    let put = file.put(&[1; 32], &acme(), (&record, None), at(0)).expect("writes");
    assert_eq!(put, PutRecord::Taken);
    drop(file);
    let member = place.member_in(data);
    assert_eq!(member.find(1, 0), Some((request(1), RecordMaker::ThisGateway)));
    assert!(!member.data.path().join("idempotency.db").exists());
    assert!(member.data.path().join("idempotency.db.moved").exists());
    // The next start finds no file, and the same records.
    let Member { data, .. } = member;
    let again = place.member_in(data);
    assert_eq!(again.find(1, 0), Some((request(1), RecordMaker::ThisGateway)));
}

#[test]
fn server_that_broke_off_is_asked_again() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let member = place.member();
    assert_eq!(member.put(1, 1, 0), PutRecord::Taken);
    place.server.cut_connections(&place.database);
    let _ = member.store.find(&[1; 32], at(0));
    assert_eq!(member.find(1, 0), Some((request(1), RecordMaker::ThisGateway)));
}
