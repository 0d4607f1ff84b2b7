//! A check of HTTP/1 heads before hyper parses them. A head that two parsers
//! might read differently is refused, since request smuggling needs such heads:
//! hyper itself accepts a length beside chunks, or the same length twice.
//!
//! A head passes as a whole or not at all. In the place of a refused head hyper
//! gets an empty request, which [`Activity`] answers with the refusal, and
//! nothing after that request.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use memchr::{memchr, memchr_iter};
use tokio::io::{AsyncRead, ReadBuf};

use super::activity::Activity;
use super::bad_head::BadHead;
use super::forward_write::forward_write;

/// A stream of HTTP/1 that passes head by head and body by body.
pub(super) struct Heads<I> {
    io: I,
    activity: Arc<Activity>,
    /// Most bytes of one head.
    limit: usize,
    next: Next,
    /// Number of heads that passed.
    passed: u64,
    /// Bytes that were read and not yet passed on.
    held: Vec<u8>,
    /// Number of held bytes that may pass.
    ready: usize,
}

/// The part of a request to which the next byte belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Head,
    /// A body with this number of bytes left.
    Body(u64),
    /// A chunked body. Its request is the last of the connection, so no head
    /// follows.
    Chunks,
    /// Nothing more passes, because a head was refused.
    Nothing,
}

/// The delimitation of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    Length(u64),
    Chunks,
}

impl<I> Heads<I> {
    pub(super) fn new(io: I, activity: Arc<Activity>, limit: usize) -> Self {
        let (next, held) = (Next::Head, Vec::new());
        Self { io, activity, limit, next, passed: 0, held, ready: 0 }
    }

    /// Returns the number of `bytes` that may pass. The other bytes are the
    /// beginning of a head, or follow a refusal.
    fn scan(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            match self.next {
                // No head may follow the chunks on this connection, so they need no scan.
                Next::Chunks => return bytes.len(),
                Next::Nothing => return at,
                Next::Body(left) => {
                    // A length of 64 bits may exceed the address space; more than `rest` is never
                    // taken.
                    let take = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    at += take;
                    let left = left - take as u64;
                    self.next = if left == 0 { Next::Head } else { Next::Body(left) };
                }
                Next::Head => match head(rest, self.limit) {
                    Ok(None) => return at,
                    Ok(Some((length, framing))) => {
                        at += length;
                        self.passed += 1;
                        self.next = match framing {
                            Framing::Length(0) => Next::Head,
                            Framing::Length(length) => Next::Body(length),
                            Framing::Chunks => Next::Chunks,
                        };
                    }
                    Err(bad) => {
                        self.activity.refuse_request(self.passed, bad);
                        // Bytes behind a refused head have no certain start, so none of them pass.
                        self.next = Next::Nothing;
                        return at;
                    }
                },
            }
        }
        at
    }

    /// Keeps `rest`, which may not pass yet. After a refusal keeps the stand-in
    /// request instead.
    fn hold(&mut self, rest: &[u8]) {
        if self.next == Next::Nothing {
            self.held.clear();
            self.held.extend_from_slice(STAND_IN);
            self.ready = self.held.len();
        } else {
            self.held.extend_from_slice(rest);
            self.activity.head_held(true);
        }
    }

    /// Copies held bytes that may pass into `buffer`.
    fn pass_held(&mut self, buffer: &mut ReadBuf<'_>) {
        let take = self.ready.min(buffer.remaining());
        buffer.put_slice(&self.held[..take]);
        self.held.drain(..take);
        self.ready -= take;
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Heads<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.ready > 0 {
                this.pass_held(buffer);
                return Poll::Ready(Ok(()));
            }
            if this.next == Next::Nothing {
                // The answer ends the connection, so further bytes stay unread.
                return Poll::Pending;
            }
            if this.held.is_empty() {
                let before = buffer.filled().len();
                ready!(Pin::new(&mut this.io).poll_read(cx, buffer))?;
                let fresh = &buffer.filled()[before..];
                let passed = this.scan(fresh);
                if passed == fresh.len() {
                    // The common case without a copy; also the end of the stream.
                    return Poll::Ready(Ok(()));
                }
                this.hold(&fresh[passed..]);
                buffer.set_filled(before + passed);
                // A return without a byte would tell hyper that the stream has ended.
                if passed > 0 {
                    return Poll::Ready(Ok(()));
                }
            } else {
                let mut space = [0; SPACE];
                let mut more = ReadBuf::new(&mut space);
                ready!(Pin::new(&mut this.io).poll_read(cx, &mut more))?;
                if more.filled().is_empty() {
                    return Poll::Ready(Ok(())); // the stream ends within a head
                }
                let mut held = std::mem::take(&mut this.held);
                held.extend_from_slice(more.filled());
                this.ready = this.scan(&held);
                this.held = held;
                if this.next == Next::Nothing {
                    this.refuse_rest();
                }
                this.activity.head_held(this.ready < this.held.len());
            }
        }
    }
}

