//! The errors of this crate, with the party that caused each.

/// The reasons why a file is refused or a text cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// `tokenizer.json` is damaged, or is not a tokenizer.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    /// The tokenizer has a decoder that cannot be streamed.
    #[error(
        "tokenizer.json: decoder {0} is not supported: use ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip"
    )]
    Decoder(String),
    /// `tokenizer_config.json` does not parse, or a field in it is wrong.
    #[error("tokenizer_config.json: {0}")]
    Config(String),
    /// The chat template does not compile, or failed while it ran.
    #[error("chat template{}: {message}", .line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Template {
        /// The line, counted from 1, if known.
        line: Option<usize>,
        /// The mistake.
        message: String,
    },
    /// The template used up its allowance of steps or memory.
    #[error("chat template: stopped after its allowance of {0}")]
    Allowance(&'static str),
    /// The template refused the messages with `raise_exception`. The client caused
    /// this error, and the text is meant for the client.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// A value that the client gave to the template has a text that could begin a
    /// control token.
    #[error("'{name}' holds {found:?}, which begins a control token of the model")]
    Argument {
        /// The name of the value.
        name: String,
        /// The character.
        found: char,
    },
    /// The tokenizer could not encode the text.
    #[error("the tokenizer could not encode the text: {0}")]
    Encode(String),
    /// The text has more tokens than the caller of the tokenizer takes.
    #[error("the text has at least {at_least} tokens")]
    TooLong {
        /// Tokens that were counted before counting stopped.
        at_least: usize,
    },
    /// The messages use every private-use character, so none is left as a mark.
    #[error("the messages use every private-use character; leave one out")]
    NoMark,
}
