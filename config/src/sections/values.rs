//! The types of keys that are neither numbers nor names. The module `read::fields`
//! reads and shows them.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tollgate_domain::TenantId;

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// The name of a token issuer in the config.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IssuerName(String);

/// A trusted token issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// The issuer's name in the config.
    pub name: String,
    /// The value of the `iss` claim.
    pub issuer: String,
    /// The value of the `aud` claim.
    pub audience: String,
    /// The accepted signature algorithms; at least one.
    pub algorithms: Vec<JwtAlgorithm>,
    /// The source of the issuer's public keys.
    pub keys: JwtKeys,
    /// The claim that contains the tenant's name.
    pub tenant_claim: String,
    /// The tenants that the issuer may name; `None` means all.
    pub tenants: Option<BTreeSet<TenantId>>,
    /// The tolerated difference between the clocks.
    pub leeway: Duration,
}

/// The source of an issuer's public keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JwtKeys {
    /// PEM files with one key each, all of the family that the algorithms use.
    Pem(Vec<PathBuf>),
    /// A file with a JSON Web Key Set.
    Jwks(PathBuf),
    /// A JSON Web Key Set that is fetched.
    Url {
        /// The address of the set.
        url: HttpsUrl,
        /// The certificate authorities for the address; `None` means the system's.
        ca: Option<PathBuf>,
        /// The time between two fetches.
        refresh: Duration,
    },
}

/// A web address: `https://`, a host, and optionally a port and a path. It contains
/// no user name, no password and no fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpsUrl(String);

impl HttpsUrl {
    /// The text of the config.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HttpsUrl {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let rest = text.strip_prefix("https://").ok_or(())?;
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        // An IPv6 address has colons, too, so only a number after the last colon is a
        // port.
        let host = authority.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        let host = host.map_or(authority, |(host, _)| host);
        // `#` begins a fragment, `@` ends a user name, and parsers disagree on the
        // other two.
        let is_plain =
            text.bytes().all(|byte| byte.is_ascii_graphic() && !b"#@\\\"".contains(&byte));
        let is_host = host.starts_with('[') && host.ends_with(']')
            || host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
        if is_plain && is_host && !host.is_empty() && text.len() <= 2_048 {
            Ok(Self(text.to_owned()))
        } else {
            Err(())
        }
    }
}

/// A host and a port: `10.0.0.7:7443`, `[::1]:7443` or `gpu0.example.com:7443`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort(String);

impl HostPort {
    /// The text of the config.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostPort {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (host, port) = text.rsplit_once(':').ok_or(())?;
        let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte)),
        };
        // Port 0 stands for any free port, to which nobody could connect.
        let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
        match is_host && is_port && !host.is_empty() && text.len() <= 260 {
            true => Ok(Self(text.to_owned())),
            false => Err(()),
        }
    }
}

/// The text of the config.
impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The origin of a web page as a browser sends it, or `*` for every origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String);

impl Origin {
    /// The text of the config.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true for `*`.
    pub fn is_any(&self) -> bool {
        self.0 == "*"
    }
}

impl FromStr for Origin {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if text == "*" {
            return Ok(Self(text.to_owned()));
        }
        let (scheme, host) = text.split_once("://").ok_or(())?;
        // A browser leaves out the scheme's own port and writes in lower case. An origin
        // that no browser sends would silently allow nothing.
        let own_port = match scheme {
            "https" => ":443",
            "http" => ":80",
            _ => "\n",
        };
        let is_scheme = scheme.starts_with(|c: char| c.is_ascii_lowercase())
            && scheme
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || b"+-.0123456789".contains(&byte));
        let is_host = host.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._:[]".contains(&byte)
        });
        match is_scheme && is_host && !host.is_empty() && !host.ends_with(own_port) {
            true if text.len() <= 300 => Ok(Self(text.to_owned())),
            _ => Err(()),
        }
    }
}

/// The text of the config.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The text of the config.
impl fmt::Display for HttpsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The requests that have a line in the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLogRequests {
    /// None.
    Off,
    /// Those that were not answered.
    Refusals,
    /// All.
    All,
}

