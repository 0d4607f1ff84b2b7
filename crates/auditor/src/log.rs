//! A walk along an exported log, record by record: each record must fit its hash,
//! follow the record before it, and be under a root that was signed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use crate::tree::Tree;
use crate::{Checkpoint, Hash, NoteError, VerifierKey};

/// One export: the records of a range of the log, and their checkpoints.
pub struct Folder<R> {
    /// The name of the export in messages.
    pub name: String,
    /// The text of `start.json`: the state of the log before the first record.
    pub start: String,
    /// The lines of `records.jsonl`.
    pub records: R,
    /// The lines of `checkpoints.jsonl`.
    pub checkpoints: R,
}

/// The extent of a log that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sound {
    /// The number of the first record.
    pub first: u64,
    /// Number of checkpoints that were compared.
    pub checkpoints: u64,
    /// The last checkpoint. It signs every record that was read.
    pub newest: Checkpoint,
}

/// A fault of a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The line is no record.
    #[error("its line is torn or no record")]
    Torn,
    /// The bytes do not fit the hash.
    #[error("its bytes are not those that its hash was made of")]
    Altered,
    /// Another record stands in this place.
    #[error("record {found} stands in its place")]
    Displaced {
        /// The number of the other record.
        found: u64,
    },
    /// The log ends before the record, although the record was signed.
    #[error("it is missing: {signed} records were signed")]
    Missing {
        /// The size that a checkpoint states.
        signed: u64,
    },
    /// The record names another hash than that of the record before it.
    #[error(
        "it does not follow the one before it: one of the two was replaced whole, or one was put in or taken out there"
    )]
    Unlinked,
    /// The record stands after the newest checkpoint.
    #[error("no checkpoint signs it")]
    Unsigned,
}

/// The reason why a log is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// The first record that cannot be right.
    #[error("record {record}: {fault}")]
    Record {
        /// The record's number.
        record: u64,
        /// The fault.
        fault: Fault,
    },
    /// The chain is consistent, but not the one that was signed: it was rewritten.
    #[error("records {first} to {last}: at least one is not what was signed")]
    Rewritten {
        /// The first record that may be bad. All records before it were signed as they
        /// are.
        first: u64,
        /// The last record that the checkpoint covers.
        last: u64,
    },
    /// A checkpoint that was kept belongs to another history.
    #[error(
        "records {first} to {last}: the checkpoint of {size} records that was kept signs others; the log was rewritten or forked after it"
    )]
    Forked {
        /// The first record that may differ.
        first: u64,
        /// The last record that may differ.
        last: u64,
        /// The size of the kept checkpoint.
        size: u64,
    },
    /// A checkpoint is not valid.
    #[error("{folder}: checkpoint {line}: {error}")]
    Checkpoint {
        /// The export.
        folder: String,
        /// The line of the checkpoint, from 1.
        line: u64,
        /// The reason.
        error: NoteError,
    },
    /// A checkpoint does not cover more records than the one before it.
    #[error("{folder}: checkpoint {line} is of no later record than the one before it")]
    Order {
        /// The export.
        folder: String,
        /// The line of the checkpoint, from 1.
        line: u64,
    },
    /// The export has no checkpoint.
    #[error("{folder}: there is no checkpoint")]
    NothingSigned {
        /// The export.
        folder: String,
    },
    /// `start.json` is torn or contradicts itself.
    #[error("{folder}: start.json is torn or says what cannot be")]
    Start {
        /// The export.
        folder: String,
    },
    /// An export does not continue where the export before it ended.
    #[error("{folder}: does not go on where the export before it ended, after record {after}")]
    Gap {
        /// The export.
        folder: String,
        /// The last record before the export.
        after: u64,
    },
    /// A checkpoint that was kept is older than these records, so it cannot be
    /// compared.
    #[error("the checkpoint of {size} records is older than the first record here, {first}")]
    NotCovered {
        /// The size of the kept checkpoint.
        size: u64,
        /// The first record that was read.
        first: u64,
    },
    /// A file cannot be read.
    #[error("{file}: {reason}")]
    File {
        /// The file.
        file: String,
        /// The system's error.
        reason: String,
    },
}

