//! Checks of tokens from configured issuers. The checks are strict: a header field
//! that is not expected is refused, not ignored. A token never decides where its
//! key comes from, or how its signature is checked.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use tokio::sync::Notify;
use tollgate_domain::{Caller, KeyId, TenantId, UtcTime};

use super::claims::{self, Claims, TokenHeader};
use super::fetch::{FetchError, FetchLimits, Fetcher};
use super::issuer::{IssuerError, IssuerKeys, IssuerOptions, VerifyingKey};
use super::jwks;

/// The verifier of the tokens of all issuers.
#[derive(Debug)]
pub(super) struct TokenVerifier {
    issuers: Vec<Arc<Issuer>>,
}

#[derive(Debug)]
struct Issuer {
    options: IssuerOptions,
    algorithms: Vec<Algorithm>,
    keys: ArcSwap<Vec<VerifyingKey>>,
    /// The bytes of the last good key set.
    content: Mutex<Vec<u8>>,
    /// The fetcher of a remote key set.
    fetcher: Option<Fetcher>,
    /// Notified when a token names an unknown key.
    wanted: Notify,
}

/// The reasons why a token is refused. Clients never see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Refused {
    TooLong,
    Shape,
    Header,
    Type,
    Algorithm,
    Issuer,
    Key,
    Signature,
    Claims,
    Audience,
    Expired,
    NotYet,
    Subject,
    Tenant,
}

impl TokenVerifier {
    pub(super) fn new(options: Vec<IssuerOptions>) -> Result<Self, IssuerError> {
        Self { issuers: Vec::new() }.succeeded_by(options)
    }

    /// Makes the verifier that follows this one. Issuers that stay as they are keep their
    /// keys, so that those fetched from a URL are not lost.
    pub(super) fn succeeded_by(&self, options: Vec<IssuerOptions>) -> Result<Self, IssuerError> {
        let mut issuers: Vec<Arc<Issuer>> = Vec::with_capacity(options.len());
        for options in options {
            // A token must lead to one issuer, or the order in the config would choose its key.
            if issuers.iter().any(|other| other.means_the_same_as(&options)) {
                return Err(IssuerError::Option {
                    issuer: options.name,
                    field: "issuer",
                    message: "another issuer has the same, and an audience in common".into(),
                });
            }
            if let Some(same) = self.issuers.iter().find(|issuer| issuer.options == options) {
                issuers.push(Arc::clone(same));
                continue;
            }
            let algorithms = options.check()?;
            let (keys, content) = jwks::load(&options, &algorithms)?;
            let fetcher = fetcher(&options)?;
            issuers.push(Arc::new(Issuer {
                options,
                algorithms,
                keys: ArcSwap::from_pointee(keys),
                content: Mutex::new(content),
                fetcher,
                wanted: Notify::new(),
            }));
        }
        Ok(Self { issuers })
    }

    /// Reads the JWKS files that have changed.
    ///
    /// # Errors
    /// The first file that cannot be used. Its issuer keeps its earlier keys.
    pub(super) fn refresh(&self) -> Result<(), IssuerError> {
        // All issuers are read before the first error is returned: one bad file
        // must not stop the key rotation of the others.
        let results: Vec<_> = self.issuers.iter().map(|issuer| issuer.refresh()).collect();
        results.into_iter().collect()
    }

    /// Fetches the remote key sets again and again; never returns if there are any.
    pub(super) async fn follow_urls(&self) {
        let followed = self.issuers.iter().filter_map(|issuer| {
            let fetcher = issuer.fetcher.as_ref()?;
            Some(issuer.follow(move || fetcher.get()))
        });
        futures_util::future::join_all(followed).await;
    }

    /// Does the same as [`Self::follow_urls`] for the only issuer, with sets from
    /// `get`.
    #[cfg(test)]
    pub(super) async fn follow_only<F>(&self, get: impl Fn() -> F)
    where
        F: Future<Output = Result<Vec<u8>, FetchError>>,
    {
        let [issuer] = &self.issuers[..] else { panic!("one issuer") };
        issuer.follow(get).await;
    }

