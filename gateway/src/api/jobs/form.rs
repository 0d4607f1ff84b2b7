//! The form of an upload: its parts in any order, of which only the file is large. The
//! file goes on piece by piece, so that the memory of an upload does not grow with it.

pub(crate) mod fuzz;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::Stream;
use futures_util::stream::unfold;
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use multer::{Field, Multipart};
use tokio::time::{Instant, timeout_at};

use crate::reply::ApiError;

/// Bytes that a body may have between two parts: boundaries and headers.
const MAX_HEADERS: u64 = 64 * 1024;
/// Bytes of a part that is no file.
const MAX_VALUE: usize = 1024;
/// Parts of one form.
const MAX_PARTS: usize = 16;
/// Length of a window in which bytes must arrive.
const WINDOW: Duration = Duration::from_secs(5);
/// Bytes that must arrive in each window, unless the body ends.
const WINDOW_BYTES: u64 = 64 * 1024;

/// The values of a form that are no file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FormValues {
    pub(super) purpose: Option<String>,
    pub(super) anchor: Option<String>,
    pub(super) seconds: Option<String>,
    /// The client's name for the file, once the file has come.
    pub(super) filename: Option<String>,
}

/// The form of an upload while it arrives.
pub(super) struct Form {
    parts: Multipart<'static>,
    allowance: Allowance,
    values: FormValues,
    seen: usize,
}

/// A part of the form that is the file.
pub(super) struct FilePart<'f> {
    field: Field<'static>,
    allowance: &'f Allowance,
}

/// The bytes that the body may still give before the next part must begin. Without it
/// a form with one endless header would be kept in memory.
#[derive(Clone, Debug, Default)]
struct Allowance(Arc<AtomicU64>);

impl Form {
    /// Begins to read a form. The whole body must arrive within `timeout`.
    ///
    /// # Errors
    /// 400: the body is no form.
    pub(super) fn begin(
        headers: &HeaderMap,
        body: Body,
        timeout: Duration,
    ) -> Result<Self, ApiError> {
        let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let boundary = content_type.and_then(|value| multer::parse_boundary(value).ok());
        let boundary = boundary.ok_or_else(|| {
            ApiError::malformed("A file is sent as multipart/form-data with a boundary.")
        })?;
        let allowance = Allowance::default();
        let bytes = paced(body, timeout, allowance.clone());
        Ok(Self {
            parts: Multipart::new(bytes, boundary),
            allowance,
            values: FormValues::default(),
            seen: 0,
        })
    }

    /// Reads parts up to the file; `None` at the end of the form.
    ///
    /// # Errors
    /// 400: the form is malformed or a part is too large; 408: it came too slowly.
    pub(super) async fn file(&mut self) -> Result<Option<FilePart<'_>>, ApiError> {
        loop {
            self.allowance.set(MAX_HEADERS);
            let Some(field) = self.parts.next_field().await.map_err(refusal)? else {
                return Ok(None);
            };
            self.seen += 1;
            if self.seen > MAX_PARTS {
                return Err(ApiError::malformed("The form has too many parts."));
            }
            let name = field.name().unwrap_or_default().to_owned();
            if name == "file" {
                if self.values.filename.is_some() {
                    return Err(ApiError::invalid("file", "The part 'file' comes twice."));
                }
                self.values.filename = Some(filename(&field));
                // The quotas of the upload bound the bytes of the file.
                self.allowance.set(u64::MAX);
                return Ok(Some(FilePart { field, allowance: &self.allowance }));
            }
            let value = value(field, &name).await?;
            let kept = match name.as_str() {
                "purpose" => &mut self.values.purpose,
                "expires_after[anchor]" => &mut self.values.anchor,
                "expires_after[seconds]" => &mut self.values.seconds,
                // Unknown parts are ignored, as unknown fields of JSON are.
                _ => continue,
            };
            if kept.replace(value).is_some() {
                return Err(ApiError::invalid(name, "The part comes twice."));
            }
        }
    }

    /// Returns the values that have come so far.
    pub(super) fn values(&self) -> &FormValues {
        &self.values
    }
}

