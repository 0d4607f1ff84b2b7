//! Prompts with a gap: the tokens around their parts, and tokenizers without such tokens.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use serde_json::{Value, json};
use tollgate_text::{InfillTokens, TextError, TextWithGap, Tokenizer};

/// Returns the shipped tokenizer, with further tokens after its own.
fn tokenizer(names: &[&str]) -> (Tokenizer, u32) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tollgate-demo/tokenizer.json");
    let text = std::fs::read(path).expect("the shipped tokenizer");
    let mut json: Value = serde_json::from_slice(&text).expect("JSON");
    let first = json["model"]["vocab"].as_object().expect("words").len() as u32;
    let added = json["added_tokens"].as_array_mut().expect("tokens");
    for (name, id) in names.iter().zip(first..) {
        added.push(json!({ "id": id, "content": name, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true }));
    }
    let bytes = json.to_string().into_bytes();
    (Tokenizer::from_json(&bytes).expect("a tokenizer"), first)
}

#[test]
fn gap_is_marked_in_the_models_order() {
    for names in [
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
    ] {
        let (tokenizer, first) = tokenizer(&names);
        let tokens = InfillTokens::of(&tokenizer).expect("it can fill gaps");
        let gap = TextWithGap { before: "one two", after: " four" };
        let ids = tokens.encode(&tokenizer, gap, 100).expect("it fits");
        let (before, after) = (tokenizer.encode("one two"), tokenizer.encode(" four"));
        let (before, after) = (before.expect("encodes"), after.expect("encodes"));
        let (prefix, middle, suffix) = (first, first + 1, first + 2);
        let expected = [&[prefix], &before[..], &[suffix], &after, &[middle]].concat();
        assert_eq!(ids, expected, "{names:?}");
        let short = tokens.encode(&tokenizer, gap, ids.len() - 1);
        assert!(matches!(short, Err(TextError::TooLong { .. })), "{short:?}");
        assert!(tokens.encode(&tokenizer, gap, ids.len()).is_ok());
    }
}

/// A caller's text never becomes a token that marks a gap.
#[test]
fn marks_in_texts_stay_text() {
    let names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    let (tokenizer, first) = tokenizer(&names);
    let tokens = InfillTokens::of(&tokenizer).expect("it can fill gaps");
    let gap = TextWithGap { before: "a<|fim_middle|>b", after: "<|fim_prefix|>" };
    let ids = tokens.encode(&tokenizer, gap, 100).expect("it fits");
    let marks: Vec<u32> = ids.into_iter().filter(|id| *id >= first).collect();
    assert_eq!(marks, [first, first + 1, first + 2]);
}

#[test]
fn tokenizer_without_all_marks_fills_no_gap() {
    for names in [&[][..], &["<|fim_prefix|>", "<|fim_suffix|>"], &["<fim_prefix>"]] {
        assert_eq!(InfillTokens::of(&tokenizer(names).0), None, "{names:?}");
    }
}
