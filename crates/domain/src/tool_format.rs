//! The forms in which models write calls of tools, by name. The configuration names them,
//! and the text crate reads and writes them.

use std::fmt;
use std::str::FromStr;

/// The form in which a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, of Hermes, Qwen2.5 and Qwen3.
    Hermes,
    /// `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`, of
    /// Qwen3-Coder.
    Qwen3Coder,
    /// `{"name": …, "parameters": …}` instead of text, of Llama 3.1 and later.
    Llama3,
    /// `[TOOL_CALLS]` and a list, or a name with its arguments, of Mistral.
    Mistral,
}

/// The name of a form that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a tool format is one of hermes, qwen3-coder, llama3 and mistral")]
pub struct UnknownToolFormat;

impl ToolFormat {
    /// All forms.
    pub const ALL: [Self; 4] = [Self::Hermes, Self::Qwen3Coder, Self::Llama3, Self::Mistral];

    /// Returns the name of the form in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3-coder",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
        }
    }
}

impl fmt::Display for ToolFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ToolFormat {
    type Err = UnknownToolFormat;

    fn from_str(text: &str) -> Result<Self, UnknownToolFormat> {
        Self::ALL.into_iter().find(|format| format.as_str() == text).ok_or(UnknownToolFormat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_format_names_are_read_back() {
        for format in ToolFormat::ALL {
            assert_eq!(format.as_str().parse(), Ok(format));
        }
        assert_eq!("yaml".parse::<ToolFormat>(), Err(UnknownToolFormat));
    }
}
