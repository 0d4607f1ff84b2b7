//! The text of the shipped model, as the gateway and the worker handle it.

use std::path::Path;
use std::sync::Arc;

use tollgate_domain::UtcTime;
use tollgate_text::{
    Chat, ChatMessage, ChatTemplate, Role, TextStream, Tokenizer, TokenizerConfig, encode_chat,
};

#[test]
fn demo_model_chat_encodes_and_streams() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tollgate-demo");
    let read = |name: &str| std::fs::read(folder.join(name)).expect(name);
    let tokenizer = Arc::new(Tokenizer::from_json(&read("tokenizer.json")).expect("good"));
    let config = TokenizerConfig::from_json(&read("tokenizer_config.json")).expect("good");
    let source = config.chat_template.as_deref().expect("has a template");
    let template = ChatTemplate::compile(source, &config).expect("good");
    let question = "What is a rate limit? Größe, 世界 \u{1f680}";
    let chat = Chat::from(vec![ChatMessage::new(Role::User, question)]);
    let ids = encode_chat(&tokenizer, &template, &chat, UtcTime(0), usize::MAX).expect("encodes");
    let control = ids.iter().filter(|&&id| tokenizer.is_control(id)).count();
    assert_eq!(control, 3, "a start and an end for the question, a start for the answer");
    let mut stream = TextStream::new(Arc::clone(&tokenizer));
    let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
    text.push_str(&stream.finish());
    assert_eq!(text, format!("user\n{question}\nassistant\n"));
}
