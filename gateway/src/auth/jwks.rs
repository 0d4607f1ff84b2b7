//! An issuer's keys, read. A JWK set is read strictly: public signature keys
//! only, each with its id; a bad set never replaces a good one.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use jsonwebtoken::jwk::{AlgorithmParameters, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::Deserialize;

use super::issuer::{IssuerError, IssuerKeys, IssuerOptions, VerifyingKey, usable};

/// Reads all keys of an issuer, and the content of its key set if that is what
/// it has; `algorithms` are those it may use. What is fetched is not there yet.
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
            let first = files.first().map_or(Path::new(""), |(_, path)| path);
            Ok((told_apart(options, &first.display(), keys)?, Vec::new()))
        }
        IssuerKeys::JwksFile(path) => {
            let content = read(options, path)?;
            Ok((from_set(options, &path.display(), &content, algorithms)?, content))
        }
        IssuerKeys::JwksUrl { .. } => Ok((Vec::new(), Vec::new())),
    }
}

/// The keys of a JWK set that stood at `place`; at least one.
pub(super) fn from_set(
    options: &IssuerOptions,
    place: &dyn fmt::Display,
    content: &[u8],
    algorithms: &[Algorithm],
) -> Result<Vec<VerifyingKey>, IssuerError> {
    told_apart(options, place, from_jwks(options, place, content, algorithms)?)
}

/// Some keys, each with an id of its own.
fn told_apart(
    options: &IssuerOptions,
    place: &dyn fmt::Display,
    keys: Vec<VerifyingKey>,
) -> Result<Vec<VerifyingKey>, IssuerError> {
    if keys.is_empty() {
        return Err(options.key_error(place, "holds no key that the configured algorithms can use"));
    }
    let named_twice = |at: usize| keys[..at].iter().any(|key| key.id == keys[at].id);
    if (0..keys.len()).any(named_twice) {
        return Err(options.key_error(place, "two keys have the same id, or none"));
    }
    Ok(keys)
}

/// The bytes of a key file, bounded.
pub(super) fn read(options: &IssuerOptions, path: &Path) -> Result<Vec<u8>, IssuerError> {
    let fault =
        |source| IssuerError::File { issuer: options.name.clone(), path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fault)?;
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(fault)?;
    if bytes.len() as u64 > LARGEST_FILE {
        let message = format!("larger than {LARGEST_FILE} bytes");
        return Err(options.key_error(path.display(), message));
    }
    Ok(bytes)
}

fn from_pem(pem: &[u8]) -> Option<DecodingKey> {
    // A private key here is a mistake to be told, not used.
    if pem.windows(11).any(|part| part == b"PRIVATE KEY") {
        return None;
    }
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
        .map_err(|error| options.key_error(place, format!("no JWK set: {error}")))?;
    if set.keys.len() > MOST_KEYS {
        return Err(options.key_error(place, format!("more than {MOST_KEYS} keys")));
    }
    let mut keys = Vec::new();
    for jwk in &set.keys {
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

/// The algorithms that a JWK may be used with; `None` if it is no public
/// signature key at all. Sets hold keys for other purposes, too.
fn allowed_for(jwk: &Jwk, algorithms: &[Algorithm]) -> Option<Vec<Algorithm>> {
    let common = &jwk.common;
    let for_signing = common.public_key_use.as_ref().is_none_or(|u| *u == PublicKeyUse::Signature)
        && common.key_operations.as_ref().is_none_or(|ops| ops.contains(&KeyOperations::Verify));
    let public =
        !matches!(jwk.algorithm, AlgorithmParameters::OctetKey(_) | AlgorithmParameters::Other(_));
    if !for_signing || !public {
        return None;
    }
    match common.key_algorithm {
        None => Some(algorithms.to_vec()),
        Some(own) => {
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
        return Err(options.key_error(place, "the key is of no kind that the algorithms name"));
    }
    Ok(VerifyingKey { id, key, algorithms })
}

/// Bytes of a key file or set.
pub(super) const LARGEST_FILE: u64 = 1 << 20;
const MOST_KEYS: usize = 64;
