//! The end of a gateway: when it counts as silent, and when its slices are free.

use std::collections::BTreeMap;

use crate::{BootMillis, GatewayNumber};

/// Milliseconds without a new beat of a gateway after which another one retires it.
pub const SILENCE: u64 = 100_000;

/// Longest time between two answered beats of the observer that counts as silence of others.
/// In a longer gap the observer itself may have been cut off.
const LONGEST_GAP: u64 = 5_000;

/// The beats of the other gateways, as one gateway reads them in the answers to its own.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    last_answer: Option<BootMillis>,
    seen: BTreeMap<GatewayNumber, Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    beat: u64,
    silent: u64,
}

impl Watch {
    /// Reads the beats of all live gateways in the answer to a beat of its own. Returns the
    /// gateways to retire.
    pub fn answered(
        &mut self,
        now: BootMillis,
        beats: impl IntoIterator<Item = (GatewayNumber, u64)>,
    ) -> Vec<GatewayNumber> {
        let gap = self.last_answer.map_or(0, |last| now.since(last));
        self.last_answer = Some(now);
        let earlier = std::mem::take(&mut self.seen);
        for (number, beat) in beats {
            let silent = match earlier.get(&number) {
                Some(seen) if seen.beat == beat => seen.silent + gap.min(LONGEST_GAP),
                _ => 0,
            };
            self.seen.insert(number, Seen { beat, silent });
        }
        let silent = self.seen.iter().filter(|(_, seen)| seen.silent >= SILENCE);
        silent.map(|(number, _)| *number).collect()
    }
}

/// The retirement of one gateway: its slices are free when every worker refuses its work and
/// every attempt of it is posted. `W` names a worker.
#[derive(Clone, Debug)]
pub struct Retirement<W> {
    /// For each worker the number of the block with the gateway's last attempt; `None` until
    /// the worker refuses the gateway's work and has written the last attempt to its journal.
    last_blocks: BTreeMap<W, Option<u64>>,
}

impl<W: Ord> Retirement<W> {
    /// Begins the retirement of a gateway to which these workers belong.
    pub fn new(workers: impl IntoIterator<Item = W>) -> Self {
        Self { last_blocks: workers.into_iter().map(|worker| (worker, None)).collect() }
    }

    /// Hears from a worker that it refuses the gateway's work, and that the gateway's last
    /// attempt is in the journal at or before `block`.
    pub fn closed(&mut self, worker: W, block: u64) {
        self.last_blocks.insert(worker, Some(block));
    }

    /// Returns true if nothing of the gateway can still be posted. `posted` returns the
    /// number of the last block of a worker that is posted.
    pub fn is_complete(&self, posted: impl Fn(&W) -> u64) -> bool {
        self.last_blocks
            .iter()
            .all(|(worker, last)| last.is_some_and(|last| posted(worker) >= last))
    }
}
