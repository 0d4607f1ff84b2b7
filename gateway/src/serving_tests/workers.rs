//! Workers that connect, drain, announce and journal.

use tollgate_domain::{RequestId, TenantId};
use tollgate_ledger::RequestState;
use tollgate_wire::v1::*;

use crate::api::tests::test_gateway::{PLAIN, TestGateway, json};
use tollgate_serving::test_support::{FakeWorker, MODEL};

const REQUEST: &str = "req-00000000000000000000000000000000";
/// The subject of a token, which an earlier gateway may have seen.
const KEY: &str = "jwt:k";
/// An epoch of the worker before this gateway started.
const EARLIER: &str = "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee";

fn block(worker: &FakeWorker, number: u64) -> JournalBlock {
    JournalBlock {
        format: 1,
        epoch: EARLIER.into(),
        block: number,
        worker: worker.endpoint.name.as_str().into(),
        device: Some(Device {
            class: "cpu".into(),
            name: "fake".into(),
            uuid: String::new(),
            threads: 1,
        }),
        model: MODEL.into(),
        calibration: "test".into(),
        first_step: number,
        last_step: number,
        started_utc_ns: 1_795_000_000_000_000_000,
        wall_ns: 1_000,
        overhead_ns: 0,
        idle_ns: 300,
        loss_ns: 0,
        shares: vec![Share {
            sequence: 1,
            request_id: REQUEST.into(),
            attempt: 0,
            tenant: "acme".into(),
            key: KEY.into(),
            attributed_ns: 700,
            ..Share::default()
        }],
        finished: Vec::new(),
        last_of_epoch: false,
        energy_mj: None,
        recorded: false,
    }
}

fn finished() -> RequestRecord {
    RequestRecord {
        request_id: REQUEST.into(),
        attempt: 0,
        tenant: "acme".into(),
        key: KEY.into(),
        usage: Some(Usage {
            prompt_tokens: 3,
            cached_tokens: 0,
            completion_tokens: 2,
            attributed_ns: 1_400,
            reference_ns: 900,
        }),
        stages: Some(Stages::default()),
        reason: FinishReason::Stop.into(),
        finished_utc_ns: 1_795_000_000_000_001_000,
        tier: Tier::Interactive.into(),
    }
}

#[tokio::test]
async fn blocks_are_acknowledged_once_in_ledger() {
    let folder = TestGateway::folder();
    let mut worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let second = JournalBlock { finished: vec![finished()], ..block(&worker, 2) };
    // This block does not balance, so it is skipped; later blocks still count.
    let third = JournalBlock { wall_ns: 1_001, ..block(&worker, 3) };
    let fourth = JournalBlock {
        shares: Vec::new(),
        idle_ns: 1_000,
        first_step: 0,
        last_step: 0,
        ..block(&worker, 4)
    };
    for block in [block(&worker, 1), second, third, fourth] {
        worker.journal.send(block).await.expect("followed");
    }
    for expected in 1..=4 {
        assert_eq!(worker.acks.recv().await.map(|ack| ack.block), Some(expected));
    }
    let tenant = TenantId::new("acme").expect("a name");
    let id = RequestId::new(REQUEST).expect("a name");
    let row = gateway.ledger.reader().request(&tenant, &id).expect("a ledger").expect("a row");
    assert_eq!((row.state, row.usage.attributed.nanos()), (RequestState::Posted, 1_400));
    for (path, tenant, expected) in [
        (format!("/v1/usage/{REQUEST}"), "acme", 200),
        (format!("/v1/usage/{}", REQUEST.replace("req-", "chatcmpl-")), "acme", 200),
        (format!("/v1/usage/{REQUEST}"), "other", 404),
        ("/v1/usage/req-1".into(), "acme", 404),
        ("/v1/usage/%20".into(), "acme", 404),
        ("/v1/usage?start=yesterday".into(), "acme", 400),
        ("/v1/usage?from=2026-11-20".into(), "acme", 400),
        ("/v1/usage?tenant=other".into(), "acme", 400),
    ] {
        let response = gateway.ask(tenant, "GET", &path, "").await;
        assert_eq!(response.status().as_u16(), expected, "{tenant} {path}");
    }
    let (_, usage) =
        json(gateway.ask("acme", "GET", &format!("/v1/usage/{REQUEST}"), "").await).await;
    assert_eq!((&usage["state"], &usage["attributed_ns"]), (&"posted".into(), &1_400.into()));
    let (_, statement) =
        json(gateway.ask("acme", "GET", "/v1/usage?group_by=model", "").await).await;
    assert_eq!(statement["data"][0]["attributed_ns"], 1_400);
    let (_, statement) = json(gateway.ask("other", "GET", "/v1/usage", "").await).await;
    assert_eq!(statement["data"].as_array().map(Vec::len), Some(0));
}

