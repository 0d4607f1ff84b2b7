//! Probes of plans: rates, caps, concurrency and the largest job. Each probe sends
//! requests until the probed limit refuses one, and compares the admitted amount
//! with the limit. If another limit refuses first, the result says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::task::JoinSet;
use tollgate_config::{Config, Plan};
use tollgate_domain::{ByClass, DeviceClass, DeviceNanos, Rate};
use tollgate_loadtest::client::Connection;

use super::caller::{Told, ask};
use super::caps::{Measured, question};
use super::place::{Canaries, LIMITS};
use super::{Canary, Finding, ProbeResult, shown};

/// Probes every limit of every plan.
pub(super) async fn probe(
    config: &Config,
    canaries: &Canaries,
    budget: Duration,
) -> Result<(Vec<ProbeResult>, Measured)> {
    let measured = measure(canaries.any()).await?;
    let class = &measured.class;
    let mut rows = Vec::new();
    for plan in config.plans() {
        for limit in LIMITS {
            let Some(canary) = canaries.of(&plan.name, limit) else { continue };
            let name = format!("plans.{}.{limit}", plan.name);
            eprintln!("probing {name}");
            let probe = Probe { canaries, plan, class, budget };
            rows.extend(probe.one(limit, &canary, &name).await?);
        }
        if let Some(budget) = plan.limits.budget_per_month {
            let name = format!("plans.{}.budget_per_month", plan.name);
            let configured = format!("{budget} {} a month", budget.currency);
            let why = "spending money until it is used up takes too long";
            rows.push(ProbeResult::new(&name, configured).has_no_probe(why));
        }
        if let Some(rate) = plan.limits.grammar_time {
            let name = format!("plans.{}.grammar_time_per_minute", plan.name);
            let configured = format!("{} of grammar time", time(rate.per_minute));
            let why = "spending the host's time until it is used up would slow other requests";
            rows.push(ProbeResult::new(&name, configured).has_no_probe(why));
        }
    }
    Ok((rows, measured))
}

/// The parameters of a plan's probes.
struct Probe<'a> {
    canaries: &'a Canaries,
    plan: &'a Plan,
    class: &'a DeviceClass,
    budget: Duration,
}

impl Probe<'_> {
    async fn one(&self, limit: &str, canary: &Canary, name: &str) -> Result<Vec<ProbeResult>> {
        let Self { canaries, plan, class, budget } = *self;
        let limits = &plan.limits;
        let row = |configured: String| ProbeResult::new(name, configured);
        Ok(match limit {
            "requests_per_minute" => match limits.requests {
                Some(rate) => {
                    // With more requests at once, `concurrent` would refuse them
                    // first.
                    let at_once =
                        limits.concurrent.map_or(AT_ONCE, |most| AT_ONCE.min(most as usize));
                    vec![requests(canary, row(of_rate(rate)), rate, at_once, budget).await?]
                }
                None => Vec::new(),
            },
            "tokens_per_minute" => match limits.tokens {
                Some(rate) => {
                    let spends = Spends { rate, what: What::Tokens, said: "tokens a minute" };
                    vec![spend(canary, row(of_rate(rate)), spends, budget).await?]
                }
                None => Vec::new(),
            },
            "device_time_per_minute" => match limits.device_time.limit(class) {
                Some(rate) => {
                    let spends = Spends { rate, what: What::DeviceTime, said: "time a minute" };
                    let row = row(format!("{} of {class} time", time(rate.per_minute)));
                    vec![spend(canary, row, spends, budget).await?]
                }
                None => Vec::new(),
            },
            "device_time_per_day" => {
                cap(canary, row, &limits.device_time_per_day, class, budget, "a day").await?
            }
            "device_time_per_month" => {
                cap(canary, row, &limits.device_time_per_month, class, budget, "a month").await?
            }
            "concurrent" => match limits.concurrent {
                Some(concurrent) => {
                    let most = canaries.most_places();
                    let plan = Places { concurrent, queued: limits.queued.unwrap_or(0) };
                    places(canary, name, plan, most).await?
                }
                None => Vec::new(),
            },
            _ => match limits.largest_job.limit(class) {
                Some(most) => vec![largest(canary, row(time(most.nanos()))).await?],
                None => Vec::new(),
            },
        })
    }
}

