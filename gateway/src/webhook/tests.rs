//! The webhook against receivers that fail, redirect and stay silent, over real TLS.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::sync::Mutex;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::DropGuard;
use tokio_util::task::TaskTracker;
use tollgate_admission::{Limit, Scope};
use tollgate_config::Config;
use tollgate_edge::tls::{TlsIdentity, TlsSource, development_authority};

use super::*;

/// A receiver that answers each request with the next status; the last one repeats.
struct Receiver {
    folder: tempfile::TempDir,
    port: u16,
    requests: Arc<Mutex<Vec<String>>>,
    _stop: DropGuard,
}

impl Receiver {
    async fn answering(statuses: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let source = TlsSource::Development { folder: folder.path().into() };
        let identity = TlsIdentity::load(source).expect("a certificate");
        let acceptor = TlsAcceptor::from(identity.server_config().expect("TLS"));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let (stop, seen) = (CancellationToken::new(), Arc::clone(&requests));
        let mut statuses: Vec<String> = statuses.iter().rev().map(ToString::to_string).collect();
        let serving = stop.clone().run_until_cancelled_owned(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut request = Vec::new();
                // The messages of these tests are whole once their JSON is.
                while !request.ends_with(b"}}") {
                    match stream.read_buf(&mut request).await {
                        Ok(1..) => {}
                        _ => break,
                    }
                }
                let text = String::from_utf8(request).expect("text");
                seen.lock().expect("a test").push(text);
                let next = statuses.last().expect("a status").clone();
                if statuses.len() > 1 {
                    statuses.pop();
                }
                let _ = stream.write_all(next.as_bytes()).await;
                let _ = stream.flush().await;
                let _ = stream.read(&mut [0]).await;
            }
        });
        TaskTracker::new().spawn(serving);
        Self { folder, port, requests, _stop: stop.drop_guard() }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().expect("a test").clone()
    }

    /// Returns a webhook to this receiver, with `more` in its section.
    fn webhook(&self, more: &str) -> (Webhook, WebhookService, Arc<Metrics>) {
        let secret = self.folder.path().join("webhook.secret");
        fs::write(&secret, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").expect("writes");
        let config = format!(
            "[gateway.webhook]\nurl = \"https://localhost:{}/hook\"\nsecret = {:?}\nca = {:?}\n{more}",
            self.port,
            secret,
            development_authority(self.folder.path()),
        );
        let config = Config::from_toml(Path::new("test.toml"), &config).expect("a config");
        let clock = Clock::system();
        let metrics = Metrics::new(clock.clone());
        let live = LiveConfig::new(Arc::new(config));
        let (webhook, service) = webhook(live, clock, Arc::clone(&metrics));
        (webhook, service, metrics)
    }
}

const OK: &str = "HTTP/1.1 204 No Content\r\n\r\n";
const FAULT: &str = "HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n";
const LOOPBACK: &str = "allowed_networks = [\"127.0.0.0/8\", \"::1\"]\n";
const ONCE: &str = "retry_for = \"0s\"\n";

fn reached(percent: u8) -> CapReached {
    CapReached { limit: Limit::DeviceTimePerDay, scope: Scope::Gateway, class: None, percent }
}

/// Delivers the messages that wait, and returns the metrics.
async fn delivered(service: WebhookService, webhook: Webhook, metrics: &Metrics) -> String {
    // Without a sender the service ends after the last message.
    drop(webhook);
    service.run(CancellationToken::new()).await;
    metrics.text()
}

fn header<'a>(request: &'a str, name: &str) -> &'a str {
    let line = request.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
    line.expect(name)
}

#[tokio::test]
async fn webhook_sends_signed_message_again_after_fault() {
    let receiver = Receiver::answering(&[FAULT, OK]).await;
    let (webhook, service, metrics) = receiver.webhook(LOOPBACK);
    webhook.cap_reached(&reached(80));
    let text = delivered(service, webhook, &metrics).await;
    assert!(text.contains("tollgate_webhook_messages_total{outcome=\"delivered\"} 1"), "{text}");
    assert!(text.contains("tollgate_webhook_attempts_failed_total{reason=\"status\"} 1"), "{text}");
    let requests = receiver.requests();
    let [first, second] = &requests[..] else { panic!("two attempts: {requests:?}") };
    assert!(first.starts_with("POST /hook HTTP/1.1\r\n"), "{first}");
    assert_eq!(header(first, "webhook-id"), header(second, "webhook-id"));
    let secret = Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("valid");
    for request in [first, second] {
        let (_, body) = request.split_once("\r\n\r\n").expect("a body");
        assert!(body.contains("\"percent\":80"), "{body}");
        let id = header(request, "webhook-id").to_owned();
        let seconds: u64 = header(request, "webhook-timestamp").parse().expect("seconds");
        let expected = Message { id, body: body.to_owned() }
            .signature(&secret, UtcTime(seconds * 1_000_000_000));
        assert_eq!(header(request, "webhook-signature"), expected);
    }
}

#[tokio::test]
async fn webhook_gives_up_after_its_time() {
    let elsewhere = Receiver::answering(&[OK]).await;
    let redirect = format!(
        "HTTP/1.1 307 Elsewhere\r\nlocation: https://localhost:{}/\r\ncontent-length: 0\r\n\r\n",
        elsewhere.port
    );
    let quick = format!("{LOOPBACK}{ONCE}timeout = \"500ms\"\n");
    for (answer, reason) in [(redirect.as_str(), "status"), (FAULT, "status"), ("", "timeout")] {
        let receiver = Receiver::answering(&[answer]).await;
        let (webhook, service, metrics) = receiver.webhook(&quick);
        webhook.cap_reached(&reached(50));
        webhook.cap_reached(&reached(80));
        let text = delivered(service, webhook, &metrics).await;
        assert!(text.contains("tollgate_webhook_messages_total{outcome=\"failed\"} 2"), "{text}");
        let failed = format!("tollgate_webhook_attempts_failed_total{{reason=\"{reason}\"}} 2");
        assert!(text.contains(&failed), "{text}");
        assert_eq!(receiver.requests().len(), 2);
    }
    assert!(elsewhere.requests().is_empty(), "no redirect is followed");
}

#[tokio::test]
async fn webhook_refuses_private_addresses_unless_allowed() {
    let receiver = Receiver::answering(&[OK]).await;
    // The control of the other tests: they allow the network and are served.
    let (webhook, service, metrics) = receiver.webhook(ONCE);
    webhook.cap_reached(&reached(100));
    let text = delivered(service, webhook, &metrics).await;
    let failed = "tollgate_webhook_attempts_failed_total{reason=\"forbidden_address\"} 1";
    assert!(text.contains(failed), "{text}");
    assert!(receiver.requests().is_empty());
}

#[tokio::test]
async fn webhook_drops_messages_beyond_its_queue() {
    let receiver = Receiver::answering(&[OK]).await;
    let (webhook, service, metrics) = receiver.webhook(LOOPBACK);
    for _ in 0..MOST_WAITING + 3 {
        webhook.cap_reached(&reached(50));
    }
    let text = metrics.text();
    assert!(text.contains("tollgate_webhook_messages_total{outcome=\"dropped\"} 3"), "{text}");
    drop(service);
}

#[tokio::test]
async fn webhook_without_url_queues_nothing() {
    let config = Arc::new(Config::from_toml(Path::new("test.toml"), "").expect("a config"));
    let clock = Clock::system();
    let metrics = Metrics::new(clock.clone());
    let (webhook, service) = webhook(LiveConfig::new(config), clock, metrics);
    webhook.cap_reached(&reached(50));
    assert_eq!(service.queue.len(), 0);
}
