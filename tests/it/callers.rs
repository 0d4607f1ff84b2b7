//! Authentication over the real path: guessed keys fail without harm to other callers,
//! a leaked key can be revoked with its running requests, and keys work only from their
//! networks.

use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tollgate_loadtest::client::Protocol;

use crate::support::{OPEN, Tollgate, command, failing, get, post};

/// An endless series of well-formed keys with wrong secrets.
struct Guesses {
    id: String,
    state: u64,
}

impl Guesses {
    const ALPHABET: &'static [u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

    fn next(&mut self) -> String {
        let mut guess = format!("{}.", self.id);
        for _ in 0..32 {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            guess.push(Self::letter((self.state >> 40) as u32));
        }
        let checksum = crc32(guess.as_bytes());
        (0..7).for_each(|place: u32| guess.push(Self::letter(checksum.unbounded_shr(5 * place))));
        guess
    }

    fn letter(bits: u32) -> char {
        char::from(Self::ALPHABET[bits as usize % 32])
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 }
        })
    })
}

/// Checks T20: 2,000 guesses over TLS find no key; failed attempts throttle their
/// source, and a good key from the same source works throughout.
#[tokio::test]
async fn guessing_source_is_throttled_but_good_keys_pass() {
    let gateway = Tollgate::with_config(OPEN);
    let good = gateway.key("acme", &[]);
    let connection = gateway.connect(&good).await;
    let mut guesses = Guesses { id: good[..13].to_owned(), state: 7 };
    let (mut unauthorized, mut throttled) = (0, 0);
    for number in 0..2_000 {
        let guess = guesses.next();
        assert_ne!(guess, good);
        let guessing = connection.with_key(&guess).expect("a key");
        let (status, body) = get(&guessing, "/v1/models").await;
        match status {
            401 => unauthorized += 1,
            429 => {
                throttled += 1;
                let message = body["error"]["message"].as_str().expect("a message");
                assert!(message.contains("wrong API keys"), "{message}");
            }
            _ => panic!("guess {number} got {status}: {body}"),
        }
        if number % 100 == 0 {
            assert_eq!(get(&connection, "/v1/models").await.0, 200, "after {number} guesses");
        }
    }
    assert!(unauthorized + throttled == 2_000 && throttled > 1_000, "{unauthorized} {throttled}");

    let admin = ["--url", &gateway.admin];
    let listed = gateway.command(&[&["penalties", "list"], &admin[..]].concat());
    let row = listed.lines().find(|line| line.contains("127.0.0.1")).expect(&listed);
    assert!(row.starts_with("source") && row.contains("failed_authentication"), "{listed}");
    let lift = [&["penalties", "lift", "--source", "127.0.0.1"], &admin[..]].concat();
    gateway.command(&lift);
    let guessing = connection.with_key(&guesses.next()).expect("a key");
    assert_eq!(get(&guessing, "/v1/models").await.0, 401, "it was lifted");
    let data = gateway.data().display().to_string();
    let said = failing(&[&lift[..], &["--data", &data]].concat());
    assert!(said.contains("404") && said.contains("No such penalty"), "{said}");
}

/// Checks T23: the running requests of a leaked key end within 5 s on an admin's
/// request, and the tenant pays for the work done.
#[tokio::test]
async fn revocation_ends_running_streams_on_request() {
    let gateway = Tollgate::with_config(OPEN);
    let key = gateway.key("acme", &[]);
    let connection = gateway.target(&key).connect(Protocol::Http1).await.expect("connects");
    // The text is larger than all buffers, so the unread stream keeps running.
    let body = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 800, "n": 8, "stream": true,
        // The bias repeats one token, so the answer does not end by itself.
        "logprobs": true, "top_logprobs": 20, "logit_bias": { "300": 100 },
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    let response =
        connection.post("/v1/chat/completions", body.to_string().into()).await.expect("answers");
    assert_eq!(response.status().as_u16(), 200);
    let request = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    let mut stream = response.into_body();
    stream.frame().await.expect("a frame").expect("data");

    let listed: Value =
        serde_json::from_str(&gateway.command(&["keys", "list", "--json"])).expect("JSON");
    let id = listed["keys"][0]["key"].as_str().expect("an id").to_owned();
    let said = gateway.command(&["keys", "revoke", &id, "--end-streams"]);
    assert!(said.contains("its running requests end"), "{said}");
    let revoked = Instant::now();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let rest = stream.collect().await.expect("it ends in order").to_bytes();
    let rest = String::from_utf8(rest.to_vec()).expect("text");
    assert!(revoked.elapsed() < Duration::from_secs(5), "{:?}", revoked.elapsed());
    let last = rest.lines().rfind(|line| line.starts_with("data: {")).expect("an event");
    assert!(last.contains("invalid_api_key") && last.contains("was revoked"), "{last}");

    let other = gateway.connect(&gateway.key("acme", &[])).await;
    let (status, usage) = get(&other, &format!("/v1/usage/{request}")).await;
    assert_eq!(status, 200, "{usage}");
    let done = usage["completion_tokens"].as_u64().expect("a figure");
    assert!(done > 0 && done <= 8 * 800, "{usage}");
    assert!(usage["reference_ns"].as_u64().expect("a figure") > 0, "{usage}");
}

/// Checks that a key works only from its networks and that lists show the networks.
#[tokio::test]
async fn keys_stay_within_their_networks() {
    let gateway = Tollgate::with_config(OPEN);
    let here = gateway.key("acme", &["--source", "127.0.0.0/8", "--source", "::1"]);
    let connection = gateway.connect(&here).await;
    assert_eq!(get(&connection, "/v1/models").await.0, 200);
    let config = gateway.config().display().to_string();
    let data = gateway.data().display().to_string();
    let place = ["--config", &config, "--data", &data];
    let create = ["keys", "create", "--tenant", "acme", "--quiet"];
    let words = [&create[..], &place, &["--source", "10.0.0.0/8", "--endpoint", "chat"]].concat();
    let elsewhere = connection.with_key(command(&words).trim()).expect("a key");
    let started = Instant::now();
    let (status, body) = loop {
        let (status, body) = post(&elsewhere, "/v1/chat/completions", &json!({})).await;
        let code = body["error"]["code"].as_str().expect("a code").to_owned();
        if code != "invalid_api_key" || started.elapsed() > Duration::from_secs(5) {
            break (status, code);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!((status, body.as_str()), (401, "ip_not_authorized"));
    let listed = gateway.command(&["keys", "list"]);
    assert!(listed.contains("chat, from 10.0.0.0/8"), "{listed}");
    assert!(listed.contains("from 127.0.0.0/8, from ::1"), "{listed}");

    for (more, why) in [
        (&["--source", "10.0.0.0/40"][..], "is not a network"),
        (&["--expires", "0s"], "key would expire at once"),
        (&["--expires", "100000d"], "key would expire after the year 2262"),
        (&["--label", "a\u{1b}[2Jb"], "none of them a control character"),
    ] {
        let said = failing(&[&create[..], &place, more].concat());
        assert!(said.contains(why), "{said}");
    }
    let mistyped = gateway.data().join("mistyped");
    let shown = mistyped.display().to_string();
    let said = failing(&["keys", "list", "--config", &config, "--data", &shown]);
    assert!(said.contains("there is no data folder") && !mistyped.exists(), "{said}");
}
