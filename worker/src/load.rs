//! Opens the model: weights onto the device, tokenizer, chat template. All
//! that a gateway needs of them is kept as assets, by content hash.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use sha2::{Digest, Sha256};
use tollgate_domain::CostTable;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::cuda::{
    self, CodeFolders, CudaBackend, CudaError, CudaOptions, DeviceSelector, KernelChoice, Launches,
};
use tollgate_engine::backend::synthetic::{
    Pace, SyntheticBackend, SyntheticOptions, SyntheticText,
};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::{Backend, Instructions};
use tollgate_text::{ChatTemplate, TextError, Tokenizer, TokenizerConfig};

use crate::card::Card;
use crate::device::{Device, Faults};
use crate::{DeviceChoice, EngineChoice, SyntheticDevice, WorkerError, WorkerOptions};

/// The largest tokenizer or template that is read.
const MOST_TEXT_BYTES: u64 = 64 << 20;
/// A start on a GPU may take so much longer for faster steps ever after.
const PRODUCT_SEARCH: Duration = Duration::from_secs(3);

/// A model, ready.
pub(crate) struct Loaded {
    pub(crate) backend: Box<dyn Backend>,
    /// The price of its steps, where that needs no measuring.
    pub(crate) table: Option<CostTable>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) tokenizer_asset: Asset,
    /// None: the model has no chat template.
    pub(crate) template_asset: Option<Asset>,
    /// The strings that the template reads, as JSON.
    pub(crate) template_context: String,
}

/// What a backend is made from.
enum Opened {
    Model(ModelFiles),
    Synthetic(SyntheticDevice),
}

/// A device that is ours.
struct Claimed {
    backend: Box<dyn Backend>,
    /// None: the device has no identity that others could know it by.
    card: Option<Card>,
}

/// A chat template and what belongs to it.
struct Template {
    asset: Option<Asset>,
    /// The strings that it reads, as JSON.
    context: String,
    /// The token that ends an answer, as it is written.
    end: Option<String>,
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
    let engine = match options.engine {
        EngineChoice::Model => Opened::Model(ModelFiles::open(&options.model)?),
        EngineChoice::Synthetic(device) => Opened::Synthetic(device),
    };
    let path = options.model.join("tokenizer.json");
    let bytes = read(&path)?;
    let tokenizer = Tokenizer::from_json(&bytes).map_err(|source| text(&path, source))?;
    if let Opened::Model(files) = &engine {
        files.check_tokenizer(u32::try_from(tokenizer.vocabulary_size()).unwrap_or(u32::MAX))?;
    }
    let Template { asset: template_asset, context: template_context, end } =
        template(&options.model)?;
    let (claimed, table) = match engine {
        Opened::Model(files) => (on_device(&files, options)?, None),
        Opened::Synthetic(SyntheticDevice { cost, kv_tokens, context, policy: _ }) => {
            let text = synthetic_text(&tokenizer, end.as_deref());
            let step_tokens = options.step_tokens;
            let synthetic = SyntheticOptions { cost, kv_tokens, context, step_tokens, text };
            let backend = SyntheticBackend::new(synthetic, Pace::Real)?;
            let uuid = synthetic_uuid(options);
            let card = Some(claim(&uuid, options)?);
            let backend = Box::new(backend.with_uuid(uuid));
            (Claimed { backend, card }, Some(cost.table()?))
        }
    };
    Ok(Loaded {
        backend: Box::new(device(claimed, options)?),
        table,
        tokenizer: Arc::new(tokenizer),
        tokenizer_asset: Asset::new(bytes),
        template_asset,
        template_context,
    })
}

/// The model on the device that was asked for: any that there is, where that
/// was left open. What was found, or why nothing was, goes to the log.
fn on_device(files: &ModelFiles, options: &WorkerOptions) -> Result<Claimed, WorkerError> {
    let (wanted, or_cpu) = match &options.device {
        DeviceChoice::Cpu => return cpu(files, options),
        DeviceChoice::Auto => (DeviceSelector::First, true),
        DeviceChoice::Cuda(None) => (DeviceSelector::First, false),
        DeviceChoice::Cuda(Some(name)) => (name.parse().map_err(WorkerError::Device)?, false),
    };
    match cuda(files, options, &wanted) {
        Err(error) if or_cpu && error.leaves_the_cpu() => {
            let claimed = cpu(files, options)?;
            tracing::info!(device = "cpu", why = %error, "the model runs on the processor");
            Ok(claimed)
        }
        claimed => claimed,
    }
}

