//! One gateway: its admission, and the calls that it makes one after another.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate_admission::{
    Admission, AdmissionOptions, Hold, HoldState, PartCall, PartWant, ScopeLimits, SharedLimit,
};
use tollgate_cluster::parts::{Beat, BeatAnswer, PartAnswer, PartMode, Tenure};
use tollgate_domain::{MonotonicTime, PlanLimits};

use crate::common::{estimate, request, scoped, tenant, utc};
use crate::play::{GATEWAYS, Omission};

/// The milliseconds between two beats.
const BEAT: u64 = 500;
/// The milliseconds between two sweeps.
const SWEEP: u64 = 200;
/// The milliseconds after which a call has failed.
pub(crate) const PATIENCE: u64 = 50;

/// A call on its way.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    Beat(Beat),
    /// Calls to the store of a birth.
    Ask(u64, Vec<PartCall>),
}

/// A call without an answer, and the time at which it was sent.
pub(crate) struct Flight {
    pub(crate) id: u64,
    pub(crate) sent: u64,
    call: Call,
}

/// The answer to a call.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Beat(BeatAnswer),
    /// `None` if a beat must come first.
    Parts(Option<Vec<Option<PartAnswer>>>),
}

pub(crate) struct Gateway {
    pub(crate) number: u32,
    pub(crate) admission: Admission,
    grounds: Arc<Mutex<Grounds>>,
    scopes: Vec<ScopeLimits>,
    omitted: Option<Omission>,
    pub(crate) flight: Option<Flight>,
    calls: u64,
    /// The calls that claim everything, and the beat before them.
    claims: VecDeque<PartCall>,
    claiming: Option<(u64, BeatAnswer)>,
    due: VecDeque<Vec<PartCall>>,
    next_beat: u64,
    beats: u64,
    wants: Vec<PartWant>,
    /// The requests that wait for the answer, each with the number of calls that it may still wait
    /// for.
    waiting: Vec<u32>,
    pub(crate) stopped_until: u64,
    /// True if the store has granted without this gateway since it used the parts of the store.
    pub(crate) was_cut_off: bool,
    /// The requests that run, in the order in which they began.
    running: Vec<Running>,
    /// The number of requests that have begun.
    pub(crate) begun: u64,
    /// The requests that wait for a place, each with the milliseconds that it takes.
    queue: Vec<(Hold, u64)>,
    /// The time of the newest sweep.
    swept: u64,
    /// The mode in which the covered requests began.
    covered_in: PartMode,
}

/// A request that runs.
struct Running {
    hold: Hold,
    ends: u64,
    /// True if it began with a part that the gateway still has.
    is_covered: bool,
}

/// The grounds on which a gateway may use parts.
struct Grounds {
    tenure: Tenure,
    now: u64,
    omitted: Option<Omission>,
    last: PartMode,
}

impl Grounds {
    fn mode(&mut self) -> PartMode {
        let mode = self.tenure.mode(Duration::from_millis(self.now));
        match self.omitted {
            // What was had once stays.
            Some(Omission::Life) if !self.tenure.is_new() => {}
            Some(Omission::Narrowed) if mode == PartMode::Narrowed => self.last = PartMode::Divided,
            Some(Omission::Ended) if mode == PartMode::Ended => {}
            _ => self.last = mode,
        }
        self.last
    }
}

pub(crate) fn at(now: u64) -> MonotonicTime {
    MonotonicTime(now * 1_000_000)
}

impl Gateway {
    pub(crate) fn new(
        number: u32,
        limits: &PlanLimits,
        now: u64,
        omitted: Option<Omission>,
    ) -> Self {
        let admission = Admission::new(AdmissionOptions::default());
        let grounds = Grounds { tenure: Tenure::default(), now, omitted, last: PartMode::Ended };
        let grounds = Arc::new(Mutex::new(grounds));
        let source = Arc::clone(&grounds);
        admission.lease_parts(move || source.lock().unwrap().mode());
        admission.share_among(at(now), NonZeroU32::new(GATEWAYS).unwrap());
        Self {
            number,
            admission,
            grounds,
            scopes: vec![scoped(tenant("acme"), limits.clone())],
            omitted,
            flight: None,
            calls: 0,
            claims: VecDeque::new(),
            claiming: None,
            due: VecDeque::new(),
            next_beat: 0,
            beats: 0,
            wants: Vec::new(),
            waiting: Vec::new(),
            stopped_until: 0,
            was_cut_off: false,
            running: Vec::new(),
            begun: 0,
            queue: Vec::new(),
            swept: 0,
            covered_in: PartMode::Ended,
        }
    }

