//! Heads of HTTP/1 requests, looked at before hyper parses them. What two
//! parsers might read differently is refused: hyper itself takes a length
//! beside chunks, or twice the same length, and forgets that it did.
//!
//! A head passes whole or not at all. In the place of one that is refused
//! hyper is handed an empty request, which [`Activity`] knows to answer with
//! the refusal, and nothing after it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use super::activity::Activity;
use super::bad_head::BadHead;
use super::pass::writes_pass_on;

/// Bytes of HTTP/1, which pass head by head and body by body.
pub(super) struct Heads<I> {
    io: I,
    activity: Arc<Activity>,
    /// Bytes of one head.
    limit: usize,
    next: Next,
    /// Heads that have passed.
    passed: u64,
    /// Read and not yet handed on.
    held: Vec<u8>,
    /// How many of those may be.
    ready: usize,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Head,
    /// A body with so many bytes left.
    Body(u64),
    /// A chunked body. Its request is the last of the connection, so what
    /// follows it is nobody's head.
    Chunks,
    /// A head was refused: nothing passes any more.
    Nothing,
}

/// How the body of a request is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length(u64),
    Chunks,
}

impl<I> Heads<I> {
    pub(super) fn new(io: I, activity: Arc<Activity>, limit: usize) -> Self {
        let (next, held) = (Next::Head, Vec::new());
        Self { io, activity, limit, next, passed: 0, held, ready: 0 }
    }

    /// How many of `bytes` may pass. The rest is the beginning of a head, or
    /// what follows a refusal.
    fn look(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            match self.next {
                Next::Chunks => return bytes.len(),
                Next::Nothing => return at,
                Next::Body(left) => {
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
                        self.next = Next::Nothing;
                        return at;
                    }
                },
            }
        }
        at
    }

    /// Keeps `rest`, which may not pass; after a refusal its stand-in instead.
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

    fn hand_on(&mut self, buffer: &mut ReadBuf<'_>) {
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
                this.hand_on(buffer);
                return Poll::Ready(Ok(()));
            }
            if this.next == Next::Nothing {
                // The answer ends the connection; who sends on is not read.
                return Poll::Pending;
            }
            if this.held.is_empty() {
                let before = buffer.filled().len();
                ready!(Pin::new(&mut this.io).poll_read(cx, buffer))?;
                let fresh = &buffer.filled()[before..];
                let passed = this.look(fresh);
                if passed == fresh.len() {
                    return Poll::Ready(Ok(())); // as nearly always; or the end
                }
                this.hold(&fresh[passed..]);
                buffer.set_filled(before + passed);
                if passed > 0 {
                    return Poll::Ready(Ok(()));
                }
            } else {
                let mut space = [0; SPACE];
                let mut more = ReadBuf::new(&mut space);
                ready!(Pin::new(&mut this.io).poll_read(cx, &mut more))?;
                if more.filled().is_empty() {
                    return Poll::Ready(Ok(())); // it ends within a head
                }
                let mut held = std::mem::take(&mut this.held);
                held.extend_from_slice(more.filled());
                this.ready = this.look(&held);
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
    /// Puts the stand-in behind what may still pass.
    fn refuse_rest(&mut self) {
        self.held.truncate(self.ready);
        self.held.extend_from_slice(STAND_IN);
        self.ready = self.held.len();
    }
}

writes_pass_on!(Heads);

/// The head that `bytes` begin with: its length and how its body is delimited;
/// `None` while it is not whole.
pub(super) fn head(bytes: &[u8], limit: usize) -> Result<Option<(usize, Framing)>, BadHead> {
    // One empty line before it is forgiven, as some clients end a body with one.
    let skipped = if bytes.starts_with(b"\r\n") { 2 } else { 0 };
    let within = &bytes[skipped..];
    let mut reading = Reading::default();
    let mut from = 0;
    for (at, _) in within.iter().enumerate().filter(|(_, byte)| **byte == b'\n') {
        if at >= limit {
            break;
        }
        let line = within[from..at].strip_suffix(b"\r").ok_or(BadHead::Malformed(LINE_END))?;
        if line.is_empty() && from > 0 {
            return reading.end().map(|framing| Some((skipped + at + 1, framing)));
        }
        reading.line(line)?;
        from = at + 1;
    }
    if within.len() > limit { Err(BadHead::TooLarge) } else { Ok(None) }
}

/// A head as far as it has been read.
#[derive(Default)]
struct Reading<'a> {
    lines: usize,
    /// Of absolute-form, the authority that it names.
    authority: Option<&'a [u8]>,
    is_http10: bool,
    host: Option<&'a [u8]>,
    length: Option<u64>,
    is_chunked: bool,
}

