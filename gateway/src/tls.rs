//! Certificates: the ones that an admin names, or a development authority of
//! our own. TLS 1.2 and 1.3 by aws-lc-rs; never early data, so that no request
//! is replayed.

mod development;

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

/// Where the certificate comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsSource {
    /// Files that an admin provides and renews.
    Files {
        /// The chain in PEM, the leaf first.
        certificate: PathBuf,
        /// The leaf's private key in PEM.
        key: PathBuf,
    },
    /// An authority and a certificate for this machine, made in this folder
    /// on first use and renewed when they near their end.
    Development {
        /// The folder: `data/tls`.
        folder: PathBuf,
    },
}

/// Why there is no usable certificate. Each names its file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file has no PEM block of the kind that is wanted.
    #[error("{path} has no {wanted} in PEM")]
    NoPem {
        /// Which.
        path: PathBuf,
        /// What is wanted.
        wanted: &'static str,
    },
    /// A PEM block holds something else than it says.
    #[error("{path} has a {wanted} that cannot be read")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wanted.
        wanted: &'static str,
    },
    /// The key is of a kind that we do not use.
    #[error("{path} has a private key of a kind that is not supported")]
    UnsupportedKey {
        /// Which.
        path: PathBuf,
    },
    /// Certificate and key do not belong together.
    #[error("the private key in {key} does not match the certificate in {certificate}")]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// The certificate's time is over.
    #[error("the certificate in {path} expired on {day}")]
    Expired {
        /// Which.
        path: PathBuf,
        /// The UTC day of its end.
        day: tollgate_domain::UtcDay,
    },
    /// The certificate's time has not come.
    #[error("the certificate in {path} is not valid before {day}")]
    NotYetValid {
        /// Which.
        path: PathBuf,
        /// The UTC day of its beginning.
        day: tollgate_domain::UtcDay,
    },
    /// The development authority is there and its key is not.
    #[error(
        "{path} is missing or does not belong to {certificate}: restore it, or delete both for a \
         new authority, which every client must then trust anew"
    )]
    AuthorityKey {
        /// The key that is needed.
        path: PathBuf,
        /// The authority's certificate.
        certificate: PathBuf,
    },
    /// A development certificate could not be made.
    #[error("cannot make a development certificate")]
    Generate(#[source] rcgen::Error),
    /// The TLS library refuses its own defaults.
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
}

/// The certificate in use, which may be replaced while connections run.
#[derive(Clone, Debug)]
pub struct TlsIdentity {
    source: TlsSource,
    current: Arc<Current>,
}

impl TlsIdentity {
    /// Reads the certificate, or makes the development one.
    ///
    /// # Errors
    /// When it cannot be read or used; the error names the file.
    pub fn load(source: TlsSource) -> Result<Self, TlsError> {
        let certified = read(&source, SystemTime::now())?;
        let current = Arc::new(Current(ArcSwap::from_pointee(certified)));
        Ok(Self { source, current })
    }

    /// Reads it again; new connections get what is read, or on error what
    /// there was.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn reload(&self) -> Result<(), TlsError> {
        self.current.0.store(Arc::new(read(&self.source, SystemTime::now())?));
        Ok(())
    }

    /// How connections shake hands. ALPN offers HTTP/2 before HTTP/1.
    ///
    /// # Errors
    /// When the library refuses its own defaults.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(TlsError::Setup)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&self.current) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.max_early_data_size = 0;
        // The strongest that both know, not the one that the client likes best.
        config.ignore_client_order = true;
        Ok(Arc::new(config))
    }
}

/// The authority's certificate where development certificates are used.
pub fn development_authority(folder: &Path) -> PathBuf {
    folder.join(development::CA_CERTIFICATE)
}

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

/// A chain and its key, checked to belong together and to be valid `now`.
fn read_pair(certificate: &Path, key: &Path, now: SystemTime) -> Result<CertifiedKey, TlsError> {
    let chain = read_chain(certificate)?;
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
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.into(), source })
}

fn no_certificate(path: &Path) -> TlsError {
    TlsError::NoPem { path: path.into(), wanted: "certificate" }
}

/// When a certificate is valid, in seconds since 1970.
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
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

fn day(unix_seconds: i64) -> tollgate_domain::UtcDay {
    UtcTime(u64::try_from(unix_seconds).unwrap_or(0).saturating_mul(1_000_000_000)).day()
}

#[cfg(test)]
mod tests;
