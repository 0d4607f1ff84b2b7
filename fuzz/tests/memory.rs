//! Memory for parsing a body (threat T38), counted by the allocator: at most four
//! times the size of the body.
#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_fuzz::target;

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes unchanged to the system's allocator; counting allocates
// nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of the largest body that the gateway reads.
const SIZE: usize = 2 << 20;

#[test]
fn body_memory_stays_within_four_times_size() {
    const MESSAGE: &str = r#"{"role":"user","content":"x"}"#;
    let content =
        |text: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":{text}}}]}}"#);
    let fill = |unit: &str| unit.repeat(SIZE / unit.len());
    let bombs = [
        ("one text", content(&format!("\"{}\"", "x".repeat(SIZE)))),
        ("escapes", content(&format!("\"{}\"", fill(r"\u0041")))),
        ("parts", content(&format!("[{}0]", fill(r#"{"type":"text","text":"x"},"#)))),
        ("numbers", content(&format!("[{}0]", fill("0,")))),
        (
            "messages",
            format!(r#"{{"model":"m","messages":[{}{MESSAGE}]}}"#, fill(&format!("{MESSAGE},"))),
        ),
        ("brackets", "[".repeat(SIZE)),
        ("objects", fill(r#"{"a":"#)),
        ("twins", format!(r#"{{{}"model":"m"}}"#, fill(r#""model":"m","#))),
        ("unknown fields", format!(r#"{{{}"model":"m"}}"#, fill(r#""zz":[[]],"#))),
        (
            "stops",
            content(r#""x""#).replace("}]}", &format!(r#"}}],"stop":[{}"x"]}}"#, fill(r#""x","#))),
        ),
        (
            "biases",
            content(r#""x""#)
                .replace("}]}", &format!(r#"}}],"logit_bias":{{{}"1":1}}}}"#, fill(r#""1":1,"#))),
        ),
        ("prompts", format!(r#"{{"model":"m","prompt":[{}"x"]}}"#, fill(r#""x","#))),
        ("tokens", format!(r#"{{"model":"m","prompt":[{}0]}}"#, fill("0,"))),
        ("lists of tokens", format!(r#"{{"model":"m","prompt":[{}[0]]}}"#, fill("[0],"))),
    ];
    for name in ["chat_body", "completion_body"] {
        let run = target(name).expect("a target");
        for (what, bomb) in &bombs {
            let before = NOW.load(Ordering::Relaxed);
            MOST.store(before, Ordering::Relaxed);
            run(bomb.as_bytes());
            let cost = MOST.load(Ordering::Relaxed) - before;
            assert!(cost <= 4 * bomb.len(), "{name}, {what}: {cost} bytes for {}", bomb.len());
            assert!(
                NOW.load(Ordering::Relaxed) <= before + 4_096,
                "{name}, {what}: memory was not freed"
            );
        }
    }
}
