//! Reads the workers' journals by `docs/journal.md` alone, without code of the worker.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The owner of device time: tenant, key, request, attempt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub tenant: String,
    pub key: String,
    pub request: String,
    pub attempt: u64,
}

/// A block in a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    pub wall: u64,
    pub overhead: u64,
    pub idle: u64,
    pub loss: u64,
    pub shares: BTreeMap<Owner, u64>,
    /// Prompt, cached, completion tokens, attributed and reference ns, reason.
    pub finished: BTreeMap<Owner, ([u64; 5], &'static str)>,
    pub last: bool,
}

/// The blocks of one incarnation of a worker.
#[derive(Debug, Default)]
pub struct Epoch {
    pub blocks: BTreeMap<u64, Block>,
    /// The end of its records, ns by the host's clock.
    pub until_utc: u64,
}

/// The journals of a folder, each closed file read once.
#[derive(Default)]
pub struct Journals {
    /// The parsed files by path; a file of an ended epoch does not change.
    done: HashMap<PathBuf, (String, Epoch)>,
}

impl Journals {
    /// Reads every epoch in `folder`, by its name.
    ///
    /// # Errors
    ///
    /// A file is damaged.
    pub fn read(&mut self, folder: &Path) -> Result<BTreeMap<String, &Epoch>, String> {
        let entries = std::fs::read_dir(folder).map_err(|error| error.to_string())?;
        let mut paths: Vec<PathBuf> = entries.filter_map(|it| Some(it.ok()?.path())).collect();
        paths.retain(|path| path.extension().is_some_and(|end| end == "journal"));
        paths.sort();
        for path in &paths {
            if self.done.get(path).is_some_and(|(_, epoch)| epoch.has_ended()) {
                continue;
            }
            let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
            match parse(&bytes) {
                Ok(Some(parsed)) => drop(self.done.insert(path.clone(), parsed)),
                Ok(None) => {} // not even its head is there: it holds nothing
                Err(what) => return Err(format!("{}: {what}", path.display())),
            }
        }
        let mut epochs = BTreeMap::new();
        for path in &paths {
            let Some((name, epoch)) = self.done.get(path) else { continue };
            if epochs.insert(name.clone(), epoch).is_some() {
                return Err(format!("{name} has two files: a short test does not fill one"));
            }
        }
        Ok(epochs)
    }
}

impl Journals {
    /// Returns the end of the records of each ended epoch, UTC ns.
    pub fn ends(&self) -> impl Iterator<Item = u64> {
        let ended = self.done.values().filter(|(_, epoch)| epoch.has_ended());
        ended.map(|(_, epoch)| epoch.until_utc)
    }
}

impl Epoch {
    /// Returns true if the last block is closed.
    pub fn has_ended(&self) -> bool {
        self.blocks.last_key_value().is_some_and(|(_, block)| block.last)
    }
}

/// The first bytes of a journal.
pub const MAGIC: &[u8] = b"tgjrnl\x00\x03";

fn parse(bytes: &[u8]) -> Result<Option<(String, Epoch)>, String> {
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else {
        return if bytes.len() < MAGIC.len() { Ok(None) } else { Err("no journal".to_owned()) };
    };
    let mut reading: Option<JournalParser> = None;
    while rest.len() >= 8 {
        let size = u32::from_le_bytes(rest[..4].try_into().expect("four")) as usize;
        let sum = u32::from_le_bytes(rest[4..8].try_into().expect("four"));
        let Some(payload) = rest.get(8..8 + size) else { break };
        if crc32(&[&rest[..4], payload]) != sum {
            let at = bytes.len() - rest.len();
            // The last frame may be torn; a frame after it proves damage.
            if rest.len() > 8 + size {
                return Err(format!("damaged at byte {at}"));
            }
            break;
        }
        let mut input = Input(payload);
        reading = Some(match (reading, input.byte()?) {
            (None, 1) => JournalParser::begin(&mut input)?,
            (Some(mut reading), kind) => {
                reading.frame(kind, &mut input)?;
                reading
            }
            (None, kind) => return Err(format!("begins with a frame of kind {kind}")),
        });
        if !input.0.is_empty() {
            return Err("bytes are left in a frame".to_owned());
        }
        rest = &rest[8 + size..];
    }
    Ok(reading.map(|mut reading| {
        reading.epoch.until_utc = reading.started + reading.open.wall;
        (reading.name, reading.epoch)
    }))
}