impl<I> Heads<I> {
    /// Puts the stand-in request behind the bytes that may still pass.
    fn refuse_rest(&mut self) {
        self.held.truncate(self.ready);
        self.held.extend_from_slice(STAND_IN);
        self.ready = self.held.len();
    }
}

forward_write!(Heads);

/// Parses the head at the beginning of `bytes`. Returns its length and its
/// framing, or `None` while the head is incomplete.
pub(crate) fn head(bytes: &[u8], limit: usize) -> Result<Option<(usize, Framing)>, BadHead> {
    // One empty line in front is allowed, because some clients end a body with
    // an extra line.
    let skipped = if bytes.starts_with(b"\r\n") { 2 } else { 0 };
    let within = &bytes[skipped..];
    let mut parser = HeadParser::default();
    let mut from = 0;
    for at in memchr_iter(b'\n', within) {
        if at >= limit {
            // A line feed beyond the limit cannot end an acceptable head.
            break;
        }
        // A bare LF ends a line for some parsers only (RFC 9112, 2.2).
        let line = within[from..at].strip_suffix(b"\r").ok_or(BadHead::Malformed(LINE_END))?;
        if line.is_empty() && from > 0 {
            return parser.end().map(|framing| Some((skipped + at + 1, framing)));
        }
        parser.line(line)?;
        from = at + 1;
    }
    if within.len() > limit { Err(BadHead::TooLarge) } else { Ok(None) }
}

/// A parser of one head, fed line by line.
#[derive(Default)]
struct HeadParser<'a> {
    lines: usize,
    /// The authority of a target in absolute form.
    authority: Option<&'a [u8]>,
    is_http10: bool,
    host: Option<&'a [u8]>,
    length: Option<u64>,
    is_chunked: bool,
}

impl<'a> HeadParser<'a> {
    fn line(&mut self, line: &'a [u8]) -> Result<(), BadHead> {
        self.lines += 1;
        if self.lines == 1 { self.request_line(line) } else { self.header(line) }
    }

    fn request_line(&mut self, line: &'a [u8]) -> Result<(), BadHead> {
        let malformed = BadHead::Malformed("The request line is malformed.");
        // Lenient parsers also split at tabs and at several spaces (RFC 9112, 3).
        let mut words = line.split(|byte| *byte == b' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(malformed);
        };
        // Each parser trims other bytes of a bad method, so only plain tokens pass.
        if !is_token(method) || method.len() > LONGEST_METHOD {
            return Err(malformed);
        }
        self.is_http10 = match version {
            b"HTTP/1.1" => false,
            b"HTTP/1.0" => true,
            _ => return Err(BadHead::Malformed("The version is neither HTTP/1.1 nor HTTP/1.0.")),
        };
        if !all_are(target, GRAPHIC) {
            return Err(malformed);
        }
        // RFC 9112, 3.2: no form of a target has a fragment. Parsers differ in what
        // they make of one.
        if target.contains(&b'#') {
            return Err(BadHead::Malformed("The URL has a fragment."));
        }
        match target {
            [b'/', ..] => Ok(()),
            b"*" if method == b"OPTIONS" => Ok(()),
            _ => {
                // The form of CONNECT has no scheme and fails here: this server is no proxy.
                let authority = authority(target).ok_or(malformed)?;
                self.authority = Some(authority);
                Ok(())
            }
        }
    }

