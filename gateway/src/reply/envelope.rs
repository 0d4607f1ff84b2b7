//! The JSON of an error: always the same four keys.

use std::borrow::Cow;

use serde::Serialize;

/// `{"error": {"message", "type", "param", "code"}}`; what is unknown is null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Envelope<'a> {
    error: Error<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Error<'a> {
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
        Self { error: Error { message, r#type: kind, param, code } }
    }

    /// The JSON, on one line.
    pub fn to_json(&self) -> Vec<u8> {
        let mut json = Vec::with_capacity(FRAME + 2 * self.error.message.len());
        serde_json::to_writer(&mut json, self).expect("strings serialise");
        json
    }
}

/// Bytes around the message.
const FRAME: usize = 160;
