//! `/v1/files`: uploads, lists, downloads and deletions.

use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{StreamExt as _, iter, unfold};
use http::{HeaderValue, header};
use http_body::Body as _;
use tollgate_domain::UtcTime;
use tollgate_jobs::{
    Content, FileId, FilePage, FileRow, JobError, NewUpload, Order, Purpose, Upload,
};
use tollgate_openai::batches::life;
use tollgate_openai::files::{
    DeletedFile, FileFacts, FileObject, ListObject, PURPOSE_BATCH, PURPOSE_BATCH_OUTPUT,
};

use super::form::{Form, FormValues};
use super::page::ListQuery;
use super::{OTHER_BODY, named, quotas, repeatable_id};
use crate::api::{Api, Call};
use crate::reply::ApiError;

/// Files of one page.
const MOST_LISTED: u32 = 10_000;

/// Answers `POST /v1/files`.
pub(crate) async fn upload(api: Api, call: Call) -> Result<Response, ApiError> {
    let Call { request, caller, .. } = call;
    let tenant = caller.tenant.tenant().name.clone();
    let id = repeatable_id("file", request.headers(), &caller)?.map(FileId::from_random);
    api.jobs.take(api.serving.clock().now(), &caller.tenant)?;
    let quotas = quotas(&caller.tenant);
    // Without a declared size, bytes are reserved as they come.
    let declared = request.body().size_hint().exact();
    let (parts, body) = request.into_parts();
    let timeout = caller.tenant.config().gateway().jobs.upload;
    let mut form = Form::begin(&parts.headers, body, timeout)?;
    if let Some(id) = id
        && let Ok(file) = api.jobs.jobs.file(tenant.clone(), id).await
    {
        let values = receive(&mut form, Sink::Earlier(Comparison::new(&file))).await?;
        check_same(&file, &values)?;
        return Ok(Json(object(file)).into_response());
    }
    let pool = caller.tenant.tenant().pool.as_ref().map(|pool| pool.name.clone());
    let new = NewUpload { id, tenant, pool, declared, quotas };
    // Bytes are reserved before the first one is read.
    let mut upload = api.jobs.jobs.upload(new).await?;
    let values = receive(&mut form, Sink::New(&mut upload)).await?;
    let life = life("expires_after", values.anchor.as_deref(), values.seconds.as_deref())?;
    let row = upload.finish(values.filename.unwrap_or_default(), life).await?;
    Ok(Json(object(row)).into_response())
}

/// Checks the values of a repeat against the file that the first request made.
///
/// # Errors
/// 400: the life is not valid; 422: the values differ.
fn check_same(file: &FileRow, values: &FormValues) -> Result<(), ApiError> {
    let life = life("expires_after", values.anchor.as_deref(), values.seconds.as_deref())?;
    let is_named_so = values.filename.as_deref().is_some_and(|name| name == file.filename);
    let lives = Duration::from_nanos(file.expires.0.saturating_sub(file.created.0));
    // A plan may have cut the first life, so a longer one can be the same. Without one the first
    // life was that of the plan, which may have changed since.
    let lives_so = life.is_none_or(|life| life >= lives);
    if is_named_so && lives_so { Ok(()) } else { Err(OTHER_BODY) }
}

/// The use of the bytes of an upload.
enum Sink<'u> {
    /// They become a file.
    New(&'u mut Upload),
    /// They must equal the file that the same `Idempotency-Key` made before.
    Earlier(Comparison),
}

/// A comparison of an upload with a file, in which no byte is kept.
struct Comparison {
    expected: Option<[u8; 32]>,
    left: u64,
    hash: Context,
}

impl Comparison {
    fn new(file: &FileRow) -> Self {
        Self { expected: file.sha256, left: file.bytes, hash: Context::new(&SHA256) }
    }
}

impl Sink<'_> {
    async fn write(&mut self, bytes: Bytes) -> Result<(), ApiError> {
        match self {
            Self::New(upload) => upload.write(bytes.into()).await?,
            Self::Earlier(comparison) => {
                // A longer body differs; its rest need not be read.
                let left = comparison.left.checked_sub(bytes.len() as u64);
                comparison.left = left.ok_or(OTHER_BODY)?;
                comparison.hash.update(&bytes);
            }
        }
        Ok(())
    }

    /// Checks the whole of the bytes.
    ///
    /// # Errors
    /// 422: they differ from those of the first request with the same key.
    fn check(self) -> Result<(), ApiError> {
        let Self::Earlier(comparison) = self else { return Ok(()) };
        let hash = comparison.hash.finish();
        match &comparison.expected {
            Some(expected) if hash.as_ref() == expected => Ok(()),
            _ => Err(OTHER_BODY),
        }
    }
}

