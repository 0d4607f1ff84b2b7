//! The `authorization` header: exactly one header with one bearer credential. The
//! shape of the text decides whether it is a key or a token.

use http::{HeaderMap, header};

use super::AuthError;
use super::secret::{KeySecret, PREFIX};

/// The credential of a request, not yet looked up.
pub(super) enum Credential<'a> {
    /// An API key with a correct checksum.
    Key(KeySecret<&'a str>),
    /// Other text of bounded size, possibly a JWT.
    Token(&'a str),
}

/// Reads the credential of a request.
pub(super) fn credential(headers: &HeaderMap) -> Result<Credential<'_>, AuthError> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().ok_or(AuthError::Missing)?;
    // With two headers, a proxy and this gateway could disagree on the caller.
    if values.next().is_some() || value.len() > MAX_VALUE_BYTES {
        return Err(AuthError::Malformed);
    }
    let text = value.to_str().map_err(|_| AuthError::Malformed)?;
    let (scheme, credential) = text.split_once(' ').ok_or(AuthError::Malformed)?;
    let credential = credential.trim_matches(' ');
    if !scheme.eq_ignore_ascii_case("bearer") || credential.is_empty() {
        return Err(AuthError::Malformed);
    }
    // A misspelt key must not be tried as a token, which costs more to check.
    if credential.starts_with(PREFIX) {
        return KeySecret::parse(credential).map(Credential::Key).ok_or(AuthError::Malformed);
    }
    Ok(Credential::Token(credential))
}

/// True if the request may carry a token: its check may take the verification of
/// a signature, which costs much more than the check of a key.
pub(crate) fn shows_token(headers: &HeaderMap) -> bool {
    headers.get(header::AUTHORIZATION).is_some_and(|value| {
        let bytes = value.as_bytes();
        bytes.get(BEARER..).is_some_and(|bytes| !bytes.starts_with(PREFIX.as_bytes()))
    })
}

const BEARER: usize = "Bearer ".len();

/// Bytes of the longest header value: the longest token and its scheme.
const MAX_VALUE_BYTES: usize = super::jwt::MAX_TOKEN_BYTES + 16;

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn header_holds_one_bearer_credential() {
        let many = "x".repeat(MAX_VALUE_BYTES + 1);
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
