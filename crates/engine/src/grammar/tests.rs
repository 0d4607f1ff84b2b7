//! Tests of grammars over a small vocabulary of single bytes and a few words.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::Value;
use tollgate_domain::{CallForm, CallGrammar, Grammar};

use super::*;

/// Ids of the vocabulary: bytes 0 to 255, then these.
const END: u32 = 256;
const CALLS: u32 = 257;
const WORDS: [&str; 6] = ["{\"", "\": ", "\", \"", "true", "<tool", "_call>"];

fn compiler() -> GrammarCompiler {
    let mut tokens: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
    tokens.extend([b"<end>".to_vec(), b"[CALLS]".to_vec()]);
    tokens.extend(WORDS.map(|word| word.as_bytes().to_vec()));
    // A model may have more rows of embeddings than its tokenizer has tokens.
    tokens.extend([Vec::new(), Vec::new()]);
    GrammarCompiler::new(Vocabulary { tokens, controls: vec![END, CALLS], end_tokens: vec![END] })
        .expect("the vocabulary is whole")
}

/// Returns the mask of a choice, however long it takes.
fn mask(constraint: &Constraint) -> Option<Arc<TokenMask>> {
    (0..5_000).find_map(|_| {
        let mask = constraint.mask(&mut MaskWait::new());
        if mask.is_none() && constraint.unsampled() == Unsampled::Exceeded {
            return Some(None);
        }
        mask.map(Some)
    })?
}

/// Returns true if `text` can be an answer, byte by byte: whole if `whole`, else a beginning.
fn accepts(compiled: &CompiledGrammar, text: &str, whole: bool) -> bool {
    let constraint = compiled.of_request(Duration::ZERO).constraint();
    for byte in text.bytes() {
        if !mask(&constraint).is_some_and(|mask| mask.allows(u32::from(byte))) {
            return false;
        }
        constraint.advance(u32::from(byte));
    }
    let end = mask(&constraint).is_some_and(|mask| mask.allows(END));
    end == whole || !whole
}

fn schema(text: &str) -> Grammar {
    Grammar::JsonSchema(text.to_owned())
}

fn call(begin: &str, schema: &str, end: &str) -> CallForm {
    CallForm { begin: begin.to_owned(), schema: schema.to_owned(), end: end.to_owned() }
}

#[test]
fn masks_allow_answers_of_the_form_alone() {
    let compiler = compiler();
    let object = r#"{"type": "object", "properties": {"a": {"type": "integer"},
        "b": {"type": "string", "maxLength": 3}}, "required": ["a"],
        "additionalProperties": false}"#;
    let cases: [(Grammar, &[&str], &[&str]); 5] = [
        (
            Grammar::JsonObject,
            &["{}", r#"{"a": [1, null]}"#, r#"{ "a":"b"}"#],
            &["[]", "{", "{}}", "1", "{  }", "{\n}"],
        ),
        (
            schema(object),
            &[r#"{"a": 1}"#, r#"{"a":-7,"b":"xyz"}"#],
            &["{}", r#"{"a": 1.5}"#, r#"{"a": 1, "b": "four"}"#, r#"{"a": 1, "c": 2}"#],
        ),
        (Grammar::Regex("[a-c]{2}d?".into()), &["ab", "ccd"], &["a", "abc", "abdd", ""]),
        (
            Grammar::Choice(vec!["yes".into(), "no \"way\"\n".into()]),
            &["yes", "no \"way\"\n"],
            &["y", "no", "yess", "maybe"],
        ),
        (schema("true"), &["1", "\"a\"", "[true]"], &["", "yes"]),
    ];
    for (grammar, good, bad) in cases {
        let compiled = compiler.compile(&grammar).expect("it compiles");
        for text in good {
            assert!(accepts(&compiled, text, true), "{grammar:?} accepts {text}");
        }
        for text in bad {
            assert!(!accepts(&compiled, text, true), "{grammar:?} does not accept {text}");
        }
    }
}

#[test]
fn options_in_a_schema_do_not_end_enforcement() {
    let text = r#"{"x-guidance": {"lenient": true, "whitespace_flexible": true},
        "type": "object", "additionalProperties": false}"#;
    let compiled = compiler().compile(&schema(text)).expect("it compiles");
    assert!(accepts(&compiled, "{}", true));
    assert!(!accepts(&compiled, "{    }", true));
}

#[test]
fn calls_follow_free_text_unless_they_are_required() {
    let compiler = compiler();
    let arguments = r#"{"type": "object", "properties": {"n": {"type": "integer"}},
        "required": ["n"], "additionalProperties": false}"#;
    let calls = |required, separator: Option<&str>| {
        Grammar::Calls(CallGrammar {
            calls: vec![
                call("<tool_call>{\"name\": \"f\", \"arguments\": ", arguments, "}</tool_call>"),
                call("<tool_call>{\"name\": \"g\", \"arguments\": ", "{}", "}</tool_call>"),
            ],
            trigger: "<tool_call>".to_owned(),
            required,
            separator: separator.map(str::to_owned),
            content: None,
        })
    };
    let f = r#"<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>"#;
    let g = r#"<tool_call>{"name": "g", "arguments": {}}</tool_call>"#;
    let broken = r#"<tool_call>{"name": "f", "arguments": {"m": 1}}</tool_call>"#;
    let unknown = r#"<tool_call>{"name": "h", "arguments": {}}</tool_call>"#;
    let free = compiler.compile(&calls(false, Some("\n"))).expect("it compiles");
    for good in ["", "Hello <tool", f, g, &format!("Wait. {f}"), &format!("{f}\n{g}\n{f}")] {
        assert!(accepts(&free, good, true), "{good}");
    }
    for bad in
        [broken, unknown, &format!("Wait. {broken}"), &format!("{f}\n{broken}"), "<tool_call>"]
    {
        assert!(!accepts(&free, bad, true), "{bad}");
    }
    let required = compiler.compile(&calls(true, None)).expect("it compiles");
    assert!(accepts(&required, f, true));
    for bad in ["", "Hello", broken, &format!("{f}\n{g}")] {
        assert!(!accepts(&required, bad, true), "{bad}");
    }
}

