//! The streams on which gateways read the journal. One gateway gets the blocks to record them in
//! the ledger; the others get each block once it was acknowledged, to check the records of their
//! own requests.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::Instant;
use tollgate_domain::{Block, GatewayName, WorkerEpoch, WorkerName};
use tollgate_wire::v1::{JournalAck, JournalBlock};
use tonic::{Status, Streaming};

use crate::journal::{Feed, Journal};
use crate::roster::{Place, ReaderId, Roster};

/// The time between two looks at the gateway that records.
const JUDGED_EVERY: Duration = Duration::from_secs(1);
/// Acknowledged blocks that wait for a slow reader. It misses what is older.
const RECORDED_WINDOW: usize = 256;
/// Blocks that wait for an acknowledgement and for the other readers. The windows of the recorder
/// are smaller.
const MOST_UNANSWERED: usize = 1_024;

/// The sender of a stream's blocks.
pub(crate) type BlockSender = mpsc::Sender<Result<JournalBlock, Status>>;

/// The streams of one worker; clones share them.
#[derive(Clone)]
pub(crate) struct JournalStreams(Arc<Streams>);

struct Streams {
    worker: WorkerName,
    journal: Journal,
    state: Mutex<StreamsState>,
    recorder: watch::Sender<Option<ReaderId>>,
    recorded: broadcast::Sender<Recorded>,
}

#[derive(Default)]
struct StreamsState {
    roster: Roster,
    /// The blocks that the recorder was sent and has not acknowledged, if others read, too.
    unanswered: VecDeque<(Place, Arc<JournalBlock>)>,
}

/// An acknowledged block and the reader that acknowledged it.
#[derive(Clone)]
struct Recorded {
    by: ReaderId,
    block: Arc<JournalBlock>,
}

/// The membership of one stream, which ends when this is dropped.
struct Membership<'a> {
    streams: &'a JournalStreams,
    id: ReaderId,
}

#[expect(clippy::disallowed_methods, reason = "the acknowledgements are timed")]
fn now() -> Instant {
    Instant::now()
}

impl JournalStreams {
    /// Makes the streams over the journal of `worker`.
    pub(crate) fn new(worker: WorkerName, journal: Journal) -> Self {
        let (recorder, _) = watch::channel(None);
        let (recorded, _) = broadcast::channel(RECORDED_WINDOW);
        let state = Mutex::default();
        Self(Arc::new(Streams { worker, journal, state, recorder, recorded }))
    }

    /// Replaces a recorder that acknowledges nothing, again and again. Never returns.
    pub(crate) async fn judge(self) {
        let mut ticks = tokio::time::interval(JUDGED_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let is_new = self.change(|roster| roster.judge(now()));
            if is_new {
                tracing::warn!(
                    "the gateway that records the journal acknowledges nothing; another one gets the blocks"
                );
            }
        }
    }

    /// Serves one stream until the gateway leaves. `gateway` is `None` over a Unix socket.
    pub(crate) async fn serve(
        self,
        gateway: Option<GatewayName>,
        acks: Streaming<JournalAck>,
        sender: BlockSender,
    ) {
        // Kept to the end: the journal counts as followed while somebody watches.
        let _followed = self.0.journal.watch();
        let recorded = self.0.recorded.subscribe();
        let id = self.change(|roster| roster.join(self.rank(gateway.as_ref()), now()));
        let membership = Membership { streams: &self, id };
        // A stream without one of its directions has no use, so the first end ends all.
        tokio::select! {
            () = membership.receive_acks(acks) => (),
            () = membership.record_in_turns(&sender) => (),
            () = membership.forward(recorded, &sender) => (),
        }
    }

    /// Returns the rank of a gateway. Workers rank the same gateways differently, so that each
    /// gateway records some journals.
    fn rank(&self, gateway: Option<&GatewayName>) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0.worker.as_str(), gateway.map(GatewayName::as_str)).hash(&mut hasher);
        hasher.finish()
    }

    /// Changes the roster and tells the streams of a new recorder.
    fn change<T>(&self, change: impl FnOnce(&mut Roster) -> T) -> T {
        let mut state = self.lock();
        let changed = change(&mut state.roster);
        let recorder = state.roster.recorder();
        // Under the lock, so that the last of two changes stays.
        let is_new = self.0.recorder.send_if_modified(|known| {
            let is_new = *known != recorder;
            *known = recorder;
            is_new
        });
        if is_new {
            // The new recorder gets them again.
            state.unanswered.clear();
        }
        changed
    }

    fn lock(&self) -> MutexGuard<'_, StreamsState> {
        // Every change under the lock is complete before a panic could happen.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        self.streams.change(|roster| roster.leave(self.id, now()));
    }
}

