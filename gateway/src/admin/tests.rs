//! The admin key: made once, kept secret, compared whole.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn shows(value: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::AUTHORIZATION, value.parse().unwrap());
    headers
}

#[test]
fn admin_key_is_made_once_and_accepted() {
    let data = tempfile::tempdir().unwrap();
    let key = AdminKey::load(data.path()).unwrap();
    let file = data.path().join(ADMIN_KEY_FILE);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(&file).unwrap();
    let text = text.trim();
    assert_eq!(AdminKey::load(data.path()).unwrap().0, text);
    for (shown, opens) in [
        (format!("Bearer {text}"), true),
        (format!("bearer {text}"), true),
        (format!("Bearer {text}x"), false),
        (format!("Bearer {}", &text[..text.len() - 1]), false),
        (format!("Basic {text}"), false),
        ("Bearer ".to_owned(), false),
        ("".to_owned(), false),
    ] {
        assert_eq!(bearer(&shows(&shown)).is_some_and(|it| key.is(it)), opens, "{shown}");
    }
    assert_eq!(bearer(&HeaderMap::new()), None);
    let mut twice = shows(&format!("Bearer {text}"));
    twice.append(header::AUTHORIZATION, "Bearer x".parse().unwrap());
    assert_eq!(bearer(&twice), None, "which of the two is meant is not for us to guess");
}

#[test]
fn admin_key_too_short_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let file = data.path().join(ADMIN_KEY_FILE);
    fs::write(&file, "").unwrap();
    let error = AdminKey::load(data.path()).err().unwrap();
    assert_eq!(error.path, file);
}

#[test]
fn readiness_needs_every_condition() {
    for (worker, ledger, draining, ready) in [
        (true, true, false, true),
        (false, true, false, false),
        (true, false, false, false),
        (true, true, true, false),
    ] {
        assert_eq!(Readiness { worker, ledger, draining }.is_ready(), ready);
    }
}
