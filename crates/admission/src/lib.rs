//! Admission of requests: rates, caps, concurrency, quotas and holds.
//!
//! The core is pure: it takes `now` and the calendar as parameters, keeps integers only,
//! and does no I/O. [`Admission`] wraps the core in one mutex, because a decision takes
//! microseconds. A [`Hold`] proves that every limit was taken. All state is bounded.
//! [`Admission::expire`] removes old state; call it about once a second.
//!
//! A *rate* is a token bucket. A rate holds the expected cost, is corrected to the true
//! cost, and may go into debt. A request is refused if all open requests together could
//! use so much within a minute that the debt exceeds half a burst. A *cap* for a calendar day or month (UTC) is never exceeded.
//! A cap holds the worst-case cost, or the rest of the cap, and the held amount is the
//! budget of the request. Spend belongs to the day and month in which the request ends,
//! like in the ledger. A request that runs across midnight is held against the new day from
//! its first moment.

mod admission;
mod bucket;
mod cap;
mod core;
pub mod expect;
mod figures;
mod lease;
mod parts;
mod penalty;
mod place_lease;
mod places;
mod refusal;
mod reload;
mod scope;
mod slices;
mod terms;

pub use crate::admission::{Admission, Arrival, Hold, QueueTicket, QueueTicketLost};
pub use crate::expect::ExpectedOutput;
pub use crate::figures::{CapFigures, Figures, RateFigures};
pub use crate::parts::{PartCall, PartWant, SharedLimit};
pub use crate::penalty::{Counted, ListedPenalty, Offence, Penalty, PenaltyBook, PenaltyTerms};
pub use crate::places::Requester;
pub use crate::refusal::{Limit, Refusal};
pub use crate::reload::{LimitChange, NewLimits, PastCost, PastSpend};
pub use crate::scope::{Period, Scope, ScopeLimits};
pub use crate::slices::{CapCall, CapName, CapWant, Lacking};
pub use crate::terms::{
    AdmissionOptions, AdmissionStatus, CapReached, Estimate, HeldRequests, HoldState, LimitState,
    Moment, MoneyEstimate, Reserve, ReserveError, ResolveError, Resolved, Settlement, Spent, Swept,
};
