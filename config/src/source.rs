//! The sources of a config: a file or folder, the environment, and flags. A later
//! source takes precedence. Only this module reads the environment.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tollgate_domain::ModelName;

use crate::problem::{Place, Problem};
use crate::sections::DEMO_MODEL;
use crate::tree::{self, Node, Table, Value};

/// The prefix of environment variables that belong to the config.
const PREFIX: &str = "TOLLGATE_";
/// Bytes of the largest config, over all files.
const LARGEST: u64 = 16 << 20;

/// The sources that a config is loaded from. [`Sources::default`] has only
/// defaults.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// A file, or a folder of `*.toml` files.
    pub path: Option<PathBuf>,
    /// Environment variables with their values. Variables that are no config are
    /// ignored.
    pub environment: Vec<(String, String)>,
    /// The flags of the command line.
    pub flags: Flags,
}

/// The flags of `up` that take precedence over all other sources.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--listen`, for `gateway.listen`.
    pub listen: Option<String>,
    /// `--admin-listen`, for `gateway.admin_listen`.
    pub admin_listen: Option<String>,
    /// `--data`, for `data`.
    pub data: Option<PathBuf>,
    /// `--model`: the only model to serve, under its folder's name.
    pub model: Option<PathBuf>,
    /// `--device`, for the `devices` of every model.
    pub device: Option<String>,
}

/// A record of the sources of a config, for the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// The SHA-256 in hexadecimal of the files' bytes, concatenated in the order of
    /// their names: the result of `cat FILES | sha256sum`.
    pub files_sha256: String,
    /// The environment variables and flags that took precedence over the files:
    /// `TOLLGATE_GATEWAY__LISTEN=…`, `--listen=…`.
    pub overrides: Vec<String>,
}

impl Loaded {
    /// Creates the record of a config from text.
    pub(crate) fn of_text(text: &str) -> Self {
        Self { files_sha256: hex(Sha256::digest(text)), overrides: Vec::new() }
    }
}

/// The sources of a config, as they were read.
pub(crate) struct Gathered {
    /// The values of all sources.
    pub(crate) tree: Table,
    /// The record of the sources.
    pub(crate) loaded: Loaded,
    /// The hash of the files that were read.
    pub(crate) files: FilesHash,
}

/// A hash of files, by which a change of one of them is noticed.
#[derive(Clone, Default)]
pub(crate) struct FilesHash(Sha256);

impl FilesHash {
    /// Adds a file.
    pub(crate) fn add(&mut self, path: &Path, content: &[u8]) {
        // With the names and lengths, so that no text can move between files unseen.
        self.0.update(path.as_os_str().as_encoded_bytes());
        self.0.update((content.len() as u64).to_le_bytes());
        self.0.update(content);
    }

