//! One GET of one URL that an admin wrote, over TLS: how the key set of an
//! issuer is had. Nothing that the other side says leads anywhere else: no
//! redirect is followed, no coding undone, no more read than is asked for, and
//! all of it ends within a deadline.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Why a URL could not be had.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Not `https://HOST[:PORT]/PATH`.
    #[error("not a URL such as https://issuer.example/jwks.json")]
    Url,
    /// The authorities to trust cannot be read.
    #[error("{path}: {reason}")]
    Roots {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// This machine has no authorities to trust.
    #[error("there are no CA certificates on this machine: name a file with some")]
    NoRoots,
    /// The TLS library refuses its own defaults.
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
    /// TCP or TLS did not come about.
    #[error("could not connect")]
    Connect(#[source] std::io::Error),
    /// The exchange broke.
    #[error("HTTP failed")]
    Http(#[from] hyper::Error),
    /// The body broke.
    #[error("the answer broke off: {0}")]
    Body(String),
    /// Another answer than 200.
    #[error("answered {0}")]
    Status(StatusCode),
    /// More than is read of any answer.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
    /// It took too long.
    #[error("no whole answer within {0:?}")]
    Timeout(Duration),
}

/// Gets one URL, again and again.
#[derive(Clone, Debug)]
pub(super) struct Fetcher {
    authority: String,
    host: String,
    port: u16,
    path: String,
    tls: Arc<ClientConfig>,
    /// Bytes of an answer.
    most: usize,
    deadline: Duration,
}

impl Fetcher {
    /// For `url`, trusting the authorities in the file `ca`, else those of the
    /// system; answers have `most` bytes, and come within `deadline`.
    pub(super) fn new(
        url: &str,
        ca: Option<&Path>,
        most: usize,
        deadline: Duration,
    ) -> Result<Self, FetchError> {
        let uri: Uri = url.parse().map_err(|_| FetchError::Url)?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("https"));
        let authority = authority.ok_or(FetchError::Url)?;
        if authority.as_str().contains('@') {
            return Err(FetchError::Url);
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self {
            authority: authority.to_string(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(443),
            path: path.to_owned(),
            tls: Arc::new(client_config(ca)?),
            most,
            deadline,
        })
    }

    /// The bytes that stand there now.
    pub(super) async fn get(&self) -> Result<Vec<u8>, FetchError> {
        let got = timeout(self.deadline, self.get_in_time()).await;
        got.unwrap_or(Err(FetchError::Timeout(self.deadline)))
    }

    async fn get_in_time(&self) -> Result<Vec<u8>, FetchError> {
        let name = ServerName::try_from(self.host.clone()).map_err(|_| FetchError::Url)?;
        let tcp = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(FetchError::Connect)?;
        let connector = TlsConnector::from(Arc::clone(&self.tls));
        let stream = connector.connect(name, tcp).await.map_err(FetchError::Connect)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let (mut exchange, mut connection) = (pin!(self.exchange(sender)), pin!(connection));
        tokio::select! {
            biased;
            answer = &mut exchange => return answer,
            // What it had read by its end is still to be taken.
            _ = &mut connection => {}
        }
        exchange.await
    }

    async fn exchange(
        &self,
        mut sender: http1::SendRequest<Empty<Bytes>>,
    ) -> Result<Vec<u8>, FetchError> {
        let request = Request::get(&self.path)
            .header(header::HOST, &self.authority)
            .header(header::ACCEPT, "application/json")
            .body(Empty::new())
            .map_err(|_| FetchError::Url)?;
        let response = sender.send_request(request).await?;
        if response.status() != StatusCode::OK {
            return Err(FetchError::Status(response.status()));
        }
        let body = Limited::new(response.into_body(), self.most).collect().await;
        let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
            Some(_) => FetchError::TooLarge(self.most),
            None => FetchError::Body(error.to_string()),
        })?;
        Ok(body.to_bytes().to_vec())
    }
}

fn client_config(ca: Option<&Path>) -> Result<ClientConfig, FetchError> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => named_roots(&mut roots, path)?,
        None => system_roots(&mut roots)?,
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(FetchError::Setup)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Those of a file that an admin named, all of them good.
fn named_roots(roots: &mut RootCertStore, path: &Path) -> Result<(), FetchError> {
    let wrong = |reason: String| FetchError::Roots { path: path.to_owned(), reason };
    for certificate in CertificateDer::pem_file_iter(path).map_err(|e| wrong(e.to_string()))? {
        let certificate = certificate.map_err(|e| wrong(e.to_string()))?;
        roots.add(certificate).map_err(|e| wrong(e.to_string()))?;
    }
    if roots.is_empty() {
        return Err(wrong("no certificate in it".to_owned()));
    }
    Ok(())
}

/// Those that the system trusts, as far as they can be read.
fn system_roots(roots: &mut RootCertStore) -> Result<(), FetchError> {
    for path in SYSTEM_ROOTS {
        let Ok(found) = CertificateDer::pem_file_iter(path) else { continue };
        roots.add_parsable_certificates(found.filter_map(Result::ok));
        if !roots.is_empty() {
            return Ok(());
        }
    }
    Err(FetchError::NoRoots)
}

/// Where systems keep the authorities that they trust, in one file: Debian and
/// distroless images, Fedora, SUSE, Alpine.
const SYSTEM_ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

#[cfg(test)]
pub(super) mod tests;
