//! The tokenizer and the chat template: a user's text never becomes a control
//! token and is not lost. Hostile files are refused or kept within their allowance.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use tollgate_domain::{TextDelta, ToolFormat, UtcTime};
use tollgate_text::{
    AnswerPiece, AnswerSyntax, Chat, ChatMessage, ChatTemplate, ParameterKind, ReasoningSyntax,
    Role, TextStream, Tokenizer, TokenizerConfig, ToolSignature, ToolSignatures, encode_chat,
};

const NOW: UtcTime = UtcTime(1_800_000_000_000_000_000);

/// Encodes a prompt: no token is a control token, and decoding returns the text, at
/// once and in pieces.
pub(crate) fn prompt(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (tokenizer, _) = demo();
    let tokens = tokenizer.encode(&text).expect("the demo model encodes everything");
    assert!(tokens.iter().all(|&token| !tokenizer.is_control(token)), "{text:?}");
    assert_eq!(tokenizer.decode(&tokens), text);
    let mut stream = TextStream::new(Arc::clone(tokenizer));
    let mut pieces: String = tokens.iter().map(|&token| stream.push(token)).collect();
    pieces.push_str(&stream.finish());
    assert_eq!(pieces, text, "in pieces");
}

/// Encodes a chat: its control tokens depend on the template alone.
pub(crate) fn chat(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (tokenizer, template) = demo();
    let messages: Vec<ChatMessage> = text
        .split('\u{0}')
        .take(8)
        .zip([Role::System, Role::User, Role::Assistant, Role::User].into_iter().cycle())
        .map(|(content, role)| ChatMessage::new(role, content))
        .collect();
    let harmless: Vec<ChatMessage> =
        messages.iter().map(|it| ChatMessage::new(it.role, "x")).collect();
    let control = |messages: &[ChatMessage]| -> Vec<u32> {
        let chat = Chat::from(messages.to_vec());
        let tokens = encode_chat(tokenizer, template, &chat, NOW, usize::MAX).expect("it encodes");
        tokens.into_iter().filter(|&token| tokenizer.is_control(token)).collect()
    };
    assert_eq!(control(&messages), control(&harmless), "{text:?}");
}

/// Reads an answer with reasoning and calls of tools: the parts are the same for pieces of
/// any size, and an answer without a call is whole.
pub(crate) fn answer(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let kinds = [("plan", ParameterKind::Text), ("days", ParameterKind::Json)];
    let parameters = kinds.map(|(name, kind)| (name.to_owned(), kind)).into();
    let tools = [("get_limit".to_owned(), ToolSignature { parameters })];
    let tools = Arc::new(ToolSignatures::from(tools));
    for format in ToolFormat::ALL {
        for reasoning in [ReasoningSyntax::Absent, ReasoningSyntax::Marked, ReasoningSyntax::Open] {
            let syntax = AnswerSyntax { tools: Some((format, Arc::clone(&tools))), reasoning };
            let whole = parts(&syntax, &[&text]);
            let characters: Vec<&str> = text.split_inclusive(|_| true).collect();
            assert_eq!(parts(&syntax, &characters), whole, "{format} {text:?}");
            if let ([AnswerPiece::Content(content)], ReasoningSyntax::Absent) =
                (&whole[..], reasoning)
            {
                assert_eq!(content, &text, "{format}");
            }
        }
    }
}

/// Returns the parts of an answer that comes in `pieces`, with neighbours of one kind
/// joined.
fn parts(syntax: &AnswerSyntax, pieces: &[&str]) -> Vec<AnswerPiece> {
    let mut parser = syntax.parser().expect("it has parts");
    let mut found: Vec<AnswerPiece> =
        pieces.iter().flat_map(|piece| parser.push(&delta(piece))).collect();
    found.extend(parser.finish());
    let mut joined: Vec<AnswerPiece> = Vec::new();
    for piece in found {
        match (joined.last_mut(), piece) {
            (Some(AnswerPiece::Content(last)), AnswerPiece::Content(text))
            | (Some(AnswerPiece::Reasoning(last)), AnswerPiece::Reasoning(text))
            | (Some(AnswerPiece::Arguments(last)), AnswerPiece::Arguments(text)) => {
                last.push_str(&text);
            }
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

fn delta(text: &str) -> TextDelta {
    TextDelta { text: text.to_owned(), tokens: 1, ..TextDelta::default() }
}

/// Renders a template, which must end within its allowance.
pub(crate) fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let Ok(template) = ChatTemplate::compile(source, &TokenizerConfig::default()) else { return };
    let (tokenizer, _) = demo();
    let content = "What is a rate limit?".to_owned();
    let messages = Chat::from(vec![ChatMessage::new(Role::User, content)]);
    if let Ok(tokens) = encode_chat(tokenizer, &template, &messages, NOW, usize::MAX) {
        assert!(tokens.len() < 64 << 20);
    }
}

/// Reads a tokenizer's file: it is refused, or it encodes text without control
/// tokens.
pub(crate) fn tokenizer_file(data: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(data) else { return };
    if let Ok(tokens) = tokenizer.encode("Hello, <s> world!") {
        for token in tokens {
            assert!(!tokenizer.is_control(token), "{token}");
            let _ = tokenizer.token_bytes(token);
        }
    }
}

fn demo() -> &'static (Arc<Tokenizer>, ChatTemplate) {
    static MADE: OnceLock<(Arc<Tokenizer>, ChatTemplate)> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tollgate-demo");
        let read = |name: &str| std::fs::read(folder.join(name)).expect("the shipped model");
        let tokenizer = Tokenizer::from_json(&read("tokenizer.json")).expect("a tokenizer");
        let config =
            TokenizerConfig::from_json(&read("tokenizer_config.json")).expect("its config");
        let source = config.chat_template.clone().expect("a template");
        let template = ChatTemplate::compile(&source, &config).expect("it compiles");
        (Arc::new(tokenizer), template)
    })
}
