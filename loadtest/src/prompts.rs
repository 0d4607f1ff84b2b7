//! The prompts of a load: texts, a file with one prompt a line, or random words.

use std::io::Read;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::plan::Random;

/// The prompts of a load.
#[derive(Clone, Debug)]
pub enum Prompts {
    /// These prompts, in turn.
    InTurn(Vec<Prompt>),
    /// A new prompt of random words for each request.
    Words(WordRange),
}

impl Prompts {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::InTurn(prompts) if prompts.is_empty())
    }
}

/// The smallest and the largest number of words in a random prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordRange {
    /// At least 1.
    low: u32,
    /// At least `low`.
    high: u32,
}

impl WordRange {
    /// The largest number of words; about half a megabyte of text.
    const MOST: u32 = 100_000;

    /// Returns the prompt with this number of the load with this seed.
    pub(crate) fn prompt(self, seed: u64, number: usize) -> Prompt {
        // Mixed twice, so that the prompts of the seeds 1 and 2 have nothing in common.
        let mut random = Random(Random(Random(seed).next() ^ number as u64).next());
        let count = self.low as usize + random.below((self.high - self.low) as usize + 1);
        let words: Vec<&str> = (0..count).map(|_| WORDS[random.below(WORDS.len())]).collect();
        Prompt::text(&words.join(" "))
    }
}

impl FromStr for WordRange {
    type Err = String;

    /// Parses `LOW..HIGH`.
    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once("..").map(|(low, high)| (low.parse(), high.parse()));
        match numbers {
            Some((Ok(low), Ok(high))) if (1..=high).contains(&low) && high <= Self::MOST => {
                Ok(Self { low, high })
            }
            _ => Err("must be LOW..HIGH, such as 20..200, within 1..100000".to_owned()),
        }
    }
}

/// A prompt: the messages of a chat.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    messages: Value,
    /// The largest number of tokens in the answer, if the prompt has its own.
    max_tokens: Option<NonZeroU32>,
}

impl Prompt {
    /// Creates a prompt of one message.
    pub fn text(text: &str) -> Self {
        Self { messages: json!([{ "role": "user", "content": text }]), max_tokens: None }
    }

    /// Returns the body of a chat with this prompt. `max_tokens` counts if the prompt has no
    /// number of its own.
    pub(crate) fn body(&self, model: &str, max_tokens: u32, stream: bool) -> Bytes {
        let max_tokens = self.max_tokens.map_or(max_tokens, NonZeroU32::get);
        let mut body = json!({
            "model": model,
            "messages": self.messages,
            "max_completion_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        });
        if stream {
            body["stream_options"] = json!({ "include_usage": true });
        }
        Bytes::from(body.to_string())
    }
}

/// An error in a file of prompts.
#[derive(Debug, thiserror::Error)]
pub enum PromptsError {
    /// The file cannot be read.
    #[error("prompts {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file has more bytes than are allowed.
    #[error("prompts {}: the file has more than 64 MiB", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// No line has a prompt.
    #[error("prompts {}: the file has no prompt", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A line is not a prompt.
    #[error("prompts {}, line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// The mistake.
        reason: String,
    },
}

/// The largest file of prompts. All its requests are kept in memory.
const MOST_BYTES: u64 = 64 << 20;

/// Reads a file with one prompt a line, and returns the prompts in an order that `seed`
/// determines. If the first prompt begins with `{`, every line is JSON; otherwise every line
/// is the text of a prompt. Blank lines are skipped.
///
/// # Errors
/// The file cannot be read, is too large, has no prompt, or has a line that is no prompt.
pub fn read(path: &Path, seed: u64) -> Result<Vec<Prompt>, PromptsError> {
    let named = || path.to_owned();
    let failed = |source| PromptsError::Read { path: named(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(PromptsError::TooLarge { path: named() });
    }
    let prompts = parse(&bytes);
    let mut prompts =
        prompts.map_err(|(line, reason)| PromptsError::Line { path: named(), line, reason })?;
    if prompts.is_empty() {
        return Err(PromptsError::Empty { path: named() });
    }
    Random(seed).shuffle(&mut prompts);
    Ok(prompts)
}

/// Returns the prompts in the order of the lines, or the number of a bad line with the mistake.
fn parse(bytes: &[u8]) -> Result<Vec<Prompt>, (usize, String)> {
    // Editors of some systems begin a file with a byte order mark.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut prompts = Vec::new();
    let mut is_json = None;
    for (number, line) in (1..).zip(bytes.split(|&byte| byte == b'\n')) {
        let line = std::str::from_utf8(line).map_err(|_| (number, "not UTF-8".to_owned()))?;
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        prompts.push(match *is_json.get_or_insert(line.starts_with('{')) {
            true => json_line(line).map_err(|reason| (number, reason))?,
            false => Prompt::text(line),
        });
    }
    Ok(prompts)
}

fn json_line(line: &str) -> Result<Prompt, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| {
        // The parser sees one line only, so its own line number would mislead.
        let text = error.to_string();
        let what = text.rsplit_once(" at line ").map_or(&*text, |(what, _)| what);
        format!("{what} (column {})", error.column())
    })?;
    match line {
        Line { prompt: Some(text), messages: None, max_tokens } => {
            Ok(Prompt { max_tokens, ..Prompt::text(&text) })
        }
        Line { prompt: None, messages: Some(messages), max_tokens } if !messages.is_empty() => {
            Ok(Prompt { messages: json!(messages), max_tokens })
        }
        Line { prompt: None, messages: Some(_), .. } => Err("`messages` is empty".to_owned()),
        _ => Err("one of `messages` and `prompt` is required".to_owned()),
    }
}

