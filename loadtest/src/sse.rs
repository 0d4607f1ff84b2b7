//! A parser of server-sent events in the form of the OpenAI API: `data:` lines and
//! comments. It accepts pieces of any size and buffers one event at most.

use bytes::{Bytes, BytesMut};

/// Bytes of the longest event.
const LONGEST_EVENT: usize = 1 << 20;

/// A parser that returns the payloads of `data:` lines.
#[derive(Debug, Default)]
pub struct Events {
    buffer: BytesMut,
}

/// An error for a line that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server-sent event is longer than {LONGEST_EVENT} bytes")]
pub struct TooLong;

impl Events {
    /// Adds the next piece of the stream. Returns the payloads that are complete.
    ///
    /// # Errors
    /// [`TooLong`] if a line does not end.
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
        // A server that never ends a line must not fill the memory.
        if self.buffer.len() > LONGEST_EVENT { Err(TooLong) } else { Ok(payloads) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_parse_the_same_at_any_split() {
        let stream = b"data: {\"a\":1}\n\n: keep-alive\n\ndata:{}\r\n\r\ndata: [DONE]\n\n";
        for split in 0..stream.len() {
            let mut events = Events::default();
            let mut all = events.push(&stream[..split]).expect("short");
            all.extend(events.push(&stream[split..]).expect("short"));
            assert_eq!(all, ["{\"a\":1}", "{}", "[DONE]"], "split at {split}");
        }
    }

    #[test]
    fn events_refuse_endless_lines() {
        let mut events = Events::default();
        assert_eq!(events.push(&vec![b'x'; LONGEST_EVENT + 1]), Err(TooLong));
    }
}
