//! Fetches the key set of an issuer from the one URL that an admin configured.
//!
//! The other side cannot lead the fetch anywhere else or make it large: no
//! redirect is followed, no proxy of the environment is used, no coding is
//! undone, and size and time are bounded.

use std::path::Path;
use std::time::Duration;

use http::{StatusCode, header};
use reqwest::{Client, Url, redirect};

use crate::trust::{self, TrustError};

/// The reasons why a key set cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The text is not a URL of the form `https://HOST[:PORT]/PATH`.
    #[error("not a URL such as https://issuer.example/jwks.json")]
    Url,
    /// The certificate authorities cannot be used.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The HTTP client cannot be built.
    #[error("cannot set up the HTTP client")]
    Client(#[source] reqwest::Error),
    /// The TCP connection or the TLS handshake failed.
    #[error("could not connect")]
    Connect(#[source] reqwest::Error),
    /// The exchange over HTTP broke.
    #[error("HTTP failed")]
    Http(#[source] reqwest::Error),
    /// The status of the response was not 200.
    #[error("answered {0}")]
    Status(StatusCode),
    /// The response was larger than the limit, in bytes.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
    /// The whole response did not arrive in time.
    #[error("no whole answer within {0:?}")]
    Timeout(Duration),
}

/// The bounds of one fetch.
#[derive(Clone, Copy, Debug)]
pub(super) struct FetchLimits {
    /// Bytes of the largest response.
    pub(super) size: usize,
    /// The longest time from the start of the connection to the last byte.
    pub(super) deadline: Duration,
}

/// A client that fetches one URL again and again.
#[derive(Clone, Debug)]
pub(super) struct Fetcher {
    url: Url,
    client: Client,
    limits: FetchLimits,
}

impl Fetcher {
    /// Makes a fetcher of `url` that trusts the authorities in the file `ca`, or
    /// those of the system.
    ///
    /// # Errors
    /// `url` is not an `https://` URL, or the authorities cannot be read.
    pub(super) fn new(
        url: &str,
        ca: Option<&Path>,
        limits: FetchLimits,
    ) -> Result<Self, FetchError> {
        let url: Url = url.parse().map_err(|_| FetchError::Url)?;
        // A user or password in the URL would end up in logs and errors.
        let has_user = !url.username().is_empty() || url.password().is_some();
        if url.scheme() != "https" || has_user {
            return Err(FetchError::Url);
        }
        let client = Client::builder()
            // reqwest is built without a TLS provider of its own.
            .tls_backend_preconfigured(trust::client_config(ca)?)
            .https_only(true)
            .redirect(redirect::Policy::none())
            .no_proxy()
            // Fetches are minutes apart: an idle connection would only be closed
            // by the other side.
            .pool_max_idle_per_host(0)
            .timeout(limits.deadline)
            .build()
            .map_err(FetchError::Client)?;
        Ok(Self { url, client, limits })
    }

    /// Returns the bytes that the URL has now.
    ///
    /// # Errors
    /// The exchange failed, or the response was too large or too late.
    pub(super) async fn get(&self) -> Result<Vec<u8>, FetchError> {
        let request = self.client.get(self.url.clone()).header(header::ACCEPT, "application/json");
        let mut response = request.send().await.map_err(|error| self.failure(error))?;
        // A redirect ends here as well, because none is followed.
        if response.status() != StatusCode::OK {
            return Err(FetchError::Status(response.status()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.failure(error))? {
            // Checked before the chunk is kept: the stated length may be wrong.
            if body.len() + chunk.len() > self.limits.size {
                return Err(FetchError::TooLarge(self.limits.size));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    fn failure(&self, error: reqwest::Error) -> FetchError {
        // Asked first, because a connection that times out is an error of connecting, too.
        if error.is_timeout() {
            FetchError::Timeout(self.limits.deadline)
        } else if error.is_connect() {
            FetchError::Connect(error)
        } else {
            FetchError::Http(error)
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
