//! Measures forms of answers: the time to compile a schema, and the time to compute each mask, by
//! the threads that a worker uses. Prints one line of JSON.
//!
//! `cargo run -p tollgate-engine --example grammar_speed -- TOKENS SEED`
//!
//! `TOKENS` has the bytes of one token in each line, in hexadecimal digits and in the order of ids.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_domain::Grammar;
use tollgate_engine::grammar::{
    COMPILE_STACK, CompiledGrammar, Constraint, GrammarCompiler, MaskWait, TokenMask, Unsampled,
    Vocabulary,
};

/// Answers under each schema.
const ANSWERS: u64 = 6;
/// Tokens of an answer at most.
const MOST_TOKENS: usize = 300;

fn main() -> Result<(), Box<dyn Error>> {
    // A compilation needs more stack than the first thread has.
    let measuring = std::thread::Builder::new().stack_size(COMPILE_STACK);
    let measured = measuring.spawn(|| measure().map_err(|error| error.to_string()))?.join();
    println!("{}", measured.map_err(|_| "the measuring thread panicked")??);
    Ok(())
}

fn measure() -> Result<Value, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("which tokens?")?;
    let seed: u64 = arguments.next().ok_or("which seed?")?.parse()?;
    let mut tokens = std::fs::read_to_string(path)?
        .lines()
        .map(bytes_of)
        .collect::<Option<Vec<Vec<u8>>>>()
        .ok_or("a line is not hexadecimal")?;
    let end = tokens.len() as u32;
    tokens.push(b"<|im_end|>".to_vec());
    let vocabulary = Vocabulary { tokens, controls: vec![end], end_tokens: vec![end] };
    let compiler = GrammarCompiler::new(vocabulary)?;
    let mut random = seed;
    let (mut compiled, mut masks, mut late) = (Vec::new(), Vec::new(), 0_u32);
    for schema in schemas() {
        let began = Instant::now();
        let grammar = compiler.compile(&Grammar::JsonSchema(schema.to_string()))?;
        compiled.push(began.elapsed());
        for _ in 0..ANSWERS {
            late += answer(&grammar, end, &mut random, &mut masks);
        }
    }
    compiled.sort_unstable();
    masks.sort_unstable();
    Ok(json!({
        "vocabulary": end, "compilations": compiled.len(), "masks": masks.len(), "late": late,
        "compile_p50_us": percentile(&compiled, 500), "compile_max_us": percentile(&compiled, 1_000),
        "mask_p50_us": percentile(&masks, 500), "mask_p99_us": percentile(&masks, 990),
        "mask_max_us": percentile(&masks, 1_000),
    }))
}

/// Draws an answer and notes the host time of each mask. Returns the number of late masks.
fn answer(grammar: &CompiledGrammar, end: u32, random: &mut u64, masks: &mut Vec<Duration>) -> u32 {
    let request = grammar.of_request(Duration::ZERO);
    let constraint = request.constraint();
    let (mut spent, mut late) = (Duration::ZERO, 0);
    let mut mask = await_mask(&constraint, &mut late);
    for _ in 0..MOST_TOKENS {
        let Some(allowed) = mask else { break };
        let token = draw(&allowed, random);
        if token == end {
            break;
        }
        constraint.advance(token);
        mask = await_mask(&constraint, &mut late);
        // The time is added before the mask is handed over.
        masks.push(request.spent() - spent);
        spent = request.spent();
    }
    late
}

/// Waits for a mask, as a step does, and counts the steps that would have gone on without it.
fn await_mask(constraint: &Constraint, late: &mut u32) -> Option<std::sync::Arc<TokenMask>> {
    loop {
        match constraint.mask(&mut MaskWait::new()) {
            Some(mask) => return Some(mask),
            None if constraint.unsampled() == Unsampled::Exceeded => return None,
            None => *late += 1,
        }
    }
}

/// Draws an allowed token. Every third draw prefers the tokens of one byte, so that strings and
/// lists end.
fn draw(mask: &TokenMask, random: &mut u64) -> u32 {
    let allowed: Vec<u32> = mask.tokens().collect();
    let short = allowed.partition_point(|&token| token < 256).max(1).min(allowed.len());
    let among = if next(random).is_multiple_of(3) { short } else { allowed.len() };
    allowed[(next(random) % among as u64) as usize]
}

/// Returns the next number of a generator (splitmix64).
fn next(random: &mut u64) -> u64 {
    *random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *random;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns the smallest time that `permille` of a thousand of the sorted `times` do not exceed,
/// in microseconds.
fn percentile(times: &[Duration], permille: usize) -> f64 {
    let rank = (times.len() * permille).div_ceil(1_000).max(1);
    times.get(rank - 1).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
}

fn bytes_of(line: &str) -> Option<Vec<u8>> {
    let digits = line.as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// Returns schemas as agents and extractors send them.
fn schemas() -> Vec<Value> {
    let text = json!({ "type": "string" });
    let object = |properties: Value| {
        let names: Vec<&String> =
            properties.as_object().into_iter().flatten().map(|it| it.0).collect();
        json!({ "type": "object", "required": names, "additionalProperties": false,
            "properties": properties })
    };
    let person = object(json!({ "name": text, "age": { "type": "integer", "minimum": 0,
        "maximum": 150 }, "email": { "type": ["string", "null"] } }));
    let names: Vec<String> = (0..200).map(|number| format!("category-{number}")).collect();
    let tools: Vec<Value> = (0..20)
        .map(|number| {
            object(json!({ "tool": { "const": format!("tool_{number}") },
            "path": text, "limit": { "type": "integer" } }))
        })
        .collect();
    vec![
        json!({ "type": "object" }),
        person.clone(),
        object(json!({ "people": { "type": "array", "items": person, "maxItems": 20 } })),
        object(json!({ "category": { "enum": names }, "confidence": { "type": "number",
            "minimum": 0, "maximum": 1 } })),
        json!({ "anyOf": tools }),
        json!({ "$defs": { "node": object(json!({ "value": text, "children": { "type": "array",
            "items": { "$ref": "#/$defs/node" } } })) }, "$ref": "#/$defs/node" }),
        object(json!({ "at": { "type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$" },
            "id": { "type": "string", "format": "uuid" }, "host": { "type": "string",
            "format": "ipv4" } })),
        object(json!({ "title": { "type": "string", "minLength": 3, "maxLength": 200 },
            "tags": { "type": "array", "items": { "type": "string", "maxLength": 20 } } })),
        json!({ "type": "object", "additionalProperties": { "type": "number" },
            "patternProperties": { "^x-": text } }),
    ]
}
