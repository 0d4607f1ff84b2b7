//! Caps that several gateways share: a request that lacks some of a slice waits for the database
//! server, and a thread asks, tells and gives back.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout;
use tollgate_admission::{Admission, CapCall, CapName, CapWant, Limit, Scope};
use tollgate_cluster::Answer;
use tollgate_domain::{DeviceClass, UtcDay};
use tollgate_ledger::caps::{CapKey, SliceCall, Slices, SlicesError};
use tollgate_ledger::{LedgerReader, ServerAddress, Spending};

use crate::Clock;
use crate::boot_clock::{BootTime, SharedBootTime};
use crate::limits::Limits;
use crate::serving::SharedCaps;
use crate::settlement::Settlement;
use crate::workers::Workers;

/// The handle with which requests ask for more of a slice. Clones share the thread.
#[derive(Clone)]
pub struct Caps {
    commands: SyncSender<Command>,
    confirmed: Arc<SharedBootTime>,
    counters: Arc<Counters>,
    /// The server of the slices.
    pub(crate) address: ServerAddress,
}

/// The work for slices of caps since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapFigures {
    /// Waits of requests for a part of a cap. A request waits twice at most.
    pub waits: u64,
    /// The waits that ended without an answer of the server.
    pub unanswered: u64,
    /// Transactions on the server, also those that nobody waited for.
    pub transactions: u64,
}

#[derive(Default)]
struct Counters {
    waits: AtomicU64,
    unanswered: AtomicU64,
    transactions: AtomicU64,
}

/// The thread that speaks with the server.
struct CapThread {
    slices: Slices,
    ledger: LedgerReader,
    /// The spending of earlier lives that counts already, and its day.
    restored: (UtcDay, Spending),
    limits: Limits,
    admission: Admission,
    clock: Clock,
    workers: Workers,
    inbox: Receiver<Command>,
    confirmed: Arc<SharedBootTime>,
    counters: Arc<Counters>,
    is_settled: bool,
    is_failing: bool,
    /// True once another gateway had calls of a later life of this data folder.
    is_superseded: bool,
}

enum Command {
    /// A request lacks these parts of caps. The answer is true if the server has answered.
    Want(Vec<CapWant>, oneshot::Sender<bool>),
    /// The gateway stops: everything is told and given back.
    Stop(oneshot::Sender<()>),
}

impl Caps {
    /// Starts the thread over the slices of `caps`. The admission of `limits` has only slices of
    /// the caps, and earlier lives are settled once all of `workers` are.
    pub(crate) fn start(
        caps: SharedCaps,
        (limits, clock): (&Limits, &Clock),
        settlement: &Settlement,
        workers: &Workers,
    ) -> Self {
        let SharedCaps { slices, restored } = caps;
        // Bounded by the requests that wait; a full queue makes them try with what is there.
        let (commands, inbox) = sync_channel(WAITING);
        // The slices were just read, so the server has answered now.
        let confirmed = Arc::new(SharedBootTime::new(BootTime::now()));
        let (counters, address) = (Arc::<Counters>::default(), slices.address().clone());
        let thread = CapThread {
            slices,
            ledger: settlement.ledger().reader().clone(),
            restored,
            limits: limits.clone(),
            admission: limits.admission().clone(),
            clock: clock.clone(),
            workers: workers.clone(),
            inbox,
            confirmed: Arc::clone(&confirmed),
            counters: Arc::clone(&counters),
            is_settled: false,
            is_failing: false,
            is_superseded: false,
        };
        std::thread::spawn(move || thread.run());
        Self { commands, confirmed, counters, address }
    }

    /// Asks for parts of caps. Returns false if the server has not answered in time.
    pub(crate) async fn ask(&self, wants: Vec<CapWant>) -> bool {
        let (answer, answered) = oneshot::channel();
        if self.commands.try_send(Command::Want(wants, answer)).is_err() {
            return false;
        }
        count(&self.counters.waits);
        let is_answered = matches!(timeout(LONGEST_WAIT, answered).await, Ok(Ok(true)));
        if !is_answered {
            count(&self.counters.unanswered);
        }
        is_answered
    }

