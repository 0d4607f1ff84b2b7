//! Tests of the API: whole requests through the routes against a fake worker.

mod idempotent;
mod limits;
pub(crate) mod test_gateway;
mod whole;