#[test]
fn content_beside_calls_has_its_schema() {
    let compiler = compiler();
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer"}},
        "required": ["n"], "additionalProperties": false}"#;
    let calls = |trigger: &str, begin: &str, end: &str| {
        compiler
            .compile(&Grammar::Calls(CallGrammar {
                calls: vec![call(&format!("{trigger}{begin}"), schema, end)],
                trigger: trigger.to_owned(),
                required: false,
                separator: None,
                content: Some(schema.to_owned()),
            }))
            .expect("it compiles")
    };
    for (trigger, begin, end) in [
        ("<tool_call>", "{\"name\": \"f\", \"arguments\": ", "}</tool_call>"),
        ("[TOOLS]", "[{\"name\": \"f\", \"arguments\": ", "}]"),
    ] {
        let compiled = calls(trigger, begin, end);
        let called = format!("{trigger}{begin}{{\"n\": 1}}{end}");
        for good in [called.as_str(), "{\"n\": 1}"] {
            assert!(accepts(&compiled, good, true), "{good}");
        }
        for bad in ["", "Hello", "{\"m\": 1}", &format!("Hello {called}")] {
            assert!(!accepts(&compiled, bad, true), "{bad}");
        }
    }
}

#[test]
fn calls_begin_at_their_control_token() {
    let compiler = compiler();
    let grammar = |required| {
        Grammar::Calls(CallGrammar {
            calls: vec![call("[CALLS][{\"name\": \"f\", \"arguments\": ", "{}", "}]")],
            trigger: "[CALLS]".to_owned(),
            required,
            separator: None,
            content: None,
        })
    };
    let free = compiler.compile(&grammar(false)).expect("it compiles");
    // The characters of the control token are text like any other.
    assert!(accepts(&free, "[CALLS] me", true));
    for required in [false, true] {
        let compiled = compiler.compile(&grammar(required)).expect("it compiles");
        let constraint = compiled.of_request(Duration::ZERO).constraint();
        let first = mask(&constraint).expect("a first mask");
        assert!(first.allows(CALLS), "the control token begins a call");
        assert_eq!(first.allows(u32::from(b'H')), !required);
        constraint.advance(CALLS);
        for byte in br#"[{"name": "f", "arguments": {}}]"# {
            assert!(mask(&constraint).expect("a mask").allows(u32::from(*byte)));
            constraint.advance(u32::from(*byte));
        }
        let last: Vec<u32> = mask(&constraint).expect("a mask").tokens().collect();
        assert_eq!(last, [END]);
    }
}

