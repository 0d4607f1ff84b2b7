//! The check of a regular expression before a worker compiles it: the client reads which
//! expression of its request cannot be enforced, and why.

use regex_syntax::hir::{Hir, HirKind, Look};
use regex_syntax::{Error, Parser};

/// Returns the reason why an expression cannot be enforced; `None` if it can be.
pub(crate) fn fault_of(regex: &str) -> Option<String> {
    match Parser::new().parse(regex) {
        Ok(expression) => {
            misplaced_anchor(&expression, Ends { start: true, end: true }).map(anchor_fault)
        }
        Err(Error::Parse(error)) => Some(at_byte(error.kind(), error.span().start.offset)),
        Err(Error::Translate(error)) => Some(at_byte(error.kind(), error.span().start.offset)),
        // The library may get further kinds of errors.
        Err(_) => Some("it is not a valid expression".to_owned()),
    }
}

/// The ends of the whole expression that a part of it touches.
#[derive(Clone, Copy)]
struct Ends {
    start: bool,
    end: bool,
}

/// Returns the first anchor or word boundary that the compiler does not know: it knows `^`
/// at the start of the expression and `$` at its end, also within groups and alternatives.
fn misplaced_anchor(part: &Hir, at: Ends) -> Option<Look> {
    const INSIDE: Ends = Ends { start: false, end: false };
    match part.kind() {
        HirKind::Look(Look::Start) if at.start => None,
        HirKind::Look(Look::End) if at.end => None,
        HirKind::Look(look) => Some(*look),
        HirKind::Capture(group) => misplaced_anchor(&group.sub, at),
        HirKind::Alternation(parts) => parts.iter().find_map(|part| misplaced_anchor(part, at)),
        HirKind::Concat(parts) => {
            // Several anchors may stand side by side.
            let first = parts.iter().position(|part| !is_anchor(part, Look::Start));
            let last = parts.iter().rposition(|part| !is_anchor(part, Look::End));
            parts.iter().enumerate().find_map(|(index, part)| {
                let start = at.start && first.is_none_or(|first| index <= first);
                let end = at.end && last.is_none_or(|last| index >= last);
                misplaced_anchor(part, Ends { start, end })
            })
        }
        // A repeated anchor is not at an end of the expression.
        HirKind::Repetition(repeated) => misplaced_anchor(&repeated.sub, INSIDE),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) => None,
    }
}

fn is_anchor(part: &Hir, anchor: Look) -> bool {
    matches!(part.kind(), HirKind::Look(look) if *look == anchor)
}

fn anchor_fault(look: Look) -> String {
    match look {
        Look::Start => "'^' is enforced only at the start of the expression",
        Look::End => "'$' is enforced only at the end of the expression",
        Look::StartLF | Look::EndLF | Look::StartCRLF | Look::EndCRLF => {
            "anchors of lines are not enforced"
        }
        _ => "word boundaries are not enforced",
    }
    .to_owned()
}

fn at_byte(kind: impl std::fmt::Display, byte: usize) -> String {
    format!("{kind}, at byte {byte}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_of_clients_are_accepted() {
        for regex in [
            "a",
            "^[a-z]{3}$",
            "^(a|b)$",
            "^a|b$",
            "(^a|^b)c$",
            r"\d{4}-\d{2}",
            r"^\/v1\/[^\/]+$",
            r"^\p{L}+$",
            "^(?<name>x)$",
            "^^a$$",
        ] {
            assert_eq!(fault_of(regex), None, "{regex}");
        }
    }

    #[test]
    fn expression_beyond_the_compiler_gets_its_reason() {
        for (regex, reason) in [
            ("(", "unclosed group, at byte 0"),
            ("a[z-a]", "invalid character class range"),
            ("(?=a)b", "look-around"),
            (r"(a)\1", "backreferences"),
            ("a{3,2}", "invalid repetition count range"),
            (r"\p{Nope}", "Unicode property"),
            (r"\bword", "word boundaries"),
            ("a^b", "'^' is enforced only at the start"),
            ("a$b", "'$' is enforced only at the end"),
            ("(^a)*", "'^' is enforced only at the start"),
            ("(?m)^a", "anchors of lines"),
        ] {
            let found = fault_of(regex).expect("the expression has a fault");
            assert!(found.contains(reason), "{regex}: {found}");
        }
    }
}
