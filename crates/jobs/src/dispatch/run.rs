//! One batch under one claim: its tries are committed before they are sent, its answers
//! before they count.

mod outcomes;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{Caller, UtcTime};

pub(super) use self::outcomes::room;
use super::answers::Answers;
use super::held_bytes::OpenBytes;
use super::lease::Lease;
use super::line_set::LineSet;
use super::source::Lines;
use super::try_run::{self, LineEvent};
use super::window::{Ask, Company, Permit};
use super::{DispatchContext, TICK, now};
use crate::batch::{BatchRow, BatchState, CancelReason, Cause, FailureCode};
use crate::claim::{Claim, Claimed, OpenTry};
use crate::error::JobError;
use crate::file::BlobRange;
use crate::jobs::BatchWait;
use crate::rules::{self, MOST_BARREN_CLAIMS};
use crate::service::{CallerState, CapRequest, LinePlace, LineRequest, Waiting};
use crate::store::TriesLeft;

/// The end of a run.
pub(super) enum RunEnd {
    /// The batch has ended.
    Ended,
    /// The dispatcher stops: another run goes on with the batch.
    Left(TriesLeft),
    /// The batch waits with no line on a worker, and makes room for others until then.
    Parked(Instant),
}

/// A batch under one claim.
pub(super) struct BatchRun {
    pub(super) context: DispatchContext,
    pub(super) claim: Claim,
    pub(super) batch: BatchRow,
    pub(super) caller: Caller,
    pub(super) ranges: Vec<BlobRange>,
    pub(super) sha256: Option<[u8; 32]>,
    /// The tries of earlier claims that may lack their caps.
    pub(super) earlier: Vec<OpenTry>,
    pub(super) earlier_are_capped: bool,
    barren: u32,
    has_panicked: bool,
    pub(super) answered: LineSet,
    lease: Lease,
    /// Cancelled when the batch is found to be ending.
    ending: CancellationToken,
    /// Cancelled when no answer is wanted any more.
    pub(super) cancel: CancellationToken,
    lines: Lines,
    pub(super) events: FuturesUnordered<Event>,
    open_bytes: OpenBytes,
    /// Tries under this claim that may have run, by line, until they are answered or
    /// capped.
    pub(super) open: BTreeMap<u64, CapRequest>,
    pub(super) answers: Answers,
    asked: Option<oneshot::Receiver<Permit>>,
    /// A permit for the next line.
    permit: Option<Permit>,
    /// No line is sent before this.
    paused: Option<Instant>,
    waits_ended: watch::Receiver<()>,
    /// Tries that may run at once. Fewer than [`MOST_OPEN`] where what the tries hold leaves
    /// room for few.
    most_open: usize,
    /// True if the pause ends with any try of the batch.
    is_held_back: bool,
}

type Event = Pin<Box<dyn Future<Output = LineEvent> + Send>>;

/// Shortest and longest waits. A service may ask for hours, but its reason can end at any
/// time, and not every end of one is told.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// Tries of one batch that run, or that wait until their work is in the ledger.
const MOST_OPEN: usize = 512;
/// Wait before a batch looks whether other requests have made room in a limit. Its own tries
/// end the wait.
const HELD_BACK_WAIT: Duration = Duration::from_secs(1);
/// Wait before room for results is looked for again.
const ROOM_WAIT: Duration = Duration::from_secs(10);

