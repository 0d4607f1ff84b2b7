//! What can go wrong with text, and whose fault it is.

/// Why a file was refused or a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// `tokenizer.json` is torn, or not a tokenizer.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    /// Its decoder is of a kind that we cannot stream.
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
        /// Where, counted from 1, if known.
        line: Option<usize>,
        /// What was wrong.
        message: String,
    },
    /// The template ran out of its allowance of steps or memory.
    #[error("chat template: stopped after its allowance of {0}")]
    Allowance(&'static str),
    /// The template itself refused the messages (`raise_exception`). The
    /// caller's fault: the text is meant for the client.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The tokenizer could not encode the text.
    #[error("the tokenizer could not encode the text: {0}")]
    Encode(String),
    /// No private-use character is left to mark a caller's text with.
    #[error("the messages use every private-use character; leave one out")]
    NoMark,
}
