//! SQLite on a [`SimDisk`]: a file system of SQLite's own kind ("VFS") whose
//! files are pages of the simulation. The ledger above is the real one, with
//! its real settings; only the file system's name in its path differs.
//!
//! As in SQLite's own VFS for Unix, the first sync of a new log syncs its folder too,
//! and bytes beside those that are written are never torn. Locks and the shared
//! index of the log live in memory, as long as the process.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rusqlite::ffi;
use tollgate_ledger::{LedgerOptions, WalRewriter};
use tollgate_worker::test_harness::{Disk as _, DiskFile as _};

use super::chance::Chance;
use super::disk::{SimDisk, SimFile};

/// A registration of a disk with SQLite. It ends when this is dropped.
pub(super) struct Mounted {
    vfs: *mut ffi::sqlite3_vfs,
    name: CString,
}

/// The state that the callbacks use.
struct App {
    disk: Mutex<SimDisk>,
    chance: Mutex<Chance>,
}

/// The state that all processes with an open file share.
#[derive(Default)]
pub(super) struct Shared {
    /// The lock that each open file holds.
    locks: Mutex<BTreeMap<u64, c_int>>,
    index: Mutex<Index>,
}

/// The memory that is mapped from the index of the log, and its locks.
#[derive(Default)]
struct Index {
    regions: Vec<Box<[UnsafeCell<u64>]>>,
    shared: [u32; LOCKS],
    exclusive: [bool; LOCKS],
}

// SAFETY: the regions are handed out as raw pointers and read and written by
// SQLite alone, which orders that by the locks beside them; nothing here does.
unsafe impl Send for Index {}

/// A file in SQLite's layout, with SQLite's own part first.
#[repr(C)]
struct Handle {
    head: ffi::sqlite3_file,
    open: *mut Open,
}

/// Our part of an open file.
struct Open {
    id: u64,
    file: SimFile,
    path: Option<PathBuf>,
    /// True until the first sync, which also syncs the file's name.
    is_new_log: bool,
    shared: Arc<Shared>,
    holds_shared: [bool; LOCKS],
    holds_exclusive: [bool; LOCKS],
}

const LOCKS: usize = ffi::SQLITE_SHM_NLOCK as usize;
/// Bytes of the longest path.
const LONGEST_NAME: c_int = 512;

