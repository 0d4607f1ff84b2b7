//! A byte-level tokenizer that fits any vocabulary: a token for each byte,
//! three control tokens, and made-up words for the rest, so that whatever a
//! random model says is text.

use serde_json::{Map, Value, json};

/// Ends a text.
pub(super) const END_OF_TEXT: u32 = 256;
/// Begins a message.
const START_OF_TURN: u32 = 257;
/// Ends a message, and so a completion.
pub(super) const END_OF_TURN: u32 = 258;
/// The first token behind bytes and control tokens.
pub(super) const CONTROL_END: u32 = 259;

/// Its `tokenizer.json`.
pub(super) fn json(vocabulary: u32) -> Value {
    let mut tokens = Map::new();
    for (byte, letter) in byte_letters().into_iter().enumerate() {
        tokens.insert(letter.to_string(), json!(byte));
    }
    for id in CONTROL_END..vocabulary {
        // G with a dot is how byte-level tokenizers write a space.
        tokens.insert(format!("\u{120}w{id}"), json!(id));
    }
    let control = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        })
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [
            control(END_OF_TEXT, "<|endoftext|>"),
            control(START_OF_TURN, "<|im_start|>"),
            control(END_OF_TURN, "<|im_end|>"),
        ],
        "normalizer": null,
        "pre_tokenizer": byte_level(),
        "post_processor": null,
        "decoder": byte_level(),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": tokens, "merges": [],
        },
    })
}

/// Its `tokenizer_config.json`, with a chat template.
pub(super) fn config(context: u32) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": false,
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": null,
        "clean_up_tokenization_spaces": false,
        "model_max_length": context,
        "chat_template": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    })
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true })
}

/// The letter that stands for each byte in a byte-level vocabulary: itself if
/// it prints, else one of those from 256 on, in order.
fn byte_letters() -> [char; 256] {
    let mut spare = (256..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte as u8),
        _ => spare.next().expect("letters from 256 on are many"),
    })
}
