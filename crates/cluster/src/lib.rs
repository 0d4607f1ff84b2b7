//! Rules by which several gateways share the limits of tenants and keys: caps here, the others in
//! [`parts`]. No database, no network and no clock: functions take rows and return what to store
//! or to send.
//!
//! The database has one row for each gateway that spends of a cap in a period
//! ([`SliceRow`]). A gateway spends only of its *slice*, the part of a cap that it alone may
//! use ([`Slice`]). It asks for more when a request needs it ([`Ask`]), and gives back what
//! it does not expect to need.
//!
//! A slice belongs to the gateway's data folder, and counts what was spent of it: the sum of
//! all slices is at most the cap. A gateway that stops without a word keeps its slice until it
//! starts again with its data folder, or until another gateway *retires* it: the others have heard
//! nothing of it for long ([`Silence`]), the workers take no more work of it, and all that it has
//! ordered is in the ledger.
//!
//! The rule above all others: the cost of all requests never exceeds the cap, whichever
//! machine stops and whichever message is lost or late. `tests/plays` plays random faults
//! against these rules.

pub mod parts;

mod row;
mod silence;
mod slice;

pub use crate::row::{Answer, Ask, Book, Order, SliceRow, StaleCall, Standing};
pub use crate::silence::Silence;
pub use crate::slice::{Slice, Taken, Wanted};