    /// Returns the caller of a token that is valid at `now`.
    ///
    /// # Errors
    /// The first check that the token fails.
    pub(super) fn verify(&self, token: &str, now: UtcTime) -> Result<Caller, Refused> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Refused::TooLong);
        }
        // Four, so that a token with more than three parts is noticed.
        let parts: Vec<&str> = token.splitn(4, '.').collect();
        let [header, payload, signature] = parts[..] else { return Err(Refused::Shape) };
        let [header, payload, signature] = [header, payload, signature].map(decode_part);
        // The library reads the signature itself; here only a second form of it is refused.
        let (header, payload, _) = (header?, payload?, signature?);

        let header = checked_header(&header)?;
        let algorithm: Algorithm = header.alg.parse().map_err(|_| Refused::Algorithm)?;
        if !claims::is_object_with_unique_names(&payload) {
            return Err(Refused::Claims);
        }
        // The payload is not trusted yet: it only names the issuer whose key must
        // have signed it.
        let named: Claims = serde_json::from_slice(&payload).map_err(|_| Refused::Claims)?;
        let issuer = self.issuer_of(&named)?;
        if !issuer.algorithms.contains(&algorithm) {
            return Err(Refused::Algorithm);
        }
        let keys = issuer.keys.load();
        let key = choose_key(&keys, header.kid.as_deref(), algorithm).ok_or_else(|| {
            // The issuer may have a new key. The next fetch is bounded in rate, so
            // a client cannot cause many fetches.
            issuer.wanted.notify_one();
            Refused::Key
        })?;
        let claims = signed_claims(token, key, algorithm, &issuer.options)?;
        issuer.check_claims(&claims, now)?;
        issuer.caller(&claims, &payload)
    }

    fn issuer_of(&self, claims: &Claims) -> Result<&Issuer, Refused> {
        let mut refused = Refused::Issuer;
        // Several issuers may have one `iss` and different audiences.
        for issuer in self.issuers.iter().filter(|i| i.options.issuer == claims.iss) {
            if claims.aud.names(&issuer.options.audiences) {
                return Ok(issuer);
            }
            refused = Refused::Audience;
        }
        Err(refused)
    }
}

impl Issuer {
    fn means_the_same_as(&self, other: &IssuerOptions) -> bool {
        self.options.issuer == other.issuer
            && self.options.audiences.iter().any(|audience| other.audiences.contains(audience))
    }

    fn refresh(&self) -> Result<(), IssuerError> {
        let IssuerKeys::JwksFile(path) = &self.options.keys else { return Ok(()) };
        let found = jwks::read(&self.options, path)?;
        // Held to the end, so that the content and the keys change together.
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        if *content == found {
            return Ok(());
        }
        // Read again, so that the keys and the content are of one state of the file.
        let (keys, found) = jwks::load(&self.options, &self.algorithms)?;
        *content = found;
        self.keys.store(keys.into());
        Ok(())
    }

    /// Fetches the key set with `get` at once, and later when the set is old or a
    /// token names a key that the set lacks. Two fetches are never closer than
    /// [`BETWEEN_FETCHES`], so neither tokens nor the issuer can cause more load.
    async fn follow<F>(&self, get: impl Fn() -> F)
    where
        F: Future<Output = Result<Vec<u8>, FetchError>>,
    {
        let IssuerKeys::JwksUrl { url, refresh, .. } = &self.options.keys else { return };
        let mut failing = false;
        loop {
            let taken = match get().await {
                Ok(content) => self.take_set(url, content),
                Err(source) => {
                    let (issuer, url) = (self.options.name.clone(), url.clone());
                    Err(IssuerError::Fetch { issuer, url, source })
                }
            };
            // Once, because a line for each attempt would fill the log.
            if let (Err(error), false) = (&taken, failing) {
                let error = error as &dyn std::error::Error;
                tracing::warn!(
                    error,
                    "an issuer's keys cannot be fetched; its earlier keys stay valid"
                );
            }
            failing = taken.is_err();
            tokio::time::sleep(BETWEEN_FETCHES).await;
            // A failed fetch is repeated without waiting for the refresh interval.
            if failing {
                continue;
            }
            tokio::select! {
                // The pause above counts as a part of the interval.
                () = tokio::time::sleep(refresh.saturating_sub(BETWEEN_FETCHES)) => {}
                () = self.wanted.notified() => {}
            }
        }
    }

