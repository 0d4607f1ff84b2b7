//! Files and batches that several gateways share on a database server and in one folder.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_sql::testing::TestServer;

use crate::batch_results::{Sums, check_completed, figure, input};
use crate::batches::{create, ended, lines, upload};
use crate::postgres::{Database, apart, told, until_gateways};
use crate::support::{self, Tollgate, failing, get, post};

/// Returns the config of a gateway whose lines take tens of milliseconds, with the shared folder
/// `folder`.
fn config(database: &Database<'_>, folder: &Path) -> String {
    let folder = folder.display();
    database.config_with(&format!(
        r#"
[gateway.jobs]
folder = "{folder}"

[worker]
engine = "synthetic"
[worker.synthetic]
step = "2ms"
speed = 1.0
kv_tokens = 100_000

[plans.open]
requests_per_minute = 100_000
concurrent = 64

# No other class of device has a price.
[prices.standard]
from = 2020-01-01
currency = "EUR"
per_device_second = {{ synthetic = "1" }}

[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"
"#
    ))
}

/// Two gateways that share batches, and a key of 'acme'.
struct Pair {
    first: Tollgate,
    second: Tollgate,
    key: String,
}

impl Pair {
    async fn start(database: &Database<'_>, config: &str) -> Self {
        let first = database.gateway_with("a", config);
        database.share_secrets(&first, "b");
        let second = database.gateway_with("b", config);
        until_gateways(&first, 2).await;
        until_gateways(&second, 2).await;
        let key = first.key("acme", &[]);
        until_known(&second, &key).await;
        Self { first, second, key }
    }
}

/// Waits until a gateway has read a new key.
async fn until_known(gateway: &Tollgate, key: &str) {
    until("the key is known", Duration::from_secs(5), async || {
        get(&gateway.connect(key).await, "/v1/batches").await.0 != 401
    })
    .await;
}

async fn state(gateway: &Tollgate, key: &str, id: &str) -> Value {
    let path = format!("/v1/batches/{id}");
    let begun = Instant::now();
    loop {
        let (status, batch) = get(&gateway.connect(key).await, &path).await;
        // The database server may be back for a moment only.
        if status != 503 || begun.elapsed() > Duration::from_secs(10) {
            assert_eq!(status, 200, "{batch}");
            return batch;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn id(batch: &Value) -> String {
    batch["id"].as_str().expect("an id").to_owned()
}

async fn until(what: &str, within: Duration, mut is_so: impl AsyncFnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < within, "still not: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    begun.elapsed()
}

/// A fault under batches that run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A gateway is killed.
    Kill,
    /// A gateway is stopped for longer than a lease. It goes on while another one runs its batches.
    Pause,
    /// The database server is killed, and is away for longer than a lease.
    Server,
}

/// Asserts that each line is answered once and that the bill is the sum of the answers, though
/// `fault` happens.
async fn run_through(fault: Fault) {
    const LINES: usize = 400;
    // Of its own: other tests need theirs to be there.
    let Some(server) = apart(TestServer::start) else { return };
    support::stay_within_a_day().await;
    let database = Database::new(&server);
    let config = config(&database, &database.path("batches"));
    let Pair { mut first, second, key } = Pair::start(&database, &config).await;
    // Uploaded through one gateway, made through the other.
    let mut made = Vec::new();
    for number in 0..4 {
        let text = input(LINES, |line| 1 + line as u64 % 40);
        let (status, file) = upload(&first.connect(&key).await, &text).await;
        assert_eq!(status, 200, "{file}");
        let maker = if number < 2 { &first } else { &second };
        let (status, batch) = create(&maker.connect(&key).await, &file).await;
        assert_eq!(status, 200, "{batch}");
        made.push(id(&batch));
    }
    until("each batch has answers", Duration::from_secs(30), async || {
        let mut have = 0;
        for id in &made {
            have += usize::from(
                figure(&state(&second, &key, id).await["request_counts"]["completed"]) > 0,
            );
        }
        have == made.len()
    })
    .await;
    let ended_before = ended_of(&second, &key, &made).await;
    match fault {
        Fault::Kill => first.kill(),
        Fault::Pause => support::signal(first.pid(), "STOP"),
        Fault::Server => {
            apart(|| server.kill());
            tokio::time::sleep(Duration::from_secs(20)).await;
            apart(|| server.resume());
        }
    }
    assert!(ended_before < made.len(), "a fault after the end proves nothing");
    if fault == Fault::Pause {
        // Its workers go on, and what they have done meets the caps of the other gateway.
        tokio::time::sleep(Duration::from_secs(20)).await;
        support::signal(first.pid(), "CONT");
    }
    until("the other gateway has ended the batches", Duration::from_secs(90), async || {
        ended_of(&second, &key, &made).await == made.len()
    })
    .await;
    let mut answered: Sums = Sums::default();
    for id in &made {
        let batch = state(&second, &key, id).await;
        let connection = second.connect(&key).await;
        answered = [answered, check_completed(&connection, &batch, LINES).await].into_iter().sum();
    }
    if fault == Fault::Kill {
        // The journal of the dead gateway's worker has work that nobody has posted.
        first = first.restart();
    }
    until("the bill is the sum of the answers", Duration::from_secs(30), async || {
        let data = second.data().display().to_string();
        let usage = told(&second, &["usage", "--json", "--by", "tenant", "--data", &data]);
        let usage: Value = serde_json::from_str(&usage).expect("JSON");
        let row = &usage["rows"][0];
        let billed = (row["requests"].as_u64(), row["reference_ns"].as_u64());
        billed == (Some(answered.requests()), Some(answered.reference_ns()))
    })
    .await;
    for mut gateway in [first, second] {
        assert_eq!(tokio::task::block_in_place(|| gateway.stop()), Some(0));
    }
    database.assert_sound();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_batches_survive_kill_of_gateway() {
    run_through(Fault::Kill).await;
}

async fn ended_of(gateway: &Tollgate, key: &str, made: &[String]) -> usize {
    let mut ended = 0;
    for id in made {
        ended += usize::from(state(gateway, key, id).await["status"] == "completed");
    }
    ended
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_batch_is_cancelled_through_other_gateway() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let config = config(&database, &database.path("batches"));
    let Pair { first, second, key } = Pair::start(&database, &config).await;
    let (_, file) = upload(&first.connect(&key).await, &input(2_000, |_| 40)).await;
    let (status, batch) = create(&first.connect(&key).await, &file).await;
    assert_eq!(status, 200, "{batch}");
    let id = id(&batch);
    until("lines are answered", Duration::from_secs(30), async || {
        figure(&state(&first, &key, &id).await["request_counts"]["completed"]) > 0
    })
    .await;
    // Of two gateways at least one does not run the batch: both are asked.
    for gateway in [&first, &second] {
        let path = format!("/v1/batches/{id}/cancel");
        let (status, cancelled) = post(&gateway.connect(&key).await, &path, &json!({})).await;
        assert_eq!(status, 200, "{cancelled}");
    }
    until("the batch is cancelled", Duration::from_secs(10), async || {
        state(&second, &key, &id).await["status"] == "cancelled"
    })
    .await;
    // A file is deleted through the other gateway, too, and is gone for both.
    let input = format!("/v1/files/{}", file["id"].as_str().expect("an id"));
    let deleted = second.connect(&key).await.delete(&input).await.expect("answers");
    assert_eq!(support::read(deleted).await.0, 200);
    for gateway in [&first, &second] {
        assert_eq!(get(&gateway.connect(&key).await, &input).await.0, 404);
    }
    // Another tenant sees nothing of it on either.
    let other = first.key("other", &[]);
    for gateway in [&first, &second] {
        let path = format!("/v1/batches/{id}");
        until_known(gateway, &other).await;
        assert_eq!(get(&gateway.connect(&other).await, &path).await.0, 404);
    }
}

/// A gateway that had files and batches of its own brings them along.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn own_batches_move_to_shared_folder() {
    let Some(server) = apart(TestServer::shared) else { return };
    let database = Database::new(&server);
    let mut alone = database.gateway("a");
    let key = alone.key("acme", &[]);
    let connection = alone.connect(&key).await;
    let (_, file) = upload(&connection, &lines(3)).await;
    let batch = create(&connection, &file).await.1;
    let batch = ended(&connection, &batch).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let output = format!("/v1/files/{}/content", batch["output_file_id"].as_str().expect("an id"));
    let text = support::rest(connection.get(&output).await.expect("answers")).await;
    assert_eq!(alone.stop(), Some(0));
    let folder = database.path("batches");
    let shared =
        format!("{}\n[gateway.jobs]\nfolder = \"{}\"\n", database.config(), folder.display());
    let first = database.gateway_with("a", &shared);
    database.share_secrets(&first, "b");
    let second = database.gateway_with("b", &shared);
    for gateway in [&first, &second] {
        assert_eq!(state(gateway, &key, &id(&batch)).await, batch);
        let connection = gateway.connect(&key).await;
        let moved = support::rest(connection.get(&output).await.expect("answers")).await;
        assert_eq!(moved, text);
    }
    // A third gateway, with a folder of its own machine or with another database.
    let own = shared.replace(&folder.display().to_string(), "elsewhere");
    database.share_secrets(&first, "c");
    let refused = refused(&database, "c", &own);
    assert!(refused.contains("not the folder that the other gateways use"), "{refused}");
    let foreign = Database::new(&server);
    let foreign =
        format!("{}\n[gateway.jobs]\nfolder = \"{}\"\n", foreign.config(), folder.display());
    let refused = self::refused(&database, "d", &foreign);
    assert!(refused.contains("it has the files and batches of another database"), "{refused}");
}

/// Returns the error of a start with a config.
fn refused(database: &Database<'_>, name: &str, config: &str) -> String {
    let data = database.path(name);
    fs::create_dir_all(&data).expect("makes the folder");
    let file = database.path(&format!("{name}.toml"));
    fs::write(&file, config).expect("writes");
    let (config, data) = (file.display().to_string(), data.display().to_string());
    let listen = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    failing(&[&["up", "--config", &config, "--data", &data], &listen[..]].concat())
}

/// Tests that only `cargo xtask test --long` runs.
mod long {
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "long: a gateway that is stopped for longer than a lease"]
    async fn shared_batches_survive_pause_of_gateway() {
        super::run_through(super::Fault::Pause).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "long: a database server that is away for longer than a lease"]
    async fn shared_batches_survive_outage_of_server() {
        super::run_through(super::Fault::Server).await;
    }
}
