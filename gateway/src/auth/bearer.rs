//! The `authorization` header: exactly one, a bearer credential, and what kind
//! it is by its shape alone.

use http::{HeaderMap, header};

use super::AuthError;
use super::secret::{KeySecret, PREFIX};

/// What a request shows.
pub(super) enum Credential<'a> {
    /// An API key whose checksum is right.
    Key(KeySecret<&'a str>),
    /// Anything else of bounded size; three parts are a JWT.
    Token(&'a str),
}

pub(super) fn credential(headers: &HeaderMap) -> Result<Credential<'_>, AuthError> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().ok_or(AuthError::Missing)?;
    if values.next().is_some() || value.len() > LONGEST {
        return Err(AuthError::Malformed);
    }
    let text = value.to_str().map_err(|_| AuthError::Malformed)?;
    let (scheme, credential) = text.split_once(' ').ok_or(AuthError::Malformed)?;
    let credential = credential.trim_matches(' ');
    if !scheme.eq_ignore_ascii_case("bearer") || credential.is_empty() {
        return Err(AuthError::Malformed);
    }
    if credential.starts_with(PREFIX) {
        return KeySecret::parse(credential).map(Credential::Key).ok_or(AuthError::Malformed);
    }
    Ok(Credential::Token(credential))
}

/// Whether something is shown that is not shaped like one of our keys: to find
/// out who it is may take a signature's verification.
pub(crate) fn shows_token(headers: &HeaderMap) -> bool {
    headers.get(header::AUTHORIZATION).is_some_and(|value| {
        let shown = value.as_bytes();
        shown.get(BEARER..).is_some_and(|shown| !shown.starts_with(PREFIX.as_bytes()))
    })
}

const BEARER: usize = "Bearer ".len();

/// Bytes of a header value: the largest token and its scheme.
const LONGEST: usize = super::jwt::LONGEST_TOKEN + 16;

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn takes_one_bearer_credential() {
        let many = "x".repeat(LONGEST + 1);
        for (values, expected) in [
            (vec![], Err(AuthError::Missing)),
            (vec!["Bearer abc"], Ok("abc")),
            (vec!["bEARER abc"], Ok("abc")),
            (vec!["Bearer  abc "], Ok("abc")),
            (vec!["Bearer abc", "Bearer abc"], Err(AuthError::Malformed)),
            (vec!["Bearer"], Err(AuthError::Malformed)),
            (vec!["Bearer "], Err(AuthError::Malformed)),
            (vec![""], Err(AuthError::Malformed)),
            (vec!["Basic dTpw"], Err(AuthError::Malformed)),
            (vec!["tg-abc"], Err(AuthError::Malformed)),
            (vec!["Bearer tg-misspelt"], Err(AuthError::Malformed)),
            (vec!["Bearer \u{e9}"], Err(AuthError::Malformed)),
            (vec![many.as_str()], Err(AuthError::Malformed)),
        ] {
            let mut headers = HeaderMap::new();
            for value in &values {
                let value = HeaderValue::from_bytes(value.as_bytes()).expect("a header value");
                headers.append(header::AUTHORIZATION, value);
            }
            let found = credential(&headers).map(|credential| match credential {
                Credential::Token(token) => token.to_owned(),
                Credential::Key(_) => "a key".to_owned(),
            });
            assert_eq!(found, expected.map(str::to_owned), "{values:?}");
        }
    }
}
