//! Caps that several gateways share: the calls that ask for slices of them. The rules are in
//! `tollgate-cluster`.

use std::collections::HashSet;

use tollgate_cluster::{Answer, Ask};
use tollgate_domain::{DeviceClass, MonotonicTime, UtcDay, UtcTime};

use crate::admission::{Admission, Arrival, Hold};
use crate::parts::PartWant;
use crate::refusal::Limit;
use crate::scope::Scope;
use crate::terms::{Reserve, ReserveError};

/// The name of a cap.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CapName {
    /// Scope that the cap belongs to.
    pub scope: Scope,
    /// Kind of the cap.
    pub limit: Limit,
    /// Device class, for a cap by device class.
    pub class: Option<DeviceClass>,
}

/// The part of a cap that a request wants to be spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapWant {
    /// The cap.
    pub cap: CapName,
    /// The largest cost of the request, in nanoseconds or in nano-units of the currency.
    pub asked: u64,
}

/// A call for a slice of a cap. Amounts are in nanoseconds or in nano-units of the currency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapCall {
    /// The cap.
    pub cap: CapName,
    /// Value of the cap; zero if the config has none any more.
    pub value: u64,
    /// Number of the day or month.
    pub(crate) period: u32,
    /// First day of the period.
    pub first_day: UtcDay,
    /// First day of the period before.
    pub previous: UtcDay,
    /// The call.
    pub ask: Ask,
}

/// A request for which the gateway lacks parts of shared limits. Nothing was taken.
#[derive(Debug)]
pub struct Lacking {
    /// The request, with the place in which it arrived.
    pub request: Reserve,
    /// The place of its arrival, if it has one.
    pub arrival: Option<Arrival>,
    /// The parts of caps that it lacks.
    pub wants: Vec<CapWant>,
    /// The parts of rates and places that it lacks.
    pub parts: Vec<PartWant>,
}

impl CapName {
    pub(crate) fn new(scope: &Scope, limit: Limit, class: Option<&DeviceClass>) -> Self {
        Self { scope: scope.clone(), limit, class: class.cloned() }
    }
}

impl Admission {
    /// Makes this gateway one of several that share the caps: it has only slices of them.
    /// `life` is larger than in every earlier start with the same data folder. Call this
    /// before spend is restored, which must be the spend of this gateway alone.
    pub fn share_caps(&self, life: u64) {
        self.lock().core.share_caps(life);
    }

    /// Remembers the caps of which an earlier life has a slice, so that the next beat asks for
    /// them and can give them back.
    pub fn remember_slices(&self, caps: &[CapName]) {
        self.lock().core.remember_slices(caps);
    }

    /// Takes every limit of the request, or none, as [`Self::reserve`] or
    /// [`Self::reserve_arrived`], if the parts of the limits that this gateway has suffice.
    ///
    /// # Errors
    ///
    /// [`Lacking`] if more of a limit is needed than this gateway has. The inner error is that of
    /// [`Self::reserve`].
    #[expect(clippy::result_large_err, reason = "the request goes back to its caller")]
    pub fn reserve_or_ask(
        &self,
        now: MonotonicTime,
        utc: UtcTime,
        request: Reserve,
        arrival: Option<Arrival>,
    ) -> Result<Result<Hold, ReserveError>, Lacking> {
        let mut guarded = self.lock_at(now);
        let parts = guarded.core.parts_lacking(now, utc, (&request, arrival.is_some()));
        let wants = guarded.core.lacking(now, utc, &request);
        if !wants.is_empty() || !parts.is_empty() {
            return Err(Lacking { request, arrival, wants, parts });
        }
        // Under the same lock, so that no other request takes what is spare.
        Ok(self.reserve_locked(guarded, (now, utc), request, arrival))
    }

    /// Begins calls for what requests want. Call [`Self::caps_answered`] with the answers.
    pub fn calls_for(&self, utc: UtcTime, wants: &[CapWant]) -> Vec<CapCall> {
        self.lock().core.calls_for(utc, wants)
    }

    /// Begins the calls of a beat, once a second: what the database should know, and what is
    /// given back. `hungry` are the caps of which other gateways lack some.
    pub fn calls_at_beat(
        &self,
        now: MonotonicTime,
        utc: UtcTime,
        hungry: &HashSet<CapName>,
    ) -> Vec<CapCall> {
        self.lock().core.calls_at_beat(now, utc, hungry)
    }

    /// Begins the calls of a gateway that stops, after its last settlement.
    pub fn calls_at_stop(&self, utc: UtcTime) -> Vec<CapCall> {
        self.lock().core.calls_at_stop(utc)
    }

    /// Adopts the answers to calls.
    pub fn caps_answered<'a>(
        &self,
        now: MonotonicTime,
        answers: impl IntoIterator<Item = (&'a CapCall, Answer)>,
    ) {
        let mut guarded = self.lock();
        for (call, answer) in answers {
            guarded.core.cap_answered(now, call, &answer);
        }
    }

    /// Notes that all work of earlier lives is settled: what they had and did not spend is
    /// spare.
    pub fn settle_earlier_lives(&self) {
        self.lock().core.settle_earlier_lives();
    }
}
