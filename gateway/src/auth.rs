//! Who is it? The only place where a tenant is found.
//!
//! A request shows one bearer credential: an API key of ours or a JWT of a
//! configured issuer. Either becomes an [`AuthenticatedCaller`], which has no
//! other maker, before a byte of the body is read. To the client every
//! credential that does not authenticate looks the same, whether it is
//! unknown, revoked, expired or misspelt.

mod bearer;
mod claims;
mod fetch;
pub(crate) mod fuzz;
mod issuer;
mod jwks;
mod jwt;
mod key_directory;
mod key_store;
mod pepper;
mod scopes;
mod secret;

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod key_tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{Caller, KeyId, ModelName, PlanName, TenantId, UtcTime};

pub(crate) use self::bearer::shows_token;
pub use self::fetch::FetchError;
pub use self::issuer::{IssuerError, IssuerKeys, IssuerOptions};
pub use self::key_store::{KeyOptions, KeyRecord, KeyStore, KeyStoreError, NewKey, UnderWay};
pub use self::scopes::{Endpoint, Scopes, UnknownEndpoint};
pub use self::secret::{KeySecret, NoRandomness};

use self::bearer::Credential;
use self::jwt::TokenVerifier;
use crate::ApiError;

/// Finds out who calls. Clones share one set of keys and issuers.
#[derive(Clone, Debug)]
pub struct Authenticator {
    parts: Arc<Parts>,
}

#[derive(Debug)]
struct Parts {
    keys: KeyStore,
    tokens: TokenVerifier,
}

/// A tenant and the credential it showed, checked. Nothing but
/// [`Authenticator::authenticate`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthenticatedCaller {
    caller: Caller,
    /// `None`: whatever the tenant may.
    scopes: Option<Arc<Scopes>>,
    plan: Option<PlanName>,
}

/// Why nobody was authenticated; also the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AuthError {
    /// No `authorization` header.
    #[error("no credential was shown")]
    Missing,
    /// More than one header, another scheme, or nothing that could be a
    /// credential; found without looking anything up.
    #[error("the credential is malformed")]
    Malformed,
    /// Well formed, and not good: unknown, revoked, expired, badly signed.
    #[error("the credential was rejected")]
    Rejected,
    /// Good, and shown from a network that it may not be used from.
    #[error("the credential may not be used from here")]
    Elsewhere,
}

impl Authenticator {
    /// Reads the issuers' keys; `keys` is the store to look API keys up in.
    ///
    /// # Errors
    /// When an issuer has no usable key: the error names issuer and file.
    pub fn new(keys: KeyStore, issuers: Vec<IssuerOptions>) -> Result<Self, IssuerError> {
        let tokens = TokenVerifier::new(issuers)?;
        Ok(Self { parts: Arc::new(Parts { keys, tokens }) })
    }

    /// Who shows these headers at `now`, from the address `from`?
    ///
    /// # Errors
    /// When nobody that we know.
    pub fn authenticate(
        &self,
        headers: &HeaderMap,
        from: Option<IpAddr>,
        now: UtcTime,
    ) -> Result<AuthenticatedCaller, AuthError> {
        let credential = bearer::credential(headers)?;
        match credential {
            Credential::Key(key) => {
                let caller = self.parts.keys.verify(key, now).ok_or(AuthError::Rejected)?;
                let scopes = caller.scopes.as_ref();
                if scopes.is_none_or(|scopes| scopes.has_source(from)) {
                    Ok(caller)
                } else {
                    Err(AuthError::Elsewhere)
                }
            }
            Credential::Token(token) => {
                let caller =
                    self.parts.tokens.verify(token, now).map_err(|_| AuthError::Rejected)?;
                Ok(AuthenticatedCaller { caller, scopes: None, plan: None })
            }
        }
    }

    /// The keys it looks up.
    pub fn keys(&self) -> &KeyStore {
        &self.parts.keys
    }

    /// Follows what other processes do to the keys and to the issuers' files,
    /// until `stop`: a revoked key is refused within a second. What cannot be
    /// read changes nothing, and is logged once until it can be read again.
    /// Key sets that are fetched are fetched meanwhile.
    pub async fn follow_changes(self, stop: CancellationToken) {
        let urls = stop.run_until_cancelled(self.parts.tokens.follow_urls());
        tokio::join!(urls, self.follow_files(&stop));
    }

    async fn follow_files(&self, stop: &CancellationToken) {
        let mut ticks = tokio::time::interval(POLL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut failing = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let parts = Arc::clone(&self.parts);
            let Ok((keys, tokens)) =
                tokio::task::spawn_blocking(move || (parts.keys.refresh(), parts.tokens.refresh()))
                    .await
            else {
                continue; // the runtime is stopping
            };
            match (keys, tokens) {
                (Ok(()), Ok(())) => failing = false,
                (keys, tokens) if !failing => {
                    failing = true;
                    if let Err(error) = keys {
                        tracing::error!(
                            error = &error as &dyn std::error::Error,
                            "keys cannot be read"
                        );
                    }
                    if let Err(error) = tokens {
                        tracing::error!(
                            error = &error as &dyn std::error::Error,
                            "issuer keys cannot be read"
                        );
                    }
                }
                _ => {}
            }
        }
    }
}

impl AuthenticatedCaller {
    /// Tenant and key, as they stand in every record.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Who pays.
    pub fn tenant(&self) -> &TenantId {
        &self.caller.tenant
    }

    /// The credential's public id; `jwt:` and the subject for a token.
    pub fn key(&self) -> &KeyId {
        &self.caller.key
    }

    /// The plan that limits this credential alone, if one does; config may no
    /// longer have it.
    pub fn plan(&self) -> Option<&PlanName> {
        self.plan.as_ref()
    }

    /// Whether the credential may ask for `model`.
    pub fn may_use_model(&self, model: &ModelName) -> bool {
        self.scopes.as_ref().is_none_or(|scopes| scopes.has_model(model))
    }

    /// Whether the credential may call `endpoint`.
    pub fn may_use_endpoint(&self, endpoint: Endpoint) -> bool {
        self.scopes.as_ref().is_none_or(|scopes| scopes.has_endpoint(endpoint))
    }
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::Missing => Self::MissingCredential,
            AuthError::Malformed | AuthError::Rejected => Self::InvalidCredential,
            AuthError::Elsewhere => Self::SourceNotAllowed,
        }
    }
}

/// How often changes are looked for: four times within the second that is
/// promised.
const POLL: Duration = Duration::from_millis(250);
