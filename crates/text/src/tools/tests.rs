//! Tests of the parser of calls: every form, in pieces of any size.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const ALL: [ToolFormat; 4] = ToolFormat::ALL;

fn tools() -> Arc<ToolSignatures> {
    let parameters = json!({"properties": {
        "plan": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
    }});
    let signature = ToolSignature::of_schema(&parameters);
    let names = ["get_limit", "get_limits", "sum"];
    Arc::new(names.map(|name| (name.to_owned(), signature.clone())).into())
}

/// Returns the pieces of an answer that comes in `pieces`, with neighbours of one kind
/// joined.
fn parse(format: ToolFormat, pieces: &[&str]) -> Vec<ToolPiece> {
    let mut parser = ToolParser::new(format, tools());
    let (mut joined, mut out): (Vec<ToolPiece>, Vec<ToolPiece>) = (Vec::new(), Vec::new());
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    for piece in out {
        match (joined.last_mut(), piece) {
            (Some(ToolPiece::Text(last)), ToolPiece::Text(text))
            | (Some(ToolPiece::Arguments(last)), ToolPiece::Arguments(text)) => {
                last.push_str(&text)
            }
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

fn text(text: &str) -> ToolPiece {
    ToolPiece::Text(text.to_owned())
}

fn call(name: &str, arguments: &str) -> [ToolPiece; 2] {
    [ToolPiece::Call(name.to_owned()), ToolPiece::Arguments(arguments.to_owned())]
}

#[test]
fn hermes_calls_are_read() {
    let one = "<tool_call>\n{\"name\": \"get_limit\", \"arguments\": {\"plan\": \"a}\\\"\"}}\n</tool_call>";
    let arguments = "{\"plan\": \"a}\\\"\"}";
    for (answer, expected) in [
        (one.to_owned(), call("get_limit", arguments).to_vec()),
        (format!("\n\n{one}\n"), call("get_limit", arguments).to_vec()),
        (
            format!("Let me see.\n{one}\n{one} Done."),
            [
                &[text("Let me see.\n")][..],
                &call("get_limit", arguments),
                &call("get_limit", arguments),
                &[text(" Done.")],
            ]
            .concat(),
        ),
        // No call of a known tool: the text stays whole.
        (one.replace("get_limit", "get_lim"), vec![text(&one.replace("get_limit", "get_lim"))]),
        (one.replace("name", "nome"), vec![text(&one.replace("name", "nome"))]),
        ("<tool_call>".to_owned(), vec![text("<tool_call>")]),
        ("a <tool_cal".to_owned(), vec![text("a <tool_cal")]),
        (" \n".to_owned(), vec![text(" \n")]),
        // The answer was cut off.
        (one[..one.len() - 17].to_owned(), call("get_limit", &arguments[..10]).to_vec()),
        (one[..one.len() - 4].to_owned(), call("get_limit", arguments).to_vec()),
    ] {
        if answer.len() == one.len() - 17 {
            let pieces = parse(ToolFormat::Hermes, &[&answer]);
            assert!(matches!(&pieces[..], [ToolPiece::Call(_), ToolPiece::Arguments(found)]
                if arguments.starts_with(found.as_str())));
            continue;
        }
        assert_eq!(parse(ToolFormat::Hermes, &[&answer]), expected, "{answer:?}");
    }
}

#[test]
fn llama_calls_are_whole_answers() {
    let one = "{\"name\": \"sum\", \"parameters\": {\"days\": [1, {}]}}";
    let arguments = "{\"days\": [1, {}]}";
    for (answer, expected) in [
        (one.to_owned(), call("sum", arguments).to_vec()),
        (format!("<|python_tag|>{one}"), call("sum", arguments).to_vec()),
        (format!("{one}; {one}"), [call("sum", arguments), call("sum", arguments)].concat()),
        (format!("As in {one}"), vec![text(&format!("As in {one}"))]),
        ("{\"name\": \"Ada\"}".to_owned(), vec![text("{\"name\": \"Ada\"}")]),
    ] {
        assert_eq!(parse(ToolFormat::Llama3, &[&answer]), expected, "{answer:?}");
    }
}

#[test]
fn mistral_calls_are_read_in_both_forms() {
    let item = "{\"name\": \"sum\", \"arguments\": {\"days\": 1}}";
    let arguments = "{\"days\": 1}";
    let with_id = "{\"name\": \"sum\", \"arguments\": {\"days\": 1}, \"id\": \"abc123DEF\"}";
    for (answer, expected) in [
        (format!("[TOOL_CALLS][{item}]"), call("sum", arguments).to_vec()),
        (
            format!("[TOOL_CALLS] [{with_id}, {item}]"),
            [call("sum", arguments), call("sum", arguments)].concat(),
        ),
        (
            "[TOOL_CALLS]sum[ARGS]{\"days\": 1}[TOOL_CALLS]get_limit{}".to_owned(),
            [call("sum", arguments), call("get_limit", "{}")].concat(),
        ),
        ("[TOOL_CALLS]".to_owned(), vec![text("[TOOL_CALLS]")]),
        ("[TOOL]".to_owned(), vec![text("[TOOL]")]),
    ] {
        assert_eq!(parse(ToolFormat::Mistral, &[&answer]), expected, "{answer:?}");
    }
}

#[test]
fn elements_become_json() {
    let start = "<tool_call>\n<function=get_limit>\n";
    let end = "</function>\n</tool_call>";
    for (inner, expected) in [
        ("", "{}"),
        ("<parameter=plan>\n12\n</parameter>\n", "{\"plan\": \"12\"}"),
        ("<parameter=plan>\na \"b\"\n\n</parameter>\n", "{\"plan\": \"a \\\"b\\\"\\n\"}"),
        (
            "<parameter=days>\n12\n</parameter>\n<parameter=deep>\n{\"a\": []}\n</parameter>\n",
            "{\"days\": 12, \"deep\": {\"a\": []}}",
        ),
        ("<parameter=days>\nmany\n</parameter>\n", "{\"days\": \"many\"}"),
        ("<parameter=other>True</parameter>", "{\"other\": true}"),
        ("<parameter=plan></parameter>", "{\"plan\": \"\"}"),
    ] {
        let answer = format!("{start}{inner}{end}");
        let expected = call("get_limit", expected);
        assert_eq!(parse(ToolFormat::Qwen3Coder, &[&answer]), expected, "{inner:?}");
    }
    let left = format!("{start}then text");
    let expected = [&call("get_limit", "{}")[..], &[text("\nthen text")]].concat();
    assert_eq!(parse(ToolFormat::Qwen3Coder, &[&left]), expected);
}

#[test]
fn format_is_told_by_template() {
    for (source, format) in [
        ("{{ '<tool_call>' }}<function=x>", Some(ToolFormat::Qwen3Coder)),
        ("{{ '<tool_call>' }}", Some(ToolFormat::Hermes)),
        ("[TOOL_CALLS]", Some(ToolFormat::Mistral)),
        ("<|python_tag|>", Some(ToolFormat::Llama3)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(format_of_template(source), format, "{source}");
    }
}

/// Pieces of calls in all forms, and text.
const PIECES: &str = "(<tool_call>|</tool_call>|\\{\"name\": \"|get_limit|sum|\", \"arguments\": \\{|\
     \", \"parameters\": \\{|\\}|<function=|>|<parameter=plan>|<parameter=days>|</parameter>|\
     </function>|\\[TOOL_CALLS\\]|\\[ARGS\\]|\\[|\\]|; |<\\|python_tag\\|>|\"|\\\\|\n| |,|[a-cé]|1){0,6}";

proptest! {
    #[test]
    fn calls_do_not_depend_on_pieces(pieces in prop::collection::vec(PIECES, 0..12)) {
        let whole = pieces.concat();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let characters: Vec<String> = whole.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        for format in ALL {
            let expected = parse(format, &[&whole]);
            prop_assert_eq!(parse(format, &pieces), &expected[..], "{}", format);
            prop_assert_eq!(parse(format, &characters), &expected[..], "{}", format);
        }
    }

    /// An answer without a call is its own text.
    #[test]
    fn text_without_call_is_whole(pieces in prop::collection::vec(PIECES, 0..12)) {
        let whole = pieces.concat();
        for format in ALL {
            let found = parse(format, &[&whole]);
            if !found.iter().any(|piece| matches!(piece, ToolPiece::Call(_))) {
                prop_assert_eq!(found.into_iter().map(|piece| match piece {
                    ToolPiece::Text(text) => text,
                    other => format!("{other:?}"),
                }).collect::<String>(), &whole[..], "{}", format);
            }
        }
    }

    /// The text that is held back is at most the beginning of one call.
    #[test]
    fn held_text_is_short(pieces in prop::collection::vec(PIECES, 0..12)) {
        for format in ALL {
            let mut parser = ToolParser::new(format, tools());
            for piece in &pieces {
                parser.push(piece, &mut Vec::new());
                prop_assert!(parser.held_bytes() <= 128, "{} {}", format, parser.held_bytes());
            }
        }
    }

    /// A call between texts keeps its arguments byte for byte.
    #[test]
    fn arguments_are_verbatim(before in "[a-z {]{0,9}", value in "[a-z<>{}/é]{0,20}") {
        let arguments = json!({ "plan": value }).to_string();
        let answer = format!("x{before}<tool_call>{{\"name\":\"sum\",\"arguments\":{arguments}}}</tool_call>y");
        let expected =
            [&[text(&format!("x{before}"))][..], &call("sum", &arguments), &[text("y")]].concat();
        prop_assert_eq!(parse(ToolFormat::Hermes, &[&answer]), expected);
    }
}
