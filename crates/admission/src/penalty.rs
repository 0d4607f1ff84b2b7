//! Penalties for repeated offences. A penalty is a wait that decays by itself.
//!
//! Each offender has a meter for each kind of offence (a generic cell rate algorithm). An
//! offence fills the meter, and time drains it at the free rate. One minute of the free
//! rate fits into the meter. The excess is the penalty, which ends when it has drained. An
//! offender that stops waits the penalty out; one that continues keeps it.
//!
//! Memory is bounded for any number of offenders: beyond a limit, new offenders share
//! meters. [`PenaltyBook::sweep`] forgets drained meters.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tollgate_domain::MonotonicTime;

/// Span of the free rate that fits into a meter.
const SPAN: Duration = Duration::from_secs(60);

/// The kinds of offence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Offence {
    /// Repeated requests sooner than `retry-after` allowed.
    Refusals,
    /// Credentials that do not authenticate.
    FailedAuthentication,
    /// Cancels of running or waiting requests.
    Cancels,
}

impl Offence {
    /// All kinds of offence.
    pub const ALL: [Self; 3] = [Self::Refusals, Self::FailedAuthentication, Self::Cancels];

    /// Returns the name for metrics and lists.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Refusals => "refusals",
            Self::FailedAuthentication => "failed_authentication",
            Self::Cancels => "cancels",
        }
    }
}

/// The limits from which offences become a penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PenaltyTerms {
    /// Free amount of each offence per minute, at least 1, each in its own unit. The order
    /// is that of [`Offence::ALL`].
    pub free_per_minute: [u64; Offence::ALL.len()],
    /// Longest penalty, counted from the last offence.
    pub longest: Duration,
}

/// A penalty in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalty {
    /// Offence that caused the penalty.
    pub offence: Offence,
    /// Remaining time, if no offence is added.
    pub left: Duration,
}

/// A penalty in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPenalty<K> {
    /// Offender that has the penalty.
    pub offender: K,
    /// Offence and remaining time.
    pub penalty: Penalty,
    /// Number of offences since the meter was last empty.
    pub offences: u64,
    /// Time of the first of these offences.
    pub since: MonotonicTime,
}

/// The result of counting one offence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Penalty for this kind of offence, if one is in force now.
    pub penalty: Option<Penalty>,
    /// True if the penalty started with this offence.
    pub began: bool,
}

/// The meters of all offenders of one kind.
#[derive(Debug)]
pub struct PenaltyBook<K> {
    terms: PenaltyTerms,
    most: usize,
    /// Maps an offender to the group whose meters it shares once there are `most`
    /// offenders. The number of groups must be bounded.
    crowd: fn(&K) -> K,
    meters: HashMap<K, [Option<Meter>; Offence::ALL.len()]>,
}

/// One meter of an offender.
#[derive(Clone, Copy, Debug)]
struct Meter {
    /// Time at which the meter will be empty.
    drained: MonotonicTime,
    since: MonotonicTime,
    offences: u64,
}

impl Meter {
    fn penalty(&self, now: MonotonicTime) -> Option<Duration> {
        // The first span of the meter is free.
        self.drained.since(now).checked_sub(SPAN).filter(|left| !left.is_zero())
    }
}

impl<K: Clone + Eq + Hash> PenaltyBook<K> {
    /// Creates an empty book. It tells `most` offenders apart; further ones share the
    /// meters of their `crowd`.
    pub fn new(terms: PenaltyTerms, most: usize, crowd: fn(&K) -> K) -> Self {
        Self { terms, most, crowd, meters: HashMap::new() }
    }

    /// Replaces the terms for offences from now on. Meters keep their level.
    pub fn set_terms(&mut self, terms: PenaltyTerms) {
        self.terms = terms;
    }

    /// Counts an offence of the given weight, in units of the free amount.
    pub fn count(
        &mut self,
        now: MonotonicTime,
        offender: &K,
        offence: Offence,
        weight: u64,
    ) -> Counted {
        // At least 1, because the weight is divided by it.
        let free = self.terms.free_per_minute[offence as usize].max(1);
        let weight = SPAN.as_nanos().saturating_mul(weight.into()) / u128::from(free);
        let weight = Duration::from_nanos(u64::try_from(weight).unwrap_or(u64::MAX));
        // The cap on the level bounds the penalty: an attack cannot lock an offender out
        // for hours.
        let fullest = now.after(SPAN).after(self.terms.longest);
        // A known offender keeps its own meters, even if the book is full.
        let place = if self.meters.len() >= self.most && !self.meters.contains_key(offender) {
            (self.crowd)(offender)
        } else {
            offender.clone()
        };
        let meter = &mut self.meters.entry(place).or_default()[offence as usize];
        let held = meter.and_then(|meter| meter.penalty(now)).is_some();
        // A drained meter starts anew, with a new count and start.
        let old = meter.filter(|meter| meter.drained > now);
        let counted = Meter {
            drained: old.map_or(now, |old| old.drained).after(weight).min(fullest),
            since: old.map_or(now, |old| old.since),
            offences: old.map_or(0, |old| old.offences).saturating_add(1),
        };
        *meter = Some(counted);
        let penalty = counted.penalty(now).map(|left| Penalty { offence, left });
        // `began` is true only once for each penalty, so that callers can log it once.
        Counted { penalty, began: penalty.is_some() && !held }
    }

