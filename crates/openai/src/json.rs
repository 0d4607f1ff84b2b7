//! The bounds that a body must keep before a JSON parser reads it.

use crate::Violation;

/// Returns `bytes` as text if it is UTF-8 and nests at most `max_depth` arrays
/// and objects. Text that is not JSON passes; the parser refuses it later.
///
/// # Errors
/// A [`Violation`] of the body as a whole.
pub fn text(bytes: &[u8], max_depth: u32) -> Result<&str, Violation> {
    let text = std::str::from_utf8(bytes)
        .map_err(|_| Violation::body("The body is not valid JSON: it is not UTF-8."))?;
    // The parser recurses once for each level; a bomb of brackets must not reach it.
    if depth(text) > max_depth as usize {
        return Err(Violation::body(format!(
            "The body nests deeper than {max_depth} arrays and objects."
        )));
    }
    Ok(text)
}

/// Returns the deepest nesting of brackets outside strings. The result is exact
/// if `text` is JSON; for other text it only has to stay cheap.
pub(crate) fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0usize);
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        // The escaped character may be a quote: skip it.
                        b'\\' => drop(bytes.next()),
                        b'"' => break,
                        _ => {}
                    }
                }
            }
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            // Text that is no JSON may close more brackets than it opens.
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_counts_brackets_outside_strings() {
        for (text, expected) in [
            ("1", 0),
            ("{}", 1),
            ("[[],[[]]]", 3),
            (r#"{"a":"[[[["}"#, 1),
            (r#"{"a":"\"[[","b":[{}]}"#, 3),
            (r#""\\"[["#, 2),
            ("]]][", 1),
            ("\"unclosed [[[", 0),
        ] {
            assert_eq!(depth(text), expected, "{text}");
        }
        let bomb = "[".repeat(1_000_000);
        assert_eq!(text(bomb.as_bytes(), 32).expect_err("too deep").param, None);
        assert!(text(&[b'"', 0xff, b'"'], 32).is_err());
    }
}
