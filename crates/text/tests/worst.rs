//! Limits on what a tokenizer reveals and costs. Threat T25: the texts of one caller
//! change nothing for the next. Threat T35: the cost of a text grows in proportion
//! to its length.
#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use tollgate_text::{TextError, Tokenizer};

/// A cache would make the second encoding of a text do other work than the first.
/// The work is counted by the allocator, which no other process disturbs. The
/// reference tokenizer has a word cache and is the control.
#[test]
fn encoding_work_ignores_earlier_texts() {
    let bytes = demo();
    let ours = Tokenizer::from_json(&bytes).expect("the shipped tokenizer");
    let cached = tokenizers::Tokenizer::from_bytes(&bytes).expect("the shipped tokenizer");
    let mut words = Words(7);
    let work = |encode: &dyn Fn(&str), text: &str| {
        let before = TAKEN.get();
        encode(text);
        let after = TAKEN.get();
        (after.0 - before.0, after.1 - before.1)
    };
    let by_us = |text: &str| drop(black_box(ours.encode(text)));
    let by_reference = |text: &str| drop(black_box(cached.encode_fast(text, false)));
    // One-time initialisation happens here, before anything is counted.
    by_us("a first text");
    by_reference("a first text");
    for _ in 0..50 {
        let text = words.text();
        assert_eq!(work(&by_us, &text), work(&by_us, &text), "{text}");
        assert_ne!(work(&by_reference, &text), work(&by_reference, &text), "the control: {text}");
    }
}

/// Counting stops at the limit: a prompt of ten times the limit takes as much work as one
/// that is just beyond the limit, but for splitting the text into words.
#[test]
fn encoding_stops_after_its_limit() {
    const MOST: usize = 200;
    let tokenizer = Tokenizer::from_json(&demo()).expect("the shipped tokenizer");
    let mut words = Words(7);
    let text: String = (0..200).map(|_| words.text()).collect::<Vec<_>>().join(" ");
    let all = tokenizer.encode_prompt(&text, usize::MAX).expect("it encodes").len();
    assert!(all > 10 * MOST, "{all} tokens");
    let work = |most: usize| {
        let before = TAKEN.get();
        let result = black_box(tokenizer.encode_prompt(&text, most));
        (result, TAKEN.get().0 - before.0)
    };
    let (whole, unlimited) = work(all);
    assert_eq!(whole.expect("exactly at its limit").len(), all);
    let (cut, limited) = work(MOST);
    let Err(TextError::TooLong { at_least }) = cut else { panic!("{cut:?}") };
    assert!((MOST + 1..all).contains(&at_least), "{at_least} of {all}");
    // Splitting the text into words is the rest of the work.
    assert!(limited * 2 < unlimited, "{limited} of {unlimited} allocations");
}

thread_local! {
    /// Allocations of this thread, and their bytes.
    static TAKEN: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

struct Counting;

// SAFETY: every call goes unchanged to the system's allocator; counting allocates
// nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The counter is gone while its thread ends.
        let _ = TAKEN.try_with(|taken| {
            let (times, bytes) = taken.get();
            taken.set((times + 1, bytes + layout.size()));
        });
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tests that `cargo xtask test --long` runs.
mod long {
    use super::*;

    /// T35 with the texts that slow tokenizers down. Linear growth gives a ratio of
    /// 4, quadratic growth 16. A long run of one letter is one word; its ratio is 4.5
    /// to 7 when it no longer fits the processor's caches, so the limit is 9.
    #[test]
    #[ignore = "long: a ratio of times wants a quiet machine"]
    fn encoding_cost_stays_proportional_to_length() {
        let tokenizer = Tokenizer::from_json(&demo()).expect("the shipped tokenizer");
        let kinds: [(&str, &str); 8] = [
            ("one letter", "a"),
            ("spaces", " "),
            ("newlines", "\n"),
            ("digits", "9"),
            ("control tokens", "<|im_start|>"),
            ("emoji", "\u{1f468}\u{200d}\u{1f469}"),
            ("accents", "e\u{301}\u{301}\u{301}"),
            ("contractions", "'s't've"),
        ];
        for (what, unit) in kinds {
            let time = |bytes: usize| {
                let text = unit.repeat(bytes / unit.len());
                let once = || {
                    let started = Instant::now();
                    black_box(tokenizer.encode(&text).expect("it encodes"));
                    started.elapsed()
                };
                (0..5).map(|_| once()).min().expect("five times")
            };
            let (short, long) = (time(64 << 10), time(256 << 10));
            let ratio = long.as_secs_f64() / short.as_secs_f64();
            assert!(ratio <= 9.0, "{what}: four times the text takes {ratio:.1} times as long");
        }
    }
}

fn demo() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tollgate-demo");
    std::fs::read(path.join("tokenizer.json")).expect("the shipped model")
}

/// A generator of texts with long words that occur nowhere else.
struct Words(u64);

impl Words {
    fn text(&mut self) -> String {
        let mut text = String::new();
        for letter in 0..960 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let space = letter % 240 == 239;
            text.push(if space { ' ' } else { char::from(b'a' + (self.0 >> 33) as u8 % 26) });
        }
        text
    }
}
