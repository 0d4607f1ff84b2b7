//! An answer as its reader wants it: reasoning, content, and calls of tools. The parser
//! takes the model's text in pieces of any size.

use std::sync::Arc;

use tollgate_domain::{TextDelta, ToolFormat};

use crate::reasoning::{ReasoningParser, ReasoningPiece};
use crate::tools::{ToolParser, ToolPiece, ToolSignatures};

/// The parts that the answers to a request may have.
#[derive(Clone, Debug, Default)]
pub struct AnswerSyntax {
    /// The form of calls, and the tools; `None` if the answer calls no tool.
    pub tools: Option<(ToolFormat, Arc<ToolSignatures>)>,
    /// The place of reasoning.
    pub reasoning: ReasoningSyntax,
}

/// The place of reasoning in an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningSyntax {
    /// The answer has none.
    #[default]
    Absent,
    /// The answer may begin with it.
    Marked,
    /// The prompt has begun it, and the answer goes on.
    Open,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPiece {
    /// Reasoning.
    Reasoning(String),
    /// Text.
    Content(String),
    /// The start of a call of the tool with this name.
    Call(String),
    /// Further text of the arguments of the latest call, as the model wrote it.
    Arguments(String),
}

/// A parser of one answer.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
}

impl AnswerSyntax {
    /// Returns a parser of one answer; `None` if every answer is content as it is.
    pub fn parser(&self) -> Option<AnswerParser> {
        if self.tools.is_none() && self.reasoning == ReasoningSyntax::Absent {
            return None;
        }
        let reasoning = match self.reasoning {
            ReasoningSyntax::Absent => None,
            ReasoningSyntax::Marked => Some(ReasoningParser::new(false)),
            ReasoningSyntax::Open => Some(ReasoningParser::new(true)),
        };
        let tools = self.tools.as_ref();
        let tools = tools.map(|(format, tools)| ToolParser::new(*format, Arc::clone(tools)));
        Some(AnswerParser { reasoning, tools })
    }
}

impl AnswerParser {
    /// Takes the next text and tokens; returns what is decided by them.
    pub fn push(&mut self, delta: &TextDelta) -> Vec<AnswerPiece> {
        let mut out = Vec::new();
        let Some(reasoning) = &mut self.reasoning else {
            self.content(delta.text.clone(), &mut out);
            return out;
        };
        // Token by token, so that tokens beside a marker are counted on their side of it.
        let pieces =
            delta.parts().into_iter().flat_map(|(text, tokens)| reasoning.push(text, tokens));
        for piece in joined(pieces) {
            self.piece(piece, &mut out);
        }
        out
    }

    /// Returns the number of tokens of reasoning so far.
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning.as_ref().map_or(0, ReasoningParser::tokens)
    }

    /// Ends the answer; returns the text that was held back.
    pub fn finish(&mut self) -> Vec<AnswerPiece> {
        let mut out = Vec::new();
        if let Some(piece) = self.reasoning.as_mut().and_then(ReasoningParser::finish) {
            self.piece(piece, &mut out);
        }
        if let Some(tools) = &mut self.tools {
            let mut pieces = Vec::new();
            tools.finish(&mut pieces);
            out.extend(pieces.into_iter().map(AnswerPiece::from));
        }
        out
    }

    /// Returns true if the answer had calls, and the arguments of the last one were complete.
    /// Call it after [`Self::finish`].
    pub fn has_called(&self) -> bool {
        self.tools.as_ref().is_some_and(ToolParser::has_called)
    }

    fn piece(&mut self, piece: ReasoningPiece, out: &mut Vec<AnswerPiece>) {
        match piece {
            ReasoningPiece::Reasoning(text) => out.push(AnswerPiece::Reasoning(text)),
            ReasoningPiece::Content(text) => self.content(text, out),
        }
    }

    fn content(&mut self, text: String, out: &mut Vec<AnswerPiece>) {
        match &mut self.tools {
            Some(tools) => {
                let mut pieces = Vec::new();
                tools.push(&text, &mut pieces);
                out.extend(pieces.into_iter().map(AnswerPiece::from));
            }
            None if text.is_empty() => {}
            None => out.push(AnswerPiece::Content(text)),
        }
    }
}

/// Joins pieces of one kind that stand side by side: a client gets one event for each.
fn joined(pieces: impl Iterator<Item = ReasoningPiece>) -> Vec<ReasoningPiece> {
    let mut out: Vec<ReasoningPiece> = Vec::new();
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(ReasoningPiece::Reasoning(last)), ReasoningPiece::Reasoning(text))
            | (Some(ReasoningPiece::Content(last)), ReasoningPiece::Content(text)) => {
                last.push_str(&text);
            }
            (_, piece) => out.push(piece),
        }
    }
    out
}

impl From<ToolPiece> for AnswerPiece {
    fn from(piece: ToolPiece) -> Self {
        match piece {
            ToolPiece::Text(text) => Self::Content(text),
            ToolPiece::Call(name) => Self::Call(name),
            ToolPiece::Arguments(text) => Self::Arguments(text),
        }
    }
}
