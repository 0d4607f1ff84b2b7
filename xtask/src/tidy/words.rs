//! The rules of plain English that a machine can check: openings of doc comments,
//! words for people, log messages, test names, and one meaning for each type name.

use std::collections::BTreeMap;

/// First words that make a doc comment a riddle: it is a clause without a main
/// verb, or leans on a sentence elsewhere.
const FORBIDDEN_OPENINGS: [&str; 18] = [
    "What", "Whether", "How", "Who", "Whose", "Whom", "Why", "Where", "When", "Which", "Of", "So",
    "Likewise", "As", "Like", "Up", "Beside", "Among",
];

/// Words for people. Code, requests and workers are not people.
const PEOPLE: [&str; 8] =
    ["who", "whom", "whose", "whoever", "nobody", "somebody", "everybody", "anybody"];

/// Words for people in 1000 words of doc comments, at most. Tenants and admins are
/// people, so the bound is not 0.
const MAX_PEOPLE_PER_1000: f64 = 0.5;

/// First words that say nothing about the component under test.
const VAGUE_TEST_STARTS: [&str; 26] = [
    "a", "an", "the", "what", "who", "whoever", "whose", "which", "where", "when", "how", "why",
    "it", "its", "they", "these", "those", "this", "that", "there", "nobody", "nothing", "whether",
    "of", "one", "each",
];

/// Words of a test's name, at most.
const MAX_TEST_WORDS: usize = 8;

/// The counts that make sense over the whole checkout only.
#[derive(Default)]
pub(super) struct Words {
    doc_words: usize,
    people: Vec<String>,
    /// The places of each type, by crate and name.
    types: BTreeMap<(String, String), Vec<String>>,
}

impl Words {
    /// Checks one source file of the product, of a tool or of tests.
    pub(super) fn file(&mut self, path: &str, text: &str, wrong: &mut Vec<String>) {
        let is_test_file = is_test_file(path);
        let mut in_tests = is_test_file;
        let mut previous_is_doc = false;
        let mut after_test_attribute = false;
        for (number, line) in text.lines().enumerate() {
            let place = format!("{path}:{}", number + 1);
            // Unit tests stand at the end of a file.
            in_tests |= line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test");
            let code = line.trim_start();
            let doc = code.strip_prefix("///").or_else(|| code.strip_prefix("//!"));
            match doc {
                Some(words) => {
                    if !previous_is_doc {
                        opening(&place, words, wrong);
                    }
                    if !in_tests {
                        self.doc_line(&place, words);
                    }
                }
                None => {
                    if after_test_attribute && let Some(name) = function_name(code) {
                        test_name(&place, name, wrong);
                        after_test_attribute = false;
                    }
                    after_test_attribute |= is_test_attribute(code);
                    if !in_tests {
                        self.type_name(path, &place, code, line);
                        log_message(&place, code, text.lines().nth(number + 1), wrong);
                    }
                }
            }
            previous_is_doc = doc.is_some();
        }
    }

    fn doc_line(&mut self, place: &str, words: &str) {
        for word in words.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
            self.doc_words += 1;
            if PEOPLE.contains(&word.to_ascii_lowercase().as_str()) {
                self.people.push(format!("{place}: \"{word}\""));
            }
        }
    }

    fn type_name(&mut self, path: &str, place: &str, code: &str, line: &str) {
        // Associated types are indented; nested types stand in functions.
        if line.starts_with(' ') {
            return;
        }
        let code = match code.strip_prefix("pub") {
            Some(rest) => rest.trim_start_matches(|c| c != ' ').trim_start(),
            None => code,
        };
        let name = ["struct ", "enum ", "union ", "trait ", "type "]
            .iter()
            .find_map(|keyword| code.strip_prefix(keyword));
        let Some(name) = name else { return };
        let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
        let key = (crate_of(path), name[..end].to_owned());
        self.types.entry(key).or_default().push(place.to_owned());
    }

    /// Reports the findings over all files.
    pub(super) fn finish(self, wrong: &mut Vec<String>) {
        let per_1000 = 1000.0 * self.people.len() as f64 / self.doc_words.max(1) as f64;
        if per_1000 > MAX_PEOPLE_PER_1000 {
            wrong.push(format!(
                "doc comments use {per_1000:.2} words for people in 1000 words, at most \
                 {MAX_PEOPLE_PER_1000}: {}",
                self.people.join(", ")
            ));
        }
        for ((folder, name), places) in self.types {
            if places.len() > 1 {
                wrong.push(format!("type {name} of {folder} has {}", places.join(" and ")));
            }
        }
    }
}

fn opening(place: &str, words: &str, wrong: &mut Vec<String>) {
    let first = words.trim_start().split(|c: char| !c.is_alphanumeric()).next().unwrap_or("");
    if FORBIDDEN_OPENINGS.contains(&first) {
        wrong.push(format!("{place}: a doc comment opens with \"{first}\""));
    }
}

