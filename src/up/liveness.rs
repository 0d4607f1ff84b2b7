//! The decision to end and restart a worker process: because the gateway
//! receives no heartbeats, or because it rejected the worker's reports. The
//! decision is returned as data; the supervisor asks twice a second and acts.
//!
//! Silence counts only for the time in which this process itself ran. If the
//! whole machine was suspended, no worker is at fault.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_gateway::workers::Heartbeat;

/// The gateway's knowledge of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heartbeats {
    /// The worker's last heartbeat.
    pub last: Option<Heartbeat>,
    /// True if the gateway sends no requests, because a report was invalid.
    pub distrusted: bool,
}

/// The longest silence of a worker that is allowed.
#[derive(Clone, Copy, Debug)]
pub struct SilenceTimeouts {
    /// After the first heartbeat.
    pub running: Duration,
    /// Before the first heartbeat, while the worker loads its model.
    pub start: Duration,
}

/// A decision about a worker process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Leave the process alone.
    Alive,
    /// Kill the process: it was silent for this long.
    Silent(Duration),
    /// End the process: the gateway no longer accepts its reports.
    Distrusted,
}

/// The state of one process, from its start.
#[derive(Debug)]
pub struct Watch {
    timeouts: SilenceTimeouts,
    /// The last heartbeat of the process before this one.
    before: Option<Heartbeat>,
    last: Option<Heartbeat>,
    quiet: Duration,
    checked: Instant,
}

impl Watch {
    /// Begins to watch a process that starts now.
    pub fn new(timeouts: SilenceTimeouts, heartbeats: Heartbeats, now: Instant) -> Self {
        let quiet = Duration::ZERO;
        Self { timeouts, before: heartbeats.last, last: None, quiet, checked: now }
    }

    /// Returns the decision at `now`. `may_restart` says if a worker with an
    /// invalid report may be restarted.
    pub fn check(&mut self, heartbeats: Heartbeats, may_restart: bool, now: Instant) -> Verdict {
        let since = now.saturating_duration_since(self.checked).min(LONGEST_CHECK);
        self.checked = now;
        // A late heartbeat of the previous process says nothing about this one.
        let is_previous =
            |heard: &Heartbeat| self.before.is_some_and(|old| old.epoch == heard.epoch);
        let last = heartbeats.last.filter(|heard| !is_previous(heard));
        if last != self.last {
            (self.last, self.quiet) = (last, Duration::ZERO);
        } else {
            self.quiet += since;
        }
        let timeout = match self.last {
            Some(_) => self.timeouts.running,
            None => self.timeouts.start,
        };
        // Before the first heartbeat of this process, the distrust is about the
        // previous one.
        if self.quiet >= timeout {
            Verdict::Silent(self.quiet)
        } else if last.is_some() && heartbeats.distrusted && may_restart {
            Verdict::Distrusted
        } else {
            Verdict::Alive
        }
    }
}

/// The restarts of a worker after invalid reports, bounded in a time window.
#[derive(Debug, Default)]
pub struct DistrustRestarts {
    times: VecDeque<Instant>,
}

impl DistrustRestarts {
    /// Returns true if another restart is allowed.
    pub fn are_left(&self, now: Instant) -> bool {
        let recent = |at: &&Instant| now.saturating_duration_since(**at) < RESTART_WINDOW;
        self.times.iter().filter(recent).count() < MOST_RESTARTS
    }

    /// Records a restart.
    pub fn record(&mut self, now: Instant) {
        // Older restarts than the last few cannot matter, so memory is bounded.
        if self.times.len() >= MOST_RESTARTS {
            self.times.pop_front();
        }
        self.times.push_back(now);
    }
}

/// Time between two checks of a worker.
pub const CHECK_EVERY: Duration = Duration::from_millis(500);
/// Silence that one check adds at most. A later check means that this process
/// did not run, and the worker may not have run either.
const LONGEST_CHECK: Duration = Duration::from_secs(1);
/// Restarts after invalid reports within [`RESTART_WINDOW`] at most.
const MOST_RESTARTS: usize = 3;
/// Beyond the limit the worker keeps running without requests until an admin
/// looks at the host: restarts evidently do not help.
const RESTART_WINDOW: Duration = Duration::from_secs(3_600);

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use tollgate_domain::WorkerEpoch;

    use super::*;

    const TIMEOUTS: SilenceTimeouts =
        SilenceTimeouts { running: Duration::from_secs(3), start: Duration::from_secs(10) };

    fn heartbeats(epoch: u128, times: u64) -> Heartbeats {
        Heartbeats { last: Some(Heartbeat { epoch: WorkerEpoch(epoch), times }), distrusted: false }
    }

    /// Checks every half second. Returns the number of the first check whose
    /// verdict is not `Alive`, with the verdict.
    fn first_verdict(
        watch: &mut Watch,
        heartbeats: impl Fn(u64) -> Heartbeats,
    ) -> Option<(u64, Verdict)> {
        (1..200).find_map(|check| {
            let now = watch.checked + CHECK_EVERY;
            let verdict = watch.check(heartbeats(check), true, now);
            (verdict != Verdict::Alive).then_some((check, verdict))
        })
    }

    #[tokio::test]
    async fn liveness_kills_silent_workers() {
        let mut watch = Watch::new(TIMEOUTS, Heartbeats::default(), Instant::now());
        let silent = Verdict::Silent(TIMEOUTS.running);
        // Nine heartbeats, the last at the ninth check.
        let stopping = |check: u64| heartbeats(1, check.min(9));
        assert_eq!(first_verdict(&mut watch, stopping), Some((15, silent)));
        let mut watch = Watch::new(TIMEOUTS, Heartbeats::default(), Instant::now());
        assert_eq!(first_verdict(&mut watch, |check| heartbeats(1, check / 2)), None);
    }

    /// A model that loads slowly is no silence, and a heartbeat of the previous
    /// process is no heartbeat of this one.
    #[tokio::test]
    async fn liveness_allows_slow_starts() {
        let mut watch = Watch::new(TIMEOUTS, heartbeats(1, 7), Instant::now());
        let late = Verdict::Silent(TIMEOUTS.start);
        assert_eq!(first_verdict(&mut watch, |_| heartbeats(1, 8)), Some((20, late)));
    }

    #[tokio::test]
    async fn liveness_ignores_suspended_time() {
        let now = Instant::now();
        let mut watch = Watch::new(TIMEOUTS, Heartbeats::default(), now);
        watch.check(heartbeats(1, 1), true, now);
        let much_later = now + Duration::from_secs(7_200);
        assert_eq!(watch.check(heartbeats(1, 1), true, much_later), Verdict::Alive);
    }

    #[tokio::test]
    async fn distrusted_workers_restart_three_times_an_hour() {
        let now = Instant::now();
        let mut watch = Watch::new(TIMEOUTS, heartbeats(1, 9), now);
        let distrusted = |epoch| Heartbeats { distrusted: true, ..heartbeats(epoch, 1) };
        // The previous process was distrusted, too: that is not this one's fault.
        assert_eq!(watch.check(distrusted(1), true, now), Verdict::Alive);
        assert_eq!(watch.check(distrusted(2), false, now), Verdict::Alive);
        assert_eq!(watch.check(distrusted(2), true, now), Verdict::Distrusted);
        let mut restarts = DistrustRestarts::default();
        for minutes in 0..3 {
            let now = now + Duration::from_secs(60 * minutes);
            assert!(restarts.are_left(now));
            restarts.record(now);
        }
        assert!(!restarts.are_left(now + Duration::from_secs(3_599)));
        assert!(restarts.are_left(now + Duration::from_secs(3_601)));
    }
}
