//! The certificate of the admin listener as a file of the data folder. Commands on this
//! host compare the listener's certificate with this file: the certificate of a domain
//! has no name for a loopback address, and its authority is not in the data folder.

use std::path::{Path, PathBuf};

use tollgate_edge::tls::TlsIdentity;

use crate::GatewayError;

/// Returns the path of the file in the data folder `data`. The file has the certificate
/// that new connections see, in DER.
pub fn admin_certificate(data: &Path) -> PathBuf {
    data.join("admin.der")
}

/// Writes the file. It blocks.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn publish(data: &Path, tls: &TlsIdentity) -> Result<(), GatewayError> {
    let path = admin_certificate(data);
    let draft = path.with_extension("der.new");
    std::fs::write(&draft, tls.leaf())
        // Atomic, so that no command reads half a certificate.
        .and_then(|()| std::fs::rename(&draft, &path))
        .map_err(|source| GatewayError::PublishCertificate { path, source })
}
