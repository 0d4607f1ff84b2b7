//! May you: rates, caps, concurrency, quotas and holds.
//!
//! The core is pure: it takes `now` and the calendar as parameters, keeps
//! integers only, and does no I/O. [`Admission`] wraps it in one mutex, since
//! a decision takes microseconds; [`Hold`] is the value that proves that every
//! limit was taken. Everything in here has a bound, and [`Admission::expire`],
//! called about once a second, is what prunes.
//!
//! A *rate* is a token bucket that holds the expected cost, settles to the
//! true one and may go into debt. A *cap* (a calendar day or month, UTC) is
//! never exceeded: it holds the worst case, or what remains of the cap, which
//! is then the request's budget. Spend belongs to the day and month in which
//! the request ends, as the ledger books it; one that runs across midnight is
//! held against the new day from its first moment.

mod admission;
mod bucket;
mod cap;
mod core;
pub mod expect;
mod figures;
mod penalty;
mod refusal;
mod scope;
mod terms;

pub use crate::admission::{Admission, Hold, QueueTicket, QueueTicketLost};
pub use crate::expect::ExpectedOutput;
pub use crate::figures::{CapFigures, Figures, RateFigures};
pub use crate::penalty::{Counted, ListedPenalty, Offence, Penalty, PenaltyBook, PenaltyTerms};
pub use crate::refusal::{Limit, Refusal};
pub use crate::scope::{Period, Scope, ScopeLimits};
pub use crate::terms::{
    AdmissionOptions, AdmissionStatus, Estimate, HoldState, Reserve, ReserveError, ResolveError,
    Resolved, Settlement, Spent, Swept,
};
