//! Rules by which several gateways share the caps of tenants and keys. No database, no
//! network and no clock: functions take rows and times, and return what to store or to send.
//!
//! The database holds one row for each cap and period ([`CapRow`]) and one row for each
//! gateway that spends of it ([`SliceRow`]). A gateway spends only of its *slice*, the part
//! of a cap that it alone may use ([`Slice`]). Gateways that stop are *retired*: workers
//! take no more work from them, and what is left of their slices is free again
//! ([`Watch`], [`WorkerGate`], [`Retirement`]).
//!
//! The rule above all others: the cost of all requests never exceeds the cap, whichever
//! machine stops, whichever message is lost or late, and whichever commit the database
//! forgets. `tests/caps` plays random faults against these rules.

mod gate;
mod membership;
mod row;
mod slice;

pub use crate::gate::{WorkRefused, WorkerGate};
pub use crate::membership::{Retirement, SILENCE, Watch};
pub use crate::row::{Ask, CapRow, SliceRow, StaleCall};
pub use crate::slice::{Answer, Short, Slice, USABLE};

/// The number of one life of a gateway: 24 bits, which the database draws when the gateway
/// starts. A gateway that starts again gets another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GatewayNumber(pub u32);

/// The history of the database. It grows when a standby takes over, which may have lost the
/// newest commits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Timeline(pub u32);

/// Milliseconds of a clock of this machine that also runs while the machine sleeps
/// (`CLOCK_BOOTTIME`). Times of two machines cannot be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BootMillis(pub u64);

impl BootMillis {
    /// Returns the time from `earlier` to this time; zero if `earlier` is later.
    fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
