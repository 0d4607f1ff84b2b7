//! Whether a worker process should be ended and started again: nothing is
//! heard of it, or it has said what cannot be true. Decided as data; the
//! supervisor looks twice a second and acts.
//!
//! Silence counts only as far as we were awake to listen: where the whole
//! machine stood still, nobody is to blame.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_gateway::upstream::Heard;

/// What the gateway knows of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// What was last heard of it.
    pub heard: Option<Heard>,
    /// Whether it gets no requests because it lied.
    pub distrusted: bool,
}

/// How long a worker may be silent.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Once it was heard.
    pub silence: Duration,
    /// Until it is heard for the first time.
    pub start: Duration,
}

/// What to do about a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Well,
    /// Kill it: it has been silent for so long.
    Silent(Duration),
    /// End it: what it says is not believed any more.
    Lied,
}

/// One process, from its start.
#[derive(Debug)]
pub struct Watch {
    patience: Patience,
    /// What had been heard of the process before it.
    before: Option<Heard>,
    last: Option<Heard>,
    quiet: Duration,
    looked: Instant,
}

impl Watch {
    /// Of a process that starts now.
    pub fn new(patience: Patience, signs: Signs, now: Instant) -> Self {
        Self { patience, before: signs.heard, last: None, quiet: Duration::ZERO, looked: now }
    }

    /// Looks again. `may_restart` says whether a liar may be started anew.
    pub fn look(&mut self, signs: Signs, may_restart: bool, now: Instant) -> Verdict {
        let since = now.saturating_duration_since(self.looked).min(LONGEST_LOOK);
        self.looked = now;
        // What comes late of the process before it is no sign of this one.
        let same_life = |heard: &Heard| self.before.is_some_and(|old| old.epoch == heard.epoch);
        let heard = signs.heard.filter(|heard| !same_life(heard));
        if heard != self.last {
            (self.last, self.quiet) = (heard, Duration::ZERO);
        } else {
            self.quiet += since;
        }
        let patience = match self.last {
            Some(_) => self.patience.silence,
            None => self.patience.start,
        };
        if self.quiet >= patience {
            Verdict::Silent(self.quiet)
        } else if heard.is_some() && signs.distrusted && may_restart {
            Verdict::Lied
        } else {
            Verdict::Well
        }
    }
}

/// How often a worker was started anew because it had lied.
#[derive(Debug, Default)]
pub struct Pardons {
    given: VecDeque<Instant>,
}

impl Pardons {
    /// Whether there is one left.
    pub fn are_left(&self, now: Instant) -> bool {
        let of_late = |at: &&Instant| now.saturating_duration_since(**at) < PARDONED_WITHIN;
        self.given.iter().filter(of_late).count() < MOST_PARDONS
    }

    /// Gives one.
    pub fn give(&mut self, now: Instant) {
        if self.given.len() >= MOST_PARDONS {
            self.given.pop_front();
        }
        self.given.push_back(now);
    }
}

/// How often a worker is looked at.
pub const LOOK_EVERY: Duration = Duration::from_millis(500);
/// What a look may count at most: it came late because nothing ran.
const LONGEST_LOOK: Duration = Duration::from_secs(1);
/// So many lies are pardoned by a new start ...
const MOST_PARDONS: usize = 3;
/// ... within this time. Beyond that the host wants a person's eye.
const PARDONED_WITHIN: Duration = Duration::from_secs(3_600);

#[cfg(test)]
mod tests {
    use tollgate_domain::WorkerEpoch;

    use super::*;

    const PATIENCE: Patience =
        Patience { silence: Duration::from_secs(3), start: Duration::from_secs(10) };

    fn signs(epoch: u128, times: u64) -> Signs {
        Signs { heard: Some(Heard { epoch: WorkerEpoch(epoch), times }), distrusted: false }
    }

    /// Looks every half second at what `signs` says; the look at which it is
    /// no longer well, and why.
    fn first_verdict(watch: &mut Watch, signs: impl Fn(u64) -> Signs) -> Option<(u64, Verdict)> {
        (1..200).find_map(|look| {
            let now = watch.looked + LOOK_EVERY;
            let verdict = watch.look(signs(look), true, now);
            (verdict != Verdict::Well).then_some((look, verdict))
        })
    }

    #[tokio::test]
    async fn who_falls_silent_is_killed() {
        let mut watch = Watch::new(PATIENCE, Signs::default(), Instant::now());
        let quiet = Verdict::Silent(PATIENCE.silence);
        // Heard nine times, the last at the ninth look.
        assert_eq!(first_verdict(&mut watch, |look| signs(1, look.min(9))), Some((15, quiet)));
        let mut watch = Watch::new(PATIENCE, Signs::default(), Instant::now());
        assert_eq!(first_verdict(&mut watch, |look| signs(1, look / 2)), None);
    }

    /// A model that takes long to load is not silence, and neither is what was
    /// heard of the process before.
    #[tokio::test]
    async fn a_start_has_its_own_patience() {
        let mut watch = Watch::new(PATIENCE, signs(1, 7), Instant::now());
        let late = Verdict::Silent(PATIENCE.start);
        assert_eq!(first_verdict(&mut watch, |_| signs(1, 8)), Some((20, late)));
    }

    #[tokio::test]
    async fn time_in_which_we_slept_is_no_silence() {
        let now = Instant::now();
        let mut watch = Watch::new(PATIENCE, Signs::default(), now);
        watch.look(signs(1, 1), true, now);
        let much_later = now + Duration::from_secs(7_200);
        assert_eq!(watch.look(signs(1, 1), true, much_later), Verdict::Well);
    }

    #[tokio::test]
    async fn a_liar_is_pardoned_three_times_an_hour() {
        let now = Instant::now();
        let mut watch = Watch::new(PATIENCE, signs(1, 9), now);
        let lied = |epoch| Signs { distrusted: true, ..signs(epoch, 1) };
        // The one before had lied, too: that is not this one's.
        assert_eq!(watch.look(lied(1), true, now), Verdict::Well);
        assert_eq!(watch.look(lied(2), false, now), Verdict::Well);
        assert_eq!(watch.look(lied(2), true, now), Verdict::Lied);
        let mut pardons = Pardons::default();
        for minutes in 0..3 {
            let now = now + Duration::from_secs(60 * minutes);
            assert!(pardons.are_left(now));
            pardons.give(now);
        }
        assert!(!pardons.are_left(now + Duration::from_secs(3_599)));
        assert!(pardons.are_left(now + Duration::from_secs(3_601)));
    }
}
