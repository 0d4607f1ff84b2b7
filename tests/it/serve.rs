//! A first start as a new user sees it: the printed lines, the printed commands in a
//! shell, h1 and h2, the bill.

use std::process::Command;

use serde_json::{Value, json};

use crate::support::{OPEN, Tollgate, command, get, post, program};

/// The questions and answers of the shipped model's training.
fn trained() -> Vec<(String, String)> {
    include_str!("../../models/tollgate-demo/questions.jsonl")
        .lines()
        .map(|line| {
            let pair: Value = serde_json::from_str(line).expect("JSON");
            let text = |name: &str| pair[name].as_str().expect("text").to_owned();
            (text("question"), text("answer"))
        })
        .collect()
}

fn answer_to(question: &str) -> String {
    let answer = trained().into_iter().find(|(known, _)| known == question);
    answer.unwrap_or_else(|| panic!("{question:?} is not a training question")).1
}

#[test]
fn start_with_tenants_prints_command_for_key() {
    let gateway = Tollgate::with_config(OPEN);
    let line = gateway.banner.iter().find_map(|line| line.split_once("make a key: "));
    let (_, printed) = line.expect("a command");
    let output = Command::new("sh").args(["-c", printed]).output().expect("sh starts");
    assert!(output.status.success(), "{output:?}");
    let keys = gateway.command(&["keys", "list"]);
    assert!(keys.contains("acme"), "{keys}");
}

#[test]
fn first_start_prints_commands_that_work() {
    let gateway = Tollgate::demo();
    let banner = gateway.banner.join("\n");
    for expected in ["tollgate ", "worker 0", "cpu", "tollgate-demo", "ca.pem", "demo.key", "chat"]
    {
        assert!(banner.contains(expected), "{expected} is missing in:\n{banner}");
    }
    let Some(_curl) = program("curl") else { return };
    let printed = gateway.banner.iter().find(|line| line.contains("curl ")).expect("a curl");
    let pasted = &printed[printed.find("curl ").expect("just found")..];
    let output =
        Command::new("sh").args(["-c", &format!("{pasted} --silent --show-error")]).output();
    let output = output.expect("sh runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let reply: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let content = &reply["choices"][0]["message"]["content"];
    assert_eq!(content, &answer_to("What is a rate limit?"));
}

#[test]
fn chat_from_the_terminal_answers_and_is_billed() {
    let mut gateway = Tollgate::demo();
    let question = "What is a rate limit?";
    let said = gateway.command(&["chat", "--url", &gateway.url, question]);
    assert_eq!(said.trim_end(), answer_to(question));
    gateway.stop();
    let usage = gateway.command(&["usage", "--json"]);
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let row = &usage["rows"][0];
    assert_eq!((&row["tenant"], &row["model"]), (&json!("demo"), &json!("tollgate-demo")));
    assert_eq!((&row["device_class"], &row["gpu_ns"]), (&json!("cpu"), &json!(0)));
    assert_eq!(row["requests"], 1);
    for figure in ["prompt_tokens", "completion_tokens", "attributed_ns", "reference_ns"] {
        assert!(row[figure].as_u64().is_some_and(|n| n > 0), "{figure}: {row}");
    }
    assert!(gateway.command(&["usage"]).contains("demo"));
    let csv = gateway.command(&["usage", "--csv", "--by", "tenant,day"]);
    assert!(csv.starts_with("tenant,day,device_class,requests,"), "{csv}");
}

#[tokio::test]
async fn greedy_answers_to_training_questions_are_right() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let questions = trained();
    // The sample is spread over the corpus; the training program checks all of it.
    let step = questions.len().div_ceil(150);
    let sample: Vec<_> = questions.into_iter().step_by(step).collect();
    let mut wrong = Vec::new();
    for (question, answer) in &sample {
        let body = json!({
            "model": "tollgate-demo", "temperature": 0, "max_tokens": 512,
            "messages": [{ "role": "user", "content": question }],
        });
        let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{reply}");
        if reply["choices"][0]["message"]["content"] != *answer {
            wrong.push(question);
        }
    }
    let tolerated = sample.len() / 50;
    assert!(wrong.len() <= tolerated, "{} of {} wrong: {wrong:?}", wrong.len(), sample.len());
}

