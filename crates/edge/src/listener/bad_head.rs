//! The errors of a request's head, shared by the reader of heads and by the
//! state of the connection.

/// An error in the head of an HTTP/1 request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadHead {
    /// The head has more bytes or more headers than the listener takes.
    TooLarge,
    /// The head breaks a rule of the protocol; the text is a sentence for the
    /// client.
    Malformed(&'static str),
}