    /// Reads and adds a file, up to the length of the largest file that config may name. One
    /// that cannot be read counts as empty.
    pub(crate) fn read(&mut self, path: &Path) {
        let mut bytes = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes));
        self.add(path, if read.is_ok() { &bytes } else { &[] });
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Sources {
    /// Returns the sources of this process: its environment with the given path and
    /// flags.
    pub fn of_process(path: Option<PathBuf>, flags: Flags) -> Self {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        // `vars` would panic at a variable of another program that is not Unicode.
        let environment = std::env::vars_os()
            .map(|(name, value)| (text(name), text(value)))
            .filter(|(name, _)| name.starts_with(PREFIX))
            .collect();
        Self { path, environment, flags }
    }

    /// Merges all sources to one tree.
    pub(crate) fn gather(&self, problems: &mut Vec<Problem>) -> Gathered {
        let mut table = Table::new();
        let (mut files, mut hash) = (Sha256::new(), FilesHash::default());
        let mut overrides = self.flags.shown();
        for file in self.files(problems) {
            let path = Arc::new(file);
            match read(&path) {
                Ok(text) => {
                    // The bytes are hashed before they are parsed, so that `cat FILES
                    // | sha256sum` gives the same.
                    files.update(&text);
                    hash.add(&path, text.as_bytes());
                    let parsed = tree::parse(&path, &text, problems);
                    tree::merge(&mut table, parsed, "", problems);
                }
                // The other files are still read, so that all mistakes are reported
                // together.
                Err(error) => problems.push(whole_file(&path, &error)),
            }
        }
        // Each layer takes precedence over the layers before it, so the order
        // matters.
        for (name, value) in &self.environment {
            if let Some((_, right)) = MISTAKEN.iter().find(|(mistaken, _)| mistaken == name) {
                let place = Place::Environment(name.clone());
                let message = format!("no such variable; use {right}");
                problems.push(Problem { place, key: String::new(), message });
            }
            if let Some(keys) = variable(name) {
                // `of_process` puts this character in place of bytes that are no text.
                if value.contains(char::REPLACEMENT_CHARACTER) {
                    let place = Place::Environment(name.clone());
                    let message = format!("{value:?} is not valid UTF-8");
                    problems.push(Problem { place, key: String::new(), message });
                    continue;
                }
                let node = tree::untyped(Place::Environment(name.clone()), value);
                tree::overlay(&mut table, &keys, node);
                overrides.push(format!("{name}={value}"));
            }
        }
        self.flags.lay_over(&mut table, problems);
        let loaded = Loaded { files_sha256: hex(files.finalize()), overrides };
        Gathered { tree: table, loaded, files: hash }
    }

    /// Returns the files to read, in the order of their names.
    pub(crate) fn files(&self, problems: &mut Vec<Problem>) -> Vec<PathBuf> {
        let Some(path) = &self.path else { return Vec::new() };
        if !path.is_dir() {
            return vec![path.clone()];
        }
        let mut files = Vec::new();
        let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        match entries {
            Ok(entries) => {
                files.extend(entries.iter().map(std::fs::DirEntry::path).filter(|path| {
                    // Mounted folders contain hidden copies of their files, which
                    // are no config.
                    let hidden = path
                        .file_name()
                        .is_some_and(|name| name.to_string_lossy().starts_with('.'));
                    path.extension().is_some_and(|extension| extension == "toml") && !hidden
                }))
            }
            Err(error) => problems.push(whole_file(&Arc::new(path.clone()), &error)),
        }
        // A folder that cannot be read has a problem already.
        if files.is_empty() && problems.is_empty() {
            let error = std::io::Error::other("the folder contains no *.toml file");
            problems.push(whole_file(&Arc::new(path.clone()), &error));
        }
        // The order decides which of two places an error names first.
        files.sort();
        files
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    // The size is checked while reading: devices and pipes report none.
    let mut text = String::new();
    // One byte above the limit is enough to see that the file is too large.
    std::fs::File::open(path)?.take(LARGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LARGEST {
        return Err(std::io::Error::other("larger than 16 MiB"));
    }
    Ok(text)
}

fn whole_file(path: &Arc<PathBuf>, error: &std::io::Error) -> Problem {
    let place = Place::File { path: Arc::clone(path), line: 0 };
    Problem { place, key: String::new(), message: format!("cannot be read: {error}") }
}

/// Variables that an admin may expect to exist, and the right way. Others without `__`
/// are no mistakes: Kubernetes sets `TOLLGATE_PORT` for a service of that name.
const MISTAKEN: &[(&str, &str)] = &[
    ("TOLLGATE_LISTEN", "TOLLGATE_GATEWAY__LISTEN or --listen"),
    ("TOLLGATE_ADMIN_LISTEN", "TOLLGATE_GATEWAY__ADMIN_LISTEN or --admin-listen"),
    ("TOLLGATE_CONFIG", "--config"),
    ("TOLLGATE_MODEL", "--model"),
    ("TOLLGATE_DEVICE", "--device"),
    ("TOLLGATE_LOG_LEVEL", "TOLLGATE_LOG"),
];

/// Returns the key of an environment variable: `TOLLGATE_GATEWAY__LISTEN` is
/// `gateway.listen`, and `TOLLGATE_DATA` is `data`. Any other variable without `__`
/// is no config.
fn variable(name: &str) -> Option<Vec<String>> {
    let rest = name.strip_prefix(PREFIX)?;
    // Other tools may use variables with this prefix.
    if !rest.contains("__") && rest != "DATA" {
        return None;
    }
    Some(rest.split("__").map(str::to_lowercase).collect())
}

impl Flags {
    /// Returns the flags that were given.
    fn shown(&self) -> Vec<String> {
        // Destructured in full, so that a new flag cannot be missed in the audit log.
        let Self { listen, admin_listen, data, model, device } = self;
        let path = |path: &PathBuf| path.display().to_string();
        [
            ("--listen", listen.clone()),
            ("--admin-listen", admin_listen.clone()),
            ("--data", data.as_ref().map(path)),
            ("--model", model.as_ref().map(path)),
            ("--device", device.clone()),
        ]
        .into_iter()
        .filter_map(|(flag, value)| Some(format!("{flag}={}", value?)))
        .collect()
    }

    fn lay_over(&self, table: &mut Table, problems: &mut Vec<Problem>) {
        let Self { listen, admin_listen, data, model, device } = self;
        let data = data.as_ref().and_then(|path| text("--data", path, problems));
        for (flag, keys, value) in [
            ("--listen", &["gateway", "listen"][..], listen.clone()),
            ("--admin-listen", &["gateway", "admin_listen"][..], admin_listen.clone()),
            ("--data", &["data"][..], data),
        ] {
            if let Some(text) = value {
                let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
                let node = Node { place: Place::Flag(flag), value: Value::Text(text) };
                tree::overlay(table, &keys, node);
            }
        }
        // `--device` also applies to the model of `--model`, so the model comes
        // first.
        if let Some(folder) = model {
            lay_model(folder, table, problems);
        }
        if let Some(device) = device {
            lay_device(device, table);
        }
    }
}

/// Returns the path as the text that a config holds. Another spelling of the path would
/// name another folder, so a path that is no text is a mistake.
fn text(flag: &'static str, path: &Path, problems: &mut Vec<Problem>) -> Option<String> {
    let text = path.to_str().map(str::to_owned);
    if text.is_none() {
        let message = format!("{path:?} is not valid UTF-8; choose a path that is");
        problems.push(Problem { place: Place::Flag(flag), key: String::new(), message });
    }
    text
}

/// Applies `--model DIR`: serves only that folder, under the folder's name.
fn lay_model(folder: &Path, table: &mut Table, problems: &mut Vec<Problem>) {
    let Some(given) = text("--model", folder, problems) else { return };
    let place = Place::Flag("--model");
    // `absolute` gives `.` the name of the working folder.
    let name = std::path::absolute(folder)
        .ok()
        .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
        .unwrap_or_default();
    // A path without a name gives an empty text, which is refused here.
    if let Err(error) = ModelName::new(&name) {
        problems.push(Problem { place, key: String::new(), message: error.to_string() });
        return;
    }
    // The model's other settings, such as its plan, stay in force.
    let known = tree::find(table, &["models", &name]).and_then(Node::table).cloned();
    let mut settings = known.unwrap_or_default();
    let path = Node { place: place.clone(), value: Value::Text(given) };
    settings.insert("path".to_owned(), path);
    let settings = Node { place: place.clone(), value: Value::Table(settings) };
    let only = Table::from([(name, settings)]);
    table.insert("models".to_owned(), Node { place, value: Value::Table(only) });
}

/// Applies `--device` to every model.
fn lay_device(device: &str, table: &mut Table) {
    let place = Place::Flag("--device");
    let node = |value| Node { place: place.clone(), value };
    // Without this section, the demo model would be served, so it gets the device.
    let models = table.entry("models".to_owned()).or_insert_with(|| {
        let demo = (DEMO_MODEL.to_owned(), node(Value::Table(Table::new())));
        node(Value::Table(Table::from([demo])))
    });
    let Value::Table(models) = &mut models.value else { return };
    for model in models.values_mut() {
        if let Value::Table(settings) = &mut model.value {
            let devices = Value::Array(vec![node(Value::Text(device.to_owned()))]);
            settings.insert("devices".to_owned(), node(devices));
        }
    }
}
