//! What a device really did for a request.

use serde::{Deserialize, Serialize};

use crate::DeviceNanos;

/// The measured figures of a request, over all its choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt (of all prompts, where a request has several).
    pub prompt_tokens: u64,
    /// Those of the prompt whose KV entries were found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated, over all choices; the end token counts.
    pub completion_tokens: u64,
    /// Its exact part of the device's busy time; see [`crate::cost`].
    pub attributed: DeviceNanos,
    /// Its cost at the reference batch; see [`crate::cost`].
    pub reference: DeviceNanos,
}

impl Usage {
    /// Prompt and completion tokens together.
    pub fn total_tokens(&self) -> u64 {
        self.prompt_tokens + self.completion_tokens
    }
}

/// How long data took between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Tokens and tables, to the device.
    pub to_device: DeviceNanos,
    /// Logits, or what was drawn from them, to the host.
    pub to_host: DeviceNanos,
}

impl std::ops::AddAssign for Transfers {
    fn add_assign(&mut self, other: Self) {
        self.to_device += other.to_device;
        self.to_host += other.to_host;
    }
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it, or a stop string was met.
    Stop,
    /// max_tokens, the context or the budget was reached.
    Length,
    /// The client left or cancelled.
    Cancelled,
    /// The deadline of the whole request passed.
    Deadline,
    /// We broke.
    Fault,
}
