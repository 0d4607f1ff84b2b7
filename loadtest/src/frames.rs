//! HTTP/2 frames as bytes (RFC 9113), written and read by hand: attackers send
//! frames that a client library would never send. Headers use no HPACK state: they
//! are literals without indexing (RFC 7541, 6.2.2), which every peer must accept.

use bytes::{Buf, BytesMut};

/// Returns the first bytes of a client: the preface and empty SETTINGS.
pub fn preface() -> Vec<u8> {
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(FrameKind::SETTINGS, 0, 0, &[]));
    bytes
}

/// Returns the first bytes of a client that grants `window` bytes to each stream.
pub fn preface_with_window(window: u32) -> Vec<u8> {
    let [a, b, c, d] = window.to_be_bytes();
    let mut bytes = PREFACE.to_vec();
    // The setting 4 is SETTINGS_INITIAL_WINDOW_SIZE (RFC 9113, section 6.5.2).
    bytes.extend(frame(FrameKind::SETTINGS, 0, 0, &[0, 4, a, b, c, d]));
    bytes
}

/// Returns the bytes of a frame.
pub fn frame(kind: FrameKind, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind.0, flags];
    bytes.extend((stream & 0x7fff_ffff).to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Returns HEADERS in one frame. `ends` says if a body follows.
pub fn headers(stream: u32, fields: &[(&str, &str)], ends: Ends) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        literal(&mut block, name.as_bytes());
        literal(&mut block, value.as_bytes());
    }
    frame(FrameKind::HEADERS, END_HEADERS | ends.flag(), stream, &block)
}

/// Returns DATA in one frame.
pub fn data(stream: u32, payload: &[u8], ends: Ends) -> Vec<u8> {
    frame(FrameKind::DATA, ends.flag(), stream, payload)
}

/// Returns RST_STREAM with the code CANCEL.
pub fn cancel(stream: u32) -> Vec<u8> {
    frame(FrameKind::RST_STREAM, 0, stream, &8u32.to_be_bytes())
}

/// Returns the acknowledgement of the peer's SETTINGS.
pub fn settings_acknowledged() -> Vec<u8> {
    frame(FrameKind::SETTINGS, ACK, 0, &[])
}

/// The END_STREAM flag of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// The frame is the last one of its stream in this direction.
    Stream,
    /// More frames follow.
    Nothing,
}

impl Ends {
    fn flag(self) -> u8 {
        match self {
            Self::Stream => 1,
            Self::Nothing => 0,
        }
    }
}

/// The type of a frame, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameKind(pub u8);

#[allow(missing_docs, reason = "the names are RFC 9113's")]
impl FrameKind {
    pub const DATA: Self = Self(0);
    pub const HEADERS: Self = Self(1);
    pub const RST_STREAM: Self = Self(3);
    pub const SETTINGS: Self = Self(4);
    pub const PING: Self = Self(6);
    pub const GOAWAY: Self = Self(7);
    pub const WINDOW_UPDATE: Self = Self(8);
    pub const CONTINUATION: Self = Self(9);
}

/// A frame that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The frame's type.
    pub kind: FrameKind,
    /// The frame's flags.
    pub flags: u8,
    /// The stream's number; 0 means the connection.
    pub stream: u32,
    /// The payload.
    pub payload: BytesMut,
}

impl Frame {
    /// Takes the first frame off `buffer`, if it is complete.
    pub fn take(buffer: &mut BytesMut) -> Option<Self> {
        let head = buffer.get(..9)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        if buffer.len() < 9 + length {
            return None;
        }
        let mut head = buffer.split_to(9);
        head.advance(3);
        let (kind, flags) = (FrameKind(head.get_u8()), head.get_u8());
        let stream = head.get_u32() & 0x7fff_ffff;
        Some(Self { kind, flags, stream, payload: buffer.split_to(length) })
    }

    /// Returns the value of the setting `id`, if the frame is SETTINGS with it.
    pub fn setting(&self, id: u16) -> Option<u32> {
        let mut pairs = self.payload.chunks_exact(6).filter(|_| self.kind == FrameKind::SETTINGS);
        let found = pairs.find(|pair| u16::from_be_bytes([pair[0], pair[1]]) == id)?;
        Some(u32::from_be_bytes([found[2], found[3], found[4], found[5]]))
    }

    /// Returns true if the frame is the last one of its stream in this direction.
    pub fn ends_stream(&self) -> bool {
        let may_end = matches!(self.kind, FrameKind::DATA | FrameKind::HEADERS);
        may_end && self.flags & Ends::Stream.flag() != 0
    }

    /// Returns true if the frame is SETTINGS that must be acknowledged.
    pub fn wants_acknowledgement(&self) -> bool {
        self.kind == FrameKind::SETTINGS && self.flags & ACK == 0
    }
}

/// Appends a string: its length as an integer with a prefix of seven bits, then its
/// bytes.
fn literal(block: &mut Vec<u8>, text: &[u8]) {
    let mut length = text.len();
    if length < 127 {
        block.push(length as u8);
    } else {
        block.push(127);
        length -= 127;
        while length >= 128 {
            block.push((length % 128) as u8 | 128);
            length /= 128;
        }
        block.push(length as u8);
    }
    block.extend(text);
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip() {
        let mut bytes = BytesMut::new();
        bytes.extend(data(3, b"body", Ends::Stream));
        bytes.extend(cancel(5));
        let last = bytes.split_off(bytes.len() - 1);
        let first = Frame::take(&mut bytes).expect("whole");
        assert_eq!((first.kind, first.flags, first.stream), (FrameKind::DATA, 1, 3));
        assert_eq!(&first.payload[..], b"body");
        assert_eq!(Frame::take(&mut bytes), None, "a byte is missing");
        bytes.unsplit(last);
        let second = Frame::take(&mut bytes).expect("whole");
        assert_eq!((second.kind, second.stream), (FrameKind::RST_STREAM, 5));
        assert_eq!(&second.payload[..], [0, 0, 0, 8]);
    }

    #[test]
    fn literal_encodes_long_lengths() {
        // RFC 7541, 5.1: 1337 with a prefix of five bits is 31, 154, 10. With a
        // prefix of seven bits it is 127, then 1210 in groups of seven bits.
        let mut block = Vec::new();
        literal(&mut block, &[b'x'; 1337]);
        assert_eq!(block[..3], [127, 0xba, 0x09]);
        assert_eq!(block.len(), 3 + 1337);
    }

    #[test]
    fn frame_finds_settings() {
        let mut bytes = BytesMut::new();
        bytes.extend(frame(FrameKind::SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 100, 0, 4, 0, 1, 0, 0]));
        let settings = Frame::take(&mut bytes).expect("whole");
        assert_eq!(settings.setting(3), Some(100));
        assert_eq!(settings.setting(4), Some(65_536));
        assert_eq!(settings.setting(5), None);
        assert!(settings.wants_acknowledgement());
    }
}
