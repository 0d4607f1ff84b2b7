//! The list of the gateways that share a database server.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

#[path = "common/place.rs"]
#[allow(unused_macros, reason = "these tests have one store")]
mod place;

use tollgate_domain::{KeyId, TenantId, UtcTime};
use tollgate_ledger::gateways::Membership;
use tollgate_ledger::keys::{GatewayRow, KeyDatabase, KeyDatabaseError, KeyEnd, KeyFacts, KeyRow};
use tollgate_sql::testing::TestServer;

use crate::place::OnServer;

impl OnServer {
    fn join(&self, name: &str) -> Membership {
        Membership::join(&self.server.address(&self.database), name, None).expect("joins")
    }
}

#[test]
fn gateways_are_counted_while_they_beat() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut first = place.join("a");
    assert_eq!(first.beat(0).expect("beats").gateways, 1);
    let (mut second, mut third) = (place.join("b"), place.join("c"));
    assert!(first.number() < second.number() && second.number() < third.number());
    for gateway in [&mut first, &mut second, &mut third] {
        assert_eq!(gateway.beat(0).expect("beats").gateways, 3);
    }
    second.leave().expect("leaves");
    assert_eq!(first.beat(0).expect("beats").gateways, 2);
    // Ten seconds of silence, by the server's clock.
    let silent = "UPDATE gateways SET beat_at = beat_at - interval '11 s' WHERE name = 'c'";
    place.sql(silent);
    assert_eq!(first.beat(0).expect("beats").gateways, 1);
    assert_eq!(third.beat(0).expect("beats").gateways, 2, "it was only slow");
    assert_eq!(first.beat(0).expect("beats").gateways, 2);
}

#[test]
fn gateway_without_its_row_joins_again() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut first = place.join("a");
    let mut second = place.join("b");
    place.sql("DELETE FROM gateways");
    assert_eq!(first.beat(0).expect("beats").gateways, 1);
    assert_eq!(second.beat(0).expect("beats").gateways, 2);
    place.server.cut_connections(&place.database);
    assert_eq!(first.beat(0).expect("connects again").gateways, 2);
}

#[test]
fn gateways_that_join_at_once_have_own_numbers() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let numbers = std::thread::scope(|scope| {
        let joining = [(); 6].map(|()| scope.spawn(|| place.join("one").number()));
        let mut numbers = joining.map(|joining| joining.join().expect("no panic"));
        numbers.sort_unstable();
        numbers
    });
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
}

/// A gateway has seen a change once it told a generation that includes the change.
#[test]
fn gateway_has_seen_what_it_told() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let mut keys = KeyDatabase::open(place.place()).expect("opens");
    let version = keys.data_version().expect("reads");
    assert_eq!(keys.gateways(version).expect("reads"), [], "none has joined");
    let (mut aware, mut unaware) = (place.join("a"), place.join("b"));
    let before = version.generation();
    let facts = KeyFacts {
        id: KeyId::new("k1").expect("a name"),
        tenant: TenantId::new("acme").expect("a name"),
        mac: [1; 32],
        scopes: "{}".to_owned(),
        plan: None,
        end: KeyEnd::default(),
    };
    let key = KeyRow { facts, label: String::new(), created: UtcTime(1), rotated_from: None };
    let inserted: Result<(), KeyDatabaseError> = keys.change("uid 0", |change| change.insert(&key));
    inserted.expect("inserts");
    let version = keys.data_version().expect("reads");
    assert!(version.generation() > before);
    aware.beat(version.generation()).expect("beats");
    unaware.beat(before).expect("beats");
    let seen = |keys: &mut KeyDatabase| -> Vec<(String, bool)> {
        let rows = keys.gateways(version).expect("reads");
        rows.into_iter().map(|GatewayRow { name, has_seen, .. }| (name, has_seen)).collect()
    };
    assert_eq!(seen(&mut keys), [("a".to_owned(), true), ("b".to_owned(), false)]);
    // After that time it accepts no keys.
    let silent = "UPDATE gateways SET beat_at = beat_at - interval '96 s' WHERE name = 'b'";
    place.sql(silent);
    assert_eq!(seen(&mut keys), [("a".to_owned(), true)]);
}
