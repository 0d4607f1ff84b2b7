//! Tests of the whole system: the real binary, real TLS, real worker processes.
//!
//! All tests are one program, so that the product is linked once. `cargo xtask test`
//! runs the modules one after the other, because several modules judge latencies and
//! would disturb each other.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(unreachable_pub, reason = "a program has no API; pub marks what a module offers")]

mod admins;
mod attacks;
mod audit;
mod bad_input;
mod batch_faults;
mod batch_kills;
mod batch_results;
mod batches;
mod booted;
mod browsers;
mod budgets;
mod callers;
mod chat;
mod clock;
mod connections;
mod conservation;
mod data_folder;
mod devices;
mod disconnects;
mod disk;
mod fleet;
mod fleet_costs;
mod fleet_faults;
mod flex;
mod forms;
mod gpus;
mod health;
mod idempotency;
mod image;
mod kills;
mod limits;
mod listeners;
mod lost_gateway;
mod machines;
mod metering;
mod models;
mod openapi;
mod postgres;
mod raises;
mod reload;
mod remote;
mod rolling;
mod sdks;
mod serve;
mod service;
mod shared_batches;
mod shared_places;
mod shared_rates;
mod shared_workers;
mod statements;
mod storage;
mod structured;
mod support;
mod synthetic;
mod verify_limits;
mod watchdog;
mod webhook;