/// The content of `start.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Start {
    size: u64,
    prev: String,
    peaks: Vec<String>,
}

impl Folder<BufReader<File>> {
    /// Opens an export in a folder.
    ///
    /// # Errors
    /// [`LogError::File`]
    pub fn open(path: &Path) -> Result<Self, LogError> {
        let failed = |file: &Path, error: io::Error| LogError::File {
            file: file.display().to_string(),
            reason: error.to_string(),
        };
        let open = |name: &str| {
            let file = path.join(name);
            File::open(&file).map_err(|error| failed(&file, error))
        };
        let mut start = String::new();
        // A bound, because the file may be endless; a frontier has 64 hashes at most.
        let read = open("start.json")?.take(64 * 1024).read_to_string(&mut start);
        read.map_err(|error| failed(&path.join("start.json"), error))?;
        Ok(Self {
            name: path.display().to_string(),
            start,
            records: BufReader::new(open("records.jsonl")?),
            checkpoints: BufReader::new(open("checkpoints.jsonl")?),
        })
    }
}

/// Verifies exports that follow one another. `kept` are checkpoints that were put
/// aside earlier: the log must still contain the records that they signed.
///
/// # Errors
/// The first fault, in the order of the records.
pub fn verify<R: BufRead>(
    folders: impl IntoIterator<Item = Result<Folder<R>, LogError>>,
    keys: &[VerifierKey],
    kept: &[Checkpoint],
) -> Result<Sound, LogError> {
    let mut kept: Vec<Checkpoint> = kept.to_vec();
    // The walk compares kept checkpoints from the front while the tree grows.
    kept.sort_by_key(Checkpoint::size);
    let mut kept = VecDeque::from(kept);
    let mut walk: Option<Walk<'_>> = None;
    for folder in folders {
        let mut folder = folder?;
        let begun = match walk.take() {
            Some(walk) => walk.go_on(&folder)?,
            // This arm runs for the first export only, so it takes all kept checkpoints.
            None => Walk::begin(&folder, keys, std::mem::take(&mut kept))?,
        };
        walk = Some(begun.walk(&mut folder)?);
    }
    walk.ok_or(LogError::NothingSigned { folder: "nothing".to_owned() })?.end()
}

/// The state of a walk along a log.
struct Walk<'a> {
    keys: &'a [VerifierKey],
    /// Kept checkpoints that are not compared yet, smallest first.
    kept: VecDeque<Checkpoint>,
    first: u64,
    tree: Tree,
    last: Hash,
    /// Number of leading records that a checkpoint has proved.
    proved: u64,
    checkpoints: u64,
    newest: Option<Checkpoint>,
}

impl<'a> Walk<'a> {
    fn begin<R>(
        folder: &Folder<R>,
        keys: &'a [VerifierKey],
        kept: VecDeque<Checkpoint>,
    ) -> Result<Self, LogError> {
        let (tree, last) = read_start(folder)?;
        let first = tree.size();
        if let Some(older) = kept.front().filter(|kept| kept.size() < first) {
            return Err(LogError::NotCovered { size: older.size(), first });
        }
        // Error ranges begin at `first`, because the exports do not hold earlier records.
        let (proved, checkpoints, newest) = (first, 0, None);
        let mut walk = Self { keys, kept, first, tree, last, proved, checkpoints, newest };
        // A kept checkpoint may end exactly where the export begins.
        walk.compare_kept()?;
        Ok(walk)
    }

    /// Continues with the next export, which must begin where the last one ended.
    fn go_on<R>(self, folder: &Folder<R>) -> Result<Self, LogError> {
        // The subtrees need not show the hash of the last record, so the hash is compared as well.
        if read_start(folder)? == (self.tree.clone(), self.last) {
            Ok(self)
        } else {
            let after = self.tree.size().saturating_sub(1);
            Err(LogError::Gap { folder: folder.name.clone(), after })
        }
    }

