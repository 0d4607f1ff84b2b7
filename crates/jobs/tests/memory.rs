//! Memory of an upload and of the check of its lines. The file is a program of its own,
//! because a process has one figure of its memory.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tollgate_domain::{Caller, KeyId, PlanName, TenantId, UtcTime};
use tollgate_jobs::{
    BatchId, BatchState, CallerState, CapRequest, DispatchOptions, Dispatcher, Endpoint,
    FailureReply, JobLimits, Jobs, JobsOptions, JobsPlace, LineFailure, LineRequest, LineService,
    NewBatch, NewUpload, QuotaScope, Quotas, ScopedQuotas, ServiceFuture, TryOutcome,
};

/// A service that runs no line.
struct Closed;

impl LineService for Closed {
    fn run(&self, _: LineRequest) -> ServiceFuture<TryOutcome> {
        Box::pin(std::future::pending())
    }

    fn cap(&self, _: CapRequest) -> ServiceFuture<bool> {
        Box::pin(std::future::pending())
    }

    fn failure(&self, _: LineFailure) -> FailureReply {
        FailureReply { status: 500, body: "{}".to_owned() }
    }

    fn caller(&self, _: &Caller) -> CallerState {
        CallerState::Active
    }

    fn quotas(&self, _: &TenantId) -> Vec<ScopedQuotas> {
        quotas()
    }

    fn capacity(&self) -> usize {
        0
    }
}

fn tenant() -> TenantId {
    TenantId::new("acme").expect("a name")
}

fn quotas() -> Vec<ScopedQuotas> {
    let plan = PlanName::new("team").expect("a name");
    vec![ScopedQuotas { scope: QuotaScope::Tenant(tenant()), plan, quotas: Quotas::default() }]
}

/// Uploads and checks a file of `mebibytes`, and returns the most memory meanwhile in KiB.
async fn peak(mebibytes: u64) -> u64 {
    let folder = tempfile::tempdir().expect("a folder");
    let jobs = Jobs::open(JobsOptions {
        place: JobsPlace::Own {
            folder: folder.path().to_owned(),
            before_open: Arc::new(|_| Ok(())),
        },
        limits: JobLimits { spare: 0, ..JobLimits::default() },
        utc: Arc::new(|| UtcTime(1_000_000_000)),
    })
    .expect("opens");
    // The kernel begins the count of the most memory anew.
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let new = NewUpload {
        id: None,
        tenant: tenant(),
        pool: None,
        declared: Some(mebibytes << 20),
        quotas: quotas(),
    };
    let mut upload = jobs.upload(new).await.expect("begins");
    let content = "x".repeat(4_096 - 140);
    for line in 0..(mebibytes << 20) / 4_096 {
        let line = format!(
            "{{\"custom_id\":\"line-{line:08}\",\"method\":\"POST\",\
             \"url\":\"/v1/chat/completions\",\"body\":{{\"model\":\"m\",\"x\":\"{content}\"}}}}\n"
        );
        upload.write(line.into_bytes()).await.expect("written");
    }
    let file = upload.finish("in.jsonl".to_owned(), None).await.expect("finished");
    let batch = NewBatch {
        id: BatchId::from_random(u128::from(mebibytes)),
        tenant: tenant(),
        pool: None,
        key: KeyId::new("key-1").expect("a name"),
        input: file.id,
        endpoint: Endpoint::ChatCompletions,
        metadata: None,
        window: Duration::from_secs(86_400),
        results_kept: None,
    };
    let batch = jobs.create_batch(batch, quotas()).await.expect("created");
    let dispatcher = Dispatcher::new(jobs.clone(), Arc::new(Closed), DispatchOptions::default());
    let checked = async {
        while jobs.batch(tenant(), batch.id).await.expect("there").state != BatchState::Running {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = dispatcher.run(CancellationToken::new()) => panic!("it stopped"),
        () = checked => {}
    }
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a figure");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// J03 and the figures: memory does not grow with the file.
#[tokio::test]
#[ignore = "long: 200 MiB through a debug build"]
async fn upload_takes_no_memory_for_its_size() {
    // The first one also pays for pages that stay.
    peak(2).await;
    let (small, large) = (peak(2).await, peak(190).await);
    println!("{small} KiB for 2 MiB, {large} KiB for 190 MiB");
    assert!(large <= small + 8 * 1_024, "{small} KiB for 2 MiB, {large} KiB for 190 MiB");
}
