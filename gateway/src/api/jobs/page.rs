//! The query parameters of lists: `after`, `limit`, `order` and `purpose`.

use axum::extract::Query;
use http::Uri;

use crate::reply::ApiError;

/// The parameters of a list that a client gave.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ListQuery {
    pub(super) after: Option<String>,
    pub(super) limit: Option<String>,
    pub(super) order: Option<String>,
    pub(super) purpose: Option<String>,
}

impl ListQuery {
    /// Reads the parameters. Unknown ones are ignored, as OpenAI's clients expect.
    ///
    /// # Errors
    /// 400: the query cannot be read, or a parameter comes twice.
    pub(super) fn of(uri: &Uri) -> Result<Self, ApiError> {
        let Query(parameters) = Query::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|_| ApiError::malformed("The query string cannot be read."))?;
        let mut query = Self::default();
        for (name, value) in parameters {
            let (field, name) = match name.as_str() {
                "after" => (&mut query.after, "after"),
                "limit" => (&mut query.limit, "limit"),
                "order" => (&mut query.order, "order"),
                "purpose" => (&mut query.purpose, "purpose"),
                _ => continue,
            };
            if field.replace(value).is_some() {
                return Err(ApiError::invalid(name, "The parameter comes twice."));
            }
        }
        Ok(query)
    }

    /// Returns the number of objects of the page: `default` if the client gave none.
    ///
    /// # Errors
    /// 400: the number is not from 1 to `most`.
    pub(super) fn limit(&self, default: u32, most: u32) -> Result<u32, ApiError> {
        let Some(limit) = &self.limit else { return Ok(default) };
        match limit.parse() {
            Ok(limit) if (1..=most).contains(&limit) => Ok(limit),
            _ => {
                let message = format!("'limit' must be a whole number from 1 to {most}.");
                Err(ApiError::invalid("limit", message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Result<ListQuery, ApiError> {
        ListQuery::of(&format!("/v1/files?{text}").parse().expect("a URI"))
    }

    #[test]
    fn page_query_reads_known_parameters() {
        let read = query("limit=5&after=file-1&order=asc&purpose=batch&x=1").expect("a query");
        assert_eq!(read.after.as_deref(), Some("file-1"));
        assert_eq!(read.order.as_deref(), Some("asc"));
        assert_eq!(read.purpose.as_deref(), Some("batch"));
        assert_eq!(read.limit(20, 100), Ok(5));
        assert_eq!(query("").expect("a query").limit(20, 100), Ok(20));
        assert!(query("limit=1&limit=2").is_err());
        for wrong in ["0", "101", "-1", "x", ""] {
            assert!(query(&format!("limit={wrong}")).expect("a query").limit(20, 100).is_err());
        }
    }
}
