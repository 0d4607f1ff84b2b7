//! Parts of rates and places that move between gateways: a request that lacks some waits for the
//! Redis server, and a task asks, tells and gives back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tollgate_admission::{
    Admission, Arrival, PartCall, PartWant, Refusal, Requester, ScopeLimits, SharedLimit,
};
use tollgate_cluster::parts::{Beat, PartMode, Tenure};
use tollgate_rates::{RateServer, RateServerError};

use crate::Clock;
use crate::boot_clock::BootTime;

/// The Redis server on which several gateways share rates, and this one's number among them.
pub struct SharedRates {
    /// The server.
    pub server: RateServer,
    /// The number of the gateway, which no earlier start had.
    pub number: u32,
}

/// The handle with which requests ask for parts of rates. Clones share the task.
#[derive(Clone)]
pub(crate) struct Rates {
    commands: mpsc::Sender<RateCommand>,
    shared: Arc<Shared>,
}

/// The state that requests and the task share.
struct Shared {
    admission: Admission,
    clock: Clock,
    tenure: Mutex<Tenure>,
    /// True while the server does not answer: requests use what this gateway has.
    is_gone: AtomicBool,
    counters: PartCounters,
}

#[derive(Default)]
struct PartCounters {
    waits: AtomicU64,
    unanswered: AtomicU64,
    calls: AtomicU64,
}

/// The work for parts of rates since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartFigures {
    /// Waits of requests for parts of rates.
    pub waits: u64,
    /// The waits that ended without an answer of the server.
    pub unanswered: u64,
    /// Calls to the server, also those without a waiting request.
    pub calls: u64,
    /// True if this gateway has parts of the server, and not an equal part of each rate.
    pub are_leased: bool,
}

/// The task that speaks with the server.
struct RateTask {
    server: RateServer,
    number: u32,
    shared: Arc<Shared>,
    inbox: mpsc::Receiver<RateCommand>,
    /// The calls that have failed one after another.
    failures: u32,
    /// The beats that were answered.
    beats: u64,
}

enum RateCommand {
    /// A request lacks these parts. The answer is true if the server has answered.
    Want(Vec<PartWant>, oneshot::Sender<bool>),
    /// The gateway stops: everything goes back.
    Stop(oneshot::Sender<()>),
}

impl Rates {
    /// Makes all rates of `admission` shared. Returns the handle and the task to run.
    pub(crate) fn new(
        SharedRates { server, number }: SharedRates,
        admission: &Admission,
        clock: &Clock,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let shared = Arc::new(Shared {
            admission: admission.clone(),
            clock: clock.clone(),
            tenure: Mutex::default(),
            is_gone: AtomicBool::new(false),
            counters: PartCounters::default(),
        });
        let source = Arc::downgrade(&shared);
        admission.lease_parts(move || {
            // Without the task nobody speaks with the server.
            source.upgrade().map_or(PartMode::Ended, |shared| shared.mode())
        });
        // Bounded by the requests that wait; a full queue makes them try with what is there.
        let (commands, inbox) = mpsc::channel(WAITING);
        let (shared_too, failures, beats) = (Arc::clone(&shared), 0, 0);
        let task = RateTask { server, number, shared: shared_too, inbox, failures, beats };
        (Self { commands, shared }, task.run())
    }

    /// Takes one request from the request rate of every scope, or from none. Asks the server
    /// first if this gateway lacks parts.
    pub(crate) async fn take_request(&self, scopes: &[ScopeLimits]) -> Result<(), Box<Refusal>> {
        for _ in 0..ATTEMPTS {
            let now = self.shared.clock.now();
            match self.shared.admission.take_request_or_ask(now, scopes) {
                Ok(taken) => return taken,
                Err(wants) => {
                    if !self.ask(wants).await {
                        break;
                    }
                }
            }
        }
        self.shared.admission.take_request(self.shared.clock.now(), scopes)
    }

