//! A development authority, so that a first start serves TLS which a client can
//! verify. Name constraints limit the authority to this machine's own names, so
//! trusting it risks little.

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

/// The file of the authority's certificate, which clients have to trust.
pub(super) const CA_CERTIFICATE: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
const CERTIFICATE: &str = "server.pem";
const KEY: &str = "server.key";

const DAY_SECONDS: i64 = 86_400;
/// Days for which the authority is valid.
const CA_DAYS: i64 = 3_650;
/// Days for which a certificate is valid; clients refuse much longer ones.
const DAYS: i64 = 365;
/// Days before the expiry at which a certificate is renewed.
const RENEW_DAYS: i64 = 30;

/// Returns the paths of the server's certificate and key. Keeps the existing
/// pair if it is valid for another month, and otherwise issues a new pair. The
/// authority is kept as long as it is valid, because clients have a copy of its
/// certificate. Without the authority's key nothing is signed, and no other
/// authority replaces it.
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
                    "the development authority expired or is damaged; clients must trust the new one"
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

/// Returns true if the authority signed the certificate, the key matches, and
/// the certificate need not be renewed.
fn is_good(certificate: &Path, key: &Path, authority: &Authority, now: SystemTime) -> bool {
    read_pair(certificate, key, now).is_ok()
        && lasts(certificate, now)
        && read_chain(certificate).is_ok_and(|chain| {
            // A certificate of an earlier authority would fail at clients that trust this one.
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
    /// `None` if the key is missing or belongs to another authority.
    issuer: Option<Issuer<'static, KeyPair>>,
    certificate: Vec<u8>,
}

impl Authority {
    /// Reads the existing authority, if it need not be renewed.
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
        // The key first: a certificate without its key would be kept and could sign nothing.
        write(&folder.join(CA_KEY), &key.serialize_pem(), SECRET)?;
        write(&folder.join(CA_CERTIFICATE), &certificate.pem(), PUBLIC)?;
        let der = certificate.der().to_vec();
        Ok(Self { issuer: Some(Issuer::new(params, key)), certificate: der })
    }

    /// Returns true if this authority signed `leaf`.
    fn has_signed(&self, leaf: &[u8]) -> bool {
        use x509_parser::prelude::{FromDer, X509Certificate};
        let (Ok((_, leaf)), Ok((_, authority))) =
            (X509Certificate::from_der(leaf), X509Certificate::from_der(&self.certificate))
        else {
            return false;
        };
        // Compares names and key identifiers only. That is enough here: clients
        // verify the signature, so a forged certificate gains nothing.
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
        // `has_signed` finds the authority by this extension.
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(&pair, issuer).map_err(TlsError::Generate)?;
        // The key first: a crash in between leaves a pair that does not match,
        // which the next start replaces.
        write(key, &pair.serialize_pem(), SECRET)?;
        write(certificate, &signed.pem(), PUBLIC)
    }
}

#[expect(clippy::expect_used, reason = "a civil date has a month up to 12 and a day up to 31")]
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
    // Valid from yesterday, for clients whose clock is late.
    params.not_before = date(unix_seconds(now) - DAY_SECONDS);
    params.not_after = date(unix_seconds(now) + days * DAY_SECONDS);
    params
}

/// Writes a file completely or not at all: to a temporary name, then renamed.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), TlsError> {
    let beside = path.with_extension("new");
    let written = (|| {
        // A crash may have left the temporary file, perhaps with another mode.
        let _ = fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
        file.write_all(text.as_bytes())?;
        // Before the rename, or a power cut could leave an empty file under the final name.
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    written.map_err(|source| TlsError::Write { path: path.into(), source })
}

/// Names and addresses that the certificate covers.
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;
