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
    /// A gateway that is taken for lost may still place work.
    RetiredWork,
    /// The slice of a lost gateway is freed while its work runs.
    WorkOfLost,
    /// The slice of a lost gateway is freed by what it has told, not by the journals.
    TollOfLost,
    /// The slice of a lost gateway is freed although it has started again.
    LostLife,
}

impl Omission {
    pub(crate) const ALL: [Self; 12] = [
        Self::Order,
        Self::GivenBackFirst,
        Self::KeptSlice,
        Self::UnknownWork,
        Self::CarriedWork,
        Self::NextPeriod,
        Self::Pause,
        Self::Claims,
        Self::RetiredWork,
        Self::WorkOfLost,
        Self::TollOfLost,
        Self::LostLife,
    ];
}
