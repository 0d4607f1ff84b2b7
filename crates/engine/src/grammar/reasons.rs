//! The compiler's reasons to refuse a form, in words for a client. The library's own words
//! are about its parser, which a client does not know.

/// Returns the reason for a client from the first line of the library's error.
pub(super) fn for_client(error: &str) -> String {
    if let Some(reason) = error.strip_prefix(UNSATISFIABLE) {
        // The library speaks of keywords of the schema here, so its reason helps.
        return format!("no value is valid under the schema: {reason}");
    }
    let known = REASONS.iter().find(|(marks, _)| marks.iter().any(|mark| error.contains(mark)));
    known.map_or(OTHER, |(_, reason)| reason).to_owned()
}

/// The library's words for a schema without values.
const UNSATISFIABLE: &str = "Unsatisfiable schema: ";

/// Words of the library's errors, with the reason that they stand for.
const REASONS: [(&[&str], &str); 2] = [
    (
        &["fuel", "too large", "too many", "max is", "max_", "limit", "exceeded", "DNF"],
        "it is too costly to enforce; use fewer alternatives, shorter lengths and simpler expressions",
    ),
    (
        &["regex", "lookaround", "Regex"],
        "one of its regular expressions cannot be enforced; use a simpler one",
    ),
];

/// The reason for errors that no client should meet.
const OTHER: &str = "the compiler does not support it";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_for_clients_do_not_name_the_parser() {
        for (error, expected) in [
            ("Unsatisfiable schema: minimum (3) is greater than maximum (2)", "greater than"),
            ("fuel exhausted when checking relevance of lexemes (200000)", "too costly"),
            ("Current row has 1001 items; max is 1000; consider making", "too costly"),
            (
                "lexer precomputation failed; either increase limits.initial_lexer_fuel",
                "too costly",
            ),
            ("invalid regex: unclosed group", "regular expressions"),
            ("symbol start is parametric", "does not support"),
        ] {
            let reason = for_client(error);
            assert!(reason.contains(expected), "{error}: {reason}");
            assert!(!reason.contains("lexe") && !reason.contains("row"), "{error}: {reason}");
        }
    }
}
