//! Several cards under the backend for GPUs: workers on cards of their own, on
//! one card, on slices of one, and on cards that hang, fail or have no memory.
//! The driver is a stand-in that runs the kernels on the processor; all that is
//! above it is the real thing, from `up` to the ledger. Nothing here says
//! anything about a GPU.

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

/// Where the engine's sources are.
const ENGINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/engine");
/// One test at a time has a machine: kernels run on the processor, and what
/// hangs is found by the clock.
static ALONE: Mutex<()> = Mutex::const_new(());
/// What a worker may take to be back: C12 says 30 s, of which it needs few.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// The stand-in's two cards, and its two slices.
const CARDS: [&str; 2] =
    ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"];
const SLICES: [&str; 2] =
    ["MIG-00010203-0405-0607-0809-0a0b0c0d0e0f", "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f"];

/// A machine with two emulated devices.
struct Machine {
    folder: TempDir,
    libraries: &'static Path,
}

/// The vendor's libraries, as far as a worker looks for any.
fn libraries(kind: &str, macros: &[&str], known: [&str; 2]) -> PathBuf {
    let folder = standin::folder(kind);
    standin::build(Part::Compiler, &folder, &[]);
    standin::build(Part::Blas, &folder, &[]);
    standin::build(Part::Driver, &folder, macros);
    nvml(&folder, known);
    folder
}

/// NVML that knows these devices and nothing else.
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
    /// Two cards, measured.
    fn of_cards() -> Self {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let built = BUILT.get_or_init(|| libraries("cards", &["DEVICES=2"], CARDS));
        let machine = Self::of(built);
        machine.is_measured("h100-Emulated_H100");
        machine
    }

    /// The same cards, each cut to a slice.
    fn of_slices() -> Self {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let macros = ["DEVICES=2", "SLICES"];
        let machine = Self::of(BUILT.get_or_init(|| libraries("slices", &macros, SLICES)));
        machine.is_measured("emulated-h100-mig-1g-10gb-Emulated_H100_MIG_1g_10gb");
        machine
    }

    fn of(libraries: &'static Path) -> Self {
        Self { folder: tempfile::tempdir().expect("a folder"), libraries }
    }

    /// Leaves what a step costs where a worker on such a device looks for it.
    /// It is measured once for all tests: that takes long under emulation.
    fn is_measured(&self, device: &str) {
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

    /// Makes a call of the driver fail or hang once, on one of the devices.
    fn strike(&self, device: usize, call: &str, fault: &str) {
        let path = self.folder.path().join(format!("{device}.{call}"));
        // Whole or not at all: it is looked for meanwhile.
        let draft = path.with_extension("draft");
        fs::write(&draft, fault).expect("writes");
        fs::rename(&draft, &path).expect("renames");
    }

    /// The binary, to which the loader gives the stand-ins.
    fn binary(&self) -> Command {
        let mut command = Command::new(support::binary());
        command
            .env("LD_LIBRARY_PATH", self.libraries)
            .env("STANDIN_FAULTS", self.folder.path())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("TOLLGATE_LOG", "info");
        command
    }

    /// `up` with a worker for each of `devices`; its log is the machine's.
    fn start(&self, devices: &[&str], more: &str) -> Tollgate {
        let mut command = self.binary();
        command.stderr(fs::File::create(self.folder.path().join("log")).expect("a log"));
        Tollgate::start_on(&self.data(), &self.config(devices, more), command)
    }

    /// What `up` says where it does not start.
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
watchdog.step = "2s"
watchdog.times_predicted = 1
{more}
"#,
            support::OPEN,
            json!(devices),
            self.folder.path().join("locks").display()
        )
    }
}

/// What a worker measured of a device.
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

/// What the model answers, drawn greedily.
async fn answer(connection: &Connection, model: &str, prompt: &str) -> String {
    content(connection, &ask(model, prompt, ANSWER)).await
}

/// The text of the answer to `body`.
async fn content(connection: &Connection, body: &Value) -> String {
    let (status, reply) = post(connection, "/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{reply}");
    reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

/// An answer that has begun, by the request's id.
struct Begun {
    id: String,
    rest: http::Response<Incoming>,
}

/// Asks for a stream and waits for its first event.
async fn begun(connection: &Connection) -> Begun {
    let mut body = ask("tollgate-demo", PROMPTS[0], LONG_ANSWER);
    body["stream"] = json!(true);
    let response = connection.post("/v1/chat/completions", body.to_string().into()).await;
    let mut response = response.expect("answers");
    assert_eq!(response.status(), 200);
    response.frame().await.expect("a first chunk").expect("whole");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    Begun { id, rest: response }
}

/// The devices that did acme's work, by the records of the audit log.
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

/// Of each life of a worker: all of its time, and what tenants had of it. The
/// ledger is whole and every nanosecond has its account.
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

/// Two cards serve beside each other, and say what the processor says.
#[tokio::test]
async fn each_gpu_gets_a_worker_with_cpu_answers() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_cards());
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
    let [one, other] = CARDS;
    assert_eq!(billed.iter().map(String::as_str).collect::<Vec<_>>(), [one, other, "worker/0"]);
}

/// What is drawn with a seed is the same alone and in company.
#[tokio::test]
async fn deterministic_workers_answer_alike_in_company() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_cards());
    machine.is_measured("h100-Emulated_H100__deterministic_");
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

