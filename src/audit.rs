//! `tollgate audit`: exports the audit log, and verifies exports offline.

mod actions;

use std::fs::{self, DirBuilder, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tollgate_auditor::{Checkpoint, Folder, Proof, VerifierKey, verify};
use tollgate_domain::RequestId;
use tollgate_ledger::{
    AuditKey, DatabasePlace, Exported, Ledger, LedgerError, LedgerReader, Range,
};

use self::actions::Actions;
use crate::common::{Place, say};
use crate::databases;

/// Export, verify and prove the audit log.
#[derive(clap::Args)]
pub struct AuditArguments {
    #[command(subcommand)]
    action: AuditAction,
}

#[derive(clap::Subcommand)]
enum AuditAction {
    /// Write the signed records as plain files. The gateway may be running.
    Export(Export),
    /// Verify exported files or a proof, with nothing but a public key.
    Verify(Verify),
    /// Print a proof (JSON) that a request's records are in the log.
    Prove(Prove),
    /// Print the newest signed checkpoint.
    ///
    /// Keep checkpoints: with an old one anyone can later prove that the log was
    /// rewritten, if it was.
    Checkpoint(Place),
    /// Print the public key.
    Key(Place),
    /// Create a new signing key, if the old one is lost.
    NewKey(Place),
    /// Show the newest actions of admins. The gateway may be running.
    Actions(Actions),
}

#[derive(clap::Args)]
struct Export {
    #[command(flatten)]
    place: Place,
    /// The folder to create.
    #[arg(long, value_name = "DIR", default_value = "audit-export")]
    out: PathBuf,
    /// The first record to export. Give the number after the last record of an
    /// earlier export.
    #[arg(long, value_name = "RECORD", default_value_t = 0)]
    from: u64,
    /// The last record to export at least. An export ends at a checkpoint.
    #[arg(long, value_name = "RECORD")]
    to: Option<u64>,
}

#[derive(clap::Args)]
struct Verify {
    /// Folders of exports, in order. Each must continue the one before it.
    #[arg(value_name = "DIR", required_unless_present = "proof", conflicts_with = "proof")]
    folders: Vec<PathBuf>,
    /// The public key, or a file that contains it. Repeat it if the key was
    /// changed.
    #[arg(long = "key", value_name = "PUB", required = true)]
    keys: Vec<String>,
    /// A checkpoint from an earlier time. Can be repeated.
    #[arg(long = "checkpoint", value_name = "FILE", conflicts_with = "proof")]
    checkpoints: Vec<PathBuf>,
    /// Verify this proof instead of exports.
    #[arg(long, value_name = "FILE")]
    proof: Option<PathBuf>,
}

#[derive(clap::Args)]
struct Prove {
    #[command(flatten)]
    place: Place,
    /// The request's id, from the header `x-request-id`.
    request: String,
}

/// Runs the subcommand.
pub fn run(arguments: AuditArguments) -> Result<()> {
    match arguments.action {
        AuditAction::Export(arguments) => export(&arguments),
        AuditAction::Actions(arguments) => actions::print(&arguments),
        AuditAction::Verify(Verify { folders, keys, checkpoints, proof }) => {
            let keys = keys.iter().map(|key| public_key(key)).collect::<Result<Vec<_>>>()?;
            match proof {
                Some(proof) => verify_proof(&proof, &keys),
                None => verify_folders(&folders, &keys, &checkpoints),
            }
        }
        AuditAction::Prove(Prove { place, request }) => {
            let proof = reader(&place)?.prove(&RequestId::new(&request)?)?;
            say(format!("{}\n", serde_json::to_string(&proof)?))
        }
        AuditAction::Checkpoint(place) => match reader(&place)?.checkpoint()? {
            Some(note) => say(note),
            None => bail!("the audit log has no signed checkpoint yet"),
        },
        AuditAction::Key(place) => {
            let folder = folder_of(place.load()?.data());
            let Some(key) = AuditKey::load(&folder)? else {
                bail!(
                    "there is no signing key in {} yet; `tollgate up` creates it at its first start",
                    folder.display()
                );
            };
            say(format!("{}\n", key.verifier()))
        }
        AuditAction::NewKey(place) => {
            let config = place.load()?;
            let data = config.data();
            // A missing folder is probably a typing error.
            if !data.is_dir() {
                bail!("there is no data folder {}: `tollgate up` makes it", data.display());
            }
            let key = AuditKey::make(&folder_of(data))?;
            say(format!("{}\n", key.verifier()))
        }
    }
}

/// Returns the signing key of the data folder. The first start creates it. If the
/// log is signed but the key is gone, only an admin can decide what to do.
///
/// # Errors
/// The key cannot be read or created, or it is missing.
pub fn signing_key(data: &Path, ledger: &DatabasePlace) -> Result<AuditKey> {
    let folder = folder_of(data);
    if let Some(key) = AuditKey::load(&folder)? {
        return Ok(key);
    }
    let signed = match is_signed(ledger) {
        Ok(signed) => signed,
        // A file in another format cannot be read here and is not signed.
        Err(_) if matches!(ledger, DatabasePlace::File(_)) => false,
        // A server that is away may have a signed ledger.
        Err(error) => return Err(error).context("cannot read the ledger"),
    };
    if signed {
        bail!(
            "the key that signed the audit log is missing in {}; restore it, or create another one with `tollgate audit new-key`",
            folder.display()
        );
    }
    Ok(AuditKey::make(&folder)?)
}

fn is_signed(ledger: &DatabasePlace) -> Result<bool, LedgerError> {
    if !ledger.has_ledger()? {
        return Ok(false);
    }
    Ok(Ledger::open_read_only(ledger.clone())?.checkpoint()?.is_some())
}

fn folder_of(data: &Path) -> PathBuf {
    data.join("audit")
}

fn reader(place: &Place) -> Result<LedgerReader> {
    let place = databases::ledger(&place.load()?)?;
    Ledger::open_read_only(place.clone()).with_context(|| format!("cannot read the ledger {place}"))
}

/// Exports into a folder of another name and renames it, so that an existing export
/// is always complete.
fn export(arguments: &Export) -> Result<()> {
    let Export { place, out, from, to } = arguments;
    // An existing folder may hold the only copy of an export, so it is never
    // replaced.
    if out.exists() {
        bail!("{} exists already", out.display());
    }
    let reader = reader(place)?;
    let unfinished = unfinished(out)?;
    let range = Range { from: *from, to: *to };
    let exported = write_folder(&reader, range, place.load()?.data(), &unfinished)?;
    fs::rename(&unfinished, out).with_context(|| out.display().to_string())?;
    let Exported { start, end, unsigned } = exported;
    let waiting = match unsigned {
        0 => String::new(),
        some => format!("; {some} newer records are not signed yet"),
    };
    say(format!("{}: records {} to {}{waiting}\n", out.display(), start.size, end - 1))
}

/// Creates a fresh folder beside `out`, to be renamed to `out` when it is complete.
///
/// # Errors
/// The folder cannot be created.
pub fn unfinished(out: &Path) -> Result<PathBuf> {
    let mut unfinished = out.as_os_str().to_owned();
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    // An interrupted export may have left the folder.
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(|| unfinished.display().to_string())?;
    }
    // The log names tenants and admins, so only this user may read it.
    DirBuilder::new()
        .mode(0o700)
        .create(&unfinished)
        .with_context(|| unfinished.display().to_string())?;
    Ok(unfinished)
}

