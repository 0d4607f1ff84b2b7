//! The JSON of an error: always the same four keys.

use std::borrow::Cow;

use serde::Serialize;

/// The JSON object `{"error": {"message", "type", "param", "code"}}`. Unknown
/// values are null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Envelope<'a> {
    error: ErrorBody<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct ErrorBody<'a> {
    message: Cow<'a, str>,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl<'a> Envelope<'a> {
    pub(super) fn new(
        message: Cow<'a, str>,
        kind: &'static str,
        param: Option<&'a str>,
        code: Option<&'static str>,
    ) -> Self {
        Self { error: ErrorBody { message, r#type: kind, param, code } }
    }

    /// Returns the JSON, on one line.
    pub fn to_json(&self) -> Vec<u8> {
        // Twice the message leaves room for escapes, so one allocation is usually enough.
        let mut json = Vec::with_capacity(FRAME + 2 * self.error.message.len());
        serde_json::to_writer(&mut json, self).expect("strings serialise");
        json
    }
}

/// Bytes of the JSON around the message.
const FRAME: usize = 160;
