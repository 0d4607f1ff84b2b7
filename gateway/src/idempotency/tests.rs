//! What outlives the process, and what does not.

use tempfile::TempDir;
use tollgate_config::Config;
use tollgate_domain::{KeyId, TenantId};
use tollgate_ledger::{Ledger, LedgerHandle};

use super::*;

struct House {
    folder: TempDir,
    ledger: LedgerHandle,
}

impl House {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("a ledger");
        Self { folder, ledger }
    }

    /// A process that began `ago`.
    fn open(&self, ago: Duration) -> Idempotency {
        let text = "";
        let config = Config::from_toml(Path::new("test.toml"), text).expect("a config");
        let options = config.gateway().idempotency.clone();
        let clock = Clock::system();
        let data = self.folder.path();
        let intents = Intents::open(data, options.kept, options.keys_per_tenant).expect("opens");
        let started = UtcTime(clock.utc().0 - ago.as_nanos() as u64);
        let ledger = self.ledger.reader().clone();
        let known = Mutex::default();
        let shared = Shared { options, intents, ledger, clock, started, known };
        Idempotency { shared: Arc::new(shared) }
    }
}

fn ask(key: &str, body: &str, request: u128) -> Ask {
    let tenant = TenantId::new("acme").expect("a name");
    Ask {
        caller: Caller { tenant, key: KeyId::new("k1").expect("a name") },
        key: IdempotencyKey(key.to_owned()),
        fingerprint: fingerprint("chat", body.as_bytes()),
        request: RequestId::from_random(request),
    }
}

async fn first(keys: &Idempotency, ask: Ask) -> First {
    match keys.claim(ask).await {
        Ok(Claimed::First(first)) => first,
        Ok(Claimed::Repeat(_)) => panic!("it is a repeat"),
        Err(error) => panic!("{error:?}"),
    }
}

async fn refused(keys: &Idempotency, ask: Ask) -> ApiError {
    match keys.claim(ask).await {
        Err(error) => error,
        Ok(_) => panic!("it is not refused"),
    }
}

#[tokio::test]
async fn what_the_last_process_began_is_not_run_again_before_it_is_settled() {
    let house = House::new();
    let keys = house.open(Duration::ZERO);
    let begun = first(&keys, ask("a", "body", 1)).await;
    begun.record().await.expect("records");
    drop((begun, keys)); // the process dies
    let unsettled = IdempotencyRefusal::Unsettled { request: RequestId::from_random(1) };
    let young = house.open(Duration::from_secs(1));
    assert_eq!(refused(&young, ask("a", "body", 2)).await, unsettled.into());
    let reused = refused(&young, ask("a", "other body", 2)).await;
    assert_eq!(reused, IdempotencyRefusal::OtherBody.into());
    drop(young);
    // Every worker has reported by now, and none of that request.
    let old = house.open(SETTLING);
    let second = first(&old, ask("a", "body", 2)).await;
    second.record().await.expect("records");
    drop((second, old));
    let unsettled = IdempotencyRefusal::Unsettled { request: RequestId::from_random(2) };
    let young = house.open(Duration::ZERO);
    assert_eq!(refused(&young, ask("a", "body", 3)).await, unsettled.into());
}

#[tokio::test]
async fn who_never_ran_leaves_the_key_to_the_next() {
    let house = House::new();
    let keys = house.open(Duration::ZERO);
    let gone = first(&keys, ask("a", "body", 1)).await;
    let (waits, ()) = tokio::join!(keys.claim(ask("a", "body", 2)), async {
        tokio::task::yield_now().await;
        drop(gone);
    });
    let Ok(Claimed::First(next)) = waits else { panic!("it is first now") };
    next.record().await.expect("records");
    next.free(ApiError::Internal).await;
    drop(keys);
    // Freed on disk as well, whatever the body.
    let keys = house.open(Duration::ZERO);
    first(&keys, ask("a", "other", 3)).await;
}

