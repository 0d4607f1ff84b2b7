//! The form that an answer must have. The engine samples only tokens that keep to it.

/// The form that every choice of a request must have.
///
/// An answer that ends by itself has the form; an answer that is cut off, by its limit on
/// tokens for example, is a beginning of the form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// JSON text that is valid under this schema, which is JSON text, too.
    JsonSchema(String),
    /// Text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Calls of tools, possibly after or instead of text.
    Calls(CallGrammar),
}

/// The form of an answer with calls of tools.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallGrammar {
    /// The calls that the answer may have.
    pub calls: Vec<CallForm>,
    /// The text at which a call begins. Text before it is free unless a call is
    /// [required](Self::required). Every [`CallForm::begin`] starts with it.
    pub trigger: String,
    /// True if the answer begins with a call.
    pub required: bool,
    /// The text between two calls; `None` allows one call only.
    pub separator: Option<String>,
    /// The schema, as JSON text, of an answer without a call; `None` leaves such an answer,
    /// and the text before calls, free. Of no effect if a call is required.
    pub content: Option<String>,
}

/// The form of one call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallForm {
    /// The text before the arguments.
    pub begin: String,
    /// The schema of the arguments, as JSON text.
    pub schema: String,
    /// The text after the arguments.
    pub end: String,
}
