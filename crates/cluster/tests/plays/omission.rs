//! The rules that a control leaves out.

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Omission {
    /// A call that comes late counts.
    Order,
    /// The part that is given back leaves the slice only with the answer.
    GivenBackFirst,
    /// A new life begins with what the ledger knows, and gives the rest back.
    KeptSlice,
    /// A new life takes the rest of its slice for spare before all journals are read.
    UnknownWork,
    /// Requests that run across a change of period have no room in the new one.
    CarriedWork,
    /// A slice of a period is granted whatever others have in the next one.
    NextPeriod,
    /// The database grants at once after it has lost commits.
    Pause,
    /// A claim beyond the row is cut to the row.
    Claims,
}

impl Omission {
    pub(crate) const ALL: [Self; 8] = [
        Self::Order,
        Self::GivenBackFirst,
        Self::KeptSlice,
        Self::UnknownWork,
        Self::CarriedWork,
        Self::NextPeriod,
        Self::Pause,
        Self::Claims,
    ];
}
