//! Tests of a whole worker over its socket: its answers, its metering and its end.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod support;

use std::collections::BTreeMap;

use support::*;
use tollgate_domain::{Block, DeviceNanos};
use tollgate_wire::v1;
use tollgate_wire::v1::run_request::Message;
use tollgate_worker::{
    DeviceChoice, EngineChoice, ListenAt, SchedulePolicy, StepCost, SyntheticDevice, WorkerError,
    WorkerOptions, serve,
};

type Reasons = v1::FinishReason;

#[tokio::test(flavor = "multi_thread")]
async fn worker_announces_itself_and_serves_assets() {
    let data = tempfile::tempdir().expect("a folder");
    let bench = start(data.path(), |_| ()).await;
    let v1::Announcement { worker, epoch, device, models, .. } = bench.announcement.clone();
    assert_eq!((worker.as_str(), epoch.len(), models.len()), ("0", 32, 1));
    assert_eq!(device.expect("a device").class, "cpu");
    let model = &models[0];
    assert_eq!(model.name, MODEL);
    assert!(model.context_length >= 256 && model.vocabulary > 0 && !model.end_tokens.is_empty());
    serde_json::from_str::<tollgate_domain::CostTable>(&model.cost_table_json).expect("a table");
    let folder = options(data.path()).model;
    let tokenizer = std::fs::read(folder.join("tokenizer.json")).expect("reads");
    assert_eq!(asset(&bench, &model.tokenizer_asset).await, Ok(tokenizer));
    assert!(asset(&bench, &model.template_asset).await.is_ok_and(|bytes| !bytes.is_empty()));
    assert_eq!(asset(&bench, "00").await, Err(tonic::Code::NotFound));
    bench.end().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn synthetic_engine_announces_itself_and_takes_time() {
    let data = tempfile::tempdir().expect("a folder");
    let cost = StepCost { speed: 10.0, ..StepCost::default() };
    let device = SyntheticDevice {
        cost,
        kv_tokens: 1_024,
        context: 512,
        policy: SchedulePolicy::Fair,
        faults: None,
    };
    let bench = start(data.path(), |options| {
        options.engine = EngineChoice::Synthetic(device);
        options.device = DeviceChoice::Cuda(None); // a synthetic device replaces any other
    })
    .await;
    let v1::Announcement { device, models, .. } = bench.announcement.clone();
    let device = device.expect("a device");
    assert_eq!((device.class.as_str(), device.threads), ("synthetic", 0));
    assert!(device.name.starts_with("synthetic: ") && device.name.contains("speed 10"));
    assert_eq!(models[0].context_length, 512);
    let table: tollgate_domain::CostTable =
        serde_json::from_str(&models[0].cost_table_json).expect("a table");
    assert!(table.version().starts_with("synthetic-"));
    let outcome = bench.run(assignment("req-1", "acme", vec![9; 300])).await.outcome().await;
    let usage = outcome.usage.expect("figures");
    assert_eq!((outcome.tokens, outcome.reasons), (24, vec![Reasons::Length]));
    // At least two steps for the prompt, then 23 more, each of 2.8 ms or more.
    assert!(usage.attributed_ns >= 25 * 2_800_000, "{usage:?}");
    assert!(usage.attributed_ns >= usage.reference_ns, "it had no company to share steps with");
    bench.end().await.expect("ends");
}

async fn asset(bench: &Bench, hash: &str) -> Result<Vec<u8>, tonic::Code> {
    let request = v1::AssetRequest { hash: hash.to_owned() };
    let chunks = bench.client.clone().asset(request).await.map_err(|status| status.code())?;
    let (mut chunks, mut bytes) = (chunks.into_inner(), Vec::new());
    while let Some(chunk) = chunks.message().await.expect("no error") {
        assert!(chunk.data.len() <= 256 * 1024);
        bytes.extend(chunk.data);
    }
    Ok(bytes)
}

/// The journal of one epoch, summed by request.
#[derive(Default)]
struct Account {
    wall: DeviceNanos,
    platform: DeviceNanos,
    shares: BTreeMap<String, DeviceNanos>,
    finished: BTreeMap<String, v1::Usage>,
    blocks: u64,
    ended: bool,
}

impl Account {
    fn add(&mut self, block: &Block) {
        let parts = block.parts();
        self.blocks += 1;
        assert_eq!(parts.number, self.blocks, "no gaps");
        self.wall += parts.wall;
        self.platform += parts.overhead + parts.idle + parts.loss;
        for share in &parts.shares {
            *self.shares.entry(share.attempt.request.to_string()).or_default() += share.attributed;
        }
        for finished in &parts.finished {
            let id = finished.attempt.request.to_string();
            assert!(self.finished.insert(id, finished.usage.into()).is_none(), "ends once");
        }
        self.ended = parts.last_of_epoch;
    }
}

/// The sum of the billed time is the time of the steps, to the nanosecond, over a
/// mixed run with cancelled requests. The billed time of a request is the reported
/// one.
#[tokio::test(flavor = "multi_thread")]
async fn billed_time_equals_step_time() {
    let data = tempfile::tempdir().expect("a folder");
    let bench = start(data.path(), |_| ()).await;
    let mut reader = bench.blocks().await;
    let mut running = Vec::new();
    for index in 0..12_u32 {
        let prompt = (1..20 + index * 9).map(|token| token % 50 + 10).collect();
        let mut assignment =
            assignment(&format!("req-{index}"), ["acme", "beta"][index as usize % 2], prompt);
        assignment.choices = 1 + index % 3;
        assignment.max_tokens = 20 + index * 6;
        running.push(bench.run(assignment).await);
    }
    let mut reported = BTreeMap::new();
    for (index, mut request) in running.into_iter().enumerate() {
        match index % 4 {
            // The client leaves after the first event.
            1 => drop((request.events.message().await, request)),
            // The client cancels after the first event and waits for the usage.
            2 => {
                let _ = request.events.message().await;
                let cancel = v1::Cancel { reason: v1::CancelReason::Deadline.into() };
                let message = v1::RunRequest { message: Some(Message::Cancel(cancel)) };
                let _ = request.messages.send(message).await;
                let usage = request.outcome().await.usage.expect("figures");
                reported.insert(format!("req-{index}"), usage);
            }
            _ => {
                let outcome = request.outcome().await;
                assert!(outcome.refused.is_none(), "{:?}", outcome.refused);
                let usage = outcome.usage.expect("figures");
                assert_eq!(outcome.tokens as u64, usage.completion_tokens);
                reported.insert(format!("req-{index}"), usage);
            }
        }
    }
    let mut account = Account::default();
    while account.finished.len() < 12 {
        account.add(&reader.next().await.expect("a block"));
    }
    let ending = bench.end();
    let reading = async {
        while let Some(block) = reader.next().await {
            account.add(&block);
        }
    };
    let (ended, ()) = tokio::join!(ending, reading);
    ended.expect("ends");
    let tenants: DeviceNanos = account.shares.values().copied().sum();
    assert_eq!(account.wall, tenants + account.platform);
    for (id, usage) in &account.finished {
        let share = account.shares.get(id).copied().unwrap_or_default();
        assert_eq!(share, DeviceNanos(usage.attributed_ns), "{id}");
        if let Some(reported) = reported.get(id) {
            assert_eq!(reported, usage, "{id}");
        }
    }
    assert!(account.ended || next_life_ends_it(data.path(), &mut account).await);
}

/// Reads the last block from the next process: the reader may have been too slow
/// for it.
async fn next_life_ends_it(data: &std::path::Path, account: &mut Account) -> bool {
    let bench = start(data, |_| ()).await;
    let mut reader = bench.blocks().await;
    while !account.ended {
        let block = reader.next().await.expect("a block");
        if block.parts().number > account.blocks {
            account.add(&block);
        }
    }
    bench.end().await.expect("ends");
    account.ended
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_get_the_options_they_ask_for() {
    let data = tempfile::tempdir().expect("a folder");
    let bench = start(data.path(), |_| ()).await;
    let prompt: Vec<u32> = (10..30).collect();
    // Each request has its own id: a dropped stream cancels its request, and the
    // cancel may come after the next request.
    let asked = std::cell::Cell::new(0);
    let plain = || {
        asked.set(asked.get() + 1);
        let name = format!("req-{}", asked.get());
        let mut assignment = assignment(&name, "acme", prompt.clone());
        // An end token would shorten the text.
        let ends = bench.announcement.models[0].end_tokens.iter();
        let sampling = assignment.sampling.as_mut().expect("it is there");
        sampling.logit_bias = ends.map(|&token| (token, -100.0)).collect();
        assignment
    };
    let whole = bench.run(plain()).await.outcome().await;
    assert_eq!(whole.reasons, [Reasons::Length]);
    assert_eq!((whole.tokens, whole.logprobs), (24, 0));
    let text = whole.texts[0].clone();

    // A stop string ends the text before the string, after the same tokens.
    let (at, stop) = text.char_indices().nth(text.chars().count() / 2).expect("text");
    let stop = stop.to_string();
    let mut stopping = plain();
    stopping.stop = vec![stop.clone()];
    let stopped = bench.run(stopping).await.outcome().await;
    assert_eq!(stopped.reasons, [Reasons::Stop]);
    assert_eq!(stopped.texts[0], text[..text.find(&stop).unwrap_or(at)]);
    assert!(stopped.tokens <= whole.tokens);

    // Log probabilities of prompt and completion, for each of two choices.
    let mut telling = plain();
    telling.choices = 2;
    telling.echo_logprobs = true;
    telling.sampling.as_mut().expect("it is there").top_logprobs = Some(3);
    let told = bench.run(telling).await.outcome().await;
    assert_eq!(told.tokens, 48, "{:?} {:?}", told.refused, told.reasons);
    assert_eq!(told.logprobs, 48 + prompt.len() - 1);
    assert_eq!(told.texts, [text.clone(), text], "greedy choices are alike");

    // An invalid request is refused with a reason and costs nothing.
    type Change = fn(&mut v1::Assignment);
    let cases: &[(Change, v1::RefusedReason)] = &[
        (|it| it.model = "other".into(), v1::RefusedReason::Invalid),
        (|it| it.tenant = "a b".into(), v1::RefusedReason::Invalid),
        (|it| it.max_tokens = u32::MAX, v1::RefusedReason::Invalid),
        (|it| it.prompts[0].tokens = vec![u32::MAX], v1::RefusedReason::Invalid),
        (|it| it.prompts[0].tokens.clear(), v1::RefusedReason::Invalid),
        (|it| it.budget_ns = Some(1), v1::RefusedReason::Budget),
    ];
    for (change, reason) in cases {
        let mut assignment = plain();
        change(&mut assignment);
        let outcome = bench.run(assignment).await.outcome().await;
        let refused = outcome.refused.expect("refused");
        assert_eq!(refused.reason(), *reason, "{}", refused.message);
        assert_eq!((outcome.tokens, outcome.usage), (0, None));
    }
    bench.end().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn full_queue_refuses_until_a_cancel() {
    let data = tempfile::tempdir().expect("a folder");
    let bench = start(data.path(), |options| {
        options.max_sequences = 1;
        options.queue_capacity = 1;
    })
    .await;
    let ends: Vec<u32> = bench.announcement.models[0].end_tokens.clone();
    let long = |id: &str| {
        let mut assignment = assignment(id, "acme", vec![10, 11, 12]);
        assignment.max_tokens = 400;
        let sampling = assignment.sampling.as_mut().expect("it is there");
        sampling.logit_bias = ends.iter().map(|&token| (token, -100.0)).collect();
        assignment
    };
    let mut first = bench.run(long("req-1")).await;
    first.events.message().await.expect("no error").expect("it runs");
    let second = bench.run(long("req-2")).await;
    let third = bench.run(long("req-3")).await.outcome().await;
    let refused = third.refused.expect("refused");
    assert_eq!(refused.reason(), v1::RefusedReason::Overloaded);
    drop(first);
    let second = second.outcome().await;
    assert_eq!((second.reasons, second.tokens), (vec![Reasons::Length], 400));
    bench.end().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn parents_end_stops_worker_without_loss() {
    let data = tempfile::tempdir().expect("a folder");
    let bench = start(data.path(), |_| ()).await;
    let old = bench.announcement.epoch.clone();
    let mut endless = assignment("req-1", "acme", vec![10, 11, 12]);
    endless.max_tokens = 900;
    let mut request = bench.run(endless).await;
    request.events.message().await.expect("no error").expect("it runs");
    bench.end().await.expect("ends");
    // The step was lost with the process, but the journal was not.
    let next = start(data.path(), |_| ()).await;
    assert_ne!(next.announcement.epoch, old);
    let mut reader = next.blocks().await;
    let mut account = Account::default();
    while !account.ended {
        let block = reader.next().await.expect("a block");
        assert_eq!(block.parts().epoch.to_string(), old);
        account.add(&block);
    }
    let usage = account.finished.get("req-1").expect("its end is recorded");
    assert_eq!(account.shares["req-1"], DeviceNanos(usage.attributed_ns));
    next.end().await.expect("ends");
}

/// A full journal stops billable work but not the worker. Work continues once the
/// journal is acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn full_journal_refuses_until_acknowledged() {
    let data = tempfile::tempdir().expect("a folder");
    let fill = async |bench: &Bench, id: &str| {
        let mut assignment = assignment(id, "acme", (10..40).collect());
        assignment.max_tokens = 200;
        let sampling = assignment.sampling.as_mut().expect("it is there");
        let ends = bench.announcement.models[0].end_tokens.iter();
        sampling.logit_bias = ends.map(|&token| (token, -100.0)).collect();
        bench.run(assignment).await.outcome().await
    };
    let bench = start(data.path(), |_| ()).await;
    for index in 0..4 {
        assert!(fill(&bench, &format!("req-{index}")).await.usage.is_some());
    }
    bench.end().await.expect("ends");
    // The files of the first process are most of what the second may hold.
    let held: u64 = std::fs::read_dir(data.path().join("workers/0/journal"))
        .expect("lists")
        .map(|entry| entry.expect("an entry").metadata().expect("a file").len())
        .sum();
    let bench = start(data.path(), |options| options.journal_bytes = held + held / 4).await;
    let refused = fill(&bench, "req-5").await.refused.expect("refused");
    assert_eq!(refused.reason(), v1::RefusedReason::Overloaded, "{}", refused.message);
    let mut reader = bench.blocks().await;
    while !reader.next().await.expect("a block").parts().last_of_epoch {}
    // The acknowledgement may still be on its way.
    let outcome = loop {
        let outcome = fill(&bench, "req-6").await;
        if outcome.refused.is_none() {
            break outcome;
        }
    };
    assert!(outcome.usage.is_some());
    bench.end().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_arrives_at_once_and_on_change() {
    let data = tempfile::tempdir().expect("a folder");
    let bench = start(data.path(), |_| ()).await;
    let mut statuses =
        bench.client.clone().status(v1::StatusRequest {}).await.expect("tells").into_inner();
    let first = statuses.message().await.expect("no error").expect("a status");
    assert_eq!((first.epoch, first.steps), (bench.announcement.epoch.clone(), 0));
    bench.run(assignment("req-1", "acme", vec![10, 11])).await.outcome().await;
    let later = loop {
        let status = statuses.message().await.expect("no error").expect("a status");
        if status.running == 0 && status.steps > 0 {
            break status;
        }
    };
    assert!(later.busy_ns > 0 && later.kv_blocks_free == later.kv_blocks_total);
    bench.end().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_start_returns_an_error() {
    let data = tempfile::tempdir().expect("a folder");
    type Change = fn(&mut WorkerOptions);
    let cases: &[(&str, Change)] = &[
        ("no such model", |it| it.model = it.data.join("none")),
        ("no such device", |it| it.device = DeviceChoice::Cuda(Some("1000".into()))),
        ("a socket in the way", |it| {
            let file = it.data.join("own/file");
            std::fs::create_dir(it.data.join("own")).expect("a folder");
            private(&it.data.join("own"));
            std::fs::write(&file, "x").expect("writes");
            it.listen = ListenAt::Socket(file);
        }),
        ("a folder that others may enter", |it| {
            it.listen = ListenAt::Socket(it.data.join("open/worker.sock"));
            std::fs::create_dir(it.data.join("open")).expect("a folder");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(it.data.join("open"), mode).expect("opens it");
        }),
    ];
    for (name, change) in cases {
        let mut options = options(data.path());
        change(&mut options);
        assert!(serve(options).await.is_err(), "{name}");
    }
    let bench = start(data.path(), |_| ()).await;
    let second = serve(options(data.path())).await;
    assert!(matches!(second, Err(WorkerError::SocketInUse(_))), "{second:?}");
    let mut other = options(data.path());
    other.listen = ListenAt::Socket(data.path().join("run/other.sock"));
    let second = serve(other).await;
    assert!(matches!(second, Err(WorkerError::Journal { .. })), "{second:?}");
    bench.end().await.expect("ends");
}

fn private(folder: &std::path::Path) {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(folder, mode).expect("closes it");
}