impl FilePart<'_> {
    /// Returns the next bytes of the file; `None` at its end.
    ///
    /// # Errors
    /// 400: the form is malformed; 408: it came too slowly.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        let bytes = self.field.chunk().await.map_err(refusal)?;
        if bytes.is_none() {
            // The next part begins here, so its headers are bounded again.
            self.allowance.set(MAX_HEADERS);
        }
        Ok(bytes)
    }
}

impl Allowance {
    fn set(&self, bytes: u64) {
        // Relaxed: the parser and the stream of bytes run in one task.
        self.0.store(bytes, Ordering::Relaxed);
    }

    /// Takes `bytes`; returns false if they are too many.
    fn take(&self, bytes: u64) -> bool {
        let left = self.0.load(Ordering::Relaxed);
        self.0.store(left.saturating_sub(bytes), Ordering::Relaxed);
        // One frame can hold headers and much of the file, so it may exceed what is left.
        left > 0
    }
}

/// Returns the client's name for the file, for display only.
fn filename(field: &Field<'_>) -> String {
    let name = field.file_name().unwrap_or("file");
    name.chars().filter(|c| !c.is_control()).take(MAX_FILENAME).collect()
}

/// Reads a part that is no file.
async fn value(mut field: Field<'static>, name: &str) -> Result<String, ApiError> {
    let mut value = Vec::new();
    while let Some(bytes) = field.chunk().await.map_err(refusal)? {
        if value.len() + bytes.len() > MAX_VALUE {
            let message = format!("A part of the form has more than {MAX_VALUE} bytes.");
            return Err(ApiError::invalid(printable(name), message));
        }
        value.extend_from_slice(&bytes);
    }
    String::from_utf8(value)
        .map_err(|_| ApiError::invalid(printable(name), "A part of the form is not UTF-8."))
}

/// Returns a client's text in a form that is safe to print.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// The reason for which the bytes of a form end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Ends {
    #[error("the body arrived too slowly")]
    TooSlow,
    #[error("the headers of a part are too long")]
    HeadersTooLong,
    #[error("the body ended before its length")]
    Broken,
}

fn refusal(error: multer::Error) -> ApiError {
    let ends = match &error {
        multer::Error::StreamReadFailed(cause) => cause.downcast_ref::<Ends>().copied(),
        _ => None,
    };
    match ends {
        Some(Ends::TooSlow) => ApiError::BodyTooSlow,
        Some(Ends::HeadersTooLong) => ApiError::malformed("The headers of a part are too long."),
        Some(Ends::Broken) => ApiError::malformed("The body ended before its length."),
        None if matches!(
            error,
            multer::Error::ReadHeaderFailed(_)
                | multer::Error::DecodeHeaderName { .. }
                | multer::Error::DecodeHeaderValue { .. }
        ) =>
        {
            ApiError::malformed("A header of a part has characters that no header may have.")
        }
        // The parser's own words may quote the client.
        None => ApiError::malformed("The body is no complete multipart/form-data."),
    }
}

/// The body and its pace.
struct Paced {
    body: Body,
    allowance: Allowance,
    /// The time by which the whole body must have arrived.
    deadline: Instant,
    window_ends: Instant,
    /// The time at which the reader last took bytes.
    taken: Instant,
    in_window: u64,
    ended: bool,
}

/// Returns the bytes of `body`, as long as enough of them arrive.
#[expect(clippy::disallowed_methods, reason = "the deadline of a body is on the runtime's clock")]
fn paced(
    body: Body,
    timeout: Duration,
    allowance: Allowance,
) -> impl Stream<Item = Result<Bytes, Ends>> + Send + 'static {
    let now = Instant::now();
    let paced = Paced {
        body,
        allowance,
        deadline: now + timeout,
        window_ends: now + WINDOW,
        taken: now,
        in_window: 0,
        ended: false,
    };
    unfold(paced, |mut paced| async move {
        if paced.ended {
            return None;
        }
        let Some(next) = paced.next().await.transpose() else {
            // Before the first boundary the parser polls twice without looking between. If the
            // whole form and its end came with the second poll, it would miss the boundary.
            tokio::task::yield_now().await;
            return None;
        };
        paced.taken = Instant::now();
        // The parser must not read on behind an error.
        paced.ended = next.is_err();
        Some((next, paced))
    })
}

