//! Checks C05: a full disk, and a disk that does not keep what it accepted. After a
//! failed sync no block is acknowledged and billable work is refused; after recovery no
//! data is lost.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tollgate_ledger::Ledger;
use tollgate_loadtest::client::{Protocol, Target};

use crate::support::{self, Tollgate, binary};

/// The longest wait for an effect, long enough for a slow machine.
const TIMEOUT: Duration = Duration::from_secs(90);

/// The outcome of a request.
#[derive(Clone, Debug)]
struct Outcome {
    status: u16,
    code: String,
    id: String,
    /// The time at which the request was sent.
    sent: Instant,
}

/// A load that sends requests until it is ended and keeps the outcomes.
struct Load {
    over: Arc<AtomicBool>,
    outcomes: Arc<std::sync::Mutex<Vec<Outcome>>>,
    tasks: tokio::task::JoinSet<()>,
}

impl Load {
    fn start(target: &Target) -> Self {
        let (over, outcomes) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..3 {
            tasks.spawn(ask(target.clone(), Arc::clone(&over), Arc::clone(&outcomes)));
        }
        Self { over, outcomes, tasks }
    }

    fn outcomes(&self) -> Vec<Outcome> {
        self.outcomes.lock().expect("no task panicked").clone()
    }

    /// Waits until an outcome from now on matches `wanted`.
    async fn until(&self, what: &str, wanted: impl Fn(&Outcome) -> bool) {
        let (before, started) = (self.outcomes().len(), Instant::now());
        while !self.outcomes()[before..].iter().any(&wanted) {
            let last = self.outcomes().last().cloned();
            assert!(started.elapsed() < TIMEOUT, "{what} never came; the last was {last:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn end(mut self) -> Vec<Outcome> {
        self.over.store(true, Ordering::Relaxed);
        while self.tasks.join_next().await.is_some() {}
        self.outcomes()
    }
}

async fn ask(target: Target, over: Arc<AtomicBool>, outcomes: Arc<std::sync::Mutex<Vec<Outcome>>>) {
    let body = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 6,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    let connection = target.connect(Protocol::Either).await.expect("connects");
    while !over.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let answer = connection.post("/v1/chat/completions", body.to_string().into()).await;
        let response = answer.expect("a full disk closes no connection");
        let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
        let (status, json) = support::read(response).await;
        let code = json["error"]["code"].as_str().unwrap_or_default().to_owned();
        outcomes.lock().expect("no task panicked").push(Outcome { status, code, id, sent });
        let pause = if status == 200 { 1 } else { 50 };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

async fn status_of(gateway: &Tollgate, path: &str) -> u16 {
    let target = Target::new(&gateway.admin, &gateway.ca(), "none").expect("a target");
    let connection = target.connect(Protocol::Either).await.expect("connects");
    let response = connection.get(path).await.expect("answers");
    response.status().as_u16()
}

async fn metrics(gateway: &Tollgate) -> String {
    use http_body_util::BodyExt;
    let target = Target::new(&gateway.admin, &gateway.ca(), "none").expect("a target");
    let connection = target.connect(Protocol::Either).await.expect("connects");
    let response = connection.get("/metrics").await.expect("answers");
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(body.to_vec()).expect("UTF-8")
}

/// Asserts that each answered request is charged once, that each refused request is not
/// charged, and that the ledger's checks pass.
fn assert_ledger_matches(gateway: &Tollgate, outcomes: &[Outcome]) {
    let path = gateway.data().join("ledger.db");
    let reader = Ledger::open_read_only(&path).expect("a ledger");
    let findings = reader.check();
    assert!(findings.is_empty(), "{findings:#?}");
    let connection = rusqlite::Connection::open(&path).expect("opens");
    let mut statement = connection
        .prepare("SELECT count(*), coalesce(sum(counted), 0) FROM requests WHERE request_id = ?1")
        .expect("prepares");
    for Outcome { status, code, id, sent: _ } in outcomes {
        let (rows, counted): (u32, u32) =
            statement.query_row([id], |row| Ok((row.get(0)?, row.get(1)?))).expect("reads");
        match status {
            200 => assert_eq!(counted, 1, "{id} was answered: {rows} rows"),
            _ => assert_eq!(counted, 0, "{id} was answered {status} {code}: {rows} rows"),
        }
    }
}

/// Asserts that every other status is a server error with a code.
fn assert_errors_have_codes(outcomes: &[Outcome]) {
    for Outcome { status, code, .. } in outcomes.iter().filter(|outcome| outcome.status != 200) {
        assert!((500..600).contains(status), "{status} {code}");
        assert!(!code.is_empty(), "{status} without a code");
    }
}

/// A small file system of its own. Mounting may not be permitted; then there is none, and the
/// gate fails.
pub(crate) struct SmallDisk {
    at: tempfile::TempDir,
}

impl SmallDisk {
    pub(crate) fn mount(size: &str) -> Option<Self> {
        let at = tempfile::tempdir().expect("a folder");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tollgate-test"])
            .arg(at.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self { at }),
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr);
                support::skip(&format!(
                    "no small file system can be mounted, and a full disk is not tested without \
                     one; run as root, with CAP_SYS_ADMIN: {}",
                    why.trim()
                ));
                None
            }
            Err(error) => {
                support::skip(&format!("there is no mount command: {error}"));
                None
            }
        }
    }

