//! The observer of a drill: memory and descriptors of the gateway, from its
//! metrics; memory and descriptors of processes on this machine, from /proc; and
//! the device time that each tenant was charged, from its usage.

#![expect(clippy::expect_used, reason = "no code panics under the locks of this module")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::{Ground, Stage};
use crate::client::{Connection, Protocol, Target};
use crate::clock;

/// Memory and descriptors of a process at one time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ProcessPoint {
    /// Seconds from the start.
    pub at: f64,
    /// Resident memory in bytes.
    pub memory: u64,
    /// The number of open descriptors.
    pub descriptors: u64,
    /// Seconds of processor time since the start of the process, if they are known.
    pub cpu_seconds: Option<f64>,
}

/// The use of a tenant since the first observation, from its usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct UsedPoint {
    /// Seconds from the start.
    pub at: f64,
    /// Device time in nanoseconds.
    pub attributed_ns: u64,
    /// Reference cost in nanoseconds.
    pub reference_ns: u64,
    /// Tokens of prompts and answers.
    pub tokens: u64,
}

/// The use by tenant over time.
pub type Shares = BTreeMap<String, Vec<UsedPoint>>;

/// The process name of the gateway.
pub const GATEWAY: &str = "gateway";

/// Time between two observations of memory, and of shares.
const LOOKS: Duration = Duration::from_millis(500);
const SHARE_LOOKS: Duration = Duration::from_secs(1);

/// Time that an observation may take. A busy gateway misses one.
const PATIENCE: Duration = Duration::from_secs(5);

/// Tenants with an observed share at most.
const MOST_TENANTS: usize = 64;

/// Time from the last answer to the last observation of usage: records reach the
/// ledger in groups.
const LAST_RECORDS: Duration = Duration::from_millis(1_500);

/// Lines about panics that are kept.
const MOST_PANICS: usize = 16;

/// The unit of times in /proc, which Linux fixes at 100 a second for programs.
const TICKS_PER_SECOND: f64 = 100.0;

/// The tasks that observe.
pub(super) struct Watch {
    watching: JoinSet<Option<()>>,
    seen: Arc<Mutex<Observations>>,
    stop: CancellationToken,
}

#[derive(Default)]
struct Observations {
    processes: BTreeMap<String, Vec<ProcessPoint>>,
    shares: Shares,
}

impl Watch {
    pub(super) fn start(ground: &Arc<Ground>, stage: &Stage) -> Self {
        let (seen, stop) =
            (Arc::new(Mutex::new(Observations::default())), CancellationToken::new());
        let mut watching = JoinSet::new();
        // A process of this machine is read directly, which also tells its CPU time.
        let is_remote = stage.gateway_pid().is_none();
        if let Some(admin) = stage.admin.clone().filter(|_| is_remote) {
            let (ground, seen) = (Arc::clone(ground), Arc::clone(&seen));
            let watched = metrics(admin, ground, seen);
            watching.spawn(stop.clone().run_until_cancelled_owned(watched));
        }
        let processes = stage.processes.clone();
        let (also, beside) = (Arc::clone(ground), Arc::clone(&seen));
        let watched = procs(processes, also, beside);
        watching.spawn(stop.clone().run_until_cancelled_owned(watched));
        // The capacity's tenant sends no requests during the phases.
        let scenario = &ground.scenario;
        let senders = scenario.honest.iter().map(|group| &group.tenants);
        let senders = senders.chain(scenario.attackers.iter().map(|attacker| &attacker.tenants));
        let tenants: Vec<(String, Target)> = senders
            .flatten()
            .take(MOST_TENANTS)
            .map(|tenant| (tenant.clone(), stage.keys[tenant][0].clone()))
            .collect();
        let (also, beside, end) = (Arc::clone(ground), Arc::clone(&seen), stop.clone());
        watching.spawn(async {
            shares(tenants, also, beside, end).await;
            Some(())
        });
        Self { watching, seen, stop }
    }