    fn header(&mut self, line: &'a [u8]) -> Result<(), BadHead> {
        // One more line, which is the request line.
        if self.lines > super::MOST_HEADERS + 1 {
            return Err(BadHead::TooLarge);
        }
        let malformed = BadHead::Malformed("A header is malformed.");
        // Parsers differ in how they join folded lines (RFC 9112, 5.2).
        if matches!(line.first(), Some(b' ' | b'\t')) {
            return Err(BadHead::Malformed("A header is folded over several lines."));
        }
        let colon = memchr(b':', line).ok_or(malformed)?;
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        // Also refuses a space before the colon, which some parsers drop (RFC 9112, 5.1).
        if !is_token(name) || !all_are(value, TEXT) {
            return Err(malformed);
        }
        let value = value.trim_ascii();
        // Compared by length first, because most headers are none of these.
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => self.host(value),
            14 if name.eq_ignore_ascii_case(b"content-length") => self.length(value),
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => self.coding(value),
            _ => Ok(()),
        }
    }

    fn host(&mut self, value: &'a [u8]) -> Result<(), BadHead> {
        // With two hosts, a proxy and this gateway may each read another one.
        if self.host.is_some() || value.is_empty() || !all_are(value, HOST) {
            return Err(BadHead::Malformed("There must be one valid host header."));
        }
        self.host = Some(value);
        Ok(())
    }

    fn length(&mut self, value: &[u8]) -> Result<(), BadHead> {
        // `parse` alone would accept `+5`, which other parsers refuse or read differently.
        let digits = std::str::from_utf8(value).ok().filter(|digits| {
            (1..=MOST_DIGITS).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
        });
        // The same length twice is refused, too: a proxy might drop either one.
        match (self.length, digits.and_then(|digits| digits.parse().ok())) {
            (None, Some(length)) => self.length = Some(length),
            _ => return Err(BadHead::Malformed("There must be one valid content-length.")),
        }
        Ok(())
    }

    fn coding(&mut self, value: &[u8]) -> Result<(), BadHead> {
        if self.is_chunked || !value.eq_ignore_ascii_case(b"chunked") {
            return Err(BadHead::Malformed("The only transfer-encoding is 'chunked', once."));
        }
        self.is_chunked = true;
        Ok(())
    }

    fn end(self) -> Result<Framing, BadHead> {
        let Self { lines: _, authority, is_http10, host, length, is_chunked } = self;
        match (authority, host) {
            // RFC 9112, 3.2: HTTP/1.1 needs a host, HTTP/1.0 does not.
            (_, None) if !is_http10 => {
                return Err(BadHead::Malformed("There must be one valid host header."));
            }
            (Some(authority), Some(host)) if !authority.eq_ignore_ascii_case(host) => {
                return Err(BadHead::Malformed("The host header is not the URL's."));
            }
            _ => {}
        }
        match (is_chunked, length) {
            // RFC 9112, 6.1: a request with both may be an attempt at request smuggling.
            (true, Some(_)) => Err(BadHead::Malformed(
                "There must not be both content-length and transfer-encoding.",
            )),
            // RFC 9112, 6.1: the framing of such a message is faulty.
            (true, None) if is_http10 => {
                Err(BadHead::Malformed("HTTP/1.0 has no transfer-encoding."))
            }
            (true, None) => Ok(Framing::Chunks),
            // A request with neither has no body (RFC 9112, 6.3).
            (false, length) => Ok(Framing::Length(length.unwrap_or_default())),
        }
    }
}

/// Returns `HOST:PORT` of `https://HOST:PORT/...`.
fn authority(target: &[u8]) -> Option<&[u8]> {
    let rest = [b"https://".as_slice(), b"http://"].iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })?;
    let end = rest.iter().position(|byte| b"/?#".contains(byte)).unwrap_or(rest.len());
    let authority = &rest[..end];
    // User information before an `@` can hide the real host (RFC 9110, 4.2.4).
    (!authority.is_empty() && !authority.contains(&b'@')).then_some(authority)
}

fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && all_are(bytes, TOKEN)
}

/// Returns true if each of `bytes` belongs to the class.
fn all_are(bytes: &[u8], class: u8) -> bool {
    // Without an early end, because nearly every head is good.
    bytes.iter().fold(class, |common, byte| common & CLASSES[usize::from(*byte)]) == class
}

/// The classes of each byte. A table, because a head has hundreds of bytes, and comparing
/// each with every allowed byte was a seventh of the cost of a refusal.
static CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = classes_of(byte as u8);
        byte += 1;
    }
    classes
};

const fn classes_of(byte: u8) -> u8 {
    let is_graphic = byte.is_ascii_graphic();
    let mut classes = 0;
    if is_graphic {
        classes |= GRAPHIC;
    }
    if byte.is_ascii_alphanumeric() || is_graphic && !is_one_of(byte, b"\"(),/:;<=>?@[\\]{}") {
        classes |= TOKEN;
    }
    if byte == b'\t' || (byte >= b' ' && byte != 0x7f) {
        classes |= TEXT;
    }
    if is_graphic && !is_one_of(byte, b",/@?#\\\"<>") {
        classes |= HOST;
    }
    classes
}

const fn is_one_of(byte: u8, mut bytes: &[u8]) -> bool {
    while let [first, rest @ ..] = bytes {
        if *first == byte {
            return true;
        }
        bytes = rest;
    }
    false
}

/// Visible ASCII.
const GRAPHIC: u8 = 1;
/// Bytes of a token (RFC 9110, 5.6.2): visible ASCII without the delimiters.
const TOKEN: u8 = 2;
/// Bytes of a header's value.
const TEXT: u8 = 4;
/// Bytes of a host.
const HOST: u8 = 8;

/// The request that hyper reads in the place of a refused head.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: refused\r\nconnection: close\r\n\r\n";

const LINE_END: &str = "A line does not end with CR LF.";

/// Most digits of a length: every number of 19 digits fits into 64 bits.
const MOST_DIGITS: usize = 19;

/// Bytes of the longest method.
const LONGEST_METHOD: usize = 32;

/// Bytes read at once while a head is incomplete.
const SPACE: usize = 4 * 1024;

#[cfg(test)]
mod tests;
