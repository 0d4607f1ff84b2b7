//! The certificate authorities that the gateway trusts when it calls other systems, and
//! the TLS of such a call.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// The reasons why no TLS client can be made.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The file of trusted certificate authorities cannot be read.
    #[error("{path}: {reason}")]
    Roots {
        /// The path of the file.
        path: PathBuf,
        /// The mistake in the file.
        reason: String,
    },
    /// This machine trusts no certificate authority.
    #[error("there are no CA certificates on this machine: name a file with some")]
    NoRoots,
    /// The TLS library refuses its own defaults.
    #[error("cannot set up TLS")]
    Tls(#[source] rustls::Error),
}

/// Returns a TLS configuration that trusts the authorities in the file `ca`, or those of
/// the system.
///
/// # Errors
/// The file cannot be used, or the system has no authorities.
pub(crate) fn client_config(ca: Option<&Path>) -> Result<ClientConfig, TrustError> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => named_roots(&mut roots, path)?,
        None => system_roots(&mut roots)?,
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TrustError::Tls)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    // The HTTP client is built without HTTP/2.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Adds the authorities of a file that an admin named. All of them must be valid.
fn named_roots(roots: &mut RootCertStore, path: &Path) -> Result<(), TrustError> {
    let wrong = |reason: String| TrustError::Roots { path: path.to_owned(), reason };
    let file = File::open(path).map_err(|e| wrong(e.to_string()))?;
    // A bound, because a wrong path may name a file without an end.
    for certificate in CertificateDer::pem_reader_iter(file.take(MOST_ROOTS_BYTES)) {
        let certificate = certificate.map_err(|e| wrong(e.to_string()))?;
        roots.add(certificate).map_err(|e| wrong(e.to_string()))?;
    }
    if roots.is_empty() {
        return Err(wrong("no certificate in it".to_owned()));
    }
    Ok(())
}

/// Adds the authorities that the system trusts. Certificates that cannot be read
/// are skipped, because the admin did not choose them.
fn system_roots(roots: &mut RootCertStore) -> Result<(), TrustError> {
    for path in SYSTEM_ROOTS {
        let Ok(found) = CertificateDer::pem_file_iter(path) else { continue };
        roots.add_parsable_certificates(found.filter_map(Result::ok));
        if !roots.is_empty() {
            return Ok(());
        }
    }
    Err(TrustError::NoRoots)
}

/// Bytes that are read of a file of authorities. All public ones have 250 kB.
const MOST_ROOTS_BYTES: u64 = 16 << 20;

/// The files in which systems keep their trusted authorities: Debian and
/// distroless images, Fedora, SUSE, Alpine.
const SYSTEM_ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
