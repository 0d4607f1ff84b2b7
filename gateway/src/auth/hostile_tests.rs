//! Tests with hostile tokens and issuers (threats T21 and T22).

mod accepted;
mod key_sets;
mod refused;
mod tokens;
