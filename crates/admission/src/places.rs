//! The places of a scope: requests that run, wait and arrive, counted for each member of
//! the scope. A member is one of those that share the scope's limits. Fairness between
//! members is decided here, and nothing else is: a full queue makes room for the member
//! that has less than its share, and a free place goes to the member that runs least.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tollgate_domain::{PoolName, TenantId};

use crate::scope::Scope;

/// The tenant of a request, and the pool that owns the tenant's share, if any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requester {
    /// Tenant that pays for the request.
    pub tenant: TenantId,
    /// Pool of a tenant without a plan of its own. All such tenants of the pool have one
    /// share of a device, and one share of the queue of a model.
    pub pool: Option<PoolName>,
}

impl Requester {
    /// Returns the member of `scope` that the request counts for. The tenants of a pool
    /// share its queue. The tenants and pools with a share of the devices share the queue
    /// of a model and that of the gateway.
    pub(crate) fn member_of(&self, scope: &Scope) -> Member {
        match (scope, &self.pool) {
            (Scope::Model(_) | Scope::Gateway, Some(pool)) => Member::Pool(pool.clone()),
            _ => Member::Tenant(self.tenant.clone()),
        }
    }
}

/// One of those that share the places of a scope. A key or a tenant has one member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Member {
    /// One tenant.
    Tenant(TenantId),
    /// All tenants of a pool that have no plans of their own.
    Pool(PoolName),
}

/// The places of one scope. Members without a request are forgotten, so there are at most
/// as many members as requests.
#[derive(Debug, Default)]
pub(crate) struct Places {
    running: u32,
    arriving: u32,
    waiting: usize,
    members: HashMap<Member, Taken>,
    /// Members with waiting requests, in the order in which they get a free place.
    next: BTreeMap<Turn, Member>,
    /// Members with waiting requests, by the number that waits and the latest ticket.
    most: BTreeSet<(usize, u64)>,
}

/// The order in which members get a free place: fewest running requests first, then the
/// earliest ticket.
type Turn = (u32, u64);

/// The places of one member.
#[derive(Debug, Default)]
struct Taken {
    running: u32,
    arriving: u32,
    /// Tickets of the waiting requests, in order of arrival.
    waiting: BTreeSet<u64>,
}

impl Taken {
    fn turn(&self) -> Option<Turn> {
        Some((self.running, *self.waiting.first()?))
    }

    fn rank(&self) -> Option<(usize, u64)> {
        Some((self.waiting.len(), *self.waiting.last()?))
    }

    /// Returns the places in the queue, for requests that wait or arrive.
    fn queued(&self) -> usize {
        self.waiting.len() + self.arriving as usize
    }
}

impl Places {
    pub(crate) fn running(&self) -> u32 {
        self.running
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the number of all requests: those that run, wait and arrive.
    pub(crate) fn taken(&self) -> u64 {
        u64::from(self.running) + u64::from(self.arriving) + self.waiting as u64
    }

    /// Counts a request that runs.
    pub(crate) fn start(&mut self, member: &Member) {
        self.running += 1;
        self.change(member, |taken| taken.running += 1);
    }

    /// Ends a request that ran.
    pub(crate) fn end(&mut self, member: &Member) {
        // Saturating: a wrong count must not block the scope forever.
        self.running = self.running.saturating_sub(1);
        self.change(member, |taken| taken.running = taken.running.saturating_sub(1));
    }

    /// Counts a request that waits.
    pub(crate) fn begin_wait(&mut self, member: &Member, ticket: u64) {
        self.waiting += 1;
        self.change(member, |taken| _ = taken.waiting.insert(ticket));
    }

    /// Removes a request from those that wait.
    pub(crate) fn end_wait(&mut self, member: &Member, ticket: u64) {
        let mut waited = false;
        self.change(member, |taken| waited = taken.waiting.remove(&ticket));
        // Only what was found is subtracted, so that the count cannot go below zero.
        self.waiting -= usize::from(waited);
    }

    /// Counts a request that arrives.
    pub(crate) fn arrive(&mut self, member: &Member) {
        self.arriving += 1;
        self.change(member, |taken| taken.arriving += 1);
    }

    /// Removes a request from those that arrive.
    pub(crate) fn leave(&mut self, member: &Member) {
        self.arriving = self.arriving.saturating_sub(1);
        self.change(member, |taken| taken.arriving = taken.arriving.saturating_sub(1));
    }

    /// Returns the ticket of the request that gives way to one more waiting request of
    /// `member`: the latest of the member that waits with most. Returns `None` if no member
    /// would still have as many waiting requests as `member`.
    ///
    /// Among `n` members with waiting requests, `member` included, each keeps a floor of
    /// `queued / n` places: a full queue in which `member` has fewer has a member with more
    /// than `queued / n`, and that one has at least as many left.
    pub(crate) fn gives_way_to(&self, member: &Member) -> Option<u64> {
        let own = self.members.get(member).map_or(0, |taken| taken.waiting.len());
        let &(most, latest) = self.most.last()?;
        (most >= own + 2).then_some(latest)
    }

    /// Returns true if a request of `member` may arrive although every place is taken:
    /// another member has at least two places in the queue more. The place is settled when
    /// the request has arrived.
    pub(crate) fn yields_to_arrival_of(&self, member: &Member) -> bool {
        let own = self.members.get(member).map_or(0, Taken::queued);
        // Scanned only if every place is taken, and bounded by the number of places.
        self.members.values().any(|taken| taken.queued() >= own + 2)
    }

    /// Returns the next waiting request for a free place that is not in `tried`: of the
    /// member with the fewest running requests, the earliest. `tried` has the latest ticket
    /// that was tried of each member.
    pub(crate) fn next_waiting(&self, tried: &HashMap<Member, u64>) -> Option<(Member, u64)> {
        self.next.values().find_map(|member| {
            let waiting = &self.members.get(member)?.waiting;
            // The tickets of a member are tried in order, so all up to this one were tried.
            let from = tried.get(member).map_or(0, |ticket| ticket + 1);
            let ticket = *waiting.range(from..).next()?;
            Some((member.clone(), ticket))
        })
    }

    /// Changes the places of a member, and keeps the orders of members up to date.
    fn change(&mut self, member: &Member, change: impl FnOnce(&mut Taken)) {
        // Taken out of the map, so that a member without requests is forgotten.
        let mut taken = self.members.remove(member).unwrap_or_default();
        let before = (taken.turn(), taken.rank());
        change(&mut taken);
        let after = (taken.turn(), taken.rank());
        if before.0 != after.0 {
            before.0.map(|turn| self.next.remove(&turn));
            after.0.map(|turn| self.next.insert(turn, member.clone()));
        }
        if before.1 != after.1 {
            before.1.map(|rank| self.most.remove(&rank));
            after.1.map(|rank| self.most.insert(rank));
        }
        if taken.running > 0 || taken.queued() > 0 {
            self.members.insert(member.clone(), taken);
        }
    }
}
