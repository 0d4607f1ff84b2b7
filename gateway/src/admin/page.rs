//! Pages of long lists: each answer has a bounded number of rows and names the next page.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The query of a list.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    /// The last row of the page before, as its `next` names it.
    after: Option<String>,
}

/// One page of a list.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "{T}Page")]
pub(super) struct Page<T> {
    /// The rows, at most [`MOST_ROWS`].
    pub(super) rows: Vec<T>,
    /// The value of `after` for the next page; null on the last page.
    pub(super) next: Option<String>,
}

impl<T> Page<T> {
    /// Returns the page of the first of `rows`, which may be one more than a page has.
    pub(super) fn first(mut rows: Vec<T>, name: impl Fn(&T) -> String) -> Self {
        let more = rows.len() > MOST_ROWS;
        rows.truncate(MOST_ROWS);
        let next = rows.last().map(name).filter(|_| more);
        Self { rows, next }
    }
}

impl PageQuery {
    /// Returns the last row of the page before.
    pub(super) fn after(&self) -> Option<&str> {
        self.after.as_deref()
    }

    /// Makes the query for the page after the row `after`.
    pub(super) fn new(after: Option<String>) -> Self {
        Self { after }
    }

    /// Returns the page of `rows` that the query asks for. `rows` are in the order of
    /// `name`, or in an order in which a row with the name `after` occurs once.
    pub(super) fn cut<T>(&self, rows: Vec<T>, name: impl Fn(&T) -> String) -> Page<T> {
        let skipped = match &self.after {
            None => 0,
            // An unknown name ends the list: the row may be gone, and rows must not repeat.
            Some(after) => {
                rows.iter().position(|row| name(row) == *after).map_or(rows.len(), |at| at + 1)
            }
        };
        Page::first(rows.into_iter().skip(skipped).take(MOST_ROWS + 1).collect(), name)
    }
}

/// Rows of one page.
pub(super) const MOST_ROWS: usize = 50;

#[cfg(test)]
mod tests {
    use super::*;

    fn page(after: Option<&str>, rows: usize) -> (Vec<usize>, Option<String>) {
        let query = PageQuery { after: after.map(str::to_owned) };
        let Page { rows, next } = query.cut((0..rows).collect(), ToString::to_string);
        (rows, next)
    }

    #[test]
    fn pages_cover_list_once() {
        assert_eq!(page(None, 0), (vec![], None));
        assert_eq!(page(None, 50), ((0..50).collect(), None));
        assert_eq!(page(None, 101), ((0..50).collect(), Some("49".to_owned())));
        assert_eq!(page(Some("49"), 101), ((50..100).collect(), Some("99".to_owned())));
        assert_eq!(page(Some("99"), 101), (vec![100], None));
        assert_eq!(page(Some("gone"), 101), (vec![], None));
    }
}
