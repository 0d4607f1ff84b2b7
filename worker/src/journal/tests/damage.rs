//! Tests of damaged journals: flipped bits in every part of a file, and damage that
//! no checksum can correct.

use super::*;
use crate::journal::frame::MAGIC;

/// The files of a crashed worker, oldest first, and the blocks that recovery finds
/// in them.
struct CrashedJournal {
    files: Vec<(std::ffi::OsString, Vec<u8>)>,
    blocks: Vec<Block>,
}

impl CrashedJournal {
    /// Runs a worker that writes two files and dies within a block.
    fn new() -> Self {
        let mut bench = Bench::new();
        for id in 1..=8 {
            bench.step(id, &[(id, 100), (9, 7)], 5).expect("writes");
            bench.finish(id);
            bench.tick();
            if id == 4 {
                bench.journal.shared.rotate_when(0).expect("rotates");
            }
        }
        bench.step(3, &[(9, 7)], 0).expect("writes");
        let folder = bench.folder.path().join("journal");
        let mut files: Vec<_> = fs::read_dir(&folder)
            .expect("lists")
            .map(|entry| entry.expect("a file").path())
            .filter(|path| path.extension().is_some())
            .map(|path| {
                (path.file_name().expect("a name").to_owned(), fs::read(path).expect("reads"))
            })
            .collect();
        files.sort();
        assert_eq!(files.len(), 2);
        let blocks =
            Self { files: files.clone(), blocks: Vec::new() }.recover().expect("opens").blocks;
        assert_eq!(blocks.len(), 9, "eight blocks, and the one that recovery closes");
        Self { files, blocks }
    }

    /// Recovers these files in a new folder.
    fn recover(&self) -> io::Result<Recovered> {
        let folder = tempfile::tempdir()?;
        let there = folder.path().join("journal");
        fs::create_dir(&there)?;
        for (name, bytes) in &self.files {
            fs::write(there.join(name), bytes)?;
        }
        let journal = Journal::open(OsDisk, options(&folder, NEXT_EPOCH, &FakeClock::default()))?;
        let blocks = read_all(&journal);
        drop(journal);
        // The second start must find nothing left to correct or to copy.
        let copies = copies(&there);
        let journal =
            Journal::open(OsDisk, options(&folder, WorkerEpoch(3), &FakeClock::default()))?;
        let mut again = read_all(&journal);
        again.retain(|block| block.parts().epoch == EPOCH);
        assert!(again == blocks && self::copies(&there) == copies);
        Ok(Recovered { blocks, copies })
    }

    /// Recovers the files with one of them changed.
    fn recover_with(
        &self,
        file: usize,
        change: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<Recovered> {
        let mut files = self.files.clone();
        change(&mut files[file].1);
        Self { files, blocks: Vec::new() }.recover()
    }
}

struct Recovered {
    blocks: Vec<Block>,
    /// The copies of damaged files.
    copies: Vec<Vec<u8>>,
}

fn copies(folder: &Path) -> Vec<Vec<u8>> {
    let files = fs::read_dir(folder).expect("lists").map(|entry| entry.expect("a file").path());
    let kept = files.filter(|path| path.extension().is_some_and(|end| end == "damaged"));
    kept.map(|path| fs::read(path).expect("reads")).collect()
}

/// Magic, header, lengths, checksums, payloads, first and last frame: a flipped bit
/// anywhere changes no block.
#[test]
fn recovery_corrects_a_flipped_bit_anywhere() {
    let crashed = CrashedJournal::new();
    for (file, (_, bytes)) in crashed.files.iter().enumerate() {
        // Each place costs several syncs; `frame_corrects_one_flipped_bit` tries all.
        for byte in (0..20).chain((20..bytes.len()).step_by(11)).chain([bytes.len() - 1]) {
            let bit = if byte == MAGIC.len() - 1 { 4 } else { byte % 8 };
            let found = crashed.recover_with(file, |bytes| bytes[byte] ^= 1 << bit).expect("opens");
            assert!(found.blocks == crashed.blocks, "byte {byte} of file {file}");
            assert_eq!(found.copies.len(), 0, "byte {byte} of file {file}");
        }
    }
}

/// The control of the test above: two flipped bits in a frame cannot be corrected.
/// The blocks before them stay, and copies of the damaged file and of the file after
/// it are kept.
#[test]
fn recovery_keeps_what_two_flipped_bits_leave() {
    let crashed = CrashedJournal::new();
    let length = crashed.files[0].1.len();
    for byte in (MAGIC.len()..length).step_by(17) {
        let mut damaged = Vec::new();
        let found = crashed.recover_with(0, |bytes| {
            bytes[byte] ^= 0x11;
            damaged.clone_from(bytes);
        });
        let Recovered { blocks, copies } = found.expect("opens");
        let numbers: Vec<u64> = blocks.iter().map(|block| block.parts().number).collect();
        // Without its header the first file is gone, and the second one is the first.
        if numbers == [5, 6, 7, 8, 9] {
            assert!(copies == [damaged] && byte < 100, "byte {byte}");
            continue;
        }
        assert!((1..=4).contains(&numbers.len()), "byte {byte}: {numbers:?}");
        assert!(blocks.last().is_some_and(|block| block.parts().last_of_epoch));
        for (block, whole) in blocks.iter().zip(&crashed.blocks).take(numbers.len() - 1) {
            assert!(block == whole, "byte {byte}: {block:?}");
        }
        assert!(copies.contains(&crashed.files[1].1), "byte {byte}");
        // Nothing whole follows the last frame, so its damage looks like a torn write.
        assert!(copies.contains(&damaged) || length - byte < 32, "byte {byte}");
    }
}

#[test]
fn recovery_refuses_a_newer_version() {
    let crashed = CrashedJournal::new();
    let error =
        crashed.recover_with(0, |bytes| bytes[MAGIC.len() - 1] += 1).err().expect("refuses");
    assert!(error.to_string().contains("has a newer version than this program reads"), "{error}");
    // Other bytes in its place are damage, and the file is kept.
    let found = crashed.recover_with(0, |bytes| bytes[..8].fill(b'x')).expect("opens");
    assert_eq!((found.blocks.len(), found.copies.len()), (5, 1));
}
