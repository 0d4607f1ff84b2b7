//! The live view over real sockets: what it shows, its bound, and its end.

use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::*;
use crate::gateway::tests::RunningGateway;

const LIMITED: &str = "[plans.small]\nrequests_per_minute = 1\n[tenants.tiny]\nplan = \"small\"\n\
    [gateway.reads]\nrequests_per_second = 1000\nrequest_burst = 1000\n";

/// An open stream of live views.
struct Stream {
    body: Incoming,
    text: String,
}

async fn open(gateway: &RunningGateway, key: &str) -> http::Response<Incoming> {
    let request = Request::get("/v1/live")
        .header(header::AUTHORIZATION, format!("Bearer {key}"))
        .header(header::ACCEPT, "application/json;q=0.1, Text/Event-Stream; q=1")
        .body(Full::default())
        .expect("a request");
    gateway.begin(gateway.admin, request).await
}

impl Stream {
    async fn open(gateway: &RunningGateway, key: &str) -> Self {
        let response = open(gateway, key).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[header::CONTENT_TYPE], EVENT_STREAM);
        Self { body: response.into_body(), text: String::new() }
    }

    /// Returns the next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let data = event.strip_prefix("data: ").expect("data");
                let value = serde_json::from_str(data).expect("JSON");
                self.text = rest.to_owned();
                return Some(value);
            }
            let frame = self.body.frame().await?.expect("a whole body");
            let bytes = frame.into_data().expect("data");
            self.text.push_str(std::str::from_utf8(&bytes).expect("text"));
        }
    }
}

async fn read(gateway: &RunningGateway) -> Value {
    let key = gateway.admin_key();
    let answer = gateway.send(gateway.admin, ("GET", "/v1/live"), Some(&key), "").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    serde_json::from_str(&answer.body).expect("JSON")
}

async fn chat(gateway: &RunningGateway, key: &str) -> u16 {
    let body = json!({ "model": "tollgate-demo",
        "messages": [{ "role": "user", "content": "a canary prompt" }] });
    let ask = ("POST", "/v1/chat/completions");
    gateway.send(gateway.public, ask, Some(key), &body.to_string()).await.status.as_u16()
}

/// T52: a view shows which limit refused which key, and nothing of the request.
#[tokio::test]
async fn live_view_shows_refusals_without_content() {
    let gateway = RunningGateway::plain(LIMITED).await;
    let key = gateway.new_key("tiny");
    let mut stream = Stream::open(&gateway, &gateway.admin_key()).await;
    let first = stream.next().await.expect("an event");
    assert_eq!(first["recent_refusals"], json!([]));
    // Without a worker the first request is refused, too, and the second finds its rate spent.
    assert_eq!((chat(&gateway, &key).await, chat(&gateway, &key).await), (503, 429));

    let view = read(&gateway).await;
    let [no_worker, rate] = &view["recent_refusals"].as_array().expect("rows")[..] else {
        panic!("{view}")
    };
    assert_eq!((&no_worker["kind"], &no_worker["scope"]), (&"no_worker".into(), &Value::Null));
    let limit = ("requests_per_minute", "tenant tiny", "tiny");
    for (field, expected) in [("kind", limit.0), ("scope", limit.1), ("tenant", limit.2)] {
        assert_eq!(rate[field], expected, "{rate}");
    }
    let wait = rate["retry_after_ms"].as_u64().expect("a wait");
    assert!((1..=60_000).contains(&wait), "{rate}");
    assert!(rate["key"].as_str().is_some_and(|id| key.contains(id)), "{rate}");
    assert_eq!((&view["totals"]["refused"], &view["totals"]["answered"]), (&2.into(), &0.into()));
    let [tenant] = &view["tenants"].as_array().expect("rows")[..] else { panic!("{view}") };
    assert_eq!((&tenant["tenant"], &tenant["plan"]), (&"tiny".into(), &"small".into()));
    let minute = &tenant["last_minute"];
    assert_eq!((&minute["ended"], &minute["refused"]), (&2.into(), &2.into()), "{view}");
    assert_eq!(view["refusals"].as_array().expect("rows").len(), 2);
    assert_eq!((&view["ready"], &view["draining"]), (&false.into(), &false.into()));

    // The stream shows each refusal once.
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let event = stream.next().await.expect("an event");
        seen.extend(event["recent_refusals"].as_array().expect("rows").clone());
    }
    assert_eq!(seen, view["recent_refusals"].as_array().expect("rows")[..]);
    let event = stream.next().await.expect("an event");
    assert_eq!(event["recent_refusals"], json!([]));
    for shown in [&view, &first, &event] {
        let text = shown.to_string();
        assert!(!text.contains("canary") && !text.contains(&key), "{text}");
    }
    drop(stream);
    gateway.close().await;
}

#[tokio::test]
async fn live_streams_are_bounded_and_end() {
    let gateway = RunningGateway::plain(LIMITED).await;
    let admin = gateway.admin_key();
    let body = json!({ "name": "eve", "role": "auditor" }).to_string();
    let ask = ("POST", "/v1/admins");
    let made = gateway.send(gateway.admin, ask, Some(&admin), &body).await;
    let made: Value = serde_json::from_str(&made.body).expect("JSON");
    let eve = made["secret"].as_str().expect("a key");
    let mut streams = vec![Stream::open(&gateway, eve).await];
    for _ in 1..MOST_STREAMS {
        streams.push(Stream::open(&gateway, &admin).await);
    }
    assert!(streams[0].next().await.is_some());
    let refused = open(&gateway, &admin).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let text = refused.into_body().collect().await.expect("a body").to_bytes();
    assert!(String::from_utf8_lossy(&text).contains("16 streams of the live view"), "{text:?}");
    // A single view needs no place.
    assert_eq!(read(&gateway).await["workers"], json!([]));

    let revoked = gateway.send(gateway.admin, ("DELETE", "/v1/admins/eve"), Some(&admin), "").await;
    assert_eq!(revoked.status, StatusCode::OK);
    while streams[0].next().await.is_some() {}
    // The ended stream has given its place back.
    let mut again = Stream::open(&gateway, &admin).await;
    assert!(again.next().await.is_some());
    // A stop ends all of them, so no listener waits for its bound.
    streams.push(again);
    gateway.close().await;
    for stream in &mut streams[1..] {
        while stream.next().await.is_some() {}
    }
}

#[test]
fn event_streams_are_recognised() {
    let wants = |accept: Option<&str>| {
        let mut headers = HeaderMap::new();
        if let Some(accept) = accept {
            headers.insert(header::ACCEPT, accept.parse().expect("a value"));
        }
        wants_events(&headers)
    };
    assert!(wants(Some("text/event-stream")) && wants(Some("*/*, TEXT/event-stream;q=0.5")));
    assert!(!wants(None) && !wants(Some("*/*")) && !wants(Some("application/json")));
}