    fn walk<R: BufRead>(mut self, folder: &mut Folder<R>) -> Result<Self, LogError> {
        let mut line = 0;
        let mut next = self.next_checkpoint(folder, &mut line)?;
        // An export without a checkpoint proves nothing, even if it holds no record.
        if next.is_none() {
            return Err(LogError::NothingSigned { folder: folder.name.clone() });
        }
        while let Some(bytes) =
            read_line(&mut folder.records, LogFile { folder: &folder.name, name: "records.jsonl" })?
        {
            let record = self.tree.size();
            let wrong = |fault| LogError::Record { record, fault };
            let hash = read_record(&bytes, record, self.last).map_err(wrong)?;
            // The record is judged before this test: an altered record is reported as altered,
            // wherever it stands.
            let Some(signed) = &next else { return Err(wrong(Fault::Unsigned)) };
            self.tree.push(hash);
            self.last = hash;
            // A thief of the signing key can sign a rewritten log, but cannot change a kept
            // checkpoint.
            self.compare_kept()?;
            if signed.size() == self.tree.size() {
                self.compare(signed)?;
                self.newest = next;
                next = self.next_checkpoint(folder, &mut line)?;
            }
        }
        match next {
            None => Ok(self),
            // A signed size beyond the last record shows that records were cut off.
            Some(signed) => Err(self.missing(&signed)),
        }
    }

    fn end(self) -> Result<Sound, LogError> {
        // A kept checkpoint of more records shows that the end of the log is missing.
        if let Some(kept) = self.kept.front() {
            return Err(self.missing(kept));
        }
        let Self { first, checkpoints, newest, .. } = self;
        let newest =
            newest.ok_or(LogError::NothingSigned { folder: "the last export".to_owned() })?;
        Ok(Sound { first, checkpoints, newest })
    }

    /// Reads the next checkpoint of the export, which must cover more records than
    /// were read so far.
    fn next_checkpoint<R: BufRead>(
        &self,
        folder: &mut Folder<R>,
        line: &mut u64,
    ) -> Result<Option<Checkpoint>, LogError> {
        let read = read_line(
            &mut folder.checkpoints,
            LogFile { folder: &folder.name, name: "checkpoints.jsonl" },
        )?;
        let Some(bytes) = read else { return Ok(None) };
        *line += 1;
        let failed =
            |error| LogError::Checkpoint { folder: folder.name.clone(), line: *line, error };
        let note = read_note(&bytes).ok_or_else(|| failed(NoteError::Form))?;
        let checkpoint = Checkpoint::open(&note, self.keys).map_err(failed)?;
        // The walk would never compare a checkpoint of records that are already behind it.
        if checkpoint.size() <= self.tree.size() {
            return Err(LogError::Order { folder: folder.name.clone(), line: *line });
        }
        Ok(Some(checkpoint))
    }

    /// Compares the tree with a checkpoint of the same size.
    fn compare(&mut self, signed: &Checkpoint) -> Result<(), LogError> {
        if signed.root() != self.tree.root() {
            // The subtraction is safe: each checkpoint here covers at least one record.
            return Err(LogError::Rewritten { first: self.proved, last: self.tree.size() - 1 });
        }
        self.proved = signed.size();
        self.checkpoints += 1;
        Ok(())
    }

    /// Compares the tree with the kept checkpoints of the same size.
    fn compare_kept(&mut self) -> Result<(), LogError> {
        let size = self.tree.size();
        // Several kept checkpoints may have the same size.
        while self.kept.front().is_some_and(|kept| kept.size() == size) {
            if self.kept.pop_front().is_some_and(|kept| kept.root() != self.tree.root()) {
                let last = size.saturating_sub(1);
                // At the start of an export `proved` equals `size`; the range must not run
                // backwards.
                return Err(LogError::Forked { first: self.proved.min(last), last, size });
            }
        }
        Ok(())
    }

