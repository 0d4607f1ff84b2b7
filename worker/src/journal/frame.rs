//! The encoding of the journal's frames: length, CRC-32, payload. A payload is a
//! kind and LEB128 numbers. A sequence's owner is written once in a file and
//! referred to by number afterwards, so that a step needs a few bytes for each
//! share.
//!
//! Reading accepts any bytes and returns a frame or the end of the whole frames.

use tollgate_domain::{
    Attempt, Caller, Device, DeviceClass, DeviceNanos, FinishReason, FinishedAttempt, KeyId,
    Millijoules, ModelName, MonotonicTime, RequestId, SequenceId, Stages, TenantId, Tier, Usage,
    UtcTime, WorkerEpoch, WorkerName,
};

/// The first bytes of a journal file: the file type and the version of its format.
pub(super) const MAGIC: &[u8; 8] = b"tgjrnl\x00\x03";
/// The first bytes of the previous version, which is still read. All of its work is
/// interactive.
const MAGIC_WITHOUT_TIERS: &[u8; 8] = b"tgjrnl\x00\x02";
/// The first bytes of the first version, which is still read. Its blocks carry no energy.
const MAGIC_WITHOUT_ENERGY: &[u8; 8] = b"tgjrnl\x00\x01";
/// The number of the batch tier. Interactive frames have no tier.
const BATCH: u64 = 1;
/// Bytes of the length and the checksum.
const FRAME_HEAD: usize = 8;
/// Bytes of the largest payload. A longer one is damage.
const LARGEST_PAYLOAD: usize = 16 << 20;
/// Bytes after damage in which a whole frame is searched.
const SEARCHED: usize = 256 << 10;
// Longer payloads are not searched: each place costs a checksum of this many bytes.
const SEARCHED_PAYLOAD: usize = 4 << 10;

/// One record of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// The header, the first frame of each file.
    Header(Header),
    /// The owner of a sequence, before its first share in the file.
    Owner { sequence: SequenceId, caller: Caller, attempt: Attempt, tier: Tier },
    /// A step of the engine; number 0 stands for other work of the device.
    Step(Step),
    /// Time without a step.
    Gap { idle: DeviceNanos, loss: DeviceNanos },
    /// The end of an attempt. Its `finished` time is on the monotonic clock here.
    Finished(FinishedAttempt),
    /// The end of a block, with the energy drawn in it if that is known. The next
    /// block begins at `next` on the host's clock.
    CloseBlock { next: UtcTime, last: bool, energy: Option<Millijoules> },
    /// A sign that the process was alive during a long step.
    Alive { at: MonotonicTime },
}

/// The facts that hold for a whole file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) epoch: WorkerEpoch,
    pub(super) worker: WorkerName,
    pub(super) device: Device,
    pub(super) model: ModelName,
    pub(super) calibration: String,
    /// The number of the first block in the file.
    pub(super) block: u64,
    /// The beginning of the file on the monotonic clock.
    pub(super) clock: MonotonicTime,
    pub(super) utc: UtcTime,
}

/// A step with the idle time before it. Both follow the previous record without a
/// gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) step: u64,
    pub(super) idle: DeviceNanos,
    pub(super) overhead: DeviceNanos,
    pub(super) shares: Vec<(SequenceId, DeviceNanos)>,
}

/// The result of reading at a position in a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FrameRead {
    /// A whole frame and its length in bytes.
    Frame(Box<Frame>, usize),
    /// No whole frame: the end, a torn write or damage.
    End,
}

/// Returns the bytes after the first ones, if the file's version is known.
pub(super) fn after_magic(bytes: &[u8]) -> Option<&[u8]> {
    [MAGIC, MAGIC_WITHOUT_TIERS, MAGIC_WITHOUT_ENERGY]
        .into_iter()
        .find_map(|magic| bytes.strip_prefix(&magic[..]))
}

/// Reads the frame at the beginning of `bytes`.
pub(super) fn read(bytes: &[u8]) -> FrameRead {
    read_frame(bytes)
        .map_or(FrameRead::End, |(frame, length)| FrameRead::Frame(Box::new(frame), length))
}

