//! A reader beside the gateway that writes: `watch LEDGER SPAN_MS` prints a line of JSON
//! every span with each tenant's device time and tokens so far, until its standard
//! input ends.
//!
//! `watch LEDGER check` checks every invariant of the ledger once, and each worker's
//! balance to the nanosecond. It fails if one is broken.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_ledger::{GroupBy, Ledger, LedgerReader, UsageQuery};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [path, what] = words.as_slice() else {
        return Err("watch LEDGER SPAN_MS | check".into());
    };
    let reader = Ledger::open_read_only(Path::new(path))?;
    if what == "check" {
        return check(&reader);
    }
    let span = Duration::from_millis(what.parse()?);
    let ended = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ended);
    std::thread::spawn(move || {
        // The end of the input, or its failure, ends the program.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        seen.store(true, Ordering::Relaxed);
    });
    let begun = Instant::now();
    while !ended.load(Ordering::Relaxed) {
        let mut line = tenants(&reader)?;
        line["at_s"] = begun.elapsed().as_secs_f64().into();
        println!("{line}");
        std::thread::sleep(span);
    }
    Ok(())
}

fn tenants(reader: &LedgerReader) -> Result<Value, Box<dyn Error>> {
    let query = UsageQuery { group: vec![GroupBy::Tenant], ..UsageQuery::default() };
    let rows = reader.usage(&query)?;
    let tenants = rows.into_iter().map(|row| {
        let tokens = row.prompt_tokens + row.completion_tokens;
        (row.tenant.unwrap_or_default(), json!({ "ns": row.attributed_ns, "tokens": tokens }))
    });
    Ok(json!({ "tenants": tenants.collect::<serde_json::Map<_, _>>() }))
}

fn check(reader: &LedgerReader) -> Result<(), Box<dyn Error>> {
    let findings = reader.check();
    let mut balances = Vec::new();
    let mut exact = true;
    for epoch in reader.epochs()? {
        let balance = reader.balance(epoch)?;
        exact &= balance.is_exact();
        balances.push(serde_json::to_value(balance)?);
    }
    println!("{}", json!({ "findings": findings, "balances": balances, "exact": exact }));
    if findings.is_empty() && exact && !balances.is_empty() {
        Ok(())
    } else {
        Err("the ledger does not hold".into())
    }
}