    /// Returns the folder where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        self.at.path()
    }

    /// Fills the remaining space and returns the file.
    pub(crate) fn fill(&self) -> PathBuf {
        let path = self.at.path().join("ballast");
        let mut file = File::create(&path).expect("makes");
        for size in [1 << 20, 4_096, 1] {
            while file.write_all(&vec![7; size]).is_ok() {}
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.at.path()).status();
    }
}

#[tokio::test]
async fn full_disk_refuses_requests_and_loses_nothing() {
    let Some(disk) = SmallDisk::mount("48m") else { return };
    let data = disk.at.path().join("data");
    let command = Command::new(binary());
    let mut gateway = Tollgate::start_on(&data, support::OPEN, command);
    let load = Load::start(&gateway.target(&gateway.key("acme", &[])));
    load.until("an answer", |outcome| outcome.status == 200).await;
    for _ in 0..2 {
        let ballast = disk.fill();
        load.until("a refusal", |outcome| outcome.status == 503).await;
        assert_eq!(status_of(&gateway, "/healthz").await, 200, "the process lives");
        // A dying worker may have freed some space, so the disk is filled again.
        let more = disk.at.path().join("more");
        let mut more = File::create(more).expect("makes");
        while more.write_all(&[7; 512]).is_ok() {}
        tokio::time::sleep(Duration::from_secs(1)).await;
        load.until("a refusal", |outcome| outcome.status == 503).await;
        fs::remove_file(ballast).expect("removes");
        fs::remove_file(disk.at.path().join("more")).expect("removes");
        load.until("an answer", |outcome| outcome.status == 200).await;
    }
    let outcomes = load.end().await;
    assert_eq!(gateway.stop(), Some(0));
    let count = |status| outcomes.iter().filter(|outcome| outcome.status == status).count();
    println!("{} answered, {} refused, {} in all", count(200), count(503), outcomes.len());
    let mut codes: Vec<(u16, &str)> =
        outcomes.iter().map(|outcome| (outcome.status, outcome.code.as_str())).collect();
    codes.sort_unstable();
    codes.dedup();
    println!("{codes:?}");
    assert_errors_have_codes(&outcomes);
    assert_ledger_matches(&gateway, &outcomes);
}

/// A library, built for this test, that makes syncs of named files fail.
struct FailingSyncs {
    folder: tempfile::TempDir,
}

impl FailingSyncs {
    fn build() -> Option<Self> {
        let gcc = support::program("gcc")?;
        let folder = tempfile::tempdir().expect("a folder");
        let source = folder.path().join("syncs.c");
        fs::write(&source, SYNCS).expect("writes");
        let built = Command::new(gcc)
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(folder.path().join("syncs.so"))
            .arg(&source)
            .output()
            .expect("gcc runs");
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{said}");
        Some(Self { folder })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(binary());
        command
            .env("LD_PRELOAD", self.folder.path().join("syncs.so"))
            .env("TOLLGATE_TEST_SYNCS", self.control());
        command
    }

    fn control(&self) -> PathBuf {
        self.folder.path().join("failing")
    }

    /// Makes syncs fail from now on for files with one of these path ends.
    fn fail(&self, ends: &str) {
        let unfinished = self.folder.path().join("failing.new");
        fs::write(&unfinished, ends).expect("writes");
        fs::rename(unfinished, self.control()).expect("renames");
    }

    fn heal(&self) {
        fs::remove_file(self.control()).expect("removes");
    }
}

