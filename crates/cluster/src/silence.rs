//! The gateways of which one gateway has heard nothing for long. Pure, given the time.

use std::collections::BTreeMap;
use std::time::Duration;

/// Silence after which a gateway certainly uses nothing of its slices any more: they serve for 90 s
/// after the database's last answer.
const LOST: Duration = Duration::from_secs(100);
/// The longest time between two looks. After a longer one the others may not have been able to
/// beat meanwhile.
const LOOKS: Duration = Duration::from_secs(5);

/// The beats of other gateways, as this one has read them. No two clocks are compared: a beat is
/// only known to be another one than before.
#[derive(Clone, Debug, Default)]
pub struct Silence {
    /// The newest beat of each gateway and the time when it was first read, by number.
    heard: BTreeMap<u32, (u64, Duration)>,
    looked: Option<Duration>,
}

impl Silence {
    /// Notes the beats of the gateways that have not stopped, by their numbers, as the database
    /// tells them at `now`. Returns the numbers of those that are lost: the database has answered
    /// all the time, and has got no new beat of them.
    pub fn look(&mut self, now: Duration, beats: &[(u32, u64)]) -> Vec<u32> {
        let is_late = self.looked.is_none_or(|looked| now.saturating_sub(looked) > LOOKS);
        self.looked = Some(now);
        let before = std::mem::take(&mut self.heard);
        let mut lost = Vec::new();
        for (number, beat) in beats {
            let known = before.get(number).filter(|(known, _)| known == beat && !is_late);
            let since = known.map_or(now, |(_, since)| *since);
            self.heard.insert(*number, (*beat, since));
            if now.saturating_sub(since) >= LOST {
                lost.push(*number);
            }
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Looks once a second from `from` to `to`, and returns what the last look found.
    fn look(silence: &mut Silence, from: u64, to: u64, beat: impl Fn(u64) -> u64) -> Vec<u32> {
        let looks = (from..=to).map(|at| silence.look(seconds(at), &[(7, beat(at))]));
        looks.last().expect("one look")
    }

    #[test]
    fn silence_of_a_hundred_seconds_is_a_loss() {
        let mut silence = Silence::default();
        assert_eq!(look(&mut silence, 0, 99, |_| 5), []);
        assert_eq!(look(&mut silence, 100, 100, |_| 5), [7]);
        assert_eq!(look(&mut silence, 101, 101, |_| 6), [], "it beats again");
        assert_eq!(look(&mut silence, 102, 400, |at| at / 90), []);
    }

    #[test]
    fn silence_does_not_count_without_the_database() {
        let mut silence = Silence::default();
        assert_eq!(look(&mut silence, 0, 90, |_| 5), []);
        // No answer for a while: the others could not beat either.
        assert_eq!(look(&mut silence, 96, 195, |_| 5), []);
        assert_eq!(look(&mut silence, 196, 196, |_| 5), [7]);
    }

    #[test]
    fn silence_needs_no_clock_of_the_database() {
        let mut silence = Silence::default();
        // Its clock goes back by an hour; each beat is new all the same.
        assert_eq!(look(&mut silence, 0, 300, |at| 10_000 - at), []);
    }

    #[test]
    fn silence_forgets_gateways_that_stop() {
        let mut silence = Silence::default();
        assert_eq!(look(&mut silence, 0, 99, |_| 5), []);
        assert_eq!(silence.look(seconds(99), &[]), []);
        assert_eq!(look(&mut silence, 100, 100, |_| 5), []);
    }
}