/// Attempts of an earlier gateway: lost ones are not billed, finished ones count in
/// the caps before any request is placed.
#[tokio::test]
async fn orphaned_attempts_are_charged_once_and_capped() {
    const CAPPED: &str = r#"
[plans.open]
device_time_per_day = "1ms"
[tenants.acme]
plan = "open"
"#;
    let tenant = TenantId::new("acme").expect("a name");
    let id = RequestId::new(REQUEST).expect("a name");
    for (reason, paid, admitted) in
        [(FinishReason::Fault, 0, true), (FinishReason::Stop, 1_000_000, false)]
    {
        let folder = TestGateway::folder();
        let mut worker = FakeWorker::start(folder.path(), "w0");
        let mut ended = finished();
        ended.reason = reason.into();
        ended.finished_utc_ns = crate::Clock::system().utc().0;
        if let Some(usage) = &mut ended.usage {
            (usage.attributed_ns, usage.reference_ns) = (700, 1_000_000);
            usage.completion_tokens = 1_000;
        }
        let block = JournalBlock { finished: vec![ended], ..block(&worker, 1) };
        worker.journal.send(block).await.expect("room for one");
        let gateway = TestGateway::open(folder, CAPPED, &[&worker]).await;
        let row = gateway.ledger.reader().request(&tenant, &id).expect("a ledger").expect("a row");
        assert_eq!(row.usage.reference.nanos(), paid, "{reason:?}");
        if admitted {
            let (response, ()) = tokio::join!(gateway.chat(""), async {
                worker.run().await.answer("Hi.").await;
            });
            assert_eq!(response.status().as_u16(), 200);
        } else {
            let (status, body) = json(gateway.chat("").await).await;
            assert_eq!(
                (status.as_u16(), &body["error"]["code"]),
                (429, &"insufficient_quota".into())
            );
        }
    }
}

#[tokio::test]
async fn worker_with_invalid_announcement_is_refused() {
    type Change = fn(&mut Announcement);
    let changes: [(&str, Change); 8] = [
        ("another name", |it| it.worker = "other".into()),
        ("no epoch", |it| it.epoch.clear()),
        ("no device", |it| it.device = None),
        ("no models", |it| it.models.clear()),
        ("a model twice", |it| it.models.push(it.models[0].clone())),
        ("a tokenizer too large", |it| it.models[0].vocabulary = 10),
        ("a negative cost", |it| {
            it.models[0].cost_table_json = it.models[0].cost_table_json.replace("1000.0", "-1.0");
        }),
        ("an unknown asset", |it| it.models[0].tokenizer_asset = "00".into()),
    ];
    for (what, change) in changes {
        let folder = TestGateway::folder();
        let worker = FakeWorker::start_announcing(folder.path(), "w0", change);
        let gateway = TestGateway::open_at_once(folder, PLAIN, &[&worker]);
        let workers = gateway.api.serving.workers();
        // A missing asset is a failed call; the other changes break the protocol.
        if what != "an unknown asset" {
            while workers.protocol_violations() == 0 {
                tokio::task::yield_now().await;
            }
        }
        assert!(!workers.is_ready(), "{what}");
    }
}

#[tokio::test]
async fn draining_worker_gets_no_requests() {
    let folder = TestGateway::folder();
    let worker = FakeWorker::start(folder.path(), "w0");
    let gateway = TestGateway::open(folder, PLAIN, &[&worker]).await;
    let workers = gateway.api.serving.workers().clone();
    assert!(workers.is_ready());
    worker.status.send_modify(|status| status.draining = true);
    while workers.is_ready() {
        tokio::task::yield_now().await;
    }
    let response = gateway.chat("").await;
    assert_eq!(response.status(), http::StatusCode::SERVICE_UNAVAILABLE);
    worker.status.send_modify(|status| status.draining = false);
    while !workers.is_ready() {
        tokio::task::yield_now().await;
    }
}