    /// Takes a place for a request that is still arriving, in every scope or in none. Asks the
    /// server first if this gateway lacks parts.
    pub(crate) async fn arrive(
        &self,
        requester: &Requester,
        scopes: &[ScopeLimits],
    ) -> Result<Arrival, Box<Refusal>> {
        for _ in 0..ATTEMPTS {
            let now = self.shared.clock.now();
            match self.shared.admission.arrive_or_ask(now, requester, scopes) {
                Ok(arrived) => return arrived,
                Err(wants) => {
                    if !self.ask(wants).await {
                        break;
                    }
                }
            }
        }
        self.shared.admission.arrive(self.shared.clock.now(), requester, scopes)
    }

    /// Asks for parts. Returns false if the server has not answered in time.
    pub(crate) async fn ask(&self, wants: Vec<PartWant>) -> bool {
        // Relaxed: the flag guards no other memory.
        if self.shared.is_gone.load(Ordering::Relaxed) {
            return false;
        }
        let (answer, answered) = oneshot::channel();
        if self.commands.try_send(RateCommand::Want(wants, answer)).is_err() {
            return false;
        }
        count(&self.shared.counters.waits);
        let is_answered = matches!(timeout(LONGEST_WAIT, answered).await, Ok(Ok(true)));
        if !is_answered {
            count(&self.shared.counters.unanswered);
        }
        is_answered
    }

    /// Returns the work for parts since the start.
    pub(crate) fn figures(&self) -> PartFigures {
        let PartCounters { waits, unanswered, calls } = &self.shared.counters;
        // Relaxed: the counts guard no other memory.
        let [waits, unanswered, calls] =
            [waits, unanswered, calls].map(|count| count.load(Ordering::Relaxed));
        let are_leased = self.shared.mode() == PartMode::Leased;
        PartFigures { waits, unanswered, calls, are_leased }
    }

    /// Gives everything back. What is settled later is lost to all gateways.
    pub(crate) async fn stop(&self) {
        let (done, stopped) = oneshot::channel();
        if self.commands.try_send(RateCommand::Stop(done)).is_ok() {
            // What is not given back ends by itself.
            let _ = timeout(LAST_WORDS, stopped).await;
        }
    }
}

impl Shared {
    fn tenure(&self) -> MutexGuard<'_, Tenure> {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the way in which parts may be used now.
    fn mode(&self) -> PartMode {
        self.tenure().mode(BootTime::now().since_start())
    }
}

