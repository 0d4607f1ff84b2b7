//! The JSON of an error: always the same four keys.

use std::borrow::Cow;

use serde::Serialize;

/// `{"error": {"message", "type", "param", "code"}}`; what is unknown is null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Envelope {
    error: Error,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Error {
    message: String,
    r#type: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl Envelope {
    pub(super) fn new(
        message: Cow<'_, str>,
        kind: &'static str,
        param: Option<&str>,
        code: Option<&'static str>,
    ) -> Self {
        Self {
            error: Error {
                message: message.into_owned(),
                r#type: kind,
                param: param.map(str::to_owned),
                code,
            },
        }
    }

    /// The JSON, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings serialise")
    }
}
