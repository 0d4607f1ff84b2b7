//! The API from its bodies to its bytes: each field's bounds, the shape of
//! answers, and whole requests through the routes against a fake worker.

mod idempotent;
pub(crate) mod room;
mod whole;