    /// Returns the work for slices since the start.
    pub(crate) fn figures(&self) -> CapFigures {
        let Counters { waits, unanswered, transactions } = &*self.counters;
        // Relaxed: the counts guard no other memory.
        let [waits, unanswered, transactions] =
            [waits, unanswered, transactions].map(|count| count.load(Ordering::Relaxed));
        CapFigures { waits, unanswered, transactions }
    }

    /// Returns true while the slices may be used: the server has answered not long ago.
    pub(crate) fn are_usable(&self) -> bool {
        BootTime::now().since(self.confirmed.get()) < USABLE
    }

    /// Tells the server what was spent and gives everything else back. Call this after the last
    /// settlement.
    pub(crate) async fn stop(&self) {
        let (done, stopped) = oneshot::channel();
        if self.commands.try_send(Command::Stop(done)).is_ok() {
            // What is not given back is found at the next start.
            let _ = timeout(LAST_WORDS, stopped).await;
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl CapThread {
    #[expect(clippy::disallowed_methods, reason = "the thread keeps the time of its next beat")]
    fn run(mut self) {
        self.remember_slices();
        let mut next = Instant::now();
        loop {
            // First of all: requests that ask all the time must not hold up what others wait for.
            if Instant::now() >= next {
                self.beat();
                next = Instant::now() + BEAT;
            }
            match self.inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Command::Want(wants, answer)) => {
                    if let Some(stop) = self.grant(wants, answer) {
                        return self.stop(stop);
                    }
                }
                Ok(Command::Stop(done)) => return self.stop(done),
                Err(RecvTimeoutError::Disconnected) => return,
                // The next beat is due.
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Remembers the slices of an earlier life, so that the first beat asks for them.
    fn remember_slices(&mut self) {
        let found = self.slices.unspent(self.clock.utc().day());
        if let Some(keys) = self.heard(found) {
            let names: Vec<CapName> = keys.iter().filter_map(name_of).collect();
            self.admission.remember_slices(&names);
        }
    }

    /// Asks for what requests lack. All that wait at this moment share one transaction. Returns
    /// the stop if it came meanwhile.
    fn grant(
        &mut self,
        mut wants: Vec<CapWant>,
        answer: oneshot::Sender<bool>,
    ) -> Option<oneshot::Sender<()>> {
        let mut answers = vec![answer];
        let mut stop = None;
        while answers.len() < MOST_AT_ONCE
            && stop.is_none()
            && let Ok(command) = self.inbox.try_recv()
        {
            match command {
                // A request that waits no more wants nothing.
                Command::Want(_, answer) if answer.is_closed() => {}
                Command::Want(more, answer) => {
                    wants.extend(more);
                    answers.push(answer);
                }
                Command::Stop(done) => stop = Some(done),
            }
        }
        let calls = self.admission.calls_for(self.clock.utc(), &wants);
        let is_done = self.ask(&calls);
        for answer in answers {
            // The request may have stopped waiting.
            let _ = answer.send(is_done);
        }
        stop
    }

    /// Tells the server what was spent, gives back what is not needed, and hears which caps
    /// others lack.
    fn beat(&mut self) {
        if !self.is_settled && self.workers.are_settled() {
            self.settle_earlier_lives();
        }
        // Before the question: the answer is as old as that.
        let begun = BootTime::now();
        let hungry = self.slices.hungry();
        let Some(hungry) = self.heard(hungry) else { return };
        let hungry: HashSet<CapName> = hungry.iter().filter_map(name_of).collect();
        let now = self.clock.now();
        let calls = self.admission.calls_at_beat(now, self.clock.utc_at(now), &hungry);
        if self.ask(&calls) {
            self.confirmed.set(begun);
        }
    }

    /// Counts what was recorded of earlier lives since the start, and frees what they have not
    /// spent.
    fn settle_earlier_lives(&mut self) {
        let today = self.clock.utc().day();
        let home = self.slices.home();
        let spent = match self.ledger.spending_before((&home.id, home.life), today) {
            Ok(spent) => spent,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot read what this gateway has spent; trying again");
                return;
            }
        };
        let settled = self.slices.settle_earlier_lives();
        if self.heard(settled).is_none() {
            return;
        }
        let (day, restored) = std::mem::take(&mut self.restored);
        // What was restored for a day or month that is over counts no more.
        let counted = Spending {
            day: if day == today { restored.day } else { Vec::new() },
            month: if day.month() == today.month() { restored.month } else { Vec::new() },
            priced: restored.priced,
        };
        self.limits.restore_spend(spent.beyond(&counted), today);
        self.admission.settle_earlier_lives();
        self.is_settled = true;
    }

    fn stop(mut self, done: oneshot::Sender<()>) {
        let calls = self.admission.calls_at_stop(self.clock.utc());
        self.ask(&calls);
        // The gateway may have stopped waiting.
        let _ = done.send(());
    }

    /// Makes calls and adopts the answers. Returns false if the server did not answer.
    fn ask(&mut self, calls: &[CapCall]) -> bool {
        let gateways = NonZeroU32::new(self.admission.status().gateways);
        for part in calls.chunks(CALLS_OF_A_TRANSACTION) {
            let asked: Vec<SliceCall> = part.iter().map(slice_call).collect();
            count(&self.counters.transactions);
            let answers = self.slices.ask(&asked, gateways.unwrap_or(NonZeroU32::MIN));
            let Some(answers) = self.heard(answers) else { return false };
            if answers.iter().any(Option::is_none) && !self.is_superseded {
                self.is_superseded = true;
                tracing::error!(
                    "this gateway gets no more of the caps: what it had was freed, or another gateway uses a copy of this data folder's gateway.id; start it again, after the file of a copy is deleted"
                );
            }
            let answered = part.iter().zip(answers);
            let answered = answered.filter_map(|(call, answer)| Some((call, answer?)));
            self.admission.caps_answered(self.clock.now(), answered);
        }
        !self.is_superseded
    }

    /// Returns a result of the server. A failure is logged once.
    fn heard<T>(&mut self, result: Result<T, SlicesError>) -> Option<T> {
        match result {
            Ok(heard) => {
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!("the slices of caps can be asked for again");
                }
                Some(heard)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "cannot ask for slices of caps; requests use what this gateway has, for at most 90 s"
                    );
                }
                None
            }
        }
    }
}

