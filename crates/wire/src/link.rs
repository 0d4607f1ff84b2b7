//! Mutual TLS 1.3 between a gateway and a worker on another machine. Both sides have a
//! certificate of one authority. The certificate names its owner by a URI:
//! `tollgate://CLUSTER/worker/NAME` or `tollgate://CLUSTER/gateway/NAME`.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig,
    SignatureScheme,
};
use serde::{Deserialize, Serialize};
use tollgate_domain::{ClusterName, GatewayName, WorkerName};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The certificate files of one side of a link. They are read for each connection, so a
/// renewed certificate needs no restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkFiles {
    /// The cluster that the other side must belong to.
    pub cluster: ClusterName,
    /// The PEM file with the authority's certificates.
    pub ca: PathBuf,
    /// The PEM file with this side's certificate chain, the leaf first.
    pub certificate: PathBuf,
    /// The PEM file with the certificate's private key.
    pub key: PathBuf,
}

/// Certificate files that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// A file cannot be read as PEM of the wanted kind.
    #[error("cannot read {wanted} from {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// `a certificate` or `a private key`.
        wanted: &'static str,
        /// The reason, in words.
        reason: String,
    },
    /// The certificate or its key is refused by the TLS library.
    #[error("cannot use the certificate {}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: rustls::Error,
    },
    /// The authority's certificates cannot be used.
    #[error("cannot use the certificate authority {}: {reason}", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// The reason, in words.
        reason: String,
    },
    /// The certificate names another owner.
    #[error("the certificate {} is not of {expected}; it names {found}", path.display())]
    Owner {
        /// The file.
        path: PathBuf,
        /// The owner's URI that the config asks for.
        expected: String,
        /// The URIs of the certificate.
        found: String,
    },
}

/// The owner of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkOwner {
    /// A worker.
    Worker(WorkerName),
    /// A gateway.
    Gateway(GatewayName),
}

impl LinkOwner {
    /// Returns the URI in the owner's certificate.
    pub fn uri(&self, cluster: &ClusterName) -> String {
        match self {
            Self::Worker(name) => format!("tollgate://{cluster}/worker/{name}"),
            Self::Gateway(name) => format!("tollgate://{cluster}/gateway/{name}"),
        }
    }
}

impl LinkFiles {
    /// Returns the TLS settings of a gateway that connects to `worker`.
    ///
    /// # Errors
    /// A file cannot be read or used.
    pub fn client(&self, worker: &WorkerName) -> Result<ClientConfig, LinkError> {
        let provider = provider();
        let expected = LinkOwner::Worker(worker.clone()).uri(&self.cluster);
        let roots = Arc::new(self.roots()?);
        let chains =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), provider.clone())
                .build()
                .map_err(|error| self.authority(&error))?;
        let algorithms = provider.signature_verification_algorithms;
        let verifier = WorkerVerifier { chains, roots, algorithms, expected };
        let (chain, key) = self.own()?;
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|config| {
                config
                    .dangerous()
                    .with_custom_certificate_verifier(Arc::new(verifier))
                    .with_client_auth_cert(chain, key)
            })
            .map_err(|source| self.refused(source))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // The worker is known by its URI, and an address is no secret of this link.
        config.enable_sni = false;
        Ok(config)
    }

    /// Returns the TLS settings of a worker that gateways connect to. After the handshake
    /// [`Self::gateway`] tells which gateway it is.
    ///
    /// # Errors
    /// A file cannot be read or used.
    pub fn server(&self) -> Result<ServerConfig, LinkError> {
        let provider = provider();
        let roots = Arc::new(self.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| self.authority(&error))?;
        let (chain, key) = self.own()?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|config| {
                config.with_client_cert_verifier(verifier).with_single_cert(chain, key)
            })
            .map_err(|source| self.refused(source))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(config)
    }

    /// Returns the gateway of this cluster that `certificate` belongs to; `None` if it
    /// names none.
    pub fn gateway(&self, certificate: &CertificateDer<'_>) -> Option<GatewayName> {
        let prefix = format!("tollgate://{}/gateway/", self.cluster);
        let names = uris(certificate)?;
        names.iter().find_map(|uri| GatewayName::new(uri.strip_prefix(&prefix)?).ok())
    }

    /// Checks the files as [`Self::client`] and [`Self::server`] do, and that the
    /// certificate belongs to `owner`; `None` accepts any gateway of the cluster.
    ///
    /// # Errors
    /// A file cannot be read or used, or the certificate names another owner.
    pub fn check(&self, owner: Option<&LinkOwner>) -> Result<(), LinkError> {
        // Made and dropped: making the settings reads and checks every file.
        self.server()?;
        let (chain, _) = self.own()?;
        let found = chain.first().and_then(uris).unwrap_or_default();
        let (expected, is_owner) = match owner {
            Some(owner) => {
                let uri = owner.uri(&self.cluster);
                let is_owner = found.contains(&uri);
                (uri, is_owner)
            }
            None => {
                let is_gateway = chain.first().is_some_and(|leaf| self.gateway(leaf).is_some());
                (format!("tollgate://{}/gateway/NAME", self.cluster), is_gateway)
            }
        };
        if is_owner {
            return Ok(());
        }
        let found = if found.is_empty() { "no URI".to_owned() } else { found.join(", ") };
        Err(LinkError::Owner { path: self.certificate.clone(), expected, found })
    }

    fn roots(&self) -> Result<RootCertStore, LinkError> {
        let mut roots = RootCertStore::empty();
        for certificate in read_chain(&self.ca)? {
            roots.add(certificate).map_err(|error| self.authority(&error))?;
        }
        Ok(roots)
    }

    fn own(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), LinkError> {
        let chain = read_chain(&self.certificate)?;
        let key = open(&self.key)
            .and_then(PrivateKeyDer::from_pem_reader)
            .map_err(|error| unreadable(&self.key, "a private key", &error))?;
        Ok((chain, key))
    }

    fn refused(&self, source: rustls::Error) -> LinkError {
        LinkError::Certificate { path: self.certificate.clone(), source }
    }

    fn authority(&self, reason: &dyn fmt::Display) -> LinkError {
        LinkError::Authority { path: self.ca.clone(), reason: reason.to_string() }
    }
}

