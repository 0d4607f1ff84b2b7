//! Loading of a model: its weights onto the device, its tokenizer and its chat
//! template. The gateway fetches the tokenizer and the template as assets, named by
//! the hash of their content.

use std::fs;
use std::io::{self, Read as _};
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

use crate::device::{FaultInjector, LockedBackend};
use crate::gpu_lock::GpuLock;
use crate::{DeviceChoice, EngineChoice, SyntheticDevice, WorkerError, WorkerOptions};

/// Bytes of the largest tokenizer or template file that is read.
const MOST_TEXT_BYTES: u64 = 64 << 20;
/// Time that a start on a GPU may spend on the search for faster matrix products.
const PRODUCT_SEARCH: Duration = Duration::from_secs(3);

/// A loaded model.
pub(crate) struct Loaded {
    pub(crate) backend: Box<dyn Backend>,
    /// The cost table of a synthetic engine. `None`: the table must be measured.
    pub(crate) table: Option<CostTable>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) tokenizer_asset: Asset,
    /// `None` if the model has no chat template.
    pub(crate) template_asset: Option<Asset>,
    /// The strings that the template refers to, as JSON.
    pub(crate) template_context: String,
}

/// The source of a backend.
enum Source<'a> {
    Model(Box<ModelFiles>),
    Synthetic(&'a SyntheticDevice),
}

/// A backend and the lock of its GPU.
struct Claimed {
    backend: Box<dyn Backend>,
    /// `None` if the device has no identity to lock, like a CPU.
    gpu: Option<GpuLock>,
}

/// A chat template with its context.
struct Template {
    asset: Option<Asset>,
    /// The strings that the template refers to, as JSON.
    context: String,
    /// The text of the token that ends an answer.
    end: Option<String>,
}

/// A file for the gateway, named by its content.
#[derive(Clone)]
pub(crate) struct Asset {
    /// The SHA-256 of the bytes in hexadecimal.
    pub(crate) hash: String,
    pub(crate) bytes: Arc<[u8]>,
}

/// Loads the model of `options` and checks every file. Blocks, for minutes with a
/// large model.
pub(crate) fn load(options: &WorkerOptions) -> Result<Loaded, WorkerError> {
    let engine = match &options.engine {
        EngineChoice::Model => Source::Model(Box::new(ModelFiles::open(&options.model)?)),
        EngineChoice::Synthetic(device) => Source::Synthetic(device),
    };
    let path = options.model.join("tokenizer.json");
    let bytes = read(&path)?;
    let tokenizer = Tokenizer::from_json(&bytes).map_err(|source| text(&path, source))?;
    if let Source::Model(files) = &engine {
        // A tokenizer with more tokens than the model would produce tokens without
        // weights.
        // A count beyond `u32` exceeds every model, so the check refuses it as well.
        files.check_tokenizer(u32::try_from(tokenizer.vocabulary_size()).unwrap_or(u32::MAX))?;
    }
    let Template { asset: template_asset, context: template_context, end } =
        template(&options.model)?;
    let (claimed, table) = match engine {
        Source::Model(files) => (on_device(&files, options)?, None),
        Source::Synthetic(device) => {
            // The synthetic engine needs no weights, so only the tokenizer's texts
            // are used.
            let text = synthetic_text(&tokenizer, end.as_deref());
            let step_tokens = options.step_tokens;
            let SyntheticDevice { cost, kv_tokens, context, policy: _, faults: _ } = *device;
            let synthetic = SyntheticOptions { cost, kv_tokens, context, step_tokens, text };
            let backend = SyntheticBackend::new(synthetic, Pace::Real)?;
            let uuid = synthetic_uuid(options);
            // A synthetic device is locked like a GPU, so that turns can be tested
            // without one.
            let gpu = Some(claim(&uuid, options)?);
            let backend = Box::new(backend.with_uuid(uuid));
            (Claimed { backend, gpu }, Some(cost.table()?))
        }
    };
    Ok(Loaded {
        backend: Box::new(locked(claimed, options)?),
        table,
        tokenizer: Arc::new(tokenizer),
        tokenizer_asset: Asset::new(bytes),
        template_asset,
        template_context,
    })
}

/// Loads the model on the chosen device. With `auto` it takes the CPU if no GPU is
/// usable, and logs the reason.
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

