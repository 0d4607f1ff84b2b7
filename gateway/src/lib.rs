//! The gateway: callers, admission, placement and replies behind the edge.
//!
//! Each stage of a request takes the value of the stage before and returns the
//! next value; no fact about a request travels beside that chain. The module
//! [`gateway`] builds the parts that all requests share, once.

mod admit;
mod api;
pub mod auth;
mod idempotency;
mod limits;
mod path;
mod penalties;
mod pump;
pub mod reply;
mod route;
mod routes;
mod serving;
mod stack;
mod submit;
pub mod upstream;

pub mod admin;
pub mod audit;
pub mod telemetry;

pub mod clock;
mod edge_options;
pub mod gateway;

#[doc(hidden)]
pub mod fuzz;

pub use auth::{AuthenticatedCaller, Authenticator};
pub use clock::Clock;
pub use gateway::{Gateway, GatewayError, GatewayOptions, GatewayService};
pub use idempotency::IntentsError;
pub use reply::ApiError;
