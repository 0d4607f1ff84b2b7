//! T27: tenants ask for their own requests and for those of others, by every id. A
//! tenant sees its own requests only. A request of another tenant looks like one that
//! does not exist.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use common::*;
use tollgate_domain::{DeviceNanos, RequestId, TenantId};
use tollgate_ledger::{GroupBy, Ledger, LedgerReader, UsageQuery};

const TENANTS: u64 = 20;
const REQUESTS: u64 = 1_000;

#[test]
fn tenant_never_reads_other_tenants() {
    ask(20_000);
}

/// Tests that `cargo xtask test --long` runs.
mod long {
    #[test]
    #[ignore = "long: a million questions"]
    fn million_questions_read_no_other_tenant() {
        super::ask(1_000_000);
    }
}

fn ask(questions: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
    // Two tenants may share an id: each has a request of its own.
    for number in 1..=REQUESTS / 50 {
        let (mut shares, mut ends) = (Vec::new(), Vec::new());
        for request in (number - 1) * 50..number * 50 {
            for owner in owners(request) {
                let (name, cost) = (tenant(owner), cost(owner, request));
                shares.push(share(&name, request.into(), cost));
                if request % 3 != 0 {
                    ends.push(finished(&name, request.into(), usage(cost, cost)));
                }
            }
        }
        post(&ledger, block(number, shares, ends)).expect("posts");
    }
    let reader = ledger.reader();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..questions {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (asker, request) = ((random >> 33) % TENANTS, (random >> 13) % (REQUESTS + 100));
        question(reader, asker, request);
    }
    for asker in 0..TENANTS {
        let query = UsageQuery {
            tenant: Some(named(asker)),
            group: vec![GroupBy::Tenant],
            ..UsageQuery::default()
        };
        let rows = reader.usage(&query).expect("reads");
        let expected: u64 = (0..REQUESTS)
            .filter(|&request| owners(request).contains(&asker))
            .map(|request| cost(asker, request))
            .sum();
        assert!(rows.iter().all(|row| row.tenant.as_deref() == Some(tenant(asker).as_str())));
        assert_eq!(rows.iter().map(|row| row.attributed_ns).sum::<u64>(), expected);
    }
}

fn question(reader: &LedgerReader, asker: u64, request: u64) {
    let found = reader.request(&named(asker), &RequestId::from_random(request.into()));
    let found = found.expect("reads");
    let own = request < REQUESTS && owners(request).contains(&asker);
    assert_eq!(found.is_some(), own, "tenant {asker}, request {request}");
    if let Some(row) = found {
        assert_eq!(row.caller.tenant, named(asker));
        assert_eq!(row.usage.attributed, DeviceNanos(cost(asker, request)));
    }
}

fn owners(request: u64) -> Vec<u64> {
    match request % 11 {
        0 => vec![request % TENANTS, (request + 7) % TENANTS],
        _ => vec![request % TENANTS],
    }
}

/// Returns a cost that differs for every pair, so that a figure identifies its owner.
fn cost(owner: u64, request: u64) -> u64 {
    1 + owner * REQUESTS + request
}

fn tenant(number: u64) -> String {
    format!("t{number}")
}

fn named(number: u64) -> TenantId {
    TenantId::new(&tenant(number)).expect("a name")
}
