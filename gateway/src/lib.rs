//! The front door: TLS, callers, admission, placement and replies.
//!
//! Modules stand in the order in which a request meets them. Each stage takes
//! the value of the last one and returns the next; nothing about a request
//! travels beside that chain. What all requests share is [`Gateway`], built
//! once in [`gateway`].

mod admit;
mod api;
pub mod auth;
mod idempotency;
mod limits;
pub mod listener;
mod path;
mod penalties;
mod pump;
pub mod reply;
mod route;
mod routes;
mod serving;
pub mod source;
mod stack;
mod submit;
pub mod tls;
pub mod upstream;

pub mod admin;
pub mod audit;
pub mod telemetry;

pub mod clock;
pub mod gateway;

#[doc(hidden)]
pub mod fuzz;

pub use auth::{AuthenticatedCaller, Authenticator};
pub use clock::Clock;
pub use gateway::{Gateway, GatewayError, GatewayOptions, GatewayService};
pub use idempotency::IntentsError;
pub use reply::ApiError;
