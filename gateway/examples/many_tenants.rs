//! A gateway with many tenants and keys, for benchmarks: the time of a start, the
//! memory of a key, and the time of an authentication.
//!
//! `many_tenants make FOLDER TENANTS KEYS` writes a config and a key database.
//! `many_tenants measure FOLDER` loads both, prints `ready {…}`, then answers
//! each line of its standard input with one of JSON: `authenticate N` with the
//! times of N authentications, `change` with the time that one new key takes
//! from another process's commit until this one knows it.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::hint::black_box;
use std::io::{BufRead, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderValue, header};
use serde_json::json;
use tollgate_config::{Config, Sources};
use tollgate_domain::{TenantId, UtcTime};
use tollgate_gateway::Authenticator;
use tollgate_gateway::auth::{KeyOptions, KeyStore};

type Fallible<T> = Result<T, Box<dyn Error>>;

fn main() -> Fallible<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["make", folder, tenants, keys] => make(folder.as_ref(), tenants.parse()?, keys.parse()?),
        ["measure", folder] => measure(folder.as_ref()),
        _ => Err("usage: many_tenants make FOLDER TENANTS KEYS | measure FOLDER".into()),
    }
}

/// Tenants take turns between a plan of their own and a pool.
fn make(folder: &Path, tenants: usize, keys: usize) -> Fallible<()> {
    let mut config = String::from(
        "[plans.team]\nrequests_per_minute = 10_000_000\n\
         [plans.trial]\nrequests_per_minute = 10_000_000\n\
         [pools.trial]\nplan = \"trial\"\n",
    );
    for number in 0..tenants {
        let own = if number % 2 == 0 { "plan = \"team\"" } else { "pool = \"trial\"" };
        writeln!(config, "[tenants.{}]\n{own}", name(number))?;
    }
    fs::create_dir_all(folder)?;
    fs::write(config_of(folder), config)?;
    let store = KeyStore::open(folder)?;
    let names: Vec<TenantId> =
        (0..tenants).map(|number| TenantId::new(&name(number))).collect::<Result<_, _>>()?;
    // Any of them may be asked for: as many as a person would wait for.
    let every = keys.div_ceil(SAMPLE).max(1);
    let mut sample = String::new();
    for first in (0..keys).step_by(BATCH) {
        let wanted = (first..keys.min(first + BATCH))
            .map(|number| (names[number % tenants].clone(), KeyOptions::default()));
        for (new, number) in store.create_all(wanted, NOW)?.iter().zip(first..) {
            if number % every == 0 {
                writeln!(sample, "{}", new.secret.expose())?;
            }
        }
    }
    fs::write(folder.join("sample"), sample)?;
    Ok(())
}

fn measure(folder: &Path) -> Fallible<()> {
    let sources = Sources { path: Some(config_of(folder)), ..Sources::default() };
    // Keys first: reading a config leaves room that they would move into.
    let (before, began) = (resident()?, Instant::now());
    let store = KeyStore::open(folder)?;
    let (keys_seconds, after_keys) = (began.elapsed().as_secs_f64(), resident()?);
    let began = Instant::now();
    let config = Config::load(&sources)?;
    let (config_seconds, after_config) = (began.elapsed().as_secs_f64(), resident()?);
    let door = Authenticator::new(store.clone(), Vec::new())?;
    let sample: Vec<String> =
        fs::read_to_string(folder.join("sample"))?.lines().map(str::to_owned).collect();
    println!(
        "ready {}",
        json!({
            "tenants": config.tenants().count(),
            "config_seconds": config_seconds,
            "config_bytes": after_config.saturating_sub(after_keys),
            "keys_seconds": keys_seconds,
            "keys_bytes": after_keys.saturating_sub(before),
        })
    );
    let mut random = 1;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let told = match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["authenticate", count] => {
                let times = authenticate(&config, &door, &sample, count.parse()?, &mut random)?;
                json!({
                    "p50_ns": times[times.len() / 2],
                    "p99_ns": times[times.len() * 99 / 100],
                })
            }
            ["change"] => json!({ "seconds": change(folder, &store)?.as_secs_f64() }),
            _ => return Err(format!("no such order: {line}").into()),
        };
        println!("{told}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Authenticates with keys in random order; returns the sorted times.
fn authenticate(
    config: &Config,
    door: &Authenticator,
    sample: &[String],
    count: usize,
    random: &mut u64,
) -> Fallible<Vec<u64>> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let key = &sample[(*random >> 33) as usize % sample.len()];
        let shown = HeaderValue::from_str(&format!("Bearer {key}"))?;
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, shown)]);
        let began = Instant::now();
        let caller = door.authenticate(&headers, None, NOW)?;
        let tenant = config.tenant(caller.tenant());
        let elapsed = began.elapsed();
        black_box(tenant).ok_or("a key of no tenant")?;
        times.push(u64::try_from(elapsed.as_nanos())?);
    }
    times.sort_unstable();
    Ok(times)
}

/// From a commit by another to being known here.
fn change(folder: &Path, store: &KeyStore) -> Fallible<Duration> {
    let other = KeyStore::open(folder)?;
    let new = other.create(&TenantId::new(&name(0))?, KeyOptions::default(), NOW)?;
    let began = Instant::now();
    store.refresh()?;
    let elapsed = began.elapsed();
    let door = Authenticator::new(store.clone(), Vec::new())?;
    let shown = HeaderValue::from_str(&format!("Bearer {}", new.secret.expose()))?;
    door.authenticate(&HeaderMap::from_iter([(header::AUTHORIZATION, shown)]), None, NOW)?;
    Ok(elapsed)
}

fn name(number: usize) -> String {
    format!("tenant-{number:06}")
}

fn config_of(folder: &Path) -> PathBuf {
    folder.join("tollgate.toml")
}

/// Bytes of this process that are in memory.
fn resident() -> Fallible<u64> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split_whitespace().nth(1).ok_or("no second field")?.parse()?;
    Ok(pages * 4_096)
}

/// Keys made in one transaction.
const BATCH: usize = 50_000;
/// Keys that are asked for.
const SAMPLE: usize = 100_000;
const NOW: UtcTime = UtcTime(1_795_132_800_000_000_000);
