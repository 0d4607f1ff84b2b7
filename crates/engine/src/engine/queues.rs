//! Accounting of waiting requests at the engine's door: the amount that waits, the longest
//! queue, and the predicted wait of a new request.
//!
//! If the queues are full, the longest queue gives up its newest request. Queues in a lower
//! tier go first, then queues of other share owners, then queues of other tenants of the
//! same share owner. If the own queue of the new request is the longest, the new request is
//! refused.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tollgate_domain::{DeviceNanos, Tier};

use super::submission::RequestKey;
use crate::schedule::{Name, Seat};

/// The ticket of a waiting request. Newer tickets are larger.
pub(super) type Ticket = u64;

/// All waiting requests. The caller bounds their number through [`Queues::make_room`].
#[derive(Default)]
pub(super) struct Queues {
    last: Ticket,
    all: BTreeMap<Ticket, Queued>,
    size: Size,
    tiers: BTreeMap<Tier, Queue<Queue<BTreeSet<Ticket>>>>,
}

/// A waiting request.
pub(super) struct Queued {
    pub(super) key: RequestKey,
    pub(super) seat: Seat,
    pub(super) size: Size,
}

/// An amount of waiting work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) requests: usize,
    pub(super) prompt_tokens: usize,
    /// Expected reference cost of the work.
    pub(super) expected: DeviceNanos,
}

/// A queue made of named sub-queues. A sub-queue without requests is removed.
struct Queue<T> {
    parts: HashMap<Name, SubQueue<T>>,
    by_requests: BTreeSet<(usize, Name)>,
    by_tokens: BTreeSet<(usize, Name)>,
    /// Sum over all sub-queues.
    size: Size,
    weight: u128,
}

#[derive(Default)]
struct SubQueue<T> {
    size: Size,
    weight: u64,
    inner: T,
}

/// The measure by which queues are compared.
#[derive(Clone, Copy)]
enum Measure {
    Requests,
    Tokens,
}

impl Queues {
    /// Returns the amount of all waiting work.
    pub(super) fn size(&self) -> Size {
        self.size
    }

    /// Returns the amount of waiting work in `tier`.
    pub(super) fn size_of(&self, tier: Tier) -> Size {
        self.tiers.get(&tier).map_or(Size::default(), |queue| queue.size)
    }

    /// Returns the predicted wait of a new request in `seat`. The wait is at most the work
    /// of the whole tier, and at most the time that the own queue takes at the share of its
    /// owner. Batch work waits for everything.
    pub(super) fn predicted_wait(&self, seat: &Seat) -> Duration {
        let all = self.tiers.get(&seat.tier).map_or(DeviceNanos::ZERO, |queue| queue.size.expected);
        // Batch work runs after all interactive work, so it waits for both tiers.
        let wait = match seat.tier {
            Tier::Interactive => all.min(self.wait_on_share(seat)),
            Tier::Batch => self.size.expected,
        };
        Duration::from_nanos(wait.nanos())
    }

    /// Adds a request at the end of its queue.
    pub(super) fn push(&mut self, queued: Queued) -> Ticket {
        self.last += 1;
        self.insert(self.last, queued);
        self.last
    }

    /// Marks a request as starting. The request still counts but can no longer be
    /// displaced.
    pub(super) fn begin(&mut self, ticket: Ticket) {
        if let Some(Queued { seat, .. }) = self.all.get(&ticket)
            && let Some(tickets) = tickets_of(&mut self.tiers, seat)
        {
            tickets.remove(&ticket);
        }
    }

    /// Removes a request and returns it. Returns `None` if the request was displaced
    /// before.
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<Queued> {
        let queued = self.all.remove(&ticket)?;
        let Queued { seat, size, .. } = &queued;
        self.size.subtract(size);
        if let Some(share_owners) = self.tiers.get_mut(&seat.tier) {
            let tenants = &mut share_owners.part(&seat.share_owner).inner;
            tenants.part(&seat.tenant).inner.remove(&ticket);
            // Inner first: shrinking may remove the outer part.
            tenants.shrink(&seat.tenant, size);
            share_owners.shrink(&seat.share_owner, size);
        }
        Some(queued)
    }