impl Membership<'_> {
    async fn receive_acks(&self, mut acks: Streaming<JournalAck>) {
        while let Ok(Some(JournalAck { epoch, block })) = acks.message().await {
            let Ok(epoch) = WorkerEpoch::try_from(epoch) else {
                tracing::warn!("acknowledgement with an invalid epoch ignored");
                // One invalid message must not stop the acknowledgements, which free the
                // disk.
                continue;
            };
            let journal = self.streams.0.journal.clone();
            // Acknowledging deletes files, which blocks.
            let done = tokio::task::spawn_blocking(move || journal.acknowledge(epoch, block)).await;
            if done.is_err() {
                return;
            }
            self.acknowledged((epoch, block));
        }
    }

    /// Notes an acknowledgement and passes the blocks on to the other readers.
    fn acknowledged(&self, place: Place) {
        let mut state = self.streams.lock();
        state.roster.acknowledged(place, now());
        let (epoch, number) = place;
        // Blocks are acknowledged in their order.
        let is_in = |((of, block), _): &(Place, _)| *of == epoch && *block <= number;
        let Some(last) = state.unanswered.iter().rposition(is_in) else { return };
        for (_, block) in state.unanswered.drain(..=last) {
            // Nobody else may be reading.
            let _ = self.streams.0.recorded.send(Recorded { by: self.id, block });
        }
    }

    /// Sends the blocks while this stream is the one that records.
    async fn record_in_turns(&self, sender: &BlockSender) {
        let mut recorder = self.streams.0.recorder.subscribe();
        loop {
            // The sender lives as long as the streams, so an error cannot come.
            let _ = recorder.wait_for(|chosen| *chosen == Some(self.id)).await;
            tokio::select! {
                () = self.send_blocks(sender) => return,
                _ = recorder.wait_for(|chosen| *chosen != Some(self.id)) => {}
            }
        }
    }

    /// Sends every synced block, then waits for more.
    async fn send_blocks(&self, sender: &BlockSender) {
        let journal = &self.streams.0.journal;
        let (mut synced, mut feed) = (journal.watch(), journal.feed());
        loop {
            // Marked before reading: a sync that comes while reading must wake the task
            // again.
            synced.mark_unchanged();
            loop {
                let (next, block) = match next_block(feed).await {
                    Ok(Some(next)) => next,
                    Ok(None) => return,
                    Err(error) => {
                        tracing::error!(%error, "cannot read the journal; closing the gateway's stream");
                        // The gateway may have left; then nothing reads the reason.
                        let _ = sender.send(Err(Status::data_loss("the journal is damaged"))).await;
                        return;
                    }
                };
                feed = next;
                let Some(block) = block else { break };
                if sender.send(Ok(self.note_sent(block))).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                // The gateway may leave while nothing new is synced.
                () = sender.closed() => return,
                changed = synced.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Notes a block that goes out, and keeps it for the other readers. Returns its message.
    fn note_sent(&self, block: Block) -> JournalBlock {
        let place = (block.parts().epoch, block.parts().number);
        let block = JournalBlock::from(block);
        let mut state = self.streams.lock();
        state.roster.sent(self.id, place, now());
        if state.roster.recorder() == Some(self.id) && state.roster.len() > 1 {
            state.unanswered.push_back((place, Arc::new(block.clone())));
            if state.unanswered.len() > MOST_UNANSWERED {
                state.unanswered.pop_front();
            }
        }
        block
    }

    /// Passes on the blocks that other streams have acknowledged.
    async fn forward(&self, mut recorded: broadcast::Receiver<Recorded>, sender: &BlockSender) {
        loop {
            match recorded.recv().await {
                Ok(Recorded { by, .. }) if by == self.id => {}
                Ok(Recorded { block, .. }) => {
                    let block = JournalBlock { recorded: true, ..(*block).clone() };
                    if sender.send(Ok(block)).await.is_err() {
                        return;
                    }
                }
                // A reader that misses blocks goes on with the next ones.
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }
}

type Next = (Feed, Option<Block>);

/// Reads the next block on a blocking thread. Returns `None` while the runtime
/// shuts down.
async fn next_block(mut feed: Feed) -> io::Result<Option<Next>> {
    // A blocking task must own the feed, so the feed moves in and back out.
    let read = tokio::task::spawn_blocking(move || {
        let block = feed.next()?;
        Ok((feed, block))
    });
    read.await.ok().transpose()
}
