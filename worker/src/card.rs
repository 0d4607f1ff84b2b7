//! A card is one worker's, or several take turns on it. Locks say so, for the
//! whole host: files named by the card's UUID, in a folder that all share. The
//! kernel gives them up with the process that held them, however it ended.
//!
//! - `UUID.owner` is held for life: exclusively by who has the card alone,
//!   together by those of one data folder who share it. Whoever else comes is
//!   refused.
//! - `UUID.turn` is held while steps run, so that they never overlap and each
//!   step's time is its own. `UUID.next` is held by who waits for it longest:
//!   who has just had a turn has to queue behind.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How a worker uses its card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardOptions {
    /// The folder of the locks; the host's own where none is given.
    pub locks: Option<PathBuf>,
    /// Where several workers of this data folder use the card: for how long
    /// one of them may run steps while others wait. A step is never cut short.
    pub turn: Option<Duration>,
}

/// A card that this process may use, as long as this lives.
#[derive(Debug)]
pub(crate) struct Card {
    _owner: File,
    turns: Option<Turns>,
}

#[derive(Debug)]
struct Turns {
    next: File,
    turn: File,
    longest: Duration,
    /// Steps of the turn that is ours now.
    used: Option<Duration>,
}

/// Why a card cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    /// It is another's.
    #[error("the card {uuid} is in use by {holder}")]
    InUse {
        /// The card.
        uuid: String,
        /// Who says to have it.
        holder: String,
    },
    /// It is ours, and was claimed as if it were another card.
    #[error(
        "the card {uuid} is in use by another worker of ours ({holder}): where two devices of the \
         config are one card, name it alike in both, so that they take turns; or a worker of an \
         earlier start still ends"
    )]
    NamedTwice {
        /// The card.
        uuid: String,
        /// Who says to have it.
        holder: String,
    },
    /// Its locks cannot be used.
    #[error("the lock {} of a card cannot be used", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Card {
    /// Whether others of this data folder use it, too.
    pub(crate) fn takes_turns(&self) -> bool {
        self.turns.is_some()
    }

    /// Claims the card `uuid` for the data folder `data`.
    pub(crate) fn claim(uuid: &str, data: &Path, options: &CardOptions) -> Result<Self, CardError> {
        let folder = options.locks.clone().unwrap_or_else(host_folder);
        let open = |kind: &str| {
            let path = folder.join(format!("{}.{kind}", file_name(uuid)));
            open(&folder, &path).map_err(|source| CardError::Lock { path, source })
        };
        let mut owner = open("owner")?;
        let failed = |source| CardError::Lock { path: folder.join(file_name(uuid)), source };
        let us = format!("tollgate with the data folder {}", data.display());
        let got = match options.turn {
            None => alone(&mut owner, &us),
            Some(_) => together(&mut owner, &us),
        };
        if !got.map_err(failed)? {
            let (uuid, holder) = (uuid.to_owned(), holder(&mut owner).map_err(failed)?);
            let is_ours = holder == us || holder.starts_with(&format!("{us}, process "));
            return Err(match is_ours {
                true => CardError::NamedTwice { uuid, holder },
                false => CardError::InUse { uuid, holder },
            });
        }
        let turns = match options.turn {
            None => None,
            Some(longest) => {
                let (next, turn) = (open("next")?, open("turn")?);
                Some(Turns { next, turn, longest, used: None })
            }
        };
        Ok(Self { _owner: owner, turns })
    }

    /// Waits until steps may run.
    pub(crate) fn acquire(&mut self) -> io::Result<()> {
        match &mut self.turns {
            Some(turns) if turns.used.is_none() => {
                turns.next.lock()?;
                turns.turn.lock()?;
                turns.next.unlock()?;
                turns.used = Some(Duration::ZERO);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A step took `busy`: ends the turn where it has lasted long enough.
    pub(crate) fn stepped(&mut self, busy: Duration) {
        if let Some(turns) = &mut self.turns
            && let Some(used) = &mut turns.used
        {
            *used += busy;
            if *used >= turns.longest {
                self.release();
            }
        }
    }

    /// Leaves the card to others.
    pub(crate) fn release(&mut self) {
        if let Some(turns) = &mut self.turns
            && turns.used.take().is_some()
        {
            // Unlocking a file that we hold does not fail; the process's end
            // would do it, too.
            let _ = turns.turn.unlock();
        }
    }
}

/// Takes the card for us and nobody else; whether we got it.
fn alone(owner: &mut File, us: &str) -> io::Result<bool> {
    let got = with_patience(|| try_lock(owner.try_lock()))?;
    if got {
        say(owner, &format!("{us}, process {}", std::process::id()))?;
    }
    Ok(got)
}

/// Takes the card together with others of our data folder.
fn together(owner: &mut File, us: &str) -> io::Result<bool> {
    with_patience(|| {
        if try_lock(owner.try_lock())? {
            say(owner, us)?;
        }
        // For a moment nobody holds it here, so whose it is must be read again.
        Ok(try_lock(owner.try_lock_shared())? && holder(owner)? == us)
    })
}

/// A process that ends may need a moment for it.
fn with_patience(mut attempt: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    for _ in 0..CLAIMS {
        if attempt()? {
            return Ok(true);
        }
        std::thread::sleep(BETWEEN_CLAIMS);
    }
    attempt()
}

fn try_lock(result: Result<(), TryLockError>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn say(owner: &mut File, who: &str) -> io::Result<()> {
    owner.set_len(0)?;
    owner.rewind()?;
    owner.write_all(who.as_bytes())
}

fn holder(owner: &mut File) -> io::Result<String> {
    let mut text = String::new();
    owner.rewind()?;
    owner.take(MOST_HOLDER_BYTES).read_to_string(&mut text)?;
    Ok(if text.is_empty() { "another process".to_owned() } else { text })
}

/// Opens a lock's file for whoever uses this host's cards.
fn open(folder: &Path, path: &Path) -> io::Result<File> {
    match DirBuilder::new().mode(0o1777).create(folder) {
        // What the process's mask took away; anyone may add locks, nobody may
        // remove another's.
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(0o1777))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o666).custom_flags(NO_FOLLOW);
    match options.clone().create_new(true).open(path) {
        Ok(file) => {
            file.set_permissions(Permissions::from_mode(0o666))?;
            Ok(file)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => options.open(path),
        Err(error) => Err(error),
    }
}

/// Where every process of this host finds the same locks.
fn host_folder() -> PathBuf {
    let runtime = Path::new("/run/lock");
    let folder = if runtime.is_dir() { runtime } else { Path::new("/tmp") };
    folder.join("tollgate-cards")
}

/// A UUID is the vendor's; a file's name is made of harmless characters only.
fn file_name(uuid: &str) -> String {
    let harmless = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    uuid.chars().take(128).map(harmless).collect()
}

/// How often a card is tried to be had, and what lies between.
const CLAIMS: u32 = 20;
const BETWEEN_CLAIMS: Duration = Duration::from_millis(50);
/// The longest word about who has a card.
const MOST_HOLDER_BYTES: u64 = 4_096;
/// A link in a folder that anyone may write to is nobody's lock.
const NO_FOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits() as i32;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    const TURN: Duration = Duration::from_millis(20);

    fn options(folder: &Path, turn: Option<Duration>) -> CardOptions {
        CardOptions { locks: Some(folder.join("locks")), turn }
    }

    #[test]
    fn a_card_is_one_data_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let alone = options(folder.path(), None);
        let shared = options(folder.path(), Some(TURN));
        let (ours, theirs) = (Path::new("/data/a"), Path::new("/data/b"));
        let refused =
            |result: Result<Card, CardError>| result.expect_err("it is another's").to_string();
        let held = Card::claim("GPU-1", ours, &alone).expect("it is free");
        let words = refused(Card::claim("GPU-1", theirs, &alone));
        let holder = "tollgate with the data folder /data/a, process";
        assert!(words.starts_with(&format!("the card GPU-1 is in use by {holder}")), "{words}");
        // By another name it may be claimed twice by one config.
        for options in [&alone, &shared] {
            let words = refused(Card::claim("GPU-1", ours, options));
            let ours = format!("the card GPU-1 is in use by another worker of ours ({holder} ");
            assert!(words.starts_with(&ours) && words.contains("name it alike"), "{words}");
        }
        Card::claim("GPU-2", theirs, &alone).expect("another card is free");
        drop(held);
        let one = Card::claim("GPU-1", theirs, &shared).expect("it is free again");
        let other = Card::claim("GPU-1", theirs, &shared).expect("it is shared");
        let words = refused(Card::claim("GPU-1", ours, &shared));
        assert_eq!(words, "the card GPU-1 is in use by tollgate with the data folder /data/b");
        refused(Card::claim("GPU-1", theirs, &alone));
        drop(one);
        refused(Card::claim("GPU-1", ours, &alone));
        drop(other);
        Card::claim("GPU-1", ours, &alone).expect("it is free again");
    }

    /// Three that never pause: no two at once, and nobody is left out.
    #[test]
    fn turns_never_overlap_and_come_to_everyone() {
        let folder = tempfile::tempdir().expect("a folder");
        let inside = AtomicBool::new(false);
        let finished = AtomicU32::new(0);
        let turns: Vec<u32> = std::thread::scope(|scope| {
            let works: Vec<_> = (0..3)
                .map(|_| {
                    let mut card =
                        Card::claim("GPU-1", Path::new("/a"), &options(folder.path(), Some(TURN)))
                            .expect("it is shared");
                    let (inside, finished) = (&inside, &finished);
                    scope.spawn(move || {
                        let mut turns = 0;
                        // Everyone goes on until everyone has had its turns.
                        while finished.load(Ordering::SeqCst) < 3 {
                            card.acquire().expect("a turn");
                            assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                            card.stepped(TURN / 2);
                            std::thread::yield_now();
                            inside.store(false, Ordering::SeqCst);
                            card.stepped(TURN / 2); // which ends the turn
                            turns += 1;
                            if turns == 20 {
                                finished.fetch_add(1, Ordering::SeqCst);
                            }
                        }
                        turns
                    })
                })
                .collect();
            works.into_iter().map(|work| work.join().expect("no two at once")).collect()
        });
        assert!(turns.iter().all(|&turns| turns >= 20), "{turns:?}");
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        assert_eq!(file_name("GPU-8a-9/../x y"), "GPU-8a-9____x_y");
        let folder = tempfile::tempdir().expect("a folder");
        let all = options(folder.path(), None);
        drop(Card::claim("GPU-1", Path::new("/a"), &all).expect("it is free"));
        let locks = folder.path().join("locks");
        std::os::unix::fs::symlink(folder.path().join("target"), locks.join("GPU-2.owner"))
            .expect("links");
        let error = Card::claim("GPU-2", Path::new("/a"), &all).expect_err("it is a link");
        assert!(matches!(error, CardError::Lock { .. }), "{error}");
    }
}