    /// Makes room for a request of `size` in `seat` under the bound `most`. Returns the
    /// displaced requests. Returns `None` and displaces nothing if the own queue is the
    /// longest.
    pub(super) fn make_room(
        &mut self,
        seat: &Seat,
        size: &Size,
        most: &Size,
    ) -> Option<Vec<RequestKey>> {
        let mut gone = Vec::new();
        while let Some(measure) = self.lacking(size, most) {
            let longest = self.longest(seat, size, measure);
            // All or nothing: a request that is refused must displace no other.
            let Some((ticket, queued)) =
                longest.and_then(|ticket| Some((ticket, self.remove(ticket)?)))
            else {
                for (ticket, queued) in gone {
                    self.insert(ticket, queued);
                }
                return None;
            };
            gone.push((ticket, queued));
        }
        // The caller refuses these requests; they are no longer in any queue.
        Some(gone.into_iter().map(|(_, queued)| queued.key).collect())
    }

    fn insert(&mut self, ticket: Ticket, queued: Queued) {
        let Queued { seat, size, .. } = &queued;
        let Seat { tier, share_owner, tenant, weight, .. } = seat;
        self.size.add(size);
        let share_owners = self.tiers.entry(*tier).or_default();
        share_owners.grow(share_owner, size, weight.parts());
        let tenants = &mut share_owners.part(share_owner).inner;
        tenants.grow(tenant, size, 1);
        tenants.part(tenant).inner.insert(ticket);
        self.all.insert(ticket, queued);
    }

    /// Returns the measure that would exceed `most`.
    fn lacking(&self, size: &Size, most: &Size) -> Option<Measure> {
        [Measure::Requests, Measure::Tokens].into_iter().find(|measure| {
            measure.of(&self.size).saturating_add(measure.of(size)) > measure.of(most)
        })
    }

    /// Returns the newest request of the longest queue, if that queue would be longer than
    /// the own queue of the new request.
    fn longest(&self, seat: &Seat, size: &Size, measure: Measure) -> Option<Ticket> {
        // Lower tiers come last in the order, so the search starts there.
        let below = self.tiers.iter().rev().find(|(_, queue)| queue.size.requests > 0);
        let (tier, share_owners) = below.filter(|(tier, _)| **tier >= seat.tier)?;
        let same_tier = *tier == seat.tier;
        let own = |name, same| if same { Some((name, measure.of(size))) } else { None };
        let (share_owner, other) =
            share_owners.longest(own(&seat.share_owner, same_tier), measure)?;
        let same_share_owner = same_tier && !other;
        let (tenant, other) =
            share_owner.inner.longest(own(&seat.tenant, same_share_owner), measure)?;
        if same_share_owner && !other { None } else { tenant.inner.last().copied() }
    }

    /// Returns the time that the own queue of a new request takes at its share, assuming
    /// that all other waiting requests stay.
    fn wait_on_share(&self, seat: &Seat) -> DeviceNanos {
        let Some(share_owners) = self.tiers.get(&seat.tier) else { return DeviceNanos::ZERO };
        let Some(share_owner) = share_owners.parts.get(&seat.share_owner) else {
            return DeviceNanos::ZERO;
        };
        let Some(tenant) = share_owner.inner.parts.get(&seat.tenant) else {
            return DeviceNanos::ZERO;
        };
        let own = u128::from(tenant.size.expected.nanos()) * share_owner.inner.weight;
        // A tenant cannot wait longer than the whole queue of its share owner.
        let of_share_owner = own.min(u128::from(share_owner.size.expected.nanos()));
        let wait = of_share_owner * share_owners.weight / u128::from(share_owner.weight.max(1));
        DeviceNanos(wait.min(u128::from(u64::MAX)) as u64)
    }
}

fn tickets_of<'a>(
    tiers: &'a mut BTreeMap<Tier, Queue<Queue<BTreeSet<Ticket>>>>,
    seat: &Seat,
) -> Option<&'a mut BTreeSet<Ticket>> {
    let share_owner = tiers.get_mut(&seat.tier)?.parts.get_mut(&seat.share_owner)?;
    Some(&mut share_owner.inner.parts.get_mut(&seat.tenant)?.inner)
}

