//! Connections behind proxies: the sources that the limits count.

use tokio::io::AsyncWriteExt as _;

use super::*;
use tollgate_edge::source::Proxies;

fn trusting_loopback(proxy_protocol: bool) -> Proxies {
    Proxies { trusted: vec!["127.0.0.0/8".parse().unwrap()], proxy_protocol }
}

/// A PROXY v2 header for a client with this address.
fn proxy_v2(client: [u8; 4]) -> Vec<u8> {
    let mut bytes = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c".to_vec();
    bytes.extend(client);
    bytes.extend([127, 0, 0, 1, 0xd4, 0x31, 0x20, 0xfb]);
    bytes
}

impl TestListener {
    /// A connection that begins with `first`, then TLS; and one request's
    /// answer on it.
    async fn ask_after(&self, first: &[u8], headers: &str) -> io::Result<String> {
        let mut tcp = self.tcp().await;
        tcp.write_all(first).await?;
        let mut config = (*self.client).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, tcp);
        let mut stream = timeout(PATIENCE, connecting).await.unwrap()?;
        let head = format!("GET /hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).await?;
        Ok(String::from_utf8(until_closed(stream).await).unwrap())
    }
}

fn one_a_source() -> Option<SourceOptions> {
    Some(SourceOptions { per_second: NonZeroU32::MIN, burst: NonZeroU32::MIN })
}

fn status(answer: &str) -> &str {
    answer.get(9..12).unwrap_or_default()
}

#[tokio::test]
async fn proxy_header_sets_the_source() {
    let options = ListenerOptions { proxies: trusting_loopback(true), ..patient() };
    let door = TestListener::with_sources(options, one_a_source());
    for (client, expected) in [(1, "200"), (2, "200"), (1, "429"), (3, "200")] {
        // Headers count for nothing behind the PROXY protocol.
        let forged = format!("x-forwarded-for: 203.0.113.{client}\r\n");
        let answer = door.ask_after(&proxy_v2([198, 51, 100, client]), &forged).await.unwrap();
        assert_eq!(status(&answer), expected, "{client}: {answer}");
    }
    // A health check by the proxy itself.
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00";
    assert_eq!(status(&door.ask_after(local, "").await.unwrap()), "200");
}

#[tokio::test]
async fn proxy_without_header_is_closed() {
    let mut options = ListenerOptions { proxies: trusting_loopback(true), ..quick() };
    options.first_byte = Duration::from_millis(400);
    let door = TestListener::open(options);
    // TLS at once, the text of version 1, a header that is torn, and nothing.
    assert!(door.try_tls(&["http/1.1"]).await.is_err());
    let refused = r#"tollgate_handshakes_failed_total{reason="proxy_header"}"#;
    door.counted(refused, 1).await;
    let mut stream = door.tcp().await;
    stream.write_all(b"PROXY TCP4 198.51.100.1 127.0.0.1 1 2\r\n").await.unwrap();
    assert!(until_closed(stream).await.is_empty());
    door.counted(refused, 2).await;
    let mut stream = door.tcp().await;
    stream.write_all(&proxy_v2([198, 51, 100, 1])[..20]).await.unwrap();
    until_closed(stream).await;
    until_closed(door.tcp().await).await;
    door.counted(r#"tollgate_handshakes_failed_total{reason="silent"}"#, 2).await;
}

#[tokio::test]
async fn proxy_header_of_untrusted_peer_is_refused() {
    for proxies in [Proxies::default(), trusting_loopback(false)] {
        let door = TestListener::open(ListenerOptions { proxies, ..patient() });
        let mut stream = door.tcp().await;
        stream.write_all(&proxy_v2([198, 51, 100, 1])).await.unwrap();
        assert!(until_closed(stream).await.is_empty(), "not a word");
        door.counted(r#"tollgate_handshakes_failed_total{reason="proxy_header"}"#, 1).await;
    }
}

#[tokio::test]
async fn proxied_clients_are_limited_separately() {
    let connection_limits = ConnectionLimitOptions { per_source: 2, ..generous() };
    let proxies = trusting_loopback(true);
    let door = TestListener::open(ListenerOptions { connection_limits, proxies, ..patient() });
    let mut open = Vec::new();
    // The proxy's own connections are no source's ...
    for client in 1..=5 {
        let mut stream = door.tcp().await;
        stream.write_all(&proxy_v2([198, 51, 100, client])).await.unwrap();
        open.push(stream);
    }
    let of_first = async || {
        let mut stream = door.tcp().await;
        stream.write_all(&proxy_v2([198, 51, 100, 1])).await.unwrap();
        stream
    };
    // ... and the third of one client is one too many.
    open.push(of_first().await);
    let refused = r#"tollgate_connections_refused_total{reason="per_source"}"#;
    until_closed(of_first().await).await;
    door.counted(refused, 1).await;
}

/// T10
#[tokio::test]
async fn forwarded_for_needs_a_trusted_peer() {
    for (proxies, expected) in [(Proxies::default(), "429"), (trusting_loopback(false), "200")] {
        let door =
            TestListener::with_sources(ListenerOptions { proxies, ..patient() }, one_a_source());
        for (client, expected) in [(1, "200"), (2, expected)] {
            let header = format!("x-forwarded-for: 198.51.100.{client}\r\n");
            let answer = door.ask_after(b"", &header).await.unwrap();
            assert_eq!(status(&answer), expected, "{answer}");
        }
    }
}

/// T08: handshakes that stall take no place from those that do not.
#[tokio::test]
async fn stalled_handshakes_do_not_block_others() {
    let door = TestListener::open(ListenerOptions { handshakes: 8, ..patient() });
    let mut stalled = Vec::new();
    for _ in 0..50 {
        let mut stream = door.tcp().await;
        stream.write_all(&[0x16, 3, 1, 2, 0]).await.unwrap();
        stalled.push(stream);
        if stalled.len() % 10 == 0 {
            door.tls(&["http/1.1"]).await;
        }
    }
    door.counted(r#"tollgate_handshakes_failed_total{reason="displaced"}"#, 40).await;
}