#[tokio::test]
async fn an_error_that_was_charged_is_the_answer() {
    let house = House::new();
    let keys = house.open(Duration::ZERO);
    let begun = first(&keys, ask("a", "body", 1)).await;
    begun.record().await.expect("records");
    begun.charged(ApiError::WorkerLost { charged: true });
    let Ok(Claimed::Repeat(answer)) = keys.claim(ask("a", "body", 2)).await else {
        panic!("it has run")
    };
    assert_eq!(answer.expect_err("an error"), ApiError::WorkerLost { charged: true });
}

#[tokio::test]
async fn memory_keeps_the_youngest_answers() {
    let house = House::new();
    let keys = house.open(Duration::ZERO);
    let room = keys.shared.options.answers.0;
    let body = Bytes::from(vec![b'x'; keys.largest_answer()]);
    let fit = room / (body.len() as u64 + ANSWER_OVERHEAD);
    for number in 0..=fit {
        let begun = first(&keys, ask(&number.to_string(), "body", u128::from(number))).await;
        begun.answered(Answer { head: Ok(HeaderMap::new()), body: body.clone() });
        assert!(keys.lock().size <= room);
    }
    let gone = IdempotencyRefusal::Charged { request: RequestId::from_random(0) };
    assert_eq!(refused(&keys, ask("0", "body", 999)).await, gone.into());
    assert!(matches!(keys.claim(ask("1", "body", 999)).await, Ok(Claimed::Repeat(Ok(_)))));
    // Beyond so many keys memory lets go of whole entries, and of their bytes.
    for number in 0..MOST_IN_MEMORY as u128 {
        let begun = first(&keys, ask(&format!("more{number}"), "body", number)).await;
        begun.answered(Answer { head: Ok(HeaderMap::new()), body: Bytes::new() });
    }
    let known = keys.lock();
    assert_eq!((known.keys.len(), known.order.len()), (MOST_IN_MEMORY, MOST_IN_MEMORY));
    assert!(known.size <= room);
}

#[test]
fn keys_are_forgotten_in_time_and_counted_by_tenant() {
    let folder = tempfile::tempdir().expect("a folder");
    let (acme, other) =
        (TenantId::new("acme").expect("a name"), TenantId::new("other").expect("a name"));
    let open = || Intents::open(folder.path(), Duration::from_secs(10), 2).expect("opens");
    let at = |seconds: u64| UtcTime((1_000 + seconds) * 1_000_000_000);
    let intent = |number| Intent {
        fingerprint: [number; 32],
        request: RequestId::from_random(u128::from(number)),
    };
    let put = |intents: &Intents, number: u8, tenant, seconds| {
        intents.put(&[number; 32], tenant, &intent(number), at(seconds)).expect("writes")
    };
    let intents = open();
    assert!(put(&intents, 1, &acme, 0));
    assert!(put(&intents, 2, &acme, 5));
    assert!(!put(&intents, 3, &acme, 9), "two are all");
    assert!(put(&intents, 4, &other, 9), "another's are not counted");
    assert!(put(&intents, 2, &acme, 9), "the same again is no other");
    drop(intents);
    let intents = open(); // counted again
    assert!(!put(&intents, 3, &acme, 10));
    assert_eq!(intents.find(&[1; 32], at(10)).expect("reads"), Some(intent(1)));
    assert_eq!(intents.find(&[1; 32], at(11)).expect("reads"), None, "too old");
    assert!(put(&intents, 3, &acme, 11), "there is room again");
    intents.remove(&[3; 32], &intent(9).request).expect("writes");
    assert_eq!(intents.find(&[3; 32], at(11)).expect("reads"), Some(intent(3)), "not that one");
    intents.remove(&[3; 32], &intent(3).request).expect("writes");
    assert_eq!(intents.find(&[3; 32], at(11)).expect("reads"), None);
    assert!(put(&intents, 5, &acme, 11));
}
