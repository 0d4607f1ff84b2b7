//! The path of a request without HTTP: from a known caller and a tokenized job
//! to events, a settled bill and an entry in the ledger.
//!
//! [`Serving`] is the entry point. The modules stand in the order in which a
//! request meets them. Each stage takes the value of the stage before and
//! returns the next value. A request ends with a [`Refusal`] or a [`Fault`],
//! never with a status code: the front door alone knows HTTP.

pub mod job;
pub mod tokenize;

pub mod idempotency;
pub mod limits;
pub mod penalties;

pub mod admit;
pub mod caps;
pub mod pump;
pub mod rates;
pub mod route;
pub mod workers;

pub mod event;
pub mod in_flight;
pub mod lost_gateway;
pub mod orders;
pub mod settlement;
pub mod submit;

pub mod boot_clock;
pub mod clock;
pub mod error;
pub mod keys;
pub mod model;
pub mod observer;
pub mod timings;
pub mod worker_identity;

mod serving;

#[doc(hidden)]
pub mod fuzz;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;

pub use clock::Clock;
pub use error::{Fault, FullQueue, IdempotencyRefusal, Refusal, RequestError, with_causes};
pub use job::Job;
pub use keys::KeyDirectory;
pub use limits::{BatchSpend, CallerContext, ConfiguredTenant, PastSpending, ShareOwner};
pub use observer::Observer;
pub use serving::{Serving, ServingOptions, SharedCaps, SharedLedger};
