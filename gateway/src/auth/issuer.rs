//! An issuer of tokens: whose signatures we believe, made with which keys.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use tollgate_config::JwtKeys;

use super::fetch::FetchError;

/// An issuer as config names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerOptions {
    /// What config calls it, for errors.
    pub name: String,
    /// The `iss` claim of its tokens, exactly.
    pub issuer: String,
    /// The `aud` values that mean us; at least one.
    pub audiences: Vec<String>,
    /// The algorithms it signs with, of RS256, RS384, RS512, PS256, PS384,
    /// PS512, ES256, ES384 and EdDSA.
    pub algorithms: Vec<String>,
    /// The claim that names the tenant.
    pub tenant_claim: String,
    /// The tenants it may name; any, if not given. An issuer that one tenant
    /// runs must not speak for another.
    pub tenants: Option<Vec<tollgate_domain::TenantId>>,
    /// Where its public keys are.
    pub keys: IssuerKeys,
    /// How far its clock and ours may be apart.
    pub leeway: Duration,
}

/// Where an issuer's public keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IssuerKeys {
    /// PEM files, each with the key id that tokens name it by (none where the
    /// issuer has one key and names none).
    Pem(Vec<(Option<String>, PathBuf)>),
    /// A JWK set, read again when the file changes.
    JwksFile(PathBuf),
    /// A JWK set, fetched over TLS.
    JwksUrl {
        /// Where it is: `https://`.
        url: String,
        /// The authorities to trust; the system's where `None`.
        ca: Option<PathBuf>,
        /// How often it is fetched.
        refresh: Duration,
    },
}

/// Why an issuer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IssuerError {
    /// A field of its config is wrong.
    #[error("issuer {issuer}: {field}: {message}")]
    Option {
        /// The issuer, as config calls it.
        issuer: String,
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A key file cannot be read.
    #[error("issuer {issuer}: {path}: cannot be read")]
    File {
        /// The issuer.
        issuer: String,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key set cannot be fetched.
    #[error("issuer {issuer}: {url}")]
    Fetch {
        /// The issuer.
        issuer: String,
        /// Where from.
        url: String,
        /// Why not.
        source: FetchError,
    },
    /// A key file or set holds no usable key, or one that must not be used.
    #[error("issuer {issuer}: {place}: {message}")]
    Keys {
        /// The issuer.
        issuer: String,
        /// The file or URL.
        place: String,
        /// What is wrong.
        message: String,
    },
}

/// A public key and the algorithms it may check: those of its family that the
/// issuer's config allows, so that no token can choose another use for it.
#[derive(Clone, Debug)]
pub(super) struct VerifyingKey {
    pub(super) id: Option<String>,
    pub(super) key: DecodingKey,
    pub(super) algorithms: Vec<Algorithm>,
}

/// Of several PEM files, each file's name without its ending is the key id
/// that tokens name it by; a single file's key needs none.
impl From<&tollgate_config::Issuer> for IssuerOptions {
    fn from(issuer: &tollgate_config::Issuer) -> Self {
        let tollgate_config::Issuer {
            name,
            issuer,
            audience,
            algorithms,
            keys,
            tenant_claim,
            tenants,
            leeway,
        } = issuer;
        let keys = match keys {
            JwtKeys::Jwks(path) => IssuerKeys::JwksFile(path.clone()),
            JwtKeys::Url { url, ca, refresh } => IssuerKeys::JwksUrl {
                url: url.as_str().to_owned(),
                ca: ca.clone(),
                refresh: *refresh,
            },
            JwtKeys::Pem(paths) => {
                let id = |path: &PathBuf| {
                    let stem = path.file_stem().filter(|_| paths.len() > 1)?;
                    Some(stem.to_string_lossy().into_owned())
                };
                IssuerKeys::Pem(paths.iter().map(|path| (id(path), path.clone())).collect())
            }
        };
        Self {
            name: name.clone(),
            issuer: issuer.clone(),
            audiences: vec![audience.clone()],
            algorithms: algorithms.iter().map(ToString::to_string).collect(),
            tenant_claim: tenant_claim.clone(),
            tenants: tenants.as_ref().map(|tenants| tenants.iter().cloned().collect()),
            keys,
            leeway: *leeway,
        }
    }
}

impl IssuerOptions {
    /// Checks what can be checked without files; returns the algorithms.
    pub(super) fn check(&self) -> Result<Vec<Algorithm>, IssuerError> {
        let wrong = |field, message: &str| IssuerError::Option {
            issuer: self.name.clone(),
            field,
            message: message.to_owned(),
        };
        if self.issuer.is_empty() {
            return Err(wrong("issuer", "must not be empty"));
        }
        if self.audiences.is_empty() || self.audiences.iter().any(String::is_empty) {
            return Err(wrong("audiences", "name at least one, and none empty"));
        }
        if self.tenant_claim.is_empty() {
            return Err(wrong("tenant_claim", "must not be empty"));
        }
        if self.algorithms.is_empty() {
            return Err(wrong("algorithms", "name at least one"));
        }
        let parse = |name: &String| match name.parse::<Algorithm>() {
            Ok(algorithm) if algorithm.family() != AlgorithmFamily::Hmac => Ok(algorithm),
            Ok(_) => {
                Err(wrong("algorithms", "HS* need a shared secret; use RS*, PS*, ES* or EdDSA"))
            }
            Err(_) => Err(wrong("algorithms", "use RS*, PS*, ES256, ES384 or EdDSA")),
        };
        self.algorithms.iter().map(parse).collect()
    }

    pub(super) fn key_error(
        &self,
        place: impl fmt::Display,
        message: impl Into<String>,
    ) -> IssuerError {
        IssuerError::Keys {
            issuer: self.name.clone(),
            place: place.to_string(),
            message: message.into(),
        }
    }
}

/// The algorithms among `allowed` that `key` can check. An EC key's curve
/// decides, so its length does.
pub(super) fn usable(key: &DecodingKey, allowed: &[Algorithm]) -> Vec<Algorithm> {
    let point = key.try_get_as_bytes().map_or(0, <[u8]>::len);
    let fits = |algorithm: &&Algorithm| match algorithm {
        Algorithm::ES256 => point == 65,
        Algorithm::ES384 => point == 97,
        _ => true,
    };
    allowed
        .iter()
        .filter(|algorithm| algorithm.family() == key.family())
        .filter(fits)
        .copied()
        .collect()
}