    pub(super) async fn end(self) -> (BTreeMap<String, Vec<ProcessPoint>>, Shares) {
        let Self { watching, seen, stop } = self;
        stop.cancel();
        watching.join_all().await;
        let mut seen = seen.lock().expect("no panic under the lock");
        let Observations { processes, shares } = std::mem::take(&mut *seen);
        (processes, shares)
    }
}

/// Returns the lines of a log that report a panic, the first 16 at most.
///
/// # Errors
/// The log cannot be read.
pub(super) fn panics_in(log: &Path) -> io::Result<Vec<String>> {
    let mut panics = Vec::new();
    for line in BufReader::new(File::open(log)?).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if line.contains("panicked") && panics.len() < MOST_PANICS {
            panics.push(line.into_owned());
        }
    }
    Ok(panics)
}

async fn metrics(admin: Target, ground: Arc<Ground>, seen: Arc<Mutex<Observations>>) {
    let mut ticks = interval(LOOKS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut reader = Reader { target: admin, open: None };
    loop {
        ticks.tick().await;
        let Some(text) = reader.get("/metrics").await else { continue };
        let text = String::from_utf8_lossy(&text);
        let figure = |name: &str| metric(&text, name);
        let memory = figure("process_resident_memory_bytes");
        let descriptors = figure("process_open_fds");
        let (Some(memory), Some(descriptors)) = (memory, descriptors) else { continue };
        let at = ground.at(clock::now());
        note(&ground, &seen, GATEWAY, ProcessPoint { at, memory, descriptors, cpu_seconds: None });
    }
}

/// Returns the value of a metric without labels.
fn metric(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    let value: f64 = line.split_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some(value as u64)
}

async fn procs(processes: Vec<(String, u32)>, ground: Arc<Ground>, seen: Arc<Mutex<Observations>>) {
    let mut ticks = interval(LOOKS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        for (name, pid) in &processes {
            if let Some((memory, descriptors)) = held_by(*pid) {
                let at = ground.at(clock::now());
                let point = ProcessPoint { at, memory, descriptors, cpu_seconds: cpu_of(*pid) };
                note(&ground, &seen, name, point);
            }
        }
    }
}

/// Returns the resident bytes and open descriptors of a process on this machine, if
/// it can be read.
pub fn held_by(pid: u32) -> Option<(u64, u64)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some((kib * 1024, descriptors as u64))
}

/// Returns the seconds of processor time that a process of this machine has used, if
/// it can be read.
pub(super) fn cpu_of(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may contain spaces. After it, utime and stime are the
    // twelfth and the thirteenth field (proc_pid_stat(5)).
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks as f64 / TICKS_PER_SECOND)
}

fn note(ground: &Ground, seen: &Mutex<Observations>, name: &str, point: ProcessPoint) {
    if name == GATEWAY {
        ground.live.memory.store(point.memory, Ordering::Relaxed);
        ground.live.descriptors.store(point.descriptors, Ordering::Relaxed);
    }
    let mut seen = seen.lock().expect("no panic under the lock");
    seen.processes.entry(name.to_owned()).or_default().push(point);
}

/// Reads the usage of each tenant repeatedly, and once more after the end.
async fn shares(
    tenants: Vec<(String, Target)>,
    ground: Arc<Ground>,
    seen: Arc<Mutex<Observations>>,
    stop: CancellationToken,
) {
    let mut readers: Vec<(String, Reader, Option<UsedPoint>)> = tenants
        .into_iter()
        .map(|(tenant, target)| (tenant, Reader { target, open: None }, None))
        .collect();
    let mut ticks = interval(SHARE_LOOKS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let is_last = tokio::select! {
            _ = ticks.tick() => false,
            () = stop.cancelled() => true,
        };
        if is_last {
            tokio::time::sleep(LAST_RECORDS).await;
        }
        for (tenant, reader, first) in &mut readers {
            let Some(used) = reader.get("/v1/usage").await.and_then(|text| used(&text)) else {
                continue;
            };
            let since = used.since(first.get_or_insert(used));
            let point = UsedPoint { at: ground.at(clock::now()), ..since };
            let mut seen = seen.lock().expect("no panic under the lock");
            seen.shares.entry(tenant.clone()).or_default().push(point);
        }
        if is_last {
            return;
        }
    }
}

