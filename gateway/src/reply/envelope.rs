//! The JSON of an error: always the same four keys.

use std::borrow::Cow;

/// The JSON object `{"error": {"message", "type", "param", "code"}}`. Unknown
/// values are null.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope<'a> {
    message: Cow<'a, str>,
    kind: &'static str,
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
        Self { message, kind, param, code }
    }

    /// Returns the JSON, on one line.
    pub fn to_json(&self) -> Vec<u8> {
        let Self { message, kind, param, code } = self;
        // Twice the message leaves room for escapes, so one allocation is usually enough.
        let mut json = Vec::with_capacity(FRAME + 2 * message.len());
        // Refusals come in floods, and a serialiser of the whole object would look for
        // escapes in the names, too.
        json.extend_from_slice(br#"{"error":{"message":"#);
        write_text(&mut json, Some(message));
        json.extend_from_slice(br#","type":"#);
        write_text(&mut json, Some(kind));
        json.extend_from_slice(br#","param":"#);
        write_text(&mut json, *param);
        json.extend_from_slice(br#","code":"#);
        write_text(&mut json, *code);
        json.extend_from_slice(b"}}");
        json
    }
}

/// Writes a string, or null.
#[expect(clippy::expect_used, reason = "strings serialise, and writing to a vector does not fail")]
fn write_text(json: &mut Vec<u8>, text: Option<&str>) {
    serde_json::to_writer(json, &text).expect("strings serialise");
}

/// Bytes of the JSON around the message.
const FRAME: usize = 160;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn envelope_json_keeps_every_character() {
        for (message, param, code) in [
            ("a \"quoted\" \\ line\n", Some("messages[0].\"x\""), Some("invalid_value")),
            ("é\u{7}", None, None),
        ] {
            let envelope = Envelope::new(message.into(), "server_error", param, code);
            let read: Value = serde_json::from_slice(&envelope.to_json()).expect("JSON");
            let error =
                json!({ "message": message, "type": "server_error", "param": param, "code": code });
            assert_eq!(read, json!({ "error": error }));
        }
    }
}
