//! The ids by which clients name their own requests: read from the headers, and kept for a
//! while in memory, so that the usage of a request shows them. The ledger and the audit log
//! have none of them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{HeaderMap, HeaderName};
use tollgate_domain::{MonotonicTime, RequestId, TenantId};

/// The ids by which a client finds its request again in its own traces. They name nothing here and
/// are in no record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClientIds {
    /// The header `x-client-request-id`, cut at [`LONGEST_ID`] characters.
    request: Option<String>,
    /// The trace id in the header `traceparent` (W3C Trace Context), 32 hex digits.
    trace: Option<String>,
}

/// The ids of the last requests that had some. At most [`MOST_KEPT`] requests are kept, for at
/// most [`LONGEST_KEPT`]. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientIdTable {
    shared: Arc<Mutex<KeptRequests>>,
}

#[derive(Debug, Default)]
struct KeptRequests {
    by_request: HashMap<RequestId, KeptIds>,
    /// The keys of `by_request`, the oldest first.
    order: VecDeque<RequestId>,
}

#[derive(Debug)]
struct KeptIds {
    tenant: TenantId,
    ids: ClientIds,
    at: MonotonicTime,
}

impl ClientIds {
    /// Returns the client's own id of the request.
    pub(crate) fn request_id(&self) -> Option<&str> {
        self.request.as_deref()
    }

    /// Returns the id of the client's trace.
    pub(crate) fn trace_id(&self) -> Option<&str> {
        self.trace.as_deref()
    }

    fn is_empty(&self) -> bool {
        self.request.is_none() && self.trace.is_none()
    }

    /// Reads the ids in `headers`.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let text = |name: HeaderName| {
            let value = headers.get(name)?;
            // Bytes that are no text become replacement characters.
            Some(String::from_utf8_lossy(value.as_bytes()).chars().take(LONGEST_ID).collect())
        };
        Self { request: text(CLIENT_REQUEST_ID), trace: text(TRACEPARENT).and_then(trace_id) }
    }
}

/// Returns the trace id of a `traceparent` such as
/// `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`; `None` if it is not valid.
fn trace_id(parent: String) -> Option<String> {
    let is_hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let parts: Vec<&str> = parent.split('-').collect();
    // Later versions of the header may have more parts.
    let [version, trace, span, flags, ..] = parts[..] else { return None };
    let is_valid = [(version, 2), (trace, 32), (span, 16), (flags, 2)]
        .iter()
        .all(|(part, length)| part.len() == *length && is_hex(part));
    // All zeros means that there is no trace.
    (is_valid && trace.bytes().any(|b| b != b'0')).then(|| trace.to_owned())
}

impl ClientIdTable {
    /// Keeps the ids of a request of `tenant`, if the client gave any.
    pub(crate) fn keep(
        &self,
        now: MonotonicTime,
        tenant: &TenantId,
        request: &RequestId,
        ids: ClientIds,
    ) {
        if ids.is_empty() {
            return;
        }
        let mut kept = self.lock();
        // One less than the bound, so that the new entry fits.
        kept.forget(now, MOST_KEPT - 1);
        let entry = KeptIds { tenant: tenant.clone(), ids, at: now };
        if kept.by_request.insert(request.clone(), entry).is_none() {
            kept.order.push_back(request.clone());
        }
    }

    /// Returns the ids of a request of `tenant`, if they are kept.
    pub(crate) fn of(
        &self,
        now: MonotonicTime,
        tenant: &TenantId,
        request: &RequestId,
    ) -> Option<ClientIds> {
        let mut kept = self.lock();
        kept.forget(now, MOST_KEPT);
        // The ids of another tenant's request look like none.
        let found = kept.by_request.get(request).filter(|kept| kept.tenant == *tenant)?;
        Some(found.ids.clone())
    }

    fn lock(&self) -> MutexGuard<'_, KeptRequests> {
        // Each change keeps map and order equal up to an entry that `forget` skips.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptRequests {
    /// Removes what is too old, and the oldest beyond `most` requests.
    fn forget(&mut self, now: MonotonicTime, most: usize) {
        while let Some(oldest) = self.order.front() {
            let is_old =
                self.by_request.get(oldest).is_none_or(|kept| now.since(kept.at) > LONGEST_KEPT);
            if !is_old && self.order.len() <= most {
                return;
            }
            if let Some(oldest) = self.order.pop_front() {
                self.by_request.remove(&oldest);
            }
        }
    }
}

/// Requests with kept ids: about 6 MiB with ids of the longest kind.
const MOST_KEPT: usize = 16_384;

/// Time for which the ids of a request are kept.
const LONGEST_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// Characters of a client's id that are kept.
const LONGEST_ID: usize = 128;

const CLIENT_REQUEST_ID: HeaderName = HeaderName::from_static("x-client-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_ids_are_read_and_bounded() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (parent, expected) in [
            (format!("00-{trace}-00f067aa0ba902b7-01"), Some(trace)),
            (format!("cc-{trace}-00f067aa0ba902b7-01-more"), Some(trace)),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), None),
            (format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()), None),
            (format!("00-{trace}"), None),
            (String::new(), None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(TRACEPARENT, parent.parse().unwrap());
            assert_eq!(ClientIds::of(&headers).trace.as_deref(), expected, "{parent}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(CLIENT_REQUEST_ID, "x".repeat(1_000).parse().unwrap());
        assert_eq!(ClientIds::of(&headers).request.map(|id| id.len()), Some(LONGEST_ID));
        assert_eq!(ClientIds::of(&HeaderMap::new()), ClientIds::default());
    }

    fn ids(request: &str) -> ClientIds {
        ClientIds { request: Some(request.to_owned()), trace: None }
    }

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    #[test]
    fn client_id_table_bounds_number_and_age() {
        let (table, acme) = (ClientIdTable::default(), TenantId::new("acme").unwrap());
        let request = |number: usize| RequestId::from_random(number as u128);
        let kept = |now, number| table.of(now, &acme, &request(number)).is_some();
        for number in 0..=MOST_KEPT {
            table.keep(at(number as u64 / 1_000), &acme, &request(number), ids("mine"));
        }
        assert!(!kept(at(20), 0) && kept(at(20), 1) && kept(at(20), MOST_KEPT));
        table.keep(at(20), &acme, &request(MOST_KEPT + 1), ClientIds::default());
        assert!(!kept(at(20), MOST_KEPT + 1) && kept(at(20), 1), "no ids take no place");
        let a_day = 24 * 60 * 60;
        assert!(!kept(at(a_day + 10), 1_000) && kept(at(a_day + 10), 15_000));
        assert!(!kept(at(2 * a_day), 15_000));
        assert_eq!(table.lock().by_request.len(), 0);
        assert_eq!(table.lock().order.len(), 0);
    }

    #[test]
    fn client_ids_show_to_their_tenant_only() {
        let table = ClientIdTable::default();
        let [acme, other] = ["acme", "other"].map(|name| TenantId::new(name).unwrap());
        let request = RequestId::from_random(7);
        table.keep(at(0), &acme, &request, ids("mine"));
        assert_eq!(table.of(at(1), &acme, &request), Some(ids("mine")));
        assert_eq!(table.of(at(1), &other, &request), None);
    }
}
