//! The lock of a GPU. One worker has a GPU alone, or several workers of one data
//! folder take turns on it. Locks are files named by the GPU's UUID in a folder
//! that all processes of the host share. The kernel releases the locks of a process
//! that ends, however it ended.
//!
//! - `UUID.owner` is locked for the worker's lifetime: exclusively by a worker that
//!   has the GPU alone, shared by the workers of one data folder. Any other worker
//!   is refused.
//! - `UUID.turn` is locked while steps run, so that steps of different workers
//!   never overlap and the time of a step is exact. `UUID.next` is locked by the
//!   worker that waits longest, so that a worker that has just had a turn queues
//!   behind it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The lock folder and the turns of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuOptions {
    /// The folder of the lock files; `None` means the host's default folder.
    pub locks: Option<PathBuf>,
    /// The length of one turn if several workers of this data folder share the GPU;
    /// `None` if the worker has the GPU alone. A step is never interrupted, so a
    /// turn may last longer by one step.
    pub turn: Option<Duration>,
}

/// A GPU that this process may use. Dropping the value releases the GPU.
#[derive(Debug)]
pub(crate) struct GpuLock {
    // Open as long as the lock is needed: closing the file releases it.
    _owner: File,
    turns: Option<Turns>,
}

#[derive(Debug)]
struct Turns {
    next: File,
    turn: File,
    longest: Duration,
    /// The time of steps in the current turn; `None` between turns.
    used: Option<Duration>,
}

/// An error that keeps a worker from its GPU.
#[derive(Debug, thiserror::Error)]
pub enum GpuLockError {
    /// The GPU is in use by another data folder.
    #[error("the GPU {uuid} is in use by {holder}")]
    InUse {
        /// The gpu.
        uuid: String,
        /// The owner, in words.
        holder: String,
    },
    /// The GPU is in use by another worker of the same data folder.
    #[error(
        "the GPU {uuid} is in use by another worker of this data folder ({holder}); if two devices \
         of the config are the same GPU, give both the same name, so that the workers take turns; \
         a worker of an earlier start may also still be ending"
    )]
    NamedTwice {
        /// The gpu.
        uuid: String,
        /// The owner, in words.
        holder: String,
    },
    /// A lock file cannot be used.
    #[error("the GPU lock {} cannot be used", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
}

impl GpuLock {
    /// Returns true if other workers of this data folder share the GPU.
    pub(crate) fn takes_turns(&self) -> bool {
        self.turns.is_some()
    }

