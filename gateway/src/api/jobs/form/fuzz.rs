//! Hostile bytes as the form of an upload. Only the fuzz crate calls this module.

#![expect(clippy::expect_used, reason = "a panic is how a fuzz target reports")]

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream::{StreamExt as _, iter};
use http::{HeaderMap, HeaderValue, header};

use super::{Form, FormValues, MAX_FILENAME, MAX_HEADERS, MAX_PARTS, MAX_VALUE};
use crate::reply::ApiError;

/// The values of a form and the bytes of its file.
type Read = (FormValues, Vec<u8>);

/// Bytes of the longest message of a refusal.
const LONGEST_MESSAGE: usize = 512;
/// The boundary of a form that is written anew. No test draws it.
const BOUNDARY: &str = "b-5e0c1d7a93f24b68";

/// Reads a form, of which the first line of `data` is the content type. The pieces in which a
/// body arrives change nothing, values are small, and the file is a part of the body.
pub fn upload_form(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (content_type, body) = data.split_at(end);
    let body = body.strip_prefix(b"\n").unwrap_or(body);
    let Ok(content_type) = HeaderValue::from_bytes(content_type) else { return };
    let whole = read(&content_type, body, body.len().max(1));
    match &whole {
        Ok(form) => check(form, body),
        Err(error) => check_refusal(error),
    }
    // The bound of headers counts whole pieces, so beyond it the pieces matter.
    if body.len() as u64 <= MAX_HEADERS {
        for size in [1, 7, 61] {
            let pieces = read(&content_type, body, size);
            match (&pieces, &whole) {
                // A form with two faults is refused for the one that is seen first.
                (Err(error), Err(_)) => check_refusal(error),
                _ => assert_eq!(pieces, whole, "in pieces of {size}"),
            }
        }
    }
}

fn check((values, file): &Read, body: &[u8]) {
    let FormValues { purpose, anchor, seconds, filename } = values;
    for value in [purpose, anchor, seconds].into_iter().flatten() {
        assert!(value.len() <= MAX_VALUE, "{value}");
    }
    let name = filename.as_deref().unwrap_or_default();
    assert!(name.chars().count() <= MAX_FILENAME && !name.contains(char::is_control), "{name}");
    assert!(filename.is_some() || file.is_empty());
    assert!(file.is_empty() || body.windows(file.len()).any(|part| part == file));
    // Written anew, the form means the same.
    let mut again = Vec::new();
    let values = [
        ("purpose", purpose),
        ("expires_after[anchor]", anchor),
        ("expires_after[seconds]", seconds),
    ];
    for (name, value) in values.iter().filter_map(|(name, value)| Some((name, value.as_ref()?))) {
        again.extend(part(&format!("name=\"{name}\""), value.as_bytes()));
    }
    if filename.is_some() {
        again.extend(part("name=\"file\"; filename=\"f\"", file));
    }
    again.extend(format!("--{BOUNDARY}--\r\n").into_bytes());
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    let content_type = content_type.parse().expect("a value");
    let (read, bytes) = read(&content_type, &again, again.len()).expect("a form");
    assert_eq!(&bytes, file);
    let expected = filename.as_ref().map(|_| "f".to_owned());
    assert_eq!(read, FormValues { filename: expected, ..values_of(purpose, anchor, seconds) });
}

fn values_of(
    purpose: &Option<String>,
    anchor: &Option<String>,
    seconds: &Option<String>,
) -> FormValues {
    FormValues {
        purpose: purpose.clone(),
        anchor: anchor.clone(),
        seconds: seconds.clone(),
        filename: None,
    }
}

fn part(disposition: &str, content: &[u8]) -> Vec<u8> {
    let head = format!("--{BOUNDARY}\r\ncontent-disposition: form-data; {disposition}\r\n\r\n");
    [head.as_bytes(), content, b"\r\n"].concat()
}

fn check_refusal(error: &ApiError) {
    assert_eq!(error.status(), 400, "{error:?}");
    let text = error.text();
    assert!(!text.is_empty() && text.len() <= LONGEST_MESSAGE, "{text}");
    assert!(!text.contains(char::is_control), "{text}");
}

/// Reads a body that arrives in pieces of `size` bytes.
fn read(content_type: &HeaderValue, body: &[u8], size: usize) -> Result<Read, ApiError> {
    let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.clone())]);
    let pieces: Vec<Result<Bytes, Infallible>> =
        body.chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(async {
        // Each piece is late, so that the parser sees the bytes between two polls, too.
        let late = iter(pieces).then(async |piece| {
            tokio::task::yield_now().await;
            piece
        });
        let body = Body::from_stream(late);
        let mut form = Form::begin(&headers, body, Duration::from_secs(3_600))?;
        let mut bytes = Vec::new();
        while let Some(mut file) = form.file().await? {
            while let Some(piece) = file.next().await? {
                bytes.extend_from_slice(&piece);
            }
        }
        assert!(form.seen <= MAX_PARTS);
        Ok((form.values().clone(), bytes))
    })
}
