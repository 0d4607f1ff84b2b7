//! Open-loop load against a gateway, without coordinated omission, and the small
//! HTTPS client that the load test and `tollgate chat` use. It speaks HTTP only and
//! measures what any client would see.
//!
//! A run has a [`plan`] (the due time and the content of each request), a
//! [`mod@run`] that sends each request at its due time whether or not earlier ones
//! were answered, and a [`report`]. Every latency counts from the due time of a
//! request and not from the time at which it could be sent.
//!
//! A drill has a [`scenario`] of honest tenants and attackers, a [`drill`] that
//! runs it and observes the gateway, a [`verdict`] on the expectations, and a
//! [`page`] with the results.

pub mod client;
mod clock;
mod compare;
pub mod csv;
pub mod drill;
pub mod frames;
pub mod machine;
pub mod outcome;
pub mod page;
pub mod plan;
pub mod prompts;
mod random_shape;
pub mod rates;
pub mod report;
pub mod run;
pub mod scenario;
pub mod shape;
mod slot;
pub mod sse;
pub mod verdict;

pub use compare::compare;
pub use plan::{Arrivals, Load, LoadError, Tenant};
pub use prompts::{Prompt, Prompts};
pub use rates::{Rates, Spike};
pub use report::Report;
pub use run::{Finished, Progress, run};
