//! The values that go into a reservation and come out of it.

use std::time::Duration;

use tollgate_domain::{
    Currency, DeviceClass, DeviceNanos, ExactAmount, MonotonicTime, Priced, RequestId, Tier,
    UnitPrices, UtcTime,
};

use crate::bucket::Demand;
use crate::places::Requester;
use crate::refusal::{Limit, Refusal};
use crate::scope::{Scope, ScopeLimits};

/// Bounds of the admission state. The defaults suit one gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionOptions {
    /// Largest number of open holds, running and waiting.
    pub max_holds: usize,
    /// Largest number of scopes in memory. Idle ones are forgotten first.
    pub max_scopes: usize,
    /// Largest number of ended holds in memory. They detect a second resolve and accept
    /// late usage. The oldest are forgotten first.
    pub max_resolved: usize,
}

impl Default for AdmissionOptions {
    fn default() -> Self {
        Self { max_holds: 65_536, max_scopes: 131_072, max_resolved: 65_536 }
    }
}

/// A request for admission.
#[derive(Clone, Debug)]
pub struct Reserve {
    /// Id of the hold, never used twice.
    pub id: RequestId,
    /// Tenant that the request counts for where several share a queue.
    pub requester: Requester,
    /// Class of service. Batch work takes nothing from the rates of tokens and of device
    /// time, because it only uses capacity that interactive work leaves.
    pub tier: Tier,
    /// True for a line of a batch. It takes no place and nothing from the rates of requests:
    /// the quotas of batches bound the lines.
    pub is_line: bool,
    /// Scopes that limit the request, narrowest first, none twice.
    pub scopes: Vec<ScopeLimits>,
    /// Number of scopes, from the first, whose request rate has counted the request
    /// already: those that went through [`Admission::take_request`](crate::Admission::take_request).
    pub counted: usize,
    /// Class of the devices that would serve the request.
    pub class: DeviceClass,
    /// Predicted cost.
    pub estimate: Estimate,
    /// Time until which the request may wait. Then the hold is voided.
    pub queue_deadline: MonotonicTime,
    /// End of the hold's life: the deadline of the whole request plus a grace period.
    pub expires: MonotonicTime,
}

/// The predicted cost of a request. Device time is reference cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Tokens of the prompt and expected tokens of the output.
    pub tokens: u64,
    /// Largest number of tokens that the request can use within a minute.
    pub most_tokens: u64,
    /// Cost with the expected output.
    pub expected: DeviceNanos,
    /// Largest cost that the request can cause within a minute. Rates leave no debt beyond
    /// half a burst if every open request uses as much.
    pub most: DeviceNanos,
    /// Cost with the longest allowed output. If a cap applies, this is the budget that the
    /// worker must not exceed, so include the margin that the cost table needs.
    pub worst: DeviceNanos,
    /// Cost of the prompt and a first token. A cap with less left refuses the request.
    pub least: DeviceNanos,
    /// Host time that the form of the answer takes in advance; zero without a form.
    pub grammar_time: Duration,
    /// Prices and tokens, from which budgets compute the cost in money.
    pub money: MoneyEstimate,
}

/// Prices and tokens of a request. The default costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoneyEstimate {
    /// Prices of the request.
    pub prices: UnitPrices,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Smallest number of tokens of all answers: one for each choice.
    pub least_output: u64,
    /// Largest number of tokens of all answers.
    pub most_output: u64,
}

impl MoneyEstimate {
    /// Returns the cost with this device time and these tokens of all answers.
    pub(crate) fn cost(&self, time: DeviceNanos, output: u64) -> ExactAmount {
        self.prices.exact_cost(Priced {
            reference_ns: time.nanos(),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: output,
        })
    }
}

impl Estimate {
    /// Returns the demand on the rates of tokens.
    pub(crate) fn demand_of_tokens(&self) -> Demand {
        Demand { expected: self.tokens, most: self.most_tokens }
    }

    /// Returns the demand on the rates of grammar time. A higher cost becomes debt: the
    /// time of masks is not known in advance.
    pub(crate) fn demand_of_grammar_time(&self) -> Demand {
        Demand::exact(nanos(self.grammar_time))
    }

    /// Returns the demand on the rates of device time.
    pub(crate) fn demand_of_time(&self) -> Demand {
        Demand { expected: self.expected.nanos(), most: self.most.nanos() }
    }
}

/// The state of an open hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldState {
    /// The request may run; it has a place in every scope.
    Running,
    /// The request waits. In a pool, a model or the gateway, the member with the fewest
    /// running requests goes next; the requests of one member go in order of arrival.
    Queued,
}

