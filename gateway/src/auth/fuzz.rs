//! Hostile bytes as the JSON of a token. JSON that passes the check for duplicate
//! names must mean the same to any other parser.

use serde_json::Value;

use super::claims::{Claims, TokenHeader, is_object_with_unique_names, text_claim};

/// Reads `data` as the decoded header and payload of a token.
#[expect(clippy::expect_used, reason = "the check parsed the same bytes")]
pub fn claims(data: &[u8]) {
    let _: Result<TokenHeader, _> = serde_json::from_slice(data);
    let _: Result<Claims, _> = serde_json::from_slice(data);
    let name = text_claim(data, "tenant");
    if is_object_with_unique_names(data) {
        let value: Value = serde_json::from_slice(data).expect("the check parsed it");
        assert!(value.is_object());
        assert_eq!(name.as_deref(), value.get("tenant").and_then(Value::as_str));
    }
}