impl UsedPoint {
    /// Returns the use between `earlier` and this point.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let less = |now: u64, then: u64| now.saturating_sub(then);
        Self {
            at: self.at,
            attributed_ns: less(self.attributed_ns, earlier.attributed_ns),
            reference_ns: less(self.reference_ns, earlier.reference_ns),
            tokens: less(self.tokens, earlier.tokens),
        }
    }
}

/// Returns the sums over all rows of a usage answer.
fn used(statement: &[u8]) -> Option<UsedPoint> {
    #[derive(Deserialize)]
    struct Statement {
        data: Vec<Row>,
    }
    #[derive(Deserialize)]
    struct Row {
        attributed_ns: u64,
        reference_ns: u64,
        prompt_tokens: u64,
        completion_tokens: u64,
    }
    let statement: Statement = serde_json::from_slice(statement).ok()?;
    let mut sum = UsedPoint::default();
    for row in statement.data {
        sum.attributed_ns += row.attributed_ns;
        sum.reference_ns += row.reference_ns;
        sum.tokens += row.prompt_tokens + row.completion_tokens;
    }
    Some(sum)
}

/// A connection that is reused as long as it works.
struct Reader {
    target: Target,
    open: Option<Connection>,
}

impl Reader {
    /// Returns the body of an answer with status 200, or `None` if there is none in
    /// time.
    async fn get(&mut self, path: &str) -> Option<Bytes> {
        let answer = timeout(PATIENCE, self.ask(path)).await.ok().flatten();
        if answer.is_none() {
            self.open = None;
        }
        answer
    }

    async fn ask(&mut self, path: &str) -> Option<Bytes> {
        if self.open.is_none() {
            self.open = self.target.connect(Protocol::Http1).await.ok();
        }
        let response = self.open.as_ref()?.get(path).await.ok()?;
        let is_ok = response.status().is_success();
        let body = response.into_body().collect().await.ok()?.to_bytes();
        is_ok.then_some(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_matches_complete_name() {
        let text =
            "# HELP process_open_fds x\nprocess_open_fds_max 9\nprocess_open_fds 41\nb 1e3 5\n";
        assert_eq!(metric(text, "process_open_fds"), Some(41));
        assert_eq!(metric(text, "b"), Some(1_000));
        assert_eq!(metric(text, "process"), None);
    }

    #[test]
    fn held_by_reads_own_process() {
        let (memory, descriptors) = held_by(std::process::id()).expect("it runs");
        assert!(memory > 1 << 20 && descriptors >= 3, "{memory} {descriptors}");
        assert_eq!(held_by(u32::MAX), None);
    }

    #[test]
    fn cpu_time_of_busy_process_grows() {
        let before = cpu_of(std::process::id()).expect("it runs");
        while cpu_of(std::process::id()).expect("it runs") <= before {
            std::hint::spin_loop();
        }
        assert_eq!(cpu_of(u32::MAX), None);
    }

    #[test]
    fn usage_rows_are_summed() {
        let row = |figure: u64| {
            serde_json::json!({
                "attributed_ns": figure, "reference_ns": figure * 10, "x": 1,
                "prompt_tokens": figure, "completion_tokens": 1,
            })
        };
        let text = serde_json::json!({ "object": "list", "data": [row(3), row(4)] }).to_string();
        let sum = UsedPoint { at: 0.0, attributed_ns: 7, reference_ns: 70, tokens: 9 };
        assert_eq!(used(text.as_bytes()), Some(sum));
        assert_eq!(used(b"{}"), None);
    }
}
