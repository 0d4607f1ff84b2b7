//! The rules of which each control leaves one out.

/// A rule that a control leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Omission {
    /// A call that comes late changes nothing.
    CallNumbers,
    /// An amount that is given back leaves the slice before the call.
    GiveBackFirst,
    /// A block is posted only after the one before it.
    PostOnce,
    /// Workers refuse the work of retired gateways.
    RefuseRetired,
    /// A slice is free only when every worker refuses its gateway.
    CloseBeforeFree,
    /// A slice is free only when every attempt of its gateway is posted.
    PostBeforeFree,
    /// A stream to a worker carries nothing before a beat that was sent after it opened.
    BeatAfterOpen,
    /// A promoted standby takes what a gateway remembers, also if that is less.
    LearnLess,
    /// A gateway's memory of its grants counts only until its next call.
    LearnNewest,
    /// A promoted standby grants nothing before it knows what was lost.
    Learn,
    /// A gateway tells a promoted standby what it was granted.
    TellFirst,
    /// A standby also learns of gateways of which it has no row.
    UnknownNumbers,
    /// A gateway that told nothing is learned when its slice is free, not when it is retired.
    LearnUntilFree,
    /// A worker that starts again knows the newest timeline.
    KeepTimeline,
    /// A promoted standby gives out numbers that its predecessor cannot have given.
    JumpNumbers,
}

impl Omission {
    pub(crate) const ALL: [Self; 15] = [
        Self::CallNumbers,
        Self::GiveBackFirst,
        Self::PostOnce,
        Self::RefuseRetired,
        Self::CloseBeforeFree,
        Self::PostBeforeFree,
        Self::BeatAfterOpen,
        Self::LearnLess,
        Self::LearnNewest,
        Self::Learn,
        Self::TellFirst,
        Self::UnknownNumbers,
        Self::LearnUntilFree,
        Self::KeepTimeline,
        Self::JumpNumbers,
    ];
}
