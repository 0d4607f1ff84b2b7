//! The large files of a model that the gateway needs, by their hash. Each file
//! is fetched once, checked against its hash, built on the blocking pool, and
//! shared by all workers that name it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use aws_lc_rs::digest::{SHA256, digest};
use tollgate_text::{ChatTemplate, TokenizerConfig};
use tollgate_wire::v1::AssetRequest;
use tollgate_wire::v1::worker_client::WorkerClient;
use tonic::transport::Channel;

use crate::model::BuiltTokenizer;
use crate::worker_identity::WorkerError;

/// The largest tokenizer or template, bytes.
const MOST_ASSET_BYTES: usize = 64 * 1024 * 1024;

/// The tokenizers that have been built and are still in use.
#[derive(Debug, Default)]
pub(super) struct Assets {
    // Weak, so that a tokenizer is freed with the last worker that serves its model.
    tokenizers: Mutex<HashMap<String, Weak<BuiltTokenizer>>>,
}

impl Assets {
    /// Returns the tokenizer with the file hash `hash`.
    pub(super) async fn tokenizer(
        &self,
        client: &WorkerClient<Channel>,
        hash: &str,
    ) -> Result<Arc<BuiltTokenizer>, WorkerError> {
        if let Some(known) = self.known(hash) {
            return Ok(known);
        }
        // Not under the lock, so two workers may build the same file. The later one stays.
        let bytes = fetch(client.clone(), hash).await?;
        let built = off_thread(move || Ok(Arc::new(BuiltTokenizer::from_json(&bytes)?))).await?;
        let mut tokenizers = self.tokenizers.lock().unwrap_or_else(PoisonError::into_inner);
        // The map is bounded by the models in use: unused entries go here.
        tokenizers.retain(|_, built| built.strong_count() > 0);
        tokenizers.insert(hash.to_owned(), Arc::downgrade(&built));
        Ok(built)
    }

    fn known(&self, hash: &str) -> Option<Arc<BuiltTokenizer>> {
        self.tokenizers.lock().unwrap_or_else(PoisonError::into_inner).get(hash)?.upgrade()
    }
}

/// Returns the chat template whose source has this hash, compiled with the strings in
/// `context`, a JSON object. Returns `None` if `hash` is empty.
pub(super) async fn template(
    client: &WorkerClient<Channel>,
    hash: &str,
    context: String,
) -> Result<Option<Arc<ChatTemplate>>, WorkerError> {
    if hash.is_empty() {
        return Ok(None);
    }
    let source = fetch(client.clone(), hash).await?;
    off_thread(move || {
        let config = TokenizerConfig::from_json(context.as_bytes())?;
        let source = String::from_utf8_lossy(&source);
        Ok(Some(Arc::new(ChatTemplate::compile(&source, &config)?)))
    })
    .await
}

async fn fetch(mut client: WorkerClient<Channel>, hash: &str) -> Result<Vec<u8>, WorkerError> {
    let mut chunks = client.asset(AssetRequest { hash: hash.to_owned() }).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await? {
        // Checked before the copy, so that the bound holds for the memory as well.
        if bytes.len() + chunk.data.len() > MOST_ASSET_BYTES {
            return Err(WorkerError::InvalidReport("an asset is larger than 64 MiB"));
        }
        bytes.extend_from_slice(&chunk.data);
    }
    // Workers of one model share what is built here, so no worker may replace it.
    if hex(digest(&SHA256, &bytes).as_ref()) != hash {
        return Err(WorkerError::InvalidReport("an asset does not have the hash of its name"));
    }
    Ok(bytes)
}

/// Runs `build` on the blocking pool, because a large tokenizer takes a second.
async fn off_thread<T: Send + 'static>(
    build: impl FnOnce() -> Result<T, tollgate_text::TextError> + Send + 'static,
) -> Result<T, WorkerError> {
    match tokio::task::spawn_blocking(build).await {
        Ok(built) => built.map_err(WorkerError::Text),
        // The build panicked on the worker's bytes.
        Err(_) => Err(WorkerError::InvalidReport("an asset cannot be built")),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
