//! Time that the statement of a tenant's month takes: fills a ledger with the given
//! number of entries and prints one line of JSON.
//!
//! `cargo run --release -p tollgate-ledger --example month -- 10000000 FOLDER`
//!
//! One tenant with four keys has nine tenths of the entries, another tenant the rest. A
//! block has a hundred entries, a request ten.
#![allow(clippy::disallowed_methods, reason = "a program that measures time")]
#![allow(clippy::print_stdout, reason = "a program that prints its figures")]

use futures_executor::block_on;
use std::time::Instant;

use tollgate_domain::{
    Attempt, Block, BlockParts, ByClass, Caller, Device, DeviceClass, DeviceNanos, FinishReason,
    FinishedAttempt, KeyId, ModelName, PlanName, PriceBook, PriceFactor, PriceList, PriceListName,
    RequestId, SequenceId, Share, Stages, TenantId, Tier, Usage, UtcMonth, UtcTime, WorkerEpoch,
    WorkerName,
};
use tollgate_ledger::{GroupBy, Ledger, LedgerHandle, PricedAs, StatementQuery, UsageQuery};

/// 2026-11-01.
const FIRST: u64 = 1_793_491_200_000_000_000;
const MONTH_NS: u64 = 30 * 86_400_000_000_000;
/// Entries of a block, and of a request.
const SHARES: u64 = 100;
const STEPS: u64 = 10;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let wanted: u64 = std::env::args().nth(1).map_or(Ok(1_000_000), |text| text.parse())?;
    let folder = match std::env::args().nth(2) {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let ledger = Ledger::open(&folder.path().join("ledger.db"))?;
    let began = Instant::now();
    let blocks = (wanted * 10 / 9 / SHARES).max(1);
    for from in (0..blocks).step_by(256) {
        post(&ledger, from..blocks.min(from + 256), blocks)?;
    }
    let filling = began.elapsed();
    let tenant = TenantId::new("t0")?;
    let began = Instant::now();
    let query = UsageQuery {
        tenant: Some(tenant.clone()),
        group: vec![GroupBy::Key, GroupBy::Day],
        ..UsageQuery::default()
    };
    let rows = ledger.reader().usage(&query)?.len();
    let summing = began.elapsed();
    let (month, plan, prices): (UtcMonth, _, _) =
        ("2026-11".parse()?, PlanName::new("p")?, book()?);
    let query = StatementQuery {
        tenant: &tenant,
        month,
        priced_as: PricedAs::Plan(&plan),
        prices: &prices,
        now: UtcTime(FIRST),
    };
    let began = Instant::now();
    let statement = ledger.reader().statement(query)?;
    let stating = began.elapsed();
    let began = Instant::now();
    let mut records = 0_u64;
    let counted = ledger.reader().statement_records(query, &mut |_, _| records += 1)?;
    let counting = began.elapsed();
    if counted != statement {
        return Err("the sums by day and the records do not say the same".into());
    }
    let sum = |figure: fn(&tollgate_ledger::StatementLine) -> u64| -> u64 {
        statement.lines.iter().map(figure).sum()
    };
    println!(
        "{{\"entries\":{},\"charges\":{},\"usage_rows\":{rows},\"fill_seconds\":{:.3},\
         \"usage_seconds\":{:.6},\"statement_seconds\":{:.6},\"records\":{records},\
         \"records_seconds\":{:.3}}}",
        sum(|line| line.entries),
        sum(|line| line.charges),
        filling.as_secs_f64(),
        summing.as_secs_f64(),
        stating.as_secs_f64(),
        counting.as_secs_f64(),
    );
    Ok(())
}

fn book() -> Result<PriceBook, Failure> {
    Ok(PriceBook {
        currency: "EUR".parse()?,
        lists: vec![PriceList {
            name: PriceListName::new("standard")?,
            plan: None,
            model: None,
            from: "2026-01-01".parse()?,
            device_second: ByClass::all("0.0025".parse()?),
            million_prompt_tokens: "0.15".parse()?,
            million_completion_tokens: "0.6".parse()?,
            batch: PriceFactor::ONE,
        }],
    })
}

fn post(ledger: &LedgerHandle, numbers: std::ops::Range<u64>, blocks: u64) -> Result<(), Failure> {
    let mut posting = Vec::new();
    for number in numbers {
        posting.push(ledger.submit(block(number, blocks)?));
    }
    for posted in posting {
        block_on(posted)?;
    }
    Ok(())
}

/// Returns block `number` of `blocks`. Its requests run over `STEPS` blocks and end in
/// the last of them.
fn block(number: u64, blocks: u64) -> Result<Block, Failure> {
    let started = UtcTime(FIRST + MONTH_NS / blocks * number);
    let mut shares = Vec::new();
    let mut finished = Vec::new();
    for place in 0..SHARES {
        let request = number / STEPS * SHARES + place;
        let caller = Caller {
            tenant: TenantId::new(if place % 10 == 9 { "t1" } else { "t0" })?,
            key: KeyId::new(&format!("k{}", place % 4))?,
        };
        // Ids like the gateway's: a time that several share, then random bits.
        let drawn = u128::from(request).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let id = RequestId::from_random(u128::from(request / 256) << 80 | drawn >> 48);
        let attempt = Attempt { request: id, attempt: 0 };
        let attributed = DeviceNanos(10_000 + place);
        shares.push(Share {
            sequence: SequenceId(request),
            caller: caller.clone(),
            attempt: attempt.clone(),
            attributed,
            tier: Tier::Interactive,
        });
        if number % STEPS == STEPS - 1 || number + 1 == blocks {
            let usage = Usage {
                prompt_tokens: 100,
                cached_tokens: 0,
                completion_tokens: STEPS,
                attributed: DeviceNanos(attributed.nanos() * STEPS),
                reference: DeviceNanos(20_000 * STEPS),
            };
            let stages = Stages { queue_ns: 1, prefill_ns: 2, decode_ns: 3 };
            let reason = FinishReason::Stop;
            finished.push(FinishedAttempt {
                caller,
                attempt,
                usage,
                stages,
                reason,
                finished: started,
                tier: Tier::Interactive,
            });
        }
    }
    let tenants: DeviceNanos = shares.iter().map(|share| share.attributed).sum();
    Ok(Block::try_from(BlockParts {
        epoch: WorkerEpoch(1),
        number: number + 1,
        worker: WorkerName::new("0")?,
        device: Device {
            class: DeviceClass::new("h200")?,
            name: "bench".into(),
            uuid: String::new(),
        },
        model: ModelName::new("m")?,
        calibration: "v1".into(),
        first_step: number + 1,
        last_step: number + 1,
        started,
        wall: tenants,
        overhead: DeviceNanos::ZERO,
        idle: DeviceNanos::ZERO,
        loss: DeviceNanos::ZERO,
        shares,
        finished,
        last_of_epoch: false,
        energy: None,
    })?)
}
