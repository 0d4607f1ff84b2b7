//! Fetches from issuers that answer with something other than a key set (threat
//! T22), over real TLS.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::*;
use tollgate_edge::tls::{TlsIdentity, TlsSource, development_authority};

/// The web server of an issuer, with the same answer for every request.
pub(in crate::auth) struct Issuer {
    pub(in crate::auth) url: String,
    pub(in crate::auth) ca: PathBuf,
    requests: Arc<AtomicUsize>,
    _folder: tempfile::TempDir,
    _stop: DropGuard,
}

impl Issuer {
    /// Starts a server that sends `answer` and then keeps the connection open.
    pub(in crate::auth) async fn answering(answer: impl Into<Vec<u8>>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let source = TlsSource::Development { folder: folder.path().into() };
        let identity = TlsIdentity::load(source).expect("a certificate");
        let acceptor = TlsAcceptor::from(identity.server_config().expect("TLS"));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let requests = Arc::new(AtomicUsize::new(0));
        let (stop, counted, answer) =
            (CancellationToken::new(), Arc::clone(&requests), answer.into());
        let serving = stop.clone().run_until_cancelled_owned(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                // A client that does not trust the certificate closes the connection.
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    match stream.read(&mut byte).await {
                        Ok(1) => head.push(byte[0]),
                        _ => break,
                    }
                }
                counted.fetch_add(1, Ordering::Relaxed);
                let _ = stream.write_all(&answer).await;
                let _ = stream.flush().await;
                // The server waits until the client closes the connection.
                let _ = stream.read(&mut [0]).await;
            }
        });
        TaskTracker::new().spawn(serving);
        Self {
            url: format!("https://localhost:{port}/jwks.json"),
            ca: development_authority(folder.path()),
            requests,
            _folder: folder,
            _stop: stop.drop_guard(),
        }
    }

    fn fetcher(&self, deadline: Duration) -> Fetcher {
        Fetcher::new(&self.url, Some(&self.ca), limits(deadline)).expect("a URL")
    }
}

const LONG: Duration = Duration::from_secs(60);

fn limits(deadline: Duration) -> FetchLimits {
    FetchLimits { size: 1_000, deadline }
}

fn answer(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn fetch_returns_body() {
    let issuer = Issuer::answering(answer("{\"keys\": []}")).await;
    for _ in 0..2 {
        assert_eq!(issuer.fetcher(LONG).get().await.expect("there"), b"{\"keys\": []}");
    }
    let whole = answer(&"x".repeat(1_000));
    let whole = Issuer::answering(whole).await.fetcher(LONG).get().await.expect("there");
    assert_eq!(whole.len(), 1_000);
}

#[tokio::test]
async fn fetch_refuses_other_answers() {
    let elsewhere = Issuer::answering(answer("stolen")).await;
    let redirect =
        format!("HTTP/1.1 302 Found\r\nlocation: {}\r\ncontent-length: 0\r\n\r\n", elsewhere.url);
    let endless = format!(
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{}",
        "3e8\r\n".to_owned() + &"x".repeat(1_000) + "\r\n1\r\nx\r\n"
    );
    let short = Duration::from_millis(300);
    for (response, deadline, expected) in [
        (redirect, LONG, "answered 302"),
        ("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n".into(), LONG, "answered 500"),
        ("HTTP/1.1 204 None\r\n\r\n".into(), LONG, "answered 204"),
        (answer(&"x".repeat(1_001)), LONG, "larger than 1000 bytes"),
        (endless, LONG, "larger than 1000 bytes"),
        ("SSH-2.0-OpenSSH\r\n".into(), LONG, "HTTP failed"),
        (String::new(), short, "no whole answer within"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n1234".into(),
            short,
            "no whole answer within",
        ),
    ] {
        let issuer = Issuer::answering(response.clone()).await;
        let error = issuer.fetcher(deadline).get().await.expect_err(expected).to_string();
        assert!(error.contains(expected), "{response:?}: {error}");
    }
    assert_eq!(elsewhere.requests.load(Ordering::Relaxed), 0, "no redirect is followed");
}

#[tokio::test]
async fn fetch_trusts_configured_authority_only() {
    let issuer = Issuer::answering(answer("{}")).await;
    let other = Issuer::answering(answer("{}")).await;
    let fetcher = Fetcher::new(&issuer.url, Some(&other.ca), limits(LONG)).expect("a URL");
    let error = fetcher.get().await.expect_err("another's authority");
    assert!(matches!(error, FetchError::Connect(_)), "{error:?}");
    assert_eq!(issuer.requests.load(Ordering::Relaxed), 0);

    let empty = issuer.ca.with_file_name("empty.pem");
    std::fs::write(&empty, "").expect("writes");
    let error = Fetcher::new(&issuer.url, Some(&empty), limits(LONG)).expect_err("no authority");
    assert!(error.to_string().contains("no certificate in it"), "{error}");
    for url in ["http://localhost/", "https://", "jwks.json", "https://a@b/", "file:///etc/passwd"]
    {
        let error = Fetcher::new(url, Some(&issuer.ca), limits(LONG)).expect_err(url);
        assert!(matches!(error, FetchError::Url), "{url}: {error:?}");
    }
}
