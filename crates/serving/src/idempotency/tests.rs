//! Keys within one process, across processes, and on disk.

use tempfile::TempDir;
use tollgate_config::Config;
use tollgate_domain::{KeyId, TenantId};
use tollgate_ledger::{Ledger, LedgerHandle};

use super::*;

struct DataFolder {
    folder: TempDir,
    ledger: LedgerHandle,
}

impl DataFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("a ledger");
        Self { folder, ledger }
    }

    /// Opens the keys as a process that began `ago`.
    fn open(&self, ago: Duration) -> Idempotency {
        let text = "";
        let config = Config::from_toml(Path::new("test.toml"), text).expect("a config");
        let options = config.gateway().idempotency.clone();
        let clock = Clock::system();
        let data = self.folder.path();
        let store =
            IdempotencyStore::open(data, options.kept, options.keys_per_tenant).expect("opens");
        let started = UtcTime(clock.utc().0 - ago.as_nanos() as u64);
        let ledger = self.ledger.reader().clone();
        let keys = Mutex::default();
        let state = IdempotencyState { options, store, ledger, clock, started, keys };
        Idempotency { shared: Arc::new(state) }
    }
}

fn claim(key: &str, body: &str, request: u128) -> IdempotencyClaim {
    let tenant = TenantId::new("acme").expect("a name");
    IdempotencyClaim {
        caller: Caller { tenant, key: KeyId::new("k1").expect("a name") },
        key: IdempotencyKey::new(key.as_bytes()).expect("a key"),
        fingerprint: fingerprint("chat", [body.as_bytes()]),
        request: RequestId::from_random(request),
    }
}

async fn first(keys: &Idempotency, claim: IdempotencyClaim) -> IdempotencyGuard {
    match keys.claim(claim, || true).await {
        Ok(ClaimOutcome::First(guard)) => guard,
        Ok(ClaimOutcome::Repeat { .. }) => panic!("the claim is a repeat"),
        Err(error) => panic!("{error:?}"),
    }
}

async fn refused(keys: &Idempotency, claim: IdempotencyClaim) -> RequestError {
    match keys.claim(claim, || true).await {
        Err(error) => error,
        Ok(_) => panic!("the claim is not refused"),
    }
}

fn answer(body: Bytes) -> StoredAnswer {
    StoredAnswer { head: Bytes::new(), body }
}

#[test]
fn key_takes_visible_ascii_only() {
    assert!(IdempotencyKey::new(b"a").is_some());
    assert!(IdempotencyKey::new(&[b'x'; IdempotencyKey::LONGEST]).is_some());
    for bad in [&b""[..], b"a b", b"a\n", "\u{e9}".as_bytes(), &[b'x'; IdempotencyKey::LONGEST + 1]]
    {
        assert!(IdempotencyKey::new(bad).is_none(), "{bad:?}");
    }
}

#[tokio::test]
async fn claim_waits_for_settlement_of_earlier_process() {
    let data = DataFolder::new();
    let keys = data.open(Duration::ZERO);
    let begun = first(&keys, claim("a", "body", 1)).await;
    begun.record().await.expect("records");
    drop((begun, keys)); // the process dies
    let unsettled = IdempotencyRefusal::Unsettled { request: RequestId::from_random(1) };
    let young = data.open(Duration::from_secs(1));
    assert_eq!(refused(&young, claim("a", "body", 2)).await, unsettled.into());
    let reused = refused(&young, claim("a", "other body", 2)).await;
    assert_eq!(reused, IdempotencyRefusal::OtherBody.into());
    drop(young);
    // Every worker has reported by now, and none reported that request.
    let old = data.open(SETTLING);
    let second = first(&old, claim("a", "body", 2)).await;
    second.record().await.expect("records");
    drop((second, old));
    let unsettled = IdempotencyRefusal::Unsettled { request: RequestId::from_random(2) };
    let young = data.open(Duration::ZERO);
    assert_eq!(refused(&young, claim("a", "body", 3)).await, unsettled.into());
}

#[tokio::test]
async fn dropped_guard_leaves_key_to_waiting_request() {
    let data = DataFolder::new();
    let keys = data.open(Duration::ZERO);
    let dropped = first(&keys, claim("a", "body", 1)).await;
    let (waits, ()) = tokio::join!(keys.claim(claim("a", "body", 2), || true), async {
        tokio::task::yield_now().await;
        drop(dropped);
    });
    let Ok(ClaimOutcome::First(next)) = waits else { panic!("the second claim is first now") };
    next.record().await.expect("records");
    next.free(RequestError::INTERNAL).await;
    drop(keys);
    // The key is free on disk as well, whatever the body.
    let keys = data.open(Duration::ZERO);
    first(&keys, claim("a", "other", 3)).await;
}

