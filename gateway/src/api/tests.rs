//! Tests of the API: whole requests through the routes against a fake worker.

mod access_log;
mod idempotent;
mod limits;
pub(crate) mod test_gateway;
mod tools;
mod whole;
