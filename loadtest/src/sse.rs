//! Server-sent events as the OpenAI API uses them: `data:` lines and comments.
//! Reads whatever pieces the network delivers; bounded by one event's size.

use bytes::{Bytes, BytesMut};

/// The longest event that is believed, bytes.
const LONGEST_EVENT: usize = 1 << 20;

/// Takes bytes and gives the payloads of `data:` lines.
#[derive(Debug, Default)]
pub struct Events {
    buffer: BytesMut,
}

/// A line that is longer than any honest event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server-sent event is longer than {LONGEST_EVENT} bytes")]
pub struct TooLong;

impl Events {
    /// Takes the next piece of the stream; returns the payloads that are whole.
    ///
    /// # Errors
    /// [`TooLong`] when a line does not end.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<Bytes>, TooLong> {
        self.buffer.extend_from_slice(piece);
        let mut payloads = Vec::new();
        while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
            let line = self.buffer.split_to(end + 1).freeze();
            let line = line.trim_ascii_end();
            if let Some(payload) = line.strip_prefix(b"data:") {
                payloads.push(Bytes::copy_from_slice(payload.trim_ascii_start()));
            }
        }
        if self.buffer.len() > LONGEST_EVENT { Err(TooLong) } else { Ok(payloads) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_split_gives_the_same_events() {
        let stream = b"data: {\"a\":1}\n\n: keep-alive\n\ndata:{}\r\n\r\ndata: [DONE]\n\n";
        for split in 0..stream.len() {
            let mut events = Events::default();
            let mut all = events.push(&stream[..split]).expect("short");
            all.extend(events.push(&stream[split..]).expect("short"));
            assert_eq!(all, ["{\"a\":1}", "{}", "[DONE]"], "split at {split}");
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut events = Events::default();
        assert_eq!(events.push(&vec![b'x'; LONGEST_EVENT + 1]), Err(TooLong));
    }
}
