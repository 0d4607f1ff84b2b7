//! Blocks of workers that several gateways share: any gateway records them, and each charge
//! counts for the gateway that ordered the work.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;
#[path = "common/place.rs"]
#[allow(unused_macros, reason = "these tests have one store")]
mod place;

use common::{NOON, block, cap, finished, post, post_cap, share, usage};
use tollgate_domain::{FinishReason, FinishedAttempt, Share, UtcDay};
use tollgate_ledger::gateways::{GatewayStart, Membership};
use tollgate_ledger::{DatabasePlace, Ledger, LedgerHandle, LedgerOptions, Spending};
use tollgate_sql::testing::TestServer;

use crate::place::OnServer;

impl OnServer {
    /// Opens the ledger as the gateway with the data folder `home`.
    fn open_as(&self, home: &str) -> LedgerHandle {
        let place = DatabasePlace::Server(self.server.address(&self.database));
        let home = Some(home.to_owned());
        Ledger::open_with(LedgerOptions { home, ..LedgerOptions::at(place) }).expect("opens")
    }

    fn join(&self, home: &str, life: u64) -> Membership {
        let address = self.server.address(&self.database);
        Membership::join(&address, home, Some(&GatewayStart { home, life, workers: None }))
            .expect("joins")
    }
}

/// The bits of a request id that a gateway with this number draws.
fn request(gateway: u32, number: u128) -> u128 {
    u128::from(gateway) << 56 | number
}

fn today() -> UtcDay {
    NOON.day()
}

/// Returns the cost of each tenant.
fn costs(spending: Spending) -> Vec<(String, u64)> {
    assert_eq!(spending.day, spending.month);
    let of = spending.day.iter();
    of.map(|row| (row.caller.tenant.to_string(), row.reference.nanos())).collect()
}

#[test]
fn charges_count_for_the_gateway_that_ordered() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let ledger = place.open_as("b");
    let (a, b) = (place.join("a", 1), place.join("b", 1));
    let done = |gateway, number, reference| {
        finished("acme", request(gateway, number), usage(100, reference))
    };
    let ended = [done(a.number(), 1, 30), done(b.number(), 2, 500), done(0, 3, 7_000)];
    let shares =
        ended.iter().map(|done| Share { attempt: done.attempt.clone(), ..share("acme", 1, 100) });
    post(&ledger, block(1, shares.collect(), ended.to_vec())).expect("posts");
    let again = place.join("a", 2);
    assert_eq!(again.earlier_numbers(), [a.number()]);
    let late = done(a.number(), 4, 1);
    let own = done(again.number(), 5, 10_000);
    let shares =
        [&late, &own].map(|done| Share { attempt: done.attempt.clone(), ..share("acme", 1, 100) });
    post(&ledger, block(2, shares.to_vec(), vec![late, own])).expect("posts");
    let reader = ledger.reader();
    let all = |cost: u64| vec![("acme".to_owned(), cost)];
    assert_eq!(costs(reader.spending(today()).expect("reads")), all(17_531));
    assert_eq!(costs(reader.spending_of("a", today()).expect("reads")), all(10_031));
    assert_eq!(costs(reader.spending_before(("a", 2), today()).expect("reads")), all(31));
    // Without a number it counts for the gateway that recorded it.
    assert_eq!(costs(reader.spending_of("b", today()).expect("reads")), all(7_500));
    assert_eq!(costs(reader.spending_of("c", today()).expect("reads")), []);
    let before = reader.spending_before(("a", 2), today()).expect("reads");
    let since = reader.spending_of("a", today()).expect("reads").beyond(&before);
    assert_eq!(costs(since), all(10_000));
    assert_eq!(reader.check(), vec![]);
}

#[test]
fn fault_is_listed_until_its_cap() {
    let Some(server) = TestServer::shared() else { return };
    let place = OnServer::new(server);
    let ledger = place.open_as("b");
    let a = place.join("a", 1);
    let lost = |number| FinishedAttempt {
        reason: FinishReason::Fault,
        ..finished("acme", request(a.number(), number), usage(100, 90))
    };
    let shares = [1, 2, 3].map(|number| share("acme", request(a.number(), number), 100));
    // The cap of the third came before its end.
    post_cap(&ledger, cap("acme", request(a.number(), 3), usage(50, 40))).expect("posts");
    post(&ledger, block(1, shares.to_vec(), vec![lost(1), lost(2), lost(3)])).expect("posts");
    let listed = || ledger.reader().uncapped_faults().expect("reads");
    let expected = [1, 2].map(|number| cap("acme", request(a.number(), number), usage(0, 0)));
    let found = listed();
    assert_eq!(
        found.iter().map(|cap| &cap.attempt).collect::<Vec<_>>(),
        expected.each_ref().map(|cap| &cap.attempt)
    );
    post_cap(&ledger, cap("acme", request(a.number(), 1), usage(10, 9))).expect("posts");
    let [left] = &listed()[..] else { panic!("one is left") };
    post_cap(&ledger, left.clone()).expect("posts");
    assert_eq!(listed(), []);
    let spent = ledger.reader().spending_of("a", today()).expect("reads");
    assert_eq!(costs(spent), [("acme".to_owned(), 49)], "40 and 9, and nothing of the second");
    assert_eq!(ledger.reader().check(), vec![]);
}
