//! What a tokenizer could tell or cost: T25, that what one caller has encoded
//! changes nothing for the next, and T35, that no text costs out of proportion
//! to its length.
#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use tollgate_text::Tokenizer;

/// What is kept of a text would be found again the next time: the second time
/// would take other work than the first. Counted by the allocator, which no
/// other process disturbs; with its word cache the reference is the control.
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
    // What is made once for all texts is made now.
    by_us("a first text");
    by_reference("a first text");
    for _ in 0..50 {
        let text = words.text();
        assert_eq!(work(&by_us, &text), work(&by_us, &text), "{text}");
        assert_ne!(work(&by_reference, &text), work(&by_reference, &text), "the control: {text}");
    }
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

/// What `cargo xtask test --long` runs.
mod long {
    use super::*;

    /// T35, on the texts that tokenizers like least. In proportion would be 4, a
    /// square 16. One long run of a letter, of which all is one word, grows by 4.5
    /// to 7 where it leaves the processor's caches; the aim of 6 is not always met.
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