impl<T: Default> Queue<T> {
    #[expect(
        clippy::expect_used,
        reason = "a part exists from its first growth until it has shrunk to nothing"
    )]
    fn part(&mut self, name: &Name) -> &mut SubQueue<T> {
        self.parts.get_mut(name).expect("a part that was grown and not yet shrunk to nothing")
    }

    fn grow(&mut self, name: &Name, size: &Size, weight: u64) {
        let part = self.parts.entry(name.clone()).or_default();
        let before = part.size;
        // The weight may change between two requests, so it is replaced and not added.
        self.weight = self.weight - u128::from(part.weight) + u128::from(weight);
        part.weight = weight;
        part.size.add(size);
        let after = part.size;
        self.size.add(size);
        self.measured(name, before, after);
    }

    fn shrink(&mut self, name: &Name, size: &Size) {
        let part = self.part(name);
        let before = part.size;
        part.size.subtract(size);
        let (after, weight) = (part.size, part.weight);
        self.size.subtract(size);
        self.measured(name, before, after);
        // Empty sub-queues are dropped: the number of tenants has no bound.
        if after.requests == 0 {
            self.weight -= u128::from(weight);
            self.parts.remove(name);
        }
    }

    fn measured(&mut self, name: &Name, before: Size, after: Size) {
        for measure in [Measure::Requests, Measure::Tokens] {
            let set = match measure {
                Measure::Requests => &mut self.by_requests,
                Measure::Tokens => &mut self.by_tokens,
            };
            // The sets are ordered by length, so the old entry is removed before the new
            // one is added.
            set.remove(&(measure.of(&before), name.clone()));
            if after.requests > 0 {
                set.insert((measure.of(&after), name.clone()));
            }
        }
    }

    /// Returns the longest sub-queue, and true if it is not the one that the new request
    /// would join. `own` is the name of that one and the amount to add.
    fn longest(
        &self,
        own: Option<(&Name, usize)>,
        measure: Measure,
    ) -> Option<(&SubQueue<T>, bool)> {
        let set = match measure {
            Measure::Requests => &self.by_requests,
            Measure::Tokens => &self.by_tokens,
        };
        let (length, name) = set.last()?;
        let longest = self.parts.get(name)?;
        let Some((own, more)) = own else { return Some((longest, true)) };
        let part = self.parts.get(own);
        let would_be = part.map_or(0, |part| measure.of(&part.size)).saturating_add(more);
        if name != own && *length > would_be {
            return Some((longest, true));
        }
        part.map(|part| (part, false))
    }
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            parts: HashMap::new(),
            by_requests: BTreeSet::new(),
            by_tokens: BTreeSet::new(),
            size: Size::default(),
            weight: 0,
        }
    }
}

impl Size {
    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.expected += other.expected;
    }

    fn subtract(&mut self, other: &Self) {
        self.requests -= other.requests;
        self.prompt_tokens -= other.prompt_tokens;
        self.expected -= other.expected;
    }
}

