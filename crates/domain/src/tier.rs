//! The class of service of a request.

/// The class of service of a request. Interactive requests come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// A person or a program waits for the answer.
    #[default]
    Interactive,
    /// The request runs on the capacity that interactive work leaves.
    Batch,
}
