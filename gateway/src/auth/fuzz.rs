//! A token's JSON as hostile bytes: what counts as one object without twins is
//! just that to any other reader.

use serde_json::Value;

use super::claims::{Claims, TokenHeader, is_object_without_twins, text_claim};

/// Header and payload of a token, decoded.
pub fn claims(data: &[u8]) {
    let _: Result<TokenHeader, _> = serde_json::from_slice(data);
    let _: Result<Claims, _> = serde_json::from_slice(data);
    let name = text_claim(data, "tenant");
    if is_object_without_twins(data) {
        let value: Value = serde_json::from_slice(data).expect("it was read whole");
        assert!(value.is_object());
        assert_eq!(name.as_deref(), value.get("tenant").and_then(Value::as_str));
    }
}