impl Mounted {
    /// Registers `disk` with SQLite.
    pub(super) fn new(disk: &SimDisk, chance: Chance) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = CString::new(format!("simulated-{number}")).expect("no zero in it");
        let app = App { disk: Mutex::new(disk.clone()), chance: Mutex::new(chance) };
        let vfs = Box::into_raw(Box::new(ffi::sqlite3_vfs {
            iVersion: 2,
            szOsFile: size_of::<Handle>() as c_int,
            mxPathname: LONGEST_NAME,
            pNext: ptr::null_mut(),
            zName: name.as_ptr(),
            pAppData: Box::into_raw(Box::new(app)).cast(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_path),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: None,
            xCurrentTimeInt64: Some(current_time_in_ms),
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: the structure is whole and lives until `drop` unregisters it.
        let code = unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        assert_eq!(code, ffi::SQLITE_OK, "SQLite takes any file system");
        Self { vfs, name }
    }

    /// Lets another process use the disk from now on.
    pub(super) fn remount(&self, disk: SimDisk) {
        *lock(&self.app().disk) = disk;
    }

    fn app(&self) -> &App {
        // SAFETY: `new` made it, and only `drop` frees it.
        unsafe { app(self.vfs) }
    }

    /// Returns the options of a ledger at `path` of the disk.
    pub(super) fn ledger(&self, path: &str) -> LedgerOptions {
        let file = format!("file:{path}?vfs={}", self.name.to_str().expect("ASCII"));
        let (disk, log) = (lock(&self.app().disk).clone(), PathBuf::from(format!("{path}-wal")));
        let log = WalRewriter::new(move |_| disk.rewrite(&log));
        LedgerOptions { log, ..LedgerOptions::new(Path::new(&file)) }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // SAFETY: every connection was closed before: who mounts a disk drops
        // its ledgers first. Both boxes are ours and nobody else frees them.
        unsafe {
            ffi::sqlite3_vfs_unregister(self.vfs);
            drop(Box::from_raw((*self.vfs).pAppData.cast::<App>()));
            drop(Box::from_raw(self.vfs));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns SQLite's code for an error.
fn code(error: &io::Error, otherwise: c_int) -> c_int {
    match error.kind() {
        io::ErrorKind::StorageFull => ffi::SQLITE_FULL,
        _ => otherwise,
    }
}

fn answer(result: io::Result<()>, otherwise: c_int) -> c_int {
    result.map_or_else(|error| code(&error, otherwise), |()| ffi::SQLITE_OK)
}

/// # Safety
/// `vfs` is one that [`Mounted::new`] made and that lives.
unsafe fn app<'a>(vfs: *mut ffi::sqlite3_vfs) -> &'a App {
    // SAFETY: as promised.
    unsafe { &*(*vfs).pAppData.cast::<App>() }
}

/// # Safety
/// `name` is a name of SQLite's.
unsafe fn path<'a>(name: *const c_char) -> &'a Path {
    // SAFETY: as promised, it ends with a zero and outlives the call.
    Path::new(unsafe { CStr::from_ptr(name) }.to_str().expect("names here are ASCII"))
}

/// # Safety
/// `file` is one that [`open`] has filled and [`close`] has not seen.
unsafe fn of<'a>(file: *mut ffi::sqlite3_file) -> &'a mut Open {
    // SAFETY: as promised; SQLite makes one call of a file at a time.
    unsafe { &mut *(*file.cast::<Handle>()).open }
}

unsafe extern "C" fn open(
    vfs: *mut ffi::sqlite3_vfs,
    name: ffi::sqlite3_filename,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    static ID: AtomicU64 = AtomicU64::new(0);
    let handle = file.cast::<Handle>();
    // SAFETY: SQLite gives `szOsFile` bytes; without methods it never closes.
    unsafe { (*handle).head.pMethods = ptr::null() };
    // SAFETY: SQLite calls with the registered file system.
    let disk = lock(&unsafe { app(vfs) }.disk).clone();
    let creates = flags & ffi::SQLITE_OPEN_CREATE != 0;
    // SAFETY: a name of SQLite's where it is not null.
    let path = (!name.is_null()).then(|| unsafe { path(name) }.to_owned());
    let (opened, is_new) = match &path {
        None => (disk.scratch(), false),
        Some(path) => {
            let is_new = !disk.exists(path);
            (disk.open_file(path, creates), is_new)
        }
    };
    let file = match opened {
        Ok(file) => file,
        Err(error) => return code(&error, ffi::SQLITE_CANTOPEN),
    };
    let is_log = flags & (ffi::SQLITE_OPEN_WAL | ffi::SQLITE_OPEN_MAIN_JOURNAL) != 0;
    let open = Open {
        id: ID.fetch_add(1, Ordering::Relaxed),
        shared: file.shared(),
        file,
        path,
        is_new_log: is_new && is_log,
        holds_shared: [false; LOCKS],
        holds_exclusive: [false; LOCKS],
    };
    // SAFETY: `handle` is `szOsFile` bytes of ours from here to `close`;
    // `out_flags` may be null.
    unsafe {
        (*handle).open = Box::into_raw(Box::new(open));
        (*handle).head.pMethods = &METHODS;
        if !out_flags.is_null() {
            *out_flags = flags;
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    // SAFETY: `open` has filled it; nobody uses it after this.
    let open = unsafe { Box::from_raw((*file.cast::<Handle>()).open) };
    lock(&open.shared.locks).remove(&open.id);
    let mut index = lock(&open.shared.index);
    for slot in 0..LOCKS {
        index.shared[slot] -= u32::from(open.holds_shared[slot]);
        index.exclusive[slot] &= !open.holds_exclusive[slot];
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    to: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: `open` has filled the file; `to` has room for `length` bytes.
    let (open, to) =
        unsafe { (of(file), std::slice::from_raw_parts_mut(to.cast::<u8>(), length as usize)) };
    match open.file.read_some_at(to, offset as u64) {
        Ok(there) if there == length as usize => ffi::SQLITE_OK,
        Ok(_) => ffi::SQLITE_IOERR_SHORT_READ,
        Err(_) => ffi::SQLITE_IOERR_READ,
    }
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    from: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: `open` has filled the file; `from` holds `length` bytes.
    let (open, from) =
        unsafe { (of(file), std::slice::from_raw_parts(from.cast::<u8>(), length as usize)) };
    answer(open.file.write_all_at(from, offset as u64), ffi::SQLITE_IOERR_WRITE)
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, length: i64) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    answer(open.file.set_len(length as u64), ffi::SQLITE_IOERR_TRUNCATE)
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, _flags: c_int) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    let mut result = open.file.sync();
    if std::mem::take(&mut open.is_new_log)
        && let Some(path) = &open.path
    {
        result = result.and_then(|()| open.file.sync_names(path));
    }
    answer(result, ffi::SQLITE_IOERR_FSYNC)
}

unsafe extern "C" fn size(file: *mut ffi::sqlite3_file, length: *mut i64) -> c_int {
    // SAFETY: `open` has filled it.
    match unsafe { of(file) }.file.length() {
        Ok(found) => {
            // SAFETY: SQLite asks for it.
            unsafe { *length = found as i64 };
            ffi::SQLITE_OK
        }
        Err(_) => ffi::SQLITE_IOERR_FSTAT,
    }
}

unsafe extern "C" fn take_lock(file: *mut ffi::sqlite3_file, wanted: c_int) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    let mut locks = lock(&open.shared.locks);
    let others = locks.iter().filter(|(id, _)| **id != open.id).map(|(_, level)| *level);
    let others = others.max().unwrap_or(ffi::SQLITE_LOCK_NONE);
    let own = locks.get(&open.id).copied().unwrap_or(ffi::SQLITE_LOCK_NONE);
    let (granted, code) = match wanted {
        _ if own >= wanted => (own, ffi::SQLITE_OK),
        ffi::SQLITE_LOCK_SHARED if others < ffi::SQLITE_LOCK_PENDING => (wanted, ffi::SQLITE_OK),
        ffi::SQLITE_LOCK_RESERVED if others < ffi::SQLITE_LOCK_RESERVED => (wanted, ffi::SQLITE_OK),
        ffi::SQLITE_LOCK_EXCLUSIVE if others == ffi::SQLITE_LOCK_NONE => (wanted, ffi::SQLITE_OK),
        ffi::SQLITE_LOCK_EXCLUSIVE if others < ffi::SQLITE_LOCK_RESERVED => {
            (ffi::SQLITE_LOCK_PENDING, ffi::SQLITE_BUSY)
        }
        _ => (own, ffi::SQLITE_BUSY),
    };
    locks.insert(open.id, granted);
    code
}

unsafe extern "C" fn lower_lock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    lock(&open.shared.locks).insert(open.id, level);
    ffi::SQLITE_OK
}

unsafe extern "C" fn check_reserved(file: *mut ffi::sqlite3_file, found: *mut c_int) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    let is_reserved =
        lock(&open.shared.locks).values().any(|level| *level >= ffi::SQLITE_LOCK_RESERVED);
    // SAFETY: SQLite asks for it.
    unsafe { *found = c_int::from(is_reserved) };
    ffi::SQLITE_OK
}

unsafe extern "C" fn control(_: *mut ffi::sqlite3_file, _: c_int, _: *mut c_void) -> c_int {
    ffi::SQLITE_NOTFOUND
}

unsafe extern "C" fn sector_size(_: *mut ffi::sqlite3_file) -> c_int {
    512
}

unsafe extern "C" fn characteristics(_: *mut ffi::sqlite3_file) -> c_int {
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}

unsafe extern "C" fn map_index(
    file: *mut ffi::sqlite3_file,
    region: c_int,
    size: c_int,
    extends: c_int,
    memory: *mut *mut c_void,
) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    let mut index = lock(&open.shared.index);
    let region = region as usize;
    let mut found = ptr::null_mut();
    if extends != 0 {
        while index.regions.len() <= region {
            let words = (0..size as usize / 8).map(|_| UnsafeCell::new(0)).collect();
            index.regions.push(words);
        }
    }
    if let Some(words) = index.regions.get(region) {
        found = words[0].get().cast();
    }
    // SAFETY: SQLite asks for it. The region stays where it is as long as
    // `Shared` does, which this file holds.
    unsafe { *memory = found };
    ffi::SQLITE_OK
}

unsafe extern "C" fn lock_index(
    file: *mut ffi::sqlite3_file,
    first: c_int,
    count: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    let slots = first as usize..(first + count) as usize;
    let mut index = lock(&open.shared.index);
    let is_shared = flags & ffi::SQLITE_SHM_SHARED != 0;
    if flags & ffi::SQLITE_SHM_UNLOCK != 0 {
        for slot in slots {
            if is_shared {
                let held = std::mem::take(&mut open.holds_shared[slot]);
                index.shared[slot] -= u32::from(held);
            } else {
                let held = std::mem::take(&mut open.holds_exclusive[slot]);
                index.exclusive[slot] &= !held;
            }
        }
        return ffi::SQLITE_OK;
    }
    let is_free = slots.clone().all(|slot| {
        let exclusive = index.exclusive[slot] && !open.holds_exclusive[slot];
        let shared = index.shared[slot] - u32::from(open.holds_shared[slot]);
        !exclusive && (is_shared || shared == 0)
    });
    if !is_free {
        return ffi::SQLITE_BUSY;
    }
    for slot in slots {
        if is_shared {
            index.shared[slot] += u32::from(!std::mem::replace(&mut open.holds_shared[slot], true));
        } else {
            open.holds_exclusive[slot] = true;
            index.exclusive[slot] = true;
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn index_barrier(_: *mut ffi::sqlite3_file) {
    std::sync::atomic::fence(Ordering::SeqCst);
}

unsafe extern "C" fn unmap_index(file: *mut ffi::sqlite3_file, deletes: c_int) -> c_int {
    // SAFETY: `open` has filled it.
    let open = unsafe { of(file) };
    if deletes != 0 {
        // The last one that has it open: nobody has a pointer into it.
        lock(&open.shared.index).regions.clear();
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn delete(
    vfs: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    syncs: c_int,
) -> c_int {
    // SAFETY: SQLite calls with the registered file system, and a name.
    let (app, path) = unsafe { (app(vfs), path(name)) };
    let disk = lock(&app.disk).clone();
    if !disk.exists(path) {
        return ffi::SQLITE_IOERR_DELETE_NOENT;
    }
    let result = disk.remove(path).and_then(|()| match syncs {
        0 => Ok(()),
        _ => disk.sync_folder(path.parent().unwrap_or(Path::new(""))),
    });
    answer(result, ffi::SQLITE_IOERR_DELETE)
}

unsafe extern "C" fn access(
    vfs: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    _flags: c_int,
    found: *mut c_int,
) -> c_int {
    // SAFETY: SQLite calls with the registered file system, a name, and
    // a place for the answer.
    unsafe {
        let there = lock(&app(vfs).disk).exists(path(name));
        *found = c_int::from(there);
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn full_path(
    _: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    room: c_int,
    full: *mut c_char,
) -> c_int {
    // SAFETY: a name of SQLite's.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes_with_nul();
    if bytes.len() > room as usize {
        return ffi::SQLITE_CANTOPEN;
    }
    // SAFETY: `full` has `room` bytes, and what is copied fits.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), full, bytes.len()) };
    ffi::SQLITE_OK
}

unsafe extern "C" fn randomness(
    vfs: *mut ffi::sqlite3_vfs,
    length: c_int,
    to: *mut c_char,
) -> c_int {
    // SAFETY: SQLite calls with the registered file system, and `length`
    // bytes.
    let (app, to) =
        unsafe { (app(vfs), std::slice::from_raw_parts_mut(to.cast::<u8>(), length as usize)) };
    let mut chance = lock(&app.chance);
    to.fill_with(|| chance.number() as u8);
    length
}

unsafe extern "C" fn sleep(_: *mut ffi::sqlite3_vfs, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn current_time(_: *mut ffi::sqlite3_vfs, days: *mut f64) -> c_int {
    // SAFETY: SQLite asks for it.
    unsafe { *days = 2_461_000.5 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn current_time_in_ms(_: *mut ffi::sqlite3_vfs, ms: *mut i64) -> c_int {
    // SAFETY: SQLite asks for it.
    unsafe { *ms = 212_630_443_200_000 };
    ffi::SQLITE_OK
}

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 2,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(size),
    xLock: Some(take_lock),
    xUnlock: Some(lower_lock),
    xCheckReservedLock: Some(check_reserved),
    xFileControl: Some(control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(characteristics),
    xShmMap: Some(map_index),
    xShmLock: Some(lock_index),
    xShmBarrier: Some(index_barrier),
    xShmUnmap: Some(unmap_index),
    xFetch: None,
    xUnfetch: None,
};
