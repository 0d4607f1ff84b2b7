//! The class of service of a request.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The class of service of a request. Interactive requests come first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// A person or a program waits for the answer.
    #[default]
    Interactive,
    /// The request runs on the capacity that interactive work leaves.
    Batch,
}

impl Tier {
    /// All tiers, in their order.
    pub const ALL: [Self; 2] = [Self::Interactive, Self::Batch];

    /// Returns the name that reports use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Batch => "batch",
        }
    }

    /// Returns true for the interactive tier. Records of this tier do not name it, so that
    /// they equal the records from before tiers were recorded.
    pub fn is_interactive(&self) -> bool {
        *self == Self::Interactive
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
