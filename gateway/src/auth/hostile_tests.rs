//! Forged, confused and broken tokens (T21), each refused for its own reason;
//! and issuers' key files that go bad under way (T22).

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{self, EcdsaKeyPair, Ed25519KeyPair, RsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE, URL_SAFE_NO_PAD};
use rcgen::KeyPair;
use serde_json::{Value, json};
use tollgate_domain::{TenantId, UtcTime};

use super::issuer::{IssuerError, IssuerKeys, IssuerOptions};
use super::jwt::{LONGEST_TOKEN, Refused, TokenVerifier};

const NOW: u64 = 1_800_000_000;

/// Key pairs: ours by issuer, and an enemy's of the same kinds.
struct Keys {
    rsa: KeyPair,
    ec: KeyPair,
    ed: KeyPair,
    enemy_ec: KeyPair,
    enemy_rsa: KeyPair,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    let rsa = || {
        KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048)
            .expect("generates")
    };
    let ec = || KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("generates");
    let ed = KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("generates");
    Keys { rsa: rsa(), ec: ec(), ed, enemy_ec: ec(), enemy_rsa: rsa() }
});

enum Signer {
    Es256(&'static KeyPair),
    Rs256(&'static KeyPair),
    Ps256(&'static KeyPair),
    EdDsa(&'static KeyPair),
    Hs256(Vec<u8>),
    Bytes(Vec<u8>),
}

impl Signer {
    fn sign(&self, message: &[u8]) -> Vec<u8> {
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

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn token(header: impl AsRef<[u8]>, payload: impl AsRef<[u8]>, signer: &Signer) -> String {
    let message = format!("{}.{}", encode(header), encode(payload));
    let signature = encode(signer.sign(message.as_bytes()));
    format!("{message}.{signature}")
}

fn good_header() -> Value {
    json!({"alg": "ES256", "typ": "JWT", "kid": "e1"})
}

fn good_claims() -> Value {
    json!({
        "iss": "https://issuer.example", "sub": "user-1", "aud": "tollgate",
        "exp": NOW + 300, "nbf": NOW - 10, "iat": NOW - 10, "tenant": "acme",
    })
}

/// `base` with the fields of `changes` put in; `null` takes a field out.
fn changed(mut base: Value, changes: Value) -> String {
    let fields = base.as_object_mut().expect("an object");
    for (name, value) in changes.as_object().expect("an object") {
        match value {
            Value::Null => fields.remove(name),
            value => fields.insert(name.clone(), value.clone()),
        };
    }
    base.to_string()
}

fn with_header(changes: Value) -> String {
    token(changed(good_header(), changes), good_claims().to_string(), &Signer::Es256(&KEYS.ec))
}

fn with_claims(changes: Value) -> String {
    token(good_header().to_string(), changed(good_claims(), changes), &Signer::Es256(&KEYS.ec))
}

fn signed_by(changes: Value, signer: &Signer) -> String {
    token(changed(good_header(), changes), good_claims().to_string(), signer)
}

fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).expect("writes");
    path
}

fn jwks(keys: &[(&str, &KeyPair)]) -> String {
    let keys: Vec<Value> = keys
        .iter()
        .map(|(id, pair)| {
            let x = encode(pair.public_key_raw());
            json!({"kty": "OKP", "crv": "Ed25519", "use": "sig", "kid": id, "x": x})
        })
        .collect();
    json!({ "keys": keys }).to_string()
}

fn corp(folder: &Path) -> IssuerOptions {
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

fn partner(folder: &Path) -> IssuerOptions {
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

fn partner_token(kid: &str, tenant: &str, pair: &'static KeyPair) -> String {
    let header = json!({"alg": "EdDSA", "typ": "at+jwt", "kid": kid});
    let changes = json!({
        "iss": "https://partner.example", "tenant": null,
        "https://tollgate.example/tenant": tenant,
    });
    token(header.to_string(), changed(good_claims(), changes), &Signer::EdDsa(pair))
}

fn verifier(folder: &Path) -> TokenVerifier {
    TokenVerifier::new(vec![corp(folder), partner(folder)]).expect("good issuers")
}

fn judge(verifier: &TokenVerifier, token: &str) -> Result<(String, String), Refused> {
    verifier
        .verify(token, UtcTime(NOW * 1_000_000_000))
        .map(|caller| (caller.tenant.as_str().to_owned(), caller.key.as_str().to_owned()))
}

#[test]
fn good_tokens_name_tenant_and_subject() {
    let folder = tempfile::tempdir().expect("a folder");
    let verifier = verifier(folder.path());
    for (token, tenant, key) in [
        (with_claims(json!({})), "acme", "jwt:user-1"),
        (
            signed_by(json!({"alg": "RS256", "kid": "r1"}), &Signer::Rs256(&KEYS.rsa)),
            "acme",
            "jwt:user-1",
        ),
        (with_header(json!({"typ": "application/at+jwt"})), "acme", "jwt:user-1"),
        (with_header(json!({"x5t": "abc"})), "acme", "jwt:user-1"),
        (with_claims(json!({"aud": ["other", "https://tollgate.example"]})), "acme", "jwt:user-1"),
        (with_claims(json!({"iat": null, "more": {"deep": [1, 2.5, null]}})), "acme", "jwt:user-1"),
        (with_claims(json!({"exp": NOW - 4})), "acme", "jwt:user-1"),
        (with_claims(json!({"nbf": NOW + 5})), "acme", "jwt:user-1"),
        (with_claims(json!({"exp": u64::MAX})), "acme", "jwt:user-1"),
        (partner_token("d1", "partner", &KEYS.ed), "partner", "jwt:user-1"),
    ] {
        assert_eq!(judge(&verifier, &token), Ok((tenant.into(), key.into())), "{token}");
    }
}

#[test]
fn subjects_never_share_a_key_id() {
    let folder = tempfile::tempdir().expect("a folder");
    let verifier = verifier(folder.path());
    let key =
        |subject: &str| judge(&verifier, &with_claims(json!({"sub": subject}))).expect("good").1;
    let mail = key("ann@example.com");
    assert!(mail.starts_with("jwt:ann_example.com:sha256:"), "{mail}");
    let imitation = mail.strip_prefix("jwt:").expect("is there").to_owned();
    let long = "x".repeat(1_000);
    let keys = [mail, key("ann_example.com"), key("ann example.com"), key(&imitation), key(&long)];
    for (at, one) in keys.iter().enumerate() {
        assert!(one.len() <= 128);
        assert!(!keys[..at].contains(one), "{one}");
    }
}

#[test]
fn hostile_tokens_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let verifier = verifier(folder.path());
    let mut cases = Vec::new();
    cases.extend(confused_algorithms());
    cases.extend(pointing_headers());
    cases.extend(wrong_keys());
    cases.extend(wrong_claims());
    cases.extend(broken_texts());
    assert!(cases.len() >= 60, "{} cases", cases.len());
    assert!(judge(&verifier, &with_claims(json!({}))).is_ok(), "the control");
    for (name, token, reason) in cases {
        assert_eq!(judge(&verifier, &token), Err(reason), "{name}");
    }
}

type Case = (&'static str, String, Refused);

fn confused_algorithms() -> Vec<Case> {
    let none = |alg: &str| {
        let header = changed(good_header(), json!({"alg": alg}));
        let claims = good_claims().to_string();
        (
            token(&header, &claims, &Signer::Bytes(vec![])),
            token(&header, &claims, &Signer::Bytes(vec![0])),
        )
    };
    let pem = KEYS.rsa.public_key_pem().into_bytes();
    let der = KEYS.rsa.public_key_raw().to_vec();
    let raw = KEYS.ec.public_key_raw().to_vec();
    let hs = |secret: Vec<u8>, kid: &str| {
        signed_by(json!({"alg": "HS256", "kid": kid}), &Signer::Hs256(secret))
    };
    let es = |changes| signed_by(changes, &Signer::Es256(&KEYS.ec));
    vec![
        ("none, no signature", none("none").0, Refused::Shape),
        ("none, some signature", none("none").1, Refused::Algorithm),
        ("None", none("None").1, Refused::Algorithm),
        ("NONE", none("NONE").1, Refused::Algorithm),
        ("nOnE", none("nOnE").1, Refused::Algorithm),
        ("empty algorithm", none("").1, Refused::Algorithm),
        ("HS256 with the RSA key's PEM", hs(pem, "r1"), Refused::Algorithm),
        ("HS256 with the RSA key's DER", hs(der, "r1"), Refused::Algorithm),
        ("HS256 with the EC point", hs(raw, "e1"), Refused::Algorithm),
        ("HS256 with an empty secret", hs(vec![], "e1"), Refused::Algorithm),
        ("HS512", es(json!({"alg": "HS512"})), Refused::Algorithm),
        ("RS256 by the EC key", es(json!({"alg": "RS256"})), Refused::Key),
        (
            "ES256 by the RSA key",
            signed_by(json!({"kid": "r1"}), &Signer::Rs256(&KEYS.rsa)),
            Refused::Key,
        ),
        (
            "PS256, not configured",
            signed_by(json!({"alg": "PS256", "kid": "r1"}), &Signer::Ps256(&KEYS.rsa)),
            Refused::Algorithm,
        ),
        (
            "PSS under RS256",
            signed_by(json!({"alg": "RS256", "kid": "r1"}), &Signer::Ps256(&KEYS.rsa)),
            Refused::Signature,
        ),
        ("RS384, not configured", es(json!({"alg": "RS384", "kid": "r1"})), Refused::Algorithm),
        ("ES384 by a P-256 key", es(json!({"alg": "ES384"})), Refused::Algorithm),
        ("EdDSA of the other issuer", es(json!({"alg": "EdDSA"})), Refused::Algorithm),
        ("es256", es(json!({"alg": "es256"})), Refused::Algorithm),
        ("no algorithm", es(json!({"alg": null})), Refused::Header),
        ("algorithm is a list", es(json!({"alg": ["ES256"]})), Refused::Header),
    ]
}

fn pointing_headers() -> Vec<Case> {
    let enemy = |changes| signed_by(changes, &Signer::Es256(&KEYS.enemy_ec));
    let jwk = json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"});
    vec![
        ("jku", enemy(json!({"jku": "https://enemy.example/jwks.json"})), Refused::Header),
        (
            "jku to the issuer, signed well",
            with_header(json!({"jku": "https://issuer.example"})),
            Refused::Header,
        ),
        ("x5u", enemy(json!({"x5u": "https://enemy.example/cert.pem"})), Refused::Header),
        ("jwk", enemy(json!({"jwk": jwk})), Refused::Header),
        ("x5c", enemy(json!({"x5c": ["MIIB"]})), Refused::Header),
        ("crit", with_header(json!({"crit": ["exp"]})), Refused::Header),
        ("crit, empty", with_header(json!({"crit": []})), Refused::Header),
        ("b64", with_header(json!({"b64": false, "crit": ["b64"]})), Refused::Header),
        ("zip", with_header(json!({"zip": "DEF"})), Refused::Header),
        ("enc", with_header(json!({"enc": "A256GCM"})), Refused::Header),
        ("a token in a token", with_header(json!({"cty": "JWT"})), Refused::Header),
        ("typ of an ID token", with_header(json!({"typ": "id+jwt"})), Refused::Type),
        ("typ of a logout", with_header(json!({"typ": "logout+jwt"})), Refused::Type),
        ("typ of a proof", with_header(json!({"typ": "dpop+jwt"})), Refused::Type),
        ("typ JWE", with_header(json!({"typ": "JWE"})), Refused::Type),
        ("no typ", with_header(json!({"typ": null})), Refused::Type),
        ("typ is a number", with_header(json!({"typ": 1})), Refused::Header),
    ]
}

fn wrong_keys() -> Vec<Case> {
    let kid = |kid: &str| with_header(json!({"kid": kid}));
    vec![
        (
            "another's signature",
            signed_by(json!({}), &Signer::Es256(&KEYS.enemy_ec)),
            Refused::Signature,
        ),
        (
            "another's RSA signature",
            signed_by(json!({"alg": "RS256", "kid": "r1"}), &Signer::Rs256(&KEYS.enemy_rsa)),
            Refused::Signature,
        ),
        ("no kid, two keys", with_header(json!({"kid": null})), Refused::Key),
        ("an unknown kid", kid("e2"), Refused::Key),
        ("kid in other letters", kid("E1"), Refused::Key),
        ("kid is a path", kid("../../../../dev/null"), Refused::Key),
        ("kid is SQL", kid("e1' OR '1'='1"), Refused::Key),
        ("kid with NUL", kid("e1\0"), Refused::Key),
        ("kid of the other issuer", kid("d1"), Refused::Key),
        ("kid is a list", with_header(json!({"kid": ["e1"]})), Refused::Header),
        ("a zero signature", signed_by(json!({}), &Signer::Bytes(vec![0; 64])), Refused::Signature),
        (
            "a short signature",
            signed_by(json!({}), &Signer::Bytes(vec![1; 63])),
            Refused::Signature,
        ),
        (
            "the other issuer's key",
            token(
                json!({"alg": "EdDSA", "typ": "JWT", "kid": "d1"}).to_string(),
                good_claims().to_string(),
                &Signer::EdDsa(&KEYS.ed),
            ),
            Refused::Algorithm,
        ),
        ("another issuer's tenant", partner_token("d1", "acme", &KEYS.ed), Refused::Tenant),
    ]
}

fn wrong_claims() -> Vec<Case> {
    let twin = |field: &str| {
        let claims = good_claims().to_string();
        let claims = format!("{},{field}}}", &claims[..claims.len() - 1]);
        token(good_header().to_string(), claims, &Signer::Es256(&KEYS.ec))
    };
    vec![
        ("no iss", with_claims(json!({"iss": null})), Refused::Claims),
        ("another iss", with_claims(json!({"iss": "https://enemy.example"})), Refused::Issuer),
        (
            "iss with a slash",
            with_claims(json!({"iss": "https://issuer.example/"})),
            Refused::Issuer,
        ),
        ("iss is a list", with_claims(json!({"iss": ["https://issuer.example"]})), Refused::Claims),
        ("no aud", with_claims(json!({"aud": null})), Refused::Claims),
        ("another aud", with_claims(json!({"aud": "billing"})), Refused::Audience),
        ("aud is empty", with_claims(json!({"aud": []})), Refused::Audience),
        ("aud begins alike", with_claims(json!({"aud": "tollgate2"})), Refused::Audience),
        ("aud is an object", with_claims(json!({"aud": {"tollgate": 1}})), Refused::Claims),
        ("no sub", with_claims(json!({"sub": null})), Refused::Claims),
        ("sub is empty", with_claims(json!({"sub": ""})), Refused::Subject),
        ("sub is a number", with_claims(json!({"sub": 1})), Refused::Claims),
        ("sub is long", with_claims(json!({"sub": "x".repeat(1_025)})), Refused::Subject),
        ("no exp", with_claims(json!({"exp": null})), Refused::Claims),
        ("expired", with_claims(json!({"exp": NOW - 5})), Refused::Expired),
        ("expired long ago", with_claims(json!({"exp": 1, "nbf": 0})), Refused::Expired),
        ("exp is text", with_claims(json!({"exp": (NOW + 300).to_string()})), Refused::Claims),
        ("exp is negative", with_claims(json!({"exp": -1})), Refused::Claims),
        ("exp is 1e99", with_claims(json!({"exp": 1e99})), Refused::Claims),
        ("no nbf", with_claims(json!({"nbf": null})), Refused::Claims),
        ("nbf to come", with_claims(json!({"nbf": NOW + 6})), Refused::NotYet),
        ("nbf is text", with_claims(json!({"nbf": "0"})), Refused::Claims),
        ("nbf after exp", with_claims(json!({"nbf": NOW + 3, "exp": NOW + 2})), Refused::Claims),
        ("issued in the future", with_claims(json!({"iat": NOW + 60})), Refused::NotYet),
        ("no tenant", with_claims(json!({"tenant": null})), Refused::Tenant),
        ("tenant is a list", with_claims(json!({"tenant": ["acme"]})), Refused::Tenant),
        ("tenant is no name", with_claims(json!({"tenant": "acme\n"})), Refused::Tenant),
        ("tenant is empty", with_claims(json!({"tenant": ""})), Refused::Tenant),
        ("exp twice", twin(r#""exp":9999999999"#), Refused::Claims),
        ("tenant twice", twin(r#""tenant":"other""#), Refused::Claims),
        ("tenant twice, escaped", twin(r#""\u0074enant":"other""#), Refused::Claims),
        ("aud twice", twin(r#""aud":"tollgate""#), Refused::Claims),
        ("twins below", twin(r#""x":{"a":1,"a":2}"#), Refused::Claims),
    ]
}

fn broken_texts() -> Vec<Case> {
    let good = with_claims(json!({}));
    let parts: Vec<&str> = good.split('.').collect();
    let [header, payload, signature] = parts[..] else { unreachable!("three parts") };
    let raw = |header: &str, payload: &str| {
        token(header.as_bytes(), payload.as_bytes(), &Signer::Es256(&KEYS.ec))
    };
    let head = good_header().to_string();
    let deep = format!("{}1{}", "[".repeat(2_000), "]".repeat(2_000));
    // The last letter of 64 bytes in base64 carries four bits that say nothing.
    let (stem, last) = signature.split_at(signature.len() - 1);
    let stray = match last.as_bytes()[0] {
        b'Z' => 'a',
        b'z' => '0',
        b'9' => '-',
        byte => char::from(byte + 1),
    };
    let padded = |bytes: &[u8]| URL_SAFE.encode(bytes);
    vec![
        ("a megabyte", "x".repeat(1 << 20), Refused::TooLong),
        ("a megabyte of claims", with_claims(json!({"x": "x".repeat(1 << 20)})), Refused::TooLong),
        ("a byte too long", "x".repeat(LONGEST_TOKEN + 1), Refused::TooLong),
        ("nothing", String::new(), Refused::Shape),
        ("dots", "..".into(), Refused::Shape),
        ("many dots", ".".repeat(LONGEST_TOKEN), Refused::Shape),
        ("two parts", format!("{header}.{payload}"), Refused::Shape),
        ("four parts", format!("{good}.{signature}"), Refused::Shape),
        ("five parts, as encrypted", format!("{good}.a.b"), Refused::Shape),
        ("no header", format!(".{payload}.{signature}"), Refused::Shape),
        ("no payload", format!("{header}..{signature}"), Refused::Shape),
        ("no signature", format!("{header}.{payload}."), Refused::Shape),
        ("padding", format!("{header}.{payload}.{}", padded(&[1; 64])), Refused::Shape),
        (
            "the other alphabet",
            format!("{header}.{payload}.{}", STANDARD.encode([0xFF; 63])),
            Refused::Shape,
        ),
        ("stray bits", format!("{header}.{payload}.{stem}{stray}"), Refused::Shape),
        ("white space inside", format!("{header}.{payload}. {signature}"), Refused::Shape),
        ("no base64", format!("{header}.{payload}.!!!!"), Refused::Shape),
        (
            "changed payload",
            format!(
                "{header}.{}.{signature}",
                encode(changed(good_claims(), json!({"tenant": "other"})))
            ),
            Refused::Signature,
        ),
        (
            "changed header",
            format!("{}.{payload}.{signature}", encode(changed(good_header(), json!({"x": 1})))),
            Refused::Signature,
        ),
        (
            "header twins",
            raw(r#"{"alg":"none","typ":"JWT","kid":"e1","alg":"ES256"}"#, "{}"),
            Refused::Header,
        ),
        ("header is a list", raw(r#"["ES256","JWT","e1"]"#, "{}"), Refused::Header),
        ("header is no JSON", raw("ES256", "{}"), Refused::Header),
        (
            "header is no UTF-8",
            token([0xFF, 0xFE], "{}", &Signer::Es256(&KEYS.ec)),
            Refused::Header,
        ),
        ("header and more", raw(&format!("{head}{{}}"), "{}"), Refused::Header),
        ("payload is a list", raw(&head, "[]"), Refused::Claims),
        ("payload is empty", raw(&head, "{}"), Refused::Claims),
        ("payload is no JSON", raw(&head, "{"), Refused::Claims),
        ("a deep payload", raw(&head, &format!("{{\"x\":{deep}}}")), Refused::Claims),
        ("a deep header", raw(&format!("{{\"x\":{deep}}}"), "{}"), Refused::Header),
    ]
}

/// T22, for files: a set that goes bad changes nothing until it is good again.
#[test]
fn key_sets_follow_their_file_and_never_go_bad() {
    let folder = tempfile::tempdir().expect("a folder");
    let verifier = verifier(folder.path());
    let old = partner_token("d1", "partner", &KEYS.ed);
    let named_anew = partner_token("d2", "partner", &KEYS.ed);
    assert!(judge(&verifier, &old).is_ok());
    for bad in
        ["", "{", "{}", r#"{"keys": []}"#, r#"{"keys": [{"kty": "oct", "k": "AA", "kid": "d1"}]}"#]
    {
        write(folder.path(), "jwks.json", bad);
        assert!(verifier.refresh().is_err(), "{bad}");
        assert!(judge(&verifier, &old).is_ok(), "{bad}");
    }
    let twins = jwks(&[("d1", &KEYS.ed), ("d1", &KEYS.ed)]);
    write(folder.path(), "jwks.json", twins);
    assert!(verifier.refresh().is_err());
    write(folder.path(), "jwks.json", " ".repeat(2 << 20));
    assert!(matches!(verifier.refresh(), Err(IssuerError::Keys { .. })));
    std::fs::remove_file(folder.path().join("jwks.json")).expect("removes");
    assert!(matches!(verifier.refresh(), Err(IssuerError::File { .. })));
    assert!(judge(&verifier, &old).is_ok());

    write(folder.path(), "jwks.json", jwks(&[("d2", &KEYS.ed)]));
    verifier.refresh().expect("good again");
    assert_eq!(judge(&verifier, &old), Err(Refused::Key));
    assert!(judge(&verifier, &named_anew).is_ok());
}

#[test]
fn bad_issuers_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    let good = || corp(path);
    let private = write(path, "private.pem", KEYS.ec.serialize_pem());
    let text = write(path, "text.pem", "hello");
    let pem = |file: PathBuf| IssuerKeys::Pem(vec![(None, file)]);
    let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    for (issuer, part) in [
        (IssuerOptions { audiences: vec![], ..good() }, "issuer corp: audiences"),
        (IssuerOptions { algorithms: vec![], ..good() }, "issuer corp: algorithms"),
        (IssuerOptions { algorithms: list(&["none"]), ..good() }, "issuer corp: algorithms"),
        (IssuerOptions { algorithms: list(&["HS256"]), ..good() }, "HS* need a shared secret"),
        (IssuerOptions { algorithms: list(&["EdDSA"]), ..good() }, "e1.pem: the key is of no kind"),
        (IssuerOptions { algorithms: list(&["ES384"]), ..good() }, "e1.pem: the key is of no kind"),
        (IssuerOptions { tenant_claim: String::new(), ..good() }, "issuer corp: tenant_claim"),
        (IssuerOptions { keys: pem(path.join("gone.pem")), ..good() }, "gone.pem: cannot be read"),
        (IssuerOptions { keys: pem(private), ..good() }, "private.pem: no PEM public key"),
        (IssuerOptions { keys: pem(text.clone()), ..good() }, "text.pem: no PEM public key"),
        (IssuerOptions { keys: IssuerKeys::JwksFile(text), ..good() }, "text.pem: no JWK set"),
    ] {
        let error = TokenVerifier::new(vec![issuer]).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    let error = TokenVerifier::new(vec![good(), good()]).expect_err("twice").to_string();
    assert!(error.contains("another issuer has the same"), "{error}");
}

/// One issuer may serve two audiences under different rules.
#[test]
fn issuers_are_told_apart_by_audience() {
    let folder = tempfile::tempdir().expect("a folder");
    let corp = corp(folder.path());
    let other = IssuerOptions {
        name: "jobs".into(),
        audiences: vec!["jobs".into()],
        tenant_claim: "team".into(),
        ..corp.clone()
    };
    let verifier = TokenVerifier::new(vec![corp, other]).expect("good issuers");
    let token = with_claims(json!({"aud": "jobs", "team": "research"}));
    assert_eq!(judge(&verifier, &token), Ok(("research".into(), "jwt:user-1".into())));
    assert_eq!(judge(&verifier, &with_claims(json!({"aud": "jobs"}))), Err(Refused::Tenant));
}

/// Config's PEM files: one key needs no id, several go by their files' names.
#[test]
fn issuers_come_from_config() {
    let issuer = |files: &[&str]| tollgate_config::Issuer {
        name: "corp".into(),
        issuer: "https://issuer.example".into(),
        audience: "tollgate".into(),
        algorithms: vec![tollgate_config::JwtAlgorithm::ES256],
        keys: tollgate_config::JwtKeys::Pem(files.iter().map(PathBuf::from).collect()),
        tenant_claim: "tenant".into(),
        leeway: Duration::from_secs(3),
    };
    for (files, ids) in [
        (&["keys/a.pem"][..], vec![None]),
        (&["keys/a.pem", "keys/2026-02.pem"], vec![Some("a"), Some("2026-02")]),
    ] {
        let options = IssuerOptions::from(&issuer(files));
        assert_eq!(options.algorithms, ["ES256"]);
        assert_eq!(options.leeway, Duration::from_secs(3));
        let IssuerKeys::Pem(keys) = options.keys else { panic!("PEM stays PEM") };
        let found: Vec<_> = keys.iter().map(|(id, _)| id.as_deref()).collect();
        assert_eq!(found, ids);
    }
}

proptest::proptest! {
    /// Whatever arrives, it is answered, and nothing unsigned is believed.
    #[test]
    fn no_text_is_believed_or_panics(text in ".{0,200}", flip in 0usize..400, byte in 0u8..128) {
        static VERIFIER: LazyLock<TokenVerifier> = LazyLock::new(|| {
            verifier(tempfile::tempdir().expect("a folder").path())
        });
        proptest::prop_assert!(judge(&VERIFIER, &text).is_err());
        let good = with_claims(json!({}));
        let mut bytes = good.clone().into_bytes();
        let at = flip % bytes.len();
        bytes[at] = byte;
        let changed = String::from_utf8(bytes).expect("ASCII");
        proptest::prop_assert_eq!(judge(&VERIFIER, &changed).is_ok(), changed == good);
    }
}
