//! Authentication: the only place where a tenant is found.
//!
//! A request carries one bearer credential: an API key of this gateway, or a JWT
//! of a configured issuer. Either becomes an [`AuthenticatedCaller`], which
//! nothing else makes, before the body is read. A client cannot see why its
//! credential failed: unknown, revoked, expired and misspelt keys get the same
//! answer.

mod bearer;
mod claims;
mod fetch;
pub(crate) mod fuzz;
mod issuer;
mod jwks;
mod jwt;
mod key_directory;
mod key_request;
mod key_store;

mod roles;
mod scopes;
mod secret;

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod key_tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::HeaderMap;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{Caller, KeyId, ModelName, PlanName, TenantId, UtcTime};

pub(crate) use self::bearer::shows_token;
pub use self::fetch::FetchError;
pub use self::issuer::{IssuerError, IssuerKeys, IssuerOptions};
pub use self::key_request::{KeyRequest, UnknownInRequest};
pub use self::key_store::{
    AdminRecord, AdminSecret, HeardBy, KeyOptions, KeyRecord, KeyStore, KeyStoreError, NewAdmin,
    NewKey, UnawareGateway, UnderWay,
};
pub use self::roles::{Right, Role, UnknownRole};
pub use self::scopes::{Endpoint, Scopes, UnknownEndpoint};
pub use self::secret::{KeySecret, NoRandomness};

use self::bearer::Credential;
use self::jwt::TokenVerifier;
use crate::ApiError;

/// Checks the credentials of requests. Clones share one set of keys and issuers.
#[derive(Clone, Debug)]
pub struct Authenticator {
    parts: Arc<Parts>,
}

#[derive(Debug)]
struct Parts {
    keys: KeyStore,
    tokens: ArcSwap<TokenVerifier>,
    /// Notified when a reload has replaced the issuers.
    replaced: Notify,
}

/// Issuers that were read and checked, for [`Authenticator::install`].
#[derive(Debug)]
pub struct PreparedIssuers(TokenVerifier);

/// A tenant and its checked credential. [`Authenticator::authenticate`] is the
/// only maker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthenticatedCaller {
    caller: Caller,
    /// The limits on use; `None` allows everything that the tenant may do.
    scopes: Option<Arc<Scopes>>,
    plan: Option<PlanName>,
}

/// The reasons why a credential fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AuthError {
    /// The request has no `authorization` header.
    #[error("the request has no credential")]
    Missing,
    /// The request has several headers, another scheme, or text that cannot be a
    /// credential. No lookup is needed to see this.
    #[error("the credential is malformed")]
    Malformed,
    /// The credential is well formed and not valid: unknown, revoked, expired or
    /// badly signed.
    #[error("the credential was rejected")]
    Rejected,
    /// The credential is valid, but not from the network of this request.
    #[error("the credential may not be used from this network")]
    Elsewhere,
    /// The server with the keys has not answered for so long that the key may be revoked.
    #[error("the keys could not be compared with the server's for 90 s")]
    Unconfirmed,
}

impl Authenticator {
    /// Makes an authenticator for the API keys in `keys` and the tokens of
    /// `issuers`. Reads the issuers' key files.
    ///
    /// # Errors
    /// An issuer has no usable key. The error names the issuer and the file.
    pub fn new(keys: KeyStore, issuers: Vec<IssuerOptions>) -> Result<Self, IssuerError> {
        let tokens = ArcSwap::from_pointee(TokenVerifier::new(issuers)?);
        Ok(Self { parts: Arc::new(Parts { keys, tokens, replaced: Notify::new() }) })
    }

    /// Reads the key files of `issuers`, which a reload brings. Nothing changes before
    /// [`Self::install`].
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn prepare(&self, issuers: Vec<IssuerOptions>) -> Result<PreparedIssuers, IssuerError> {
        self.parts.tokens.load().succeeded_by(issuers).map(PreparedIssuers)
    }

    /// Accepts the tokens of the prepared issuers and of no others.
    pub fn install(&self, prepared: PreparedIssuers) {
        self.parts.tokens.store(Arc::new(prepared.0));
        // After the store, so that the task that wakes finds the new issuers.
        self.parts.replaced.notify_one();
    }