    /// Locks the GPU `uuid` for the data folder `data`.
    pub(crate) fn claim(
        uuid: &str,
        data: &Path,
        options: &GpuOptions,
    ) -> Result<Self, GpuLockError> {
        let folder = options.locks.clone().unwrap_or_else(host_folder);
        let open = |kind: &str| {
            let path = folder.join(format!("{}.{kind}", file_name(uuid)));
            open(&folder, &path).map_err(|source| GpuLockError::Lock { path, source })
        };
        let mut owner = open("owner")?;
        let failed = |source| GpuLockError::Lock { path: folder.join(file_name(uuid)), source };
        let us = format!("tollgate with the data folder {}", data.display());
        let got = match options.turn {
            None => alone(&mut owner, &us),
            Some(_) => together(&mut owner, &us),
        };
        if !got.map_err(failed)? {
            let (uuid, holder) = (uuid.to_owned(), holder(&mut owner).map_err(failed)?);
            // A worker that has the GPU alone appends its process to the text.
            let is_ours = holder == us || holder.starts_with(&format!("{us}, process "));
            return Err(match is_ours {
                true => GpuLockError::NamedTwice { uuid, holder },
                false => GpuLockError::InUse { uuid, holder },
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

    /// Waits for a turn. Returns at once if the worker has a turn or does not share
    /// the GPU.
    pub(crate) fn acquire(&mut self) -> io::Result<()> {
        match &mut self.turns {
            Some(turns) if turns.used.is_none() => {
                // Without `next`, a worker that has just ended its turn could win the
                // lock again and again.
                turns.next.lock()?;
                turns.turn.lock()?;
                turns.next.unlock()?;
                turns.used = Some(Duration::ZERO);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Adds a step of `busy` to the turn. Ends the turn after its full length.
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

    /// Ends the turn.
    pub(crate) fn release(&mut self) {
        if let Some(turns) = &mut self.turns
            && turns.used.take().is_some()
        {
            // Unlocking a lock that is held does not fail, and the kernel unlocks
            // it at the end of the process anyway.
            let _ = turns.turn.unlock();
        }
    }
}

/// Takes the GPU for this process alone. Returns false if it is in use.
fn alone(owner: &mut File, us: &str) -> io::Result<bool> {
    let got = with_retries(|| try_lock(owner.try_lock()))?;
    if got {
        write_owner(owner, &format!("{us}, process {}", std::process::id()))?;
    }
    Ok(got)
}

/// Takes the GPU together with other workers of the same data folder. Returns false
/// if another data folder uses it.
fn together(owner: &mut File, us: &str) -> io::Result<bool> {
    with_retries(|| {
        if try_lock(owner.try_lock())? {
            write_owner(owner, us)?;
        }
        // The switch from the exclusive to the shared lock is not atomic: another
        // data folder may have come first, so the owner's text is read again.
        Ok(try_lock(owner.try_lock_shared())? && holder(owner)? == us)
    })
}

/// Tries for a second: a process that is ending may still hold the lock.
fn with_retries(mut attempt: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    for _ in 0..ATTEMPTS {
        if attempt()? {
            return Ok(true);
        }
        std::thread::sleep(BETWEEN_ATTEMPTS);
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

fn write_owner(owner: &mut File, text: &str) -> io::Result<()> {
    // A shorter text must not keep the end of the longer text before it.
    owner.set_len(0)?;
    owner.rewind()?;
    owner.write_all(text.as_bytes())
}

fn holder(owner: &mut File) -> io::Result<String> {
    let mut text = String::new();
    owner.rewind()?;
    // Any user may write to the file, so its text may have any length.
    owner.take(MOST_HOLDER_BYTES).read_to_string(&mut text)?;
    Ok(if text.is_empty() { "another process".to_owned() } else { text })
}

/// Opens a lock file that every user of this host may lock.
fn open(folder: &Path, path: &Path) -> io::Result<File> {
    match DirBuilder::new().mode(0o1777).create(folder) {
        // The umask reduced the mode. The sticky bit lets anyone add locks and
        // no user remove the locks of others.
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(0o1777))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o666).custom_flags(NO_FOLLOW);
    // Only the creator may set the mode, so creating is tried before opening.
    match options.clone().create_new(true).open(path) {
        Ok(file) => {
            // The umask reduced this mode, too.
            file.set_permissions(Permissions::from_mode(0o666))?;
            Ok(file)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => options.open(path),
        Err(error) => Err(error),
    }
}

/// Returns the default lock folder, the same for every process of this host.
fn host_folder() -> PathBuf {
    let runtime = Path::new("/run/lock");
    // Some containers have no /run/lock.
    let folder = if runtime.is_dir() { runtime } else { Path::new("/tmp") };
    folder.join("tollgate-gpus")
}

/// Returns a safe file name for a UUID. The driver chooses the text of the UUID.
fn file_name(uuid: &str) -> String {
    let harmless = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    // File systems allow 255 bytes in a name, and a suffix follows.
    uuid.chars().take(128).map(harmless).collect()
}

/// Attempts to lock a GPU before the worker gives up.
const ATTEMPTS: u32 = 20;
/// Time between two attempts.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(50);
/// Bytes of the owner's text that are read at most.
const MOST_HOLDER_BYTES: u64 = 4_096;
/// Any user may write to the lock folder, so a symbolic link in it could lead to a
/// file of someone else.
const NO_FOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits() as i32;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    const TURN: Duration = Duration::from_millis(20);

    fn options(folder: &Path, turn: Option<Duration>) -> GpuOptions {
        GpuOptions { locks: Some(folder.join("locks")), turn }
    }

    #[test]
    fn gpu_lock_refuses_other_data_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let alone = options(folder.path(), None);
        let shared = options(folder.path(), Some(TURN));
        let (ours, theirs) = (Path::new("/data/a"), Path::new("/data/b"));
        let refused = |result: Result<GpuLock, GpuLockError>| {
            result.expect_err("it is another's").to_string()
        };
        let held = GpuLock::claim("GPU-1", ours, &alone).expect("it is free");
        let words = refused(GpuLock::claim("GPU-1", theirs, &alone));
        let holder = "tollgate with the data folder /data/a, process";
        assert!(words.starts_with(&format!("the GPU GPU-1 is in use by {holder}")), "{words}");
        // By another name it may be claimed twice by one config.
        for options in [&alone, &shared] {
            let words = refused(GpuLock::claim("GPU-1", ours, options));
            let ours =
                format!("the GPU GPU-1 is in use by another worker of this data folder ({holder} ");
            assert!(words.starts_with(&ours) && words.contains("the same name"), "{words}");
        }
        GpuLock::claim("GPU-2", theirs, &alone).expect("another GPU is free");
        drop(held);
        let one = GpuLock::claim("GPU-1", theirs, &shared).expect("it is free again");
        let other = GpuLock::claim("GPU-1", theirs, &shared).expect("it is shared");
        let words = refused(GpuLock::claim("GPU-1", ours, &shared));
        assert_eq!(words, "the GPU GPU-1 is in use by tollgate with the data folder /data/b");
        refused(GpuLock::claim("GPU-1", theirs, &alone));
        drop(one);
        refused(GpuLock::claim("GPU-1", ours, &alone));
        drop(other);
        GpuLock::claim("GPU-1", ours, &alone).expect("it is free again");
    }

    /// Three workers that never pause: no two steps overlap, and each worker gets
    /// turns.
    #[test]
    fn gpu_turns_never_overlap_and_reach_everyone() {
        let folder = tempfile::tempdir().expect("a folder");
        let inside = AtomicBool::new(false);
        let finished = AtomicU32::new(0);
        let turns: Vec<u32> = std::thread::scope(|scope| {
            let works: Vec<_> = (0..3)
                .map(|_| {
                    let mut gpu = GpuLock::claim(
                        "GPU-1",
                        Path::new("/a"),
                        &options(folder.path(), Some(TURN)),
                    )
                    .expect("it is shared");
                    let (inside, finished) = (&inside, &finished);
                    scope.spawn(move || {
                        let mut turns = 0;
                        // Each worker continues until all have had their turns.
                        while finished.load(Ordering::SeqCst) < 3 {
                            gpu.acquire().expect("a turn");
                            assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                            gpu.stepped(TURN / 2);
                            std::thread::yield_now();
                            inside.store(false, Ordering::SeqCst);
                            gpu.stepped(TURN / 2); // which ends the turn
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
    fn gpu_lock_file_name_is_safe() {
        assert_eq!(file_name("GPU-8a-9/../x y"), "GPU-8a-9____x_y");
        let folder = tempfile::tempdir().expect("a folder");
        let all = options(folder.path(), None);
        drop(GpuLock::claim("GPU-1", Path::new("/a"), &all).expect("it is free"));
        let locks = folder.path().join("locks");
        std::os::unix::fs::symlink(folder.path().join("target"), locks.join("GPU-2.owner"))
            .expect("links");
        let error = GpuLock::claim("GPU-2", Path::new("/a"), &all).expect_err("it is a link");
        assert!(matches!(error, GpuLockError::Lock { .. }), "{error}");
    }
}
