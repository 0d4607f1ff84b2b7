//! The keys that this process has seen, with the results of their requests.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::watch;
use tollgate_config::Idempotency as IdempotencyConfig;
use tollgate_domain::{RequestId, UtcTime};

use super::{KeyDigest, StoredAnswer};
use crate::error::RequestError;

/// The keys in memory.
#[derive(Default)]
pub(super) struct KeyTable {
    keys: HashMap<KeyDigest, KeyEntry>,
    /// The keys in the order in which they came; the oldest go first.
    order: BTreeMap<u64, KeyDigest>,
    next: u64,
    /// Bytes of all kept answers.
    size: u64,
}

pub(super) struct KeyEntry {
    number: u64,
    pub(super) fingerprint: [u8; 32],
    pub(super) request: RequestId,
    began: UtcTime,
    pub(super) outcome: Arc<watch::Sender<Outcome>>,
}

/// The result of the first request with a key.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// The request runs.
    Pending,
    /// The request was answered.
    Answered(Arc<StoredAnswer>),
    /// The request failed and was charged; the error is its answer.
    Charged(RequestError),
    /// The request was charged, and its answer was evicted or too long to keep.
    Forgotten,
    /// The request was not charged: requests that wait get the error, and the key
    /// is free.
    Failed(RequestError),
    /// The request left no result: one of the requests that wait becomes the first.
    Released,
}

impl Outcome {
    /// Returns true if the table keeps the result for repeats. With any other result the
    /// guard of the request still holds the key, and takes it out of the table.
    pub(super) fn is_kept(&self) -> bool {
        matches!(self, Self::Answered(_) | Self::Charged(_) | Self::Forgotten)
    }
}

impl KeyTable {
    pub(super) fn get(&self, digest: &KeyDigest) -> Option<&KeyEntry> {
        self.keys.get(digest)
    }

    /// Adds the key of a request that begins, and returns the sender of its result.
    pub(super) fn insert(
        &mut self,
        digest: KeyDigest,
        fingerprint: [u8; 32],
        request: RequestId,
        began: UtcTime,
    ) -> Arc<watch::Sender<Outcome>> {
        let outcome = Arc::new(watch::channel(Outcome::Pending).0);
        let number = self.next;
        self.next += 1;
        self.order.insert(number, digest);
        let entry = KeyEntry { number, fingerprint, request, began, outcome: Arc::clone(&outcome) };
        self.keys.insert(digest, entry);
        if self.keys.len() > MOST_IN_MEMORY {
            // The store on disk answers for an evicted key. Keys that a guard holds stay;
            // admission bounds their number.
            let oldest = self.order.values().find(|digest| self.is_kept(digest)).copied();
            if let Some(digest) = oldest {
                self.remove(&digest);
            }
        }
        outcome
    }

    pub(super) fn remove(&mut self, digest: &KeyDigest) {
        if let Some(entry) = self.keys.remove(digest) {
            self.order.remove(&entry.number);
            self.size -= entry.size();
        }
    }

    fn is_kept(&self, digest: &KeyDigest) -> bool {
        self.keys.get(digest).is_some_and(|entry| entry.outcome.borrow().is_kept())
    }

    /// Forgets the oldest keys, as far as they began before `time` and no guard holds them.
    pub(super) fn forget_before(&mut self, time: UtcTime) {
        while let Some(digest) = self.order.values().next().copied()
            && self.keys.get(&digest).is_some_and(|entry| entry.began < time)
            && self.is_kept(&digest)
        {
            self.remove(&digest);
        }
    }

    /// Keeps the result of a request. The oldest answers are evicted if there are
    /// too many bytes.
    pub(super) fn keep(
        &mut self,
        digest: &KeyDigest,
        outcome: Outcome,
        options: &IdempotencyConfig,
    ) {
        let Some(entry) = self.keys.get(digest) else { return };
        if let Outcome::Answered(answer) = &outcome
            && answer.body.len() as u64 > options.largest_answer.0
        {
            entry.outcome.send_replace(Outcome::Forgotten);
            return;
        }
        entry.outcome.send_replace(outcome);
        self.size += entry.size();
        // Oldest first. The entry stays, so a repeat hears that the answer is gone.
        for digest in self.order.values() {
            if self.size <= options.answers.0 {
                return;
            }
            let Some(entry) = self.keys.get(digest) else { continue };
            let size = entry.size();
            if size > 0 {
                self.size -= size;
                entry.outcome.send_replace(Outcome::Forgotten);
            }
        }
    }

    /// Returns the number of keys in memory.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.keys.len(), self.order.len());
        self.keys.len()
    }

    /// Returns the bytes of all kept answers.
    #[cfg(test)]
    pub(super) fn size(&self) -> u64 {
        self.size
    }
}

impl KeyEntry {
    /// Returns the bytes that the kept result takes.
    fn size(&self) -> u64 {
        match &*self.outcome.borrow() {
            Outcome::Answered(answer) => answer.body.len() as u64 + ANSWER_OVERHEAD,
            Outcome::Charged(_) => ANSWER_OVERHEAD,
            _ => 0,
        }
    }
}

/// Keys in memory. Beyond this number the oldest ended key stays on disk only.
pub(super) const MOST_IN_MEMORY: usize = 16_384;
/// Bytes that an answer takes beside its body: its head and its entry.
pub(super) const ANSWER_OVERHEAD: u64 = 1_024;
