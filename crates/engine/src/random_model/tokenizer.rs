//! A byte-level tokenizer for any vocabulary size: one token for each byte, three control
//! tokens, and made-up words for the remaining ids. Every output of a random model is
//! therefore text.

use serde_json::{Map, Value, json};

/// Token that ends a text.
pub(super) const END_OF_TEXT: u32 = 256;
/// Token that starts a message.
const START_OF_TURN: u32 = 257;
/// Token that ends a message and so a completion.
pub(super) const END_OF_TURN: u32 = 258;
/// First id after bytes and control tokens.
pub(super) const CONTROL_END: u32 = 259;

/// Returns the content of `tokenizer.json`.
pub(super) fn json(vocabulary: u32) -> Value {
    let mut tokens = Map::new();
    for (byte, letter) in byte_letters().into_iter().enumerate() {
        tokens.insert(letter.to_string(), json!(byte));
    }
    for id in CONTROL_END..vocabulary {
        // Byte-level tokenizers write a space as a G with a dot.
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

/// Returns the content of `tokenizer_config.json`, with a chat template.
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

/// Returns the letter for each byte in a byte-level vocabulary: the byte itself if it is
/// printable, otherwise a letter from 256 on, in order.
#[expect(clippy::expect_used, reason = "Unicode has far more than 256 letters from 256 on")]
fn byte_letters() -> [char; 256] {
    // Byte-level vocabularies avoid control characters and spaces.
    let mut spare = (256..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte as u8),
        _ => spare.next().expect("letters from 256 on are many"),
    })
}
