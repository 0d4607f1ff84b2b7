//! The bytes of an audit record: one line of JSON with its keys in this order. The
//! hash chain is over these bytes, so they never change; a new field comes after
//! the existing ones.

use std::borrow::Cow;
use std::fmt;

use serde::{Serialize, Serializer};
use tollgate_domain::{
    Attempt, BlockParts, Caller, DeviceNanos, FinishedAttempt, Millijoules, Tier, UtcTime,
    WorkerEpoch,
};

use crate::act::{AdminAction, FaultCap, RefusedBlock};
use crate::error::LedgerError;
use crate::hex::hex;
use crate::rows::attempts::reason_name;
use crate::rows::records::Hash;
use crate::rows::schema::FORMAT;

/// Most bytes of an admin action's detail. A longer detail is replaced by its hash.
pub(crate) const LONGEST_DETAIL: usize = 16 * 1024;

/// The content of a record without its number and the previous hash.
#[derive(Serialize)]
pub(crate) struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "time")]
    time: Option<UtcTime>,
    #[serde(rename = "operation.type")]
    operation: &'a str,
    outcome: &'a str,
    #[serde(rename = "gpu.id", skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
    #[serde(rename = "user.id", skip_serializing_if = "Option::is_none")]
    user: Option<User<'a>>,
    #[serde(rename = "resource.consumption", skip_serializing_if = "Option::is_none")]
    consumption: Option<Consumption>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_class: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<BlockOf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actor: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<serde_json::Value>,
    /// Present for the batch tier only: an interactive record keeps the bytes that it had
    /// before tiers were recorded.
    #[serde(skip_serializing_if = "Tier::is_interactive")]
    tier: Tier,
}

/// A block as its worker reported it: its digest, and the reason if only a part was
/// accepted.
#[derive(Clone, Copy)]
pub(crate) struct Reported<'a> {
    pub(crate) digest: &'a [u8; 32],
    pub(crate) rejection: Option<&'a str>,
}

#[derive(Serialize)]
struct User<'a> {
    tenant: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
}

/// Consumed resources in whole nanoseconds, tokens and millijoules.
#[derive(Serialize)]
#[serde(untagged)]
enum Consumption {
    /// Consumption of an attempt, or the most that is paid for one.
    Attempt {
        attributed_ns: u64,
        reference_ns: u64,
        prompt_tokens: u64,
        cached_tokens: u64,
        completion_tokens: u64,
    },
    /// A span of a device's time; the other times sum to `wall_ns`.
    Span {
        wall_ns: u64,
        tenants_ns: u64,
        overhead_ns: u64,
        idle_ns: u64,
        loss_ns: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        energy_mj: Option<u64>,
    },
}

#[derive(Serialize)]
struct BlockOf {
    epoch: String,
    number: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

/// The rows that a ledger held before its audit log began. The fields are in
/// alphabetical order, so that the JSON is the same however a map is built.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Before {
    pub(crate) attempts: u64,
    pub(crate) blocks: u64,
    /// SHA-256 over the digests of the blocks, in the ledger's order.
    pub(crate) blocks_sha256: String,
    pub(crate) fault_caps: u64,
    /// SHA-256 over the JSON lines of the caps.
    pub(crate) fault_caps_sha256: String,
    /// The format of the file.
    pub(crate) format: u32,
    pub(crate) refused_blocks: u64,
}

/// Returns the bytes of record `seq`, which follows the record of hash `prev`. The
/// database stores the body only: number and previous hash stand in other columns.
/// Records of format 3 and older are stored whole.
pub(crate) fn text_of<'a>(seq: u64, prev: &Hash, stored: &'a str) -> Cow<'a, str> {
    match stored.strip_prefix('{') {
        Some(body) if !stored.starts_with(WHOLE) => {
            Cow::Owned([WHOLE, &seq.to_string(), ",\"prev\":\"", &hex(prev), "\",", body].concat())
        }
        // A whole record is taken as it is: its hash was made of exactly these bytes.
        _ => Cow::Borrowed(stored),
    }
}

/// Returns the body of a stored record without its first brace.
pub(crate) fn rest_of(seq: u64, stored: &str) -> Option<&str> {
    if !stored.starts_with(WHOLE) {
        return stored.strip_prefix('{');
    }
    let rest = stored.strip_prefix(&format!("{WHOLE}{seq},\"prev\":\""))?;
    // `get`, because a damaged record may be shorter than a hash.
    rest.get(HASH_AND_COMMA..)
}

