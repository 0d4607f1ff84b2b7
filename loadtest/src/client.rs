//! An HTTPS connection to a gateway, HTTP/1.1 or HTTP/2, that trusts only the
//! gateway's own CA. It never retries: each request is sent once.

mod pinned;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A gateway's address with a key.
#[derive(Clone)]
pub struct Target {
    authority: String,
    host: String,
    port: u16,
    authorization: HeaderValue,
    tls: Arc<ClientConfig>,
    source: Option<IpAddr>,
    receive_buffer: Option<u32>,
}

/// The HTTP versions that are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 only.
    Http1,
    /// HTTP/2 only.
    Http2,
    /// The version that the server prefers.
    Either,
}

/// An error of a connection to a gateway.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The base URL is not `https://host[:port]`.
    #[error("{0:?} is not https://HOST[:PORT]")]
    Url(String),
    /// The CA file cannot be used.
    #[error("CA {}: {reason}", path.display())]
    Ca {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The TLS library rejects its own defaults.
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
    /// The key has characters that are not allowed in a header.
    #[error("the key has characters that are not allowed in a header")]
    Key,
    /// The TCP connection failed.
    #[error("cannot connect to {authority}")]
    Connect {
        /// Host and port.
        authority: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The TLS handshake failed.
    #[error("TLS with {authority} failed")]
    Tls {
        /// Host and port.
        authority: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The connection or the request failed.
    #[error("HTTP failed")]
    Http(#[from] hyper::Error),
    /// A request could not be built.
    #[error("the request is malformed")]
    Request(#[from] http::Error),
}

impl ClientError {
    /// Returns a short description, the same for every error of a kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Url(_) | Self::Key | Self::Ca { .. } | Self::Setup(_) => "misconfigured",
            Self::Connect { .. } => "connect failed",
            Self::Tls { .. } => "TLS failed",
            Self::Http(_) => "connection broke",
            Self::Request(_) => "malformed request",
        }
    }
}

impl Target {
    /// Creates a target for the gateway at `base` (`https://host:port`), with the
    /// CA certificate in the file `ca` and the API key `key`.
    ///
    /// # Errors
    /// The URL, the CA file or the key cannot be used.
    pub fn new(base: &str, ca: &Path, key: &str) -> Result<Self, ClientError> {
        Self::with_tls(base, client_config(ca)?, key)
    }

    fn with_tls(base: &str, tls: ClientConfig, key: &str) -> Result<Self, ClientError> {
        let bad_url = || ClientError::Url(base.to_owned());
        let uri: Uri = base.parse().map_err(|_| bad_url())?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("https"));
        let authority = authority.ok_or_else(bad_url)?;
        let authorization = HeaderValue::from_str(&format!("Bearer {}", key.trim()));
        Ok(Self {
            authority: authority.to_string(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(443),
            authorization: authorization.map_err(|_| ClientError::Key)?,
            tls: Arc::new(tls),
            source: None,
            receive_buffer: None,
        })
    }

    /// Creates a target for the gateway at `base` that has exactly the certificate `leaf`
    /// (DER). The names and the authority of the certificate do not matter then.
    ///
    /// # Errors
    /// The URL, the certificate or the key cannot be used.
    pub fn pinned(base: &str, leaf: Vec<u8>, key: &str) -> Result<Self, ClientError> {
        Self::with_tls(base, pinned::client_config(leaf)?, key)
    }

    /// Returns the same target with another key.
    ///
    /// # Errors
    /// The key has characters that are not allowed in a header.
    pub fn with_key(&self, key: &str) -> Result<Self, ClientError> {
        let authorization = HeaderValue::from_str(&format!("Bearer {}", key.trim()));
        Ok(Self { authorization: authorization.map_err(|_| ClientError::Key)?, ..self.clone() })
    }

    /// Returns the same target, with connections from the local address `source`.
    pub fn from_source(&self, source: IpAddr) -> Self {
        Self { source: Some(source), ..self.clone() }
    }

    /// Returns the same target, with sockets that buffer about `bytes` of received
    /// data.
    pub fn with_receive_buffer(&self, bytes: u32) -> Self {
        Self { receive_buffer: Some(bytes), ..self.clone() }
    }

    /// Returns the local address of connections, if one was chosen.
    pub fn source(&self) -> Option<IpAddr> {
        self.source
    }

    /// Returns the host and port for requests.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Returns the host without the port.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the value of the header `authorization`.
    pub fn authorization(&self) -> &HeaderValue {
        &self.authorization
    }

    /// Looks up the addresses of the host.
    ///
    /// # Errors
    /// The host has no address.
    pub async fn addresses(&self) -> Result<Vec<SocketAddr>, ClientError> {
        let failed = |source| ClientError::Connect { authority: self.authority.clone(), source };
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
        let addresses: Vec<SocketAddr> = found.map_err(failed)?.collect();
        match addresses.is_empty() {
            true => Err(failed(std::io::Error::other("the name has no address"))),
            false => Ok(addresses),
        }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// The TCP, TLS or HTTP connection failed.
    pub async fn connect(&self, protocol: Protocol) -> Result<Connection, ClientError> {
        let stream = self.connect_tls(protocol).await?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Connection::open(self.clone(), TokioIo::new(stream), is_http2).await
    }

    /// Opens a TCP connection without TLS.
    ///
    /// # Errors
    /// The TCP connection failed.
    pub async fn connect_tcp(&self) -> Result<TcpStream, ClientError> {
        let failed = |source| ClientError::Connect { authority: self.authority.clone(), source };
        let mut last = std::io::Error::other("the name has no address of the source's family");
        for address in self.addresses().await? {
            if self.source.is_some_and(|source| source.is_ipv4() != address.is_ipv4()) {
                continue;
            }
            match self.dial(address).await {
                Ok(tcp) => return Ok(tcp),
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    async fn dial(&self, address: SocketAddr) -> std::io::Result<TcpStream> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if let Some(bytes) = self.receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        if let Some(source) = self.source {
            socket.bind(SocketAddr::new(source, 0))?;
        }
        let tcp = socket.connect(address).await?;
        // Small writes must leave at once, or the client's own delay would be
        // measured.
        tcp.set_nodelay(true)?;
        Ok(tcp)
    }

    /// Opens a TLS connection. The caller speaks its own protocol on it.
    ///
    /// # Errors
    /// The TCP or TLS connection failed.
    pub async fn connect_tls(&self, protocol: Protocol) -> Result<ClientTls, ClientError> {
        let tcp = self.connect_tcp().await?;
        let tls_error = |source| ClientError::Tls { authority: self.authority.clone(), source };
        let mut config = ClientConfig::clone(&self.tls);
        config.alpn_protocols = match protocol {
            Protocol::Http1 => vec![b"http/1.1".to_vec()],
            Protocol::Http2 => vec![b"h2".to_vec()],
            Protocol::Either => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        };
        let name = ServerName::try_from(self.host.clone())
            .map_err(|_| ClientError::Url(self.authority.clone()))?;
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map_err(tls_error)
    }
}

/// A TLS connection on which the caller speaks its own protocol.
pub type ClientTls = TlsStream<TcpStream>;

/// An open connection. Clones share it, and an HTTP/2 connection carries several
/// requests at once. Dropping the last clone closes the connection.
#[derive(Clone)]
pub struct Connection {
    target: Target,
    sender: HttpSender,
    _closes: Arc<DropGuard>,
}

impl Connection {
    async fn open<IO>(target: Target, io: IO, is_http2: bool) -> Result<Self, ClientError>
    where
        IO: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let closed = CancellationToken::new();
        let until = closed.clone();
        let sender = if is_http2 {
            let (sender, driver) = http2::handshake(TokioExecutor::new(), io).await?;
            drive(until, driver);
            HttpSender::Http2(sender)
        } else {
            let (sender, driver) = http1::handshake(io).await?;
            drive(until, driver);
            HttpSender::Http1(Arc::new(tokio::sync::Mutex::new(sender)))
        };
        Ok(Self { target, sender, _closes: Arc::new(closed.drop_guard()) })
    }

    /// Returns true if the connection speaks HTTP/2.
    pub fn is_http2(&self) -> bool {
        matches!(self.sender, HttpSender::Http2(_))
    }

    /// Returns the same connection with another key.
    ///
    /// # Errors
    /// The key has characters that are not allowed in a header.
    pub fn with_key(&self, key: &str) -> Result<Self, ClientError> {
        Ok(Self { target: self.target.with_key(key)?, ..self.clone() })
    }

    /// Sends a GET request for `path`.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn get(&self, path: &str) -> Result<Response<Incoming>, ClientError> {
        self.send(Method::GET, path, Bytes::new(), HeaderMap::new()).await
    }

    /// Sends a POST request with `json` to `path`.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn post(&self, path: &str, json: Bytes) -> Result<Response<Incoming>, ClientError> {
        self.send(Method::POST, path, json, HeaderMap::new()).await
    }

    /// Sends a POST request with `json` and further `headers` to `path`.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn post_with(
        &self,
        path: &str,
        json: Bytes,
        headers: HeaderMap,
    ) -> Result<Response<Incoming>, ClientError> {
        self.send(Method::POST, path, json, headers).await
    }

    /// Sends a DELETE request for `path`.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn delete(&self, path: &str) -> Result<Response<Incoming>, ClientError> {
        self.send(Method::DELETE, path, Bytes::new(), HeaderMap::new()).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        headers: HeaderMap,
    ) -> Result<Response<Incoming>, ClientError> {
        let uri = if self.is_http2() {
            format!("https://{}{path}", self.target.authority)
        } else {
            path.to_owned()
        };
        let mut request = Request::builder()
            .method(method)
            .uri(uri)
            .header(AUTHORIZATION, self.target.authorization.clone())
            .header(CONTENT_TYPE, "application/json");
        if !self.is_http2() {
            request = request.header(HOST, &self.target.authority);
        }
        let mut request = request.body(Full::new(body))?;
        request.headers_mut().extend(headers);
        match &self.sender {
            HttpSender::Http1(sender) => {
                let mut sender = sender.lock().await;
                sender.ready().await?;
                Ok(sender.send_request(request).await?)
            }
            HttpSender::Http2(sender) => {
                let mut sender = sender.clone();
                sender.ready().await?;
                Ok(sender.send_request(request).await?)
            }
        }
    }
}

#[derive(Clone)]
enum HttpSender {
    Http1(Arc<tokio::sync::Mutex<http1::SendRequest<Full<Bytes>>>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// Runs the connection's own task until the connection ends or its last clone is
/// dropped.
#[allow(clippy::disallowed_methods, reason = "its end is tied to the connection by the token")]
fn drive<D>(until: CancellationToken, driver: D)
where
    D: Future<Output = hyper::Result<()>> + Send + 'static,
{
    tokio::spawn(async move {
        tokio::select! {
            () = until.cancelled() => {}
            // An error here is also seen by the request in flight.
            _ = driver => {}
        }
    });
}

fn client_config(ca: &Path) -> Result<ClientConfig, ClientError> {
    let wrong = |reason: String| ClientError::Ca { path: ca.to_owned(), reason };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).map_err(|e| wrong(e.to_string()))? {
        roots
            .add(certificate.map_err(|e| wrong(e.to_string()))?)
            .map_err(|e| wrong(e.to_string()))?;
    }
    if roots.is_empty() {
        return Err(wrong("the file contains no certificate".to_owned()));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| wrong(e.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}
