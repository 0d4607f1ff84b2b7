//! Memory for parsing a body (threat T38), counted by the allocator: at most four
//! times the size of the body. The check of a batch's input keeps one line at a time.
#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_fuzz::target;
use tollgate_gateway::fuzz::count_mistakes;

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

/// Held by the test that measures: the figures are those of the whole process.
static MEASURING: Mutex<()> = Mutex::new(());

/// Runs `work`, and returns the most memory that it held and the memory that it left behind.
fn measure(work: impl FnOnce()) -> (usize, usize) {
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    work();
    let (most, now) = (MOST.load(Ordering::Relaxed), NOW.load(Ordering::Relaxed));
    (most - before, now.saturating_sub(before))
}

/// Bytes of the largest body that the gateway reads.
const SIZE: usize = 2 << 20;

#[test]
fn body_memory_stays_within_four_times_size() {
    let _turn = MEASURING.lock();
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
            let (cost, left) = measure(|| run(bomb.as_bytes()));
            assert!(cost <= 4 * bomb.len(), "{name}, {what}: {cost} bytes for {}", bomb.len());
            assert!(left <= 4_096, "{name}, {what}: memory was not freed");
        }
    }
}

#[test]
fn validator_memory_stays_within_four_lines() {
    const LINE: usize = 256 << 10;
    const LINES: usize = 40;
    /// Hashes of the ids, and messages about mistakes.
    const BESIDE_LINES: usize = 64 << 10;
    let _turn = MEASURING.lock();
    let fill = |unit: &str| unit.repeat(LINE / unit.len());
    let fields = |custom_id: &str, method: &str, url: &str, body: &str| {
        format!(r#"{{"custom_id":{custom_id},"method":{method},"url":{url},"body":{body}}}"#)
    };
    let (long, escaped) = (format!("\"{}\"", fill("x")), format!("\"{}\"", fill(r"\n")));
    let url = r#""/v1/chat/completions""#;
    let bombs = [
        ("long body", fields(r#""ID""#, r#""POST""#, url, &format!(r#"{{"x":{long}}}"#))),
        ("long id", fields(&escaped, r#""POST""#, url, "{}")),
        ("long method", fields(r#""ID""#, &escaped, url, "{}")),
        ("long url", fields(r#""ID""#, r#""POST""#, &escaped, "{}")),
        ("deep body", fields(r#""ID""#, r#""POST""#, url, &fill("["))),
        ("unknown fields", format!("{{{}\"x\":0}}", fill(r#""zz":[[]],"#))),
        ("twins", format!("{{{}\"body\":{{}}}}", fill(r#""body":{},"#))),
        ("no JSON", fill("x")),
    ];
    for (what, bomb) in &bombs {
        let lines = (0..LINES).map(|number| bomb.replacen("ID", &number.to_string(), 1) + "\n");
        let (input, mut mistakes) = (lines.collect::<String>(), 0);
        let (cost, _) = measure(|| mistakes = count_mistakes(input.as_bytes()));
        assert_eq!(mistakes == 0, *what == "long body", "{what}: {mistakes} mistakes");
        let most = 4 * bomb.len() + BESIDE_LINES;
        assert!(cost <= most, "{what}: {cost} bytes for lines of {}", bomb.len());
    }
}
