//! Random requests: bodies of random fields and sizes, sent and left in random ways.
//! A seed and a number always give the same shape, so that a bad one can be repeated.
//! Most shapes keep all rules of the API and the bounds of the default config, so that
//! the gateway works on them. The others break any rule.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::outcome::Question;
use crate::plan::Random;

/// A random request with the behaviour of its connection.
#[derive(Clone, Debug)]
pub(crate) struct RandomShape {
    /// A description in a few words.
    pub(crate) about: String,
    /// The request.
    pub(crate) question: Question,
    /// The behaviour of the client.
    pub(crate) manner: Manner,
    /// The number of equal requests at once.
    pub(crate) copies: u32,
}

/// The behaviour of a client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Manner {
    /// Sends everything on a kept HTTP/2 connection and reads for this time at most.
    Reads(Duration),
    /// Sends the body in this number of pieces over HTTP/1.1, with a pause after each.
    Drips(u32, Duration),
    /// Sends everything over HTTP/1.1, reads nothing, and leaves after this time.
    Ignores(Duration),
    /// Announces a longer body than it sends, and leaves after this time.
    PromisesMore(Duration),
}

/// The choice between a shape that keeps all rules and one that may break any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rules {
    Kept,
    Broken,
}

/// Milliseconds that a client reads at most. A client that reads should see the end of
/// most answers.
const LONGEST_READ: u64 = 800;

/// Milliseconds of a pause, or of a client that does not read.
const LONGEST_PAUSE: f64 = 40.0;

/// The largest text as a power of ten: a little more than the largest body.
const LARGEST_TEXT: f64 = 6.35;

/// The same for a shape that keeps the rules: with the answer it fits the context of the
/// shipped model (1,024 tokens), also if each byte is a token.
const LARGEST_VALID_TEXT: f64 = 2.6;

/// Tokens of the shipped model.
const VOCABULARY: usize = 2_048;

