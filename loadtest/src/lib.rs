//! Open-loop load against a gateway, honest about coordinated omission, and
//! the small HTTPS client that it and `tollgate chat` use. It speaks HTTP
//! only: it knows nothing of tollgate's insides and measures what any client
//! would see.
//!
//! A run is a [`plan`] (when each request is due and what it asks), a [`mod@run`]
//! that sends each at its time whether or not earlier ones were answered, and
//! a [`report`] in which every latency counts from the moment a request was
//! due, not from when it could be sent.
//!
//! A drill is a [`scenario`] of honest tenants and attackers, a [`drill`] that
//! plays it and watches, a [`verdict`] on what had to hold, and a [`page`] to
//! look at.

pub mod client;
pub mod drill;
pub mod frames;
pub mod outcome;
pub mod page;
pub mod plan;
pub mod report;
pub mod run;
pub mod scenario;
mod slot;
pub mod sse;
pub mod verdict;

pub use plan::{Arrivals, Load, LoadError, Tenant};
pub use report::Report;
pub use run::{Progress, run};