#[test]
fn compilation_refuses_bad_grammars_with_a_reason() {
    let compiler = compiler();
    for (grammar, reason) in [
        (schema("{"), "the schema is not JSON"),
        (schema("[]"), "the schema is not an object"),
        (schema("false"), "the schema is not an object"),
        (schema(r#"{"type": "wish"}"#), "does not support"),
        (schema(r#"{"$ref": "https://example.com/schema"}"#), "does not support"),
        (schema(r#"{"type": "integer", "minimum": 3, "maximum": 2}"#), "greater than"),
        (Grammar::Regex("(".into()), "regular expressions"),
        (Grammar::Regex(r"(?=a)b".into()), "regular expressions"),
        (
            Grammar::Calls(CallGrammar {
                calls: vec![call("x", "{}", "")],
                trigger: "<tool_call>".to_owned(),
                required: true,
                separator: None,
                content: None,
            }),
            "does not begin with the trigger",
        ),
    ] {
        let error = compiler.compile(&grammar).expect_err("it is refused").to_string();
        assert!(error.contains(reason), "{grammar:?}: {error}");
        assert!(!error.contains('\n') && error.chars().count() <= 400, "{error}");
    }
}

#[test]
fn choices_of_one_grammar_share_no_state() {
    let compiled = compiler().compile(&Grammar::Choice(vec!["ab".into(), "cd".into()]));
    let request = compiled.expect("it compiles").of_request(Duration::from_nanos(7));
    let (one, other) = (request.constraint(), request.constraint());
    one.advance(u32::from(b'a'));
    other.advance(u32::from(b'c'));
    let tokens = |constraint| -> Vec<u32> { mask(constraint).expect("a mask").tokens().collect() };
    assert_eq!(tokens(&one), [u32::from(b'b')]);
    assert_eq!(tokens(&other), [u32::from(b'd')]);
    assert!(request.spent() > Duration::from_nanos(7), "masks count as host time");
}

#[test]
fn long_answer_outlives_its_first_lexer() {
    // Ten states a character: without a new lexer the bound of states ends this answer.
    let text =
        r#"{"type": "array", "items": {"type": "string", "minLength": 990, "maxLength": 1000}}"#;
    let compiled = compiler().compile(&schema(text)).expect("it compiles");
    let long = format!("\"{}\"", "x".repeat(990));
    let answer = format!("[{long}, {long}, {long}]");
    assert!(accepts(&compiled, &answer, true));
}

#[test]
fn answer_beyond_its_grammars_bounds_is_reported() {
    // The lexer must remember the last 31 characters, so nearly each one is a new state.
    let compiled =
        compiler().compile(&Grammar::Regex("[ab]*a[ab]{30}".into())).expect("it compiles");
    let constraint = compiled.of_request(Duration::ZERO).constraint();
    let mut state = 1_u32;
    let exceeded = (0..20_000).any(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let token = u32::from(if state >> 31 == 0 { b'a' } else { b'b' });
        let is_over = mask(&constraint).is_none();
        if !is_over {
            constraint.advance(token);
        }
        is_over
    });
    assert!(exceeded, "the lexer has too many states sooner or later");
    assert_eq!(constraint.unsampled(), Unsampled::Exceeded);
    // The error stays in this choice.
    let another = compiled.of_request(Duration::ZERO).constraint();
    another.advance(u32::from(b'a'));
    assert!(mask(&another).is_some());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any way through the masks of a schema ends in JSON of the schema.
    #[test]
    fn random_walk_ends_in_valid_json(seed in any::<u64>()) {
        let text = r#"{"type": "object", "properties": {
            "kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2}},
            "required": ["kind", "count", "tags"], "additionalProperties": false}"#;
        let compiled = compiler().compile(&schema(text)).expect("it compiles");
        let constraint = compiled.of_request(Duration::ZERO).constraint();
        let (mut answer, mut state) = (Vec::new(), seed);
        for _ in 0..400 {
            let allowed: Vec<u32> = mask(&constraint).expect("a mask").tokens().collect();
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let token = allowed[(state >> 33) as usize % allowed.len()];
            if token == END {
                break;
            }
            match token {
                byte @ 0..=255 => answer.push(byte as u8),
                word => answer.extend(WORDS[(word - 258) as usize].bytes()),
            }
            constraint.advance(token);
        }
        let value: Value = serde_json::from_slice(&answer).expect("JSON");
        prop_assert!(matches!(value["kind"].as_str(), Some("a" | "b")));
        prop_assert!(value["count"].as_u64().is_some_and(|count| count < 100));
        let tags = value["tags"].as_array().expect("a list");
        prop_assert!(tags.len() <= 2);
        prop_assert!(tags.iter().all(|tag| tag.as_str().is_some_and(|tag| tag.chars().count() <= 2)));
        prop_assert_eq!(value.as_object().map(|fields| fields.len()), Some(3));
    }
}
