//! An authority of our own, so that a first start serves TLS that a client
//! can verify. It may sign for this machine's own names and nothing else, so
//! that trusting it costs little.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, date_time_ymd,
};

use super::{TlsError, Validity, day, read_chain, read_file, read_pair, unix_seconds};

/// The authority's certificate, which clients are told to trust.
pub(super) const CA_CERTIFICATE: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
const CERTIFICATE: &str = "server.pem";
const KEY: &str = "server.key";

const DAY_SECONDS: i64 = 86_400;
/// How long the authority is valid.
const CA_DAYS: i64 = 3_650;
/// How long a certificate is valid; clients refuse much longer ones.
const DAYS: i64 = 365;
/// Renewed when less is left.
const RENEW_DAYS: i64 = 30;

/// The server's certificate and key: those that are there if they are good
/// for another month, else new ones. The authority is kept while it lasts,
/// because clients trust it by copy: without its key nothing new is signed, and
/// no other authority takes its place.
pub(super) fn ensure(folder: &Path, now: SystemTime) -> Result<(PathBuf, PathBuf), TlsError> {
    let paths = (folder.join(CERTIFICATE), folder.join(KEY));
    fs::create_dir_all(folder).map_err(|source| TlsError::Write { path: folder.into(), source })?;
    let authority = match Authority::read(folder, now) {
        Some(authority) => authority,
        None => {
            let path = folder.join(CA_CERTIFICATE);
            if path.exists() {
                tracing::warn!(
                    path = %path.display(),
                    "the development authority has ended or is damaged: clients must trust a new one"
                );
            }
            Authority::make(folder, now)?
        }
    };
    if !is_good(&paths.0, &paths.1, &authority, now) {
        authority.issue(folder, &paths, now)?;
    }
    Ok(paths)
}

/// Whether a certificate is ours, matches its key and lasts.
fn is_good(certificate: &Path, key: &Path, authority: &Authority, now: SystemTime) -> bool {
    read_pair(certificate, key, now).is_ok()
        && lasts(certificate, now)
        && read_chain(certificate).is_ok_and(|chain| {
            let [leaf, ..] = chain.as_slice() else { return false };
            authority.has_signed(leaf)
        })
}

fn lasts(certificate: &Path, now: SystemTime) -> bool {
    let Ok(chain) = read_chain(certificate) else { return false };
    let Some(Ok(validity)) = chain.first().map(|leaf| Validity::of(leaf, certificate)) else {
        return false;
    };
    let now = unix_seconds(now);
    validity.from <= now && now + RENEW_DAYS * DAY_SECONDS < validity.until
}

struct Authority {
    /// `None` where its key is missing or another's.
    issuer: Option<Issuer<'static, KeyPair>>,
    certificate: Vec<u8>,
}

impl Authority {
    /// The one that is there, if it lasts.
    fn read(folder: &Path, now: SystemTime) -> Option<Self> {
        let (certificate, key) = (folder.join(CA_CERTIFICATE), folder.join(CA_KEY));
        if !lasts(&certificate, now) {
            return None;
        }
        let chain = read_chain(&certificate).ok()?;
        let leaf = chain.first()?;
        let issuer = || {
            read_pair(&certificate, &key, now).ok()?;
            let key = KeyPair::from_pem(&String::from_utf8(read_file(&key).ok()?).ok()?).ok()?;
            Issuer::from_ca_cert_der(leaf, key).ok()
        };
        Some(Self { issuer: issuer(), certificate: leaf.to_vec() })
    }

    fn make(folder: &Path, now: SystemTime) -> Result<Self, TlsError> {
        let key = KeyPair::generate().map_err(TlsError::Generate)?;
        let mut params = params("tollgate development CA", now, CA_DAYS);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![
                GeneralSubtree::DnsName("localhost".into()),
                GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([127, 0, 0, 0], 8)),
                GeneralSubtree::IpAddress(CidrSubnet::from_v6_prefix(
                    std::net::Ipv6Addr::LOCALHOST.octets(),
                    128,
                )),
            ],
            excluded_subtrees: Vec::new(),
        });
        let certificate = params.self_signed(&key).map_err(TlsError::Generate)?;
        write(&folder.join(CA_KEY), &key.serialize_pem(), SECRET)?;
        write(&folder.join(CA_CERTIFICATE), &certificate.pem(), PUBLIC)?;
        let der = certificate.der().to_vec();
        Ok(Self { issuer: Some(Issuer::new(params, key)), certificate: der })
    }

    /// Whether `leaf` bears this authority's signature.
    fn has_signed(&self, leaf: &[u8]) -> bool {
        use x509_parser::prelude::{FromDer, X509Certificate};
        let (Ok((_, leaf)), Ok((_, authority))) =
            (X509Certificate::from_der(leaf), X509Certificate::from_der(&self.certificate))
        else {
            return false;
        };
        // Development only: which key signed is told by the names and the key
        // identifier; a forged one serves nobody, since clients verify it.
        let key_identifier = |certificate: &X509Certificate<'_>, own: bool| {
            certificate.extensions().iter().find_map(|extension| {
                use x509_parser::extensions::ParsedExtension as Parsed;
                match extension.parsed_extension() {
                    Parsed::SubjectKeyIdentifier(id) if own => Some(id.0.to_vec()),
                    Parsed::AuthorityKeyIdentifier(id) if !own => {
                        id.key_identifier.as_ref().map(|id| id.0.to_vec())
                    }
                    _ => None,
                }
            })
        };
        leaf.issuer() == authority.subject()
            && key_identifier(&leaf, false).is_some()
            && key_identifier(&leaf, false) == key_identifier(&authority, true)
    }

    fn issue(
        &self,
        folder: &Path,
        (certificate, key): &(PathBuf, PathBuf),
        now: SystemTime,
    ) -> Result<(), TlsError> {
        let issuer = self.issuer.as_ref().ok_or_else(|| TlsError::AuthorityKey {
            path: folder.join(CA_KEY),
            certificate: folder.join(CA_CERTIFICATE),
        })?;
        let pair = KeyPair::generate().map_err(TlsError::Generate)?;
        let mut params = params("tollgate development", now, DAYS);
        params.subject_alt_names = CertificateParams::new(NAMES.map(String::from))
            .map_err(TlsError::Generate)?
            .subject_alt_names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(&pair, issuer).map_err(TlsError::Generate)?;
        write(key, &pair.serialize_pem(), SECRET)?;
        write(certificate, &signed.pem(), PUBLIC)
    }
}

fn params(name: &str, now: SystemTime, days: i64) -> CertificateParams {
    let date = |unix_seconds: i64| {
        let (year, month, day) = day(unix_seconds).civil();
        date_time_ymd(
            i32::try_from(year).unwrap_or(9_999),
            u8::try_from(month).expect("1 to 12"),
            u8::try_from(day).expect("1 to 31"),
        )
    };
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    // A day early, for clients whose clock is behind.
    params.not_before = date(unix_seconds(now) - DAY_SECONDS);
    params.not_after = date(unix_seconds(now) + days * DAY_SECONDS);
    params
}

/// Whole or not at all: beside the place, then moved there.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), TlsError> {
    let beside = path.with_extension("new");
    let written = (|| {
        let _ = fs::remove_file(&beside); // left by a crash, perhaps with another mode
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    written.map_err(|source| TlsError::Write { path: path.into(), source })
}

/// For whom the certificate speaks.
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;
