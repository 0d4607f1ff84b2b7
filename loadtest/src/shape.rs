//! Requests of extreme shape: each one is small for its sender and large in one
//! respect for the gateway.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::outcome::Question;

/// The shape of a request. Sizes follow the default limits of `[gateway.requests]`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// 2,048 short messages, beyond the context of a small model.
    ManyMessages,
    /// Nearly 2 MiB of text in which each character is a JSON escape.
    EscapedText,
    /// Nearly 2 MiB of short words.
    LongText,
    /// Nearly 1 MiB of text for a model that does not exist.
    UnknownModel,
    /// A streamed answer of one token.
    OneTokenStream,
    /// Sixteen prompts with eight choices each, with echo and log-probabilities.
    ManyPrompts,
    /// A prompt of 900 words with a long answer.
    LongPrompt,
    /// A long answer with an idempotency key that no other request has.
    OwnIdempotencyKey,
    /// A stream with 300 entries in `logit_bias`.
    ManyBiases,
    /// A long stream with four stop strings of 256 bytes.
    LongStops,
    /// Eight streamed choices with the log-probabilities of twenty alternatives.
    ManyChoices,
    /// A streamed answer of 64 tokens under a usual schema.
    FormedAnswer,
    /// A streamed answer of 64 tokens without a form.
    FreeAnswer,
    /// Short answers under schemas and expressions that are costly to compile or to follow. Each
    /// of 448 is different, so that no compiled form is used twice.
    SchemaBombs,
}

impl Shape {
    /// Returns the requests of this shape for `model`, which take turns.
    pub fn questions(self, model: &str) -> Vec<Question> {
        let chat = |content: String, more: Value| chat(model, &content, more);
        let question = match self {
            Self::ManyMessages => {
                let message = json!({ "role": "user", "content": "hello there" });
                asked(Question::CHAT, json!({ "model": model, "messages": vec![message; 2_048] }))
            }
            Self::EscapedText => {
                // Six bytes on the wire for two of text. A serializer would not escape
                // them.
                let text = r"\u00e9".repeat(LONG / 6);
                let body = format!(
                    r#"{{"model":"{model}","messages":[{{"role":"user","content":"{text}"}}]}}"#
                );
                Question::chat(body.into(), false)
            }
            Self::LongText => chat("ab ".repeat(LONG / 3), json!({})),
            Self::UnknownModel => chat("ab ".repeat(LONG / 6), json!({ "model": "no-such-model" })),
            Self::OneTokenStream => {
                chat("Say hello.".to_owned(), json!({ "max_tokens": 1, "stream": true }))
            }
            Self::ManyPrompts => asked(
                Question::COMPLETIONS,
                json!({
                    "model": model, "prompt": vec!["Count from 1 to 20."; 16], "n": 8,
                    "echo": true, "logprobs": 5, "max_tokens": 4,
                }),
            ),
            Self::LongPrompt => {
                chat("word ".repeat(900), json!({ "max_tokens": 100, "stream": true }))
            }
            Self::OwnIdempotencyKey => Question {
                idempotency_key: Some("drill-".to_owned()),
                ..chat(counting(), json!({ "max_tokens": 400 }))
            },
            Self::ManyBiases => {
                let biases = (0..300).map(|token| (token.to_string(), json!(0.01)));
                let biases: Map<String, Value> = biases.collect();
                let more = json!({ "logit_bias": biases, "max_tokens": 200, "stream": true });
                chat(counting(), more)
            }
            Self::LongStops => {
                let stops: Vec<String> = (0..4).map(|n| n.to_string().repeat(256)).collect();
                chat(counting(), json!({ "stop": stops, "max_tokens": 900, "stream": true }))
            }
            Self::ManyChoices => chat(
                counting(),
                json!({
                    "n": 8, "logprobs": true, "top_logprobs": 20, "max_tokens": 100,
                    "stream": true,
                }),
            ),
            Self::FormedAnswer => {
                // Fifty items never fit into 64 tokens, so no answer ends early.
                let item = json!({ "type": "object", "required": ["name", "count"],
                    "additionalProperties": false, "properties": {
                        "name": { "type": "string", "maxLength": 12 },
                        "count": { "type": "integer", "minimum": 0 } } });
                let schema = json!({ "type": "array", "items": item, "minItems": 50 });
                let form = json!({ "type": "json_schema",
                    "json_schema": { "name": "list", "schema": schema } });
                let more = json!({ "response_format": form, "max_tokens": 64, "stream": true });
                chat(counting(), more)
            }
            Self::FreeAnswer => chat(counting(), json!({ "max_tokens": 64, "stream": true })),
            Self::SchemaBombs => {
                return (0..64).flat_map(|number| bombs(model, number)).collect();
            }
        };
        vec![question]
    }
}

