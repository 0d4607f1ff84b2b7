//! `tollgate audit`: hands out the audit log, and judges one that was handed
//! out, offline.

use std::fs::{self, DirBuilder, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tollgate_auditor::{Checkpoint, Folder, Proof, VerifierKey, verify};
use tollgate_domain::RequestId;
use tollgate_ledger::{AuditKey, Exported, Ledger, LedgerReader, Range};

use crate::common::{Place, say};

/// Export, verify and prove the audit log.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Write the signed records as plain files, also beside a running gateway.
    Export(Export),
    /// Judge exported files, or a proof, with nothing but a public key.
    Verify(Verify),
    /// Print the proof that a request's records are in the log, as JSON.
    Prove(Prove),
    /// Print the newest signed checkpoint: whoever keeps it can later show that
    /// the log was rewritten, if it was.
    Checkpoint(Place),
    /// Print the public key.
    Key(Place),
    /// Make a new signing key, where the old one was lost or moved away.
    NewKey(Place),
}

#[derive(clap::Args)]
struct Export {
    #[command(flatten)]
    place: Place,
    /// The folder to make.
    #[arg(long, value_name = "DIR", default_value = "audit-export")]
    out: PathBuf,
    /// From this record on: the number after the last one of an earlier export.
    #[arg(long, value_name = "RECORD", default_value_t = 0)]
    from: u64,
    /// At least up to this record; it ends where a checkpoint does.
    #[arg(long, value_name = "RECORD")]
    to: Option<u64>,
}

#[derive(clap::Args)]
struct Verify {
    /// Folders of exports, each going on where the one before it ends.
    #[arg(value_name = "DIR", required_unless_present = "proof", conflicts_with = "proof")]
    folders: Vec<PathBuf>,
    /// The public key, or a file that holds it; several where it was changed.
    #[arg(long = "key", value_name = "PUB", required = true)]
    keys: Vec<String>,
    /// A checkpoint that was kept from earlier; may be given often.
    #[arg(long = "checkpoint", value_name = "FILE", conflicts_with = "proof")]
    checkpoints: Vec<PathBuf>,
    /// Judge this proof.
    #[arg(long, value_name = "FILE")]
    proof: Option<PathBuf>,
}

#[derive(clap::Args)]
struct Prove {
    #[command(flatten)]
    place: Place,
    /// The request's id, as `x-request-id` said it.
    request: String,
}

/// Does what was asked.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.action {
        Action::Export(arguments) => export(&arguments),
        Action::Verify(Verify { folders, keys, checkpoints, proof }) => {
            let keys = keys.iter().map(|key| public_key(key)).collect::<Result<Vec<_>>>()?;
            match proof {
                Some(proof) => verify_proof(&proof, &keys),
                None => verify_folders(&folders, &keys, &checkpoints),
            }
        }
        Action::Prove(Prove { place, request }) => {
            let proof = reader(&place)?.prove(&RequestId::new(&request)?)?;
            say(format!("{}\n", serde_json::to_string(&proof)?))
        }
        Action::Checkpoint(place) => match reader(&place)?.checkpoint()? {
            Some(note) => say(note),
            None => bail!("nothing was signed yet"),
        },
        Action::Key(place) => {
            let folder = folder_of(place.load()?.data());
            let Some(key) = AuditKey::load(&folder)? else {
                bail!("there is no key in {} yet: the first start makes it", folder.display());
            };
            say(format!("{}\n", key.verifier()))
        }
        Action::NewKey(place) => {
            let config = place.load()?;
            let data = config.data();
            if !data.is_dir() {
                bail!("there is no data folder {}: `tollgate up` makes it", data.display());
            }
            let key = AuditKey::make(&folder_of(data))?;
            say(format!("{}\n", key.verifier()))
        }
    }
}

/// The signing key of the data folder `data`, made at the first start. Where
/// something was signed and the key is gone, that is for a person to settle.
///
/// # Errors
/// It cannot be read or made, or it is gone.
pub fn signing_key(data: &Path) -> Result<AuditKey> {
    let folder = folder_of(data);
    if let Some(key) = AuditKey::load(&folder)? {
        return Ok(key);
    }
    // A ledger of another format cannot be asked, and has nothing signed.
    let signed = Ledger::open_read_only(&data.join("ledger.db"))
        .and_then(|reader| reader.checkpoint())
        .is_ok_and(|checkpoint| checkpoint.is_some());
    if signed {
        bail!(
            "the key that signed the audit log is missing in {}: put it back, or make another with `tollgate audit new-key`",
            folder.display()
        );
    }
    Ok(AuditKey::make(&folder)?)
}

fn folder_of(data: &Path) -> PathBuf {
    data.join("audit")
}

fn reader(place: &Place) -> Result<LedgerReader> {
    let path = place.load()?.data().join("ledger.db");
    Ledger::open_read_only(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes into a folder of another name first: one that is there is whole.
fn export(arguments: &Export) -> Result<()> {
    let Export { place, out, from, to } = arguments;
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
        some => format!("; {some} newer are not signed yet"),
    };
    say(format!("{}: records {} to {}{waiting}\n", out.display(), start.size, end - 1))
}

/// A fresh folder beside `out`, to be renamed to it once it is whole.
///
/// # Errors
/// It cannot be made.
pub fn unfinished(out: &Path) -> Result<PathBuf> {
    let mut unfinished = out.as_os_str().to_owned();
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(|| unfinished.display().to_string())?;
    }
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
/// The ledger cannot be read, or a file not written.
pub fn write_folder(
    reader: &LedgerReader,
    range: Range,
    data: &Path,
    folder: &Path,
) -> Result<Exported> {
    let exported = write_files(reader, range, folder)?;
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
        file.get_ref().sync_all()?;
    }
    Ok(exported)
}

fn verify_folders(folders: &[PathBuf], keys: &[VerifierKey], kept: &[PathBuf]) -> Result<()> {
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
        sound.newest.size() - 1,
        sound.newest.origin(),
        sound.checkpoints
    ))
}

fn verify_proof(path: &Path, keys: &[VerifierKey]) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let (checkpoint, records) = Proof::read(&text)?.verify(keys)?;
    let (origin, size) = (checkpoint.origin(), checkpoint.size());
    let mut said = format!("proved: in the log {origin} of {size} records stand\n");
    for proved in records {
        said += &format!("{}\n", proved.record);
    }
    say(said)
}

/// The key itself, or the file that holds it.
fn public_key(text: &str) -> Result<VerifierKey> {
    if let Ok(key) = text.parse() {
        return Ok(key);
    }
    let read = fs::read_to_string(text)
        .with_context(|| format!("{text:?} is neither a public key nor a file that holds one"))?;
    read.trim_end().parse().with_context(|| text.to_owned())
}
