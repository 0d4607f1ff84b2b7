//! Names and numbers that identify things. Each is a type of its own, so that the compiler
//! finds a key in the place of a tenant.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A name that breaks the rules: 1 to 128 characters, of letters, digits and
/// `. _ - : /`, and it starts with a letter or a digit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kind} {name:?} is not a name: use 1 to 128 of A-Z a-z 0-9 . _ - : / and start with a letter or digit"
)]
pub struct InvalidName {
    /// Kind of the name: `tenant`, `model`, ...
    pub kind: &'static str,
    /// Invalid text, cut to 64 characters.
    pub name: String,
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        // Names are cloned for each request, so a clone must not allocate.
        pub struct $type(Arc<str>);

        impl $type {
            /// Checks a name.
            ///
            /// # Errors
            ///
            /// [`InvalidName`] if the text breaks the rules stated there.
            pub fn new(name: &str) -> Result<Self, InvalidName> {
                if is_name(name) {
                    Ok(Self(name.into()))
                } else {
                    // Cut, because the text may come from a client and goes to the log.
                    Err(InvalidName { kind: $kind, name: name.chars().take(64).collect() })
                }
            }

            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = InvalidName;
            fn try_from(name: String) -> Result<Self, InvalidName> {
                Self::new(&name)
            }
        }

        impl std::str::FromStr for $type {
            type Err = InvalidName;
            fn from_str(name: &str) -> Result<Self, InvalidName> {
                Self::new(name)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> String {
                name.0.as_ref().to_owned()
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        // Lets a map with this key type be searched with a plain `&str`.
        impl std::borrow::Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name!(
    /// A tenant, which pays for its requests.
    TenantId, "tenant"
);
name!(
    /// A key of a tenant, by its public id and never by its secret.
    KeyId, "key"
);
name!(
    /// A named admin of a gateway.
    AdminName, "admin"
);
name!(
    /// A named set of limits in config.
    PlanName, "plan"
);
name!(
    /// A pool of tenants that share limits.
    PoolName, "pool"
);
name!(
    /// A dated list of prices in config.
    PriceListName, "price list"
);
name!(
    /// A model, by the name that clients use in requests.
    ModelName, "model"
);
name!(
    /// A kind of device with comparable times: `cpu`, `h200`, ...
    DeviceClass, "device class"
);
name!(
    /// A worker, by its name in config.
    WorkerName, "worker"
);
name!(
    /// A gateway, by the name in its certificate for workers on other machines.
    GatewayName, "gateway"
);
name!(
    /// The gateways and workers that trust each other, by the name in their certificates.
    ClusterName, "cluster"
);
name!(
    /// The id of a request, as in the header `x-request-id`. Ids from the gateway are
    /// `req-` and 32 hex digits.
    RequestId, "request id"
);

impl DeviceClass {
    /// Returns the class of the CPU backend.
    pub fn cpu() -> Self {
        Self("cpu".into())
    }

    /// Returns the class of the synthetic backend, which computes nothing.
    pub fn synthetic() -> Self {
        Self("synthetic".into())
    }

    /// Returns true if a bill shows time of this class as GPU time.
    pub fn is_gpu(&self) -> bool {
        !matches!(self.as_str(), "cpu" | "synthetic")
    }
}

impl RequestId {
    /// Creates an id from 128 bits. Enough of the bits must be random for the id to be
    /// unique.
    #[expect(clippy::expect_used, reason = "`text_of` writes ASCII letters and digits")]
    pub fn from_random(bits: u128) -> Self {
        let text = Self::text_of(bits);
        Self(std::str::from_utf8(&text).expect("letters and digits").into())
    }

    /// Returns the number of the gateway that made the id: the 24 bits after the first 48, 0 where
    /// there is one gateway. `None` for an id of another form.
    pub fn gateway(&self) -> Option<u32> {
        let digits = self.as_str().strip_prefix("req-").filter(|digits| digits.len() == 32)?;
        u32::from_str_radix(digits.get(12..18)?, 16).ok()
    }

    /// Returns the text of the id made of these bits. It needs no allocation, because every
    /// response has an id, also a response that refuses at once.
    pub fn text_of(bits: u128) -> [u8; 36] {
        // Formatted by hand into a fixed array: this runs for every request.
        let mut text = *b"req-00000000000000000000000000000000";
        for (at, byte) in bits.to_be_bytes().into_iter().enumerate() {
            for (digit, value) in [(0, byte >> 4), (1, byte & 0xf)] {
                text[4 + 2 * at + digit] = b"0123456789abcdef"[usize::from(value)];
            }
        }
        text
    }
}

fn is_name(name: &str) -> bool {
    // The characters are safe in headers and metric labels.
    (1..=128).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-:/".contains(&b))
}

/// An authenticated tenant and the key that it used. Only authentication creates one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Caller {
    /// Tenant that pays.
    pub tenant: TenantId,
    /// Key that authenticated the request.
    pub key: KeyId,
}

/// One run of one worker process: 128 random bits, drawn at its start. Step and sequence
/// numbers are unique within an epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WorkerEpoch(pub u128);

impl fmt::Display for WorkerEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for WorkerEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerEpoch({self})")
    }
}

impl From<WorkerEpoch> for String {
    fn from(epoch: WorkerEpoch) -> String {
        epoch.to_string()
    }
}

impl TryFrom<String> for WorkerEpoch {
    type Error = InvalidName;
    fn try_from(text: String) -> Result<Self, InvalidName> {
        match u128::from_str_radix(&text, 16) {
            // The length is checked because `from_str_radix` also accepts a sign and short
            // numbers.
            Ok(bits) if text.len() == 32 => Ok(Self(bits)),
            _ => Err(InvalidName { kind: "worker epoch", name: text.chars().take(64).collect() }),
        }
    }
}

/// A sequence (one choice of one request) within a worker's epoch. Numbers grow in the
/// order of arrival and are never used again in the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_is_hex_of_its_bits() {
        let id = RequestId::from_random(0x0123_4567_89ab_cdef_0000_0000_0000_00f0);
        assert_eq!(id.as_str(), "req-0123456789abcdef00000000000000f0");
        assert_eq!(id.gateway(), Some(0xcd_ef00));
        assert_eq!(RequestId::new("req-0123").expect("a name").gateway(), None);
    }

    #[test]
    fn names_follow_their_rules() {
        for (name, good) in [
            ("acme", true),
            ("Qwen/Qwen2.5-0.5B", true),
            ("a", true),
            ("", false),
            ("-acme", false),
            ("a b", false),
            ("a\nb", false),
            ("ä", false),
        ] {
            assert_eq!(TenantId::new(name).is_ok(), good, "{name:?}");
        }
        assert!(TenantId::new(&"a".repeat(128)).is_ok());
        assert!(TenantId::new(&"a".repeat(129)).is_err());
    }

    #[test]
    fn epoch_survives_json() {
        let epoch = WorkerEpoch(0xfeed);
        let text = serde_json::to_string(&epoch).expect("serialises");
        assert_eq!(text, "\"0000000000000000000000000000feed\"");
        assert_eq!(serde_json::from_str::<WorkerEpoch>(&text).expect("parses"), epoch);
        assert!(serde_json::from_str::<WorkerEpoch>("\"+1\"").is_err());
    }
}
