//! The messages of a webhook, and their signature. Ids, headers and signatures are those
//! of Standard Webhooks (<https://www.standardwebhooks.com>), so that receivers can verify
//! them with a published library.

use std::fmt::Write as _;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use tollgate_admission::{CapReached, Scope};
use tollgate_domain::UtcTime;

/// A message, as every attempt to deliver it sends it.
#[derive(Clone, Debug)]
pub(super) struct Message {
    /// The same in every attempt, so that a receiver can recognise a repeated message.
    pub(super) id: String,
    /// The JSON text.
    pub(super) body: String,
}

/// A secret that signs messages. It is never shown.
pub(super) struct Secret(hmac::Key);

/// An error for a text that is no secret. It does not repeat the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the secret must be whsec_ and the base64 of 24 to 64 bytes; `echo whsec_$(openssl rand -base64 32)` prints one"
)]
pub(super) struct InvalidSecret;

#[derive(Serialize)]
struct Event<'a> {
    id: &'a str,
    object: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    /// Unix time in seconds.
    created_at: u64,
    data: CapThreshold<'a>,
}

/// The data of an event about a threshold of a cap.
#[derive(Serialize)]
struct CapThreshold<'a> {
    scope: ScopeName,
    limit: &'static str,
    /// Null for a limit that holds for every device class.
    device_class: Option<&'a str>,
    percent: u8,
}

/// A scope by kind and name. The gateway itself has no name.
#[derive(Serialize)]
struct ScopeName {
    kind: &'static str,
    name: Option<String>,
}

impl Message {
    /// Makes the message that a threshold of a cap was reached.
    pub(super) fn cap_reached(reached: &CapReached, bits: u128, at: UtcTime) -> Self {
        let CapReached { limit, scope, class, percent } = reached;
        let id = format!("evt_{bits:032x}");
        let event = Event {
            id: &id,
            object: "event",
            kind: "cap.threshold_reached",
            created_at: at.unix_seconds(),
            data: CapThreshold {
                scope: ScopeName { kind: scope.kind(), name: name(scope) },
                limit: limit.as_str(),
                device_class: class.as_ref().map(|class| class.as_str()),
                percent: *percent,
            },
        };
        let body = serde_json::json!(event).to_string();
        Self { id, body }
    }

    /// Returns the value of the header `webhook-signature` for an attempt at `at`.
    pub(super) fn signature(&self, secret: &Secret, at: UtcTime) -> String {
        let mut signed = String::new();
        // A write to a string cannot fail.
        let _ = write!(signed, "{}.{}.{}", self.id, at.unix_seconds(), self.body);
        let tag = hmac::sign(&secret.0, signed.as_bytes());
        format!("v1,{}", STANDARD.encode(tag))
    }
}

impl Secret {
    /// Reads a secret in the form of Standard Webhooks.
    ///
    /// # Errors
    /// The text has another form.
    pub(super) fn parse(text: &str) -> Result<Self, InvalidSecret> {
        let encoded = text.trim().strip_prefix("whsec_").ok_or(InvalidSecret)?;
        let bytes = STANDARD.decode(encoded).map_err(|_| InvalidSecret)?;
        match bytes.len() {
            // The bounds of Standard Webhooks.
            24..=64 => Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &bytes))),
            _ => Err(InvalidSecret),
        }
    }
}

fn name(scope: &Scope) -> Option<String> {
    match scope {
        Scope::Key(key) => Some(key.to_string()),
        Scope::Tenant(tenant) | Scope::TenantBatches(tenant) => Some(tenant.to_string()),
        Scope::Pool(pool) | Scope::PoolBatches(pool) => Some(pool.to_string()),
        Scope::Model(model) => Some(model.to_string()),
        Scope::Gateway => None,
    }
}

#[cfg(test)]
mod tests {
    use tollgate_admission::Limit;
    use tollgate_domain::TenantId;

    use super::*;

    fn message() -> Message {
        let reached = CapReached {
            limit: Limit::DeviceTimePerDay,
            scope: Scope::Tenant(TenantId::new("acme").expect("a name")),
            class: None,
            percent: 80,
        };
        Message::cap_reached(&reached, 7, UtcTime(1_700_000_000_000_000_000))
    }

    #[test]
    fn cap_threshold_message_names_scope_limit_and_part() {
        let body: serde_json::Value = serde_json::from_str(&message().body).expect("JSON");
        assert_eq!(
            body,
            serde_json::json!({
                "id": "evt_00000000000000000000000000000007",
                "object": "event",
                "type": "cap.threshold_reached",
                "created_at": 1_700_000_000,
                "data": {
                    "scope": { "kind": "tenant", "name": "acme" },
                    "limit": "device_time_per_day",
                    "device_class": null,
                    "percent": 80,
                },
            })
        );
    }

    /// The example of the specification's reference implementations.
    #[test]
    fn signature_equals_published_example() {
        let secret = Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").expect("valid");
        let message = Message {
            id: "msg_p5jXN8AQM9LWM0D4loKWxJek".to_owned(),
            body: "{\"test\": 2432232314}".to_owned(),
        };
        assert_eq!(
            message.signature(&secret, UtcTime(1_614_265_330_000_000_000)),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }

    #[test]
    fn secret_of_other_form_is_refused() {
        let short = format!("whsec_{}", STANDARD.encode([1; 23]));
        for text in ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_not base64", &short] {
            assert_eq!(Secret::parse(text).err(), Some(InvalidSecret), "{text}");
        }
    }
}
