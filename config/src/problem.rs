//! What is wrong, and where: every mistake of a config, together.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Nowhere: it is the default.
    Default,
    /// In a file, on a line counted from 1.
    File {
        /// The file as it was named.
        path: Arc<PathBuf>,
        /// The line; 0 speaks of the whole file.
        line: usize,
    },
    /// In an environment variable of this name.
    Environment(String),
    /// In a command-line flag of this name.
    Flag(&'static str),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// The dotted key; empty where the file itself is at fault.
    pub key: String,
    /// What, in one sentence.
    pub message: String,
}

/// `plans.toml:12: plans.team.concurrent: must be at least 1`.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.place)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// Every mistake of a config, in the order of their places; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigErrors {
    problems: Vec<Problem>,
}

impl ConfigErrors {
    /// The mistakes, if there are any.
    pub(crate) fn check(mut problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() {
            return Ok(());
        }
        problems.sort();
        problems.dedup();
        Err(Self { problems })
    }

    /// The mistakes.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

/// One line for each mistake.
impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}
