//! The life of a hold: `held -> posted | voided | expired`, and late usage may
//! still turn `expired` into `posted`, once. A change of state is a method here
//! that takes the record out of the state it leaves, so there are no others; a
//! hold that has ended answers how.

use std::collections::{HashMap, VecDeque};

use tollgate_domain::{DeviceClass, DeviceNanos, MonotonicTime, RequestId};

use crate::scope::Scope;
use crate::terms::{ResolveError, Resolved};

/// What is held for a request.
#[derive(Clone, Debug)]
pub(super) struct HoldRecord {
    pub(super) scopes: Vec<HeldScope>,
    pub(super) class: DeviceClass,
    pub(super) tokens: u64,
    pub(super) expected: DeviceNanos,
    /// Held against every cap there was.
    pub(super) capped: DeviceNanos,
    /// Its place in the queue; `None` once it may run.
    pub(super) ticket: Option<u64>,
    /// When a sweep ends it, as the index `due` knows it.
    pub(super) due: MonotonicTime,
    pub(super) expires: MonotonicTime,
}

#[derive(Clone, Debug)]
pub(super) struct HeldScope {
    pub(super) scope: Scope,
    /// Whether a cap applied, so that its spend is remembered.
    pub(super) capped: bool,
}

/// Every hold that is held or is remembered, by its id.
#[derive(Debug)]
pub(super) struct Holds {
    held: HashMap<RequestId, HoldRecord>,
    ended: HashMap<RequestId, Ended>,
    /// Of those that have ended, the oldest first.
    order: VecDeque<RequestId>,
    most_ended: usize,
}

#[derive(Debug)]
enum Ended {
    Posted,
    Voided,
    /// Its amounts were given back; what it was is known for late usage.
    Expired(Box<HoldRecord>),
}

/// A hold whose usage is posted now.
pub(super) enum Posting {
    /// Its amounts stand and are to be replaced.
    InTime(HoldRecord),
    /// They were given back before.
    Late(Box<HoldRecord>),
}

impl Holds {
    /// None; at most `most_ended` of those to come are remembered.
    pub(super) fn new(most_ended: usize) -> Self {
        Self { held: HashMap::new(), ended: HashMap::new(), order: VecDeque::new(), most_ended }
    }

    /// Whether the id has been used, as far as is remembered.
    pub(super) fn knows(&self, id: &RequestId) -> bool {
        self.held.contains_key(id) || self.ended.contains_key(id)
    }

    /// How many are held.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// How many have ended and are remembered.
    pub(super) fn ended(&self) -> usize {
        self.ended.len()
    }

    /// What is held by that id.
    pub(super) fn get(&self, id: &RequestId) -> Option<&HoldRecord> {
        self.held.get(id)
    }

    /// As [`Self::get`], to move it on in its queue.
    pub(super) fn get_mut(&mut self, id: &RequestId) -> Option<&mut HoldRecord> {
        self.held.get_mut(id)
    }

    /// Begins a hold whose id is not known.
    pub(super) fn hold(&mut self, id: RequestId, record: HoldRecord) {
        self.held.insert(id, record);
    }

    /// `held -> posted`, `expired -> posted`.
    pub(super) fn post(&mut self, id: &RequestId) -> Result<Posting, ResolveError> {
        if let Some(record) = self.held.remove(id) {
            self.remember(id, Ended::Posted);
            return Ok(Posting::InTime(record));
        }
        match self.ended.remove(id) {
            Some(Ended::Expired(record)) => {
                // In its place among those that are forgotten in their turn.
                self.ended.insert(id.clone(), Ended::Posted);
                Ok(Posting::Late(record))
            }
            Some(ended) => {
                let how = ended.how();
                self.ended.insert(id.clone(), ended);
                Err(ResolveError::AlreadySettled(how))
            }
            None => Err(ResolveError::Unknown),
        }
    }

    /// `held -> voided`.
    pub(super) fn void(&mut self, id: &RequestId) -> Result<HoldRecord, ResolveError> {
        let Some(record) = self.held.remove(id) else {
            let how = self.ended.get(id).map(Ended::how);
            return Err(how.map_or(ResolveError::Unknown, ResolveError::AlreadySettled));
        };
        self.remember(id, Ended::Voided);
        Ok(record)
    }

    /// `held -> expired`; what was held is given back by the caller.
    pub(super) fn expire(&mut self, id: &RequestId) -> Option<HoldRecord> {
        let record = self.held.remove(id)?;
        self.remember(id, Ended::Expired(Box::new(record.clone())));
        Some(record)
    }

    fn remember(&mut self, id: &RequestId, ended: Ended) {
        if self.ended.insert(id.clone(), ended).is_none() {
            self.order.push_back(id.clone());
        }
        while self.order.len() > self.most_ended {
            if let Some(oldest) = self.order.pop_front() {
                self.ended.remove(&oldest);
            }
        }
    }
}

impl Ended {
    fn how(&self) -> Resolved {
        match self {
            Self::Posted => Resolved::Posted,
            Self::Voided => Resolved::Voided,
            Self::Expired(_) => Resolved::Expired,
        }
    }
}
