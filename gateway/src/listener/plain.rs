//! Someone speaks plain HTTP to the TLS port: told so, once, in words.

use std::time::Duration;

use hyper::body::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The first byte of a TLS record that carries a handshake.
pub(super) const TLS_HANDSHAKE: u8 = 0x16;

/// Answers 400 and closes, whatever else was sent.
pub(super) async fn refuse(mut stream: TcpStream, body: Bytes) {
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    let answer = [head.as_bytes(), &body].concat();
    let telling = async {
        // What is unread when a socket closes resets it, and the answer is lost.
        let mut asked = [0; 4096];
        let _ = stream.read(&mut asked).await?;
        stream.write_all(&answer).await?;
        stream.shutdown().await
    };
    // A peer that does not listen is not told.
    let _ = timeout(PATIENCE, telling).await;
}

const PATIENCE: Duration = Duration::from_secs(1);
