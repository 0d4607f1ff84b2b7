//! The states of a hold: `held -> posted | voided | expired`. Late usage may change
//! `expired` to `posted`, once. Each change of state is a method that takes the record out
//! of its old state, so no other change is possible. A hold that has ended remembers how.

use std::collections::{HashMap, VecDeque};

use tollgate_domain::{DeviceClass, DeviceNanos, ExactAmount, MonotonicTime, RequestId, Tier};

use crate::places::Requester;
use crate::refusal::Refusal;
use crate::scope::Scope;
use crate::terms::{Estimate, ResolveError, Resolved};

/// The amounts that are held for a request.
#[derive(Clone, Debug)]
pub(super) struct HoldRecord {
    pub(super) requester: Requester,
    pub(super) tier: Tier,
    /// True if the hold takes no place.
    pub(super) is_line: bool,
    pub(super) scopes: Vec<HeldScope>,
    pub(super) class: DeviceClass,
    pub(super) estimate: Estimate,
    /// Amount held against every cap that applies.
    pub(super) capped: DeviceNanos,
    /// Money held against every budget that applies.
    pub(super) money: ExactAmount,
    /// Ticket in the queue; `None` once the request may run.
    pub(super) ticket: Option<u64>,
    /// Time at which a sweep ends the hold; also the key in the index `due`.
    pub(super) due: MonotonicTime,
    pub(super) expires: MonotonicTime,
}

/// A scope of a hold.
#[derive(Clone, Debug)]
pub(super) struct HeldScope {
    pub(super) scope: Scope,
    /// True if a cap applied. Then the spend must be remembered.
    pub(super) capped: bool,
    /// True if a budget applied. Then the spent money must be remembered.
    pub(super) budgeted: bool,
    /// True if the hold took the request from the scope's request rate.
    pub(super) counts_request: bool,
}

/// All holds by id: the open ones, and those remembered after their end.
#[derive(Debug)]
pub(super) struct Holds {
    held: HashMap<RequestId, HoldRecord>,
    ended: HashMap<RequestId, Ended>,
    /// Ids of the ended holds, oldest first.
    order: VecDeque<RequestId>,
    most_ended: usize,
}

/// The way in which a hold ended.
#[derive(Debug)]
enum Ended {
    Posted,
    Voided,
    /// The request waited and gave its place to a request of another member. The amounts
    /// were returned.
    GaveWay(Box<Refusal>),
    /// The amounts were returned. The record is kept for late usage.
    Expired(Box<HoldRecord>),
}

/// The record of a hold whose usage is posted now.
#[expect(clippy::large_enum_variant, reason = "the value is taken apart at once")]
pub(super) enum Posting {
    /// The hold was open; its amounts must be replaced.
    InTime(HoldRecord),
    /// The hold had expired; its amounts were returned before.
    Late(Box<HoldRecord>),
}

impl Holds {
    /// Creates an empty set that remembers at most `most_ended` ended holds.
    pub(super) fn new(most_ended: usize) -> Self {
        Self { held: HashMap::new(), ended: HashMap::new(), order: VecDeque::new(), most_ended }
    }

    /// Returns true if the id is open or remembered.
    pub(super) fn knows(&self, id: &RequestId) -> bool {
        self.held.contains_key(id) || self.ended.contains_key(id)
    }

    /// Returns the number of open holds.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Returns the number of ended holds that are remembered.
    pub(super) fn ended(&self) -> usize {
        self.ended.len()
    }

    /// Returns the record of an open hold.
    pub(super) fn get(&self, id: &RequestId) -> Option<&HoldRecord> {
        self.held.get(id)
    }

    /// Returns the record of an open hold for a change of its place in the queue.
    pub(super) fn get_mut(&mut self, id: &RequestId) -> Option<&mut HoldRecord> {
        self.held.get_mut(id)
    }

    /// Returns the records of all open holds.
    pub(super) fn open(&self) -> impl Iterator<Item = &HoldRecord> {
        self.held.values()
    }

    /// Returns the records of all open holds for a change.
    pub(super) fn open_mut(&mut self) -> impl Iterator<Item = &mut HoldRecord> {
        self.held.values_mut()
    }

    /// Opens a hold. The id must not be known.
    pub(super) fn hold(&mut self, id: RequestId, record: HoldRecord) {
        self.held.insert(id, record);
    }

    /// Changes `held` or `expired` to `posted`.
    pub(super) fn post(&mut self, id: &RequestId) -> Result<Posting, ResolveError> {
        if let Some(record) = self.held.remove(id) {
            self.remember(id, Ended::Posted);
            return Ok(Posting::InTime(record));
        }
        match self.ended.remove(id) {
            Some(Ended::Expired(record)) => {
                // The id keeps its position in the order in which ended holds are
                // forgotten.
                self.ended.insert(id.clone(), Ended::Posted);
                Ok(Posting::Late(record))
            }
            Some(ended) => {
                let how = ended.how();
                self.ended.insert(id.clone(), ended);
                Err(ResolveError::AlreadySettled(how))
            }
            // Too old or never seen: the two cannot be told apart.
            None => Err(ResolveError::Unknown),
        }
    }

    /// Changes `held` to `voided`.
    pub(super) fn void(&mut self, id: &RequestId) -> Result<HoldRecord, ResolveError> {
        let Some(record) = self.held.remove(id) else {
            let how = self.ended.get(id).map(Ended::how);
            return Err(how.map_or(ResolveError::Unknown, ResolveError::AlreadySettled));
        };
        self.remember(id, Ended::Voided);
        Ok(record)
    }

    /// Changes `held` to `voided` for a waiting request that gives way, and remembers the
    /// refusal for its client. The caller returns the amounts.
    pub(super) fn give_way(&mut self, id: &RequestId, refusal: Refusal) -> Option<HoldRecord> {
        let record = self.held.remove(id)?;
        self.remember(id, Ended::GaveWay(Box::new(refusal)));
        Some(record)
    }

    /// Returns the refusal of a request that gave way.
    pub(super) fn refusal_of(&self, id: &RequestId) -> Option<&Refusal> {
        match self.ended.get(id)? {
            Ended::GaveWay(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Changes `held` to `expired`. The caller returns the amounts.
    pub(super) fn expire(&mut self, id: &RequestId) -> Option<HoldRecord> {
        // Copied for late usage; the copy is dropped when it is forgotten.
        let record = self.held.remove(id)?;
        self.remember(id, Ended::Expired(Box::new(record.clone())));
        Some(record)
    }

    fn remember(&mut self, id: &RequestId, ended: Ended) {
        if self.ended.insert(id.clone(), ended).is_none() {
            self.order.push_back(id.clone());
        }
        // The bound on memory: the oldest end is forgotten, and late usage for it is
        // refused.
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
            Self::Voided | Self::GaveWay(_) => Resolved::Voided,
            Self::Expired(_) => Resolved::Expired,
        }
    }
}
