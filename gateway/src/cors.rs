//! Cross-origin resource sharing, as the Fetch standard defines it: headers that let web
//! pages of the configured origins call the public API.
//!
//! The module does not use `tower-http`, because its layer wraps a service. Here the head
//! check makes most refusals before there is a service, and a page must be able to read
//! these refusals, too.

use http::{HeaderMap, HeaderValue, Method, header};
use tollgate_config::{LiveConfig, Origin};

/// The origins in the config in force.
#[derive(Clone, Debug)]
pub(crate) struct Cors(LiveConfig);

/// The headers that a response gets because of the request's origin.
#[derive(Debug, Default)]
pub(crate) struct CorsHeaders {
    /// The value of `access-control-allow-origin`; `None` if the page may not read the
    /// response.
    allowed: Option<HeaderValue>,
    /// True if responses differ between origins.
    varies: bool,
}

impl Cors {
    pub(crate) fn new(config: LiveConfig) -> Self {
        Self(config)
    }

    /// Returns the headers for the response to a request with these `headers`.
    pub(crate) fn headers(&self, headers: &HeaderMap) -> CorsHeaders {
        let config = self.0.current();
        let origins = &config.gateway().cors.origins;
        if origins.is_empty() {
            return CorsHeaders::default();
        }
        let origin = headers.get(header::ORIGIN);
        if origins.iter().any(Origin::is_any) {
            let allowed = origin.map(|_| HeaderValue::from_static("*"));
            // The same for every origin, so a cache need not tell them apart.
            return CorsHeaders { allowed, varies: false };
        }
        // Compared whole: a part of an origin would also match another site.
        let is_listed = |origin: &&HeaderValue| {
            origins.iter().any(|listed| listed.as_str().as_bytes() == origin.as_bytes())
        };
        CorsHeaders { allowed: origin.filter(is_listed).cloned(), varies: true }
    }

    /// Returns true if the request is a preflight from a page that may call the API.
    pub(crate) fn is_preflight<B>(&self, request: &http::Request<B>) -> bool {
        request.method() == Method::OPTIONS
            && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
            // From any other page, OPTIONS is a method that no route takes.
            && self.headers(request.headers()).allowed.is_some()
    }
}

impl CorsHeaders {
    /// Writes the headers into those of a response.
    pub(crate) fn write(self, headers: &mut HeaderMap) {
        if self.varies {
            // Otherwise a cache could give one page the response to another.
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
        if let Some(allowed) = self.allowed {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}

/// Writes the headers of a preflight's response. `methods` are those of the route, and
/// `asked` has the headers of the preflight.
pub(crate) fn write_preflight(methods: HeaderValue, asked: &HeaderMap, headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
    // SDKs send headers of their own, more with each version, and none of them gives a page
    // a right. A wildcard would not cover `authorization`.
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
}

/// Seconds for which a browser may use the response to a preflight. Most browsers use it
/// for at most two hours; a page that is no longer allowed is refused after this time.
const MAX_AGE: &str = "600";

/// The headers of responses that a page may read, beside the few that it always may.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, retry-after, retry-after-ms, x-should-retry, \
     x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, \
     x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, \
     ratelimit, ratelimit-policy, x-tollgate-reserved-ns, x-tollgate-device-class, \
     x-tollgate-attributed-ns, x-tollgate-reference-ns, x-tollgate-queue-ns, \
     x-tollgate-replay-of",
);

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use tollgate_config::Config;

    use super::*;

    fn cors(origins: &str) -> Cors {
        let text = format!("{origins}\n[plans.p]\n[tenants.acme]\nplan = \"p\"\n");
        let config = Config::from_toml(Path::new("test.toml"), &text).expect("a config");
        Cors::new(LiveConfig::new(Arc::new(config)))
    }

    /// Returns the allowed origin and `vary` of the response to a page of `origin`.
    fn reply(cors: &Cors, origin: Option<&str>) -> (Option<String>, Option<String>) {
        let mut asked = HeaderMap::new();
        if let Some(origin) = origin {
            asked.insert(header::ORIGIN, origin.parse().expect("a header"));
        }
        let mut headers = HeaderMap::new();
        cors.headers(&asked).write(&mut headers);
        let exposed = headers.contains_key(header::ACCESS_CONTROL_EXPOSE_HEADERS);
        let text = |name| headers.get(&name).map(|it: &HeaderValue| it.to_str().unwrap().into());
        let allowed = text(header::ACCESS_CONTROL_ALLOW_ORIGIN);
        assert_eq!(exposed, allowed.is_some());
        (allowed, text(header::VARY))
    }

    #[test]
    fn only_whole_listed_origins_are_allowed() {
        let cors =
            cors("[gateway.cors]\norigins = [\"https://app.example\", \"http://localhost:5173\"]");
        let varies = || Some("origin".to_owned());
        for origin in ["https://app.example", "http://localhost:5173"] {
            assert_eq!(reply(&cors, Some(origin)), (Some(origin.to_owned()), varies()));
        }
        for origin in [
            "http://app.example",
            "https://app.example.evil.example",
            "https://evil-app.example",
            "https://app.example:8443",
            "https://app.exampl",
            "http://localhost",
            "null",
            "*",
            "",
        ] {
            assert_eq!(reply(&cors, Some(origin)), (None, varies()), "{origin}");
        }
        assert_eq!(reply(&cors, None), (None, varies()));
    }

    #[test]
    fn wildcard_allows_every_origin() {
        let cors = cors("[gateway.cors]\norigins = [\"*\"]");
        for origin in ["https://app.example", "null"] {
            assert_eq!(reply(&cors, Some(origin)), (Some("*".to_owned()), None));
        }
        assert_eq!(reply(&cors, None), (None, None));
    }

    #[test]
    fn no_header_is_written_without_origins() {
        assert_eq!(reply(&cors(""), Some("https://app.example")), (None, None));
    }
}