    /// Replaces the keys by those of a fetched set, if the set is good.
    fn take_set(&self, url: &str, content: Vec<u8>) -> Result<(), IssuerError> {
        let mut known = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != content {
            let keys = jwks::from_set(&self.options, &url, &content, &self.algorithms)?;
            *known = content;
            self.keys.store(keys.into());
        }
        Ok(())
    }

    /// Checks the claims that a signature does not prove.
    fn check_claims(&self, claims: &Claims, now: UtcTime) -> Result<(), Refused> {
        let now = now.unix_seconds();
        let leeway = self.options.leeway.as_secs();
        if claims.iss != self.options.issuer {
            return Err(Refused::Issuer);
        }
        if !claims.aud.names(&self.options.audiences) {
            return Err(Refused::Audience);
        }
        if claims.exp.saturating_add(leeway) <= now {
            return Err(Refused::Expired);
        }
        let latest = now.saturating_add(leeway);
        if claims.nbf > latest || claims.iat.is_some_and(|issued| issued > latest) {
            return Err(Refused::NotYet);
        }
        // Only the leeway could make such a token valid.
        if claims.nbf >= claims.exp {
            return Err(Refused::Claims);
        }
        Ok(())
    }

    fn caller(&self, claims: &Claims, payload: &[u8]) -> Result<Caller, Refused> {
        let key = token_key(&claims.sub).ok_or(Refused::Subject)?;
        let named =
            claims::text_claim(payload, &self.options.tenant_claim).ok_or(Refused::Tenant)?;
        let tenant = TenantId::new(&named).map_err(|_| Refused::Tenant)?;
        if self.options.tenants.as_ref().is_some_and(|tenants| !tenants.contains(&tenant)) {
            return Err(Refused::Tenant);
        }
        Ok(Caller { tenant, key })
    }
}

fn fetcher(options: &IssuerOptions) -> Result<Option<Fetcher>, IssuerError> {
    let IssuerKeys::JwksUrl { url, ca, .. } = &options.keys else { return Ok(None) };
    let limits = FetchLimits { size: jwks::MAX_FILE_BYTES as usize, deadline: FETCH_DEADLINE };
    Fetcher::new(url, ca.as_deref(), limits).map(Some).map_err(|source| {
        let (issuer, url) = (options.name.clone(), url.clone());
        IssuerError::Fetch { issuer, url, source }
    })
}

fn decode_part(part: &str) -> Result<Vec<u8>, Refused> {
    if part.is_empty() {
        return Err(Refused::Shape);
    }
    // No padding, no other alphabet, no stray bits: each token has only one form.
    URL_SAFE_NO_PAD.decode(part).map_err(|_| Refused::Shape)
}

fn checked_header(json: &[u8]) -> Result<TokenHeader, Refused> {
    if !claims::is_object_with_unique_names(json) {
        return Err(Refused::Header);
    }
    let header: TokenHeader = serde_json::from_slice(json).map_err(|_| Refused::Header)?;
    if header.has_refused_field() {
        return Err(Refused::Header);
    }
    if !is_access_token(header.typ.as_deref()) {
        return Err(Refused::Type);
    }
    Ok(header)
}

/// Returns true for an access token of RFC 9068 (`at+jwt`), and for a token of
/// RFC 7519 without a purpose of its own (`JWT`, or no type). A token for another
/// purpose, such as a logout, has another type.
fn is_access_token(typ: Option<&str>) -> bool {
    // RFC 7515, 4.1.9: a type is a media type. Its case does not count, and
    // `application/` may be left out.
    let Some(typ) = typ.map(str::to_ascii_lowercase) else { return true };
    matches!(typ.strip_prefix("application/").unwrap_or(&typ), "jwt" | "at+jwt")
}