    /// Returns the offender's penalty that lasts longest, if any is in force.
    pub fn penalty(&self, now: MonotonicTime, offender: &K) -> Option<Penalty> {
        let meters = self.meters.get(offender).or_else(|| {
            // Only a full book uses shared meters.
            (!self.meters.is_empty()).then(|| self.meters.get(&(self.crowd)(offender))).flatten()
        })?;
        held(meters, now).map(|(penalty, _)| penalty).max_by_key(|penalty| penalty.left)
    }

    /// Returns up to `most` penalties in force, longest first.
    pub fn list(&self, now: MonotonicTime, most: usize) -> Vec<ListedPenalty<K>> {
        let of = |(offender, meters)| listed(now, offender, meters);
        let mut listed: Vec<ListedPenalty<K>> = self.meters.iter().flat_map(of).collect();
        // The longest come first, so that the cut drops the shortest ones.
        listed.sort_by_key(|listed| std::cmp::Reverse(listed.penalty.left));
        listed.truncate(most);
        listed
    }

    /// Returns the penalties in force that [`Self::lift`] would remove.
    pub fn list_of(&self, now: MonotonicTime, offender: &K) -> Vec<ListedPenalty<K>> {
        let own = self.meters.get_key_value(offender).into_iter();
        own.flat_map(|(offender, meters)| listed(now, offender, meters)).collect()
    }

    /// Returns the number of penalties in force by offence, in the order of [`Offence::ALL`].
    pub fn held(&self, now: MonotonicTime) -> [usize; Offence::ALL.len()] {
        let mut counts = [0; Offence::ALL.len()];
        for (penalty, _) in self.meters.values().flat_map(|meters| held(meters, now)) {
            counts[penalty.offence as usize] += 1;
        }
        counts
    }

    /// Removes all penalties of `offender`. Returns the number of penalties that were in
    /// force.
    pub fn lift(&mut self, now: MonotonicTime, offender: &K) -> usize {
        self.meters.remove(offender).map_or(0, |meters| held(&meters, now).count())
    }

    /// Forgets drained meters. Call this about once a second.
    pub fn sweep(&mut self, now: MonotonicTime) {
        self.meters.retain(|_, meters| {
            for meter in meters.iter_mut() {
                *meter = meter.filter(|meter| meter.drained > now);
            }
            meters.iter().any(Option::is_some)
        });
        // After an attack the memory is returned.
        if self.meters.capacity() > 1_024 && self.meters.len() < self.meters.capacity() / 8 {
            self.meters.shrink_to_fit();
        }
    }

    /// Returns the number of remembered offenders.
    pub fn len(&self) -> usize {
        self.meters.len()
    }

    /// Returns true if no offender is remembered.
    pub fn is_empty(&self) -> bool {
        self.meters.is_empty()
    }
}

fn listed<K: Clone>(
    now: MonotonicTime,
    offender: &K,
    meters: &[Option<Meter>; Offence::ALL.len()],
) -> impl Iterator<Item = ListedPenalty<K>> {
    held(meters, now).map(|(penalty, meter)| ListedPenalty {
        offender: offender.clone(),
        penalty,
        offences: meter.offences,
        since: meter.since,
    })
}

