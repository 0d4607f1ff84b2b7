//! Documents: relative links lead to a file or heading, and every test that a
//! document names exists.

use std::fs;
use std::path::Path;

use crate::run::root;

/// Checks that relative links lead to a file or folder of the checkout, and
/// that the part after `#` is a heading of a document.
pub(super) fn links(file: &Path, text: &str, wrong: &mut Vec<String>) {
    let folder = root().join(file.parent().unwrap_or(Path::new("")));
    for (number, line) in text.lines().enumerate() {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            if path.contains("://") || path.starts_with("mailto:") {
                continue;
            }
            // A link without a path stays within its own document.
            let linked = if path.is_empty() { root().join(file) } else { folder.join(path) };
            let found = match fs::read_to_string(&linked) {
                Ok(text) if !anchor.is_empty() && path_is_document(&linked) => {
                    text.lines().any(|line| heading_anchor(line).as_deref() == Some(anchor))
                }
                _ => linked.exists(),
            };
            if !found {
                wrong.push(format!("{}:{}: link to {target}", file.display(), number + 1));
            }
        }
    }
}

fn path_is_document(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// Returns the anchor that code hosts make of a heading: lower case, spaces as
/// hyphens, punctuation dropped.
fn heading_anchor(line: &str) -> Option<String> {
    let title = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'))?;
    let kept = title.trim().chars().filter(|&c| c.is_alphanumeric() || " -_".contains(c));
    Some(kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect())
}

/// Checks that each test cited as `` `path/file.rs::name` `` is a function of that
/// file. A row of a table may cite further tests of the same file by name alone;
/// those are not checked.
pub(super) fn cited_tests(file: &Path, text: &str, wrong: &mut Vec<String>) {
    for (number, line) in text.lines().enumerate() {
        for cited in line.split('`') {
            let Some((path, name)) = cited.split_once(".rs::") else { continue };
            let Some(name) = name.rsplit("::").next().filter(|name| is_identifier(name)) else {
                continue;
            };
            let source = fs::read_to_string(root().join(format!("{path}.rs")));
            if !source.is_ok_and(|source| source.contains(&format!("fn {name}("))) {
                wrong.push(format!("{}:{}: no test {cited}", file.display(), number + 1));
            }
        }
    }
}

fn is_identifier(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::heading_anchor;

    #[test]
    fn anchors_follow_code_hosts() {
        for (line, anchor) in [
            ("# The ledger's life", Some("the-ledgers-life")),
            ("### `x` and y_z", Some("x-and-y_z")),
            ("not a heading", None),
        ] {
            assert_eq!(heading_anchor(line).as_deref(), anchor);
        }
    }
}