/// Returns the key that the token names. A token that names none is checked with
/// the issuer's only key, never with several keys in turn.
fn choose_key<'a>(
    keys: &'a [VerifyingKey],
    id: Option<&str>,
    algorithm: Algorithm,
) -> Option<&'a DecodingKey> {
    let key = match (id, keys) {
        (None, [only]) => only,
        // A single PEM file has no id, so a token's name for it cannot be compared.
        (Some(_), [only]) if only.id.is_none() => only,
        (Some(id), _) => keys.iter().find(|key| key.id.as_deref() == Some(id))?,
        (None, _) => return None,
    };
    key.algorithms.contains(&algorithm).then_some(&key.key)
}

/// Returns the claims of a token with a valid signature.
fn signed_claims(
    token: &str,
    key: &DecodingKey,
    algorithm: Algorithm,
    options: &IssuerOptions,
) -> Result<Claims, Refused> {
    use jsonwebtoken::errors::ErrorKind;

    let mut validation = Validation::new(algorithm);
    validation.set_required_spec_claims(&["exp", "nbf", "iss", "aud", "sub"]);
    validation.set_audience(&options.audiences);
    validation.set_issuer(std::slice::from_ref(&options.issuer));
    // `Issuer::check_claims` checks the times against the gateway's own clock.
    validation.validate_exp = false;
    validation.validate_nbf = false;
    let data = jsonwebtoken::decode::<Claims>(token, key, &validation);
    data.map(|data| data.claims).map_err(|error| match error.kind() {
        ErrorKind::InvalidSignature => Refused::Signature,
        ErrorKind::InvalidAudience => Refused::Audience,
        ErrorKind::InvalidIssuer => Refused::Issuer,
        ErrorKind::InvalidAlgorithm => Refused::Algorithm,
        _ => Refused::Claims,
    })
}

/// True if a key id stands for the subject of a token.
pub(super) fn is_token_key(key: &KeyId) -> bool {
    key.as_str().starts_with(TOKEN_KEY)
}

/// Returns the key id of a token's subject: `jwt:` and the subject. In a subject
/// that is not a valid name, such as a mail address, other characters are
/// replaced and a digest of the subject is added, so that two subjects never
/// share a key id.
fn token_key(subject: &str) -> Option<KeyId> {
    if subject.is_empty() || subject.len() > MAX_SUBJECT_BYTES {
        return None;
    }
    // No issuer names a caller by them, and they forge lines where a name is shown.
    if subject.chars().any(char::is_control) {
        return None;
    }
    let plain = KeyId::new(&format!("{TOKEN_KEY}{subject}")).ok();
    // A subject that contains the mark of a replaced one is replaced, too;
    // otherwise it could take the key id of another subject.
    if let Some(key) = plain.filter(|_| !subject.contains(REPLACED)) {
        return Some(key);
    }
    let replaced: String = subject
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-:/".contains(c) { c } else { '_' })
        // Cut, so that the mark and the digest still fit into a name.
        .take(64)
        .collect();
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, subject.as_bytes());
    let digest: String = digest.as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    KeyId::new(&format!("{TOKEN_KEY}{replaced}{REPLACED}{digest}")).ok()
}

/// The shortest time between two fetches of one key set.
pub(super) const BETWEEN_FETCHES: Duration = Duration::from_secs(30);
/// The longest time that one fetch may take.
const FETCH_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of the longest token; a longer token is refused unread.
pub(super) const MAX_TOKEN_BYTES: usize = 8 << 10;
const MAX_SUBJECT_BYTES: usize = 1_024;
const TOKEN_KEY: &str = "jwt:";
/// The mark between a replaced subject and its digest.
const REPLACED: &str = ":sha256:";
