//! Measures the growth of encoding time with the length of the text, for texts
//! that slow tokenizers down. The ratio time(4n) / time(n) should stay near 4.
//!
//! `cargo run --release -p tollgate-text --example tokenizer_growth -- tokenizer.json`

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]
#![allow(clippy::expect_used, reason = "a measuring program stops at what it does not expect")]

use std::time::{Duration, Instant};

use tollgate_text::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("name a tokenizer.json")?;
    let tokenizer = Tokenizer::from_json(&std::fs::read(path)?)?;
    let smallest = 64 << 10;
    for (name, unit) in [
        ("one letter", "a"),
        ("spaces", " "),
        ("newlines", "\n"),
        ("digits", "1"),
        ("words", "the quick brown fox "),
        ("no spaces", "abcdefghijklmnopqrstuvwxyz"),
        ("brackets", "<"),
        ("control tokens", "<|im_start|>"),
        ("emoji", "\u{1f469}\u{200d}\u{1f680}"),
        ("combining", "e\u{301}\u{302}\u{303}"),
        ("han", "\u{4e16}\u{754c}"),
    ] {
        let times: Vec<Duration> = [smallest, 4 * smallest, 16 * smallest]
            .into_iter()
            .map(|bytes| fastest(&tokenizer, &unit.repeat(bytes / unit.len())))
            .collect();
        let ratio = |a: usize, b: usize| times[b].as_secs_f64() / times[a].as_secs_f64();
        println!(
            "{name:16} {:9.1?} for 1 MiB   4n/n {:5.2}   16n/4n {:5.2}",
            times[2],
            ratio(0, 1),
            ratio(1, 2)
        );
    }
    Ok(())
}

fn fastest(tokenizer: &Tokenizer, text: &str) -> Duration {
    (0..3)
        .map(|_| {
            let start = Instant::now();
            let ids = tokenizer.encode(text).expect("encodes");
            assert!(!ids.is_empty());
            start.elapsed()
        })
        .min()
        .expect("three runs")
}
