//! Bad input: each mistake gives one clear sentence that names the mistake and its
//! place, and no data is lost.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::{self, Tollgate, failing, post};

/// Asserts that `tollgate up` fails with this config and names all of `expected`.
fn refuses(config: &str, expected: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad.toml");
    fs::write(&path, config).expect("writes");
    let path = path.display().to_string();
    for command in [&["config", "check"][..], &["up"]] {
        let error = failing(&[command, &["--config", &path]].concat());
        for word in expected {
            assert!(error.contains(word), "{word:?} is missing in: {error}");
        }
        assert!(!error.contains("panicked"), "{error}");
    }
}

#[test]
fn config_mistakes_are_named_all_at_once() {
    refuses(
        "[plans.team]\nrequest_per_minute = 5\n\n[tenants.acme]\nplan = \"taem\"\n",
        &["bad.toml:2", "request_per_minute", "requests_per_minute", "bad.toml:5", "taem"],
    );
    refuses("[plans.team]\nconcurrent = \"many\"\n", &["bad.toml:2", "plans.team.concurrent"]);
    refuses("[plans\n", &["bad.toml:1"]);
    refuses(
        "[plans.t]\ndevice_time_per_day = { default = \"1h\" }\n\
         device_time_per_month = { default = \"1m\" }\n[tenants.a]\nplan = \"t\"\n",
        &["device_time_per_day", "device_time_per_month"],
    );
}

#[test]
fn up_with_incomplete_model_folder_fails() {
    let good = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tollgate-demo");
    let weights = fs::read(good.join("model.safetensors")).expect("the shipped model");
    type Spoil = Box<dyn Fn(&Path)>;
    let cases: Vec<(&str, Spoil)> = vec![
        (
            "model.safetensors",
            Box::new(|folder| {
                fs::remove_file(folder.join("model.safetensors")).expect("removes");
            }),
        ),
        (
            "model.safetensors",
            Box::new(move |folder| {
                let torn = &weights[..weights.len() / 2];
                fs::write(folder.join("model.safetensors"), torn).expect("writes");
            }),
        ),
        (
            "config.json",
            Box::new(|folder| {
                fs::write(folder.join("config.json"), "{\"model_type\": \"mamba\"}")
                    .expect("writes");
            }),
        ),
        (
            "tokenizer.json",
            Box::new(|folder| {
                fs::write(folder.join("tokenizer.json"), "{").expect("writes");
            }),
        ),
    ];
    for (named, spoil) in cases {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        fs::create_dir(&model).expect("makes");
        for entry in fs::read_dir(&good).expect("reads").map_while(Result::ok) {
            fs::copy(entry.path(), model.join(entry.file_name())).expect("copies");
        }
        spoil(&model);
        let (data, model) = (folder.path().join("data"), model.display().to_string());
        let error = failing(&[
            "up",
            "--listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
            "--data",
            &data.display().to_string(),
            "--model",
            &model,
        ]);
        assert!(error.contains(named), "{named:?} is missing in: {error}");
        assert!(!error.contains("panicked"), "{error}");
    }
}

#[test]
fn up_with_non_utf8_data_folder_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let odd = folder.path().join(OsStr::from_bytes(b"odd-\xff"));
    fs::create_dir(&odd).expect("makes");
    // Named in full, and named from within.
    for (working_folder, data) in [(folder.path(), odd.join("data")), (&*odd, "data".into())] {
        let output = Command::new(support::binary())
            .args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--data"])
            .arg(&data)
            .current_dir(working_folder)
            .output()
            .expect("the binary starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "tollgate up accepted {data:?}");
        assert!(error.contains(r"odd-\xFF/data") && error.contains("UTF-8"), "{error}");
        let made = fs::read_dir(&odd).expect("reads").count();
        assert_eq!(made, 0, "tollgate up left files in the folder that it refused");
        let beside = fs::read_dir(folder.path()).expect("reads").count();
        assert_eq!(beside, 1, "tollgate up made a folder of another name");
    }
    let output = Command::new(support::binary())
        .args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
        .env("TOLLGATE_DATA", odd.join("data"))
        .output()
        .expect("the binary starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "tollgate up accepted TOLLGATE_DATA");
    assert!(error.contains("TOLLGATE_DATA") && error.contains("UTF-8"), "{error}");
}

#[test]
fn up_with_port_or_folder_in_use_fails() {
    let gateway = Tollgate::demo();
    let data = gateway.data().display().to_string();
    let error = failing(&[
        "up",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--data",
        &data,
    ]);
    assert!(error.contains(&data) && error.contains("in use"), "{error}");
    let other = tempfile::tempdir().expect("a folder");
    let other = other.path().join("data").display().to_string();
    let listen = gateway.url.trim_start_matches("https://");
    let error =
        failing(&["up", "--listen", listen, "--admin-listen", "127.0.0.1:0", "--data", &other]);
    assert!(error.contains(listen), "{error}");
}

#[tokio::test]
async fn bad_bodies_are_refused_by_field() {
    let gateway = Tollgate::with_config(support::OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let good = json!({
        "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "Hello!" }],
    });
    for (field, value, param) in [
        ("model", json!(7), "model"),
        ("messages", json!([]), "messages"),
        ("messages", json!([{ "role": "robot", "content": "x" }]), "messages"),
        ("temperature", json!("hot"), "temperature"),
        ("max_tokens", json!(-1), "max_tokens"),
        ("n", json!(0), "n"),
        ("stop", json!([1]), "stop"),
        ("logit_bias", json!({ "x": 1 }), "logit_bias"),
    ] {
        let mut body = good.clone();
        body[field] = value;
        let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
        let named = reply["error"]["param"].as_str().unwrap_or_default();
        assert!(status == 400 && named.starts_with(param), "{field}: {status} {reply}");
    }
    for (body, expected) in [
        ("{".to_owned(), 400),
        ("[]".to_owned(), 400),
        (format!("{{\"messages\":{}1{}}}", "[".repeat(100), "]".repeat(100)), 400),
        ("{\"model\":\"a\",\"model\":\"b\"}".to_owned(), 400),
        (" ".repeat(3 << 20), 413),
    ] {
        let response = connection.post("/v1/chat/completions", body.into()).await.expect("answers");
        let (status, reply) = support::read(response).await;
        assert_eq!(status, expected, "{reply}");
        let keys: Vec<&String> = reply["error"].as_object().expect("an error").keys().collect();
        assert_eq!(keys.len(), 4, "{keys:?}");
    }
    // The gateway still answers after all bad requests.
    let (status, reply): (u16, Value) = post(&connection, "/v1/chat/completions", &good).await;
    assert_eq!(status, 200, "{reply}");
}