    fn missing(&self, signed: &Checkpoint) -> LogError {
        let fault = Fault::Missing { signed: signed.size() };
        LogError::Record { record: self.tree.size(), fault }
    }
}

fn read_start<R>(folder: &Folder<R>) -> Result<(Tree, Hash), LogError> {
    let read = || {
        let Start { size, prev, peaks } = serde_json::from_str(&folder.start).ok()?;
        let prev = Hash::from_hex(&prev)?;
        let peaks: Option<Vec<Hash>> = peaks.iter().map(|peak| Hash::from_hex(peak)).collect();
        let tree = Tree::after(size, peaks?)?;
        // A log without records has no last hash, so any hash but zeros contradicts the size.
        (size > 0 || prev == Hash::ZERO).then_some((tree, prev))
    };
    read().ok_or_else(|| LogError::Start { folder: folder.name.clone() })
}

/// Returns the hash of the record in a line. The line is
/// `{"hash":"…","record":{"seq":…,"prev":"…",…}}`.
fn read_record(line: &[u8], expected: u64, last: Hash) -> Result<Hash, Fault> {
    let line = std::str::from_utf8(line).map_err(|_| Fault::Torn)?;
    let parts = || {
        let (stated, rest) = line.strip_prefix("{\"hash\":\"")?.split_at_checked(64)?;
        let record = rest.strip_prefix("\",\"record\":")?.strip_suffix('}')?;
        Some((Hash::from_hex(stated)?, record))
    };
    let (stated, record) = parts().ok_or(Fault::Torn)?;
    // The bytes are hashed as they stand: parsed and written again they could differ.
    let hash = Hash::of_leaf(record.as_bytes());
    // The hash comes first: the number and the link of an altered record mean nothing.
    if hash != stated {
        return Err(Fault::Altered);
    }
    let named = || {
        let (seq, rest) = record.strip_prefix("{\"seq\":")?.split_once(",\"prev\":\"")?;
        let (prev, rest) = rest.split_at_checked(64)?;
        let number: u64 = seq.parse().ok()?;
        // `parse` also accepts `+7` and `07`, which the ledger never writes.
        let whole = number.to_string() == seq && rest.starts_with("\",\"") && record.ends_with('}');
        whole.then_some((number, Hash::from_hex(prev)?))
    };
    let (found, prev) = named().ok_or(Fault::Torn)?;
    // The number comes before the link: a missing record breaks both, and the number tells more.
    if found != expected {
        return Err(Fault::Displaced { found });
    }
    if prev != last {
        return Err(Fault::Unlinked);
    }
    Ok(hash)
}

/// Returns the note in a line `{"note":"…"}`. Only one spelling is accepted, so that
/// no byte of an export can change unnoticed.
fn read_note(line: &[u8]) -> Option<String> {
    #[derive(serde::Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Line {
        note: String,
    }
    let read: Line = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&read).ok()?;
    (again == line).then_some(read.note)
}

/// The name of a file of an export.
struct LogFile<'a> {
    folder: &'a str,
    name: &'static str,
}

/// Reads a line without its newline; `None` at the end. A line that is too long or
/// has no newline counts as torn and is returned empty.
fn read_line(reader: &mut impl BufRead, file: LogFile<'_>) -> Result<Option<Vec<u8>>, LogError> {
    let mut line = Vec::new();
    let failed = |error: io::Error| LogError::File {
        file: format!("{}/{}", file.folder, file.name),
        reason: error.to_string(),
    };
    // A file without a newline may be endless.
    let read = reader.take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(failed)?;
    if read == 0 {
        return Ok(None);
    }
    if line.pop() != Some(b'\n') {
        // An empty line is no record and no note, so the caller reports the line as torn.
        line.clear();
    }
    Ok(Some(line))
}

/// Most bytes of a line. Records have a few hundred bytes, the longest 16 KiB of
/// detail.
const LONGEST_LINE: u64 = 1 << 20;