/// Reads the form to its end and gives the file's bytes to `sink`.
async fn receive(form: &mut Form, mut sink: Sink<'_>) -> Result<FormValues, ApiError> {
    while let Some(mut file) = form.file().await? {
        while let Some(bytes) = file.next().await? {
            sink.write(bytes).await?;
        }
    }
    // The parts come in any order, so only now every value is here.
    let values = form.values().clone();
    match values.purpose.as_deref() {
        None => return Err(ApiError::missing("purpose")),
        Some(PURPOSE_BATCH) => {}
        Some(_) => return Err(ApiError::invalid("purpose", "'purpose' must be 'batch'.")),
    }
    if values.filename.is_none() {
        return Err(ApiError::missing("file"));
    }
    sink.check()?;
    Ok(values)
}

/// Answers `GET /v1/files`.
pub(crate) async fn list(api: Api, call: Call) -> Result<Response, ApiError> {
    let query = ListQuery::of(call.request.uri())?;
    let purpose = match query.purpose.as_deref() {
        None => None,
        Some(PURPOSE_BATCH) => Some(Purpose::Batch),
        Some(PURPOSE_BATCH_OUTPUT) => Some(Purpose::BatchOutput),
        Some(_) => {
            let message = "'purpose' must be 'batch' or 'batch_output'.";
            return Err(ApiError::invalid("purpose", message));
        }
    };
    let order = match query.order.as_deref() {
        None | Some("desc") => Order::Descending,
        Some("asc") => Order::Ascending,
        Some(_) => return Err(ApiError::invalid("order", "'order' must be 'asc' or 'desc'.")),
    };
    let after = query.after.as_deref().map(file_id).transpose()?;
    let limit = query.limit(MOST_LISTED, MOST_LISTED)?;
    let tenant = call.caller.tenant.tenant().name.clone();
    let page = FilePage { after, limit, order, purpose };
    let page = api.jobs.jobs.files(tenant, page).await;
    let page = page.map_err(|error| named(error, query.after.as_deref().unwrap_or_default()))?;
    let files = page.rows.into_iter().map(object).collect();
    Ok(Json(ListObject::new(files, page.has_more)).into_response())
}

/// Answers `GET /v1/files/{id}`.
pub(crate) async fn show(api: Api, call: Call) -> Result<Response, ApiError> {
    let (id, tenant) = (file_id(&call.parameter)?, call.caller.tenant.tenant().name.clone());
    let file = api.jobs.jobs.file(tenant, id).await;
    Ok(Json(object(file.map_err(|error| named(error, &call.parameter))?)).into_response())
}

/// Answers `DELETE /v1/files/{id}`.
pub(crate) async fn delete(api: Api, call: Call) -> Result<Response, ApiError> {
    let (id, tenant) = (file_id(&call.parameter)?, call.caller.tenant.tenant().name.clone());
    let deleted = api.jobs.jobs.delete_file(tenant, id).await;
    deleted.map_err(|error| named(error, &call.parameter))?;
    Ok(Json(DeletedFile::new(id.to_string())).into_response())
}

/// Answers `GET /v1/files/{id}/content`.
pub(crate) async fn content(api: Api, call: Call) -> Result<Response, ApiError> {
    let (id, tenant) = (file_id(&call.parameter)?, call.caller.tenant.tenant().name.clone());
    let content = api.jobs.jobs.read(tenant, id).await;
    let mut content = content.map_err(|error| named(error, &call.parameter))?;
    // Read before the head goes out, so that a file whose bytes are lost gets an error.
    let first = content.next().await?;
    // Stated, so that a client notices a download that was broken off.
    let length = content.file().bytes;
    let mut response = Response::new(body_of(first, content));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
    headers.insert(header::CONTENT_LENGTH, length.into());
    // The text is a tenant's own; a browser must not take it for a page.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(response)
}

/// Returns the body of a download that begins with `first`.
fn body_of(first: Option<Vec<u8>>, content: Content) -> Body {
    let first = first.map(Ok::<_, JobError>);
    let rest = unfold(Some(content), next);
    Body::from_stream(iter(first).chain(rest))
}