impl Paced {
    #[expect(
        clippy::disallowed_methods,
        reason = "the deadline of a body is on the runtime's clock"
    )]
    async fn next(&mut self) -> Result<Option<Bytes>, Ends> {
        // Time in which the disk was busy is not the client's.
        self.window_ends += self.taken.elapsed();
        loop {
            let until = self.window_ends.min(self.deadline);
            let frame = match timeout_at(until, self.body.frame()).await {
                Err(_) => return Err(Ends::TooSlow),
                Ok(None) => return Ok(None),
                Ok(Some(Err(_))) => return Err(Ends::Broken),
                Ok(Some(Ok(frame))) => frame,
            };
            // Trailers hold nothing that the gateway reads.
            let Ok(bytes) = frame.into_data() else { continue };
            self.in_window += bytes.len() as u64;
            if self.in_window >= WINDOW_BYTES {
                self.in_window = 0;
                self.window_ends = Instant::now() + WINDOW;
            }
            if !self.allowance.take(bytes.len() as u64) {
                return Err(Ends::HeadersTooLong);
            }
            return Ok(Some(bytes));
        }
    }
}

/// Characters of the longest name of a file that is kept.
const MAX_FILENAME: usize = 255;

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, reason = "a panic is how a test reports")]

    use std::task::Poll;

    use super::*;

    fn headers() -> HeaderMap {
        let content_type = "multipart/form-data; boundary=b".parse().expect("a value");
        HeaderMap::from_iter([(header::CONTENT_TYPE, content_type)])
    }

    /// Returns a body of these pieces with a pause before each.
    fn body(pieces: Vec<&'static str>, pause: Duration) -> Body {
        Body::from_stream(unfold(pieces.into_iter(), move |mut pieces| async move {
            tokio::time::sleep(pause).await;
            let piece = pieces.next()?;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(piece)), pieces))
        }))
    }

    async fn read(body: Body) -> Result<u64, ApiError> {
        let mut form = Form::begin(&headers(), body, Duration::from_secs(3_600))?;
        let mut bytes = 0;
        while let Some(mut file) = form.file().await? {
            while let Some(piece) = file.next().await? {
                bytes += piece.len() as u64;
            }
        }
        Ok(bytes)
    }

    const BEGIN: &str = "--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n";
    const END: &str = "\r\n--b--\r\n";

    #[tokio::test(start_paused = true)]
    #[allow(clippy::disallowed_methods, reason = "the test measures on the paused clock")]
    async fn slow_form_ends_within_its_window() {
        let began = Instant::now();
        let pieces: Vec<&str> =
            std::iter::once(BEGIN).chain(std::iter::repeat_n("x", 60)).collect();
        let slow = read(body(pieces, Duration::from_secs(1))).await;
        assert_eq!(slow, Err(ApiError::BodyTooSlow));
        assert!(began.elapsed() <= Duration::from_secs(6), "{:?}", began.elapsed());
        // The control: the same bytes at once are a form.
        assert_eq!(read(body(vec![BEGIN, "xxx", END], Duration::ZERO)).await, Ok(3));
    }

    /// The form arrives as a whole between two polls of the parser.
    #[tokio::test]
    async fn form_that_arrives_between_polls_is_read() {
        let mut polls = 0;
        let late = futures_util::stream::poll_fn(move |context| {
            polls += 1;
            let piece = match polls {
                1 => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                2 => Some(Ok::<_, std::convert::Infallible>(Bytes::from_static(
                    b"--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\nxxx\r\n--b--\r\n",
                ))),
                _ => None,
            };
            Poll::Ready(piece)
        });
        assert_eq!(read(Body::from_stream(late)).await, Ok(3));
    }

    #[tokio::test(start_paused = true)]
    async fn form_bounds_headers_and_parts() {
        const HEADER: &str = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";
        let mut endless = vec!["--b\r\nx-long: "];
        endless.extend(std::iter::repeat_n(HEADER, 10_000));
        let refused = read(body(endless, Duration::ZERO)).await;
        assert!(matches!(refused, Err(ApiError::Invalid { .. })), "{refused:?}");
        let mut many = vec!["--b\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\nv\r\n"; 40];
        many.push("--b--\r\n");
        let refused = read(body(many, Duration::ZERO)).await;
        assert!(matches!(refused, Err(ApiError::Invalid { .. })), "{refused:?}");
    }
}
