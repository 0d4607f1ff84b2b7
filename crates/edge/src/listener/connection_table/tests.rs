//! Tests of the order in which connections give way.

use std::net::Ipv4Addr;

use super::super::activity::{Activity, Protocol};
use super::*;

/// A table, and a clock that starts at zero.
struct Bench {
    table: ConnectionTable,
    start: Instant,
}

/// A connection of the bench.
struct Client {
    number: ConnectionNumber,
    connection: Arc<OpenConnection>,
    activity: Arc<Activity>,
}

impl Bench {
    fn new() -> Self {
        Self { table: ConnectionTable::default(), start: Instant::now() }
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    /// Opens a connection that was last used at `seconds`.
    fn open(&mut self, source: u32, seconds: u64) -> Client {
        let connection = OpenConnection::new(self.at(seconds));
        let activity = Arc::new(Activity::new(Protocol::Http2, self.at(seconds), Duration::MAX));
        connection.report(Arc::clone(&activity));
        let number = self.table.insert(address(source), Arc::clone(&connection));
        Client { number, connection, activity }
    }

    fn authenticate(
        &mut self,
        client: &Client,
        owners: &ConnectionOwners,
        seconds: u64,
    ) -> Result<(), BoundReached> {
        let now = self.at(seconds);
        self.table.authenticate(client.number, owners, 100, now)
    }
}

impl Client {
    fn eviction(&self) -> Option<Eviction> {
        self.connection.eviction()
    }
}

fn address(n: u32) -> Source {
    Source::V4(Ipv4Addr::from_bits(n))
}

fn owners(bounds: &[(u64, u32)]) -> ConnectionOwners {
    let bounds: Vec<OwnerBound> =
        bounds.iter().map(|&(id, most)| OwnerBound { owner: OwnerId(id), most }).collect();
    let holder = bounds.last().map_or(OwnerId(0), |bound| bound.owner);
    ConnectionOwners { bounds, holder }
}

#[test]
fn full_owner_replaces_its_longest_idle() {
    let mut bench = Bench::new();
    let tenant = owners(&[(1, 2)]);
    let (first, second, third) = (bench.open(1, 0), bench.open(2, 3), bench.open(3, 4));
    for client in [&first, &second, &third] {
        assert_eq!(bench.authenticate(client, &tenant, 5), Ok(()));
    }
    assert_eq!(first.eviction(), Some(Eviction::Replaced));
    assert_eq!((second.eviction(), third.eviction()), (None, None));
    // Another owner is not affected.
    let other = bench.open(1, 5);
    assert_eq!(bench.authenticate(&other, &owners(&[(2, 2)]), 5), Ok(()));
    assert_eq!(bench.table.counts(9).authenticated, 3);
    assert_eq!(bench.table.counts(9).uncounted, 6);
}

#[test]
fn full_owner_with_busy_connections_is_refused() {
    let mut bench = Bench::new();
    let narrow = owners(&[(7, 1), (1, 2)]);
    let busy = bench.open(1, 0);
    assert_eq!(bench.authenticate(&busy, &narrow, 0), Ok(()));
    busy.activity.request_began();
    let second = bench.open(1, 10);
    assert_eq!(bench.authenticate(&second, &narrow, 10), Err(BoundReached::Owner(0)));
    assert_eq!(second.eviction(), Some(Eviction::OverBound));
    // A connection that has just ended its request is about to be used again.
    busy.activity.request_ended(true, bench.at(20));
    let third = bench.open(1, 20);
    assert_eq!(bench.authenticate(&third, &narrow, 20), Err(BoundReached::Owner(0)));
    let fourth = bench.open(1, 21);
    assert_eq!(bench.authenticate(&fourth, &narrow, 21), Ok(()));
    assert_eq!(busy.eviction(), Some(Eviction::Replaced));
}

#[test]
fn source_bound_counts_authenticated_connections() {
    let mut bench = Bench::new();
    for tenant in 0..3 {
        let client = bench.open(1, 0);
        client.activity.request_began();
        let owners = owners(&[(tenant, 9)]);
        let now = bench.at(0);
        let result = bench.table.authenticate(client.number, &owners, 2, now);
        assert_eq!(result.err(), (tenant == 2).then_some(BoundReached::Source(2)));
    }
}

#[test]
fn refused_connection_replaces_no_other() {
    let mut bench = Bench::new();
    let tenant = owners(&[(1, 1)]);
    let first = bench.open(1, 0);
    assert_eq!(bench.authenticate(&first, &tenant, 0), Ok(()));
    first.activity.request_began();
    let refused = bench.open(1, 0);
    assert_eq!(bench.authenticate(&refused, &tenant, 0), Err(BoundReached::Owner(0)));
    // By the time of its next request another connection would give way.
    first.activity.request_ended(true, bench.at(1));
    assert_eq!(bench.authenticate(&refused, &tenant, 9), Err(BoundReached::Owner(0)));
    let other = owners(&[]);
    assert_eq!(bench.authenticate(&refused, &other, 9), Err(BoundReached::Ending));
    assert_eq!(first.eviction(), None);
}

/// T60: tenants behind one address.
#[test]
fn full_source_takes_from_its_largest_holder() {
    let mut bench = Bench::new();
    let authenticate = |bench: &mut Bench, tenant: u64, opened: u64| {
        let client = bench.open(1, opened);
        let owners = owners(&[(tenant, 99)]);
        let now = bench.at(20);
        let result = bench.table.authenticate(client.number, &owners, 4, now);
        (client, result)
    };
    // The connection of the small tenant has been idle for longest.
    let small = authenticate(&mut bench, 1, 0).0;
    let large: Vec<Client> = (1..4).map(|opened| authenticate(&mut bench, 2, opened).0).collect();
    let gone = || large.iter().map(|it| it.eviction().is_some()).collect::<Vec<_>>();
    // The large tenant takes the place of one of its own.
    let (busy, result) = authenticate(&mut bench, 2, 4);
    assert_eq!((result, gone()), (Ok(()), vec![true, false, false]));
    // A third tenant takes a place of the large one.
    let (third, result) = authenticate(&mut bench, 3, 5);
    assert_eq!((result, gone()), (Ok(()), vec![true, true, false]));
    assert_eq!((small.eviction(), third.eviction()), (None, None));
    // If the large tenant uses all of its connections, each keeps its own.
    for client in [&busy, &large[2]] {
        client.activity.request_began();
    }
    let (_, result) = authenticate(&mut bench, 2, 6);
    assert_eq!(result, Err(BoundReached::Source(4)));
    assert_eq!((small.eviction(), third.eviction()), (None, None));
}

#[test]
fn make_room_looks_at_bounded_members() {
    let mut bench = Bench::new();
    let crowd: Vec<Client> = (0..=MOST_LOOKED_AT).map(|_| bench.open(1, 0)).collect();
    let tenant = owners(&[(1, 9_999)]);
    for client in &crowd {
        let now = bench.at(1);
        bench.table.authenticate(client.number, &tenant, 9_999, now).expect("within the bound");
    }
    let (last, busy) = crowd.split_last().expect("some");
    for client in busy {
        client.activity.request_began();
    }
    bench.table.make_room(8);
    assert_eq!(busy[0].eviction(), Some(Eviction::Displaced), "the idle one is too far");
    bench.table.make_room(8);
    assert_eq!(last.eviction(), Some(Eviction::Displaced), "now it is near enough");
}

/// T60
#[test]
fn holder_with_most_gives_way() {
    let mut bench = Bench::new();
    let (honest, attacker) = (owners(&[(1, 100)]), owners(&[(2, 100)]));
    let clients = [(1, 0, &honest), (9, 2, &attacker), (9, 1, &attacker), (9, 3, &attacker)];
    let clients = clients.map(|(source, seconds, owners)| {
        let client = bench.open(source, seconds);
        bench.authenticate(&client, owners, 3).expect("within the bound");
        client
    });
    let [honest, busy, idle, late] = &clients;
    busy.activity.request_began();
    bench.table.make_room(8);
    assert_eq!(idle.eviction(), Some(Eviction::Displaced), "idle for longest");
    bench.table.make_room(8);
    assert_eq!(late.eviction(), Some(Eviction::Displaced), "without a request");
    // Each has one connection, so no newcomer has less.
    bench.table.make_room(8);
    assert_eq!((honest.eviction(), busy.eviction()), (None, None));
}

/// Unauthenticated connections beyond their part displace each other, never an
/// authenticated one.
#[test]
fn unauthenticated_crowd_displaces_itself() {
    let mut bench = Bench::new();
    let tenant = owners(&[(1, 100)]);
    let honest: Vec<Client> = (0..4).map(|_| bench.open(1, 0)).collect();
    for client in &honest {
        bench.authenticate(client, &tenant, 0).expect("within the bound");
    }
    let crowd: Vec<Client> = (0..4).map(|n| bench.open(2 + n / 2, u64::from(n))).collect();
    bench.table.make_room(3);
    assert!(honest.iter().all(|client| client.eviction().is_none()));
    assert_eq!(crowd.iter().filter(|client| client.eviction().is_some()).count(), 1);
    // Within their part they displace the holder with most.
    bench.table.make_room(3);
    assert_eq!(honest.iter().filter(|client| client.eviction().is_some()).count(), 1);
}

/// T60: a crowd with an address for each connection.
#[test]
fn single_unauthenticated_connections_displace_the_oldest() {
    let mut bench = Bench::new();
    let honest = bench.open(1, 0);
    bench.authenticate(&honest, &owners(&[(1, 100)]), 0).expect("within the bound");
    let crowd: Vec<Client> = (0..4).map(|n| bench.open(9 - n, 1)).collect();
    let gone = || crowd.iter().map(|it| it.eviction().is_some()).collect::<Vec<_>>();
    bench.table.make_room(3);
    assert_eq!(gone(), [true, false, false, false]);
    // Within their part single connections stay, unauthenticated or not.
    bench.table.make_room(3);
    assert_eq!(gone(), [true, false, false, false]);
    bench.table.make_room(2);
    assert_eq!(gone(), [true, true, false, false]);
    assert_eq!(honest.eviction(), None);
}

#[test]
fn table_keeps_nothing_of_closed_connections() {
    let mut bench = Bench::new();
    let clients: Vec<Client> = (0..9).map(|n| bench.open(n, 0)).collect();
    for client in &clients[..5] {
        bench.authenticate(client, &owners(&[(1, 9), (2, 9)]), 0).expect("within the bound");
    }
    for client in &clients {
        bench.table.remove(client.number);
    }
    assert!(bench.table.entries.is_empty() && bench.table.groups.is_empty());
}
