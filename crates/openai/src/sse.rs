//! Server-sent events as text. Only `data:` lines and comments are written: the
//! official SDKs fail on an `event:` line without data and on an empty `data:`.

use serde::Serialize;

/// The comment that keeps a silent connection open.
pub const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// The last event of every stream.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Appends an event with the data `json`, one line of JSON.
pub(crate) fn write_json(json: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(json);
    out.extend_from_slice(b"\n\n");
}

/// Appends an event with `value` as JSON.
#[expect(
    clippy::expect_used,
    reason = "strings and finite numbers serialise, and writing to a vector does not fail"
)]
pub(crate) fn write_event(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    // The values are structs of strings and finite numbers, and writing to a
    // vector cannot fail.
    serde_json::to_writer(&mut *out, value).expect("strings and finite numbers serialise");
    out.extend_from_slice(b"\n\n");
}

/// Appends the event that ends a stream.
pub(crate) fn write_done(out: &mut Vec<u8>) {
    out.extend_from_slice(DONE);
}
