//! The connections of a table in groups, and the groups by their size.

use std::collections::{BTreeSet, HashMap};

use super::{ConnectionNumber, OwnerId};
use crate::source::Source;

/// Connections that are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Group {
    /// The connections of a source on which no request has authenticated.
    Unauthenticated(Source),
    /// The authenticated connections of a source.
    Authenticated(Source),
    /// The connections of an owner that a bound names.
    Bounded(OwnerId),
    /// The connections that count for an owner when places are few.
    Holder(OwnerId),
    /// Those of them that come from one source.
    HolderAt(Source, OwnerId),
}

/// The groups of a table. A group without a connection is forgotten.
#[derive(Debug, Default)]
pub(super) struct Groups {
    members: HashMap<Group, BTreeSet<ConnectionNumber>>,
    /// The holders by their number of connections.
    authenticated: BTreeSet<(usize, Group)>,
    unauthenticated: BTreeSet<(usize, Group)>,
    /// The unauthenticated connections of all sources, the oldest first.
    unauthenticated_numbers: BTreeSet<ConnectionNumber>,
    /// The holders at each source by their number of connections there.
    at_source: BTreeSet<(Source, usize, OwnerId)>,
}

impl Groups {
    /// Returns the holder with most connections, with their number.
    pub(super) fn largest_holder(&self) -> Option<(usize, Group)> {
        self.authenticated.last().copied()
    }

    /// Returns the source with most unauthenticated connections, with their number.
    pub(super) fn largest_source(&self) -> Option<(usize, Group)> {
        self.unauthenticated.last().copied()
    }

    /// Returns the unauthenticated connections of all sources, the oldest first.
    pub(super) fn unauthenticated(&self) -> &BTreeSet<ConnectionNumber> {
        &self.unauthenticated_numbers
    }

    /// Returns the holders with more than `own` connections from `source`, the largest
    /// first.
    pub(super) fn holders_beyond(
        &self,
        source: Source,
        own: usize,
    ) -> impl Iterator<Item = OwnerId> {
        let more = (source, own + 1, OwnerId(0))..=(source, usize::MAX, OwnerId(u64::MAX));
        self.at_source.range(more).rev().map(|&(.., holder)| holder)
    }

    /// Returns true if there is no group, and so no order either.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
            && self.authenticated.is_empty()
            && self.unauthenticated.is_empty()
            && self.unauthenticated_numbers.is_empty()
            && self.at_source.is_empty()
    }

    /// Returns the connections of `group`.
    pub(super) fn members(&self, group: Group) -> &BTreeSet<ConnectionNumber> {
        self.members.get(&group).unwrap_or(&NONE)
    }

    /// Adds a connection to `group`.
    pub(super) fn join(&mut self, group: Group, number: ConnectionNumber) {
        let members = self.members.entry(group).or_default();
        let before = members.len();
        members.insert(number);
        if let Group::Unauthenticated(_) = group {
            self.unauthenticated_numbers.insert(number);
        }
        self.rank(group, Resized { before, after: before + 1 });
    }

    /// Removes a connection from `group`.
    pub(super) fn leave(&mut self, group: Group, number: ConnectionNumber) {
        let Some(members) = self.members.get_mut(&group) else { return };
        let before = members.len();
        members.remove(&number);
        if before == 1 {
            self.members.remove(&group);
        }
        if let Group::Unauthenticated(_) = group {
            self.unauthenticated_numbers.remove(&number);
        }
        self.rank(group, Resized { before, after: before - 1 });
    }

    /// Keeps the order of the holders after a change of one's number.
    fn rank(&mut self, group: Group, Resized { before, after }: Resized) {
        let order = match group {
            Group::Unauthenticated(_) => &mut self.unauthenticated,
            Group::Holder(_) => &mut self.authenticated,
            Group::HolderAt(source, holder) => {
                self.at_source.remove(&(source, before, holder));
                if after > 0 {
                    self.at_source.insert((source, after, holder));
                }
                return;
            }
            // Only the size of these groups is ever asked for, so they need no order.
            Group::Authenticated(_) | Group::Bounded(_) => return,
        };
        order.remove(&(before, group));
        if after > 0 {
            order.insert((after, group));
        }
    }
}

/// A change of a group's number of connections.
struct Resized {
    before: usize,
    after: usize,
}

/// The members of a group without any.
static NONE: BTreeSet<ConnectionNumber> = BTreeSet::new();
