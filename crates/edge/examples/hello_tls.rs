//! A minimal HTTP server as a baseline for benchmarks: hyper behind the
//! gateway's own TLS settings, with one thread and one answer. The answer at
//! `/refusal` is as long as a refusal by the gateway.
//!
//! `hello_tls CERTIFICATE KEY` takes two free ports of 127.0.0.1, one with TLS
//! and one without, prints `ready tls ADDRESS plain ADDRESS`, and serves until
//! its standard input ends.

use std::convert::Infallible;
use std::error::Error;
use std::io::Read;
use std::path::PathBuf;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;
use tollgate_edge::tls::{TlsIdentity, TlsSource};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(certificate), Some(key)) = (arguments.next(), arguments.next()) else {
        return Err("usage: hello_tls CERTIFICATE KEY".into());
    };
    let identity = TlsIdentity::load(TlsSource::Files { certificate, key })?;
    let acceptor = TlsAcceptor::from(identity.server_config()?);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve(acceptor))
}

async fn serve(acceptor: TlsAcceptor) -> Result<(), Box<dyn Error>> {
    let tls = TcpListener::bind("127.0.0.1:0").await?;
    let plain = TcpListener::bind("127.0.0.1:0").await?;
    println!("ready tls {} plain {}", tls.local_addr()?, plain.local_addr()?);
    let connections = TaskTracker::new();
    let mut parent = tokio::task::spawn_blocking(|| {
        // The end of the input or an error both mean that the parent has ended.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    });
    loop {
        tokio::select! {
            _ = &mut parent => return Ok(()),
            accepted = tls.accept() => {
                let stream = accepted?.0;
                connections.spawn(with_tls(stream, acceptor.clone()));
            }
            accepted = plain.accept() => {
                let stream = accepted?.0;
                connections.spawn(async move {
                    // A client that goes away is no concern of ours.
                    let _ = stream.set_nodelay(true);
                    let served = http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service_fn(hello));
                    let _ = served.await;
                });
            }
        }
    }
}

async fn with_tls(stream: TcpStream, acceptor: TlsAcceptor) {
    // A failed handshake or connection shows in the client's figures.
    let _ = stream.set_nodelay(true);
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let io = TokioIo::new(stream);
    let _ = if is_http2 {
        http2::Builder::new(TokioExecutor::new()).serve_connection(io, service_fn(hello)).await
    } else {
        http1::Builder::new().serve_connection(io, service_fn(hello)).await
    };
}

async fn hello(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() == REFUSAL {
        return Ok(refusal());
    }
    let mut response = Response::new(Full::new(Bytes::from_static(b"hello\n")));
    let kind = HeaderValue::from_static("text/plain");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

/// Builds a response as long as the gateway's refusal of a tenant over its rate,
/// with as many headers.
fn refusal() -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(SAID)));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    for (name, value) in TOLD {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    for (name, value) in TOLD_ONCE {
        let mut value = HeaderValue::from_static(value);
        value.set_sensitive(true);
        response.headers_mut().insert(name, value);
    }
    response
}

const REFUSAL: &str = "/refusal";

const SAID: &[u8] = b"{\"error\":{\"message\":\"Limit reached: 1 requests a minute for tenant \
    limited. Try again in 59.123s.\",\"type\":\"rate_limit_error\",\"param\":null,\
    \"code\":\"rate_limit_exceeded\"}}";

const TOLD: [(HeaderName, &str); 4] = [
    (header::CONTENT_TYPE, "application/json"),
    (header::RETRY_AFTER, "60"),
    (HeaderName::from_static("x-ratelimit-limit-requests"), "1"),
    (HeaderName::from_static("x-ratelimit-remaining-requests"), "0"),
];

/// Headers whose values hardly repeat, so that HTTP/2 need not index them.
const TOLD_ONCE: [(HeaderName, &str); 3] = [
    (HeaderName::from_static("retry-after-ms"), "59123"),
    (HeaderName::from_static("x-ratelimit-reset-requests"), "59.123s"),
    (HeaderName::from_static("x-request-id"), "req-0123456789abcdef0123456789abcdef"),
];