/// Returns a body as JSON.
pub(crate) fn body_of(body: &Body<'_>) -> Result<String, LedgerError> {
    serde_json::to_string(body).map_err(|error| LedgerError::Damaged(error.to_string()))
}

impl<'a> Body<'a> {
    fn new(time: Option<UtcTime>, operation: &'a str, outcome: &'a str) -> Self {
        Self {
            time,
            operation,
            outcome,
            gpu: None,
            user: None,
            consumption: None,
            request: None,
            attempt: None,
            model: None,
            device_class: None,
            block: None,
            actor: None,
            id: None,
            detail: None,
            tier: Tier::Interactive,
        }
    }

    /// Returns the body of the first record.
    pub(crate) fn genesis(before: Option<&Before>) -> Result<Self, LedgerError> {
        let detail = serde_json::json!({ "before": before, "format": FORMAT });
        // No time: the crate has no clock, and no act with a time makes this record.
        Ok(Self { id: Some(GENESIS), detail: Some(detail), ..Self::new(None, GENESIS, "done") })
    }

    /// Returns the body for an attempt that ended, as its worker measured it.
    pub(crate) fn attempt(parts: &'a BlockParts, finished: &'a FinishedAttempt) -> Self {
        let FinishedAttempt { caller, attempt, usage, stages: _, reason, finished: at, tier } =
            finished;
        Self {
            gpu: Some(gpu(parts)),
            consumption: Some(Consumption::Attempt {
                attributed_ns: usage.attributed.nanos(),
                reference_ns: usage.reference.nanos(),
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens,
                completion_tokens: usage.completion_tokens,
            }),
            model: Some(parts.model.as_str()),
            device_class: Some(parts.device.class.as_str()),
            block: Some(BlockOf::named(parts.epoch, parts.number)),
            tier: *tier,
            ..Self::of_attempt(caller, attempt, *at, "inference", reason_name(*reason))
        }
    }

    /// Returns the body for a fault cap.
    pub(crate) fn cap(cap: &'a FaultCap) -> Self {
        let FaultCap { caller, attempt, model, class, payable, at, tier } = cap;
        Self {
            consumption: Some(Consumption::Attempt {
                attributed_ns: payable.attributed.nanos(),
                reference_ns: payable.reference.nanos(),
                prompt_tokens: payable.prompt_tokens,
                cached_tokens: payable.cached_tokens,
                completion_tokens: payable.completion_tokens,
            }),
            model: Some(model.as_str()),
            device_class: Some(class.as_str()),
            tier: *tier,
            ..Self::of_attempt(caller, attempt, *at, "correction", "fault")
        }
    }

    fn of_attempt(
        caller: &'a Caller,
        attempt: &'a Attempt,
        at: UtcTime,
        operation: &'a str,
        outcome: &'a str,
    ) -> Self {
        Self {
            user: Some(User { tenant: caller.tenant.as_str(), key: Some(caller.key.as_str()) }),
            request: Some(attempt.request.as_str()),
            attempt: Some(attempt.attempt),
            ..Self::new(Some(at), operation, outcome)
        }
    }

    /// Returns the body for a posted block. The digest covers the block's every field.
    pub(crate) fn block(parts: &'a BlockParts, digest: &[u8], reported: Reported<'_>) -> Self {
        let tenants: DeviceNanos = parts.shares.iter().map(|share| share.attributed).sum();
        // Saturating: a block is checked elsewhere, and a record must not panic.
        let end = UtcTime(parts.started.0.saturating_add(parts.wall.nanos()));
        Self {
            gpu: Some(gpu(parts)),
            consumption: Some(Consumption::Span {
                wall_ns: parts.wall.nanos(),
                tenants_ns: tenants.nanos(),
                overhead_ns: parts.overhead.nanos(),
                idle_ns: parts.idle.nanos(),
                loss_ns: parts.loss.nanos(),
                energy_mj: parts.energy.map(Millijoules::millijoules),
            }),
            model: Some(parts.model.as_str()),
            device_class: Some(parts.device.class.as_str()),
            block: Some(BlockOf {
                first_step: Some(parts.first_step),
                last_step: Some(parts.last_step),
                sha256: Some(hex(digest)),
                ..BlockOf::named(parts.epoch, parts.number)
            }),
            detail: reported.rejection.map(|reason| {
                let digest = hex(reported.digest);
                serde_json::json!({ "reason": reason, "said_sha256": digest })
            }),
            // `struck` and `said_sha256` stay: readers of the log know these words.
            ..Self::new(Some(end), "metering", reported.rejection.map_or("posted", |_| "struck"))
        }
    }