/// Returns the class of the device that answers, and the cost of a request that spends
/// device time.
async fn measure(canary: &Canary) -> Result<Measured> {
    let connection = canary.connect().await?;
    let response = connection.post(CHAT, question(canary).into()).await?;
    let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let class = DeviceClass::new(header("x-tollgate-device-class").unwrap_or("cpu"))?;
    let cost = header("x-tollgate-reference-ns").and_then(|value| value.parse().ok());
    Ok(Measured { class, cost: DeviceNanos(cost.unwrap_or(0)) })
}

/// Sends groups of requests until one is refused.
async fn requests(
    canary: &Canary,
    row: ProbeResult,
    rate: Rate,
    at_once: usize,
    budget: Duration,
) -> Result<ProbeResult> {
    let connection = canary.connect().await?;
    let body = canary.chat("Say hello.", 1).to_string();
    let started = Instant::now();
    let mut admitted = 0u64;
    let allowed = |started: Instant| {
        // The rate refills while the probe runs.
        let refilled = rate.per_minute as f64 * started.elapsed().as_secs_f64() / 60.0;
        rate.burst + refilled.ceil() as u64
    };
    while started.elapsed() < budget {
        let told = together(&connection, &body, at_once).await?;
        admitted += told.iter().filter(|told| told.is_ok()).count() as u64;
        let refused: Vec<&Told> = told.iter().filter(|told| !told.is_ok()).collect();
        if refused.iter().any(|told| told.names("requests a minute")) {
            let most = allowed(started);
            let holds = (rate.burst..=most).contains(&admitted);
            let seconds = started.elapsed().as_secs_f64();
            return Ok(row.saw(
                Finding::of(holds),
                format!("{admitted} admitted in {seconds:.1} s, then refused ({most} allowed)"),
            ));
        }
        if let Some(other) = refused.first() {
            return Ok(row.not_probed(other.masks()));
        }
        if admitted > allowed(started) {
            let most = allowed(started);
            return Ok(row.saw(Finding::Broken, format!("{admitted} admitted, {most} allowed")));
        }
    }
    Ok(row.not_probed(format!(
        "not reached: {admitted} requests in {} are within the limit",
        shown(budget)
    )))
}

/// The unit of a rate.
#[derive(Clone, Copy)]
enum What {
    Tokens,
    DeviceTime,
}

impl What {
    fn of(self, told: &Told) -> u64 {
        match self {
            Self::Tokens => told.tokens,
            Self::DeviceTime => told.reference,
        }
    }

    fn shown(self, amount: u64) -> String {
        match self {
            Self::Tokens => format!("{amount} tokens"),
            Self::DeviceTime => time(amount),
        }
    }
}

/// A rate of which a request uses more than one unit.
#[derive(Clone, Copy)]
struct Spends {
    rate: Rate,
    what: What,
    said: &'static str,
}

/// Sends requests one after the other until one is refused. The used amount may
/// exceed the limit by the error of the last estimate: a rate is paid back.
async fn spend(
    canary: &Canary,
    row: ProbeResult,
    spends: Spends,
    budget: Duration,
) -> Result<ProbeResult> {
    let Spends { rate, what, said } = spends;
    let connection = canary.connect().await?;
    // Long prompts use up tokens fast, and long answers use up device time fast.
    let body = match what {
        What::Tokens => canary.chat(&"word ".repeat(100), 1).to_string(),
        What::DeviceTime => question(canary),
    };
    let started = Instant::now();
    let (mut spent, mut largest) = (0u64, 0u64);
    loop {
        let told = ask(&connection, CHAT, body.clone()).await?;
        let refilled = (rate.per_minute as f64 * started.elapsed().as_secs_f64() / 60.0) as u64;
        if told.names(said) {
            // The next request must fit completely, and an estimate may be twice
            // the true amount.
            let most = rate.burst + refilled + largest;
            let least = rate.burst.saturating_sub(2 * largest);
            let seen = format!(
                "{} in {:.1} s, then refused ({} allowed)",
                what.shown(spent),
                started.elapsed().as_secs_f64(),
                what.shown(rate.burst + refilled),
            );
            return Ok(match largest {
                0 => row.not_probed("the burst is smaller than one request of the probe"),
                _ => row.saw(Finding::of((least..=most).contains(&spent)), seen),
            });
        }
        if !told.is_ok() {
            return Ok(row.not_probed(told.masks()));
        }
        spent += what.of(&told);
        largest = largest.max(what.of(&told));
        if spent > rate.burst + refilled + 2 * largest {
            return Ok(row.saw(Finding::Broken, format!("{} and not refused", what.shown(spent))));
        }
        if let Some(why) = too_slow(spent as f64 / rate.burst as f64, started, budget) {
            return Ok(row.not_probed(why));
        }
    }
}

