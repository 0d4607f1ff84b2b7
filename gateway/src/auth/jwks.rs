//! Reading an issuer's keys. A JWK set is read strictly: it must hold public
//! signature keys with distinct ids. A bad set never replaces a good one.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use jsonwebtoken::jwk::{AlgorithmParameters, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::Deserialize;

use super::issuer::{IssuerError, IssuerKeys, IssuerOptions, VerifyingKey, usable};

/// Reads all keys of an issuer that may use `algorithms`. Returns the content of
/// the key set, too, if the issuer has one in a file. A set that is fetched comes
/// later, so it has no keys yet.
pub(super) fn load(
    options: &IssuerOptions,
    algorithms: &[Algorithm],
) -> Result<(Vec<VerifyingKey>, Vec<u8>), IssuerError> {
    match &options.keys {
        IssuerKeys::Pem(files) => {
            let mut keys = Vec::new();
            for (id, path) in files {
                let place = path.display();
                let key = from_pem(&read(options, path)?).ok_or_else(|| {
                    options.key_error(&place, "no PEM public key of an RSA, EC or Ed25519 kind")
                })?;
                keys.push(checked(options, &place, id.clone(), key, algorithms)?);
            }
            // Errors name one file; the first stands for all.
            let first = files.first().map_or(Path::new(""), |(_, path)| path);
            Ok((with_distinct_ids(options, &first.display(), keys)?, Vec::new()))
        }
        IssuerKeys::JwksFile(path) => {
            let content = read(options, path)?;
            Ok((from_set(options, &path.display(), &content, algorithms)?, content))
        }
        IssuerKeys::JwksUrl { .. } => Ok((Vec::new(), Vec::new())),
    }
}

/// Returns the keys of the JWK set from `place`; at least one.
pub(super) fn from_set(
    options: &IssuerOptions,
    place: &dyn fmt::Display,
    content: &[u8],
    algorithms: &[Algorithm],
) -> Result<Vec<VerifyingKey>, IssuerError> {
    with_distinct_ids(options, place, from_jwks(options, place, content, algorithms)?)
}

/// Returns `keys` if there are any and each has an id of its own.
fn with_distinct_ids(
    options: &IssuerOptions,
    place: &dyn fmt::Display,
    keys: Vec<VerifyingKey>,
) -> Result<Vec<VerifyingKey>, IssuerError> {
    if keys.is_empty() {
        return Err(options.key_error(place, "holds no key that the configured algorithms can use"));
    }
    // A token names its key by the id, so one id must not mean two keys.
    let is_duplicate = |at: usize| keys[..at].iter().any(|key| key.id == keys[at].id);
    if (0..keys.len()).any(is_duplicate) {
        return Err(options.key_error(place, "two keys have the same id, or none"));
    }
    Ok(keys)
}

/// Returns the content of a key file, which has a largest size.
pub(super) fn read(options: &IssuerOptions, path: &Path) -> Result<Vec<u8>, IssuerError> {
    let fault =
        |source| IssuerError::File { issuer: options.name.clone(), path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fault)?;
    // One byte more than allowed is read, so that a larger file is noticed.
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(fault)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let message = format!("larger than {MAX_FILE_BYTES} bytes");
        return Err(options.key_error(path.display(), message));
    }
    Ok(bytes)
}

fn from_pem(pem: &[u8]) -> Option<DecodingKey> {
    // A private key here is a mistake of the admin: it must be reported, not used.
    if pem.windows(11).any(|part| part == b"PRIVATE KEY") {
        return None;
    }
    // The label `PUBLIC KEY` does not name the kind of the key, so each kind is tried.
    DecodingKey::from_rsa_pem(pem)
        .or_else(|_| DecodingKey::from_ec_pem(pem))
        .or_else(|_| DecodingKey::from_ed_pem(pem))
        .ok()
}

fn from_jwks(
    options: &IssuerOptions,
    place: &dyn fmt::Display,
    content: &[u8],
    algorithms: &[Algorithm],
) -> Result<Vec<VerifyingKey>, IssuerError> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<Jwk>,
    }
    let set: Set = serde_json::from_slice(content)
        .map_err(|error| options.key_error(place, format!("not a JWK set: {error}")))?;
    if set.keys.len() > MAX_KEYS {
        return Err(options.key_error(place, format!("more than {MAX_KEYS} keys")));
    }
    let mut keys = Vec::new();
    for jwk in &set.keys {
        // A set may hold keys for other purposes: they are skipped, not refused.
        let Some(allowed) = allowed_for(jwk, algorithms) else { continue };
        let key = DecodingKey::from_jwk(jwk)
            .map_err(|error| options.key_error(place, format!("a damaged key: {error}")))?;
        let algorithms = usable(&key, &allowed);
        if algorithms.is_empty() {
            continue;
        }
        let id = jwk.common.key_id.clone();
        keys.push(checked(options, place, id, key, &algorithms)?);
    }
    Ok(keys)
}

/// Returns the algorithms that a JWK may be used with; `None` if the JWK is not a
/// public signature key.
fn allowed_for(jwk: &Jwk, algorithms: &[Algorithm]) -> Option<Vec<Algorithm>> {
    let common = &jwk.common;
    let for_signing = common.public_key_use.as_ref().is_none_or(|u| *u == PublicKeyUse::Signature)
        && common.key_operations.as_ref().is_none_or(|ops| ops.contains(&KeyOperations::Verify));
    let public =
        // An octet key is a shared secret: every reader of the set could forge tokens with it.
        !matches!(jwk.algorithm, AlgorithmParameters::OctetKey(_) | AlgorithmParameters::Other(_));
    if !for_signing || !public {
        return None;
    }
    match common.key_algorithm {
        None => Some(algorithms.to_vec()),
        Some(own) => {
            // An algorithm that is not known here makes the key unusable, and not the whole set.
            let own = own.to_string().parse::<Algorithm>().ok()?;
            Some(algorithms.iter().copied().filter(|&algorithm| algorithm == own).collect())
        }
    }
}

fn checked(
    options: &IssuerOptions,
    place: &dyn fmt::Display,
    id: Option<String>,
    key: DecodingKey,
    algorithms: &[Algorithm],
) -> Result<VerifyingKey, IssuerError> {
    let algorithms = usable(&key, algorithms);
    if algorithms.is_empty() {
        return Err(
            options.key_error(place, "the configured algorithms cannot use this kind of key")
        );
    }
    Ok(VerifyingKey { id, key, algorithms })
}

/// Bytes of the largest key file or set.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;
/// Keys of the largest set.
const MAX_KEYS: usize = 64;
