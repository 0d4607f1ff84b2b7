//! The mistakes of a config, each with its place.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The place where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The default: the value was not written.
    Default,
    /// A line of a file.
    File {
        /// The file's path as it was given.
        path: Arc<PathBuf>,
        /// The line, counted from 1; 0 means the whole file.
        line: usize,
    },
    /// An environment variable of this name.
    Environment(String),
    /// A command-line flag of this name.
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

/// One mistake in a config.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The place of the mistake.
    pub place: Place,
    /// The dotted key; empty if the file itself is wrong.
    pub key: String,
    /// The description, in one sentence.
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

/// Every mistake of a config, ordered by place; at least one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigErrors {
    problems: Vec<Problem>,
}

impl ConfigErrors {
    /// Returns an error if there are problems.
    pub(crate) fn check(mut problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() {
            return Ok(());
        }
        // `dedup` removes neighbours only, so equal problems must stand together.
        problems.sort();
        // Two checks may find the same mistake.
        problems.dedup();
        Err(Self { problems })
    }

    /// Returns every mistake.
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
