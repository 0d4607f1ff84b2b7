//! Blocks to post, and functions that submit an act and wait for its result.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::path::Path;
use std::time::Duration;

use futures_executor::block_on;
use tollgate_domain::{
    Attempt, Block, BlockParts, Caller, Device, DeviceClass, DeviceNanos, FinishReason,
    FinishedAttempt, KeyId, ModelName, PlanName, RequestId, SequenceId, Share, Stages, TenantId,
    Tier, Usage, UtcTime, WorkerEpoch, WorkerName,
};
use tollgate_ledger::{
    Act, AdminAction, FaultCap, LedgerError, LedgerHandle, PartiallyRejectedBlock, PlansInForce,
    Posted, RefusedBlock,
};

pub const EPOCH: WorkerEpoch = WorkerEpoch(7);
/// 2026-11-20, noon.
pub const NOON: UtcTime = UtcTime(1_795_176_000_000_000_000);

pub fn caller(tenant: &str) -> Caller {
    Caller {
        tenant: TenantId::new(tenant).expect("a name"),
        key: KeyId::new("k1").expect("a name"),
    }
}

pub fn attempt(request: u128, attempt: u32) -> Attempt {
    Attempt { request: RequestId::from_random(request), attempt }
}

pub fn share(tenant: &str, request: u128, ns: u64) -> Share {
    Share {
        sequence: SequenceId(request as u64),
        caller: caller(tenant),
        attempt: attempt(request, 0),
        attributed: DeviceNanos(ns),
        tier: Tier::Interactive,
    }
}

pub fn usage(attributed: u64, reference: u64) -> Usage {
    Usage {
        prompt_tokens: 10,
        cached_tokens: 2,
        completion_tokens: 5,
        attributed: DeviceNanos(attributed),
        reference: DeviceNanos(reference),
    }
}

pub fn finished(tenant: &str, request: u128, usage: Usage) -> FinishedAttempt {
    FinishedAttempt {
        caller: caller(tenant),
        attempt: attempt(request, 0),
        usage,
        stages: Stages { queue_ns: 1, prefill_ns: 2, decode_ns: 3 },
        reason: FinishReason::Stop,
        finished: NOON,
        tier: Tier::Interactive,
    }
}

/// A block of one step with 10 ns of overhead, 20 of idle, 5 of loss.
pub fn parts(number: u64, shares: Vec<Share>, finished: Vec<FinishedAttempt>) -> BlockParts {
    let tenants: DeviceNanos = shares.iter().map(|share| share.attributed).sum();
    BlockParts {
        epoch: EPOCH,
        number,
        worker: WorkerName::new("0").expect("a name"),
        device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: String::new() },
        model: ModelName::new("m").expect("a name"),
        calibration: "v1".into(),
        first_step: number * 10,
        last_step: number * 10 + 9,
        started: NOON,
        wall: tenants + DeviceNanos(35),
        overhead: DeviceNanos(10),
        idle: DeviceNanos(20),
        loss: DeviceNanos(5),
        shares,
        finished,
        last_of_epoch: false,
        energy: None,
    }
}

pub fn block(number: u64, shares: Vec<Share>, finished: Vec<FinishedAttempt>) -> Block {
    Block::try_from(parts(number, shares, finished)).expect("it balances")
}

pub fn cap(tenant: &str, request: u128, payable: Usage) -> FaultCap {
    FaultCap {
        caller: caller(tenant),
        attempt: attempt(request, 0),
        model: ModelName::new("m").expect("a name"),
        class: DeviceClass::cpu(),
        payable,
        at: NOON,
        tier: Tier::Interactive,
    }
}

pub fn post(ledger: &LedgerHandle, block: Block) -> Result<Posted, LedgerError> {
    block_on(ledger.submit(block))
}

pub fn post_cap(ledger: &LedgerHandle, cap: FaultCap) -> Result<Posted, LedgerError> {
    block_on(ledger.submit(cap))
}

pub fn skip(ledger: &LedgerHandle, number: u64) -> Result<Posted, LedgerError> {
    skip_as(ledger, "0", number)
}

pub fn skip_as(ledger: &LedgerHandle, worker: &str, number: u64) -> Result<Posted, LedgerError> {
    let worker = WorkerName::new(worker).expect("a name");
    let refused = RefusedBlock { worker, epoch: EPOCH, number, reason: "a lie".into(), at: NOON };
    block_on(ledger.submit(refused))
}

pub fn post_partly(
    ledger: &LedgerHandle,
    partly: PartiallyRejectedBlock,
) -> Result<Posted, LedgerError> {
    block_on(ledger.submit(partly))
}

pub fn record(ledger: &LedgerHandle, id: &str, operation: &str) -> Result<Posted, LedgerError> {
    block_on(ledger.submit(action(id, operation)))
}

pub fn action(id: &str, operation: &str) -> AdminAction {
    AdminAction {
        id: id.into(),
        at: NOON,
        operation: operation.into(),
        actor: "uid 0".into(),
        user: Some(("acme".into(), Some("k1".into()))),
        detail: serde_json::Value::Null,
    }
}

pub fn record_action(ledger: &LedgerHandle, action: AdminAction) -> Result<Posted, LedgerError> {
    block_on(ledger.submit(action))
}

/// Puts a plan of acme in force from `at` on.
pub fn tell_plan(ledger: &LedgerHandle, at: UtcTime, plan: &str) -> Posted {
    let action = AdminAction { at, ..action(&format!("plans-{}-{plan}", at.0), "plans.in_force") };
    let plans =
        vec![(TenantId::new("acme").expect("a name"), PlanName::new(plan).expect("a plan"))];
    post_plans(ledger, PlansInForce { action, plans }).expect("posts")
}

pub fn post_plans(ledger: &LedgerHandle, told: PlansInForce) -> Result<Posted, LedgerError> {
    block_on(ledger.submit(told))
}

pub fn sign(ledger: &LedgerHandle) {
    block_on(ledger.submit(Act::Sign)).expect("signs");
}

/// Drops the last handle and waits until the writer has closed the file, because a
/// test that replaces an open file races with the writer.
pub fn close(ledger: LedgerHandle, path: &Path) {
    drop(ledger);
    let is_open = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("lists the open files");
        descriptors
            // A descriptor that was closed since the listing has no target.
            .filter_map(|descriptor| std::fs::read_link(descriptor.ok()?.path()).ok())
            .any(|target| target == path)
    };
    while is_open() {
        std::thread::sleep(Duration::from_millis(1));
    }
}
