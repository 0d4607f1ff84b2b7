//! TLS certificates: files that an admin names, or a certificate of a
//! development authority that this module makes. TLS 1.2 and 1.3 by aws-lc-rs.
//! Early data is off, so that no request can be replayed.

mod development;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, ServerConfig};
use rustls::sign::CertifiedKey;
use tollgate_domain::UtcTime;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The source of the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsSource {
    /// Files that an admin provides and renews.
    Files {
        /// The chain in PEM, the leaf first.
        certificate: PathBuf,
        /// The leaf's private key in PEM.
        key: PathBuf,
    },
    /// An authority and a certificate for this machine. Both are made in this
    /// folder on first use and renewed before they expire.
    Development {
        /// The folder, `data/tls` of a gateway.
        folder: PathBuf,
    },
}

/// An error that leaves no usable certificate. Each error names its file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// A file has no PEM block of the wanted kind.
    #[error("{path} has no {wanted} in PEM")]
    NoPem {
        /// The file with the problem.
        path: PathBuf,
        /// The wanted kind: `certificate` or `private key`.
        wanted: &'static str,
    },
    /// The content of a PEM block does not match its label.
    #[error("{path} has a {wanted} that cannot be read")]
    Damaged {
        /// The file with the problem.
        path: PathBuf,
        /// The wanted kind: `certificate` or `private key`.
        wanted: &'static str,
    },
    /// The private key is of an unsupported kind.
    #[error("{path} has a private key of a kind that is not supported")]
    UnsupportedKey {
        /// The file with the problem.
        path: PathBuf,
    },
    /// Certificate and key do not belong together.
    #[error("the private key in {key} does not match the certificate in {certificate}")]
    Mismatch {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the private key.
        key: PathBuf,
    },
    /// The certificate has expired.
    #[error("the certificate in {path} expired on {day}")]
    Expired {
        /// The file with the problem.
        path: PathBuf,
        /// The UTC day of the expiry.
        day: tollgate_domain::UtcDay,
    },
    /// The certificate is not valid yet.
    #[error("the certificate in {path} is not valid before {day}")]
    NotYetValid {
        /// The file with the problem.
        path: PathBuf,
        /// The first UTC day on which the certificate is valid.
        day: tollgate_domain::UtcDay,
    },
    /// The development authority exists, but its private key does not.
    #[error(
        "{path} is missing or does not belong to {certificate}: restore it, or delete both for a \
         new authority, which every client must then trust anew"
    )]
    AuthorityKey {
        /// The missing key file.
        path: PathBuf,
        /// The file of the authority's certificate.
        certificate: PathBuf,
    },
    /// A development certificate could not be made.
    #[error("cannot make a development certificate")]
    Generate(#[source] rcgen::Error),
    /// The TLS library rejects its own defaults.
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
}

/// The certificate in use. It can be replaced while connections run.
#[derive(Clone, Debug)]
pub struct TlsIdentity {
    current: Arc<Current>,
}

/// A certificate that was read and checked, for [`TlsIdentity::renew`].
#[derive(Debug)]
pub struct PreparedCertificate(CertifiedKey);

impl TlsIdentity {
    /// Reads the certificate, or makes a development certificate.
    ///
    /// # Errors
    /// The certificate cannot be read or used; the error names the file.
    #[expect(clippy::disallowed_methods, reason = "the pair is checked against the present date")]
    pub fn load(source: TlsSource) -> Result<Self, TlsError> {
        // Read at the start, so that a bad file fails the start and no handshake.
        let certified = read(&source, SystemTime::now())?;
        let current = Arc::new(Current(ArcSwap::from_pointee(certified)));
        Ok(Self { current })
    }

    /// Reads the certificate of `source`, which may be renewed or another one. Nothing
    /// changes before [`Self::renew`].
    ///
    /// # Errors
    /// The errors of [`Self::load`].
    #[expect(clippy::disallowed_methods, reason = "the pair is checked against the present date")]
    pub fn prepare(source: &TlsSource) -> Result<PreparedCertificate, TlsError> {
        read(source, SystemTime::now()).map(PreparedCertificate)
    }

    /// Returns true if clients see another chain once `prepared` is in use.
    pub fn differs_from(&self, prepared: &PreparedCertificate) -> bool {
        self.current.0.load().cert != prepared.0.cert
    }

    /// Uses `prepared` for new connections. Open connections go on undisturbed.
    pub fn renew(&self, prepared: PreparedCertificate) {
        self.current.0.store(Arc::new(prepared.0));
    }

    /// Returns the certificate in use in DER, without the rest of its chain.
    pub fn leaf(&self) -> Vec<u8> {
        let current = self.current.0.load();
        // There is a leaf, or the certificate would not have been accepted.
        current.cert.first().map(|leaf| leaf.to_vec()).unwrap_or_default()
    }