fn test_name(place: &str, name: &str, wrong: &mut Vec<String>) {
    let words: Vec<&str> = name.split('_').collect();
    if words.len() > MAX_TEST_WORDS {
        let count = words.len();
        wrong.push(format!("{place}: test {name} has {count} words, at most {MAX_TEST_WORDS}"));
    }
    if VAGUE_TEST_STARTS.contains(&words[0]) {
        wrong.push(format!("{place}: test {name} does not start with a component"));
    }
}

/// Checks the message of a log macro: a sentence in lower case, without a full
/// stop, that has at least a subject and a verb.
fn log_message(place: &str, code: &str, next: Option<&str>, wrong: &mut Vec<String>) {
    const MACROS: [&str; 4] =
        ["tracing::error!(", "tracing::warn!(", "tracing::info!(", "tracing::debug!("];
    let Some(arguments) = MACROS.iter().find_map(|name| code.split(name).nth(1)) else { return };
    // Only a message on the same or the next line is checked: fields come first
    // in longer calls.
    let arguments = if arguments.is_empty() { next.unwrap_or("").trim() } else { arguments };
    let Some((_, message)) = arguments.split_once('"') else { return };
    let Some((message, _)) = message.rsplit_once('"') else { return };
    // Names such as NVML keep their capitals.
    let mut letters = message.chars();
    let starts_lower = !letters.next().is_some_and(char::is_uppercase)
        || letters.next().is_some_and(char::is_uppercase);
    if !starts_lower || message.ends_with('.') || message.split(' ').count() < 2 {
        wrong.push(format!("{place}: log message \"{message}\" is not subject and verb"));
    }
}

fn is_test_attribute(code: &str) -> bool {
    code.starts_with("#[test]") || code.starts_with("#[tokio::test")
}

fn function_name(code: &str) -> Option<&str> {
    let rest = code.strip_prefix("async ").unwrap_or(code).strip_prefix("fn ")?;
    rest.split('(').next()
}

fn is_test_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.starts_with("tests/")
        || path.contains("/tests/")
        || path.contains("_tests/")
        || name.ends_with("tests.rs")
        || name.starts_with("test_")
        || name == "testing.rs"
}

/// Returns the folder of the crate that a file belongs to. Each example is a crate
/// of its own; the root's is "".
fn crate_of(path: &str) -> String {
    if let Some((folder, example)) = path.split_once("/examples/") {
        let name = example.split(['/', '.']).next().unwrap_or(example);
        return format!("{folder}/examples/{name}");
    }
    path.split_once("/src/").map_or_else(String::new, |(folder, _)| folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::Words;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let (mut words, mut wrong) = (Words::default(), Vec::new());
        words.file(path, text, &mut wrong);
        words.finish(&mut wrong);
        wrong
    }

    #[test]
    fn words_report_each_broken_rule() {
        for (text, expected) in [
            ("/// Whether it runs.\nfn x() {}", "opens with \"Whether\""),
            ("/// Returns it to whoever asks.\nfn x() {}", "words for people"),
            ("pub struct Twice;\npub(crate) enum Twice {}", "type Twice of a/b has"),
            ("#[test]\nfn the_answer_is_right() {}", "does not start with a component"),
            ("#[test]\nfn a1_b_c_d_e_f_g_h_i() {}", "has 9 words"),
            ("tracing::warn!(\"Ends.\");", "is not subject and verb"),
            ("tracing::info!(\n    \"draining\",\n);", "is not subject and verb"),
        ] {
            let wrong = findings("a/b/src/c.rs", text);
            assert_eq!(wrong.len(), 1, "{text}: {wrong:?}");
            assert!(wrong[0].contains(expected), "{wrong:?}");
        }
    }

    #[test]
    fn words_know_test_folders() {
        let text = "/// Returns it to whoever asks.\nfn x() {}";
        for path in ["tests/it/a.rs", "a/tests/b.rs", "a/src/tests/b.rs", "a/src/b_tests/c.rs"] {
            assert_eq!(findings(path, text), Vec::<String>::new(), "{path}");
        }
        assert_eq!(findings("a/src/contests/b.rs", text).len(), 1);
    }

    #[test]
    fn words_pass_what_keeps_the_rules() {
        let text = "//! A room.\n\n/// Returns x.\nfn x() {}\n\n/// A value.\nstruct One;\n\
                    tracing::info!(port, \"listener bound; serving\");\n\
                    #[cfg(test)]\nmod tests {\n    struct One;\n    #[test]\n    \
                    fn answers_are_right() {}\n}\n";
        assert_eq!(findings("a/src/b.rs", text), Vec::<String>::new());
    }
}
