//! A check that `--model DIR` serves any folder of a supported family: here a model
//! with random weights, whose figures must still be right.

use serde_json::json;
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

    let (status, missing) =
        post(&connection, "/v1/completions", &json!({ "model": "tollgate-demo", "prompt": "a" }))
            .await;
    assert_eq!((status, &missing["error"]["code"]), (404, &json!("model_not_found")));
}