impl BatchRun {
    pub(super) fn new(
        context: DispatchContext,
        claimed: Claimed,
        lease: UtcTime,
        ending: CancellationToken,
        has_panicked: bool,
    ) -> Self {
        let Claimed { claim, batch, file, ranges, answered, open, barren } = claimed;
        if matches!(batch.state, BatchState::Ending(_)) {
            ending.cancel();
        }
        let answers = Answers::new(Arc::clone(&context.answer_bytes));
        Self {
            caller: Caller { tenant: batch.tenant.clone(), key: batch.key.clone() },
            lines: Lines::new(&context.jobs.shared().blobs, ranges.clone()),
            waits_ended: context.jobs.shared().waits_ended.subscribe(),
            context,
            claim,
            batch,
            ranges,
            sha256: file.sha256,
            earlier: open,
            earlier_are_capped: false,
            barren,
            has_panicked,
            answered: answered.into_iter().collect(),
            lease: Lease::new(lease),
            ending,
            cancel: CancellationToken::new(),
            events: FuturesUnordered::new(),
            open_bytes: OpenBytes::default(),
            open: BTreeMap::new(),
            answers,
            asked: None,
            permit: None,
            paused: None,
            most_open: MOST_OPEN,
            is_held_back: false,
        }
    }

    /// Runs the batch until it has ended, the dispatcher stops, or the claim is lost.
    pub(super) async fn run(mut self) -> Result<RunEnd, JobError> {
        let (lease, context) = (self.lease.clone(), self.context.clone());
        let (claim, ending) = (self.claim, self.ending.clone());
        let end = tokio::select! {
            biased;
            // Work comes first: once the batch has ended, a renewal finds no claim, and the end
            // would look like a lost claim.
            end = self.work() => end,
            lost = lease.keep(&context, claim, &ending) => Err(lost),
        };
        // Tries that still run are not wanted: the next claim caps them.
        self.cancel.cancel();
        end
    }

    async fn work(&mut self) -> Result<RunEnd, JobError> {
        let stop = self.context.stop.clone();
        let begun = async {
            // A cancel between the claim and its registration has reached no token.
            self.read_batch().await?;
            self.cap_earlier().await?;
            self.begin_work().await
        };
        let begun = tokio::select! {
            biased;
            // Caps wait for the ledger without a limit, so a stop must be able to end the wait.
            () = stop.cancelled() => None,
            begun = begun => Some(begun),
        };
        match begun {
            None => return Ok(RunEnd::Left(self.tries_left())),
            Some(begun) => begun?,
        }
        if self.batch.state == BatchState::Running
            && let Some(end) = self.dispatch().await?
        {
            return Ok(end);
        }
        if let BatchState::Ending(cause) = self.batch.state {
            let drain = self.context.options.drain;
            // What is not finished by then is done again under the next claim: the cause is
            // committed.
            let stopped = async {
                stop.cancelled().await;
                tokio::time::sleep(drain).await;
            };
            let finished = tokio::select! {
                biased;
                finished = self.finish(cause) => Some(finished),
                () = stopped => None,
            };
            return match finished {
                Some(finished) => finished.map(|()| RunEnd::Ended),
                None => Ok(RunEnd::Left(self.tries_left())),
            };
        }
        // The check of the input has ended the batch.
        Ok(RunEnd::Ended)
    }

    /// Decides if the batch goes on, and checks its input first.
    async fn begin_work(&mut self) -> Result<(), JobError> {
        if matches!(self.batch.state, BatchState::Ending(_)) {
            return Ok(());
        }
        // What panicked or crashed once does so at each claim, and each time the lost tries cost
        // device time.
        if self.has_panicked || self.barren >= MOST_BARREN_CLAIMS {
            tracing::error!(batch = %self.claim.batch, claims = self.barren, "the dispatcher fails at a batch again and again; the batch fails and keeps its answers");
            return self.begin_end(Cause::Failed(FailureCode::Internal)).await;
        }
        self.check_end().await?;
        if self.batch.state == BatchState::Validating {
            let ending = self.ending.clone();
            let validated = tokio::select! {
                biased;
                () = ending.cancelled() => None,
                validated = self.validate() => Some(validated),
            };
            match validated {
                Some(validated) => validated?,
                // The cancel is committed; only this copy of the batch is old.
                None => self.read_batch().await?,
            }
        }
        Ok(())
    }

