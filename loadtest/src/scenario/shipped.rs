//! The scenarios that come along: one for each attack, and one with all.

/// A scenario in the program.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// What it is called.
    pub name: &'static str,
    /// Its TOML.
    pub text: &'static str,
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        /// Every scenario that comes along.
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
    "overload",
    "soak",
    "all",
];

/// Their names, for a message.
pub(super) fn names() -> String {
    SHIPPED.iter().map(|shipped| shipped.name).collect::<Vec<_>>().join(", ")
}