/// Loads the model on a GPU. The lock comes first, so that a GPU of another process
/// is not touched, and so that its owner is reported rather than a lack of memory.
fn cuda(
    files: &ModelFiles,
    options: &WorkerOptions,
    wanted: &DeviceSelector,
) -> Result<Claimed, WorkerError> {
    let uuid = cuda::find_device(wanted).map_err(CudaError::NoDevice)?;
    let gpu = Some(claim(&uuid, options)?);
    // If the program's path is unknown, only the kernels that are shipped beside it
    // are missing.
    let program = std::env::current_exe().ok();
    let beside = program.as_deref().and_then(Path::parent).map(|folder| folder.join("kernels"));
    let cuda = CudaOptions {
        // The UUID replaces `wanted`, so that the loaded device is the locked one.
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
        launches: Launches::Overlapping,
        // On a shared GPU the search would slow the steps of others and measure
        // them.
        search: if options.gpu.turn.is_none() { PRODUCT_SEARCH } else { Duration::ZERO },
    };
    let backend = CudaBackend::new(files, &cuda)?;
    for note in backend.notes() {
        tracing::info!(device = %backend.device().class, note);
    }
    Ok(Claimed { backend: Box::new(backend), gpu })
}

fn cpu(files: &ModelFiles, options: &WorkerOptions) -> Result<Claimed, WorkerError> {
    let mut cpu = CpuOptions::for_model(files.config(), options.kv_bytes);
    cpu.step_tokens = options.step_tokens;
    cpu.instructions = options.deterministic.then(Instructions::best_deterministic);
    if let Some(threads) = options.threads {
        cpu.threads = threads as usize;
    }
    Ok(Claimed { backend: Box::new(CpuBackend::new(files, &cpu)?), gpu: None })
}

fn claim(uuid: &str, options: &WorkerOptions) -> Result<GpuLock, WorkerError> {
    Ok(GpuLock::claim(uuid, &options.data, &options.gpu)?)
}

/// Adds the lock and, on a synthetic device, the injected faults to a backend.
fn locked(claimed: Claimed, options: &WorkerOptions) -> Result<LockedBackend, WorkerError> {
    let Claimed { backend, gpu } = claimed;
    let file = match &options.engine {
        EngineChoice::Synthetic(device) => device.faults.clone(),
        EngineChoice::Model => None,
    };
    let faults = file.map(|file| FaultInjector { file });
    if let Some(FaultInjector { file }) = &faults {
        // The start has its own file, so that a test can fail the start and no step.
        let starting = FaultInjector { file: file.with_extension("start") };
        starting.inject().map_err(WorkerError::Setup)?;
    }
    Ok(LockedBackend { backend, gpu, faults })
}

/// Returns the identity of a synthetic device: its configured name, or one for this
/// worker. The prefix keeps it apart from a real GPU's UUID.
fn synthetic_uuid(options: &WorkerOptions) -> String {
    match &options.device {
        DeviceChoice::Cuda(Some(name)) => format!("synthetic-{name}"),
        // A device without a configured name is shared with no other worker.
        _ => format!("synthetic-{}-{}", std::process::id(), options.name),
    }
}

/// Chooses the text of a synthetic model: the tokenizer's tokens, one plain word
/// that answers consist of, and a control token that ends an answer.
fn synthetic_text(tokenizer: &Tokenizer, end: Option<&str>) -> SyntheticText {
    let tokens = 0..tokenizer.vocabulary_size() as u32;
    let end = end
        .and_then(|end| tokenizer.token_id(end))
        .or_else(|| tokens.clone().find(|&token| tokenizer.is_control(token)));
    let is_word = |&token: &u32| {
        let letters = tokenizer.token_bytes(token).strip_prefix(b" ").unwrap_or_default();
        Some(token) != end && !letters.is_empty() && letters.iter().all(u8::is_ascii_alphabetic)
    };
    // The backend checks both tokens and refuses invalid ones.
    let answer = tokens.clone().find(is_word).unwrap_or(0);
    let mut pieces: Vec<Box<[u8]>> =
        tokens.map(|token| tokenizer.token_bytes(token).into()).collect();
    let end = end.unwrap_or_else(|| {
        // Each answer needs an end, so a tokenizer without control tokens gets one
        // more token.
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

/// Reads the chat template and its context from `chat_template.jinja` or
/// `tokenizer_config.json`. Compiles the template, so that a faulty one stops the
/// start.
#[expect(clippy::expect_used, reason = "two optional strings serialise")]
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
    // Newer model folders keep the template in a file of its own, so this file comes
    // first.
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
        // The bound protects the memory of the worker from a wrong file. It is checked while
        // reading: devices and pipes report no size.
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(MOST_TEXT_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MOST_TEXT_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 64 MiB"));
        }
        Ok(bytes)
    };
    read().map_err(|source| WorkerError::ModelFile { path: path.to_owned(), source })
}

fn text(path: &Path, source: TextError) -> WorkerError {
    WorkerError::Text { path: path.to_owned(), source }
}
