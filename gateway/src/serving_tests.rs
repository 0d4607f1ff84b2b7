//! Tests of the serving crate through the API: real HTTP handlers, limits, keys
//! and ledger in front of it, fake workers behind it.

mod limits;
mod request_tasks;
mod shared_workers;
mod untrusted_workers;
mod workers;
