//! Issuers and tokens for tests: valid ones, and helpers that make invalid ones.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{self, EcdsaKeyPair, Ed25519KeyPair, RsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::KeyPair;
use serde_json::{Value, json};
use tollgate_domain::{TenantId, UtcTime};

use crate::auth::issuer::{IssuerKeys, IssuerOptions};
use crate::auth::jwt::{Refused, TokenVerifier};

pub(super) const NOW: u64 = 1_800_000_000;

/// The key pairs of the issuers, and an attacker's pairs of the same kinds.
pub(super) struct Keys {
    pub(super) rsa: KeyPair,
    pub(super) ec: KeyPair,
    pub(super) ed: KeyPair,
    pub(super) enemy_ec: KeyPair,
    pub(super) enemy_rsa: KeyPair,
}

pub(super) static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    let rsa = || {
        KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048)
            .expect("generates")
    };
    let ec = || KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("generates");
    let ed = KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("generates");
    Keys { rsa: rsa(), ec: ec(), ed, enemy_ec: ec(), enemy_rsa: rsa() }
});

pub(super) enum Signer {
    Es256(&'static KeyPair),
    Rs256(&'static KeyPair),
    Ps256(&'static KeyPair),
    EdDsa(&'static KeyPair),
    Hs256(Vec<u8>),
    Bytes(Vec<u8>),
}

impl Signer {
    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        let rsa = |pair: &KeyPair, encoding: &'static dyn signature::RsaEncoding| {
            let pair = RsaKeyPair::from_pkcs8(&pair.serialize_der()).expect("an RSA key");
            let mut bytes = vec![0; pair.public_modulus_len()];
            pair.sign(encoding, &random, message, &mut bytes).expect("signs");
            bytes
        };
        match self {
            Self::Es256(pair) => {
                let algorithm = &signature::ECDSA_P256_SHA256_FIXED_SIGNING;
                let pair = EcdsaKeyPair::from_pkcs8(algorithm, &pair.serialize_der());
                let signed = pair.expect("an EC key").sign(&random, message).expect("signs");
                signed.as_ref().to_vec()
            }
            Self::Rs256(pair) => rsa(pair, &signature::RSA_PKCS1_SHA256),
            Self::Ps256(pair) => rsa(pair, &signature::RSA_PSS_SHA256),
            Self::EdDsa(pair) => {
                let pair = Ed25519KeyPair::from_pkcs8(&pair.serialize_der());
                pair.expect("an Ed25519 key").sign(message).as_ref().to_vec()
            }
            Self::Hs256(secret) => {
                let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, secret);
                aws_lc_rs::hmac::sign(&key, message).as_ref().to_vec()
            }
            Self::Bytes(bytes) => bytes.clone(),
        }
    }
}

pub(super) fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

pub(super) fn token(
    header: impl AsRef<[u8]>,
    payload: impl AsRef<[u8]>,
    signer: &Signer,
) -> String {
    let message = format!("{}.{}", encode(header), encode(payload));
    let signature = encode(signer.sign(message.as_bytes()));
    format!("{message}.{signature}")
}

pub(super) fn good_header() -> Value {
    json!({"alg": "ES256", "typ": "JWT", "kid": "e1"})
}

pub(super) fn good_claims() -> Value {
    json!({
        "iss": "https://issuer.example", "sub": "user-1", "aud": "tollgate",
        "exp": NOW + 300, "nbf": NOW - 10, "iat": NOW - 10, "tenant": "acme",
    })
}

/// Returns `base` with the fields of `changes`; `null` removes a field.
pub(super) fn changed(mut base: Value, changes: Value) -> String {
    let fields = base.as_object_mut().expect("an object");
    for (name, value) in changes.as_object().expect("an object") {
        match value {
            Value::Null => fields.remove(name),
            value => fields.insert(name.clone(), value.clone()),
        };
    }
    base.to_string()
}

pub(super) fn with_header(changes: Value) -> String {
    token(changed(good_header(), changes), good_claims().to_string(), &Signer::Es256(&KEYS.ec))
}

pub(super) fn with_claims(changes: Value) -> String {
    token(good_header().to_string(), changed(good_claims(), changes), &Signer::Es256(&KEYS.ec))
}

pub(super) fn signed_by(changes: Value, signer: &Signer) -> String {
    token(changed(good_header(), changes), good_claims().to_string(), signer)
}

pub(super) fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).expect("writes");
    path
}

pub(super) fn jwks(keys: &[(&str, &KeyPair)]) -> String {
    let keys: Vec<Value> = keys
        .iter()
        .map(|(id, pair)| {
            let x = encode(pair.public_key_raw());
            json!({"kty": "OKP", "crv": "Ed25519", "use": "sig", "kid": id, "x": x})
        })
        .collect();
    json!({ "keys": keys }).to_string()
}

pub(super) fn corp(folder: &Path) -> IssuerOptions {
    IssuerOptions {
        name: "corp".into(),
        issuer: "https://issuer.example".into(),
        audiences: vec!["tollgate".into(), "https://tollgate.example".into()],
        algorithms: vec!["ES256".into(), "RS256".into()],
        tenant_claim: "tenant".into(),
        tenants: None,
        keys: IssuerKeys::Pem(vec![
            (Some("e1".into()), write(folder, "e1.pem", KEYS.ec.public_key_pem())),
            (Some("r1".into()), write(folder, "r1.pem", KEYS.rsa.public_key_pem())),
        ]),
        leeway: Duration::from_secs(5),
    }
}

pub(super) fn partner(folder: &Path) -> IssuerOptions {
    IssuerOptions {
        name: "partner".into(),
        issuer: "https://partner.example".into(),
        audiences: vec!["tollgate".into()],
        algorithms: vec!["EdDSA".into()],
        tenant_claim: "https://tollgate.example/tenant".into(),
        tenants: Some(vec![TenantId::new("partner").expect("a name")]),
        keys: IssuerKeys::JwksFile(write(folder, "jwks.json", jwks(&[("d1", &KEYS.ed)]))),
        leeway: Duration::from_secs(5),
    }
}

pub(super) fn partner_token(kid: &str, tenant: &str, pair: &'static KeyPair) -> String {
    let header = json!({"alg": "EdDSA", "typ": "at+jwt", "kid": kid});
    let changes = json!({
        "iss": "https://partner.example", "tenant": null,
        "https://tollgate.example/tenant": tenant,
    });
    token(header.to_string(), changed(good_claims(), changes), &Signer::EdDsa(pair))
}

pub(super) fn verifier(folder: &Path) -> TokenVerifier {
    TokenVerifier::new(vec![corp(folder), partner(folder)]).expect("good issuers")
}

pub(super) fn judge(verifier: &TokenVerifier, token: &str) -> Result<(String, String), Refused> {
    verifier
        .verify(token, UtcTime(NOW * 1_000_000_000))
        .map(|caller| (caller.tenant.as_str().to_owned(), caller.key.as_str().to_owned()))
}
