//! What repeated offences earn: a wait that decays by itself.
//!
//! Each offender has a meter for each offence (a generic cell rate algorithm):
//! an offence fills it, time drains it at the rate that is free. One minute's
//! worth of what is free fits in; what is beyond is the penalty, which is over
//! when it has drained. Who stops, waits it out; who goes on, keeps it.
//!
//! Memory is bounded whatever offenders there are: beyond a number of them new
//! ones share meters, and [`PenaltyBook::sweep`] forgets what has drained.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tollgate_domain::MonotonicTime;

/// What is free fits into a meter for so long.
const SPAN: Duration = Duration::from_secs(60);

/// What a penalty is earned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Offence {
    /// Coming back sooner than one was told to, again and again.
    Refusals,
    /// Showing credentials that do not authenticate.
    FailedAuthentication,
    /// Cancelling requests that run or wait.
    Cancels,
}

impl Offence {
    /// Every offence.
    pub const ALL: [Self; 3] = [Self::Refusals, Self::FailedAuthentication, Self::Cancels];

    /// A word for metrics and lists.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Refusals => "refusals",
            Self::FailedAuthentication => "failed_authentication",
            Self::Cancels => "cancels",
        }
    }
}

/// When offences become a penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PenaltyTerms {
    /// How much of each offence is free in a minute, in units of its own (the
    /// order is that of [`Offence::ALL`]); at least 1.
    pub free_per_minute: [u64; Offence::ALL.len()],
    /// No penalty lasts longer after the last offence.
    pub longest: Duration,
}

/// A penalty that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalty {
    /// What it was earned with.
    pub offence: Offence,
    /// How long it still holds if nothing is added to it.
    pub left: Duration,
}

/// A penalty as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPenalty<K> {
    /// Whose it is.
    pub offender: K,
    /// What, and for how long.
    pub penalty: Penalty,
    /// Offences since the meter was last empty.
    pub offences: u64,
    /// When the first of them was.
    pub since: MonotonicTime,
}

/// What one more offence did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The penalty for it that holds now, if one does.
    pub penalty: Option<Penalty>,
    /// Whether it holds only since this offence.
    pub began: bool,
}

/// The meters of all offenders of one kind.
#[derive(Debug)]
pub struct PenaltyBook<K> {
    terms: PenaltyTerms,
    most: usize,
    /// Whose meters a new offender shares once there are `most`. What it
    /// returns must be bounded in number.
    crowd: fn(&K) -> K,
    meters: HashMap<K, [Option<Meter>; Offence::ALL.len()]>,
}

#[derive(Clone, Copy, Debug)]
struct Meter {
    /// When it will have drained.
    drained: MonotonicTime,
    since: MonotonicTime,
    offences: u64,
}

impl Meter {
    fn penalty(&self, now: MonotonicTime) -> Option<Duration> {
        self.drained.since(now).checked_sub(SPAN).filter(|left| !left.is_zero())
    }
}

impl<K: Clone + Eq + Hash> PenaltyBook<K> {
    /// A book without offenders, which tells `most` of them apart and lets
    /// the others share the meters of their `crowd`.
    pub fn new(terms: PenaltyTerms, most: usize, crowd: fn(&K) -> K) -> Self {
        Self { terms, most, crowd, meters: HashMap::new() }
    }

    /// Enters an offence that weighs `weight` of what is free in a minute.
    pub fn count(
        &mut self,
        now: MonotonicTime,
        offender: &K,
        offence: Offence,
        weight: u64,
    ) -> Counted {
        let free = self.terms.free_per_minute[offence as usize].max(1);
        let weight = SPAN.as_nanos().saturating_mul(weight.into()) / u128::from(free);
        let weight = Duration::from_nanos(u64::try_from(weight).unwrap_or(u64::MAX));
        let fullest = now.after(SPAN).after(self.terms.longest);
        let place = if self.meters.len() >= self.most && !self.meters.contains_key(offender) {
            (self.crowd)(offender)
        } else {
            offender.clone()
        };
        let meter = &mut self.meters.entry(place).or_default()[offence as usize];
        let held = meter.and_then(|meter| meter.penalty(now)).is_some();
        let old = meter.filter(|meter| meter.drained > now);
        let counted = Meter {
            drained: old.map_or(now, |old| old.drained).after(weight).min(fullest),
            since: old.map_or(now, |old| old.since),
            offences: old.map_or(0, |old| old.offences).saturating_add(1),
        };
        *meter = Some(counted);
        let penalty = counted.penalty(now).map(|left| Penalty { offence, left });
        Counted { penalty, began: penalty.is_some() && !held }
    }

    /// The penalty of `offender` that holds longest, if one does.
    pub fn penalty(&self, now: MonotonicTime, offender: &K) -> Option<Penalty> {
        let meters = self.meters.get(offender).or_else(|| {
            // Only a full book has put anyone into a crowd.
            (!self.meters.is_empty()).then(|| self.meters.get(&(self.crowd)(offender))).flatten()
        })?;
        held(meters, now).map(|(penalty, _)| penalty).max_by_key(|penalty| penalty.left)
    }

    /// The penalties that hold, the longest first, `most` at most.
    pub fn list(&self, now: MonotonicTime, most: usize) -> Vec<ListedPenalty<K>> {
        let mut listed: Vec<ListedPenalty<K>> = self
            .meters
            .iter()
            .flat_map(|(offender, meters)| {
                held(meters, now).map(|(penalty, meter)| ListedPenalty {
                    offender: offender.clone(),
                    penalty,
                    offences: meter.offences,
                    since: meter.since,
                })
            })
            .collect();
        listed.sort_by_key(|listed| std::cmp::Reverse(listed.penalty.left));
        listed.truncate(most);
        listed
    }

    /// Takes away what `offender` has earned; how many penalties held.
    pub fn lift(&mut self, now: MonotonicTime, offender: &K) -> usize {
        self.meters.remove(offender).map_or(0, |meters| held(&meters, now).count())
    }

    /// Forgets what has drained; call it about once a second.
    pub fn sweep(&mut self, now: MonotonicTime) {
        self.meters.retain(|_, meters| {
            for meter in meters.iter_mut() {
                *meter = meter.filter(|meter| meter.drained > now);
            }
            meters.iter().any(Option::is_some)
        });
        // A storm that is over gives its memory back.
        if self.meters.capacity() > 1_024 && self.meters.len() < self.meters.capacity() / 8 {
            self.meters.shrink_to_fit();
        }
    }

    /// How many offenders are remembered.
    pub fn len(&self) -> usize {
        self.meters.len()
    }

    /// Whether nobody has offended of late.
    pub fn is_empty(&self) -> bool {
        self.meters.is_empty()
    }
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
    fn a_rate_is_free_and_what_is_beyond_decays() {
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
    fn the_longest_is_told_and_all_are_listed_and_lifted() {
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
        assert_eq!(book.lift(at(6), &1), 2);
        assert_eq!(book.penalty(at(6), &1), None);
        assert_eq!(book.lift(at(6), &1), 0);
    }

    /// However many offenders there are, the meters are bounded, and who shares
    /// one shares its penalty.
    #[test]
    fn memory_is_bounded() {
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
        /// Little's law: `clients` that each wait as they are told weigh at most
        /// `clients` times the time that has passed, and one wait of each before.
        /// So where that many are free, whoever waits is never penalised.
        #[test]
        fn who_waits_as_told_is_never_penalised(
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

        /// Who comes four times as often as told is penalised within the minute
        /// or soon after.
        #[test]
        fn who_does_not_wait_is_penalised(wait in 100u64..10_000) {
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
