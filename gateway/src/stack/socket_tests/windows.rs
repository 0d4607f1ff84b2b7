//! HTTP/2 clients that grant small windows: a response is read at a lowest rate, or it
//! ends.

use tokio::io::{AsyncWriteExt as _, ReadHalf, WriteHalf, split};
use tokio::time::sleep;

use super::conformance::{
    AUTHORITY, DATA, GOAWAY, HEADERS, METHOD, RST_STREAM, SCHEME, SETTINGS, WHOLE, WINDOW_UPDATE,
    block, frame,
};
use super::*;

/// A client that reads the response to one request.
struct Reader {
    reads: ReadHalf<TlsStream<TcpStream>>,
    writes: WriteHalf<TlsStream<TcpStream>>,
}

impl TestListener {
    /// Asks for `/small` on stream 1 with this initial window for responses.
    async fn read_small(&self, window: u32) -> Reader {
        let (reads, mut writes) = split(self.tls(&["h2"]).await);
        // SETTINGS_INITIAL_WINDOW_SIZE is 4.
        let setting = [&4_u16.to_be_bytes()[..], &window.to_be_bytes()].concat();
        let head = block(&[METHOD, SCHEME, (":path", "/small"), AUTHORITY]);
        let sent = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(SETTINGS, 0, 0, &setting),
            // The connection has room for all that a test reads.
            grant(0, 1 << 24),
            frame(HEADERS, WHOLE, 1, &head),
        ];
        writes.write_all(&sent.concat()).await.unwrap();
        writes.flush().await.unwrap();
        Reader { reads, writes }
    }
}

fn grant(stream: u32, bytes: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

impl Reader {
    /// Grants `bytes` again and again, too seldom for a flood of frames.
    async fn trickle(writes: &mut WriteHalf<TlsStream<TcpStream>>, bytes: u32) {
        while writes.write_all(&grant(1, bytes)).await.is_ok() && writes.flush().await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
        // The connection has ended; the reader sees how.
        std::future::pending::<()>().await;
    }

    /// Reads until the response is reset, or until it has brought `most` bytes. Returns
    /// the bytes, and true if the response was reset.
    async fn read(reads: &mut ReadHalf<TlsStream<TcpStream>>, most: usize) -> (usize, bool) {
        let mut got = 0;
        while got < most {
            let mut header = [0; 9];
            reads.read_exact(&mut header).await.expect("the connection lives");
            let length = u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize;
            reads.read_exact(&mut vec![0; length]).await.expect("the connection lives");
            match header[3] {
                DATA => got += length,
                RST_STREAM => return (got, true),
                kind => assert_ne!(kind, GOAWAY, "only the response ends"),
            }
        }
        (got, false)
    }

    /// Reads like [`Self::read`] while a window of `bytes` is granted again and again.
    async fn read_while_granting(mut self, bytes: u32, most: usize) -> (usize, bool) {
        let both = async {
            tokio::select! {
                read = Self::read(&mut self.reads, most) => read,
                () = Self::trickle(&mut self.writes, bytes) => unreachable!("it never ends"),
            }
        };
        timeout(PATIENCE, both).await.expect("the response is read or reset")
    }
}

/// T63: each piece of the response is taken in time, and all of them at a tenth of the
/// lowest rate.
#[tokio::test]
async fn response_taken_by_the_byte_is_reset() {
    let options = ListenerOptions { write_progress: Duration::from_secs(2), ..patient() };
    let door = TestListener::open(options);
    // 200 bytes a second. The lowest rate is 4 KiB in two seconds.
    let (got, was_reset) = door.read_small(1).await.read_while_granting(4, usize::MAX).await;
    assert!(was_reset && got < 4_096, "{got} bytes, then reset: {was_reset}");
    door.counted("tollgate_responses_unread_total", 1).await;
    // The control: the same pieces with the window to take them.
    let (got, was_reset) =
        door.read_small(1 << 20).await.read_while_granting(1 << 16, 1 << 18).await;
    assert!(!was_reset, "reset after {got} bytes");
}
