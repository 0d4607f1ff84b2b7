//! The choice of the gateway that records the journal, among those that read it. Pure, given the
//! time.

use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::WorkerEpoch;

/// Time without an acknowledgement after which another gateway records the journal.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which a gateway that acknowledged nothing is not chosen again.
const REST: Duration = Duration::from_secs(30);

/// One stream of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReaderId(u64);

/// A block's place in the journal.
pub(crate) type Place = (WorkerEpoch, u64);

/// The streams on which gateways read the journal. One of them records it.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    readers: Vec<Reader>,
    joined: u64,
    recorder: Option<ReaderId>,
    /// The last block that the recorder was sent, if it is not acknowledged.
    unanswered: Option<Place>,
    /// The time of the last acknowledgement, or of the block after which none came.
    waiting_since: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Reader {
    id: ReaderId,
    rank: u64,
    /// The end of the time in which the reader is not chosen.
    rests_until: Option<Instant>,
}

impl Roster {
    /// Adds a reader. Of those that are well, the one with the highest rank records; of two with
    /// one rank, the newer: the older one may be a connection that has ended unseen.
    pub(crate) fn join(&mut self, rank: u64, now: Instant) -> ReaderId {
        let id = ReaderId(self.joined);
        self.joined += 1;
        self.readers.push(Reader { id, rank, rests_until: None });
        self.choose(now);
        id
    }

    /// Removes a reader.
    pub(crate) fn leave(&mut self, id: ReaderId, now: Instant) {
        self.readers.retain(|reader| reader.id != id);
        self.choose(now);
    }

    /// Returns the reader that records the journal; `None` if there is none.
    pub(crate) fn recorder(&self) -> Option<ReaderId> {
        self.recorder
    }

    /// Returns the number of readers.
    pub(crate) fn len(&self) -> usize {
        self.readers.len()
    }

    /// Notes that a block goes out to `reader`.
    pub(crate) fn sent(&mut self, reader: ReaderId, place: Place, now: Instant) {
        if self.recorder == Some(reader) {
            self.unanswered = Some(place);
            self.waiting_since.get_or_insert(now);
        }
    }

    /// Notes an acknowledgement, of whichever reader.
    pub(crate) fn acknowledged(&mut self, place: Place, now: Instant) {
        if self.unanswered == Some(place) {
            (self.unanswered, self.waiting_since) = (None, None);
        } else if self.waiting_since.is_some() {
            self.waiting_since = Some(now);
        }
    }

    /// Chooses another recorder if this one has acknowledged nothing for too long. Returns true
    /// if it did.
    pub(crate) fn judge(&mut self, now: Instant) -> bool {
        let is_late = self.waiting_since.is_some_and(|since| now - since >= PATIENCE);
        let before = self.recorder;
        if let Some(recorder) = before.filter(|_| is_late) {
            let late = self.readers.iter_mut().find(|reader| reader.id == recorder);
            if let Some(late) = late {
                late.rests_until = Some(now + REST);
            }
            self.choose(now);
        }
        self.recorder != before
    }