/// A guard frees its key only once the record is gone from the disk. If the table forgot the
/// key before that, the guard would take the key from the request that claims it next.
#[tokio::test]
async fn key_of_failed_request_stays_until_guard_drops() {
    let data = DataFolder::new();
    let keys = data.open(Duration::ZERO);
    let begun = first(&keys, claim("a", "body", 1)).await;
    begun.outcome.send_replace(Outcome::Failed(RequestError::INTERNAL));
    keys.lock().forget_before(UtcTime(u64::MAX));
    for number in 0..memory::MOST_IN_MEMORY as u128 {
        let other = first(&keys, claim(&format!("more{number}"), "body", number)).await;
        other.answered(answer(Bytes::new()));
    }
    assert_eq!(refused(&keys, claim("a", "body", 2)).await, RequestError::INTERNAL);
    drop(begun);
    first(&keys, claim("a", "body", 3)).await;
}

#[tokio::test]
async fn charged_error_is_repeated() {
    let data = DataFolder::new();
    let keys = data.open(Duration::ZERO);
    let begun = first(&keys, claim("a", "body", 1)).await;
    begun.record().await.expect("records");
    let lost = RequestError::from(Fault::WorkerLost { charged: true });
    begun.charged(lost.clone());
    let Ok(ClaimOutcome::Repeat { first, answer }) =
        keys.claim(claim("a", "body", 2), || true).await
    else {
        panic!("the first request has run")
    };
    assert_eq!((first, answer), (RequestId::from_random(1), Err(lost)));
}

#[tokio::test]
async fn memory_keeps_the_youngest_answers() {
    let data = DataFolder::new();
    let keys = data.open(Duration::ZERO);
    let room = keys.shared.options.answers.0;
    let body = Bytes::from(vec![b'x'; keys.largest_answer()]);
    let fit = room / (body.len() as u64 + memory::ANSWER_OVERHEAD);
    for number in 0..=fit {
        let begun = first(&keys, claim(&number.to_string(), "body", u128::from(number))).await;
        begun.answered(answer(body.clone()));
        assert!(keys.lock().size() <= room);
    }
    let gone = IdempotencyRefusal::Charged { request: RequestId::from_random(0) };
    assert_eq!(refused(&keys, claim("0", "body", 999)).await, gone.into());
    let repeat = keys.claim(claim("1", "body", 999), || true).await;
    assert!(matches!(repeat, Ok(ClaimOutcome::Repeat { answer: Ok(_), .. })));
    // Beyond this number of keys whole entries are evicted, with their bytes.
    for number in 0..memory::MOST_IN_MEMORY as u128 {
        let begun = first(&keys, claim(&format!("more{number}"), "body", number)).await;
        begun.answered(answer(Bytes::new()));
    }
    let table = keys.lock();
    assert_eq!(table.len(), memory::MOST_IN_MEMORY);
    assert!(table.size() <= room);
}

#[test]
fn store_expires_keys_and_counts_by_tenant() {
    let folder = tempfile::tempdir().expect("a folder");
    let (acme, other) =
        (TenantId::new("acme").expect("a name"), TenantId::new("other").expect("a name"));
    let open = || IdempotencyStore::open(folder.path(), Duration::from_secs(10), 2).expect("opens");
    let at = |seconds: u64| UtcTime((1_000 + seconds) * 1_000_000_000);
    let record = |number| IdempotencyRecord {
        fingerprint: [number; 32],
        request: RequestId::from_random(u128::from(number)),
    };
    let put = |store: &IdempotencyStore, number: u8, tenant, seconds| {
        let put = store.put(&[number; 32], tenant, (&record(number), None), at(seconds));
        put.expect("writes") == PutRecord::Taken
    };
    let found = |store: &IdempotencyStore, number: u8, seconds| {
        store.find(&[number; 32], at(seconds)).expect("reads").map(|found| found.record)
    };
    let store = open();
    assert!(put(&store, 1, &acme, 0));
    assert!(put(&store, 2, &acme, 5));
    assert!(!put(&store, 3, &acme, 9), "two keys are the limit");
    assert!(put(&store, 4, &other, 9), "another tenant has its own count");
    assert!(put(&store, 2, &acme, 9), "the same key again is no other key");
    drop(store);
    let store = open(); // counts again
    assert!(!put(&store, 3, &acme, 10));
    assert_eq!(found(&store, 1, 10), Some(record(1)));
    assert_eq!(found(&store, 1, 11), None, "the record is too old");
    assert!(put(&store, 3, &acme, 11), "there is room again");
    store.remove(&[3; 32], &record(9).request).expect("writes");
    assert_eq!(found(&store, 3, 11), Some(record(3)), "another request");
    store.remove(&[3; 32], &record(3).request).expect("writes");
    assert_eq!(found(&store, 3, 11), None);
    assert!(put(&store, 5, &acme, 11));
}
