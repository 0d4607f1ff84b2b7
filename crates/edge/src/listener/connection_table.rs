//! The open connections of a listener by holder: their bounds, and the order in
//! which they give way to new ones.
//!
//! A connection belongs to its source until a request on it authenticates, and
//! then to the owners that the service names. Nothing here waits. The functions
//! decide which connection ends; its own task ends it.

mod groups;
mod open_connection;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::groups::{Group, Groups};
pub(super) use self::open_connection::{Eviction, OpenConnection};
use crate::source::Source;

/// An owner of connections. The service behind the listener draws the number; the
/// edge does not know what it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u64);

/// A bound on the authenticated connections of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerBound {
    /// The owner.
    pub owner: OwnerId,
    /// The largest number of its connections.
    pub most: u32,
}

/// The owners of an authenticated connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionOwners {
    /// The bounds that the connection must keep, the narrowest first.
    pub bounds: Vec<OwnerBound>,
    /// The owner that the connection counts for when places are few.
    pub holder: OwnerId,
}

/// The bound for which a connection may not stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundReached {
    /// The bound with this index in [`ConnectionOwners::bounds`].
    Owner(usize),
    /// The authenticated connections of one source; the largest number.
    Source(u32),
    /// A bound of another caller, for which the connection is ending already.
    Ending,
}

/// The number of a connection in a table.
pub(super) type ConnectionNumber = u64;

/// The connections of a listener that count for a holder. Each connection removes
/// its own entry, so the table has at most as many as there are connections.
#[derive(Debug, Default)]
pub(super) struct ConnectionTable {
    next: ConnectionNumber,
    entries: HashMap<ConnectionNumber, Entry>,
    groups: Groups,
    /// Connections that were evicted and are still open.
    ending: usize,
}

#[derive(Debug)]
struct Entry {
    connection: Arc<OpenConnection>,
    source: Source,
    owners: Option<ConnectionOwners>,
    /// The owners that the connection may not count for, and the bound. It is
    /// ending then.
    refused: Option<(ConnectionOwners, BoundReached)>,
}

/// The numbers of open connections by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Connections with an authenticated request.
    pub authenticated: usize,
    /// Connections without one, those in a handshake included.
    pub unauthenticated: usize,
    /// Connections of trusted proxies, and connections that are being closed.
    pub uncounted: usize,
}

impl ConnectionTable {
    /// Returns the number of unauthenticated connections of `source`.
    pub(super) fn unauthenticated_of(&self, source: Source) -> usize {
        self.groups.members(Group::Unauthenticated(source)).len()
    }

    /// Returns true if `source` has an authenticated connection.
    pub(super) fn has_authenticated(&self, source: Source) -> bool {
        !self.groups.members(Group::Authenticated(source)).is_empty()
    }

    /// Adds an unauthenticated connection.
    pub(super) fn insert(
        &mut self,
        source: Source,
        connection: Arc<OpenConnection>,
    ) -> ConnectionNumber {
        let number = self.next;
        self.next += 1;
        self.entries.insert(number, Entry { connection, source, owners: None, refused: None });
        self.groups.join(Group::Unauthenticated(source), number);
        number
    }

