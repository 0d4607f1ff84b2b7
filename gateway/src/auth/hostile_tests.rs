//! Hostile tokens and issuers (T21, T22).

mod believed;
mod key_sets;
mod refused;
mod tokens;
