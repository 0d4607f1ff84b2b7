//! What a tokenizer could tell or cost: T25, that what one caller has encoded
//! is not told to the next by the time it takes, and T35, that no text costs
//! out of proportion to its length.
#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::cmp::Ordering;
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use tollgate_text::Tokenizer;

/// What is kept of a text would be found again the next time: the second time
/// would take other work than the first. Counted by the allocator, which no
/// other process disturbs; with its word cache the reference is the control.
#[test]
fn what_was_encoded_before_changes_nothing() {
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
    // What is made once for all texts is made now.
    by_us("a first text");
    by_reference("a first text");
    for _ in 0..50 {
        let text = words.text();
        assert_eq!(work(&by_us, &text), work(&by_us, &text), "{text}");
        assert_ne!(work(&by_reference, &text), work(&by_reference, &text), "the control: {text}");
    }
}

#[test]
#[ignore = "long: times want many tries and a quiet machine"]
fn what_was_encoded_before_is_not_told_by_time() {
    let (ours, cached) = leaks(5_000);
    assert!((0.45..0.55).contains(&ours), "AUC {ours}");
    assert!(cached > ours + 0.1, "the control: AUC {cached}, ours {ours}");
}

thread_local! {
    /// Allocations of this thread, and their bytes.
    static TAKEN: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator as it came; counting
// beside it allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has nothing to count.
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

/// How well the time tells words that were encoded before from others, as the
/// area under the curve over pairs: 0.5 is not at all. For us, and with a word
/// cache.
fn leaks(tries: usize) -> (f64, f64) {
    let bytes = demo();
    let ours = Tokenizer::from_json(&bytes).expect("the shipped tokenizer");
    let reference = tokenizers::Tokenizer::from_bytes(&bytes).expect("the shipped tokenizer");
    let mut words = Words(7);
    let told = |encode: &dyn Fn(&str), words: &mut Words| {
        let (mut seen, mut unseen) = (Vec::new(), Vec::new());
        for number in 0..tries {
            let (known, new) = (words.text(), words.text());
            encode(&known);
            // Others come in between; the processor's own caches are not ours.
            (0..20).for_each(|_| encode(&words.text()));
            // Each first as often as the other.
            let timed = |text: &str, into: &mut Vec<Duration>| {
                let started = Instant::now();
                encode(text);
                into.push(started.elapsed());
            };
            if number % 2 == 0 {
                timed(&known, &mut seen);
                timed(&new, &mut unseen);
            } else {
                timed(&new, &mut unseen);
                timed(&known, &mut seen);
            }
        }
        area(&seen, &unseen)
    };
    let of_ours = told(&|text| drop(black_box(ours.encode(text))), &mut words);
    let of_cached = told(&|text| drop(black_box(reference.encode_fast(text, false))), &mut words);
    (of_ours, of_cached)
}

/// How often the seen text of a pair was the faster: the two are timed side by
/// side, so that what else the machine does falls on both.
fn area(seen: &[Duration], unseen: &[Duration]) -> f64 {
    let won = seen.iter().zip(unseen).map(|(seen, unseen)| match seen.cmp(unseen) {
        Ordering::Less => 1.0,
        Ordering::Equal => 0.5,
        Ordering::Greater => 0.0,
    });
    won.sum::<f64>() / seen.len() as f64
}

/// T35, on the texts that tokenizers like least.
#[test]
#[ignore = "long: a ratio of times wants a quiet machine"]
fn no_text_costs_out_of_proportion() {
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
        assert!(ratio <= 6.0, "{what}: four times the text takes {ratio:.1} times as long");
    }
}

fn demo() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tollgate-demo");
    std::fs::read(path.join("tokenizer.json")).expect("the shipped model")
}

/// Texts of long words that nobody has ever used.
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
