//! Measured usage of a request.

use serde::{Deserialize, Serialize};

use crate::{DeviceNanos, Priced};

/// The measured figures of a request, over all its choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt, or of all prompts of the request.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens over all choices. The end token counts.
    pub completion_tokens: u64,
    /// Exact share of the device's busy time; see [`crate::cost`].
    pub attributed: DeviceNanos,
    /// Cost at the reference batch; see [`crate::cost`].
    pub reference: DeviceNanos,
}

impl Usage {
    /// Returns the figures that have a price.
    pub fn priced(&self) -> Priced {
        Priced {
            reference_ns: self.reference.nanos(),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
        }
    }

    /// Returns prompt and completion tokens together.
    pub fn total_tokens(&self) -> u64 {
        self.prompt_tokens + self.completion_tokens
    }
}

/// Transfer times between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Time to copy tokens and tables to the device.
    pub to_device: DeviceNanos,
    /// Time to copy logits or sampled tokens to the host.
    pub to_host: DeviceNanos,
}

impl std::ops::AddAssign for Transfers {
    fn add_assign(&mut self, other: Self) {
        self.to_device += other.to_device;
        self.to_host += other.to_host;
    }
}

/// The reason for which a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its text, or a stop string occurred.
    Stop,
    /// The limit on tokens, the context or the budget was reached.
    Length,
    /// The client disconnected or cancelled the request.
    Cancelled,
    /// The deadline of the whole request passed.
    Deadline,
    /// The server failed.
    Fault,
}