impl Measure {
    fn of(self, size: &Size) -> usize {
        match self {
            Self::Requests => size.requests,
            Self::Tokens => size.prompt_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate_domain::{Caller, KeyId, PoolName, RequestId, TenantId};

    use super::*;
    use crate::schedule::SchedulePolicy;

    /// Four tenants with shares of their own, two tenants of one pool, and one tenant in
    /// the batch tier.
    fn seat(number: u32) -> Seat {
        let caller = Caller {
            tenant: TenantId::new(&format!("tenant-{number}")).expect("a name"),
            key: KeyId::new("key").expect("a name"),
        };
        let pool = PoolName::new("pool").expect("a name");
        let pool = (4..6).contains(&number).then_some(&pool);
        let tier = if number == 6 { Tier::Batch } else { Tier::Interactive };
        Seat::new(SchedulePolicy::Fair, tier, pool, &caller, f64::from(1 + number % 3))
    }

    fn size(prompt_tokens: usize) -> Size {
        Size { requests: 1, prompt_tokens, expected: DeviceNanos(1_000 * prompt_tokens as u64) }
    }

    fn key(number: usize) -> RequestKey {
        (RequestId::new(&format!("req-{number}")).expect("a name"), 0)
    }

    /// An entry that [`Queues`] must hold.
    struct Known {
        ticket: Ticket,
        tokens: usize,
        key: RequestKey,
        begun: bool,
    }

    proptest! {
        #[test]
        fn queues_keep_their_bounds_and_starting_requests(
            acts in prop::collection::vec((0u32..7, 1usize..40, 0u32..6, any::<prop::sample::Index>()), 1..80),
        ) {
            let most = Size { requests: 12, prompt_tokens: 200, expected: DeviceNanos::ZERO };
            let mut queues = Queues::default();
            let mut known: Vec<Known> = Vec::new();
            for (number, (who, tokens, what, which)) in acts.into_iter().enumerate() {
                match what {
                    0 if !known.is_empty() => {
                        let gone = known.swap_remove(which.index(known.len()));
                        prop_assert!(queues.remove(gone.ticket).is_some());
                        prop_assert!(queues.remove(gone.ticket).is_none());
                    }
                    1 if !known.is_empty() => {
                        let at = which.index(known.len());
                        known[at].begun = true;
                        queues.begin(known[at].ticket);
                    }
                    _ => {
                        let (seat, size) = (seat(who), size(tokens));
                        match queues.make_room(&seat, &size, &most) {
                            Some(gone) => {
                                for key in gone {
                                    let at = known.iter().position(|it| it.key == key);
                                    let gone = known.swap_remove(at.expect("it waited"));
                                    prop_assert!(!gone.begun, "what has begun stays");
                                }
                                let key = key(number);
                                let queued = Queued { key: key.clone(), seat, size };
                                let ticket = queues.push(queued);
                                known.push(Known { ticket, tokens, key, begun: false });
                            }
                            None => prop_assert!(
                                known.len() == most.requests
                                    || queues.size().prompt_tokens + tokens > most.prompt_tokens
                            ),
                        }
                    }
                }
                let size = queues.size();
                prop_assert_eq!(size.requests, known.len());
                prop_assert_eq!(size.prompt_tokens, known.iter().map(|it| it.tokens).sum::<usize>());
                prop_assert!(size.requests <= most.requests);
                prop_assert!(size.prompt_tokens <= most.prompt_tokens);
                prop_assert_eq!(queues.all.len(), known.len());
            }
            for Known { ticket, .. } in known {
                queues.remove(ticket);
            }
            prop_assert_eq!(queues.size(), Size::default());
            prop_assert!(queues.tiers.values().all(|queue| queue.parts.is_empty() && queue.weight == 0));
        }
    }

    fn filled(queues: &mut Queues, who: u32, count: usize) -> Vec<RequestKey> {
        let keys: Vec<RequestKey> = (0..count).map(|i| key(100 * who as usize + i)).collect();
        for key in keys.clone() {
            queues.push(Queued { key, seat: seat(who), size: size(1) });
        }
        keys
    }

    #[test]
    fn full_queues_displace_newest_of_longest() {
        type Lengths = [(u32, usize); 3];
        let cases: &[(&str, Lengths, u32, Option<u32>)] = &[
            ("the longest", [(0, 5), (1, 3), (2, 2)], 2, Some(0)),
            ("nobody: its own is the longest", [(0, 5), (1, 3), (2, 2)], 0, None),
            ("nobody: its own would be as long", [(0, 4), (1, 3), (2, 3)], 1, None),
            ("the longest, for who has none", [(0, 4), (1, 3), (2, 3)], 3, Some(0)),
            ("batch work first", [(0, 8), (6, 1), (2, 1)], 0, Some(6)),
            ("no interactive work for batch work", [(0, 8), (1, 1), (2, 1)], 6, None),
            ("a pool is one line", [(4, 3), (5, 3), (0, 4)], 1, Some(5)),
            ("within a pool, the longer", [(4, 6), (5, 2), (0, 2)], 5, Some(4)),
            ("within a pool, its own", [(4, 6), (5, 2), (0, 2)], 4, None),
        ];
        for (name, lengths, newcomer, expected) in cases {
            let mut queues = Queues::default();
            let mut newest = BTreeMap::new();
            for &(who, count) in lengths {
                newest.insert(who, filled(&mut queues, who, count).pop());
            }
            let most = Size { requests: 10, prompt_tokens: 1_000, expected: DeviceNanos::ZERO };
            let gone = queues.make_room(&seat(*newcomer), &size(1), &most);
            let expected = expected.map(|who| newest[&who].iter().cloned().collect());
            assert_eq!(gone, expected, "{name}");
            assert_eq!(queues.size().requests, 10 - gone.map_or(0, |gone| gone.len()), "{name}");
        }
    }

    #[test]
    fn predicted_wait_is_own_queue_on_its_share() {
        let mut queues = Queues::default();
        filled(&mut queues, 0, 90); // weight 1
        filled(&mut queues, 1, 2); // weight 2
        for (who, expected_us) in [
            (3, 0),  // nothing of its own
            (1, 3),  // two of its own on two thirds
            (0, 92), // all there is
            (6, 92), // batch work waits for everything
        ] {
            assert_eq!(queues.predicted_wait(&seat(who)).as_micros(), expected_us, "{who}");
        }
    }
}