    /// Makes a connection one of `owners`. At a bound the owner's connection that
    /// has been idle for longest gives way, if it has settled.
    ///
    /// # Errors
    /// The narrowest bound at which no connection of the owner is idle. The
    /// connection itself ends then, and every later call gets an error at once.
    pub(super) fn authenticate(
        &mut self,
        number: ConnectionNumber,
        owners: &ConnectionOwners,
        per_source: u32,
        now: Instant,
    ) -> Result<(), BoundReached> {
        // A connection without an entry has been evicted.
        let Some(entry) = self.entries.get(&number) else { return Ok(()) };
        // The first caller keeps the connection: later ones could move it into another's count.
        if entry.owners.is_some() {
            return Ok(());
        }
        // No other connection may end for one that is ending itself.
        if let Some((refused, reached)) = &entry.refused {
            // The bound of another caller is none of this one's business.
            return Err(if refused == owners { *reached } else { BoundReached::Ending });
        }
        let source = entry.source;
        let replaced = match self.replaced(source, owners, per_source, now) {
            Ok(replaced) => replaced,
            Err(reached) => {
                // The entry stays, so that the connection counts for its source until
                // its end, and so that no later request on it passes unseen.
                if let Some(entry) = self.entries.get_mut(&number) {
                    entry.refused = Some((owners.clone(), reached));
                    entry.connection.evict(Eviction::OverBound);
                }
                return Err(reached);
            }
        };
        // Only now that every bound can be kept, so that a refused connection ends no other.
        for number in replaced {
            self.evict(number, Eviction::Replaced);
        }
        self.groups.leave(Group::Unauthenticated(source), number);
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.owners = Some(owners.clone());
            for group in entry.authenticated_groups() {
                self.groups.join(group, number);
            }
        }
        Ok(())
    }

    /// Returns the connections that give way to a new one of `owners` from `source`.
    /// At the bound of the source, the holder with most connections there loses one,
    /// so that a holder keeps its part of an address that it shares.
    ///
    /// # Errors
    /// The narrowest bound at which no connection may give way.
    fn replaced(
        &self,
        source: Source,
        owners: &ConnectionOwners,
        per_source: u32,
        now: Instant,
    ) -> Result<Vec<ConnectionNumber>, BoundReached> {
        let mut replaced: Vec<ConnectionNumber> = Vec::new();
        let is_full = |group: Group, most: u32, replaced: &[ConnectionNumber]| {
            let members = self.groups.members(group);
            // A connection that gives way to one bound makes room under the other bounds, too.
            let gone = replaced.iter().filter(|number| members.contains(number)).count();
            members.len() - gone >= most as usize
        };
        let settled = |group: Group, replaced: &[ConnectionNumber]| {
            self.longest_idle(group, usize::MAX, |number, (is_busy, since)| {
                !is_busy && now >= since + SETTLED && !replaced.contains(&number)
            })
        };
        for (index, bound) in owners.bounds.iter().enumerate() {
            let group = Group::Bounded(bound.owner);
            if is_full(group, bound.most, &replaced) {
                let idle = settled(group, &replaced).ok_or(BoundReached::Owner(index))?;
                replaced.push(idle);
            }
        }
        if is_full(Group::Authenticated(source), per_source, &replaced) {
            let own = self.groups.members(Group::HolderAt(source, owners.holder)).len();
            // Holders with no more than the newcomer's own keep theirs.
            let larger = self.groups.holders_beyond(source, own);
            let idle = larger
                .chain([owners.holder])
                .find_map(|holder| settled(Group::HolderAt(source, holder), &replaced))
                .ok_or(BoundReached::Source(per_source))?;
            replaced.push(idle);
        }
        Ok(replaced)
    }

    /// Ends one connection, because few places are left. `room` is the number of
    /// places that unauthenticated connections may always have: beyond it one of
    /// them gives way, and otherwise an authenticated one. Of these, a connection
    /// of the holder with most gives way: one without a request that has been idle
    /// for long, else the oldest. If every holder has one connection, the oldest
    /// unauthenticated one gives way beyond `room`, and an authenticated one stays.
    pub(super) fn make_room(&mut self, room: usize) {
        let crowded = self.groups.unauthenticated().len() > room;
        let holder = if crowded { None } else { self.groups.largest_holder() };
        let number = match holder.or_else(|| self.groups.largest_source()) {
            Some((2.., group)) => self
                .longest_idle(group, MOST_LOOKED_AT, |_, (is_busy, _)| !is_busy)
                .or_else(|| self.groups.members(group).first().copied()),
            // It has had the most time to authenticate.
            _ if crowded => self.groups.unauthenticated().first().copied(),
            _ => None,
        };
        if let Some(number) = number {
            self.evict(number, Eviction::Displaced);
        }
    }

    /// Ends the longest-idle connection of the holder with most, or else of the source
    /// with most. Returns false if neither has one without a request.
    pub(super) fn end_idle(&mut self) -> bool {
        let largest = [self.groups.largest_holder(), self.groups.largest_source()];
        let idle = largest.into_iter().flatten().find_map(|(_, group)| {
            self.longest_idle(group, MOST_LOOKED_AT, |_, (is_busy, _)| !is_busy)
        });
        if let Some(number) = idle {
            self.evict(number, Eviction::Displaced);
        }
        idle.is_some()
    }

    /// Removes a connection that has been closed.
    pub(super) fn remove(&mut self, number: ConnectionNumber) {
        if self.take(number).is_none() {
            // It was evicted before, so it left the table then and counted as ending until now.
            self.ending = self.ending.saturating_sub(1);
        }
    }

    /// Returns the number of connections that were evicted and are still open.
    pub(super) fn ending(&self) -> usize {
        self.ending
    }

    /// Takes a connection out of its groups, unless it was evicted.
    fn take(&mut self, number: ConnectionNumber) -> Option<Arc<OpenConnection>> {
        let entry = self.entries.remove(&number)?;
        match &entry.owners {
            None => self.groups.leave(Group::Unauthenticated(entry.source), number),
            Some(_) => {
                for group in entry.authenticated_groups() {
                    self.groups.leave(group, number);
                }
            }
        }
        Some(entry.connection)
    }

    /// Returns the counts of `open` connections.
    pub(super) fn counts(&self, open: usize) -> ConnectionCounts {
        let unauthenticated = self.groups.unauthenticated().len();
        ConnectionCounts {
            authenticated: self.entries.len() - unauthenticated,
            unauthenticated,
            uncounted: open.saturating_sub(self.entries.len()),
        }
    }

    fn evict(&mut self, number: ConnectionNumber, eviction: Eviction) {
        if let Some(connection) = self.take(number) {
            self.ending += 1;
            connection.evict(eviction);
        }
    }

    /// Returns the connection with the earliest last use among the oldest of `group`
    /// that `may_end` allows. At most `looked_at` members are looked at, and fewer
    /// once [`ENOUGH`] are allowed.
    fn longest_idle(
        &self,
        group: Group,
        looked_at: usize,
        may_end: impl Fn(ConnectionNumber, (bool, Instant)) -> bool,
    ) -> Option<ConnectionNumber> {
        let used =
            |number: &ConnectionNumber| Some(self.entries.get(number)?.connection.last_use());
        let members = self.groups.members(group).iter().take(looked_at);
        let candidates = members.filter_map(|number| Some((used(number)?, *number)));
        let allowed = candidates.filter(|(used, number)| may_end(*number, *used));
        allowed.take(ENOUGH).min().map(|(_, number)| number)
    }
}

impl Entry {
    fn authenticated_groups(&self) -> Vec<Group> {
        let Some(owners) = &self.owners else { return Vec::new() };
        let bounded = owners.bounds.iter().map(|bound| Group::Bounded(bound.owner));
        let always = [
            Group::Authenticated(self.source),
            Group::Holder(owners.holder),
            Group::HolderAt(self.source, owners.holder),
        ];
        bounded.chain(always).collect()
    }
}

/// Time without a request after which a connection may give way to another one of
/// its owner. A connection of a busy pool may be used again at once, and its end
/// would cost the client an error.
const SETTLED: Duration = Duration::from_secs(1);

/// Idle connections among which the longest-idle one is sought. The oldest of a
/// holder are looked at, so a larger number would rarely find another one.
const ENOUGH: usize = 64;

/// Connections of a holder that are looked at for one new connection. Each look
/// takes a lock, and every new connection waits meanwhile.
const MOST_LOOKED_AT: usize = 1_024;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests;
