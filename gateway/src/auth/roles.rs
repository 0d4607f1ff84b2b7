//! The roles of admins, and the rights that each role has. A role has a right or lacks
//! it; no other code compares roles.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The role of an admin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Reads everything and changes nothing.
    Auditor,
    /// Reads everything but money. Lifts penalties, rests workers, reloads the config.
    Operator,
    /// Does everything, also with keys and admins.
    Admin,
}

/// A right that a route of the admin listener asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// Reading state and records, without money.
    Read,
    /// Reading prices and statements.
    ReadMoney,
    /// Changes that no customer keeps: penalties, workers, the reload of the config.
    Operate,
    /// Changes of keys and of admins.
    Administer,
}

/// A name that no role has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a role: use auditor, operator or admin")]
pub struct UnknownRole(String);

impl Role {
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Auditor, Self::Operator, Self::Admin];

    /// Returns the name that commands, records and the key database use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auditor => "auditor",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// Returns true if the role has `right`.
    pub fn has(self, right: Right) -> bool {
        match right {
            Right::Read => true,
            Right::ReadMoney => matches!(self, Self::Auditor | Self::Admin),
            Right::Operate => matches!(self, Self::Operator | Self::Admin),
            Right::Administer => self == Self::Admin,
        }
    }
}

impl Right {
    /// Returns the roles that have the right, as a sentence lists them.
    pub fn roles(self) -> String {
        let roles: Vec<&str> =
            Role::ALL.into_iter().filter(|role| role.has(self)).map(Role::as_str).collect();
        match roles.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, first)) => format!("{} or {last}", first.join(", ")),
            None => String::new(),
        }
    }
}

impl std::str::FromStr for Role {
    type Err = UnknownRole;
    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        let found = Self::ALL.into_iter().find(|role| role.as_str() == text);
        // Cut, so that the error stays short whatever the admin wrote.
        found.ok_or_else(|| UnknownRole(text.chars().take(64).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_have_documented_rights() {
        for (right, roles) in [
            (Right::Read, "auditor, operator or admin"),
            (Right::ReadMoney, "auditor or admin"),
            (Right::Operate, "operator or admin"),
            (Right::Administer, "admin"),
        ] {
            assert_eq!(right.roles(), roles, "{right:?}");
        }
    }

    #[test]
    fn role_names_round_trip() {
        for role in Role::ALL {
            assert_eq!(role.as_str().parse(), Ok(role));
        }
        assert_eq!("root".parse::<Role>(), Err(UnknownRole("root".to_owned())));
    }
}