type Chunk = (Result<Vec<u8>, JobError>, Option<Content>);

/// Reads the next bytes of a download. An error ends the body before its length, so that no
/// client takes it for whole.
async fn next(content: Option<Content>) -> Option<Chunk> {
    let mut content = content?;
    match content.next().await {
        Ok(bytes) => Some((Ok(bytes?), Some(content))),
        Err(error) => {
            let id = content.file().id;
            let cause = tollgate_serving::with_causes(&error);
            tracing::error!(file = %id, error = cause, "a file cannot be read; its download is broken off");
            Some((Err(error), None))
        }
    }
}

/// Reads the id of a file.
///
/// # Errors
/// 404: no file can have this id.
pub(super) fn file_id(text: &str) -> Result<FileId, ApiError> {
    text.parse().map_err(|_| ApiError::NotFound { what: "file", id: text.to_owned() })
}

fn object(row: FileRow) -> FileObject {
    let seconds = |time: UtcTime| time.unix_seconds();
    FileObject::from(FileFacts {
        id: row.id.to_string(),
        bytes: row.bytes,
        created: seconds(row.created),
        expires: seconds(row.expires),
        filename: row.filename,
        purpose: match row.purpose {
            Purpose::Batch => PURPOSE_BATCH,
            Purpose::BatchOutput => PURPOSE_BATCH_OUTPUT,
        },
    })
}

#[cfg(test)]
mod tests {
    use http::{Request, StatusCode};
    use tollgate_domain::RequestId;

    use crate::api::tests::test_gateway::{PLAIN, TestGateway, json};

    /// Uploads a file with an `Idempotency-Key`; `more` are further parts of the form.
    async fn upload(
        gateway: &TestGateway,
        name: &str,
        more: &[(&str, &str)],
    ) -> (StatusCode, serde_json::Value) {
        let fields = more.iter().chain(&[("purpose", "batch")]).map(|(field, value)| {
            format!("--b\r\nContent-Disposition: form-data; name=\"{field}\"\r\n\r\n{value}\r\n")
        });
        let body = fields.collect::<String>()
            + &format!(
                "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n{{}}\n\r\n--b--\r\n"
            );
        let request = Request::post("/v1/files")
            .header("authorization", format!("Bearer {}", gateway.key("acme")))
            .header("content-type", "multipart/form-data; boundary=b")
            .header("idempotency-key", "once")
            .body(body.into())
            .expect("a request");
        json(gateway.answer(request, RequestId::from_random(1)).await).await
    }

    #[tokio::test]
    async fn repeated_upload_with_other_values_gets_422() {
        let gateway = TestGateway::open(TestGateway::folder(), PLAIN, &[]).await;
        let day = [("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "86400")];
        let hour = [("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "3600")];
        let (status, first) = upload(&gateway, "a.jsonl", &day).await;
        assert_eq!(status, StatusCode::OK, "{first}");
        assert_eq!(upload(&gateway, "a.jsonl", &day).await, (StatusCode::OK, first));
        for (name, life) in [("b.jsonl", &day), ("a.jsonl", &hour)] {
            let (status, body) = upload(&gateway, name, life).await;
            assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
            assert_eq!(body["error"]["code"], "idempotency_key_reused");
        }
    }

    #[tokio::test]
    async fn download_of_lost_file_gets_503() {
        let folder = TestGateway::folder();
        let jobs = folder.path().join("jobs");
        let gateway = TestGateway::open(folder, PLAIN, &[]).await;
        let (_, file) = upload(&gateway, "a.jsonl", &[]).await;
        let path = format!("/v1/files/{}/content", file["id"].as_str().expect("an id"));
        let there = gateway.ask("acme", "GET", &path, "").await;
        assert_eq!(there.status(), StatusCode::OK);
        for entry in walk(&jobs) {
            std::fs::remove_file(entry).expect("a file");
        }
        let (status, body) = json(gateway.ask("acme", "GET", &path, "").await).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{body}");
        assert_eq!(body["error"]["code"], "job_storage_unavailable");
    }

    /// Returns the files under `folder`, without those of the database.
    fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        let files = paths.flat_map(|path| match path.is_dir() {
            true => walk(&path),
            false => vec![path],
        });
        files.filter(|path| !path.to_string_lossy().contains("jobs.db")).collect()
    }
}