/// The card is claimed before anything is put on it: a stranger's is left as
/// it is, and whose it is comes before what does not fit beside it.
fn cuda(
    files: &ModelFiles,
    options: &WorkerOptions,
    wanted: &DeviceSelector,
) -> Result<Claimed, WorkerError> {
    let uuid = cuda::find_device(wanted).map_err(CudaError::NoDevice)?;
    let card = Some(claim(&uuid, options)?);
    let program = std::env::current_exe().ok();
    let beside = program.as_deref().and_then(Path::parent).map(|folder| folder.join("kernels"));
    let cuda = CudaOptions {
        device: DeviceSelector::Uuid(uuid),
        memory_share: f64::from(options.gpu_memory_percent) / 100.0,
        step_tokens: options.step_tokens,
        folders: CodeFolders {
            kept: options.data.join("kernels"),
            bundles: beside.into_iter().collect(),
            libraries: Vec::new(),
        },
        kernels: match options.deterministic {
            true => KernelChoice::Deterministic,
            false => KernelChoice::Fastest,
        },
        launches: Launches::Graphs,
        // Beside others' steps it would stretch those, and measure them.
        search: if options.card.turn.is_none() { PRODUCT_SEARCH } else { Duration::ZERO },
    };
    let backend = CudaBackend::new(files, &cuda)?;
    for note in backend.notes() {
        tracing::info!(device = %backend.device().class, note);
    }
    Ok(Claimed { backend: Box::new(backend), card })
}

fn cpu(files: &ModelFiles, options: &WorkerOptions) -> Result<Claimed, WorkerError> {
    let mut cpu = CpuOptions::for_model(files.config(), options.kv_bytes);
    cpu.step_tokens = options.step_tokens;
    cpu.instructions = options.deterministic.then(Instructions::best_deterministic);
    if let Some(threads) = options.threads {
        cpu.threads = threads as usize;
    }
    Ok(Claimed { backend: Box::new(CpuBackend::new(files, &cpu)?), card: None })
}

fn claim(uuid: &str, options: &WorkerOptions) -> Result<Card, WorkerError> {
    Ok(Card::claim(uuid, &options.data, &options.card)?)
}

/// The device as the engine uses it, with the faults that a test asks for.
fn device(claimed: Claimed, options: &WorkerOptions) -> Result<Device, WorkerError> {
    let Claimed { backend, card } = claimed;
    let faults = options.faults.clone().map(|file| Faults { file });
    if let Some(Faults { file }) = &faults {
        let starting = Faults { file: file.with_extension("start") };
        starting.strike().map_err(WorkerError::Setup)?;
    }
    Ok(Device { backend, card, faults })
}

/// A device that is not there has an identity that nobody takes for a real
/// one: the name that it was given, or its worker's.
fn synthetic_uuid(options: &WorkerOptions) -> String {
    match &options.device {
        DeviceChoice::Cuda(Some(name)) => format!("synthetic-{name}"),
        _ => format!("synthetic-{}-{}", std::process::id(), options.name),
    }
}

/// What a synthetic model says: the tokenizer's own tokens, of which it draws
/// a plain word, and one that ends an answer without a trace in the text.
fn synthetic_text(tokenizer: &Tokenizer, end: Option<&str>) -> SyntheticText {
    let tokens = 0..tokenizer.vocabulary_size() as u32;
    let end = end
        .and_then(|end| tokenizer.token_id(end))
        .or_else(|| tokens.clone().find(|&token| tokenizer.is_control(token)));
    let is_word = |&token: &u32| {
        let letters = tokenizer.token_bytes(token).strip_prefix(b" ").unwrap_or_default();
        Some(token) != end && !letters.is_empty() && letters.iter().all(u8::is_ascii_alphabetic)
    };
    // Whatever is wrong with these two, the backend refuses.
    let answer = tokens.clone().find(is_word).unwrap_or(0);
    let mut pieces: Vec<Box<[u8]>> =
        tokens.map(|token| tokenizer.token_bytes(token).into()).collect();
    let end = end.unwrap_or_else(|| {
        pieces.push(Box::default());
        pieces.len() as u32 - 1
    });
    SyntheticText { pieces, answer, end }
}

impl Asset {
    fn new(bytes: Vec<u8>) -> Self {
        let hash = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { hash, bytes: bytes.into() }
    }
}

/// The chat template and its context, from `chat_template.jinja` or
/// `tokenizer_config.json`; compiled once so that a bad one stops the start.
fn template(folder: &Path) -> Result<Template, WorkerError> {
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
    let asset = match source {
        Some(source) => {
            ChatTemplate::compile(&source, &config).map_err(|source| text(&path, source))?;
            Some(Asset::new(source.into_bytes()))
        }
        None => None,
    };
    Ok(Template { asset, context, end: config.eos_token })
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
