//! The issuers of tokens: their names, their keys, and the algorithms that they
//! may use.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use tollgate_config::JwtKeys;

use super::fetch::FetchError;

/// One issuer of the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerOptions {
    /// The issuer's name in the config, for errors.
    pub name: String,
    /// The exact `iss` claim of the issuer's tokens.
    pub issuer: String,
    /// The values of `aud` that this gateway accepts; at least one.
    pub audiences: Vec<String>,
    /// The allowed algorithms, out of RS256, RS384, RS512, PS256, PS384, PS512,
    /// ES256, ES384 and EdDSA.
    pub algorithms: Vec<String>,
    /// The claim that names the tenant.
    pub tenant_claim: String,
    /// The tenants that the issuer may name; `None` allows all. The issuer of one
    /// tenant must not sign tokens of another tenant.
    pub tenants: Option<Vec<tollgate_domain::TenantId>>,
    /// The source of the issuer's public keys.
    pub keys: IssuerKeys,
    /// The largest difference between the issuer's clock and the gateway's.
    pub leeway: Duration,
}

/// The source of an issuer's public keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IssuerKeys {
    /// PEM files, each with the key id that tokens use for it. The only key of an
    /// issuer needs no id.
    Pem(Vec<(Option<String>, PathBuf)>),
    /// A file with a JWK set. The gateway reads the file again after a change.
    JwksFile(PathBuf),
    /// A JWK set that the gateway fetches over TLS.
    JwksUrl {
        /// The address, an `https://` URL.
        url: String,
        /// The file of trusted certificate authorities; `None` trusts the system's.
        ca: Option<PathBuf>,
        /// The interval between two fetches.
        refresh: Duration,
    },
}

/// The reasons why an issuer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IssuerError {
    /// A field of the issuer's config is wrong.
    #[error("issuer {issuer}: {field}: {message}")]
    Option {
        /// The issuer's name in the config.
        issuer: String,
        /// The name of the field.
        field: &'static str,
        /// The mistake, as a sentence.
        message: String,
    },
    /// A key file cannot be read.
    #[error("issuer {issuer}: {path}: cannot be read")]
    File {
        /// The issuer's name in the config.
        issuer: String,
        /// The path of the key file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A key set cannot be fetched.
    #[error("issuer {issuer}: {url}: the key set cannot be fetched")]
    Fetch {
        /// The issuer's name in the config.
        issuer: String,
        /// The address of the key set.
        url: String,
        /// The reason of the failure.
        source: FetchError,
    },
    /// A file or set holds no usable key, or a key that must not be used.
    #[error("issuer {issuer}: {place}: {message}")]
    Keys {
        /// The issuer's name in the config.
        issuer: String,
        /// The file or URL of the keys.
        place: String,
        /// The mistake, as a sentence.
        message: String,
    },
}

/// A public key and the algorithms that it may check: those of its family that
/// the issuer's config allows. A token cannot choose another use for the key.
#[derive(Clone, Debug)]
pub(super) struct VerifyingKey {
    pub(super) id: Option<String>,
    pub(super) key: DecodingKey,
    pub(super) algorithms: Vec<Algorithm>,
}

/// Reads the issuer's section of the config. If there are several PEM files, the
/// name of each file without its extension is the id of its key.
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
                    // A single file has no id, so that tokens may name its key as they like.
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
    /// Checks every option that needs no file; returns the algorithms.
    pub(super) fn check(&self) -> Result<Vec<Algorithm>, IssuerError> {
        let wrong = |field, message: &str| IssuerError::Option {
            issuer: self.name.clone(),
            field,
            message: message.to_owned(),
        };
        if self.issuer.is_empty() {
            return Err(wrong("issuer", "must not be empty"));
        }
        // Without an audience, a token that was issued for another service would pass.
        if self.audiences.is_empty() || self.audiences.iter().any(String::is_empty) {
            return Err(wrong("audiences", "name at least one; none may be empty"));
        }
        if self.tenant_claim.is_empty() {
            return Err(wrong("tenant_claim", "must not be empty"));
        }
        if self.algorithms.is_empty() {
            return Err(wrong("algorithms", "name at least one"));
        }
        let parse = |name: &String| match name.parse::<Algorithm>() {
            // HMAC is never allowed: an attacker could sign a token with a public key as its
            // secret.
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

/// Returns the algorithms among `allowed` that `key` can check.
pub(super) fn usable(key: &DecodingKey, allowed: &[Algorithm]) -> Vec<Algorithm> {
    // The length of an EC key's point tells its curve, which decides the algorithm.
    let point = key.try_get_as_bytes().map_or(0, <[u8]>::len);
    let fits = |algorithm: &&Algorithm| match algorithm {
        // An uncompressed point is one byte and two coordinates, of 32 or of 48 bytes each.
        Algorithm::ES256 => point == 65,
        Algorithm::ES384 => point == 97,
        _ => true,
    };
    allowed
        .iter()
        // A key of another family would let a token choose how its signature is read.
        .filter(|algorithm| algorithm.family() == key.family())
        .filter(fits)
        .copied()
        .collect()
}
