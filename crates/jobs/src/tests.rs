//! Tests over the whole crate: one suite for every store, and played time in which
//! processes die, disks fail and workers are lost.

mod chance;
mod disk;
mod kills;
mod plays;
mod suite;
mod turns;
mod uploads;
mod world;