    /// Returns the time at which the certificate in use expires; `None` if it cannot be read.
    pub fn expires(&self) -> Option<UtcTime> {
        let current = self.current.0.load();
        let (_, leaf) = X509Certificate::from_der(current.cert.first()?).ok()?;
        let seconds = u64::try_from(leaf.validity().not_after.timestamp()).ok()?;
        Some(UtcTime(seconds.saturating_mul(1_000_000_000)))
    }

    /// Builds the TLS config of a listener. ALPN offers HTTP/2 before HTTP/1.
    ///
    /// # Errors
    /// The TLS library rejects its own defaults.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            // TLS 1.0 and 1.1 must not be used (RFC 8996).
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(TlsError::Setup)?
            // Callers show a key or a token in a header, and no certificate.
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&self.current) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // An attacker can replay early data (RFC 8446, 8), and a repeated request costs money.
        config.max_early_data_size = 0;
        // The strongest suite that both sides know, not the client's favourite.
        config.ignore_client_order = true;
        Ok(Arc::new(config))
    }
}

/// Returns the path of the development authority's certificate in `folder`.
pub fn development_authority(folder: &Path) -> PathBuf {
    folder.join(development::CA_CERTIFICATE)
}

/// The certificate that new handshakes use.
#[derive(Debug)]
struct Current(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

fn read(source: &TlsSource, now: SystemTime) -> Result<CertifiedKey, TlsError> {
    match source {
        TlsSource::Files { certificate, key } => read_pair(certificate, key, now),
        TlsSource::Development { folder } => {
            let (certificate, key) = development::ensure(folder, now)?;
            read_pair(&certificate, &key, now)
        }
    }
}

/// Reads a chain and its key, and checks that they belong together and are
/// valid at `now`.
fn read_pair(certificate: &Path, key: &Path, now: SystemTime) -> Result<CertifiedKey, TlsError> {
    let chain = read_chain(certificate)?;
    // TLS puts the server's own certificate first (RFC 8446, 4.4.2).
    let leaf = chain.first().ok_or_else(|| no_certificate(certificate))?;
    let validity = Validity::of(leaf, certificate)?;
    let now = unix_seconds(now);
    if now < validity.from {
        return Err(TlsError::NotYetValid { path: certificate.into(), day: day(validity.from) });
    }
    if now > validity.until {
        return Err(TlsError::Expired { path: certificate.into(), day: day(validity.until) });
    }
    let secret = read_key(key)?;
    let signer = rustls::crypto::aws_lc_rs::sign::any_supported_type(&secret)
        .map_err(|_| TlsError::UnsupportedKey { path: key.into() })?;
    let certified = CertifiedKey::new(chain, signer);
    match certified.keys_match() {
        Ok(()) => Ok(certified),
        // The library cannot compare keys of this kind; the handshake will tell.
        Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => Ok(certified),
        Err(_) => Err(TlsError::Mismatch { certificate: certificate.into(), key: key.into() }),
    }
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read_file(path)?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|_| TlsError::Damaged { path: path.into(), wanted: "certificate" })?;
    if chain.is_empty() { Err(no_certificate(path)) } else { Ok(chain) }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    use rustls::pki_types::pem::Error;
    PrivateKeyDer::from_pem_slice(&read_file(path)?).map_err(|error| match error {
        Error::NoItemsFound => TlsError::NoPem { path: path.into(), wanted: "private key" },
        _ => TlsError::Damaged { path: path.into(), wanted: "private key" },
    })
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    let read = || {
        // The size is checked while reading: devices and pipes report none.
        let mut bytes = Vec::new();
        File::open(path)?.take(LARGEST_FILE + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LARGEST_FILE {
            return Err(io::Error::other("larger than 1 MiB"));
        }
        Ok(bytes)
    };
    read().map_err(|source| TlsError::Read { path: path.into(), source })
}

/// Largest file of certificates or of a key, in bytes. A chain has a few kB.
const LARGEST_FILE: u64 = 1 << 20;

fn no_certificate(path: &Path) -> TlsError {
    TlsError::NoPem { path: path.into(), wanted: "certificate" }
}

/// The validity of a certificate, in Unix seconds.
#[derive(Clone, Copy, Debug)]
struct Validity {
    from: i64,
    until: i64,
}

impl Validity {
    fn of(certificate: &CertificateDer<'_>, path: &Path) -> Result<Self, TlsError> {
        let (_, parsed) = X509Certificate::from_der(certificate)
            .map_err(|_| TlsError::Damaged { path: path.into(), wanted: "certificate" })?;
        let validity = parsed.validity();
        Ok(Self { from: validity.not_before.timestamp(), until: validity.not_after.timestamp() })
    }
}

fn unix_seconds(time: SystemTime) -> i64 {
    // With a clock before 1970, every certificate is not valid yet, which is reported.
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

fn day(unix_seconds: i64) -> tollgate_domain::UtcDay {
    UtcTime(u64::try_from(unix_seconds).unwrap_or(0).saturating_mul(1_000_000_000)).day()
}

#[cfg(test)]
mod tests;