/// Bytes of a long text: a body of 2 MiB with some space for the other fields.
const LONG: usize = (2 << 20) - 4_096;

/// Returns one request for each way in which a form is costly. `number` makes each form new.
fn bombs(model: &str, number: u32) -> Vec<Question> {
    let under = |schema: Value| {
        let form =
            json!({ "type": "json_schema", "json_schema": { "name": "b", "schema": schema } });
        json!({ "response_format": form, "max_tokens": 64, "temperature": 1 })
    };
    // The same target by 24 ways at each of 15 levels.
    let level = |level: u32| {
        let next = json!({ "$ref": format!("#/$defs/d{}_{number}", level + 1) });
        (format!("d{level}_{number}"), json!({ "anyOf": vec![next; 24] }))
    };
    let mut levels: Map<String, Value> = (0..15).map(level).collect();
    levels.insert(format!("d15_{number}"), json!({ "type": "integer" }));
    // Refused: the compiler of forms would overflow its stack.
    let link =
        |link: u32| (format!("d{link}"), json!({ "$ref": format!("#/$defs/d{}", link + 1) }));
    let chain: Map<String, Value> = (0..500).map(link).collect();
    let optional: Map<String, Value> = (0..200)
        .map(|name| (format!("p{number}_{name}"), json!({ "type": "string", "maxLength": 40 })))
        .collect();
    let alternatives: Vec<Value> = (0..64)
        .map(|one| {
            json!({ "type": "object", "properties": { format!("same{number}"): {},
            format!("p{one}"): { "type": "number" } }, "additionalProperties": false })
        })
        .collect();
    let patterns: Map<String, Value> = (0..8)
        .map(|name| {
            (
                format!("p{name}"),
                json!({ "type": "string",
            "pattern": format!("^(a|b)*a(a|b){{{}}}$", 20 + name + number) }),
            )
        })
        .collect();
    let names: Vec<&String> = patterns.keys().collect();
    let patterns = json!({ "type": "object", "required": names, "properties": patterns });
    let strings = json!({ "type": "array", "items": { "type": "string",
        "minLength": 1_900 + number, "maxLength": 2_000 } });
    [
        under(json!({ "$ref": format!("#/$defs/d0_{number}"), "$defs": levels })),
        under(json!({ "$ref": "#/$defs/d0", "$defs": chain, "title": number.to_string() })),
        under(json!({ "type": "object", "properties": optional, "additionalProperties": false })),
        under(json!({ "anyOf": alternatives })),
        under(patterns),
        under(strings),
        // Nearly each character is a new state.
        json!({ "guided_regex": format!("[ab]*a[ab]{{{}}}", 30 + number), "max_tokens": 256,
            "temperature": 1 }),
    ]
    .map(|fields| chat(model, "Say a.", fields))
    .into()
}

fn counting() -> String {
    "Count from 1 to 400.".to_owned()
}

/// Returns a chat with one message, and the fields of `more` instead of the usual ones.
fn chat(model: &str, content: &str, more: Value) -> Question {
    let mut body = json!({
        "model": model, "temperature": 0,
        "messages": [{ "role": "user", "content": content }],
    });
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    asked(Question::CHAT, body)
}

fn asked(path: &'static str, body: Value) -> Question {
    let stream = body["stream"] == true;
    Question { path, body: body.to_string().into(), stream, idempotency_key: None }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn shapes_stay_within_default_body_limit() {
        use Shape::*;
        for shape in [
            ManyMessages,
            EscapedText,
            LongText,
            UnknownModel,
            OneTokenStream,
            ManyPrompts,
            LongPrompt,
            OwnIdempotencyKey,
            ManyBiases,
            LongStops,
            ManyChoices,
            FormedAnswer,
            FreeAnswer,
            SchemaBombs,
        ] {
            for question in shape.questions("m") {
                assert!(question.body.len() < 2 << 20, "{shape:?}: {}", question.body.len());
                let body: Value = serde_json::from_slice(&question.body).expect("JSON");
                assert_eq!(question.stream, body["stream"] == true, "{shape:?}");
            }
        }
    }

    #[test]
    fn schema_bombs_are_all_different() {
        let bombs = Shape::SchemaBombs.questions("m");
        let bodies: HashSet<&[u8]> = bombs.iter().map(|bomb| &bomb.body[..]).collect();
        assert_eq!((bodies.len(), bombs.len()), (448, 448));
    }
}