    /// Sends lines until the batch ends, the dispatcher stops or the batch is parked.
    async fn dispatch(&mut self) -> Result<Option<RunEnd>, JobError> {
        loop {
            // The token says only that the batch ends; the row has the cause.
            if self.ending.is_cancelled() {
                self.read_batch().await?;
            }
            self.check_end().await?;
            if self.batch.state != BatchState::Running {
                return Ok(None);
            }
            if self.context.stop.is_cancelled() {
                return self.drain().await.map(Some);
            }
            match self.begin_tries().await {
                // Another claim would read the same bytes, so the batch fails now.
                Err(JobError::Damaged) => {
                    self.fail_damaged().await?;
                    return Ok(None);
                }
                begun => begun?,
            }
            if self.is_done() {
                match self.batch.counts.unanswered() {
                    0 => self.begin_end(Cause::Done).await?,
                    // The input has fewer lines than it had.
                    _ => self.fail_damaged().await?,
                }
                return Ok(None);
            }
            if let Some(until) = self.parks() {
                return Ok(Some(RunEnd::Parked(until)));
            }
            match self.permit.take() {
                Some(permit) => self.send(permit)?,
                None => {
                    self.ask();
                    self.step().await?;
                }
            }
        }
    }

    /// Waits for one thing to happen, and acts on it.
    async fn step(&mut self) -> Result<(), JobError> {
        let wake = self.wake();
        let (ending, stop) = (self.ending.clone(), self.context.stop.clone());
        // The receiver is only borrowed: if it were dropped with this future, the permit would go
        // back.
        let permit = async {
            match &mut self.asked {
                Some(asked) => asked.await.ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = ending.cancelled() => {}
            () = stop.cancelled() => {}
            written = self.answers.write(&self.context, &self.claim) => self.batch = written?,
            Some(event) = self.events.next() => self.happened(event),
            permit = permit => {
                self.asked = None;
                self.permit = permit;
            }
            Ok(()) = self.waits_ended.changed() => self.end_waits(),
            () = tokio::time::sleep_until(wake) => {}
        }
        Ok(())
    }

    /// Returns the time at which something may be due.
    fn wake(&self) -> Instant {
        // A tick at most, because a revoked key, a removed tenant and the end of the window wake
        // nothing.
        let tick = now() + TICK;
        // A line that falls due during a pause must not wake the batch again and again.
        let due = self.paused.or_else(|| self.lines.next_due());
        due.map_or(tick, |due| due.min(tick))
    }

    /// Reads the batch again, because another caller may have changed its state.
    async fn read_batch(&mut self) -> Result<(), JobError> {
        let claim = self.claim;
        self.batch = self.context.store(move |store| store.claimed(&claim)).await?;
        Ok(())
    }

    /// Begins to end the batch if its window is over or its caller is gone.
    async fn check_end(&mut self) -> Result<(), JobError> {
        if matches!(self.batch.state, BatchState::Ending(_) | BatchState::Ended(_)) {
            return Ok(());
        }
        if self.context.jobs.now() >= self.batch.expires {
            return self.begin_end(Cause::Expired).await;
        }
        match self.gone() {
            Some(reason) => self.begin_end(Cause::Cancelled(reason)).await,
            None => Ok(()),
        }
    }

    /// Returns the reason for which the caller's batches do not run any more.
    fn gone(&self) -> Option<CancelReason> {
        match self.context.service.caller(&self.caller) {
            CallerState::Active | CallerState::Unknown => None,
            CallerState::KeyRevoked => Some(CancelReason::KeyRevoked),
            CallerState::TenantGone => Some(CancelReason::TenantGone),
        }
    }

    /// Commits the tries that may be sent next.
    async fn begin_tries(&mut self) -> Result<(), JobError> {
        let at = now();
        if self.paused.is_some_and(|until| until > at) {
            return Ok(());
        }
        if self.paused.take().is_some() {
            self.is_held_back = false;
            self.context.jobs.shared().set_wait(self.claim.batch, None);
        }
        // One time for this call and for `retries_begun`: a line that falls due in between has no
        // committed try.
        let (due, claim) = (self.lines.due(at), self.claim);
        if !due.is_empty() {
            self.context.store(move |store| store.begin_again(&claim, &due)).await?;
            self.lines.retries_begun(at);
        }
        if !self.lines.wants_begin() || self.answers.is_full() {
            return Ok(());
        }
        // Lines that earlier claims have answered are skipped: each line is answered once.
        self.lines.read_ahead(&self.answered).await?;
        let most = self.lines.ahead().count();
        // A batch that only waits for its turn begins nothing: it reserves no room, and a
        // death of the process does not count against it.
        let has_turn = self.permit.is_some() || !self.events.is_empty();
        if most == 0 || !has_turn || self.begin(most).await? || (most > 1 && self.begin(1).await?) {
            return Ok(());
        }
        self.pause(&Waiting { reason: "no_room", retry_after: ROOM_WAIT, holds_batch: true });
        Ok(())
    }

    /// Commits the first tries of `count` lines and reserves room for their answers.
    /// Returns false if there is no room.
    async fn begin(&mut self, count: usize) -> Result<bool, JobError> {
        // One number marks all lines up to it as begun, so lines are begun in their order.
        let lines = self.lines.ahead().take(count);
        let (begun, room) = lines.fold((0, 0), |(_, room): (u64, u64), line| {
            (line.number + 1, room.saturating_add(line.room))
        });
        let shared = self.context.jobs.shared();
        let (blobs, spare) = (shared.blobs.clone(), shared.limits.spare);
        // Quotas count the bytes of this store only, but other files can fill the disk.
        if crate::upload::blocking(move || blobs.free()).await? < spare.saturating_add(room) {
            return Ok(false);
        }
        let (claim, quotas) = (self.claim, self.context.service.quotas(&self.batch.tenant));
        let begin = move |store: &mut dyn crate::Store| store.begin(&claim, begun, room, &quotas);
        match self.context.store(begin).await {
            Ok(()) => {
                self.lines.begun(count);
                Ok(true)
            }
            // The tenant can delete result files, so the batch waits and does not fail.
            Err(JobError::Quota(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Lets the batch wait until a try has ended, its own or another request's.
    fn hold_back(&mut self, reason: &'static str) {
        self.most_open = self.events.len().max(1);
        let waiting = Waiting { reason, retry_after: HELD_BACK_WAIT, holds_batch: true };
        self.pause(&waiting);
        self.is_held_back = true;
        if !self.events.is_empty() {
            // The batch makes progress, so clients see no wait.
            self.context.jobs.shared().set_wait(self.claim.batch, None);
        }
    }

    /// Lets a batch try again that waits for the end of a try: one of its own has ended.
    fn make_room(&mut self) {
        self.most_open = self.most_open.saturating_add(1).min(MOST_OPEN);
        if std::mem::take(&mut self.is_held_back) {
            self.end_waits();
        }
    }

    /// Lets the whole batch wait.
    fn pause(&mut self, waiting: &Waiting) {
        self.is_held_back = false;
        let utc = self.context.jobs.now();
        // Not cut to the longest wait: clients see when the reason ends, not when the batch looks
        // again.
        let wait = BatchWait {
            reason: waiting.reason,
            until: rules::after(utc, waiting.retry_after.max(WAITS.0)),
        };
        self.context.jobs.shared().set_wait(self.claim.batch, Some(wait));
        self.paused = Some(now() + waiting.retry_after.clamp(WAITS.0, WAITS.1));
        self.withdraw();
    }

    /// Lets the batch and its lines try again now.
    fn end_waits(&mut self) {
        let at = now();
        self.paused = self.paused.map(|until| until.min(at));
        self.lines.end_waits(at);
    }

    /// Ends the ask for a line on a worker.
    pub(super) fn withdraw(&mut self) {
        self.permit = None;
        if self.asked.take().is_some() {
            self.context.window.withdraw(self.claim.batch);
        }
    }

    fn is_done(&self) -> bool {
        !self.lines.has_unbegun()
            && !self.lines.has_ready()
            && self.lines.next_due().is_none()
            && self.events.is_empty()
            && self.answers.is_empty()
    }

    /// Returns the end of the wait of a batch that makes room for another one.
    fn parks(&self) -> Option<Instant> {
        let until = self.paused?;
        let is_idle = self.events.is_empty() && self.answers.is_empty() && self.open.is_empty();
        (is_idle && self.context.is_pressed(&self.batch.tenant)).then_some(until)
    }

    /// Asks for a line on a worker, if a line may be sent.
    fn ask(&mut self) {
        // Lines that are only read count, too: they are begun once the batch has its turn.
        let has_lines = self.lines.has_ready() || self.lines.ahead().next().is_some();
        let has_room = self.events.len() < self.most_open
            && self.open_bytes.has_room()
            && !self.answers.is_full();
        let may_send = has_lines && self.paused.is_none() && has_room;
        if self.asked.is_some() || !may_send {
            return;
        }
        let is_alone = self.lines.is_next_alone();
        self.asked = Some(self.context.window.ask(Ask {
            batch: self.claim.batch,
            tenant: self.batch.tenant.clone(),
            expires: self.batch.expires,
            quotas: self.context.service.quotas(&self.batch.tenant),
            company: if is_alone { Company::Alone } else { Company::Others },
        }));
    }

    /// Sends the next line.
    fn send(&mut self, permit: Permit) -> Result<(), JobError> {
        // A process that slept may have lost the claim without knowing.
        if self.lease.is_over(self.context.jobs.now()) {
            return Err(JobError::StaleClaim);
        }
        let next = match permit.company() {
            // The permit was asked for before the pause, or before so many answers waited for the
            // disk.
            _ if self.paused.is_some() || self.answers.is_full() => None,
            Company::Alone => self.lines.take_alone(),
            Company::Others => self.lines.take_ready(),
        };
        // The permit goes back when it is dropped here, and another batch takes the turn.
        let Some(next) = next else { return Ok(()) };
        let request = self.claim.request_id(next.line.number, next.number);
        // Noted before the try runs. A line without a model is never placed, so it needs no cap.
        if let Some(model) = next.line.model.clone() {
            let cap = CapRequest { caller: self.caller.clone(), request: request.clone(), model };
            self.open.insert(next.line.number, cap);
        }
        let request = LineRequest {
            request,
            caller: self.caller.clone(),
            endpoint: self.batch.endpoint,
            body: Arc::clone(&next.line.body),
            place: Some(LinePlace::new(permit)),
            // A child, so that a late line cancels its own try and no other.
            cancel: self.cancel.child_token(),
        };
        let (service, limit) = (self.context.service.clone(), self.context.options.line);
        // The service keeps the body until the try has ended, also while the ledger records it.
        let held = self.open_bytes.hold(&next.line.body);
        self.events.push(Box::pin(async move {
            let event = try_run::run_try(service, (next, request), limit).await;
            drop(held);
            event
        }));
        Ok(())
    }

    /// Lets the lines on workers end, because the dispatcher stops.
    async fn drain(&mut self) -> Result<RunEnd, JobError> {
        self.withdraw();
        let until = now() + self.context.options.drain;
        while !self.events.is_empty() || !self.answers.is_empty() {
            tokio::select! {
                biased;
                written = self.answers.write(&self.context, &self.claim) => self.batch = written?,
                Some(event) = self.events.next() => self.happened(event),
                // The next claim caps what still runs, and runs it again.
                () = tokio::time::sleep_until(until) => break,
            }
        }
        Ok(RunEnd::Left(self.tries_left()))
    }

    /// Returns the tries that another claim must settle.
    fn tries_left(&self) -> TriesLeft {
        // Answers in memory have left `open` already, but they are lost with this run.
        let is_settled = self.earlier_are_capped && self.open.is_empty() && self.answers.is_empty();
        if is_settled { TriesLeft::None } else { TriesLeft::Open }
    }
}