/// Checks that the ledger commits nothing without a sync: until syncs succeed, no block
/// is acknowledged to a worker and no billable work begins.
#[tokio::test]
async fn ledger_with_failing_sync_acknowledges_nothing() {
    let Some(syncs) = FailingSyncs::build() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    let mut gateway = Tollgate::start_on(&data, support::OPEN, syncs.command());
    let load = Load::start(&gateway.target(&gateway.key("acme", &[])));
    load.until("an answer", |outcome| outcome.status == 200).await;

    syncs.fail("ledger.db-wal ledger.db");
    load.until("the ledger's refusal", |outcome| outcome.code == "ledger_unavailable").await;
    assert_eq!(status_of(&gateway, "/healthz").await, 200);
    assert_eq!(status_of(&gateway, "/readyz").await, 503);
    assert!(metrics(&gateway).await.contains("tollgate_ledger_writable 0"));
    let acknowledged = last_blocks(&data);
    let refuses_since = Instant::now();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(last_blocks(&data), acknowledged, "nothing is committed meanwhile");
    // Requests that were running when the ledger began to refuse end as usual.
    let later: Vec<Outcome> =
        load.outcomes().into_iter().filter(|outcome| outcome.sent > refuses_since).collect();
    assert!(!later.is_empty(), "the load goes on");
    assert!(later.iter().all(|outcome| outcome.status == 503), "{later:?}");

    syncs.heal();
    load.until("an answer", |outcome| outcome.status == 200).await;
    assert!(metrics(&gateway).await.contains("tollgate_ledger_writable 1"));
    let outcomes = load.end().await;
    assert_eq!(gateway.stop(), Some(0));
    assert_errors_have_codes(&outcomes);
    assert_ledger_matches(&gateway, &outcomes);
}

/// Checks that a journal with a failed sync gets no more records: its worker ends, and
/// the next worker starts a new journal.
#[tokio::test]
async fn journal_with_failing_sync_ends_its_worker() {
    let Some(syncs) = FailingSyncs::build() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data");
    let mut gateway = Tollgate::start_on(&data, support::OPEN, syncs.command());
    let load = Load::start(&gateway.target(&gateway.key("acme", &[])));
    load.until("an answer", |outcome| outcome.status == 200).await;

    syncs.fail(".journal");
    load.until("a refusal", |outcome| outcome.status == 503).await;
    assert_eq!(status_of(&gateway, "/readyz").await, 503);
    syncs.heal();
    load.until("an answer", |outcome| outcome.status == 200).await;
    let outcomes = load.end().await;
    assert_eq!(gateway.stop(), Some(0));
    assert_errors_have_codes(&outcomes);
    assert_ledger_matches(&gateway, &outcomes);
    let reader = Ledger::open_read_only(&data.join("ledger.db")).expect("a ledger");
    let epochs = reader.epochs().expect("reads");
    assert!(epochs.len() >= 2, "the worker began another life: {epochs:?}");
    for epoch in epochs {
        assert!(reader.balance(epoch).expect("reads").is_exact());
    }
}

/// Returns the last committed block of each epoch.
fn last_blocks(data: &Path) -> Vec<u64> {
    let reader = Ledger::open_read_only(&data.join("ledger.db")).expect("a ledger");
    let epochs = reader.epochs().expect("reads");
    epochs.into_iter().map(|epoch| reader.last_block(epoch).expect("reads")).collect()
}

/// A C library with `fsync` and `fdatasync` that fail for files whose path ends with a
/// word of the control file, while that file exists.
const SYNCS: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(int fd) {
    const char *control = getenv("TOLLGATE_TEST_SYNCS");
    char words[512], name[64], path[4096];
    if (!control) return 0;
    int file = open(control, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t read_bytes = read(file, words, sizeof words - 1);
    close(file);
    if (read_bytes <= 0) return 0;
    words[read_bytes] = 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    char *rest = words;
    for (char *word; (word = strsep(&rest, " \n"));) {
        size_t size = strlen(word);
        if (size && (size_t)length >= size && !strcmp(path + length - size, word)) return 1;
    }
    return 0;
}

int fsync(int fd) {
    if (fails(fd)) { errno = EIO; return -1; }
    return syscall(SYS_fsync, fd);
}

int fdatasync(int fd) {
    if (fails(fd)) { errno = EIO; return -1; }
    return syscall(SYS_fdatasync, fd);
}
"#;