struct JournalParser {
    name: String,
    epoch: Epoch,
    owners: HashMap<u64, Owner>,
    number: u64,
    open: Block,
    /// The start of the open block, ns by the host's clock.
    started: u64,
}

impl JournalParser {
    fn begin(input: &mut Input<'_>) -> Result<Self, String> {
        let epoch = u128::from_le_bytes(input.bytes(16)?.try_into().expect("sixteen"));
        for _worker_class_name_uuid_model_calibration in 0..6 {
            input.text()?;
        }
        let (number, _clock, started) = (input.number()?, input.number()?, input.number()?);
        Ok(Self {
            name: format!("{epoch:032x}"),
            epoch: Epoch::default(),
            owners: HashMap::new(),
            number,
            open: Block::default(),
            started,
        })
    }

    fn frame(&mut self, kind: u8, input: &mut Input<'_>) -> Result<(), String> {
        match kind {
            2 => {
                let sequence = input.number()?;
                let owner = input.owner()?;
                input.tier()?;
                self.owners.insert(sequence, owner);
            }
            3 => {
                let (_step, idle, overhead) = (input.number()?, input.number()?, input.number()?);
                self.open.idle += idle;
                self.open.overhead += overhead;
                self.open.wall += idle + overhead;
                for _ in 0..input.number()? {
                    let (sequence, share) = (input.number()?, input.number()?);
                    let owner = self.owners.get(&sequence);
                    let owner = owner.ok_or(format!("sequence {sequence} has no owner"))?;
                    *self.open.shares.entry(owner.clone()).or_default() += share;
                    self.open.wall += share;
                }
            }
            4 => {
                let (idle, loss) = (input.number()?, input.number()?);
                self.open.idle += idle;
                self.open.loss += loss;
                self.open.wall += idle + loss;
            }
            5 => {
                let owner = input.owner()?;
                let mut figures = [0; 5];
                for figure in &mut figures {
                    *figure = input.number()?;
                }
                for _stage in 0..3 {
                    input.number()?;
                }
                let reason = match input.number()? {
                    1 => "stop",
                    2 => "length",
                    3 => "cancelled",
                    4 => "deadline",
                    5 => "fault",
                    other => return Err(format!("reason {other}")),
                };
                input.number()?; // when
                input.tier()?;
                let before = self.open.finished.insert(owner.clone(), (figures, reason));
                if before.is_some() {
                    return Err(format!("{owner:?} ends twice"));
                }
            }
            6 => {
                self.started = input.number()?;
                self.open.last = input.number()? == 1;
                // Sampling time may follow; the CPU backend writes none.
                let block = std::mem::take(&mut self.open);
                self.epoch.blocks.insert(self.number, block);
                self.number += 1;
            }
            7 => drop(input.number()?),
            other => return Err(format!("a frame of kind {other}")),
        }
        Ok(())
    }
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes(&mut self, count: usize) -> Result<&[u8], String> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("a frame is short")?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.bytes(1)?[0])
    }

    /// Reads a LEB128 number.
    fn number(&mut self) -> Result<u64, String> {
        let mut number = 0_u64;
        for place in 0..10 {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << (7 * place);
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err("a number is too long".to_owned())
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.number()? as usize;
        String::from_utf8(self.bytes(length)?.to_vec()).map_err(|error| error.to_string())
    }

    /// Reads the tier at the end of a frame: nothing, or 1 for the batch tier.
    fn tier(&mut self) -> Result<(), String> {
        if !self.0.is_empty() && self.number()? != 1 {
            return Err("an unknown tier".to_owned());
        }
        Ok(())
    }

    fn owner(&mut self) -> Result<Owner, String> {
        let (tenant, key, request) = (self.text()?, self.text()?, self.text()?);
        Ok(Owner { tenant, key, request, attempt: self.number()? })
    }
}

/// Computes CRC-32 as in gzip, bit by bit.
pub fn crc32(parts: &[&[u8]]) -> u32 {
    let mut sum = !0_u32;
    for byte in parts.iter().copied().flatten() {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg());
        }
    }
    !sum
}