/// The reason for which a reservation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// A limit refused; nothing was taken.
    #[error("refused by {} of {}", .0.limit.as_str(), .0.scope)]
    Refused(Box<Refusal>),
    /// The id was used before. A second hold would charge twice.
    #[error("a hold of this id exists or has been resolved")]
    AlreadyHeld,
}

/// The true usage of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Prompt and completion tokens, cached ones included.
    pub tokens: u64,
    /// Reference cost of the request.
    pub reference: DeviceNanos,
    /// Cost of the request in money.
    pub money: ExactAmount,
    /// Host time for the form of the answer.
    pub grammar_time: Duration,
}

impl Spent {
    /// Returns the spending of a request with a form that could not be compiled.
    pub fn of_grammar(grammar_time: Duration) -> Self {
        Self { grammar_time, ..Self::default() }
    }

    /// Returns the grammar time in nanoseconds.
    pub(crate) fn grammar_nanos(&self) -> u64 {
        nanos(self.grammar_time)
    }
}

fn nanos(time: Duration) -> u64 {
    // 2^64 ns are 584 years.
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The way in which a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The true cost was posted.
    Posted,
    /// Everything was returned.
    Voided,
    /// The hold was not resolved in time. Only late usage may still be posted.
    Expired,
}

/// The reason for which a hold was not resolved. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The hold was resolved before, or it has expired and the call was a void.
    #[error("already settled: {0:?}")]
    AlreadySettled(Resolved),
    /// The hold never existed, or it was forgotten long after its end.
    #[error("no such hold")]
    Unknown,
}

/// The result of a settlement or a void.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settlement {
    /// Expected cost that was held against rates.
    pub held: DeviceNanos,
    /// Usage that is charged now.
    pub spent: Spent,
    /// Amount by which the true cost exceeded the amount held against caps; zero while
    /// workers keep to their budgets.
    pub overrun: DeviceNanos,
    /// True if the hold had expired before.
    pub late: bool,
    /// Waiting requests that may run now.
    pub promoted: Vec<RequestId>,
}

/// The result of a sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Running holds that were not resolved in time. They are released and charged nothing.
    pub expired: Vec<RequestId>,
    /// Waiting holds that passed their queue deadline. They are voided.
    pub timed_out: Vec<RequestId>,
    /// Waiting requests that may run now.
    pub promoted: Vec<RequestId>,
    /// Number of idle scopes that were forgotten.
    pub scopes_forgotten: usize,
    /// Thresholds of caps that were reached since the last sweep, in order.
    pub reached: Vec<CapReached>,
}

/// A threshold of a cap that was reached for the first time in its period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapReached {
    /// Kind of the cap.
    pub limit: Limit,
    /// Scope that the cap belongs to.
    pub scope: Scope,
    /// Device class, for a cap by device class.
    pub class: Option<DeviceClass>,
    /// Part of the cap that is spent, in percent: 50, 80 or 100. A cap that is nearly spent
    /// also reaches 100 when it refuses a request.
    pub percent: u8,
}

/// Sizes of the admission state, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionStatus {
    /// Number of holds that may run.
    pub running: usize,
    /// Number of holds that wait.
    pub queued: usize,
    /// Number of scopes in memory.
    pub scopes: usize,
    /// Number of ended holds in memory.
    pub resolved: usize,
    /// Number of gateways among which rates and places are divided.
    pub gateways: u32,
}

/// One moment on both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Time of rates.
    pub now: MonotonicTime,
    /// Time of the calendar.
    pub utc: UtcTime,
}

/// The state of one limit. Amounts are in the unit of the limit: requests, tokens,
/// nanoseconds of a device or of the host, or nano-units of a currency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitState {
    /// Scope that the limit belongs to.
    pub scope: Scope,
    /// Kind of the limit.
    pub limit: Limit,
    /// Device class, for limits by device class.
    pub class: Option<DeviceClass>,
    /// Currency, for budgets.
    pub currency: Option<Currency>,
    /// Value of the limit; of a rate, the units a minute.
    pub value: u64,
    /// Largest amount that a full rate gives at once; `None` if the limit is no rate.
    pub burst: Option<u64>,
    /// Amount in use: taken from a rate, spent and held in a calendar period, or the number of
    /// requests.
    pub used: u64,
    /// Amount that is left.
    pub remaining: u64,
    /// Time until the limit is whole if nothing more is taken: until a rate is full, or until
    /// the next calendar period. `None` if no time refills the limit.
    pub refills: Option<Duration>,
}

/// The number of open holds of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldRequests {
    /// Holds that may run.
    pub running: u64,
    /// Holds that wait for a place.
    pub waiting: u64,
}
