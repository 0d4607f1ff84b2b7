//! The corpus of forged, confused and broken tokens (threat T21). Each is refused
//! for its own reason.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use serde_json::json;

use super::tokens::*;
use crate::auth::jwt::{MAX_TOKEN_BYTES, Refused};

#[test]
fn hostile_tokens_are_refused_with_reason() {
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
        ("typ is empty", with_header(json!({"typ": ""})), Refused::Type),
        ("typ begins alike", with_header(json!({"typ": "at+jwt2"})), Refused::Type),
        ("typ of another tree", with_header(json!({"typ": "text/at+jwt"})), Refused::Type),
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
        ("sub with a line feed", with_claims(json!({"sub": "ann\nroot"})), Refused::Subject),
        ("sub with ESC", with_claims(json!({"sub": "ann\u{1b}[2J"})), Refused::Subject),
        ("sub with NUL", with_claims(json!({"sub": "ann\0"})), Refused::Subject),
        ("sub with C1", with_claims(json!({"sub": "ann\u{9b}2J"})), Refused::Subject),
        ("tenant with a line feed", with_claims(json!({"tenant": "acme\n"})), Refused::Tenant),
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

#[allow(clippy::too_many_lines, reason = "one table of cases")]
fn broken_texts() -> Vec<Case> {
    let good = with_claims(json!({}));
    let parts: Vec<&str> = good.split('.').collect();
    let [header, payload, signature] = parts[..] else { unreachable!("three parts") };
    let raw = |header: &str, payload: &str| {
        token(header.as_bytes(), payload.as_bytes(), &Signer::Es256(&KEYS.ec))
    };
    let head = good_header().to_string();
    let deep = format!("{}1{}", "[".repeat(2_000), "]".repeat(2_000));
    // The last character of 64 bytes in base64 carries four unused bits.
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
        ("a byte too long", "x".repeat(MAX_TOKEN_BYTES + 1), Refused::TooLong),
        ("nothing", String::new(), Refused::Shape),
        ("dots", "..".into(), Refused::Shape),
        ("many dots", ".".repeat(MAX_TOKEN_BYTES), Refused::Shape),
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