/// HTTP/2, the protocol of gRPC.
const ALPN: &[u8] = b"h2";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Opens a PEM file. Its reader ends after [`MOST_PEM_BYTES`], because a wrong path may name a
/// file without an end.
fn open(path: &Path) -> Result<impl io::Read + use<>, pem::Error> {
    let file = File::open(path).map_err(pem::Error::Io)?;
    Ok(file.take(MOST_PEM_BYTES))
}

/// Bytes of a PEM file that are read. A chain has a few kB, all public authorities 250 kB.
const MOST_PEM_BYTES: u64 = 16 << 20;

/// Reads every certificate of a PEM file; at least one.
fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, LinkError> {
    let wanted = "a certificate";
    let chain = open(path)
        .and_then(|file| CertificateDer::pem_reader_iter(file).collect::<Result<Vec<_>, _>>())
        .map_err(|error| unreadable(path, wanted, &error))?;
    if chain.is_empty() {
        return Err(unreadable(path, wanted, &"the file has none"));
    }
    Ok(chain)
}

fn unreadable(path: &Path, wanted: &'static str, reason: &dyn fmt::Display) -> LinkError {
    LinkError::File { path: path.to_owned(), wanted, reason: reason.to_string() }
}

/// Returns the URIs among the alternative names of a certificate; `None` if it cannot be
/// read.
fn uris(certificate: &CertificateDer<'_>) -> Option<Vec<String>> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    let uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some((*uri).to_owned()),
        _ => None,
    });
    Some(uris.collect())
}

/// The check of a worker's certificate: its chain, and the URI in place of a host's name,
/// because a worker keeps its name when its address changes.
#[derive(Debug)]
struct WorkerVerifier {
    chains: Arc<WebPkiServerVerifier>,
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    expected: String,
}

impl ServerCertVerifier for WorkerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        // The chain alone: the library's whole check would also ask for the name of a host.
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &self.roots,
            intermediates,
            now,
            self.algorithms.all,
        )?;
        let found = uris(end_entity).unwrap_or_default();
        if found.contains(&self.expected) {
            return Ok(ServerCertVerified::assertion());
        }
        Err(CertificateError::Other(rustls::OtherError(Arc::new(WrongOwner {
            expected: self.expected.clone(),
            found,
        })))
        .into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // The trait needs it, but only TLS 1.3 is offered.
        self.chains.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chains.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

/// A certificate of another owner than the expected one.
#[derive(Debug, thiserror::Error)]
#[error("the certificate names {found:?} and not {expected}")]
struct WrongOwner {
    expected: String,
    found: Vec<String>,
}
