//! Keys and tokens: no hostile credential authenticates. The keys of this target
//! are random and in no corpus.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, header};
use tempfile::TempDir;
use tollgate_domain::{TenantId, UtcTime};
use tollgate_gateway::Authenticator;
use tollgate_gateway::auth::{IssuerKeys, IssuerOptions, KeyOptions, KeySecret, KeyStore};

/// A time within the lifetime of the tokens in the corpus.
const NOW: UtcTime = UtcTime(1_800_000_000_000_000_000);

pub(crate) fn credential(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(key) = KeySecret::parse(&text) {
        assert_eq!(key.expose(), text, "the parsed key differs from its text");
        let secret = text.rsplit_once('.').map_or("", |(_, secret)| secret);
        assert!(!format!("{key:?}").contains(secret), "the debug form shows the secret");
    }
    let Ok(value) = HeaderValue::from_bytes(data) else { return };
    let bearer = HeaderValue::from_bytes(&[b"Bearer ", data].concat());
    for value in [Some(value), bearer.ok()].into_iter().flatten() {
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value)]);
        let found = authenticator().authenticate(&headers, None, NOW);
        assert!(found.is_err(), "a hostile credential authenticated: {found:?}");
    }
}

fn authenticator() -> &'static Authenticator {
    static MADE: OnceLock<(TempDir, Authenticator)> = OnceLock::new();
    let (_, authenticator) = MADE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let keys = KeyStore::open(folder.path()).expect("a key store");
        let tenant = TenantId::new("acme").expect("a name");
        keys.create(&tenant, KeyOptions::default(), NOW).expect("a key");
        let pem = Path::new(env!("CARGO_MANIFEST_DIR")).join("keys/issuer.pem");
        let issuer = IssuerOptions {
            name: "fuzz".into(),
            issuer: "https://issuer.example".into(),
            audiences: vec!["tollgate".into()],
            algorithms: vec!["ES256".into()],
            tenant_claim: "tenant".into(),
            tenants: None,
            keys: IssuerKeys::Pem(vec![(None, pem)]),
            leeway: Duration::from_secs(5),
        };
        let authenticator = Authenticator::new(keys, vec![issuer]).expect("an issuer");
        (folder, authenticator)
    });
    authenticator
}