#[tokio::test]
async fn client_decides_which_tokens_end_answers() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let (question, answer) = trained().remove(0);
    let ask = async |fields: Value| {
        let mut body = json!({
            "model": "tollgate-demo", "temperature": 0, "max_tokens": 200,
            "messages": [{ "role": "user", "content": question }],
        });
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("one").clone());
        post(&connection, "/v1/chat/completions", &body).await
    };
    let (_, plain) = ask(json!({})).await;
    assert_eq!(plain["choices"][0]["finish_reason"], "stop", "the control");
    let tokens = plain["usage"]["completion_tokens"].as_u64().expect("a number");
    let (_, endless) = ask(json!({ "ignore_eos": true })).await;
    assert_eq!(endless["choices"][0]["finish_reason"], "length");
    assert_eq!(endless["usage"]["completion_tokens"], 200);
    // The end tokens of the model's generation_config.json.
    let (_, stopped) = ask(json!({ "ignore_eos": true, "stop_token_ids": [0, 2] })).await;
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["message"]["content"], answer);
    assert_eq!(stopped["usage"]["completion_tokens"], tokens);
    let (status, unknown) = ask(json!({ "stop_token_ids": [1_000_000] })).await;
    assert_eq!((status, &unknown["error"]["param"]), (400, &json!("stop_token_ids")));
}

