//! The Redis server on which several gateways share rates: a connection with time
//! limits for its calls, and the scripts that make each change at once. The rules are in `tollgate-cluster`.

mod address;
mod server;

#[cfg(feature = "test-support")]
pub mod testing;

pub use crate::address::{RedisAddress, RedisAddressError};
pub use crate::server::{RateServer, RateServerError};