/// Returns the offset of a whole frame after the unreadable one at `at`, if there
/// is one nearby.
pub(super) fn next_after(bytes: &[u8], at: usize) -> Option<usize> {
    let end = bytes.len().min(at.saturating_add(SEARCHED));
    (at + 1..end).find(|&place| {
        // Any four bytes can look like a length. The bound keeps the checksums of the
        // search cheap.
        let near = bytes.len().min(place + FRAME_HEAD + SEARCHED_PAYLOAD);
        read_frame(&bytes[place..near]).is_some()
    })
}

/// Corrects one flipped bit in the frame at the beginning of `bytes`. Returns the
/// number of the bit, or `None` and leaves the bytes unchanged if no single bit
/// makes the frame whole.
///
/// CRC-32 has a Hamming distance of at least 4 for frames of [`SEARCHED_PAYLOAD`]
/// bytes. So at most one bit fits, and two flipped bits are never taken for one.
pub(super) fn correct_bit(bytes: &mut [u8]) -> Option<usize> {
    let length = bytes.first_chunk::<4>()?;
    let size = u32::from_le_bytes(*length) as usize;
    // Each bit costs one checksum, so a long frame is not searched. The length itself
    // may be the damaged part, so its bits are tried in any case.
    let searched = if size <= SEARCHED_PAYLOAD { FRAME_HEAD + size } else { 4 };
    let near = bytes.len().min(FRAME_HEAD + SEARCHED_PAYLOAD);
    let bytes = &mut bytes[..near];
    (0..searched.min(near) * 8).find(|&bit| {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let is_whole = read_frame(bytes).is_some();
        if !is_whole {
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        is_whole
    })
}

/// Corrects one flipped bit in the first bytes of a file. Returns the number of the
/// bit.
pub(super) fn correct_magic(bytes: &mut [u8]) -> Option<usize> {
    let first = bytes.first_chunk_mut::<8>()?;
    // The next version may differ from this one in one bit. A file of a newer program
    // must be refused, not changed.
    if is_newer(first) {
        return None;
    }
    let flipped = u64::from_le_bytes(*first) ^ u64::from_le_bytes(*MAGIC);
    (flipped.count_ones() == 1).then(|| {
        *first = *MAGIC;
        flipped.trailing_zeros() as usize
    })
}

/// Returns true if the file has the next version of the format.
pub(super) fn is_newer(bytes: &[u8]) -> bool {
    let (name, version) = MAGIC.split_at(MAGIC.len() - 1);
    bytes.strip_prefix(name).and_then(<[u8]>::first) == Some(&(version[0] + 1))
}

fn read_frame(bytes: &[u8]) -> Option<(Frame, usize)> {
    let (header, rest) = bytes.split_at_checked(FRAME_HEAD)?;
    let (length, sum) = header.split_at(4);
    let size = u32::from_le_bytes(length.try_into().ok()?) as usize;
    // Damaged length bytes must not let the reader wait for gigabytes.
    if size > LARGEST_PAYLOAD {
        return None;
    }
    let payload = rest.get(..size)?;
    if checksum(length, payload) != u32::from_le_bytes(sum.try_into().ok()?) {
        return None;
    }
    let mut input = Input(payload);
    let frame = input.frame()?;
    // A payload with bytes left over has another format, so it is not accepted.
    input.0.is_empty().then_some((frame, FRAME_HEAD + size))
}

/// Appends the bytes of `frame` to `out`.
pub(super) fn write(frame: &Frame, out: &mut Vec<u8>) {
    let start = out.len();
    // The length is known only after the payload, so the head is filled in below.
    out.extend_from_slice(&[0; FRAME_HEAD]);
    put_frame(frame, out);
    let payload = &out[start + FRAME_HEAD..];
    let length = (payload.len() as u32).to_le_bytes(); // shares are bounded by the batch
    let sum = checksum(&length, payload).to_le_bytes();
    out[start..start + 4].copy_from_slice(&length);
    out[start + 4..start + FRAME_HEAD].copy_from_slice(&sum);
}

fn checksum(length: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    // Without the length, eight zero bytes would be a valid head: the CRC of nothing
    // is 0.
    hasher.update(length);
    hasher.update(payload);
    hasher.finalize()
}

fn put_frame(frame: &Frame, out: &mut Vec<u8>) {
    // The numbers of the kinds are part of the format. A number never gets a new
    // meaning.
    match frame {
        Frame::Header(header) => {
            let Header { epoch, worker, device, model, calibration, block, clock, utc } = header;
            out.push(1);
            out.extend_from_slice(&epoch.0.to_le_bytes());
            for text in [
                worker.as_str(),
                device.class.as_str(),
                &device.name,
                &device.uuid,
                model.as_str(),
                calibration,
            ] {
                put_text(text, out);
            }
            put(&[*block, clock.0, utc.0], out);
        }
        Frame::Owner { sequence, caller, attempt, tier } => {
            out.push(2);
            put(&[sequence.0], out);
            put_attempt(caller, attempt, out);
            put_tier(*tier, out);
        }
        Frame::Step(Step { step, idle, overhead, shares }) => {
            out.push(3);
            put(&[*step, idle.nanos(), overhead.nanos(), shares.len() as u64], out);
            for (sequence, share) in shares {
                put(&[sequence.0, share.nanos()], out);
            }
        }
        Frame::Gap { idle, loss } => {
            out.push(4);
            put(&[idle.nanos(), loss.nanos()], out);
        }
        Frame::Finished(finished) => {
            let FinishedAttempt { caller, attempt, usage, stages, reason, finished, tier } =
                finished;
            let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
                usage;
            let Stages { queue_ns, prefill_ns, decode_ns } = stages;
            out.push(5);
            put_attempt(caller, attempt, out);
            put(&[*prompt_tokens, *cached_tokens, *completion_tokens], out);
            put(&[attributed.nanos(), reference.nanos()], out);
            put(&[*queue_ns, *prefill_ns, *decode_ns], out);
            put(&[reason_number(*reason), finished.0], out);
            put_tier(*tier, out);
        }
        Frame::CloseBlock { next, last, energy } => {
            out.push(6);
            put(&[next.0, u64::from(*last)], out);
            // Without energy the frame equals that of the first version of the format.
            if let Some(energy) = energy {
                put(&[energy.millijoules()], out);
            }
        }
        Frame::Alive { at } => {
            out.push(7);
            put(&[at.0], out);
        }
    }
}

fn put_attempt(caller: &Caller, attempt: &Attempt, out: &mut Vec<u8>) {
    put_text(caller.tenant.as_str(), out);
    put_text(caller.key.as_str(), out);
    put_text(attempt.request.as_str(), out);
    put(&[u64::from(attempt.attempt)], out);
}

fn put_tier(tier: Tier, out: &mut Vec<u8>) {
    match tier {
        // An interactive frame equals that of the previous version of the format.
        Tier::Interactive => {}
        Tier::Batch => put(&[BATCH], out),
    }
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    put(&[text.len() as u64], out);
    out.extend_from_slice(text.as_bytes());
}

/// Appends the numbers as LEB128.
fn put(numbers: &[u64], out: &mut Vec<u8>) {
    for &number in numbers {
        let mut rest = number;
        while rest >= 0x80 {
            // The cast keeps the low byte. The high bit says that more bytes follow.
            out.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        out.push(rest as u8);
    }
}

fn reason_number(reason: FinishReason) -> u64 {
    // The numbers are part of the format and do not depend on the order of the enum.
    match reason {
        FinishReason::Stop => 1,
        FinishReason::Length => 2,
        FinishReason::Cancelled => 3,
        FinishReason::Deadline => 4,
        FinishReason::Fault => 5,
    }
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn frame(&mut self) -> Option<Frame> {
        Some(match self.byte()? {
            1 => Frame::Header(Header {
                epoch: WorkerEpoch(u128::from_le_bytes(self.bytes(16)?.try_into().ok()?)),
                worker: WorkerName::new(self.text()?).ok()?,
                device: Device {
                    class: DeviceClass::new(self.text()?).ok()?,
                    name: self.text()?.to_owned(),
                    uuid: self.text()?.to_owned(),
                },
                model: ModelName::new(self.text()?).ok()?,
                calibration: self.text()?.to_owned(),
                block: self.number()?,
                clock: MonotonicTime(self.number()?),
                utc: UtcTime(self.number()?),
            }),
            2 => {
                let sequence = SequenceId(self.number()?);
                let (caller, attempt) = self.attempt()?;
                Frame::Owner { sequence, caller, attempt, tier: self.tier()? }
            }
            3 => Frame::Step(Step {
                step: self.number()?,
                idle: self.nanos()?,
                overhead: self.nanos()?,
                shares: {
                    // The vector grows while reading: a damaged count must not
                    // reserve memory.
                    let count = self.number()?;
                    (0..count)
                        .map(|_| Some((SequenceId(self.number()?), self.nanos()?)))
                        .collect::<Option<_>>()?
                },
            }),
            4 => Frame::Gap { idle: self.nanos()?, loss: self.nanos()? },
            5 => {
                let (caller, attempt) = self.attempt()?;
                Frame::Finished(FinishedAttempt {
                    caller,
                    attempt,
                    usage: Usage {
                        prompt_tokens: self.number()?,
                        cached_tokens: self.number()?,
                        completion_tokens: self.number()?,
                        attributed: self.nanos()?,
                        reference: self.nanos()?,
                    },
                    stages: Stages {
                        queue_ns: self.number()?,
                        prefill_ns: self.number()?,
                        decode_ns: self.number()?,
                    },
                    reason: self.reason()?,
                    finished: UtcTime(self.number()?),
                    tier: self.tier()?,
                })
            }
            6 => Frame::CloseBlock {
                next: UtcTime(self.number()?),
                last: self.number()? == 1,
                // Frames of the first version end here, and so do blocks of
                // unknown energy.
                energy: match self.0 {
                    [] => None,
                    _ => Some(Millijoules(self.number()?)),
                },
            },
            7 => Frame::Alive { at: MonotonicTime(self.number()?) },
            _ => return None,
        })
    }

    fn attempt(&mut self) -> Option<(Caller, Attempt)> {
        let tenant = TenantId::new(self.text()?).ok()?;
        let key = KeyId::new(self.text()?).ok()?;
        let request = RequestId::new(self.text()?).ok()?;
        let attempt = u32::try_from(self.number()?).ok()?;
        Some((Caller { tenant, key }, Attempt { request, attempt }))
    }

    /// Reads the tier at the end of a frame.
    fn tier(&mut self) -> Option<Tier> {
        match self.0 {
            [] => Some(Tier::Interactive),
            _ => (self.number()? == BATCH).then_some(Tier::Batch),
        }
    }

    fn reason(&mut self) -> Option<FinishReason> {
        Some(match self.number()? {
            1 => FinishReason::Stop,
            2 => FinishReason::Length,
            3 => FinishReason::Cancelled,
            4 => FinishReason::Deadline,
            5 => FinishReason::Fault,
            _ => return None,
        })
    }

    fn nanos(&mut self) -> Option<DeviceNanos> {
        self.number().map(DeviceNanos)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // Bits beyond the 64th would be lost without an error.
            if bits << shift >> shift != bits {
                return None;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        // Ten bytes hold 64 bits, so a longer number is damage.
        None
    }

    fn byte(&mut self) -> Option<u8> {
        self.bytes(1).map(|bytes| bytes[0])
    }

    fn bytes(&mut self, count: usize) -> Option<&[u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn text(&mut self) -> Option<&str> {
        let length = usize::try_from(self.number()?).ok()?;
        std::str::from_utf8(self.bytes(length)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn samples() -> Vec<Frame> {
        let caller = Caller {
            tenant: TenantId::new("acme").expect("a name"),
            key: KeyId::new("k1").expect("a name"),
        };
        let attempt = Attempt { request: RequestId::from_random(9), attempt: 3 };
        vec![
            Frame::Header(Header {
                epoch: WorkerEpoch(u128::MAX - 5),
                worker: WorkerName::new("0").expect("a name"),
                device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: "".into() },
                model: ModelName::new("m").expect("a name"),
                calibration: "v1".into(),
                block: 1,
                clock: MonotonicTime(0),
                utc: UtcTime(u64::MAX),
            }),
            Frame::Owner {
                sequence: SequenceId(1),
                caller: caller.clone(),
                attempt: attempt.clone(),
                tier: Tier::Interactive,
            },
            Frame::Owner {
                sequence: SequenceId(2),
                caller: caller.clone(),
                attempt: attempt.clone(),
                tier: Tier::Batch,
            },
            Frame::Step(Step {
                step: 1,
                idle: DeviceNanos(127),
                overhead: DeviceNanos(128),
                shares: vec![
                    (SequenceId(1), DeviceNanos(u64::MAX)),
                    (SequenceId(2), DeviceNanos(0)),
                ],
            }),
            Frame::Gap { idle: DeviceNanos(1 << 40), loss: DeviceNanos(7) },
            Frame::Finished(FinishedAttempt {
                caller,
                attempt,
                usage: Usage { prompt_tokens: 5, ..Usage::default() },
                stages: Stages { queue_ns: 1, prefill_ns: 2, decode_ns: 3 },
                reason: FinishReason::Deadline,
                finished: UtcTime(77),
                tier: Tier::Batch,
            }),
            Frame::CloseBlock { next: UtcTime(3), last: true, energy: None },
            Frame::CloseBlock {
                next: UtcTime(3),
                last: false,
                energy: Some(Millijoules(u64::MAX)),
            },
            Frame::Alive { at: MonotonicTime(1 << 63) },
        ]
    }

    #[test]
    fn frame_round_trips_and_has_no_valid_prefix() {
        for frame in samples() {
            let mut bytes = Vec::new();
            write(&frame, &mut bytes);
            assert_eq!(read(&bytes), FrameRead::Frame(Box::new(frame), bytes.len()));
            for length in 0..bytes.len() {
                assert_eq!(read(&bytes[..length]), FrameRead::End);
            }
        }
    }

    #[test]
    fn frame_read_detects_flipped_bits() {
        for frame in samples() {
            let mut bytes = Vec::new();
            write(&frame, &mut bytes);
            for bit in 0..bytes.len() * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(read(&bytes), FrameRead::End, "bit {bit} of {frame:?}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn frame_corrects_one_flipped_bit() {
        let mut file = Vec::new();
        for frame in samples() {
            write(&frame, &mut file);
        }
        for bit in 0..file.len() * 8 {
            let mut bytes = file.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut at = 0;
            let mut found = Vec::new();
            while at < bytes.len() {
                match read(&bytes[at..]) {
                    FrameRead::Frame(_, length) => at += length,
                    FrameRead::End => {
                        found.push(at * 8 + correct_bit(&mut bytes[at..]).expect("one bit"));
                    }
                }
            }
            assert!((found.as_slice(), &bytes) == (&[bit], &file), "bit {bit}: {found:?}");
        }
    }

    #[test]
    fn frame_corrects_no_other_damage() {
        for frame in samples() {
            let mut whole = Vec::new();
            write(&frame, &mut whole);
            // Two bits, a missing end, and a page that never reached the disk.
            for first in 0..whole.len() * 8 {
                let mut bytes = whole.clone();
                bytes[first / 8] ^= 1 << (first % 8);
                let second = (first * 7 + 11) % (whole.len() * 8);
                bytes[second / 8] ^= 1 << (second % 8);
                let damaged = bytes.clone();
                if first != second {
                    assert_eq!(correct_bit(&mut bytes), None, "bits {first} and {second}");
                    assert_eq!(bytes, damaged);
                }
            }
            for length in 0..whole.len() {
                assert_eq!(correct_bit(&mut whole[..length].to_vec()), None);
            }
        }
        for length in 0..200 {
            assert_eq!(correct_bit(&mut vec![0; length]), None);
        }
    }

    #[test]
    fn magic_corrects_one_flipped_bit() {
        let newer = b"tgjrnl\x00\x04";
        assert!(is_newer(newer) && !is_newer(MAGIC));
        assert!(!is_newer(MAGIC_WITHOUT_TIERS) && !is_newer(MAGIC_WITHOUT_ENERGY));
        for bit in 0..64 {
            let mut bytes = MAGIC.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(correct_magic(&mut bytes), Some(bit));
            assert_eq!(bytes, MAGIC);
        }
        assert_eq!(correct_magic(&mut newer.to_vec()), None);
        assert_eq!(correct_magic(&mut [0; 8]), None);
        assert_eq!(correct_magic(&mut [0; 7]), None);
    }

    proptest! {
        #[test]
        fn frame_read_accepts_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
            // The decoder behind the checksum must accept any bytes, too.
            let _ = Input(&bytes).frame();
        }
    }
}