    /// Returns the caller with the credential in `headers`, at the time `now` and
    /// from the address `from`.
    ///
    /// # Errors
    /// The credential is missing or does not authenticate.
    pub fn authenticate(
        &self,
        headers: &HeaderMap,
        from: Option<IpAddr>,
        now: UtcTime,
    ) -> Result<AuthenticatedCaller, AuthError> {
        let credential = bearer::credential(headers)?;
        match credential {
            Credential::Key(_) if !self.parts.keys.is_confirmed() => Err(AuthError::Unconfirmed),
            Credential::Key(key) => {
                let caller = self.parts.keys.verify(key, now).ok_or(AuthError::Rejected)?;
                let scopes = caller.scopes.as_ref();
                // After the secret is verified, so that only a holder of the key learns of this
                // limit.
                if scopes.is_none_or(|scopes| scopes.has_source(from)) {
                    Ok(caller)
                } else {
                    Err(AuthError::Elsewhere)
                }
            }
            Credential::Token(token) => {
                let caller =
                    self.parts.tokens.load().verify(token, now).map_err(|_| AuthError::Rejected)?;
                // Scopes and plans belong to API keys. The limits of the tenant bind a token.
                Ok(AuthenticatedCaller { caller, scopes: None, plan: None })
            }
        }
    }

    /// Returns the caller that has made a batch, with the limits of its credential as they
    /// are now; `None` if its key was revoked. A batch outlives its key's expiry and rotation,
    /// and a token that made it.
    pub(crate) fn batch_caller(&self, caller: &Caller) -> Option<AuthenticatedCaller> {
        self.parts.keys.batch_caller(caller)
    }

    /// Returns the store of API keys.
    pub fn keys(&self) -> &KeyStore {
        &self.parts.keys
    }

    /// Follows changes that other processes make to the keys and to the issuers'
    /// files, and fetches remote key sets, until `stop`. A revoked key is refused
    /// within a second. A file that cannot be read changes nothing; the failure is
    /// logged once, and again after the next success.
    pub async fn follow_changes(self, stop: CancellationToken) {
        let urls = stop.run_until_cancelled(self.follow_urls());
        // Side by side, so that a slow issuer does not delay the look for revoked keys.
        tokio::join!(urls, self.follow_files(&stop));
    }

    /// Fetches the remote key sets of the issuers that are in force; never returns.
    async fn follow_urls(&self) {
        loop {
            // Loaded before the wait: `Notify` keeps a notice, so no reload in between is missed.
            let tokens = self.parts.tokens.load_full();
            tokio::select! {
                () = self.parts.replaced.notified() => {}
                // Without remote key sets there is nothing to follow until a reload.
                () = async { tokens.follow_urls().await; std::future::pending().await } => {}
            }
        }
    }

    async fn follow_files(&self, stop: &CancellationToken) {
        let mut ticks = tokio::time::interval(POLL);
        // After a stall one look finds every change, so missed looks are not made up for.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut failing = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let parts = Arc::clone(&self.parts);
            let Ok((keys, tokens)) =
                // The database and the files block their thread, which must not be one that serves.
                tokio::task::spawn_blocking(move || (parts.keys.refresh(), parts.tokens.load().refresh()))
                    .await
            else {
                // A blocking task fails only while the runtime stops.
                continue;
            };
            match (keys, tokens) {
                (Ok(()), Ok(())) => failing = false,
                (keys, tokens) if !failing => {
                    failing = true;
                    if let Err(error) = keys {
                        tracing::error!(
                            error = &error as &dyn std::error::Error,
                            "the key database cannot be read; the keys in memory stay valid, those of a server for 90 s"
                        );
                    }
                    if let Err(error) = tokens {
                        tracing::error!(
                            error = &error as &dyn std::error::Error,
                            "an issuer's keys cannot be read; its earlier keys stay valid"
                        );
                    }
                }
                // The failure is in the log already; four lines a second would fill the log.
                _ => {}
            }
        }
    }
}

impl AuthenticatedCaller {
    /// Returns tenant and key, as every record names them.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the tenant that pays.
    pub fn tenant(&self) -> &TenantId {
        &self.caller.tenant
    }

    /// Returns the public id of the key; for a token, `jwt:` and its subject.
    pub fn key(&self) -> &KeyId {
        &self.caller.key
    }

    /// Returns the plan that limits this credential alone, if it has one. The plan
    /// may be gone from the config.
    pub fn plan(&self) -> Option<&PlanName> {
        self.plan.as_ref()
    }

    /// True if the credential may use `model`.
    pub fn may_use_model(&self, model: &ModelName) -> bool {
        self.scopes.as_ref().is_none_or(|scopes| scopes.has_model(model))
    }

    /// True if the credential may call `endpoint`.
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
            AuthError::Unconfirmed => Self::LedgerUnavailable,
        }
    }
}

/// The interval between two looks for changes: four looks within the second in
/// which a revocation must take effect.
const POLL: Duration = Duration::from_millis(250);