impl RateTask {
    async fn run(mut self) {
        let mut ticks = interval(BEAT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // First of all: requests that ask all the time must not hold up what others
                // wait for.
                biased;
                _ = ticks.tick() => self.beat().await,
                command = self.inbox.recv() => match command {
                    Some(RateCommand::Want(wants, answer)) => {
                        if let Some(stop) = self.grant(wants, answer).await {
                            return self.stop(stop).await;
                        }
                    }
                    Some(RateCommand::Stop(done)) => return self.stop(done).await,
                    None => return,
                },
            }
        }
    }

    /// Asks for what requests lack. All that wait at this moment share one call. Returns the
    /// stop if it came meanwhile.
    async fn grant(
        &mut self,
        mut wants: Vec<PartWant>,
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
                RateCommand::Want(_, answer) if answer.is_closed() => {}
                RateCommand::Want(more, answer) => {
                    wants.extend(more);
                    answers.push(answer);
                }
                RateCommand::Stop(done) => stop = Some(done),
            }
        }
        // After a sleep of the machine the server must be heard first.
        if self.shared.mode() != PartMode::Leased {
            self.beat().await;
        }
        let is_leased = self.shared.mode() == PartMode::Leased;
        let calls = match is_leased {
            true => self.shared.admission.part_calls_for(self.shared.clock.now(), &wants),
            false => Vec::new(),
        };
        let is_done = is_leased && self.ask(&calls).await;
        for answer in answers {
            // The request may have stopped waiting.
            let _ = answer.send(is_done);
        }
        stop
    }

    /// Says that the gateway runs, gives back what is not needed, and asks for what was refused.
    async fn beat(&mut self) {
        // A second beat follows at once if everything had to be claimed, so that the server need
        // not wait for it.
        for _ in 0..2 {
            let sent = BootTime::now().since_start();
            let (told, is_first) = {
                let tenure = self.shared.tenure();
                (tenure.told(sent), tenure.is_new())
            };
            let gateways = self.shared.admission.status().gateways;
            let beat = Beat { number: self.number, gateways, is_first, told };
            count(&self.shared.counters.calls);
            let answer = match self.server.beat(&beat).await {
                Ok(answer) => answer,
                Err(error) => return self.failed(&error),
            };
            self.answered();
            let now = BootTime::now().since_start();
            if !self.shared.tenure().beaten(sent, now, &answer) {
                return self.share(answer.wanted).await;
            }
            self.shared.admission.enter_part_mode(self.shared.clock.now());
            self.shared.tenure().begin_claim(sent, answer.born);
            let calls = self.shared.admission.part_calls_to_claim(self.shared.clock.now());
            let is_claimed = self.ask(&calls).await;
            if !is_claimed {
                return self.shared.tenure().end_claim();
            }
            self.shared.tenure().claimed(sent, answer.born);
        }
    }

    /// Makes the calls of a beat.
    async fn share(&mut self, wanted: Vec<(String, u64)>) {
        self.beats += 1;
        let wanted = wanted.into_iter();
        let wanted: HashMap<SharedLimit, u64> =
            wanted.filter_map(|(name, parts)| Some((SharedLimit::of(&name)?, parts))).collect();
        let are_all = self.beats.is_multiple_of(BEATS_OF_A_LOOK);
        let now = self.shared.clock.now();
        let calls = self.shared.admission.part_calls_at_beat(now, &wanted, are_all);
        self.ask(&calls).await;
    }

    /// Makes calls and adopts the answers. Returns false if the server did not answer.
    async fn ask(&mut self, calls: &[PartCall]) -> bool {
        for part in calls.chunks(CALLS_AT_ONCE) {
            let named: Vec<_> =
                part.iter().map(|call| (call.shared.to_string(), call.ask)).collect();
            count(&self.shared.counters.calls);
            let from = (self.number, self.shared.tenure().born());
            match self.server.ask(from, &named).await {
                Ok(answers) => {
                    self.answered();
                    let answered = part.iter().zip(answers);
                    let answered = answered.filter_map(|(call, answer)| Some((call, answer?)));
                    self.shared.admission.parts_answered(self.shared.clock.now(), answered);
                }
                // The next beat claims everything again.
                Err(RateServerError::Unknown) => return false,
                Err(error) => {
                    self.failed(&error);
                    return false;
                }
            }
        }
        true
    }

    async fn stop(mut self, done: oneshot::Sender<()>) {
        let calls = self.shared.admission.part_calls_at_stop(self.shared.clock.now());
        if self.ask(&calls).await && self.server.leave(self.number).await.is_err() {
            tracing::debug!("the Redis server was not told that the gateway stops");
        }
        // The gateway may have stopped waiting.
        let _ = done.send(());
    }

    fn answered(&mut self) {
        let was_gone = self.shared.is_gone.swap(false, Ordering::Relaxed);
        if was_gone {
            tracing::info!(
                "the Redis server answers again; rates and places are shared over all gateways"
            );
        }
        self.failures = 0;
    }

    fn failed(&mut self, error: &RateServerError) {
        self.failures += 1;
        self.shared.tenure().failed(BootTime::now().since_start());
        self.shared.admission.enter_part_mode(self.shared.clock.now());
        if self.failures == FAILURES {
            self.shared.is_gone.store(true, Ordering::Relaxed);
            tracing::error!(
                error = error as &dyn std::error::Error,
                "cannot share rates and places with other gateways; a few seconds from now each uses an equal part of them"
            );
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The longest time for which a request waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_millis(250);
/// The questions of one request at most. Another request may take what was granted.
const ATTEMPTS: u32 = 3;
/// The requests that can wait for the task.
const WAITING: usize = 4_096;
/// The requests that share a call at most.
const MOST_AT_ONCE: usize = 1_024;
/// The rates of one call at most: the server does nothing else meanwhile.
const CALLS_AT_ONCE: usize = 64;
/// The time between two beats.
const BEAT: Duration = Duration::from_millis(500);
/// The beats between two looks at all rates.
const BEATS_OF_A_LOOK: u64 = 2;
/// The failures after which no request waits for the server.
const FAILURES: u32 = 3;
/// The time that the last calls may take when the gateway stops.
const LAST_WORDS: Duration = Duration::from_secs(2);