impl RandomShape {
    /// Returns shape `number` of `seed` for `model`.
    pub(crate) fn new(seed: u64, number: u64, model: &str) -> Self {
        // Both are spread over all bits, so that neighbours have nothing in common.
        let mut random = Random(seed.rotate_left(32) ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut about = Vec::new();
        let rules = if random.below(3) > 0 { Rules::Kept } else { Rules::Broken };
        let is_chat = random.below(3) > 0;
        let body = body(&mut random, (rules, is_chat), model, &mut about);
        let stream = body["stream"] == true;
        let text = match rules {
            Rules::Kept => body.to_string(),
            Rules::Broken => spoiled(&mut random, body.to_string(), &mut about),
        };
        let manner = manner(&mut random);
        let copies = if random.below(4) == 0 { 1 + random.below(12) as u32 } else { 1 };
        let path = if is_chat { Question::CHAT } else { Question::COMPLETIONS };
        let idempotency_key = (random.below(6) == 0).then(|| format!("shape-{seed}-{number}-"));
        if idempotency_key.is_some() {
            about.push("idempotency key".to_owned());
        }
        about.insert(0, format!("{copies} x {}, {} bytes", &path[4..], text.len()));
        about.push(format!("{manner:?}"));
        let question = Question { path, body: Bytes::from(text), stream, idempotency_key };
        Self { about: about.join(", "), question, manner, copies }
    }
}

fn manner(random: &mut Random) -> Manner {
    let pause = Duration::from_secs_f64(random.unit() * LONGEST_PAUSE / 1e3);
    match random.below(10) {
        0 => Manner::Drips(1 + random.below(4) as u32, pause / 4),
        1 => Manner::Ignores(pause),
        2 => Manner::PromisesMore(pause),
        3 | 4 => Manner::Reads(pause),
        _ => Manner::Reads(Duration::from_millis(LONGEST_READ)),
    }
}

fn body(
    random: &mut Random,
    (rules, is_chat): (Rules, bool),
    model: &str,
    about: &mut Vec<String>,
) -> Value {
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| {
        let shown = match value.to_string() {
            text if text.len() <= 16 => text,
            text => format!("{} bytes", text.len()),
        };
        about.push(format!("{name}: {shown}"));
        body.insert(name.to_owned(), value);
    };
    let is_other = rules == Rules::Broken && random.below(10) == 0;
    set("model", json!(if is_other { "other" } else { model }));
    if is_chat {
        set("messages", messages(random, rules));
    } else {
        set("prompt", prompts(random, rules));
    }
    let most: &[u64] = match rules {
        Rules::Kept => &[1, 2, 16, 100, 300],
        Rules::Broken => &[0, 1, 2, 16, 100, 900, 5_000, 1 << 40],
    };
    set("max_tokens", json!(pick(random, most)));
    for _ in 0..random.below(7) {
        match rules {
            Rules::Kept => valid_field(random, is_chat, &mut set),
            Rules::Broken => {
                let (name, value) = field(random, is_chat);
                set(name, value);
            }
        }
    }
    Value::Object(body)
}

fn messages(random: &mut Random, rules: Rules) -> Value {
    let (counts, allowed): (&[u64], usize) = match rules {
        Rules::Kept => (&[1, 1, 1, 1, 2, 3, 8, 20], 3),
        Rules::Broken => {
            let allowed = if random.below(10) == 0 { 5 } else { 3 };
            (&[0, 1, 1, 1, 1, 2, 30, 500, 2_048, 2_049], allowed)
        }
    };
    let count = pick(random, counts) as usize;
    let size = text_size(random, rules) / count.max(1);
    let roles = ["user", "system", "assistant", "developer", "tool"];
    let message = json!({
        "role": roles[random.below(allowed)],
        "content": text(random, size, rules),
    });
    json!(vec![message; count])
}

fn prompts(random: &mut Random, rules: Rules) -> Value {
    let count = match rules {
        Rules::Kept => pick(random, &[1, 1, 1, 2, 8, 16]),
        Rules::Broken => pick(random, &[1, 1, 1, 2, 8, 16, 17]),
    } as usize;
    let size = match rules {
        // Each prompt has a context of its own.
        Rules::Kept => text_size(random, rules),
        Rules::Broken => text_size(random, rules) / count,
    };
    if random.below(4) == 0 {
        let (token, length) = match rules {
            // The first ids are control tokens.
            Rules::Kept => (100 + random.below(VOCABULARY - 100), size),
            Rules::Broken => (random.below(VOCABULARY * 3 / 2), size / 8),
        };
        return json!(vec![vec![token; length]; count]);
    }
    json!(vec![text(random, size, rules); count])
}

/// Sets an optional field to a value that every rule allows.
fn valid_field(random: &mut Random, is_chat: bool, set: &mut impl FnMut(&str, Value)) {
    match random.below(13) {
        0 | 1 => set("stream", json!(true)),
        2 => set("n", json!(1 + random.below(8))),
        3 if is_chat => {
            set("logprobs", json!(true));
            set("top_logprobs", json!(random.below(21)));
        }
        3 => set("logprobs", json!(random.below(6))),
        4 if !is_chat => set("echo", json!(true)),
        4 | 5 => {
            let count = pick(random, &[1, 300]);
            let entry = |token: u64| (token.to_string(), json!(1));
            set("logit_bias", Value::Object((0..count).map(entry).collect()));
        }
        6 => {
            let stop = "x".repeat(pick(random, &[1, 255, 256]) as usize);
            set("stop", json!(vec![stop; 1 + random.below(4)]));
        }
        7 => set("temperature", json!(random.unit() * 2.0)),
        8 => set("top_p", json!(0.01 + random.unit() * 0.99)),
        9 => set("seed", json!(random.below(1 << 40))),
        10 => set("repetition_penalty", json!(0.1 + random.unit() * 9.0)),
        11 => set("min_p", json!(random.unit())),
        _ => set("frequency_penalty", json!(random.unit() * 4.0 - 2.0)),
    }
}

/// Returns an optional field. Some values are beyond the limits.
fn field(random: &mut Random, is_chat: bool) -> (&'static str, Value) {
    match random.below(15) {
        0 | 1 => ("stream", json!(true)),
        2 => ("n", json!(random.below(10))),
        3 if is_chat => ("top_logprobs", json!(random.below(22))),
        3 => ("echo", json!(true)),
        4 if is_chat => ("logprobs", json!(true)),
        4 => ("logprobs", json!(random.below(7))),
        5 => {
            let count = pick(random, &[1, 300, 301, 2_000]);
            let entry = |token: u64| (token.to_string(), json!(1));
            ("logit_bias", Value::Object((0..count).map(entry).collect()))
        }
        6 => {
            let size = pick(random, &[0, 1, 255, 256, 257]) as usize;
            let stop = text(random, size, Rules::Broken);
            ("stop", json!(vec![stop; 1 + random.below(5)]))
        }
        7 => ("temperature", json!(random.unit() * 2.2)),
        8 => ("top_p", json!(random.unit())),
        9 => ("seed", json!(random.below(usize::MAX))),
        10 => ("repetition_penalty", json!(random.unit() * 11.0)),
        11 => ("top_k", json!(random.below(3_000))),
        12 => ("min_p", json!(random.unit() * 1.1)),
        13 => ("metadata", nested(random.below(40))),
        _ => ("frequency_penalty", json!(random.unit() * 4.2 - 2.1)),
    }
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(json!(1), |inner, _| json!({ "a": inner }))
}

/// Returns a size in bytes: most are small, and of those that break the rules about a
/// tenth is beyond 100,000.
fn text_size(random: &mut Random, rules: Rules) -> usize {
    let power = random.unit();
    match rules {
        Rules::Kept => 10f64.powf(LARGEST_VALID_TEXT * power) as usize,
        Rules::Broken => 10f64.powf(LARGEST_TEXT * power * power) as usize,
    }
}

fn text(random: &mut Random, size: usize, rules: Rules) -> String {
    let parts = ["word ", "a", "9 8 7 ", " ", "\u{e9}", "\n", "\u{1f600}", "<|im_end|>", "\u{0}"];
    let (allowed, least) = match rules {
        // A text that is not empty, without control characters and the marks of roles.
        Rules::Kept => (7, 1),
        Rules::Broken => (parts.len(), 0),
    };
    let part = parts[random.below(allowed)];
    part.repeat((size / part.len()).max(least))
}

/// Returns the text, which in one of twenty cases is no valid JSON any more.
fn spoiled(random: &mut Random, mut text: String, about: &mut Vec<String>) -> String {
    match random.below(40) {
        0 => {
            about.push("cut off".to_owned());
            let end = (0..=text.len() / 2).rev().find(|&end| text.is_char_boundary(end));
            text.truncate(end.unwrap_or(0));
        }
        1 => {
            about.push("twice".to_owned());
            text = text.repeat(2);
        }
        _ => {}
    }
    text
}

fn pick(random: &mut Random, values: &[u64]) -> u64 {
    values[random.below(values.len())]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn shape_follows_seed_and_number() {
        let shape = |seed, number| {
            let shape = RandomShape::new(seed, number, "m");
            (shape.about, shape.question.body, shape.manner, shape.copies)
        };
        assert_eq!(shape(1, 7), shape(1, 7));
        assert_ne!(shape(1, 7), shape(1, 8));
        assert_ne!(shape(1, 7), shape(2, 7));
    }

    #[test]
    fn shapes_are_diverse_and_bounded() {
        let shapes: Vec<RandomShape> = (0..400).map(|n| RandomShape::new(3, n, "m")).collect();
        let distinct: BTreeSet<&str> = shapes.iter().map(|shape| shape.about.as_str()).collect();
        assert!(distinct.len() > 390, "{}", distinct.len());
        let count = |is: fn(&RandomShape) -> bool| shapes.iter().filter(|shape| is(shape)).count();
        assert!(count(|shape| shape.question.body.len() > 100_000) > 5);
        assert!(count(|shape| shape.question.body.len() < 1_000) > 100);
        assert!(count(|shape| shape.question.stream) > 40);
        assert!(count(|shape| shape.copies > 1) > 40);
        assert!(count(|shape| matches!(shape.manner, Manner::Drips(..))) > 10);
        // Escapes make a text six times as long at most, and one body in forty is
        // doubled.
        assert!(shapes.iter().all(|shape| shape.question.body.len() < 30 << 20));
    }
}
