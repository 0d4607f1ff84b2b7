//! The gateway: callers, admission, placement and replies behind the edge.
//!
//! Each stage of a request takes the value of the stage before and returns the
//! next value; no fact about a request travels beside that chain. The module
//! [`gateway`] builds the parts that all requests share, once.

mod access_log;
mod admin_certificate;
mod api;
pub mod auth;
mod client_ids;
mod members;
mod observer;
mod openapi;
mod raises;
mod read_limit;
mod record;
mod reload;
pub mod reply;
mod retirement;
mod routes;
mod source_penalties;
mod stack;
mod trust;
mod webhook;

pub mod admin;
pub mod audit;
pub mod statement;
pub mod telemetry;

mod connection_owners;
mod cors;
mod doors;
mod edge_options;
pub mod gateway;

#[doc(hidden)]
pub mod fuzz;

#[cfg(test)]
mod serving_tests;

pub use admin_certificate::admin_certificate;
pub use auth::{AuthenticatedCaller, Authenticator};
pub use gateway::{Gateway, GatewayError, GatewayOptions, GatewayService, Shutdown};
pub use reload::{ChangeRow, ReloadError, ReloadReport, ReloadRun, Reloader};
pub use reply::ApiError;
pub use tollgate_serving::{Clock, workers};
