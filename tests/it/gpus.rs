//! Several GPUs under the CUDA backend: workers on GPUs of their own, on one GPU, on
//! slices of one GPU, and on GPUs that hang, fail or lack memory. The driver is a
//! stand-in that runs the kernels on the CPU; all other parts, from `up` to the ledger,
//! are real. These tests prove nothing about a real GPU.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Mutex;
use tollgate_ledger::Balance;
use tollgate_loadtest::client::Connection;

#[path = "../../crates/engine/tests/cuda/standin.rs"]
#[allow(clippy::unwrap_used, unreachable_pub, reason = "as it is among the engine's tests")]
mod standin;
use self::standin::Part;
use crate::support::{self, Tollgate, errors, get, post, posted, rest, signal};

/// The folder of the engine's sources.
const ENGINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/engine");
/// A lock that lets one test run at a time: kernels use the CPU, and hangs are found by
/// the clock.
static ALONE: Mutex<()> = Mutex::const_new(());
/// The longest wait for a new worker: C12 promises 30 s.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// The stand-in's two GPUs and its two slices.
const GPUS: [&str; 2] =
    ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"];
const SLICES: [&str; 2] =
    ["MIG-00010203-0405-0607-0809-0a0b0c0d0e0f", "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f"];

/// A machine with two emulated devices.
struct Machine {
    folder: TempDir,
    libraries: &'static Path,
    /// The time after which a step counts as hung.
    watchdog: &'static str,
}

/// Builds the stand-in libraries that a worker loads.
fn libraries(kind: &str, macros: &[&str], known: [&str; 2]) -> PathBuf {
    let folder = standin::folder(kind);
    standin::build(Part::Compiler, &folder, &[]);
    standin::build(Part::Blas, &folder, &[]);
    standin::build(Part::Driver, &folder, macros);
    nvml(&folder, known);
    folder
}

