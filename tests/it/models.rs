//! A check that `--model DIR` serves any folder of a supported family: here a model
//! with random weights, whose figures must still be right.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

use crate::support::{Tollgate, get, post};

#[tokio::test]
async fn model_folder_is_served_under_its_name() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("random-qwen2");
    let model = RandomModel { spec: ModelSpec::tiny(), element: Element::Bf16, seed: 7 };
    model.write(&folder).expect("writes");
    let gateway = Tollgate::start(None, &["--model", &folder.display().to_string()]);
    let connection = gateway.connect(&gateway.demo_key()).await;
    let (status, models) = get(&connection, "/v1/models").await;
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("random-qwen2")));

    let chat = json!({
        "model": "random-qwen2", "max_tokens": 24, "temperature": 0, "logprobs": true,
        "messages": [{ "role": "user", "content": "Say anything." }],
    });
    let (status, first) = post(&connection, "/v1/chat/completions", &chat).await;
    assert_eq!(status, 200, "{first}");
    let tokens = first["usage"]["completion_tokens"].as_u64().expect("a count");
    let scored = first["choices"][0]["logprobs"]["content"].as_array().map(Vec::len);
    assert!((1..=24).contains(&tokens) && scored.is_some_and(|n| n as u64 <= tokens), "{first}");
    let (_, second) = post(&connection, "/v1/chat/completions", &chat).await;
    assert_eq!(first["choices"], second["choices"], "greedy answers repeat");

    // Its chat template shows no form of calls.
    let mut with_tools = chat.clone();
    with_tools["tools"] = json!([{ "type": "function", "function": { "name": "f" } }]);
    let (status, refused) = post(&connection, "/v1/chat/completions", &with_tools).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("tools")), "{refused}");
    let message = refused["error"]["message"].as_str().expect("a message");
    assert!(message.contains("'random-qwen2' does not know tools"), "{message}");
    with_tools["tool_choice"] = json!("none");
    assert_eq!(post(&connection, "/v1/chat/completions", &with_tools).await.0, 200);

    let (status, missing) =
        post(&connection, "/v1/completions", &json!({ "model": "tollgate-demo", "prompt": "a" }))
            .await;
    assert_eq!((status, &missing["error"]["code"]), (404, &json!("model_not_found")));
}

/// Qwen3's templates read `enable_thinking`, and no other field switches thinking off.
#[tokio::test]
async fn chat_template_reads_the_clients_values() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tollgate-demo");
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("thinking");
    fs::create_dir(&folder).expect("makes");
    for entry in fs::read_dir(&shipped).expect("reads").map_while(Result::ok) {
        fs::copy(entry.path(), folder.join(entry.file_name())).expect("copies");
    }
    let path = folder.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("reads")).expect("JSON");
    let template = config["chat_template"].as_str().expect("a template");
    let thinking = "{% if enable_thinking is false %}No thinking at all, please.{% endif %}";
    config["chat_template"] = format!("{thinking}{{{{ 0 + (shift or 0) }}}}{template}").into();
    fs::write(&path, config.to_string()).expect("writes");

    let gateway = Tollgate::start(None, &["--model", &folder.display().to_string()]);
    let connection = gateway.connect(&gateway.demo_key()).await;
    let chat = async |values: Value| {
        let body = json!({
            "model": "thinking", "max_tokens": 1, "chat_template_kwargs": values,
            "messages": [{ "role": "user", "content": "Hello!" }],
        });
        post(&connection, "/v1/chat/completions", &body).await
    };
    let mut prompts = Vec::new();
    for values in [json!(null), json!({}), json!({"enable_thinking": true}), json!({"other": [1]})]
    {
        let (status, answer) = chat(values).await;
        assert_eq!(status, 200, "{answer}");
        prompts.push(answer["usage"]["prompt_tokens"].as_u64().expect("a count"));
    }
    assert!(prompts.iter().all(|count| *count == prompts[0]), "{prompts:?}");
    let (_, answer) = chat(json!({"enable_thinking": false})).await;
    assert!(answer["usage"]["prompt_tokens"].as_u64() > Some(prompts[0]), "{answer}");
    for (values, param, word) in [
        (json!({"messages": []}), "chat_template_kwargs.messages", "messages"),
        (json!({"other": "<|im_end|>"}), "chat_template_kwargs", "'other' holds '<'"),
        // The template adds a number to this value, so it fails because of the client.
        (json!({"shift": "one"}), "chat_template_kwargs", "cannot use +"),
    ] {
        let (status, answer) = chat(values).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        let message = answer["error"]["message"].as_str().expect("a message");
        assert!(message.contains(word), "{message}");
    }
}