fn held(
    meters: &[Option<Meter>; Offence::ALL.len()],
    now: MonotonicTime,
) -> impl Iterator<Item = (Penalty, Meter)> {
    Offence::ALL.into_iter().filter_map(move |offence| {
        let meter = meters[offence as usize]?;
        Some((Penalty { offence, left: meter.penalty(now)? }, meter))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONGEST: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    fn book(free: u64, most: usize) -> PenaltyBook<u32> {
        let terms = PenaltyTerms { free_per_minute: [free; 3], longest: LONGEST };
        PenaltyBook::new(terms, most, |offender| offender % 16 + 1_000_000)
    }

    #[test]
    fn penalty_starts_above_free_rate_and_decays() {
        let mut book = book(60, 10);
        for _ in 0..60 {
            assert_eq!(book.count(at(0), &1, Offence::Cancels, 1).penalty, None);
        }
        let second = Penalty { offence: Offence::Cancels, left: Duration::from_secs(1) };
        let counted = book.count(at(0), &1, Offence::Cancels, 1);
        assert_eq!(counted, Counted { penalty: Some(second), began: true });
        assert!(!book.count(at(0), &1, Offence::Cancels, 1).began, "it held already");
        assert_eq!(book.penalty(at(1), &1), Some(second));
        assert_eq!(book.penalty(at(2), &1), None);
        assert_eq!(book.penalty(at(0), &2), None, "another's");
        for _ in 0..10_000 {
            book.count(at(2), &1, Offence::Cancels, 1);
        }
        let most = Penalty { offence: Offence::Cancels, left: LONGEST };
        assert_eq!(book.penalty(at(2), &1), Some(most));
        assert_eq!(book.penalty(at(62), &1), None);
        book.sweep(at(121));
        assert_eq!(book.len(), 1);
        book.sweep(at(122));
        assert!(book.is_empty());
    }

    #[test]
    fn penalty_book_reports_longest_lists_and_lifts_all() {
        let mut book = book(1, 10);
        for _ in 0..3 {
            book.count(at(5), &1, Offence::Cancels, 1);
        }
        book.count(at(6), &1, Offence::Refusals, 2);
        book.count(at(6), &2, Offence::Refusals, 1);
        let longest = Penalty { offence: Offence::Refusals, left: LONGEST };
        assert_eq!(book.penalty(at(6), &1), Some(longest));
        let listed = book.list(at(6), 10);
        let found: Vec<_> =
            listed.iter().map(|l| (l.offender, l.penalty.offence, l.offences, l.since)).collect();
        assert_eq!(
            found,
            [(1, Offence::Refusals, 1, at(6)), (1, Offence::Cancels, 3, at(5))],
            "offender 2 is within what is free"
        );
        assert_eq!(book.list(at(6), 1).len(), 1);
        assert_eq!((book.list_of(at(6), &1), book.list_of(at(6), &2)), (listed, Vec::new()));
        assert_eq!(book.held(at(6)), [1, 0, 1]);
        assert_eq!(book.lift(at(6), &1), 2);
        assert_eq!(book.penalty(at(6), &1), None);
        assert_eq!(book.lift(at(6), &1), 0);
    }

    /// Checks that the number of meters is bounded for any number of offenders, and that
    /// offenders in one group share its penalty.
    #[test]
    fn penalty_book_bounds_its_memory() {
        let mut book = book(1, 100);
        for offender in 0..100_000 {
            book.count(at(1), &offender, Offence::FailedAuthentication, 1);
        }
        assert!(book.len() <= 116, "{}", book.len());
        assert!(book.penalty(at(1), &99_999).is_some(), "its crowd has offended");
        assert_eq!(book.penalty(at(1), &5), None, "one offence is free");
        book.sweep(at(1_000));
        assert!(book.is_empty());
    }

    proptest! {
        /// Uses Little's law: `clients` that wait as told weigh at most `clients` times the
        /// elapsed time, plus one wait each. If that much is free, a client that waits is
        /// never penalised.
        #[test]
        fn penalties_ignore_clients_that_wait(
            waits in prop::collection::vec(prop::collection::vec(100u64..60_000, 1..40), 1..20),
        ) {
            let clients = waits.len() as u64;
            let mut arrivals: Vec<(u64, u64)> = Vec::new();
            for waits in &waits {
                let mut now = 0;
                for &wait in waits {
                    arrivals.push((now, wait));
                    now += wait;
                }
            }
            arrivals.sort_unstable();
            let mut book = book(clients * 60_000, 10);
            for (millis, wait) in arrivals {
                let now = MonotonicTime(millis * 1_000_000);
                let counted = book.count(now, &1, Offence::Refusals, wait);
                prop_assert_eq!(counted.penalty, None);
            }
        }

        /// Checks that a client that comes four times as often as told is penalised within
        /// about a minute.
        #[test]
        fn penalties_hit_clients_that_do_not_wait(wait in 100u64..10_000) {
            let mut book = book(60_000, 10);
            let mut penalised = false;
            for request in 0..(4 * 60_000 / wait) {
                let now = MonotonicTime(request * wait / 4 * 1_000_000);
                penalised |= book.count(now, &1, Offence::Refusals, wait).penalty.is_some();
            }
            prop_assert!(penalised);
        }
    }
}