    fn choose(&mut self, now: Instant) {
        let is_well = |reader: &&Reader| reader.rests_until.is_none_or(|until| until <= now);
        let best = |readers: &mut dyn Iterator<Item = &Reader>| {
            readers.max_by_key(|reader| (reader.rank, reader.id)).map(|reader| reader.id)
        };
        let is_here = |id: &ReaderId| self.readers.iter().any(|reader| reader.id == *id);
        // While none is well the choice stays: a database that is away is away for all.
        let chosen = best(&mut self.readers.iter().filter(is_well))
            .or_else(|| self.recorder.filter(is_here))
            .or_else(|| best(&mut self.readers.iter()));
        if chosen != self.recorder {
            self.recorder = chosen;
            (self.unanswered, self.waiting_since) = (None, None);
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EPOCH: WorkerEpoch = WorkerEpoch(7);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn roster_chooses_the_highest_rank_and_newest_stream() {
        let (mut roster, now) = (Roster::default(), Instant::now());
        assert_eq!(roster.recorder(), None);
        let low = roster.join(1, now);
        assert_eq!(roster.recorder(), Some(low));
        let high = roster.join(9, now);
        let again = roster.join(9, now);
        assert_eq!(roster.recorder(), Some(again));
        roster.leave(again, now);
        assert_eq!(roster.recorder(), Some(high));
        roster.leave(high, now);
        assert_eq!((roster.recorder(), roster.len()), (Some(low), 1));
        roster.leave(low, now);
        assert_eq!(roster.recorder(), None);
    }

    #[test]
    fn roster_replaces_a_recorder_that_is_silent() {
        let (mut roster, now) = (Roster::default(), Instant::now());
        let (low, high) = (roster.join(1, now), roster.join(9, now));
        roster.sent(high, (EPOCH, 1), now);
        roster.sent(high, (EPOCH, 2), now + seconds(4));
        assert!(!roster.judge(now + seconds(4)));
        roster.acknowledged((EPOCH, 1), now + seconds(4));
        assert!(!roster.judge(now + seconds(8)), "it has acknowledged a block 4 s ago");
        assert!(roster.judge(now + seconds(9)));
        assert_eq!(roster.recorder(), Some(low));
        assert!(!roster.judge(now + seconds(20)), "nothing was sent to the new one");
        roster.sent(low, (EPOCH, 2), now + seconds(20));
        assert!(!roster.judge(now + seconds(26)), "the other one still rests");
        roster.acknowledged((EPOCH, 2), now + seconds(27));
        roster.sent(low, (EPOCH, 3), now + seconds(40));
        assert!(roster.judge(now + seconds(46)));
        assert_eq!(roster.recorder(), Some(high), "it has rested");
    }

    #[test]
    fn roster_waits_for_no_answer_to_nothing() {
        let (mut roster, now) = (Roster::default(), Instant::now());
        let (_, high) = (roster.join(1, now), roster.join(9, now));
        roster.sent(high, (EPOCH, 1), now);
        roster.acknowledged((EPOCH, 1), now + seconds(1));
        assert!(!roster.judge(now + seconds(100)));
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Join(u64),
        Leave(usize),
        Sent(u64),
        Acknowledged(u64),
        Judge,
    }

    fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
        let event = prop_oneof![
            (0..4_u64).prop_map(Event::Join),
            (0..4_usize).prop_map(Event::Leave),
            (1..20_u64).prop_map(Event::Sent),
            (1..20_u64).prop_map(Event::Acknowledged),
            Just(Event::Judge),
        ];
        prop::collection::vec((0..7_u64, event), 1..80)
    }

    proptest! {
        #[test]
        fn roster_always_has_a_recorder_that_reads(events in events()) {
            let (mut roster, mut now) = (Roster::default(), Instant::now());
            let mut readers: Vec<ReaderId> = Vec::new();
            for (passed, event) in events {
                now += seconds(passed);
                match event {
                    Event::Join(rank) => readers.push(roster.join(rank, now)),
                    Event::Leave(at) if at < readers.len() => roster.leave(readers.remove(at), now),
                    Event::Leave(_) => {}
                    Event::Sent(number) => {
                        if let Some(recorder) = roster.recorder() {
                            roster.sent(recorder, (EPOCH, number), now);
                        }
                    }
                    Event::Acknowledged(number) => roster.acknowledged((EPOCH, number), now),
                    Event::Judge => {
                        let (before, late) = (roster.recorder(), roster.waiting_since);
                        if roster.judge(now) {
                            let late = late.expect("it waited");
                            prop_assert!(now - late >= PATIENCE && before.is_some());
                        }
                    }
                }
                prop_assert_eq!(roster.len(), readers.len());
                match roster.recorder() {
                    Some(recorder) => prop_assert!(readers.contains(&recorder)),
                    None => prop_assert!(readers.is_empty()),
                }
            }
        }
    }
}
