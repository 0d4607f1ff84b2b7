//! Opens the model: weights onto the device, tokenizer, chat template. All
//! that a gateway needs of them is kept as assets, by content hash.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use sha2::{Digest, Sha256};
use tollgate_engine::Backend;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::model::ModelFiles;
use tollgate_text::{ChatTemplate, TextError, Tokenizer, TokenizerConfig};

use crate::{DeviceChoice, WorkerError, WorkerOptions};

/// The largest tokenizer or template that is read.
const MOST_TEXT_BYTES: u64 = 64 << 20;

/// A model, ready.
pub(crate) struct Loaded {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) tokenizer_asset: Asset,
    /// None: the model has no chat template.
    pub(crate) template_asset: Option<Asset>,
    /// The strings that the template reads, as JSON.
    pub(crate) template_context: String,
}

/// Bytes named by their content.
#[derive(Clone)]
pub(crate) struct Asset {
    /// Hex SHA-256.
    pub(crate) hash: String,
    pub(crate) bytes: Arc<[u8]>,
}

/// Reads and checks everything. It blocks, for seconds with a large model.
pub(crate) fn load(options: &WorkerOptions) -> Result<Loaded, WorkerError> {
    if let DeviceChoice::Cuda(_) = options.device {
        return Err(WorkerError::Device(
            "this build has no CUDA backend: use device auto or cpu".to_owned(),
        ));
    }
    let files = ModelFiles::open(&options.model)?;
    let path = options.model.join("tokenizer.json");
    let bytes = read(&path)?;
    let tokenizer = Tokenizer::from_json(&bytes).map_err(|source| text(&path, source))?;
    files.check_tokenizer(u32::try_from(tokenizer.vocabulary_size()).unwrap_or(u32::MAX))?;
    let (template_asset, template_context) = template(&options.model)?;
    let mut cpu = CpuOptions::for_model(files.config(), options.kv_bytes);
    cpu.step_tokens = options.step_tokens;
    if let Some(threads) = options.threads {
        cpu.threads = threads as usize;
    }
    Ok(Loaded {
        backend: Box::new(CpuBackend::new(&files, &cpu)?),
        tokenizer: Arc::new(tokenizer),
        tokenizer_asset: Asset::new(bytes),
        template_asset,
        template_context,
    })
}

impl Asset {
    fn new(bytes: Vec<u8>) -> Self {
        let hash = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { hash, bytes: bytes.into() }
    }
}

/// The chat template and its context, from `chat_template.jinja` or
/// `tokenizer_config.json`; compiled once so that a bad one stops the start.
fn template(folder: &Path) -> Result<(Option<Asset>, String), WorkerError> {
    let config_path = folder.join("tokenizer_config.json");
    let config = match read_if_there(&config_path)? {
        Some(bytes) => {
            TokenizerConfig::from_json(&bytes).map_err(|source| text(&config_path, source))?
        }
        None => TokenizerConfig::default(),
    };
    #[derive(Serialize)]
    struct Context<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        bos_token: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        eos_token: Option<&'a str>,
    }
    let context =
        Context { bos_token: config.bos_token.as_deref(), eos_token: config.eos_token.as_deref() };
    let context = serde_json::to_string(&context).expect("two optional strings serialise");
    let own_path = folder.join("chat_template.jinja");
    let (path, source) = match read_if_there(&own_path)? {
        Some(bytes) => {
            let source = String::from_utf8(bytes).map_err(|error| WorkerError::ModelFile {
                path: own_path.clone(),
                source: io::Error::new(io::ErrorKind::InvalidData, error),
            })?;
            (own_path, Some(source))
        }
        None => (config_path, config.chat_template.clone()),
    };
    let Some(source) = source else {
        return Ok((None, context));
    };
    ChatTemplate::compile(&source, &config).map_err(|source| text(&path, source))?;
    Ok((Some(Asset::new(source.into_bytes())), context))
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, WorkerError> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(WorkerError::ModelFile { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, WorkerError> {
    let read = || {
        if fs::metadata(path)?.len() > MOST_TEXT_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 64 MiB"));
        }
        fs::read(path)
    };
    read().map_err(|source| WorkerError::ModelFile { path: path.to_owned(), source })
}

fn text(path: &Path, source: TextError) -> WorkerError {
    WorkerError::Text { path: path.to_owned(), source }
}
