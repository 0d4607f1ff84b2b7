//! Someone speaks plain HTTP to the TLS port: told so, once, in words.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::reply::ApiError;

/// The first byte of a TLS record that carries a handshake.
pub(super) const TLS_HANDSHAKE: u8 = 0x16;

/// Answers 400 and closes, whatever else was sent.
pub(super) async fn refuse(mut stream: TcpStream) {
    let body = ApiError::malformed(
        "This port speaks HTTPS only. Use https:// instead of http:// in the URL.",
    )
    .envelope()
    .to_json();
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    );
    let telling = async {
        // What is unread when a socket closes resets it, and the answer is lost.
        let mut head = [0; 4096];
        let _ = stream.read(&mut head).await?;
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    };
    // A peer that does not listen is not told.
    let _ = timeout(PATIENCE, telling).await;
}

const PATIENCE: Duration = Duration::from_secs(1);