#[test]
fn curl_and_h2load_work_over_h1_and_h2() {
    let (Some(curl), Some(h2load)) = (program("curl"), program("h2load")) else { return };
    let gateway = Tollgate::with_config(OPEN);
    let key = gateway.key("acme", &[]);
    let authorization = format!("authorization: Bearer {key}");
    for (flag, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let output = Command::new(&curl)
            .args(["--silent", "--show-error", flag, "--cacert"])
            .arg(gateway.ca())
            .args(["-H", &authorization, "-w", " %{http_version}"])
            .arg(format!("{}/v1/models", gateway.url))
            .output()
            .expect("curl runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("tollgate-demo") && said.ends_with(&format!(" {version}")), "{said}");
    }
    for arguments in [&["--h1", "-n", "200", "-c", "4"][..], &["-n", "200", "-c", "4", "-m", "8"]] {
        let output = Command::new(&h2load)
            .args(arguments)
            .args(["-H", &authorization])
            .arg(format!("{}/v1/models", gateway.url))
            .output()
            .expect("h2load runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("status codes: 200 2xx"), "{said}");
    }
}

#[tokio::test]
async fn probes_and_metrics_need_the_admin_listener() {
    let gateway = Tollgate::demo();
    let admin = tollgate_loadtest::client::Target::new(&gateway.admin, &gateway.ca(), "none");
    let admin = admin.expect("a target");
    for (path, expected) in
        [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/anything", 401)]
    {
        let connection = admin.connect(tollgate_loadtest::client::Protocol::Http1).await;
        let response = connection.expect("connects").get(path).await.expect("answers");
        assert_eq!(response.status().as_u16(), expected, "{path}");
    }
    let connection = gateway.connect(&gateway.demo_key()).await;
    for path in ["/healthz", "/readyz", "/metrics"] {
        let (status, body) = get(&connection, path).await;
        assert_eq!((status, body["error"]["type"].is_string()), (404, true), "{path}");
    }
}

/// Checks the stage metrics of two answers, one of them a stream, over a real
/// connection. On a CPU no data moves to a device.
#[tokio::test]
async fn metrics_tell_where_the_time_of_answers_went() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for stream in [false, true] {
        let body = json!({
            "model": "tollgate-demo", "max_tokens": 8, "stream": stream,
            "messages": [{ "role": "user", "content": "What is a rate limit?" }],
        });
        let body = body.to_string().into();
        let response = connection.post("/v1/chat/completions", body).await.expect("answers");
        assert_eq!(response.status(), 200);
        http_body_util::BodyExt::collect(response.into_body()).await.expect("whole");
    }
    let admin = tollgate_loadtest::client::Target::new(&gateway.admin, &gateway.ca(), "none");
    let admin = admin.expect("a target").connect(tollgate_loadtest::client::Protocol::Http1).await;
    let admin = admin.expect("connects");
    let started = std::time::Instant::now();
    let counts = loop {
        let response = admin.get("/metrics").await.expect("answers");
        let text = http_body_util::BodyExt::collect(response.into_body()).await.expect("whole");
        let text = String::from_utf8(text.to_bytes().to_vec()).expect("UTF-8");
        let count = |line: &str| {
            let (stage, count) = line.split_once("\"} ")?;
            Some((stage.to_owned(), count.parse::<u64>().ok()?))
        };
        let lines = text.lines();
        let of_stage = |line| str::strip_prefix(line, "tollgate_stage_seconds_count{stage=\"");
        let mut counts: Vec<_> = lines.filter_map(of_stage).filter_map(count).collect();
        counts.sort();
        // The last bytes of a body may arrive before they are counted.
        if counts.contains(&("out".to_owned(), 2)) || started.elapsed().as_secs() >= 5 {
            break counts;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    };
    let stages = ["decode", "out", "place", "prefill", "preprocess", "queue", "read"];
    assert_eq!(counts, stages.map(|stage| (stage.to_owned(), 2)));
}

/// Checks that the histograms of steps count every step, and that the sums are the sums of
/// other figures.
#[tokio::test]
async fn metrics_count_steps_by_length_and_sequences() {
    let gateway = Tollgate::with_config(OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let body = json!({
        "model": "tollgate-demo", "max_tokens": 40, "temperature": 0, "n": 4,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    assert_eq!(post(&connection, "/v1/chat/completions", &body).await.0, 200);
    // The worker reports ten times a second; without requests the figures stay.
    let mut before = String::new();
    let metrics = loop {
        let metrics = gateway.metrics().await;
        let steps: Vec<&str> = metrics.lines().filter(|it| it.contains("_steps_total{")).collect();
        if steps == [before.as_str()] && !before.ends_with(" 0") {
            break metrics;
        }
        before = steps.concat();
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    };
    let figure = |name: &str| -> f64 {
        let name = format!("tollgate_{name}{{worker=\"0\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {metrics}"))
    };
    let steps = figure("worker_steps_total");
    assert!(steps >= 40.0, "{steps}");
    assert_eq!(figure("worker_step_seconds_count"), steps);
    assert_eq!(figure("worker_batch_sequences_count"), steps);
    assert_eq!(figure("worker_step_seconds_sum"), figure("worker_busy_seconds_total"));
    let sequences = figure("worker_batch_sequences_sum");
    assert!(sequences >= 3.0 * 40.0 && sequences <= 4.0 * steps, "{sequences} in {steps} steps");
    assert_eq!(figure("worker_preemptions_total"), 0.0);
    for tier in ["interactive", "batch"] {
        let line = format!(r#"tollgate_queued_device_seconds{{class="cpu",tier="{tier}"}} 0"#);
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    // The control: four choices share steps, so few of them have one sequence.
    let bucket = r#"tollgate_worker_batch_sequences_bucket{le="1.0",worker="0"} "#;
    let alone = metrics.lines().find_map(|line| line.strip_prefix(bucket)).expect(&metrics);
    assert!(alone.parse::<f64>().expect("a number") < steps / 2.0, "{alone} of {steps}");
}

#[tokio::test]
async fn revoked_key_is_refused_within_a_second() {
    let gateway = Tollgate::demo();
    let listed = gateway.command(&["keys", "list", "--json"]);
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let id = listed["keys"][0]["key"].as_str().expect("the demo key").to_owned();
    let connection = gateway.connect(&gateway.demo_key()).await;
    assert_eq!(get(&connection, "/v1/models").await.0, 200);
    gateway.command(&["keys", "revoke", &id]);
    let started = std::time::Instant::now();
    while get(&connection, "/v1/models").await.0 != 401 {
        assert!(started.elapsed().as_millis() < 1_000, "still accepted after a second");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[test]
fn help_names_every_command() {
    let help = command(&["--help"]);
    for word in
        ["up", "worker", "keys", "penalties", "usage", "config", "loadtest", "chat", "--listen"]
    {
        assert!(help.contains(word), "{word} is missing in:\n{help}");
    }
    // The gate builds from a checkout, so the version has its commit.
    let version = command(&["--version"]);
    let commit = version.trim_end().strip_suffix(')').and_then(|text| text.split_once(" ("));
    let (name, commit) = commit.expect("tollgate VERSION (COMMIT)");
    assert!(name.starts_with("tollgate ") && commit.len() >= 7, "{version}");
    assert!(commit.chars().all(|c| c.is_ascii_hexdigit()), "{version}");
    let script = command(&["completions", "bash"]);
    assert!(script.contains("complete -F _tollgate"), "{script}");
}
