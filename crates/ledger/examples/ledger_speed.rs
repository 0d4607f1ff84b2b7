//! Speed of the ledger, for benchmarks: posts blocks through the writer's queue, a
//! given number to a commit.
//!
//! `ledger_speed FOLDER BLOCKS GROUP…` makes a new ledger in FOLDER for each size of
//! a group, posts to it, and prints a line of JSON.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::collections::VecDeque;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use futures_executor::block_on;
use serde_json::json;
use tollgate_domain::{
    Attempt, Block, BlockParts, Caller, Device, DeviceClass, DeviceNanos, FinishReason,
    FinishedAttempt, KeyId, ModelName, RequestId, SequenceId, Share, Stages, TenantId, Tier, Usage,
    UtcTime, WorkerEpoch, WorkerName,
};
use tollgate_ledger::{AuditKey, Ledger, LedgerOptions};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Requests that end in one block. Under load several end in a step.
const ENDS: u64 = 4;

fn main() -> Fallible<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let [folder, blocks, groups @ ..] = &words[..] else {
        return Err("usage: ledger_speed FOLDER BLOCKS GROUP…".into());
    };
    let (folder, blocks) = (Path::new(folder), blocks.parse()?);
    std::fs::create_dir_all(folder)?;
    for group in groups {
        let path = folder.join(format!("records.{group}.db"));
        let seconds = post_all(&path, group.parse()?, blocks)?;
        // The log is copied into the file first, so that the file's size counts all.
        rusqlite::Connection::open(&path)?.query_row(
            "PRAGMA wal_checkpoint(TRUNCATE)",
            [],
            |_| Ok(()),
        )?;
        let bytes = std::fs::metadata(&path)?.len();
        println!(
            "{}",
            json!({
                "name": "records", "group": group, "seconds": seconds, "bytes": bytes,
                "requests": blocks * ENDS, "entries": blocks * (ENDS + 2),
            })
        );
    }
    Ok(())
}

/// Posts all blocks and returns the seconds from the first block sent to the last
/// one on the disk. Two groups are under way, so that the next group always waits.
fn post_all(path: &Path, group: usize, blocks: u64) -> Fallible<f64> {
    let key = AuditKey::from_seed("tollgate/benchmark", &[7; 32]).ok_or("a bad name")?;
    let queue = 2 * group;
    let key = Some(Arc::new(key));
    let options = LedgerOptions { key, group, queue, ..LedgerOptions::new(path) };
    let ledger = Ledger::open_with(options)?;
    let made: Vec<Block> = (1..=blocks).map(block).collect::<Fallible<_>>()?;
    let mut posting = VecDeque::with_capacity(queue);
    let began = Instant::now();
    for block in made {
        if posting.len() == queue
            && let Some(oldest) = posting.pop_front()
        {
            block_on(oldest)?;
        }
        posting.push_back(ledger.submit(block));
    }
    for posted in posting {
        block_on(posted)?;
    }
    Ok(began.elapsed().as_secs_f64())
}

fn block(number: u64) -> Fallible<Block> {
    let requests = number * ENDS..(number + 1) * ENDS;
    let attributed = DeviceNanos(1_000_000);
    let owner = |request: u64| -> Fallible<(Caller, Attempt)> {
        let tenant = TenantId::new(&format!("tenant-{}", request % 50))?;
        let key = KeyId::new(&format!("key-{}", request % 50))?;
        // Ids like the gateway's: a time that several share, then random bits.
        let drawn = u128::from(request).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let request = RequestId::from_random(u128::from(request / 256) << 80 | drawn >> 48);
        Ok((Caller { tenant, key }, Attempt { request, attempt: 0 }))
    };
    let (mut shares, mut finished) = (Vec::new(), Vec::new());
    for request in requests {
        let (caller, attempt) = owner(request)?;
        shares.push(Share {
            sequence: SequenceId(request),
            caller: caller.clone(),
            attempt: attempt.clone(),
            attributed,
            tier: Tier::Interactive,
        });
        finished.push(FinishedAttempt {
            caller,
            attempt,
            usage: Usage {
                prompt_tokens: 200,
                cached_tokens: 0,
                completion_tokens: 100,
                attributed,
                reference: attributed,
            },
            stages: Stages { queue_ns: 1, prefill_ns: 2, decode_ns: 3 },
            reason: FinishReason::Stop,
            finished: UtcTime(1_795_176_000_000_000_000 + number),
            tier: Tier::Interactive,
        });
    }
    let idle = DeviceNanos(500);
    let parts = BlockParts {
        epoch: WorkerEpoch(1),
        number,
        worker: WorkerName::new("0")?,
        device: Device { class: DeviceClass::cpu(), name: "none".into(), uuid: String::new() },
        model: ModelName::new("model")?,
        calibration: "1".into(),
        first_step: number,
        last_step: number,
        started: UtcTime(1_795_176_000_000_000_000),
        wall: shares.iter().map(|share| share.attributed).sum::<DeviceNanos>() + idle,
        overhead: DeviceNanos::ZERO,
        idle,
        loss: DeviceNanos::ZERO,
        shares,
        finished,
        last_of_epoch: false,
        energy: None,
    };
    Ok(Block::try_from(parts)?)
}
