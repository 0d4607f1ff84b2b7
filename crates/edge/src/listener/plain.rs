//! The answer to a client that speaks plain HTTP to the TLS port.

use std::time::Duration;

use hyper::body::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The first byte of a TLS record that carries a handshake.
pub(super) const TLS_HANDSHAKE: u8 = 0x16;

/// Answers 400 with `body`, then closes the connection.
pub(super) async fn refuse(mut stream: TcpStream, body: Bytes) {
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    let answer = [head.as_bytes(), &body].concat();
    let answering = async {
        // A close with unread bytes resets the connection, and the client would
        // lose the answer.
        let mut asked = [0; 4096];
        let _ = stream.read(&mut asked).await?;
        stream.write_all(&answer).await?;
        stream.shutdown().await
    };
    // A peer that does not read gets no answer; there is nothing to retry.
    let _ = timeout(ANSWER_TIMEOUT, answering).await;
}

/// Time for the whole exchange.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
