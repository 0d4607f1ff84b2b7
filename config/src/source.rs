//! Where config comes from: a file or folder, the environment, flags; the
//! later wins. This is the one place that reads the environment.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tollgate_domain::ModelName;

use crate::problem::{Place, Problem};
use crate::tree::{self, Node, Table, Value};

/// Variables that begin so and name a section are config.
const PREFIX: &str = "TOLLGATE_";
/// No honest config is larger than this, in bytes over all files.
const LARGEST: u64 = 16 << 20;

/// Where a config is loaded from. [`Sources::default`] is defaults alone.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// A file, or a folder of which every `*.toml` is read.
    pub path: Option<PathBuf>,
    /// Variables and their values; those that are not config are passed over.
    pub environment: Vec<(String, String)>,
    /// What the command line says.
    pub flags: Flags,
}

/// Flags that override config, as `up` takes them.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--listen`: `gateway.listen`.
    pub listen: Option<String>,
    /// `--admin-listen`: `gateway.admin_listen`.
    pub admin_listen: Option<String>,
    /// `--data`: `data`.
    pub data: Option<PathBuf>,
    /// `--model`: serves this folder alone, under the folder's name.
    pub model: Option<PathBuf>,
    /// `--device`: the `devices` of every model.
    pub device: Option<String>,
}

/// What a config was made of, for whoever has to show it later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// SHA-256 in hex over the bytes of its files, one after the other in the
    /// order of their names: what `cat FILES | sha256sum` says.
    pub files_sha256: String,
    /// What stood above the files: `TOLLGATE_GATEWAY__LISTEN=…`, `--listen=…`.
    pub overrides: Vec<String>,
}

impl Loaded {
    /// Of text that is no file's.
    pub(crate) fn of_text(text: &str) -> Self {
        Self { files_sha256: hex(Sha256::digest(text)), overrides: Vec::new() }
    }
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Sources {
    /// A path and flags beside this process's environment.
    pub fn of_process(path: Option<PathBuf>, flags: Flags) -> Self {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        let environment = std::env::vars_os()
            .map(|(name, value)| (text(name), text(value)))
            .filter(|(name, _)| name.starts_with(PREFIX))
            .collect();
        Self { path, environment, flags }
    }

    /// One tree of all sources, and what it was made of.
    pub(crate) fn gather(&self, problems: &mut Vec<Problem>) -> (Table, Loaded) {
        let mut table = Table::new();
        let mut files = Sha256::new();
        let mut overrides = self.flags.shown();
        for file in self.files(problems) {
            let path = Arc::new(file);
            match read(&path) {
                Ok(text) => {
                    files.update(&text);
                    let parsed = tree::parse(&path, &text, problems);
                    tree::merge(&mut table, parsed, "", problems);
                }
                Err(error) => problems.push(whole_file(&path, &error)),
            }
        }
        for (name, value) in &self.environment {
            if let Some(keys) = variable(name) {
                let node = tree::untyped(Place::Environment(name.clone()), value);
                tree::overlay(&mut table, &keys, node);
                overrides.push(format!("{name}={value}"));
            }
        }
        self.flags.lay_over(&mut table, problems);
        (table, Loaded { files_sha256: hex(files.finalize()), overrides })
    }

    /// The files to read, in order of their names.
    fn files(&self, problems: &mut Vec<Problem>) -> Vec<PathBuf> {
        let Some(path) = &self.path else { return Vec::new() };
        if !path.is_dir() {
            return vec![path.clone()];
        }
        let mut files = Vec::new();
        let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        match entries {
            Ok(entries) => {
                files.extend(entries.iter().map(std::fs::DirEntry::path).filter(|path| {
                    // A mounted folder's hidden copies are not config.
                    let hidden = path
                        .file_name()
                        .is_some_and(|name| name.to_string_lossy().starts_with('.'));
                    path.extension().is_some_and(|extension| extension == "toml") && !hidden
                }))
            }
            Err(error) => problems.push(whole_file(&Arc::new(path.clone()), &error)),
        }
        if files.is_empty() && problems.is_empty() {
            let error = std::io::Error::other("the folder holds no *.toml");
            problems.push(whole_file(&Arc::new(path.clone()), &error));
        }
        files.sort();
        files
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    // What it says of its size may be nothing: a device, a pipe.
    let mut text = String::new();
    std::fs::File::open(path)?.take(LARGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LARGEST {
        return Err(std::io::Error::other("larger than 16 MiB: not a config"));
    }
    Ok(text)
}

fn whole_file(path: &Arc<PathBuf>, error: &std::io::Error) -> Problem {
    let place = Place::File { path: Arc::clone(path), line: 0 };
    Problem { place, key: String::new(), message: format!("cannot be read: {error}") }
}

/// `TOLLGATE_GATEWAY__LISTEN` is `gateway.listen`, and `TOLLGATE_DATA` is
/// `data`; any other variable without `__` is somebody else's.
fn variable(name: &str) -> Option<Vec<String>> {
    let rest = name.strip_prefix(PREFIX)?;
    if !rest.contains("__") && rest != "DATA" {
        return None;
    }
    Some(rest.split("__").map(str::to_lowercase).collect())
}

impl Flags {
    /// Those that were given.
    fn shown(&self) -> Vec<String> {
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
        let data = data.as_ref().map(|path| path.to_string_lossy().into_owned());
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
        if let Some(folder) = model {
            lay_model(folder, table, problems);
        }
        if let Some(device) = device {
            lay_device(device, table);
        }
    }
}

/// `--model DIR` serves that folder and nothing else, under the folder's name.
fn lay_model(folder: &Path, table: &mut Table, problems: &mut Vec<Problem>) {
    let place = Place::Flag("--model");
    let name = std::path::absolute(folder)
        .ok()
        .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
        .unwrap_or_default();
    if let Err(error) = ModelName::new(&name) {
        problems.push(Problem { place, key: String::new(), message: error.to_string() });
        return;
    }
    let known = tree::find(table, &["models", &name]).and_then(Node::table).cloned();
    let mut settings = known.unwrap_or_default();
    let path = Value::Text(folder.to_string_lossy().into_owned());
    settings.insert("path".to_owned(), Node { place: place.clone(), value: path });
    let settings = Node { place: place.clone(), value: Value::Table(settings) };
    let only = Table::from([(name, settings)]);
    table.insert("models".to_owned(), Node { place, value: Value::Table(only) });
}

fn lay_device(device: &str, table: &mut Table) {
    let place = Place::Flag("--device");
    let node = |value| Node { place: place.clone(), value };
    let models = table.entry("models".to_owned()).or_insert_with(|| {
        let demo = (crate::config::DEMO_MODEL.to_owned(), node(Value::Table(Table::new())));
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
