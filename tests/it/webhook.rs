//! The webhook over the real process: a tenant spends part of a cap, and a receiver that
//! shares no code with the gateway gets the signed message.

use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::support::{self, Tollgate, get, post};

/// The bytes of the secret that sender and receiver share.
const SECRET: [u8; 32] = *b"a secret of thirty-two bytes....";

/// One message as it arrived.
struct Delivery {
    head: String,
    body: String,
}

impl Delivery {
    fn header(&self, name: &str) -> &str {
        let fields = self.head.lines().filter_map(|line| line.split_once(": "));
        let mut values = fields.filter(|(field, _)| field.eq_ignore_ascii_case(name));
        values.next().unwrap_or_else(|| panic!("{name} in {}", self.head)).1
    }
}

/// Receives messages on a port of its own and answers 204. Writes its certificate to
/// `folder`.
fn receive(folder: &Path) -> (u16, Receiver<Delivery>) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    std::fs::write(folder.join("receiver.pem"), cert.pem()).expect("writes");
    let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key.into())
        .expect("a TLS config");
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (sender, deliveries) = sync_channel(16);
    // The thread ends with the process, or once nobody takes its deliveries.
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let session = ServerConnection::new(Arc::clone(&config)).expect("a session");
            let mut stream = StreamOwned::new(session, stream);
            if let Some(delivery) = read(&mut stream)
                && sender.send(delivery).is_err()
            {
                return;
            }
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n");
            let _ = stream.flush();
        }
    });
    (port, deliveries)
}

/// Reads one request whose head has a `content-length`.
fn read(stream: &mut impl std::io::Read) -> Option<Delivery> {
    let (mut bytes, mut piece) = (Vec::new(), [0; 4_096]);
    loop {
        let read = stream.read(&mut piece).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&piece[..read]);
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let delivery = Delivery { head: head.to_owned(), body: body.to_owned() };
            if delivery.header("content-length").parse() == Ok(body.len()) {
                return Some(delivery);
            }
        }
    }
}

/// Computes HMAC-SHA256 as RFC 2104 writes it, for a key of at most 64 bytes.
fn hmac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let padded = |pad: u8| -> Vec<u8> {
        (0..64).map(|at| key.get(at).copied().unwrap_or(0) ^ pad).collect()
    };
    let inner = Sha256::digest([&padded(0x36), text].concat());
    Sha256::digest([&padded(0x5c)[..], &inner[..]].concat()).into()
}

#[tokio::test]
async fn webhook_reports_half_of_a_spent_cap() {
    support::stay_within_a_day().await;
    let folder = tempfile::tempdir().expect("a folder");
    let secret = folder.path().join("webhook.secret");
    std::fs::write(&secret, format!("whsec_{}\n", STANDARD.encode(SECRET))).expect("writes");
    let (port, deliveries) = receive(folder.path());
    let gateway = Tollgate::with_config(&format!(
        r#"
[gateway.webhook]
url = "https://localhost:{port}/events"
secret = {secret:?}
ca = {:?}
allowed_networks = ["127.0.0.0/8", "::1"]

[plans.capped]
device_time_per_day = {{ default = "30ms" }}

[tenants.acme]
plan = "capped"
"#,
        folder.path().join("receiver.pem"),
    ));
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let body = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 40,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    let mut spent = 0.0;
    // Each answer takes a few hundredths of the cap.
    for _ in 0..200 {
        let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "the cap is not spent: {reply}");
        let (_, limits) = get(&connection, "/v1/limits").await;
        let data = limits["data"].as_array().expect("a list");
        let cap = data.iter().find(|it| it["limit"] == "device_time_per_day").expect("a cap");
        let figure = |name: &str| cap[name].as_f64().expect("a number");
        spent = figure("used") / figure("value");
        if spent >= 0.5 {
            break;
        }
        assert!(deliveries.try_recv().is_err(), "a message at {spent} of the cap");
    }
    assert!(spent >= 0.5, "{spent} of the cap");
    let delivery = deliveries.recv_timeout(Duration::from_secs(60)).expect("a message");
    assert!(delivery.head.starts_with("POST /events HTTP/1.1\r\n"), "{}", delivery.head);
    let event: Value = serde_json::from_str(&delivery.body).expect("JSON");
    assert_eq!(event["type"], "cap.threshold_reached");
    let expected = json!({
        "scope": { "kind": "tenant", "name": "acme" }, "limit": "device_time_per_day",
        "device_class": "cpu", "percent": 50,
    });
    assert_eq!(event["data"], expected);
    let (id, time) = (delivery.header("webhook-id"), delivery.header("webhook-timestamp"));
    assert_eq!(event["id"], id);
    let tag =
        |secret| STANDARD.encode(hmac(secret, format!("{id}.{time}.{}", delivery.body).as_bytes()));
    let signature = delivery.header("webhook-signature");
    assert_eq!(signature, format!("v1,{}", tag(&SECRET)));
    assert_ne!(signature, format!("v1,{}", tag(b"another secret of thirty-two.....")));
}
