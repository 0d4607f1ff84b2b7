//! Key sets that go bad under way (T22), in files and by URL.

use super::tokens::*;
use crate::auth::issuer::IssuerError;
use crate::auth::jwt::Refused;

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