    /// Returns the body for a skipped block.
    pub(crate) fn refused(refused: &RefusedBlock) -> Self {
        let RefusedBlock { worker, epoch, number, reason, at } = refused;
        Self {
            gpu: Some(format!("worker/{worker}")),
            block: Some(BlockOf::named(*epoch, *number)),
            detail: Some(serde_json::json!({ "reason": reason })),
            ..Self::new(Some(*at), "metering", "refused")
        }
    }

    /// Returns the body for an action of an admin.
    pub(crate) fn action(action: &'a AdminAction) -> Self {
        let AdminAction { id, at, operation, actor, user, detail } = action;
        let mut detail = detail.clone();
        // The record must be the same however the detail was built.
        detail.sort_all_objects();
        let text = detail.to_string();
        // Bounds every record, so that a line of an export is bounded too.
        if text.len() > LONGEST_DETAIL {
            let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
            detail = serde_json::json!({ "bytes": text.len(), "sha256": hex(digest.as_ref()) });
        }
        let user = user.as_ref().map(|(tenant, key)| User { tenant, key: key.as_deref() });
        Self {
            user,
            actor: Some(actor),
            id: Some(id),
            detail: Some(detail).filter(|detail| !detail.is_null()),
            ..Self::new(Some(*at), operation, "done")
        }
    }
}

impl BlockOf {
    fn named(epoch: WorkerEpoch, number: u64) -> Self {
        Self { epoch: epoch.to_string(), number, first_step: None, last_step: None, sha256: None }
    }
}

impl Before {
    /// Returns true if no row is older than the log.
    pub(crate) fn is_nothing(&self) -> bool {
        [self.blocks, self.attempts, self.fault_caps, self.refused_blocks] == [0; 4]
    }
}

/// Returns the vendor's id of the device, or its worker's name if there is no id.
fn gpu(parts: &BlockParts) -> String {
    if parts.device.uuid.is_empty() {
        format!("worker/{}", parts.worker)
    } else {
        parts.device.uuid.clone()
    }
}

/// Writes a time as `2026-11-20T12:00:00.000000000Z`.
fn time<S: Serializer>(time: &Option<UtcTime>, serializer: S) -> Result<S::Ok, S::Error> {
    struct Shown(UtcTime);
    impl fmt::Display for Shown {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let of_day = self.0.unix_seconds() % 86_400;
            let (hours, minutes, seconds) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
            let nanos = self.0.0 % 1_000_000_000;
            write!(f, "{}T{hours:02}:{minutes:02}:{seconds:02}.{nanos:09}Z", self.0.day())
        }
    }
    match time {
        Some(time) => serializer.collect_str(&Shown(*time)),
        None => serializer.serialize_none(),
    }
}

/// The beginning of a whole record. No body begins like this.
const WHOLE: &str = "{\"seq\":";

/// Bytes of a hash in hex, the quote after it, and a comma.
const HASH_AND_COMMA: usize = 64 + 2;

/// The operation of the first record.
pub(crate) const GENESIS: &str = "ledger.genesis";

#[cfg(test)]
mod tests {
    use tollgate_domain::{DeviceClass, KeyId, ModelName, RequestId, TenantId, Usage};

    use super::*;

    #[test]
    fn record_names_the_batch_tier_only() {
        let mut cap = FaultCap {
            caller: Caller {
                tenant: TenantId::new("acme").expect("a name"),
                key: KeyId::new("k1").expect("a name"),
            },
            attempt: Attempt { request: RequestId::new("req-1").expect("a name"), attempt: 0 },
            model: ModelName::new("m").expect("a name"),
            class: DeviceClass::cpu(),
            payable: Usage::default(),
            at: UtcTime(0),
            tier: Tier::Interactive,
        };
        let of_today = concat!(
            r#"{"time":"1970-01-01T00:00:00.000000000Z","operation.type":"correction","#,
            r#""outcome":"fault","user.id":{"tenant":"acme","key":"k1"},"resource.consumption":"#,
            r#"{"attributed_ns":0,"reference_ns":0,"prompt_tokens":0,"cached_tokens":0,"#,
            r#""completion_tokens":0},"request":"req-1","attempt":0,"model":"m","#,
            r#""device_class":"cpu"}"#
        );
        assert_eq!(body_of(&Body::cap(&cap)).expect("JSON"), of_today);
        cap.tier = Tier::Batch;
        let batch = of_today.replace(r#""cpu"}"#, r#""cpu","tier":"batch"}"#);
        assert_eq!(body_of(&Body::cap(&cap)).expect("JSON"), batch);
    }
}