/// Sends requests until the cap refuses one. Usage must never exceed a cap.
async fn cap(
    canary: &Canary,
    row: impl Fn(String) -> ProbeResult,
    limit: &ByClass<DeviceNanos>,
    class: &DeviceClass,
    budget: Duration,
    said: &str,
) -> Result<Vec<ProbeResult>> {
    let Some(most) = limit.limit(class).map(DeviceNanos::nanos) else { return Ok(Vec::new()) };
    let row = row(format!("{} of {class} time", time(most)));
    let connection = canary.connect().await?;
    let body = question(canary);
    let (started, mut spent) = (Instant::now(), 0u64);
    loop {
        let told = ask(&connection, CHAT, body.clone()).await?;
        if told.names(said) {
            let seen = format!("{} spent, then refused for good", time(spent));
            return Ok(vec![row.saw(Finding::of(spent <= most), seen)]);
        }
        if !told.is_ok() {
            return Ok(vec![row.not_probed(told.masks())]);
        }
        spent += told.reference;
        // A cap, unlike a rate, may never be exceeded.
        if spent > most {
            return Ok(vec![row.saw(Finding::Broken, format!("{} spent", time(spent)))]);
        }
        if let Some(why) = too_slow(spent as f64 / most as f64, started, budget) {
            return Ok(vec![row.not_probed(why)]);
        }
    }
}

/// Returns the reason to stop a probe that would take too long. `done` is the spent part of
/// the limit.
pub(super) fn too_slow(done: f64, started: Instant, budget: Duration) -> Option<String> {
    let elapsed = started.elapsed();
    // The part is 0 before the first answer, and the division has no result then.
    let whole = Duration::try_from_secs_f64(elapsed.as_secs_f64() / done);
    let whole = whole.unwrap_or(Duration::MAX);
    // The first second is too short for an estimate.
    let known = elapsed > Duration::from_secs(1) && whole > budget;
    (known || elapsed > budget).then(|| {
        format!("the probe would take about {:.0} s to reach the limit", whole.as_secs_f64())
    })
}

/// The places of a plan.
struct Places {
    /// Requests that may run.
    concurrent: u32,
    /// Requests that may wait.
    queued: u32,
}

/// Sends more long requests at once than may run and wait. The surplus must be
/// refused.
async fn places(
    canary: &Canary,
    name: &str,
    plan: Places,
    most: usize,
) -> Result<Vec<ProbeResult>> {
    let Places { concurrent, queued } = plan;
    let waiting = name.replace("concurrent", "queued");
    let (running_row, waiting_row) = (
        ProbeResult::new(name, concurrent.to_string()),
        ProbeResult::new(waiting, queued.to_string()),
    );
    let places = (concurrent + queued) as usize;
    if places > most {
        let why = format!("the probe would start and cancel {places} long requests at once");
        return Ok(vec![running_row.not_probed(why.clone()), waiting_row.not_probed(why)]);
    }
    let mut body = canary.chat("Count from 1 to 400.", 900);
    // A stream shows when an answer begins, so running and waiting requests can be
    // told apart.
    body["stream"] = json!(true);
    let body = body.to_string();
    let gauge = Arc::new(StreamCounts::default());
    let (mut sent, mut connections) = (JoinSet::new(), Vec::new());
    for number in 0..places + BEYOND {
        // The gateway limits the streams of one connection.
        if number % STREAMS == 0 {
            connections.push(canary.connect().await?);
        }
        let connection = connections[connections.len() - 1].clone();
        let (body, gauge) = (body.clone(), Arc::clone(&gauge));
        sent.spawn(async move { gauge.follow(&connection, body).await });
    }
    // The surplus is refused at once, while the others run or wait.
    let started = Instant::now();
    while started.elapsed() < REFUSAL_WAIT
        && gauge.refused.load(Ordering::Relaxed) + gauge.otherwise.load(Ordering::Relaxed) < BEYOND
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // A further refusal, which would be a mistake, may still arrive.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let [refused, otherwise, peak, ended] =
        [&gauge.refused, &gauge.otherwise, &gauge.peak, &gauge.ended]
            .map(|count| count.load(Ordering::Relaxed));
    // The long answers have no further use, so the requests are cancelled to free the
    // device.
    sent.shutdown().await;
    if otherwise > 0 {
        let why = format!("{otherwise} had another result: another limit applies first");
        return Ok(vec![running_row.not_probed(why.clone()), waiting_row.not_probed(why)]);
    }
    // No request had another result, so all that were not refused were admitted.
    let admitted = places + BEYOND - refused;
    let seen = format!("{admitted} of {} admitted, the rest refused", places + BEYOND);
    let running = match peak {
        0 => running_row.not_probed("no answer had begun"),
        peak => {
            running_row.saw(Finding::of(peak <= concurrent as usize), format!("{peak} ran at once"))
        }
    };
    let waits = match refused {
        // Requests that ended made room for others.
        _ if ended > 0 && admitted > places && admitted <= places + ended => {
            waiting_row.saw(Finding::Holds, format!("{seen}; {ended} had ended"))
        }
        _ => waiting_row.saw(Finding::of(admitted == places), seen),
    };
    Ok(vec![running, waits])
}

