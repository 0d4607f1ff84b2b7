//! The address of a Redis server: checked once, before the first connection.

use std::fmt;
use std::net::IpAddr;

use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, TlsCertificates};

/// The address of a server with the password and the authority of its certificate. `Debug` and
/// `Display` leave the password out.
#[derive(Clone)]
pub struct RedisAddress {
    client: Client,
    shown: String,
}

/// An address that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RedisAddressError {
    /// The text is no URL of a Redis server.
    #[error("not the URL of a Redis server, such as rediss://host:6379: {0}")]
    Url(String),
    /// The URL has a password, which every reader of the file would see.
    #[error("the URL has a password: write it into a file of its own")]
    Password,
    /// The server is on another machine, and nothing proves its name.
    #[error(
        "the server {host} is on another machine: write rediss:// and name the authority of its \
         certificate ('ca')"
    )]
    Unproved {
        /// The server's host.
        host: String,
    },
    /// An authority is named for a connection without TLS.
    #[error("'ca' needs a URL that begins with rediss://")]
    NotEncrypted,
    /// The authority's file has no certificate, or a damaged one.
    #[error("the authority's file has no valid PEM certificate")]
    Authority,
}

impl RedisAddress {
    /// Checks an address. `authority` are the PEM certificates that the server's certificate must
    /// come from. A server on another machine needs it.
    ///
    /// # Errors
    /// The URL is invalid or has a password, or a server on another machine is named without
    /// an authority.
    pub fn new(
        url: &str,
        password: Option<&str>,
        authority: Option<&[u8]>,
    ) -> Result<Self, RedisAddressError> {
        let info = url.into_connection_info();
        let info = info.map_err(|error| RedisAddressError::Url(error.to_string()))?;
        if info.redis_settings().password().is_some() {
            return Err(RedisAddressError::Password);
        }
        let (shown, is_local, is_encrypted) = match info.addr() {
            ConnectionAddr::Tcp(host, port) => (format!("{host}:{port}"), is_local(host), false),
            ConnectionAddr::TcpTls { host, port, insecure: false, .. } => {
                (format!("{host}:{port}"), is_local(host), true)
            }
            ConnectionAddr::Unix(path) => (path.display().to_string(), true, false),
            _ => return Err(RedisAddressError::Url("TLS must check the server's name".to_owned())),
        };
        if authority.is_none() && !is_local {
            return Err(RedisAddressError::Unproved { host: shown });
        }
        if authority.is_some() && !is_encrypted {
            return Err(RedisAddressError::NotEncrypted);
        }
        let client = client(with_password(info, password), authority)?;
        Ok(Self { client, shown })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }
}

fn with_password(info: ConnectionInfo, password: Option<&str>) -> ConnectionInfo {
    let Some(password) = password else { return info };
    let settings = info.redis_settings().clone().set_password(password);
    info.set_redis_settings(settings)
}

fn client(info: ConnectionInfo, authority: Option<&[u8]>) -> Result<Client, RedisAddressError> {
    let Some(authority) = authority else {
        return Client::open(info).map_err(|error| RedisAddressError::Url(error.to_string()));
    };
    // The library takes a file without certificates for an empty list, which trusts nobody.
    if !authority.windows(PEM_BEGIN.len()).any(|part| part == PEM_BEGIN) {
        return Err(RedisAddressError::Authority);
    }
    // The library takes the provider of the process. An error says that there is one already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let certificates = TlsCertificates { client_tls: None, root_cert: Some(authority.to_vec()) };
    Client::build_with_tls(info, certificates).map_err(|_| RedisAddressError::Authority)
}

const PEM_BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";

fn is_local(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        RedisAddress::new(url, None, None).expect_err(url).to_string()
    }

    #[test]
    fn address_names_the_mistake() {
        assert!(refusal("cache:6379").starts_with("not the URL of a Redis server"));
        assert!(refusal("redis://:secret@localhost").contains("password"));
        assert!(refusal("redis://cache.example.com").contains("cache.example.com:6379"));
        assert!(refusal("rediss://cache.example.com").contains("is on another machine"));
        assert!(refusal("rediss://localhost/#insecure").contains("check the server's name"));
        let pem = |url, pem: &[u8]| RedisAddress::new(url, None, Some(pem)).map(drop);
        assert!(matches!(pem("redis://cache", PEM_BEGIN), Err(RedisAddressError::NotEncrypted)));
        assert!(matches!(pem("rediss://cache", b"?"), Err(RedisAddressError::Authority)));
        assert!(matches!(pem("rediss://cache", PEM_BEGIN), Err(RedisAddressError::Authority)));
    }

    #[test]
    fn address_of_this_machine_needs_no_authority() {
        for url in ["redis://localhost", "redis://127.0.0.1:7000/2", "unix:///run/redis.sock"] {
            let address = RedisAddress::new(url, Some("secret"), None).expect(url);
            assert!(!format!("{address:?} {address}").contains("secret"));
        }
    }
}