impl<'a> Reading<'a> {
    fn line(&mut self, line: &'a [u8]) -> Result<(), BadHead> {
        self.lines += 1;
        if self.lines == 1 { self.request_line(line) } else { self.header(line) }
    }

    fn request_line(&mut self, line: &'a [u8]) -> Result<(), BadHead> {
        let malformed = BadHead::Malformed("The request line is malformed.");
        let mut words = line.split(|byte| *byte == b' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(malformed);
        };
        if !is_token(method) || method.len() > LONGEST_METHOD {
            return Err(malformed);
        }
        self.is_http10 = match version {
            b"HTTP/1.1" => false,
            b"HTTP/1.0" => true,
            _ => return Err(BadHead::Malformed("The version is neither HTTP/1.1 nor HTTP/1.0.")),
        };
        if !target.iter().all(u8::is_ascii_graphic) {
            return Err(malformed);
        }
        match target {
            [b'/', ..] => Ok(()),
            b"*" if method == b"OPTIONS" => Ok(()),
            _ => {
                let authority = authority(target).ok_or(malformed)?;
                self.authority = Some(authority);
                Ok(())
            }
        }
    }

    fn header(&mut self, line: &'a [u8]) -> Result<(), BadHead> {
        if self.lines > super::MOST_HEADERS + 1 {
            return Err(BadHead::TooLarge);
        }
        let malformed = BadHead::Malformed("A header is malformed.");
        if matches!(line.first(), Some(b' ' | b'\t')) {
            return Err(BadHead::Malformed("A header is folded over several lines."));
        }
        let colon = line.iter().position(|byte| *byte == b':').ok_or(malformed)?;
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        let is_text = |byte: &u8| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f);
        if !is_token(name) || !value.iter().all(is_text) {
            return Err(malformed);
        }
        let value = value.trim_ascii();
        // By its length first: most headers are none of these.
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => self.host(value),
            14 if name.eq_ignore_ascii_case(b"content-length") => self.length(value),
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => self.coding(value),
            _ => Ok(()),
        }
    }

    fn host(&mut self, value: &'a [u8]) -> Result<(), BadHead> {
        let is_host = |byte: &u8| byte.is_ascii_graphic() && !b",/@?#\\\"<>".contains(byte);
        if self.host.is_some() || value.is_empty() || !value.iter().all(is_host) {
            return Err(BadHead::Malformed("There must be one valid host header."));
        }
        self.host = Some(value);
        Ok(())
    }

    fn length(&mut self, value: &[u8]) -> Result<(), BadHead> {
        let digits = std::str::from_utf8(value).ok().filter(|digits| {
            (1..=MOST_DIGITS).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
        });
        // Twice the same is refused, too: whoever sends it is confused.
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
            (_, None) if !is_http10 => {
                return Err(BadHead::Malformed("There must be one valid host header."));
            }
            (Some(authority), Some(host)) if !authority.eq_ignore_ascii_case(host) => {
                return Err(BadHead::Malformed("The host header is not the URL's."));
            }
            _ => {}
        }
        match (is_chunked, length) {
            (true, Some(_)) => Err(BadHead::Malformed(
                "There must not be both content-length and transfer-encoding.",
            )),
            (true, None) if is_http10 => {
                Err(BadHead::Malformed("HTTP/1.0 has no transfer-encoding."))
            }
            (true, None) => Ok(Framing::Chunks),
            (false, length) => Ok(Framing::Length(length.unwrap_or_default())),
        }
    }
}

/// Of `https://HOST:PORT/...`, `HOST:PORT`.
fn authority(target: &[u8]) -> Option<&[u8]> {
    let rest = [b"https://".as_slice(), b"http://"].iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })?;
    let end = rest.iter().position(|byte| b"/?#".contains(byte)).unwrap_or(rest.len());
    let authority = &rest[..end];
    (!authority.is_empty() && !authority.contains(&b'@')).then_some(authority)
}

fn is_token(bytes: &[u8]) -> bool {
    let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !bytes.is_empty() && bytes.iter().all(is_token)
}

/// What hyper reads in the place of a head that is refused.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: refused\r\nconnection: close\r\n\r\n";

const LINE_END: &str = "A line does not end with CR LF.";

/// Of a length: all that 64 bits hold.
const MOST_DIGITS: usize = 19;

const LONGEST_METHOD: usize = 32;

/// Bytes read at once while a head is not whole.
const SPACE: usize = 4 * 1024;

#[cfg(test)]
mod tests;
