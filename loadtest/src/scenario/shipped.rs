//! The built-in scenarios: one for each attack, and one with all attacks.

use super::ScenarioError;

/// A built-in scenario.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// The scenario's name.
    pub name: &'static str,
    /// The scenario as TOML.
    pub text: &'static str,
}

impl Shipped {
    /// Returns the built-in scenario of this name.
    ///
    /// # Errors
    /// There is no such scenario.
    pub fn find(name: &str) -> Result<&'static Self, ScenarioError> {
        let found = SHIPPED.iter().find(|shipped| shipped.name == name);
        found.ok_or_else(|| ScenarioError::Unknown(name.to_owned()))
    }
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        /// Every built-in scenario.
        pub const SHIPPED: &[Shipped] = &[$(Shipped {
            name: $name,
            text: include_str!(concat!("../../scenarios/", $name, ".toml")),
        }),*];
    };
}

shipped![
    "flood",
    "many_sources",
    "costly_prompts",
    "hogs",
    "endless_outputs",
    "sybils",
    "early_leavers",
    "slow_readers",
    "slowloris",
    "rapid_reset",
    "retry_storm",
    "hold_connections",
    "body_flood",
    "refused_work",
    "unread_beside_drip",
    "taught_estimates",
    "odd_shapes",
    "random_shapes",
    "schema_bombs",
    "job_storm",
    "overload",
    "soak",
    "all",
];

/// Returns the names of the built-in scenarios, for a message.
pub(super) fn names() -> String {
    SHIPPED.iter().map(|shipped| shipped.name).collect::<Vec<_>>().join(", ")
}
