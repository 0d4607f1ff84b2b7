//! Schemas drawn at random, over a model with random weights. An answer that ended by itself is
//! valid under its schema, by another implementation of JSON Schema. The arguments of a
//! streamed call are those of the whole answer.

mod random_schema;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;
use tollgate_loadtest::client::Connection;

use self::random_schema::RandomSchema;
use crate::kills::load::SeededRandom;
use crate::sdks::variable;
use crate::support::{OPEN, Tollgate, of_schema, post, rest, tool, with_fields};

const CHAT: &str = "/v1/chat/completions";
/// Requests under way at once.
const AT_ONCE: usize = 16;
/// Tokens of an answer: more than most schemas need.
const MOST_TOKENS: u32 = 400;

/// The outcome of one schema.
enum Outcome {
    /// The gateway or the worker refused the schema, with this message.
    Refused(String),
    /// The answer was cut off by its bound of tokens.
    Cut,
    /// The answer ended by itself.
    Ended { schema: Value, answer: String },
}

/// Plays schemas `0..count` of `seed`, each by an answer and, every third one, by a call.
async fn play(seed: u64, count: u64) {
    let Some(python) = tool("the Python SDK", variable("TOLLGATE_PYTHON")) else { return };
    println!("seed {seed}");
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("random");
    write_model(&model, seed);
    let config = OPEN.replace("queued = 1024", "queued = 1024\ngrammar_time_per_minute = \"60s\"");
    // A call is asked for twice, in other batches, and must be the same.
    let config = format!("{config}\n[worker]\ndeterministic = true\n");
    let gateway = Tollgate::start(Some(&config), &["--model", &model.display().to_string()]);
    let key = gateway.key("acme", &[]);
    let connection = Arc::new(gateway.connect(&key).await);
    let (mut cases, mut refused, mut cut) = (Vec::new(), Vec::new(), 0_u64);
    let mut plays = JoinSet::new();
    for number in 0..count {
        if plays.len() == AT_ONCE {
            sort(plays.join_next().await, &mut cases, &mut refused, &mut cut);
        }
        let connection = Arc::clone(&connection);
        plays.spawn(async move {
            let mut draw = SeededRandom::new(seed, number);
            let schema = RandomSchema::draw(&mut draw);
            match number % 3 {
                0 => call(&connection, schema.of_arguments(), number).await,
                _ => answer(&connection, schema.of_answer(), number).await,
            }
        });
    }
    while !plays.is_empty() {
        sort(plays.join_next().await, &mut cases, &mut refused, &mut cut);
    }
    println!("{} ended, {cut} cut off, {} refused", cases.len(), refused.len());
    for message in &refused {
        println!("refused: {message}");
    }
    // Otherwise the test would pass without showing much.
    assert!(cases.len() as u64 > count / 2, "most answers end by themselves");
    assert!((refused.len() as u64) < count / 10, "most schemas are served");
    validate(&python, &cases);
}

fn sort(
    joined: Option<Result<Outcome, tokio::task::JoinError>>,
    cases: &mut Vec<(Value, String)>,
    refused: &mut Vec<String>,
    cut: &mut u64,
) {
    match joined.expect("a play").expect("no panic") {
        Outcome::Refused(message) => refused.push(message),
        Outcome::Cut => *cut += 1,
        Outcome::Ended { schema, answer } => cases.push((schema, answer)),
    }
}

/// Writes a model with random weights whose chat template knows tools.
fn write_model(folder: &Path, seed: u64) {
    let spec = ModelSpec { context: 2_048, ..ModelSpec::tiny() };
    RandomModel { spec, element: Element::Bf16, seed }.write(folder).expect("writes");
    let read = |path: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(path).expect("reads")).expect("JSON")
    };
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tollgate-demo");
    let path = folder.join("tokenizer_config.json");
    let mut config = read(&path);
    config["chat_template"] = read(&shipped.join("tokenizer_config.json"))["chat_template"].clone();
    std::fs::write(&path, config.to_string()).expect("writes");
}

fn body(number: u64, fields: &Value) -> Value {
    let body = json!({
        "model": "random", "temperature": 1, "seed": number, "max_tokens": MOST_TOKENS,
        "messages": [{ "role": "user", "content": "Hi" }],
    });
    with_fields(body, fields)
}

/// Asks for an answer under `schema`.
async fn answer(connection: &Connection, schema: Value, number: u64) -> Outcome {
    let (status, reply) = post(connection, CHAT, &body(number, &of_schema(&schema))).await;
    if status == 400 {
        return Outcome::Refused(format!("{}: {schema}", reply["error"]["message"]));
    }
    assert_eq!(status, 200, "{schema}: {reply}");
    let choice = &reply["choices"][0];
    match choice["finish_reason"].as_str() {
        Some("length") => Outcome::Cut,
        Some("stop") => {
            let answer = choice["message"]["content"].as_str().expect("text").to_owned();
            Outcome::Ended { schema, answer }
        }
        other => panic!("{other:?}: {schema}: {reply}"),
    }
}

/// Asks for a call with arguments under `schema`, once whole and once as a stream.
async fn call(connection: &Connection, schema: Value, number: u64) -> Outcome {
    let tools = json!([{ "type": "function",
        "function": { "name": "f", "parameters": schema, "strict": true } }]);
    let named = json!({ "type": "function", "function": { "name": "f" } });
    let mut request = body(number, &json!({ "tools": tools, "tool_choice": named }));
    let (status, reply) = post(connection, CHAT, &request).await;
    if status == 400 {
        return Outcome::Refused(format!("{}: {schema}", reply["error"]["message"]));
    }
    assert_eq!(status, 200, "{schema}: {reply}");
    let choice = &reply["choices"][0];
    let calls = &choice["message"]["tool_calls"];
    let whole = calls[0]["function"]["arguments"].as_str().unwrap_or_default().to_owned();

    request["stream"] = json!(true);
    let response = connection.post(CHAT, request.to_string().into()).await.expect("answers");
    let events = rest(response).await;
    let mut streamed = String::new();
    let mut end = Value::Null;
    for line in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let delta = &event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"];
        streamed.push_str(delta.as_str().unwrap_or_default());
        if event["choices"][0]["finish_reason"].is_string() {
            end = event["choices"][0]["finish_reason"].clone();
        }
    }
    assert_eq!((&streamed, &end), (&whole, &choice["finish_reason"]), "{schema}: {reply}");
    match end.as_str() {
        Some("length") => Outcome::Cut,
        Some("stop" | "tool_calls") => Outcome::Ended { schema, answer: whole },
        other => panic!("{other:?}: {schema}: {reply}"),
    }
}

/// Fails if the validator finds an answer that is not valid under its schema.
fn validate(python: &Path, cases: &[(Value, String)]) {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/validate_answers.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("a pipe");
    // The script reads all lines before it writes.
    for (schema, answer) in cases {
        let line = json!({ "schema": schema, "answer": answer });
        writeln!(input, "{line}").expect("it reads");
    }
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}");
    assert_eq!(report.trim(), format!("{} valid", cases.len()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_answers_are_valid_under_their_schemas() {
    play(1, 1_000).await;
}

/// Tests that only `cargo xtask test --long` runs.
mod long {
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "long: ten thousand schemas over each of three models"]
    async fn ten_thousand_random_schemas_over_each_model() {
        for seed in [2, 3, 4] {
            super::play(seed, 10_000).await;
        }
    }
}
