//! Certificates that are made, kept, renewed and refused.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

fn development(folder: &Path, now: SystemTime) -> Result<CertifiedKey, TlsError> {
    read(&TlsSource::Development { folder: folder.into() }, now)
}

#[test]
fn development_certificate_is_made_once() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("tls");
    let now = SystemTime::now();
    let first = development(&folder, now).unwrap();
    for (file, mode) in
        [("ca.pem", 0o644), ("ca.key", 0o600), ("server.pem", 0o644), ("server.key", 0o600)]
    {
        let permissions = fs::metadata(folder.join(file)).unwrap().permissions();
        assert_eq!(permissions.mode() & 0o777, mode, "{file}");
    }
    let authority = fs::read(folder.join("ca.pem")).unwrap();
    assert_eq!(development(&folder, now).unwrap().cert, first.cert);
    assert_eq!(development(&folder, now + DAY * 300).unwrap().cert, first.cert);
    // Near its end it is renewed, by the authority that clients trust.
    let renewed = development(&folder, now + DAY * 340).unwrap();
    assert_ne!(renewed.cert, first.cert);
    assert_eq!(fs::read(folder.join("ca.pem")).unwrap(), authority);
    // When the authority ends, both are new.
    let anew = development(&folder, now + DAY * 3_630).unwrap();
    assert_ne!(anew.cert, renewed.cert);
    assert_ne!(fs::read(folder.join("ca.pem")).unwrap(), authority);
}

#[test]
fn development_certificate_is_replaced_when_damaged() {
    let data = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    for file in ["ca.pem", "server.pem", "server.key"] {
        development(data.path(), now).unwrap();
        fs::write(data.path().join(file), "torn").unwrap();
        development(data.path(), now).unwrap();
        fs::remove_file(data.path().join(file)).unwrap();
        development(data.path(), now).unwrap();
    }
}

/// Clients have a copy of the authority's certificate, so no other authority may
/// replace it silently.
#[test]
fn development_authority_without_key_is_kept() {
    let data = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let file = |name| data.path().join(name);
    let first = development(data.path(), now).unwrap();
    let authority = fs::read(file("ca.pem")).unwrap();
    let key = fs::read(file("ca.key")).unwrap();
    let others = tempfile::tempdir().unwrap();
    development(others.path(), now).unwrap();
    for break_key in [
        &|| fs::write(file("ca.key"), "torn").unwrap(),
        &|| fs::copy(others.path().join("ca.key"), file("ca.key")).map(|_| ()).unwrap(),
        &|| fs::remove_file(file("ca.key")).unwrap(),
    ] as [&dyn Fn(); 3]
    {
        break_key();
        assert_eq!(development(data.path(), now).unwrap().cert, first.cert, "it still serves");
        let error = development(data.path(), now + DAY * 340).unwrap_err().to_string();
        assert!(error.contains("ca.key is missing or does not belong to"), "{error}");
        assert_eq!(fs::read(file("ca.pem")).unwrap(), authority);
    }
    fs::write(file("ca.key"), key).unwrap();
    assert_ne!(development(data.path(), now + DAY * 340).unwrap().cert, first.cert);
    fs::remove_file(file("ca.key")).unwrap();
    fs::remove_file(file("ca.pem")).unwrap();
    development(data.path(), now).unwrap();
    assert_ne!(fs::read(file("ca.pem")).unwrap(), authority, "as the error advises");
}

#[test]
fn tls_errors_name_their_files() {
    let data = tempfile::tempdir().unwrap();
    let (ours, theirs) = (data.path().join("ours"), data.path().join("theirs"));
    let now = SystemTime::now();
    development(&ours, now).unwrap();
    development(&theirs, now).unwrap();
    let empty = data.path().join("empty.pem");
    fs::write(&empty, "no PEM in here\n").unwrap();
    let torn = data.path().join("torn.pem");
    fs::write(&torn, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let (good, key) = (ours.join("server.pem"), ours.join("server.key"));
    let check = |certificate: &Path, key: &Path, now, expected: &str| {
        let error = read_pair(certificate, key, now).expect_err(expected).to_string();
        let error = error.replace(data.path().to_str().unwrap(), "");
        // Days come from the clock.
        assert!(error.starts_with(expected), "{error}");
    };
    check(&data.path().join("none"), &key, now, "cannot read /none");
    check(&good, &data.path().join("none"), now, "cannot read /none");
    check(&empty, &key, now, "/empty.pem has no certificate in PEM");
    check(Path::new("/dev/zero"), &key, now, "cannot read /dev/zero");
    check(&good, Path::new("/dev/zero"), now, "cannot read /dev/zero");
    check(&good, &empty, now, "/empty.pem has no private key in PEM");
    check(&torn, &key, now, "/torn.pem has a certificate that cannot be read");
    check(
        &good,
        &theirs.join("server.key"),
        now,
        "the private key in /theirs/server.key does not match the certificate in /ours/server.pem",
    );
    check(&good, &key, now + DAY * 400, "the certificate in /ours/server.pem expired on ");
    check(&good, &key, now - DAY * 400, "the certificate in /ours/server.pem is not valid before ");
}

#[test]
fn tls_renewal_keeps_old_certificate_on_error() {
    let data = tempfile::tempdir().unwrap();
    let (a, b) = (data.path().join("a"), data.path().join("b"));
    let now = SystemTime::now();
    let first = development(&a, now).unwrap();
    let second = development(&b, now).unwrap();
    let source = TlsSource::Files { certificate: a.join("server.pem"), key: a.join("server.key") };
    let identity = TlsIdentity::load(source.clone()).unwrap();
    let current = || identity.current.0.load().cert.clone();
    assert_eq!(current(), first.cert);
    fs::copy(b.join("server.pem"), a.join("server.pem")).unwrap();
    assert!(TlsIdentity::prepare(&source).is_err(), "the key is still the old one");
    assert_eq!(current(), first.cert, "a bad file changes nothing");
    fs::copy(b.join("server.key"), a.join("server.key")).unwrap();
    let prepared = TlsIdentity::prepare(&source).unwrap();
    assert!(identity.differs_from(&prepared));
    identity.renew(prepared);
    assert!(!identity.differs_from(&TlsIdentity::prepare(&source).unwrap()));
    assert_eq!(current(), second.cert);
}

#[test]
fn tls_offers_safe_suites_only() {
    let data = tempfile::tempdir().unwrap();
    let source = TlsSource::Development { folder: data.path().into() };
    let config = TlsIdentity::load(source).unwrap().server_config().unwrap();
    assert_eq!(config.max_early_data_size, 0);
    assert!(config.ignore_client_order);
    assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
}