/// Common words of a random prompt.
const WORDS: [&str; 64] = [
    "about", "after", "again", "answer", "before", "better", "between", "bill", "book", "call",
    "change", "city", "cold", "count", "day", "device", "door", "early", "every", "family",
    "field", "first", "flow", "good", "green", "hand", "high", "home", "idea", "late", "letter",
    "light", "limit", "list", "long", "make", "model", "money", "morning", "name", "never",
    "number", "open", "order", "other", "paper", "part", "people", "place", "plan", "question",
    "rate", "river", "room", "second", "short", "side", "small", "story", "table", "time", "token",
    "water", "word",
];

/// A line of JSON. Another field is an error, because it would have no effect.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    messages: Option<Vec<Map<String, Value>>>,
    max_tokens: Option<NonZeroU32>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn parsed(text: &str) -> Vec<Prompt> {
        parse(text.as_bytes()).unwrap_or_else(|(line, reason)| panic!("line {line}: {reason}"))
    }

    #[test]
    fn text_lines_are_prompts() {
        let wanted = vec![Prompt::text("What is a bill?"), Prompt::text("{braces} later")];
        assert_eq!(parsed("\u{feff}What is a bill?\r\n\n {braces} later\n"), wanted);
    }

    #[test]
    fn json_lines_have_prompts_or_messages() {
        let prompts = parsed(
            "\n{\"prompt\": \"Hello\"}\n\
             {\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, \
             {\"role\": \"user\", \"content\": \"Hi\"}], \"max_tokens\": 7}\n",
        );
        assert_eq!(prompts[0], Prompt::text("Hello"));
        let bodies = [prompts[0].body("m", 64, false), prompts[1].body("m", 64, true)];
        let bodies = bodies.map(|body| serde_json::from_slice::<Value>(&body).expect("JSON"));
        assert_eq!(bodies[0]["max_completion_tokens"], 64);
        assert_eq!(bodies[1]["max_completion_tokens"], 7);
        assert_eq!(bodies[1]["messages"][0]["content"], "Be brief.");
        assert_eq!(bodies[1]["stream"], true);
    }

    #[test]
    fn bad_lines_are_named() {
        for (text, line, reason) in [
            ("{\"prompt\": \"a\"}\nplain", 2, "expected value (column 1)"),
            ("{\"prompt\": \"a\", \"top_k\": 1}", 1, "unknown field `top_k`"),
            ("{\"prompt\": \"a\"}\n\n{\"max_tokens\": 3}", 3, "one of `messages` and `prompt`"),
            ("{\"prompt\": \"a\", \"messages\": [{}]}", 1, "one of `messages` and `prompt`"),
            ("{\"messages\": []}", 1, "`messages` is empty"),
            ("{\"prompt\": \"a\", \"max_tokens\": 0}", 1, "nonzero"),
        ] {
            let (at, why) = parse(text.as_bytes()).expect_err(text);
            assert!(at == line && why.contains(reason), "{text}: line {at}: {why}");
            assert!(!why.contains(" at line "), "{why}");
        }
        assert_eq!(parse(b"good\n\xff\n").expect_err("not UTF-8").0, 2);
    }

    #[test]
    fn file_order_follows_seed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("prompts.txt");
        let lines: Vec<String> = (0..40).map(|number| format!("prompt {number}")).collect();
        std::fs::write(&path, lines.join("\n")).expect("writes");
        let read = |seed| read(&path, seed).expect("valid");
        assert_eq!(read(1), read(1));
        assert_ne!(read(1), read(2));
        let sorted: Vec<Prompt> = lines.iter().map(|line| Prompt::text(line)).collect();
        assert_ne!(read(1), sorted);
        assert!(sorted.iter().all(|prompt| read(1).contains(prompt)));
    }

    #[test]
    fn random_prompts_follow_range_and_seed() {
        let range: WordRange = "3..6".parse().expect("valid");
        let words = |prompt: Prompt| {
            prompt.messages[0]["content"].as_str().expect("text").split(' ').count()
        };
        let counts: BTreeSet<usize> =
            (0..200).map(|number| words(range.prompt(1, number))).collect();
        assert_eq!(counts, BTreeSet::from([3, 4, 5, 6]));
        assert_eq!(range.prompt(1, 7), range.prompt(1, 7));
        assert_ne!(range.prompt(1, 7), range.prompt(1, 8));
        assert_ne!(range.prompt(1, 8), range.prompt(2, 7));
        let fixed: WordRange = "40..40".parse().expect("valid");
        assert_eq!(words(fixed.prompt(9, 0)), 40);
    }

    #[test]
    fn word_range_refuses_other_text() {
        for text in ["", "5", "0..5", "6..5", "1..100001", "a..b", "1...5", "-1..5"] {
            let error = text.parse::<WordRange>().expect_err(text);
            assert!(error.contains("LOW..HIGH"), "{error}");
        }
    }

    #[test]
    fn file_errors_name_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("p.jsonl");
        let missing = read(&path, 1).expect_err("no file").to_string();
        assert!(missing.contains("p.jsonl"), "{missing}");
        for (text, wanted) in
            [("\n \n", "p.jsonl: the file has no prompt"), ("{}\n", "p.jsonl, line 1: one of")]
        {
            std::fs::write(&path, text).expect("writes");
            let error = read(&path, 1).expect_err(text).to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