impl FromStr for AccessLogRequests {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "off" => Ok(Self::Off),
            "refusals" => Ok(Self::Refusals),
            "all" => Ok(Self::All),
            _ => Err(()),
        }
    }
}

/// The text of the config.
impl fmt::Display for AccessLogRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Refusals => "refusals",
            Self::All => "all",
        })
    }
}

/// The engine of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// The model on its device.
    Model,
    /// A simulated device that computes nothing and takes time.
    Synthetic,
}

impl FromStr for EngineKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "model" => Ok(Self::Model),
            "synthetic" => Ok(Self::Synthetic),
            _ => Err(()),
        }
    }
}

/// The text of the config.
impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Synthetic => "synthetic",
        })
    }
}

/// The scheduling policy of a synthetic device. All but the first exist to be
/// compared with the first, and no other device can use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticPolicy {
    /// Shares of device time by share owner, tenant and key.
    Fair,
    /// Order of arrival.
    FirstCome,
    /// Shares of tokens instead of device time.
    TokenCounters,
    /// A share for each key instead of each tenant.
    KeyCounters,
}

impl SyntheticPolicy {
    const ALL: [Self; 4] = [Self::Fair, Self::FirstCome, Self::TokenCounters, Self::KeyCounters];
}

impl FromStr for SyntheticPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|policy| policy.to_string() == text).ok_or(())
    }
}

/// The text of the config.
impl fmt::Display for SyntheticPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fair => "fair",
            Self::FirstCome => "first_come",
            Self::TokenCounters => "token_counters",
            Self::KeyCounters => "key_counters",
        })
    }
}

/// The device that runs a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceSelector {
    /// The first usable GPU, or else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU: the first usable one, or the one with this UUID or index in the
    /// driver's list.
    Cuda(Option<String>),
}

impl FromStr for DeviceSelector {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => match text.strip_prefix("cuda:") {
                Some(uuid) if !uuid.is_empty() => Ok(Self::Cuda(Some(uuid.to_owned()))),
                _ => Err(()),
            },
        }
    }
}

/// The text of the config.
impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(uuid)) => write!(f, "cuda:{uuid}"),
        }
    }
}

/// The way in which a trusted proxy names the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientFrom {
    /// The header `x-forwarded-for` of each request.
    XForwardedFor,
    /// The PROXY protocol version 2, before a connection's first byte.
    ProxyV2,
}

impl FromStr for ClientFrom {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::XForwardedFor, Self::ProxyV2]
            .into_iter()
            .find(|from| from.to_string() == text)
            .ok_or(())
    }
}

/// The text of the config.
impl fmt::Display for ClientFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::ProxyV2 => "proxy-v2",
        })
    }
}

/// A signature algorithm with a private key that only the issuer has. Algorithms
/// with a shared secret are not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are RFC 7518's and RFC 8037's")]
pub enum JwtAlgorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

impl JwtAlgorithm {
    const ALL: [Self; 9] = [
        Self::RS256,
        Self::RS384,
        Self::RS512,
        Self::PS256,
        Self::PS384,
        Self::PS512,
        Self::ES256,
        Self::ES384,
        Self::EdDSA,
    ];

    /// Returns the kind of key that the algorithm uses: `RSA`, `EC` or `Ed25519`.
    pub fn family(self) -> &'static str {
        match self {
            Self::RS256 | Self::RS384 | Self::RS512 => "RSA",
            Self::PS256 | Self::PS384 | Self::PS512 => "RSA",
            Self::ES256 | Self::ES384 => "EC",
            Self::EdDSA => "Ed25519",
        }
    }
}

impl FromStr for JwtAlgorithm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|algorithm| algorithm.to_string() == text).ok_or(())
    }
}

/// The value of the token's `alg`.
impl fmt::Display for JwtAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl IssuerName {
    pub(crate) fn new(name: &str) -> Result<Self, tollgate_domain::ids::InvalidName> {
        // An issuer's name follows the same rules as every other name.
        TenantId::new(name)
            .map(|name| Self(name.as_str().to_owned()))
            // The message must speak of an issuer and not of a tenant.
            .map_err(|error| tollgate_domain::ids::InvalidName { kind: "issuer", ..error })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}