    fn grounds(&self) -> MutexGuard<'_, Grounds> {
        self.grounds.lock().unwrap()
    }

    /// Tells the gateway what time it is.
    pub(crate) fn see(&self, now: u64) {
        self.grounds().now = now;
    }

    /// Takes one request. Returns `None` if it waits for the store.
    pub(crate) fn request(&mut self, now: u64, waits: u32) -> Option<bool> {
        self.see(now);
        match self.admission.take_request_or_ask(at(now), &self.scopes) {
            Ok(taken) => Some(taken.is_ok()),
            Err(wants) if waits > 0 => {
                self.wants.extend(wants);
                self.waiting.push(waits - 1);
                None
            }
            Err(_) => Some(self.admission.take_request(at(now), &self.scopes).is_ok()),
        }
    }

    /// Reserves a place for the request `number`, which takes `millis`. Returns `None` if it waits
    /// for the store, and true if it runs.
    pub(crate) fn reserve(
        &mut self,
        now: u64,
        (number, millis): (u64, u64),
        waits: u32,
    ) -> Option<bool> {
        self.see(now);
        let (time, utc) = (at(now), utc(0));
        let asked = request(number, now * 1_000_000, &self.scopes, estimate(1, 1, 1));
        let reserved = match self.admission.reserve_or_ask(time, utc, asked, None) {
            Ok(reserved) => reserved,
            Err(lacking) if waits > 0 => {
                self.wants.extend(lacking.parts);
                self.waiting.push(waits - 1);
                return None;
            }
            Err(lacking) => self.admission.reserve(time, utc, lacking.request),
        };
        let Ok(hold) = reserved else { return Some(false) };
        if hold.state() == HoldState::Queued {
            self.queue.push((hold, millis));
            return Some(false);
        }
        self.begun += 1;
        self.running.push(Running { hold, ends: now + millis, is_covered: true });
        Some(true)
    }

    /// Ends the requests that have run long enough. Returns the number of those that waited and
    /// run now.
    pub(crate) fn advance(&mut self, now: u64) -> u64 {
        if self.running.is_empty() && self.queue.is_empty() {
            return 0;
        }
        self.see(now);
        if now >= self.swept + SWEEP {
            self.admission.expire(at(now));
            self.swept = now;
        }
        let (over, running) = std::mem::take(&mut self.running)
            .into_iter()
            .partition::<Vec<_>, _>(|running| running.ends <= now);
        self.running = running;
        for running in over {
            running.hold.void(at(now)).expect("the hold is open");
        }
        let mut started = 0;
        if self.admission.status().queued == self.queue.len() {
            return started;
        }
        for (hold, millis) in std::mem::take(&mut self.queue) {
            let mut context = Context::from_waker(Waker::noop());
            let polled = pin!(hold.queue_ticket()).poll(&mut context);
            match polled {
                Poll::Ready(Ok(())) => {
                    started += 1;
                    self.begun += 1;
                    self.running.push(Running { hold, ends: now + millis, is_covered: true });
                }
                // Its deadline has passed.
                Poll::Ready(Err(_)) => {}
                Poll::Pending => self.queue.push((hold, millis)),
            }
        }
        started
    }

    /// Forgets the cover of requests when what they began with has ended, as is known at `now`.
    pub(crate) fn uncover(&mut self, now: u64, share: usize) {
        let mode = self.mode(now);
        if mode == self.covered_in {
            return;
        }
        // Also those of a gateway that is stopped.
        let kept = match (self.covered_in, mode) {
            (PartMode::Leased, PartMode::Narrowed) => share,
            _ => 0,
        };
        let covered = self.running.iter_mut().filter(|running| running.is_covered);
        covered.skip(kept).for_each(|running| running.is_covered = false);
        self.covered_in = mode;
    }

    /// Returns the number of requests that run with a part which the gateway has.
    pub(crate) fn covered(&self) -> usize {
        self.running.iter().filter(|running| running.is_covered).count()
    }

    /// Returns the numbers of requests that run and that wait for a place.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.running.len(), self.queue.len())
    }

    /// Ends all requests that run.
    pub(crate) fn end_all(&mut self, now: u64) {
        self.running.iter_mut().for_each(|running| running.ends = now);
    }

    /// Ends the oldest request that runs.
    pub(crate) fn end_one(&mut self, now: u64) {
        if let Some(running) = self.running.first_mut() {
            running.ends = now;
        }
    }

    /// Returns the way in which the gateway may use parts.
    pub(crate) fn mode(&self, now: u64) -> PartMode {
        self.grounds().tenure.mode(Duration::from_millis(now))
    }

    fn is_claiming(&self) -> bool {
        self.claiming.is_some()
    }

    /// Returns the requests that waited for the store and may try again, each with the number of
    /// calls that it may still wait for.
    pub(crate) fn woken(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.waiting)
    }

    /// Returns the next call, if one is due and none is on its way.
    pub(crate) fn next_call(&mut self, now: u64) -> Option<Call> {
        self.see(now);
        if self.flight.is_some() {
            return None;
        }
        let call = if let Some(claim) = self.claims.pop_front() {
            Call::Ask(self.grounds().tenure.born(), vec![claim])
        } else if let Some(calls) = self.due.pop_front() {
            Call::Ask(self.grounds().tenure.born(), calls)
        } else if now >= self.next_beat {
            self.next_beat = now + BEAT;
            let (number, (told, is_first)) = (self.number, {
                let grounds = self.grounds();
                (grounds.tenure.told(Duration::from_millis(now)), grounds.tenure.is_new())
            });
            let gateways = match self.omitted {
                Some(Omission::Learning) => 1,
                _ => GATEWAYS,
            };
            Call::Beat(Beat { number, gateways, is_first, told })
        } else if !self.wants.is_empty() {
            let wants = std::mem::take(&mut self.wants);
            let calls = self.admission.part_calls_for(at(now), &wants);
            if calls.is_empty() {
                return None;
            }
            Call::Ask(self.grounds().tenure.born(), calls)
        } else {
            return None;
        };
        self.calls += 1;
        self.flight = Some(Flight { id: self.calls, sent: now, call: call.clone() });
        Some(call)
    }

    /// Adopts the answer to the call on its way. Returns true if waiting requests may try again.
    pub(crate) fn answered(&mut self, now: u64, reply: &Reply) -> bool {
        self.see(now);
        let Some(Flight { call, sent, .. }) = self.flight.take() else { return false };
        match (&call, reply) {
            (Call::Beat(_), Reply::Beat(answer)) => {
                self.beaten(sent, now, answer);
                false
            }
            (Call::Ask(_, calls), Reply::Parts(Some(answers))) => {
                let answered = calls.iter().zip(answers);
                let answered = answered.filter_map(|(call, answer)| Some((call, (*answer)?)));
                self.admission.parts_answered(at(now), answered);
                self.end_claims();
                !self.is_claiming()
            }
            (_, Reply::Parts(None)) => {
                // A beat must come first.
                self.next_beat = now;
                self.drop_calls();
                true
            }
            other => panic!("{other:?}"),
        }
    }

    fn beaten(&mut self, sent: u64, now: u64, answer: &BeatAnswer) {
        self.beats += 1;
        let times = (Duration::from_millis(sent), Duration::from_millis(now));
        let must_claim = self.grounds().tenure.beaten(times.0, times.1, answer);
        if must_claim {
            self.admission.enter_part_mode(at(now));
            self.claiming = Some((sent, answer.clone()));
            self.grounds().tenure.begin_claim(times.0, answer.born);
            self.claims = self.admission.part_calls_to_claim(at(now)).into();
            self.end_claims();
            return;
        }
        let wanted: HashMap<SharedLimit, u64> = answer
            .wanted
            .iter()
            .filter_map(|(name, parts)| Some((SharedLimit::of(name)?, *parts)))
            .collect();
        let all = self.beats.is_multiple_of(2);
        let calls = self.admission.part_calls_at_beat(at(now), &wanted, all);
        if !calls.is_empty() {
            self.due.push_back(calls);
        }
    }

    fn end_claims(&mut self) {
        if self.claims.is_empty()
            && let Some((sent, answer)) = self.claiming.take()
        {
            let mut grounds = self.grounds();
            grounds.tenure.claimed(Duration::from_millis(sent), answer.born);
            drop(grounds);
            // The store must hear soon that everything is claimed.
            self.next_beat = 0;
        }
    }

    fn drop_calls(&mut self) {
        self.flight = None;
        self.claims.clear();
        self.claiming = None;
        self.grounds().tenure.end_claim();
        self.due.clear();
    }

    /// Notes that the call on its way has failed. Returns true if waiting requests may try again.
    pub(crate) fn failed(&mut self, now: u64) {
        self.see(now);
        self.grounds().tenure.failed(Duration::from_millis(now));
        self.admission.enter_part_mode(at(now));
        self.drop_calls();
        self.wants.clear();
    }
}
