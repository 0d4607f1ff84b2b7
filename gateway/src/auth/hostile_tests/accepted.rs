//! Accepted tokens: valid tokens of configured issuers, and no text that merely
//! looks similar.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use serde_json::json;

use super::tokens::*;
use crate::auth::issuer::{IssuerKeys, IssuerOptions};
use crate::auth::jwt::{Refused, TokenVerifier};

#[test]
fn valid_tokens_name_tenant_and_subject() {
    let folder = tempfile::tempdir().expect("a folder");
    let verifier = verifier(folder.path());
    for (token, tenant, key) in [
        (with_claims(json!({})), "acme", "jwt:user-1"),
        (
            signed_by(json!({"alg": "RS256", "kid": "r1"}), &Signer::Rs256(&KEYS.rsa)),
            "acme",
            "jwt:user-1",
        ),
        (with_header(json!({"typ": "at+jwt"})), "acme", "jwt:user-1"),
        (with_header(json!({"typ": "application/at+jwt"})), "acme", "jwt:user-1"),
        (with_header(json!({"typ": "Application/AT+JWT"})), "acme", "jwt:user-1"),
        (with_header(json!({"typ": "jwt"})), "acme", "jwt:user-1"),
        (with_header(json!({"typ": null})), "acme", "jwt:user-1"),
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
fn token_subjects_never_share_key_id() {
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
fn invalid_issuer_options_name_issuer() {
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
        (
            IssuerOptions { algorithms: list(&["EdDSA"]), ..good() },
            "e1.pem: the configured algorithms cannot use",
        ),
        (
            IssuerOptions { algorithms: list(&["ES384"]), ..good() },
            "e1.pem: the configured algorithms cannot use",
        ),
        (IssuerOptions { tenant_claim: String::new(), ..good() }, "issuer corp: tenant_claim"),
        (IssuerOptions { keys: pem(path.join("gone.pem")), ..good() }, "gone.pem: cannot be read"),
        (IssuerOptions { keys: pem(private), ..good() }, "private.pem: no PEM public key"),
        (IssuerOptions { keys: pem(text.clone()), ..good() }, "text.pem: no PEM public key"),
        (IssuerOptions { keys: IssuerKeys::JwksFile(text), ..good() }, "text.pem: not a JWK set"),
    ] {
        let error = TokenVerifier::new(vec![issuer]).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    let error = TokenVerifier::new(vec![good(), good()]).expect_err("twice").to_string();
    assert!(error.contains("another issuer has the same"), "{error}");
}

/// One issuer may have two audiences with different rules.
#[test]
fn issuers_differ_by_audience() {
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

/// A single PEM key needs no id; several PEM keys take the names of their files.
#[test]
fn issuer_options_follow_config() {
    let issuer = |files: &[&str]| tollgate_config::Issuer {
        name: "corp".into(),
        issuer: "https://issuer.example".into(),
        audience: "tollgate".into(),
        algorithms: vec![tollgate_config::JwtAlgorithm::ES256],
        keys: tollgate_config::JwtKeys::Pem(files.iter().map(PathBuf::from).collect()),
        tenant_claim: "tenant".into(),
        tenants: None,
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
    /// Any text gets an answer, and no unsigned text is accepted.
    #[test]
    fn arbitrary_text_is_never_accepted_as_token(text in ".{0,200}", flip in 0usize..400, byte in 0u8..128) {
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
