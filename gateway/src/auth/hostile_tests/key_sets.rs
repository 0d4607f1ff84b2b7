//! Key sets that become invalid while the gateway runs (threat T22), in files and
//! behind URLs.

use std::cell::{Cell, RefCell};
use std::future::ready;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, header};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tollgate_domain::UtcTime;

use super::tokens::*;
use crate::auth::fetch::FetchError;
use crate::auth::fetch::tests::Issuer;
use crate::auth::issuer::{IssuerError, IssuerKeys, IssuerOptions};
use crate::auth::jwt::{BETWEEN_FETCHES, Refused, TokenVerifier};
use crate::auth::{Authenticator, KeyStore};

/// T22, for files: an invalid set changes nothing until the file is valid again.
#[test]
fn key_set_file_change_keeps_good_keys() {
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

/// Returns the partner's options with a key set at `url`, fetched every ten minutes.
fn by_url(folder: &std::path::Path, url: &str, ca: &std::path::Path) -> IssuerOptions {
    let refresh = Duration::from_secs(600);
    let keys = IssuerKeys::JwksUrl { url: url.to_owned(), ca: Some(ca.to_owned()), refresh };
    IssuerOptions { keys, ..partner(folder) }
}

/// T22: neither tokens nor failures of the issuer cause more than one fetch in 30
/// seconds. Earlier keys stay, and valid tokens work all the time.
#[tokio::test(start_paused = true)]
async fn fetched_key_set_survives_failures_and_floods() {
    let folder = tempfile::tempdir().expect("a folder");
    let issuer = Issuer::answering("").await;
    let options = by_url(folder.path(), &issuer.url, &issuer.ca);
    let verifier = TokenVerifier::new(vec![options]).expect("a good issuer");
    let (old, new) =
        (partner_token("d1", "partner", &KEYS.ed), partner_token("d2", "partner", &KEYS.ed));
    assert_eq!(judge(&verifier, &old), Err(Refused::Key), "nothing is fetched yet");

    let (fetches, answers) = (Cell::new(0), RefCell::new(Vec::<Result<String, FetchError>>::new()));
    let first = jwks(&[("d1", &KEYS.ed)]);
    let get = || {
        fetches.set(fetches.get() + 1);
        let said = answers.borrow_mut().pop();
        ready(said.unwrap_or_else(|| Ok(first.clone())).map(String::into_bytes))
    };
    let mut following = Box::pin(verifier.follow_only(get));
    let mut pass = async |span: Duration| {
        let _ = tokio::time::timeout(span, &mut following).await;
    };
    let moment = Duration::from_millis(1);
    pass(moment).await;
    assert_eq!(fetches.get(), 1);
    assert!(judge(&verifier, &old).is_ok());

    // A flood of tokens with unknown keys, one each second for ten minutes.
    let began = fetches.get();
    for _ in 0..600 {
        for _ in 0..20 {
            assert_eq!(judge(&verifier, &new), Err(Refused::Key));
        }
        pass(Duration::from_secs(1)).await;
    }
    let most = 600 / BETWEEN_FETCHES.as_secs() + 1;
    assert!((2..=most).contains(&(fetches.get() - began)), "{} fetches", fetches.get() - began);

    // The issuer fails in every way: fetches go on, and no key is lost.
    let bad = ["", "{", "{}", r#"{"keys": []}"#, r#"{"keys": [{"kty": "oct", "k": "AA"}]}"#];
    for said in bad.map(|said| Ok(said.to_owned())).into_iter().chain([
        Err(FetchError::Timeout(Duration::from_secs(5))),
        Err(FetchError::TooLarge(1 << 20)),
        Err(FetchError::Status(http::StatusCode::BAD_GATEWAY)),
    ]) {
        answers.borrow_mut().push(said);
        let began = fetches.get();
        let _ = judge(&verifier, &new);
        pass(BETWEEN_FETCHES).await;
        assert!(fetches.get() > began && answers.borrow().is_empty(), "it was asked");
        assert!(judge(&verifier, &old).is_ok());
    }

    // A new key is found soon after a token names it, and the old key is dropped.
    pass(BETWEEN_FETCHES * 4).await;
    answers.borrow_mut().push(Ok(jwks(&[("d2", &KEYS.ed)])));
    assert_eq!(judge(&verifier, &new), Err(Refused::Key));
    pass(moment).await;
    assert!(judge(&verifier, &new).is_ok());
    assert_eq!(judge(&verifier, &old), Err(Refused::Key));
    let began = fetches.get();
    pass(Duration::from_secs(3_600)).await;
    assert_eq!(fetches.get() - began, 6, "unasked, as often as config says");
}

/// A key set fetched over real TLS from a trusted server verifies tokens.
#[tokio::test]
async fn fetched_key_set_verifies_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let set = jwks(&[("d1", &KEYS.ed)]);
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{set}", set.len());
    let issuer = Issuer::answering(answer).await;
    let options = by_url(folder.path(), &issuer.url, &issuer.ca);
    let keys = KeyStore::open(folder.path()).expect("opens");
    let door = Authenticator::new(keys, vec![options]).expect("a good issuer");
    let stop = CancellationToken::new();
    let following = TaskTracker::new().spawn(door.clone().follow_changes(stop.clone()));
    let shown = format!("Bearer {}", partner_token("d1", "partner", &KEYS.ed));
    let shown = HeaderValue::from_str(&shown).expect("a header value");
    let headers = HeaderMap::from_iter([(header::AUTHORIZATION, shown)]);
    let now = UtcTime(NOW * 1_000_000_000);
    let believed = async {
        while door.authenticate(&headers, None, now).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), believed).await.expect("it is fetched");
    stop.cancel();
    following.await.expect("ends");
}
