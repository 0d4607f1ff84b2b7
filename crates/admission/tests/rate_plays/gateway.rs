//! One gateway: its admission, and the calls that it makes one after another.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use tollgate_admission::{Admission, AdmissionOptions, RateCall, RateName, RateWant, ScopeLimits};
use tollgate_cluster::rates::{Beat, BeatAnswer, PartAnswer, RateMode, Tenure};
use tollgate_domain::{MonotonicTime, PlanLimits, Rate};

use crate::common::{scoped, tenant};
use crate::play::{GATEWAYS, Omission};

/// The milliseconds between two beats.
const BEAT: u64 = 500;
/// The milliseconds after which a call has failed.
pub(crate) const PATIENCE: u64 = 50;

/// A call on its way.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    Beat(Beat),
    Ask(Vec<RateCall>),
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
    tenure: Tenure,
    scopes: Vec<ScopeLimits>,
    omitted: Option<Omission>,
    pub(crate) flight: Option<Flight>,
    calls: u64,
    /// The calls that claim everything, and the beat before them.
    claims: VecDeque<RateCall>,
    claiming: Option<(u64, BeatAnswer)>,
    due: VecDeque<Vec<RateCall>>,
    next_beat: u64,
    beats: u64,
    wants: Vec<RateWant>,
    /// The requests that wait for the answer.
    waiting: u64,
    pub(crate) stopped_until: u64,
}

pub(crate) fn at(now: u64) -> MonotonicTime {
    MonotonicTime(now * 1_000_000)
}

impl Gateway {
    pub(crate) fn new(number: u32, rate: Rate, now: u64, omitted: Option<Omission>) -> Self {
        let admission = Admission::new(AdmissionOptions::default());
        admission.lease_rates();
        admission.share_among(at(now), NonZeroU32::new(GATEWAYS).unwrap());
        let limits = PlanLimits { requests: Some(rate), ..PlanLimits::default() };
        Self {
            number,
            admission,
            tenure: Tenure::default(),
            scopes: vec![scoped(tenant("acme"), limits)],
            omitted,
            flight: None,
            calls: 0,
            claims: VecDeque::new(),
            claiming: None,
            due: VecDeque::new(),
            next_beat: 0,
            beats: 0,
            wants: Vec::new(),
            waiting: 0,
            stopped_until: 0,
        }
    }

    fn check_tenure(&self, now: u64) {
        let mode = self.tenure.mode(Duration::from_millis(now));
        match self.omitted {
            // What was had once stays.
            Some(Omission::Life) if !self.tenure.is_new() => {}
            Some(Omission::Narrowed) if mode == RateMode::Narrowed => {
                self.admission.enter_rate_mode(at(now), RateMode::Divided);
            }
            Some(Omission::Ended) if mode == RateMode::Ended => {}
            _ => self.admission.enter_rate_mode(at(now), mode),
        }
    }

    /// Takes one request. Returns `None` if it waits for the store.
    pub(crate) fn request(&mut self, now: u64, may_wait: bool) -> Option<bool> {
        if !self.is_claiming() {
            self.check_tenure(now);
        }
        match self.admission.take_request_or_ask(at(now), &self.scopes) {
            Ok(taken) => Some(taken.is_ok()),
            Err(wants) if may_wait => {
                self.wants.extend(wants);
                self.waiting += 1;
                None
            }
            Err(_) => Some(self.admission.take_request(at(now), &self.scopes).is_ok()),
        }
    }

    /// Returns the way in which the gateway uses rates.
    pub(crate) fn mode(&self, now: u64) -> RateMode {
        match self.is_claiming() {
            true => RateMode::Leased,
            false => self.tenure.mode(Duration::from_millis(now)),
        }
    }

    fn is_claiming(&self) -> bool {
        self.claiming.is_some()
    }

    /// Returns the requests that waited for the store and may try again.
    pub(crate) fn woken(&mut self) -> u64 {
        std::mem::take(&mut self.waiting)
    }

    /// Returns the next call, if one is due and none is on its way.
    pub(crate) fn next_call(&mut self, now: u64) -> Option<Call> {
        if self.flight.is_some() {
            return None;
        }
        let call = if let Some(claim) = self.claims.pop_front() {
            Call::Ask(vec![claim])
        } else if let Some(calls) = self.due.pop_front() {
            Call::Ask(calls)
        } else if now >= self.next_beat {
            self.next_beat = now + BEAT;
            let (number, told) = (self.number, self.tenure.told());
            let gateways = match self.omitted {
                Some(Omission::Learning) => 1,
                _ => GATEWAYS,
            };
            Call::Beat(Beat { number, gateways, is_first: self.tenure.is_new(), told })
        } else if !self.wants.is_empty() {
            let wants = std::mem::take(&mut self.wants);
            let calls = self.admission.rate_calls_for(at(now), &wants);
            if calls.is_empty() {
                return None;
            }
            Call::Ask(calls)
        } else {
            return None;
        };
        self.calls += 1;
        self.flight = Some(Flight { id: self.calls, sent: now, call: call.clone() });
        Some(call)
    }

    /// Adopts the answer to the call on its way. Returns true if waiting requests may try again.
    pub(crate) fn answered(&mut self, now: u64, reply: &Reply) -> bool {
        let Some(Flight { call, sent, .. }) = self.flight.take() else { return false };
        match (&call, reply) {
            (Call::Beat(_), Reply::Beat(answer)) => {
                self.beaten(sent, now, answer);
                false
            }
            (Call::Ask(calls), Reply::Parts(Some(answers))) => {
                let answered = calls.iter().zip(answers);
                let answered = answered.filter_map(|(call, answer)| Some((call, (*answer)?)));
                self.admission.rates_answered(at(now), answered);
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
        self.check_tenure(now);
        if self.tenure.beaten(times.0, times.1, answer) {
            self.claims = self.admission.rate_calls_to_claim(at(now)).into();
            self.claiming = Some((sent, answer.clone()));
            self.end_claims();
            return;
        }
        let wanted: HashMap<RateName, u64> = answer
            .wanted
            .iter()
            .filter_map(|(name, parts)| Some((RateName::of(name)?, *parts)))
            .collect();
        let all = self.beats.is_multiple_of(2);
        let calls = self.admission.rate_calls_at_beat(at(now), &wanted, all);
        if !calls.is_empty() {
            self.due.push_back(calls);
        }
    }

    fn end_claims(&mut self) {
        if self.claims.is_empty()
            && let Some((sent, answer)) = self.claiming.take()
        {
            self.tenure.claimed(Duration::from_millis(sent), answer.born);
            // The store must hear soon that everything is claimed.
            self.next_beat = 0;
        }
    }

    fn drop_calls(&mut self) {
        self.flight = None;
        self.claims.clear();
        self.claiming = None;
        self.due.clear();
    }

    /// Notes that the call on its way has failed. Returns true if waiting requests may try again.
    pub(crate) fn failed(&mut self, now: u64) {
        self.tenure.failed(Duration::from_millis(now));
        self.drop_calls();
        self.check_tenure(now);
        self.wants.clear();
    }
}
