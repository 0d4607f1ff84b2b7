//! The large parts of a model that a gateway needs, by content: fetched once,
//! checked against their hash, built off the async threads, shared by all the
//! workers that name the same ones.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use aws_lc_rs::digest::{SHA256, digest};
use tollgate_text::{ChatTemplate, Tokenizer, TokenizerConfig};
use tollgate_wire::v1::AssetRequest;
use tollgate_wire::v1::worker_client::WorkerClient;
use tonic::transport::Channel;

use super::UpstreamError;

/// The largest tokenizer or template, bytes.
const MOST_ASSET_BYTES: usize = 64 * 1024 * 1024;

/// What has been built and is still in use.
#[derive(Debug, Default)]
pub(super) struct Assets {
    tokenizers: Mutex<HashMap<String, Weak<BuiltTokenizer>>>,
}

/// A tokenizer and what follows from it.
#[derive(Debug)]
pub(crate) struct BuiltTokenizer {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Bytes of the longest token.
    pub(crate) longest_token: usize,
}

impl Assets {
    /// The tokenizer whose file hashes to `hash`.
    pub(super) async fn tokenizer(
        &self,
        client: &WorkerClient<Channel>,
        hash: &str,
    ) -> Result<Arc<BuiltTokenizer>, UpstreamError> {
        if let Some(known) = self.known(hash) {
            return Ok(known);
        }
        let bytes = fetch(client.clone(), hash).await?;
        let built = off_thread(move || {
            let tokenizer = Tokenizer::from_json(&bytes)?;
            let longest_token = (0..tokenizer.vocabulary_size())
                .map(|id| tokenizer.token_bytes(id as u32).len())
                .max()
                .unwrap_or(0);
            Ok(Arc::new(BuiltTokenizer { tokenizer: Arc::new(tokenizer), longest_token }))
        })
        .await?;
        let mut tokenizers = self.tokenizers.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounded by the models in use: what nobody holds is dropped here.
        tokenizers.retain(|_, built| built.strong_count() > 0);
        tokenizers.insert(hash.to_owned(), Arc::downgrade(&built));
        Ok(built)
    }

    fn known(&self, hash: &str) -> Option<Arc<BuiltTokenizer>> {
        self.tokenizers.lock().unwrap_or_else(PoisonError::into_inner).get(hash)?.upgrade()
    }
}

/// The chat template whose source hashes to `hash`, compiled with the strings
/// in `context`; none where `hash` is empty.
pub(super) async fn template(
    client: &WorkerClient<Channel>,
    hash: &str,
    context: &str,
) -> Result<Option<Arc<ChatTemplate>>, UpstreamError> {
    if hash.is_empty() {
        return Ok(None);
    }
    let source = fetch(client.clone(), hash).await?;
    let context = context.to_owned();
    off_thread(move || {
        let config = TokenizerConfig::from_json(context.as_bytes())?;
        let source = String::from_utf8_lossy(&source);
        Ok(Some(Arc::new(ChatTemplate::compile(&source, &config)?)))
    })
    .await
}

async fn fetch(mut client: WorkerClient<Channel>, hash: &str) -> Result<Vec<u8>, UpstreamError> {
    let mut chunks = client.asset(AssetRequest { hash: hash.to_owned() }).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await? {
        if bytes.len() + chunk.data.len() > MOST_ASSET_BYTES {
            return Err(UpstreamError::Lied("an asset is larger than 64 MiB"));
        }
        bytes.extend_from_slice(&chunk.data);
    }
    if hex(digest(&SHA256, &bytes).as_ref()) != hash {
        return Err(UpstreamError::Lied("an asset does not hash to its name"));
    }
    Ok(bytes)
}

/// Runs `build` on the blocking pool: a large tokenizer takes a second.
async fn off_thread<T: Send + 'static>(
    build: impl FnOnce() -> Result<T, tollgate_text::TextError> + Send + 'static,
) -> Result<T, UpstreamError> {
    match tokio::task::spawn_blocking(build).await {
        Ok(built) => built.map_err(UpstreamError::Text),
        Err(_) => Err(UpstreamError::Lied("an asset cannot be built")),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