/// Writes an export of `range` into `folder`, with the public key of the data
/// folder `data`.
///
/// # Errors
/// The ledger cannot be read, or a file cannot be written.
pub fn write_folder(
    reader: &LedgerReader,
    range: Range,
    data: &Path,
    folder: &Path,
) -> Result<Exported> {
    let exported = write_files(reader, range, folder)?;
    // With the key, the export can be verified on any host.
    if let Some(key) = AuditKey::load(&folder_of(data))? {
        fs::write(folder.join("public.key"), format!("{}\n", key.verifier()))?;
    }
    Ok(exported)
}

fn write_files(reader: &LedgerReader, range: Range, folder: &Path) -> Result<Exported> {
    let create = |name: &str| -> Result<BufWriter<File>> {
        let path = folder.join(name);
        Ok(BufWriter::new(File::create(&path).with_context(|| path.display().to_string())?))
    };
    let (mut records, mut checkpoints) = (create("records.jsonl")?, create("checkpoints.jsonl")?);
    let exported = reader.export(range, &mut records, &mut checkpoints)?;
    let mut start = create("start.json")?;
    writeln!(start, "{}", serde_json::to_string(&exported.start)?)?;
    for mut file in [records, checkpoints, start] {
        file.flush()?;
        // An export may be the only copy later, so it must be durable.
        file.get_ref().sync_all()?;
    }
    Ok(exported)
}

fn verify_folders(folders: &[PathBuf], keys: &[VerifierKey], kept: &[PathBuf]) -> Result<()> {
    // An old checkpoint shows that the exports continue the log of that time.
    let kept = kept
        .iter()
        .map(|path| {
            let shown = || path.display().to_string();
            let note = fs::read_to_string(path).with_context(shown)?;
            Checkpoint::open(&note, keys).with_context(shown)
        })
        .collect::<Result<Vec<_>>>()?;
    let sound = verify(folders.iter().map(|folder| Folder::open(folder)), keys, &kept)?;
    say(format!(
        "sound: records {} to {} of {}, {} checkpoints\n",
        sound.first,
        // The subtraction is safe: a checkpoint that was verified covers at least one record.
        sound.newest.size() - 1,
        sound.newest.origin(),
        sound.checkpoints
    ))
}

fn verify_proof(path: &Path, keys: &[VerifierKey]) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let (checkpoint, records) = Proof::read(&text)?.verify(keys)?;
    let (origin, size) = (checkpoint.origin(), checkpoint.size());
    let mut said = format!("proved: the log {origin} of {size} records contains\n");
    for proved in records {
        said += &format!("{}\n", proved.record);
    }
    say(said)
}

/// Parses a public key, or reads it from the file that `text` names.
fn public_key(text: &str) -> Result<VerifierKey> {
    if let Ok(key) = text.parse() {
        return Ok(key);
    }
    let read = fs::read_to_string(text).with_context(|| {
        format!("{text:?} is neither a public key nor a file that contains one")
    })?;
    read.trim_end().parse().with_context(|| text.to_owned())
}