/// Streams from both workers while `lose` takes one of them away: its client
/// hears of it once, the other's not at all, and both serve again.
async fn loses_one(gateway: &Tollgate, connection: &Connection, lose: impl FnOnce()) {
    let before = gateway.workers();
    // What one still says of work that is over would bring both to the other.
    status_where(gateway, |worker| worker["backlog_ns"] == 0 && worker["running"] == 0).await;
    let (one, other) = tokio::join!(begun(connection), begun(connection));
    lose();
    // What has not begun to answer is answered by whoever is there.
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
    // What was done is on the bill.
    let usage = posted(connection, &harmed).await;
    assert_eq!(usage["reason"], "fault", "{usage}");
    assert!(usage["attributed_ns"].as_u64() > Some(0), "{usage}");
}

/// Either worker is killed.
#[tokio::test]
async fn killed_worker_on_a_gpu_is_replaced() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_cards());
    let devices = CARDS.map(|uuid| format!("cuda:{uuid}"));
    let mut gateway = machine.start(&devices.each_ref().map(String::as_str), "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for worker in gateway.workers() {
        loses_one(&gateway, &connection, || signal(worker, "KILL")).await;
    }
    assert_eq!(gateway.stop(), Some(0));
    assert_eq!(lives(&gateway).len(), 4, "two of each");
}

/// C12 and C13: the driver does not come back, a step fails, and there is no
/// memory for the next start.
#[tokio::test]
async fn failing_gpu_affects_only_its_worker() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_cards());
    let mut gateway = machine.start(&["cuda:0", "cuda:1"], "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for (device, call, fault) in
        [(0, "launch", "hang"), (1, "wait", "hang"), (1, "launch", "fail"), (0, "wait", "fail")]
    {
        if fault == "fail" {
            machine.strike(device, "alloc", fault);
        }
        loses_one(&gateway, &connection, || machine.strike(device, call, fault)).await;
    }
    assert_eq!(gateway.stop(), Some(0));
    let lives = lives(&gateway);
    // The starts without memory came to nothing.
    assert_eq!(lives.len(), 6);
    // What was watched for two seconds and more is nobody's.
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

/// Loads both workers at once: what tenants had of each, and the time that passed.
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

/// Two workers on one card, and the control: the same on two.
#[tokio::test]
async fn two_workers_on_one_card_take_turns() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_cards());
    let (busy, passed) = two_at_once(&machine, &["cuda:0", "cuda:0"]).await;
    assert_eq!(busy.len(), 2, "both had turns: {busy:?}");
    let share = |busy: &[i64], passed: i64| busy.iter().sum::<i64>() as f64 / passed as f64;
    let shared = share(&busy, passed);
    assert!(shared <= 1.0, "{busy:?} in {passed}");
    let (busy, passed) = two_at_once(&Machine::of_cards(), &["cuda:0", "cuda:1"]).await;
    assert!(share(&busy, passed) > shared, "the control fails: {busy:?} in {passed}");
}

/// What no worker can start on is told in one sentence; where the processor is
/// allowed, it serves instead.
#[tokio::test]
async fn gpu_start_failures_give_a_reason() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_cards());
    let said = |devices: &[&str], sentence: &str| {
        let log = machine.refused(devices);
        let said = log.lines().find(|line| line.contains(sentence));
        assert_eq!(said.map(|line| line.matches(sentence).count()), Some(1), "{sentence:?}: {log}");
    };
    machine.strike(0, "alloc", "fail");
    said(
        &["cuda:0"],
        "the device cannot be set up: cuMemAlloc failed: the stand-in says no \
         (CUDA_ERROR_OUT_OF_MEMORY)",
    );
    let by_identity = format!("cuda:{}", CARDS[0]);
    said(&["cuda:0", &by_identity], "the same name, so that the workers take turns");
    let absent = format!("cuda:{}", SLICES[0].replace("00", "ff"));
    said(
        &[&absent],
        &format!("there is no CUDA device {absent}; `nvidia-smi -L` lists those that there are"),
    );
    machine.strike(0, "alloc", "fail");
    let mut gateway = machine.start(&["auto"], "");
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    answer(&connection, "tollgate-demo", PROMPTS[0]).await;
    assert_eq!(gateway.stop(), Some(0));
    let log = machine.log();
    assert!(log.contains("the model runs on the processor") && log.contains("cuMemAlloc"), "{log}");
}

/// The status once every device has been looked at.
async fn watched(gateway: &Tollgate) -> Value {
    status_where(gateway, |worker| worker["health"].is_object()).await
}

/// The status once this holds of every worker.
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

/// Slices of one card: each process is shown its own, bills and locks are the
/// slice's, and NVML knows it by the same name.
#[tokio::test]
async fn each_gpu_slice_gets_a_worker() {
    let (_alone, machine) = (ALONE.lock().await, Machine::of_slices());
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

/// Tokens of an answer, and of one that is still under way when its worker is lost.
const ANSWER: u32 = 12;
const LONG_ANSWER: u32 = 60;
const PROMPTS: [&str; 6] = [
    "Tell me a story.",
    "Tell me a story about a dog.",
    "Who are you?",
    "The sun is",
    "Once upon a time there was a girl",
    "Hello!",
];
