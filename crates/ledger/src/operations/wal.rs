//! A reader of the write-ahead log that does not use SQLite. SQLite takes the frames
//! up to the first one that does not fit and silently drops the others. That is
//! right after a power cut, and wrong where acknowledged commits follow. This module
//! tells the two cases apart. The format is SQLite's own ("WAL-mode File Format" in
//! its documentation).

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

/// Damage of a write-ahead log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Torn {
    /// The head is damaged: SQLite would drop every commit in the log.
    Head,
    /// Frame `at` does not fit and a later commit does: SQLite would drop
    /// acknowledged commits.
    Within {
        /// The frame, counted from 1.
        at: u64,
    },
    /// The last commit does not fit, and no commit follows. A power cut before the
    /// acknowledgement looks like this, and so does damage.
    AtTheEnd {
        /// The frame, counted from 1.
        at: u64,
    },
}

impl Torn {
    /// Returns a message for people.
    pub(crate) fn message(&self, path: &Path) -> String {
        let shown = path.display();
        match self {
            Self::Head => format!("{shown}: its head is damaged; every commit in it is lost"),
            Self::Within { at } => format!(
                "{shown}: frame {at} is damaged; acknowledged commits from there on are lost"
            ),
            Self::AtTheEnd { at } => format!(
                "{shown}: the last commit is torn at frame {at}: a power cut before it was acknowledged, or damage"
            ),
        }
    }
}

/// Returns the path of the write-ahead log of the database at `path`.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    PathBuf::from(name)
}

/// Reads the log of the database at `path` and returns its damage. `None` for a sound
/// log and for no log. A log in the middle of a commit looks torn, so a caller beside
/// a writer looks again.
pub(crate) fn look(path: &Path) -> io::Result<Option<Torn>> {
    let file = match File::open(beside(path)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if file.metadata()?.len() < HEAD {
        // The log was made and never written: it holds no commit.
        return Ok(None);
    }
    scan(BufReader::with_capacity(1 << 20, file))
}

fn scan(mut file: impl Read) -> io::Result<Option<Torn>> {
    let mut head = [0; HEAD as usize];
    file.read_exact(&mut head)?;
    if head == [0; HEAD as usize] {
        // The file was made, and a power cut came before its first sync.
        return Ok(Some(Torn::AtTheEnd { at: 1 }));
    }
    let Some(log) = Log::of(&head) else {
        return Ok(Some(Torn::Head));
    };
    let mut frame = vec![0; FRAME + log.page];
    let mut before = log.sum;
    let mut number = 0;
    let mut bad: Option<Bad> = None;
    while read_whole(&mut file, &mut frame)? {
        number += 1;
        let stated = pair(&frame[16..24]);
        let fits = log.sum_of(&frame, before) == stated;
        // A frame of the log's earlier use has other salts.
        let ours = frame[8..16] == log.salts;
        // A frame that commits states the size of the database; other frames state 0.
        let commits = ours && frame[4..8] != [0; 4];
        // The stated sum goes on, not the computed one. Frames after a damaged one can still be
        // judged.
        before = stated;
        match &mut bad {
            None if fits && ours => {}
            None => bad = Some(Bad { at: number, over: commits, looks_old: !fits && !ours }),
            Some(bad) if fits && ours => {
                if bad.over {
                    return Ok(Some(Torn::Within { at: bad.at }));
                }
                // A good frame follows, so the bad one is no remainder of an earlier use.
                (bad.over, bad.looks_old) = (commits, false);
            }
            Some(bad) => bad.over |= commits,
        }
    }
    Ok(bad.filter(|bad| !bad.looks_old).map(|bad| Torn::AtTheEnd { at: bad.at }))
}

/// The first frame that does not fit, and the state of its commit.
struct Bad {
    at: u64,
    /// True once the frame's commit has ended.
    over: bool,
    /// True if the frame may be a remainder of the log's earlier use. Then the log
    /// simply ends here.
    looks_old: bool,
}

/// The head of a log.
struct Log {
    page: usize,
    salts: [u8; 8],
    sum: (u32, u32),
    is_big_endian: bool,
}

impl Log {
    /// Parses the head; `None` where it is damaged.
    fn of(head: &[u8; HEAD as usize]) -> Option<Self> {
        let magic = number(&head[..4]);
        let page = number(&head[8..12]) as usize;
        let known = magic & !1 == MAGIC && number(&head[4..8]) == VERSION;
        // SQLite's own bounds of a page. They also bound the buffer for a frame.
        if !known || !page.is_power_of_two() || !(512..=65_536).contains(&page) {
            return None;
        }
        let mut salts = [0; 8];
        salts.copy_from_slice(&head[16..24]);
        let mut log = Self { page, salts, sum: (0, 0), is_big_endian: magic & 1 == 1 };
        log.sum = log.add((0, 0), &head[..24]);
        (log.sum == pair(&head[24..])).then_some(log)
    }

    /// Returns the checksum of a frame, which continues from the frame before it.
    fn sum_of(&self, frame: &[u8], before: (u32, u32)) -> (u32, u32) {
        // The sum covers neither the salts nor itself.
        self.add(self.add(before, &frame[..8]), &frame[FRAME..])
    }

    fn add(&self, (mut first, mut second): (u32, u32), bytes: &[u8]) -> (u32, u32) {
        let word = |word: &[u8]| {
            let word = [word[0], word[1], word[2], word[3]];
            if self.is_big_endian { u32::from_be_bytes(word) } else { u32::from_le_bytes(word) }
        };
        for words in bytes.chunks_exact(8) {
            // SQLite's sums wrap at 32 bits.
            first = first.wrapping_add(word(&words[..4])).wrapping_add(second);
            second = second.wrapping_add(word(&words[4..])).wrapping_add(first);
        }
        (first, second)
    }
}

fn pair(bytes: &[u8]) -> (u32, u32) {
    (number(&bytes[..4]), number(&bytes[4..8]))
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Reads a whole frame. Returns false at the end, and where less than a frame is left.
fn read_whole(file: &mut impl Read, frame: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(frame) {
        Ok(()) => Ok(true),
        // SQLite ignores an incomplete last frame too.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Length of the log's head in bytes.
const HEAD: u64 = 32;
/// Length of a frame's head in bytes.
const FRAME: usize = 24;
/// The first four bytes. The lowest bit is the byte order of the checksums.
const MAGIC: u32 = 0x377f_0682;
const VERSION: u32 = 3_007_000;