/// Makes calls, in a transaction for each few, and returns the answers in their order.
pub(crate) fn ask(
    slices: &mut Slices,
    calls: &[CapCall],
    gateways: NonZeroU32,
) -> Result<Vec<Option<Answer>>, SlicesError> {
    let mut answers = Vec::with_capacity(calls.len());
    for part in calls.chunks(CALLS_OF_A_TRANSACTION) {
        let asked: Vec<SliceCall> = part.iter().map(slice_call).collect();
        answers.extend(slices.ask(&asked, gateways)?);
    }
    Ok(answers)
}

fn slice_call(call: &CapCall) -> SliceCall {
    let CapCall { cap: CapName { scope, limit, class }, value, first_day, previous, ask, .. } =
        call;
    let class = class.as_ref().map_or_else(String::new, |class| class.as_str().to_owned());
    let (kind, scope) = (scope.kind().to_owned(), scope.name().to_owned());
    let cap = CapKey { limit: limit.as_str().to_owned(), kind, scope, class };
    SliceCall { cap, value: *value, first_day: *first_day, previous: *previous, ask: *ask }
}

/// Returns the name of a cap; `None` for one that this version does not know.
pub(crate) fn name_of(key: &CapKey) -> Option<CapName> {
    let CapKey { limit, kind, scope, class } = key;
    let limit = [Limit::DeviceTimePerDay, Limit::DeviceTimePerMonth, Limit::BudgetPerMonth]
        .into_iter()
        .find(|known| known.as_str() == limit)?;
    let class = match class.as_str() {
        "" => None,
        class => Some(DeviceClass::new(class).ok()?),
    };
    Some(CapName { scope: Scope::of(kind, scope)?, limit, class })
}

/// The time for which a slice may be used without an answer of the server.
const USABLE: Duration = Duration::from_secs(90);
/// The longest time for which a request waits for a grant.
const LONGEST_WAIT: Duration = Duration::from_millis(250);
/// The requests that can wait for the thread.
const WAITING: usize = 4_096;
/// The requests that share a transaction at most.
const MOST_AT_ONCE: usize = 1_024;
/// The calls of one transaction at most: it locks the rows of their caps.
const CALLS_OF_A_TRANSACTION: usize = 64;
/// The time between two beats.
const BEAT: Duration = Duration::from_secs(1);
/// The time that the last calls may take when the gateway stops.
const LAST_WORDS: Duration = Duration::from_secs(5);