/// Builds an NVML that knows only these devices.
fn nvml(folder: &Path, known: [&str; 2]) {
    let values = folder.join("values");
    fs::write(&values, "temperature 60\n").expect("writes");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(folder.join("libnvidia-ml.so.1"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/support/nvml.c"))
        .arg(format!("-DVALUES={:?}", values.display().to_string()))
        .arg(format!("-DKNOWN={:?}", known.join(" ")))
        .status();
    assert!(status.expect("a C compiler").success());
}

impl Machine {
    /// Returns a machine with two calibrated GPUs.
    fn with_two_gpus() -> Self {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let built = BUILT.get_or_init(|| libraries("gpus", &["DEVICES=2"], GPUS));
        let machine = Self::of(built);
        machine.write_calibration("h100-Emulated_H100");
        machine
    }

    /// Returns a machine with the same GPUs, each cut to a slice.
    fn with_two_slices() -> Self {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let macros = ["DEVICES=2", "SLICES"];
        let machine = Self::of(BUILT.get_or_init(|| libraries("slices", &macros, SLICES)));
        machine.write_calibration("emulated-h100-mig-1g-10gb-Emulated_H100_MIG_1g_10gb");
        machine
    }

    fn of(libraries: &'static Path) -> Self {
        // An emulated step takes seconds where the test has a tenth of a processor.
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder, libraries, watchdog: "step = \"60s\", silence = \"60s\"" }
    }

    /// Writes a calibration for `device`, which is measured once for all tests, because
    /// emulation is slow.
    fn write_calibration(&self, device: &str) {
        static MEASURED: OnceLock<Measured> = OnceLock::new();
        let measured = MEASURED.get_or_init(|| Measured::now(self.libraries, device));
        let named = |text: &str| text.replace(&measured.device, device);
        let folder = self.data().join("calibration");
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(named(&measured.file)), named(&measured.table)).expect("writes");
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).expect("a log")
    }

    /// Makes one driver call on one device fail or hang once.
    fn inject_fault(&self, device: usize, call: &str, fault: &str) {
        let path = self.folder.path().join(format!("{device}.{call}"));
        // A rename writes the file at once: the driver may look for the file at any
        // time.
        let draft = path.with_extension("draft");
        fs::write(&draft, fault).expect("writes");
        fs::rename(&draft, &path).expect("renames");
    }

    /// Returns a command for the binary with the stand-in libraries.
    fn binary(&self) -> Command {
        let mut command = Command::new(support::binary());
        command
            .env("LD_LIBRARY_PATH", self.libraries)
            .env("STANDIN_FAULTS", self.folder.path())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("TOLLGATE_LOG", "info");
        command
    }

    /// Starts `up` with a worker for each of `devices` and keeps its log.
    fn start(&self, devices: &[&str], more: &str) -> Tollgate {
        let mut command = self.binary();
        command.stderr(fs::File::create(self.folder.path().join("log")).expect("a log"));
        Tollgate::start_on(&self.data(), &self.config(devices, more), command)
    }

    /// Returns the log of an `up` that does not start.
    fn refused(&self, devices: &[&str]) -> String {
        let config = self.folder.path().join("refused.toml");
        fs::write(&config, self.config(devices, "")).expect("writes");
        let mut command = self.binary();
        command.args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
        command.arg("--config").arg(config).arg("--data").arg(self.data());
        let log = fs::File::create(self.folder.path().join("log")).expect("a log");
        let mut up = command.stdout(Stdio::null()).stderr(log).spawn().expect("the binary starts");
        let started = Instant::now();
        loop {
            if let Some(status) = up.try_wait().expect("it was started") {
                assert!(!status.success(), "it ended well on {devices:?}");
                return self.log();
            }
            if started.elapsed() > BACK_WITHIN {
                signal(up.id(), "TERM");
                up.wait().expect("it was started");
                panic!("it starts on {devices:?}: {}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn config(&self, devices: &[&str], more: &str) -> String {
        format!(
            r#"
{}
[models.tollgate-demo]
devices = {}

[worker]
max_chunk_tokens = 32
sharing.locks = "{}"
watchdog = {{ {} }}
{more}
"#,
            support::OPEN,
            json!(devices),
            self.folder.path().join("locks").display(),
            self.watchdog
        )
    }
}

/// A calibration that a worker measured.
struct Measured {
    device: String,
    file: String,
    table: String,
}

impl Measured {
    fn now(libraries: &'static Path, device: &str) -> Self {
        let machine = Machine::of(libraries);
        assert_eq!(machine.start(&["cuda:0"], "").stop(), Some(0));
        let mut kept = fs::read_dir(machine.data().join("calibration")).expect("a folder");
        let kept = kept.next().expect("a calibration").expect("reads");
        let file = kept.file_name().into_string().expect("UTF-8");
        assert!(file.contains(device), "{device} was measured: {file}");
        let table = fs::read_to_string(kept.path()).expect("reads");
        Self { device: device.to_owned(), file, table }
    }
}

fn ask(model: &str, prompt: &str, tokens: u32) -> Value {
    json!({
        "model": model, "max_tokens": tokens, "temperature": 0,
        "messages": [{ "role": "user", "content": prompt }],
    })
}

/// Returns the model's greedy answer.
async fn answer(connection: &Connection, model: &str, prompt: &str) -> String {
    content(connection, &ask(model, prompt, ANSWER)).await
}

/// Returns the text of the answer to `body`.
async fn content(connection: &Connection, body: &Value) -> String {
    let (status, reply) = post(connection, "/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

/// A started stream, with the id of its request.
struct StartedStream {
    id: String,
    rest: http::Response<Incoming>,
}

/// Sends a streaming request and waits for its first event.
async fn start_stream(connection: &Connection) -> StartedStream {
    let mut body = ask("tollgate-demo", PROMPTS[0], LONG_ANSWER);
    body["stream"] = json!(true);
    let response = connection.post("/v1/chat/completions", body.to_string().into()).await;
    let mut response = response.expect("answers");
    assert_eq!(response.status(), 200);
    response.frame().await.expect("a first chunk").expect("whole");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    StartedStream { id, rest: response }
}

/// Returns the devices of acme's records in the audit log.
fn billed(gateway: &Tollgate, out: &Path) -> BTreeSet<String> {
    gateway.command(&["audit", "export", "--out", &out.display().to_string()]);
    let lines = fs::read_to_string(out.join("records.jsonl")).expect("an export");
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines
        .map(|line| line["record"].clone())
        .filter(|record| record["user.id"]["tenant"] == "acme")
        .filter_map(|record| record["gpu.id"].as_str().map(str::to_owned))
        .collect()
}

/// Returns the balance of each incarnation of a worker and asserts that each balance is
/// exact.
fn lives(gateway: &Tollgate) -> Vec<Balance> {
    let reader = gateway.books();
    let epochs = reader.epochs().expect("reads").into_iter();
    let lives: Vec<Balance> = epochs.map(|epoch| reader.balance(epoch).expect("reads")).collect();
    for life in &lives {
        let Balance { wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns } = *life;
        assert_eq!(tenants_ns + overhead_ns + idle_ns + loss_ns, wall_ns, "{life:?}");
    }
    lives
}

/// Checks that two GPUs serve in parallel and give the CPU's answers.
#[tokio::test]
async fn gpu_workers_answer_like_the_cpu() {
    let (_alone, machine) = (ALONE.lock().await, Machine::with_two_gpus());
    let reference = format!(
        "threads = 1\n[models.reference]\npath = {:?}\ndevices = [\"cpu\"]\n",
        Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tollgate-demo")
    );
    let mut gateway = machine.start(&["cuda:0", "cuda:1"], &reference);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let mut answers = tokio::task::JoinSet::new();
    for (index, prompt) in PROMPTS.iter().enumerate() {
        let connection = connection.clone();
        answers.spawn(async move { (index, answer(&connection, "tollgate-demo", prompt).await) });
    }
    let mut answers = answers.join_all().await;
    answers.sort_unstable();
    for (index, answer) in answers {
        assert_eq!(answer, self::answer(&connection, "reference", PROMPTS[index]).await);
    }
    assert_eq!(gateway.stop(), Some(0));
    let lives = lives(&gateway);
    assert_eq!(lives.len(), 3);
    assert!(lives.iter().all(|life| life.tenants_ns > 0), "each had its part: {lives:?}");
    let billed = billed(&gateway, &machine.folder.path().join("audit"));
    let [one, other] = GPUS;
    assert_eq!(billed.iter().map(String::as_str).collect::<Vec<_>>(), [one, other, "worker/0"]);
}

/// Checks that sampling with a seed gives the same text alone and in a batch.
#[tokio::test]
async fn deterministic_workers_answer_alike_in_company() {
    let (_alone, machine) = (ALONE.lock().await, Machine::with_two_gpus());
    machine.write_calibration("h100-Emulated_H100__deterministic_");
    let mut gateway = machine.start(&["cuda:0"], "deterministic = true\n");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let drawn = |index: usize| {
        let connection = connection.clone();
        let mut body = ask("tollgate-demo", PROMPTS[index], ANSWER);
        body["temperature"] = json!(1.5);
        body["seed"] = json!(7);
        body["top_k"] = json!(40);
        async move { (index, content(&connection, &body).await) }
    };
    let mut alone = Vec::new();
    for index in 0..PROMPTS.len() {
        alone.push(drawn(index).await);
    }
    let company = (0..PROMPTS.len()).map(drawn).collect::<tokio::task::JoinSet<_>>();
    let mut company = company.join_all().await;
    company.sort_unstable();
    assert_eq!(company, alone);
    assert_eq!(gateway.stop(), Some(0));
    assert!(machine.log().contains("results do not depend on the batch"), "{}", machine.log());
}

/// Starts a stream on each of two workers. On a busy machine, one stream may end before the
/// other begins, or a stale backlog may send both to one worker: then both start again.
async fn stream_on_each_worker(
    gateway: &Tollgate,
    connection: &Connection,
) -> (StartedStream, StartedStream) {
    for _ in 0..10 {
        status_where(gateway, |worker| worker["backlog_ns"] == 0 && worker["running"] == 0).await;
        let (one, other) = tokio::join!(start_stream(connection), start_stream(connection));
        // A worker reports its load twice a second.
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline {
            let (_, status) = get(&gateway.connect_admin().await, "/v1/status").await;
            let mut workers = status["workers"].as_array().expect("workers").iter();
            if workers.all(|worker| worker["running"] == 1) {
                return (one, other);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tokio::join!(rest(one.rest), rest(other.rest));
    }
    panic!("no two streams ran on a worker each");
}

/// Streams from both workers while `lose` ends one of them. One client gets one error,
/// the other client gets none, and both workers serve again.
async fn assert_loss_is_contained(
    gateway: &Tollgate,
    connection: &Connection,
    lose: impl FnOnce(),
) {
    let before = gateway.workers();
    let (one, other) = stream_on_each_worker(gateway, connection).await;
    lose();
    // An unstarted answer moves to another worker.
    let (whole, text, also) = tokio::join!(
        answer(connection, "tollgate-demo", PROMPTS[0]),
        rest(one.rest),
        rest(other.rest)
    );
    assert!(!whole.is_empty());
    let (harmed, broken, unharmed) = match errors(&text) {
        0 => (other.id, also, text),
        _ => (one.id, text, also),
    };
    assert_eq!((errors(&broken), errors(&unharmed)), (1, 0), "{broken} {unharmed}");
    assert!(unharmed.contains("[DONE]"), "{unharmed}");
    gateway.until_ready(2, BACK_WITHIN).await;
    let after = gateway.workers();
    let stayed = after.iter().filter(|pid| before.contains(pid)).count();
    assert_eq!((after.len(), stayed), (2, 1), "{before:?} {after:?}");
    // The work done is on the bill.
    let usage = posted(connection, &harmed).await;
    assert_eq!(usage["reason"], "fault", "{usage}");
    assert!(usage["attributed_ns"].as_u64() > Some(0), "{usage}");
}

/// Checks that each of two killed workers is replaced.
#[tokio::test]
async fn killed_worker_on_a_gpu_is_replaced() {
    let (_alone, machine) = (ALONE.lock().await, Machine::with_two_gpus());
    let devices = GPUS.map(|uuid| format!("cuda:{uuid}"));
    let mut gateway = machine.start(&devices.each_ref().map(String::as_str), "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for worker in gateway.workers() {
        assert_loss_is_contained(&gateway, &connection, || signal(worker, "KILL")).await;
    }
    assert_eq!(gateway.stop(), Some(0));
    assert_eq!(lives(&gateway).len(), 4, "two of each");
}

/// Checks C12 and C13: a driver call hangs, a step fails, and the next start has no
/// memory.
#[tokio::test]
async fn failing_gpu_affects_only_its_worker() {
    let (_alone, mut machine) = (ALONE.lock().await, Machine::with_two_gpus());
    machine.watchdog = "step = \"2s\", times_predicted = 1";
    let mut gateway = machine.start(&["cuda:0", "cuda:1"], "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for (device, call, fault) in
        [(0, "launch", "hang"), (1, "wait", "hang"), (1, "launch", "fail"), (0, "wait", "fail")]
    {
        if fault == "fail" {
            machine.inject_fault(device, "alloc", fault);
        }
        assert_loss_is_contained(&gateway, &connection, || {
            machine.inject_fault(device, call, fault)
        })
        .await;
    }
    assert_eq!(gateway.stop(), Some(0));
    let lives = lives(&gateway);
    // Starts without memory do not count.
    assert_eq!(lives.len(), 6);
    // The two seconds of each hang are in the platform's loss.
    let loss: i64 = lives.iter().map(|life| life.loss_ns).sum();
    assert!(loss > 2 * 2_000_000_000, "{loss}");
    let log = machine.log();
    for (words, times) in [
        ("the device is hung: a step has not ended after 2", 2),
        ("cuLaunchKernelEx failed: the stand-in says no (CUDA_ERROR_LAUNCH_FAILED)", 1),
        ("cuEventSynchronize failed: the stand-in says no (CUDA_ERROR_LAUNCH_FAILED)", 1),
        ("tollgate: the device cannot be set up: cuMemAlloc failed: the stand-in says no", 2),
    ] {
        assert_eq!(log.matches(words).count(), times, "{words}: {log}");
    }
}

/// Loads both workers at once. Returns the tenants' time of each worker and the elapsed
/// time.
async fn two_at_once(machine: &Machine, devices: &[&str]) -> (Vec<i64>, i64) {
    let mut gateway = machine.start(devices, "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let began = Instant::now();
    let mut answers = tokio::task::JoinSet::new();
    for prompt in [PROMPTS, PROMPTS].as_flattened() {
        let connection = connection.clone();
        answers.spawn(async move { answer(&connection, "tollgate-demo", prompt).await });
    }
    answers.join_all().await;
    let passed = i64::try_from(began.elapsed().as_nanos()).expect("seconds");
    assert_eq!(gateway.stop(), Some(0));
    let busy = lives(&gateway).iter().map(|life| life.tenants_ns).filter(|&ns| ns > 0).collect();
    (busy, passed)
}

/// Checks two workers on one GPU; as a control, the same load runs on two GPUs.
#[tokio::test]
async fn workers_on_one_gpu_take_turns() {
    let (_alone, machine) = (ALONE.lock().await, Machine::with_two_gpus());
    let (busy, passed) = two_at_once(&machine, &["cuda:0", "cuda:0"]).await;
    assert_eq!(busy.len(), 2, "both had turns: {busy:?}");
    let share = |busy: &[i64], passed: i64| busy.iter().sum::<i64>() as f64 / passed as f64;
    let shared = share(&busy, passed);
    assert!(shared <= 1.0, "{busy:?} in {passed}");
    let (busy, passed) = two_at_once(&Machine::with_two_gpus(), &["cuda:0", "cuda:1"]).await;
    assert!(share(&busy, passed) > shared, "the control fails: {busy:?} in {passed}");
}

/// Checks that a failed start gives one sentence with the reason, and that `auto`
/// serves on the CPU instead.
#[tokio::test]
async fn gpu_start_failures_give_a_reason() {
    let (_alone, machine) = (ALONE.lock().await, Machine::with_two_gpus());
    let said = |devices: &[&str], sentence: &str| {
        let log = machine.refused(devices);
        let said = log.lines().find(|line| line.contains(sentence));
        assert_eq!(said.map(|line| line.matches(sentence).count()), Some(1), "{sentence:?}: {log}");
    };
    machine.inject_fault(0, "alloc", "fail");
    said(
        &["cuda:0"],
        "the device cannot be set up: cuMemAlloc failed: the stand-in says no \
         (CUDA_ERROR_OUT_OF_MEMORY)",
    );
    let by_identity = format!("cuda:{}", GPUS[0]);
    said(&["cuda:0", &by_identity], "the same name, so that the workers take turns");
    let absent = format!("cuda:{}", SLICES[0].replace("00", "ff"));
    said(
        &[&absent],
        &format!("there is no CUDA device {absent}; `nvidia-smi -L` lists those that there are"),
    );
    machine.inject_fault(0, "alloc", "fail");
    let mut gateway = machine.start(&["auto"], "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    answer(&connection, "tollgate-demo", PROMPTS[0]).await;
    assert_eq!(gateway.stop(), Some(0));
    let log = machine.log();
    assert!(log.contains("the model runs on the processor") && log.contains("cuMemAlloc"), "{log}");
}

/// Returns the status after every device has a health report.
async fn watched(gateway: &Tollgate) -> Value {
    status_where(gateway, |worker| worker["health"].is_object()).await
}

/// Waits until `holds` is true of every worker and returns the status.
async fn status_where(gateway: &Tollgate, holds: impl Fn(&Value) -> bool) -> Value {
    let (connection, started) = (gateway.connect_admin().await, Instant::now());
    loop {
        let (_, status) = get(&connection, "/v1/status").await;
        if status["workers"].as_array().expect("workers").iter().all(&holds) {
            return status;
        }
        assert!(started.elapsed() < BACK_WITHIN, "it does not hold: {status}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Checks slices of one GPU: each process sees its own slice, bills and locks name the
/// slice, and so does NVML.
#[tokio::test]
async fn gpu_slices_get_a_worker_each() {
    let (_alone, machine) = (ALONE.lock().await, Machine::with_two_slices());
    let devices = SLICES.map(|uuid| format!("cuda:{uuid}"));
    let mut gateway = machine.start(&devices.each_ref().map(String::as_str), "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    tokio::join!(
        answer(&connection, "tollgate-demo", PROMPTS[0]),
        answer(&connection, "tollgate-demo", PROMPTS[1]),
    );
    let status = watched(&gateway).await;
    for worker in status["workers"].as_array().expect("workers") {
        let seen = [&worker["health"]["temperature_celsius"], &worker["health"]["concerns"]];
        assert_eq!(seen, [&json!(60), &json!([])], "{worker}");
    }
    assert_eq!(gateway.stop(), Some(0));
    lives(&gateway);
    let billed = billed(&gateway, &machine.folder.path().join("audit"));
    assert_eq!(billed.iter().map(String::as_str).collect::<Vec<_>>(), SLICES);
    for slice in SLICES {
        assert!(machine.folder.path().join("locks").join(format!("{slice}.owner")).exists());
    }
}

/// The tokens of an answer, and of an answer that is still running at its worker's
/// loss.
const ANSWER: u32 = 12;
const LONG_ANSWER: u32 = 400;
/// Questions that the model knows by heart: another rounding gives the same answer.
const PROMPTS: [&str; 6] = [
    "Tell me a story.",
    "Say the alphabet.",
    "What is a rate limit?",
    "Count from 1 to 20.",
    "Count from 1 to 50.",
    "Count from 1 to 400.",
];
