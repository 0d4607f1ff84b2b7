//! The seam between the listener and the HTTP service behind it. The listener
//! hands over requests with their peer and gets responses back; it knows
//! nothing about tenants, limits or JSON.

use http::{HeaderMap, Request, Response};
use http_body::Body;
use hyper::body::{Bytes, Incoming};

use super::bad_head::BadHead;
use super::peer::Peer;
use crate::drain_body::{BoxError, Leftover, UnwantedBody};

/// An HTTP service that a listener serves.
pub trait Service: Send + Sync + 'static {
    /// A request that passed the head check.
    type Passed: Send + 'static;
    /// The body of a response.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static;

    /// Returns true if checking a request with these headers takes so much
    /// computing that it must not run on the connection's own task.
    fn is_costly(&self, headers: &HeaderMap) -> bool;

    /// Checks the head of a request without waiting. `refusal` is the reason
    /// for which the listener itself refuses the request.
    fn check_head(
        &self,
        request: Request<Incoming>,
        peer: &Peer,
        refusal: Option<RequestRefusal>,
    ) -> HeadVerdict<Self::Passed, Incoming>;

    /// Answers a request after its head check, and settles what is left of
    /// its body.
    fn answer(
        &self,
        verdict: HeadVerdict<Self::Passed, Incoming>,
    ) -> impl Future<Output = Answer<Self::Body>> + Send;

    /// Returns the JSON body for a client that speaks plain HTTP to the TLS
    /// port.
    fn plain_http_body(&self) -> Bytes;
}

/// The outcome of a head check.
pub enum HeadVerdict<P, B> {
    /// The request is refused.
    Refused(RefusedHead<B>),
    /// Nothing in the head stands against the request.
    Passed(P),
}

/// A refusal, and the body of its request, which no handler reads.
pub struct RefusedHead<B> {
    /// The complete response.
    pub response: Response<Bytes>,
    /// `None` if the request has no body.
    pub unwanted: Option<UnwantedBody<B>>,
}

/// A response, and what is left of its request.
pub struct Answer<B> {
    /// The response; its body may still be produced.
    pub response: Response<B>,
    /// Body bytes to read and drop while the response goes out.
    pub leftover: Option<Leftover>,
}

/// The reasons for which the listener refuses a request, whatever it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestRefusal {
    /// The head is wrong, so the end of the request is unknown.
    BadHead(BadHead),
    /// The connection winds down.
    Closing,
}