/// Counts of the open streams.
#[derive(Default)]
struct StreamCounts {
    now: AtomicUsize,
    peak: AtomicUsize,
    /// True once a stream has ended. After that another one may start before its
    /// end is noticed, so the peak is no longer exact.
    one_ended: AtomicBool,
    ended: AtomicUsize,
    refused: AtomicUsize,
    otherwise: AtomicUsize,
}

impl StreamCounts {
    async fn follow(&self, connection: &Connection, body: String) {
        use http_body_util::BodyExt;
        let Ok(response) = connection.post(CHAT, body.into()).await else {
            self.otherwise.fetch_add(1, Ordering::Relaxed);
            return;
        };
        match response.status().as_u16() {
            200 => {}
            429 => {
                let body = response.into_body().collect().await.map(|body| body.to_bytes());
                // The refusal's text names the number of requests, running or
                // waiting, "at once".
                let is_it =
                    body.is_ok_and(|body| String::from_utf8_lossy(&body).contains("at once"));
                let count = if is_it { &self.refused } else { &self.otherwise };
                count.fetch_add(1, Ordering::Relaxed);
                return;
            }
            _ => {
                self.otherwise.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        if !self.one_ended.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
        // The end of the stream does not matter here.
        let _ = response.into_body().collect().await;
        self.one_ended.store(true, Ordering::Relaxed);
        self.now.fetch_sub(1, Ordering::Relaxed);
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends larger and larger requests until one is refused for its size.
async fn largest(canary: &Canary, row: ProbeResult) -> Result<ProbeResult> {
    let connection = canary.connect().await?;
    let mut passed = None;
    // If the model's context is short, several answers make a larger request.
    for choices in [1u32, 8] {
        for tokens in (0..16).map(|power| 1u32 << power) {
            let mut body = canary.chat("Say hello.", tokens);
            body["n"] = json!(choices);
            let told = ask(&connection, CHAT, body.to_string()).await?;
            let size = format!("{choices} x {tokens} tokens");
            if told.names("may never take more") {
                let Some(passed) = passed else {
                    return Ok(row.saw(Finding::Holds, format!("the smallest, {size}, is refused")));
                };
                return Ok(row.saw(Finding::Holds, format!("{passed} pass, {size} are refused")));
            }
            match told.status {
                200 => passed = Some(size),
                // The model accepts no more tokens.
                400 => break,
                _ => return Ok(row.not_probed(told.masks())),
            }
        }
    }
    let largest = passed.unwrap_or_default();
    Ok(row.not_probed(format!("the model's largest request, {largest}, is within the limit")))
}

async fn together(connection: &Connection, body: &str, count: usize) -> Result<Vec<Told>> {
    let mut sent = JoinSet::new();
    for _ in 0..count {
        let (connection, body) = (connection.clone(), body.to_owned());
        sent.spawn(async move { ask(&connection, CHAT, body).await });
    }
    sent.join_all().await.into_iter().collect()
}

fn of_rate(rate: Rate) -> String {
    match rate.burst == rate.per_minute {
        true => rate.per_minute.to_string(),
        false => format!("{}, burst {}", rate.per_minute, rate.burst),
    }
}

pub(super) fn time(nanos: u64) -> String {
    match nanos {
        0..1_000_000 => format!("{:.1} us", nanos as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanos as f64 / 1e6),
        _ => format!("{:.1} s", nanos as f64 / 1e9),
    }
}

const CHAT: &str = "/v1/chat/completions";

/// Requests that the probe of requests sends at once.
const AT_ONCE: usize = 8;

/// Requests that are sent beyond the limit.
const BEYOND: usize = 4;

/// Streams on one connection.
const STREAMS: usize = 50;

/// Time to wait for the refusals.
const REFUSAL_WAIT: Duration = Duration::from_secs(8);
