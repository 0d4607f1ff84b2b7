//! The kernels built with g++ over an emulated card, and that card's memory.
//!
//! Built once for all tests and kept under `target`; what an access outside
//! its memory, a barrier that not all reach or a wrong argument comes to is an
//! error that names the kernel, the block and the thread.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_char, c_void};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

use super::fused::fused;
use super::{DevicePointer, INCLUDED, Launch, UNIT};

/// The emulated card. Launches run on the thread that asks, to their end.
pub(crate) struct Emulator {
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    is_whole: unsafe extern "C" fn(*mut c_void) -> bool,
    plant: unsafe extern "C" fn(u32),
    launch: LaunchFn,
    _library: Library,
}

type LaunchFn = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    u32,
    *const c_void,
    usize,
    u32,
) -> *const c_char;

/// Bugs that a test may ask for, in the order of the enumeration in
/// `emulator.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Bug {
    None,
    NormWithoutBarrier,
    GateWithoutBound,
    DecodeWrongHead,
    DecodeMask,
    DecodeWithoutBarrier,
    LinearWithoutWait,
    LinearWithoutBarrier,
    LinearWithoutBound,
    PrefillWrongHead,
    PrefillMask,
    PrefillWithoutWait,
    PrefillWithoutBarrier,
    SampleWithoutBarrier,
    SampleTies,
    SkinnyWithoutBound,
}

/// Elements that may lie in a card's memory.
///
/// # Safety
/// Every pattern of bits is a value, and there is no padding.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: numbers are.
unsafe impl Plain for f32 {}
// SAFETY: numbers are.
unsafe impl Plain for f64 {}
// SAFETY: numbers are.
unsafe impl Plain for u16 {}
// SAFETY: numbers are.
unsafe impl Plain for u32 {}
// SAFETY: four numbers of one size are.
unsafe impl Plain for super::KernelSpan {}
// SAFETY: numbers without a gap: 64 bytes, as many as its fields have.
unsafe impl Plain for super::SampleRow {}

/// A piece of the card's memory; freed when dropped.
pub(crate) struct Memory<'e, T> {
    emulator: &'e Emulator,
    data: *mut T,
    length: usize,
}

impl Emulator {
    /// The kernels as they are; `None`, with the reason printed, where no
    /// compiler is, except in the gate.
    pub(crate) fn sound() -> Option<&'static Self> {
        static SOUND: OnceLock<Option<Emulator>> = OnceLock::new();
        SOUND.get_or_init(|| Self::load(&[])).as_ref()
    }

    /// The kernels with bugs that wait to be asked for.
    pub(crate) fn planted() -> Option<&'static Self> {
        static PLANTED: OnceLock<Option<Emulator>> = OnceLock::new();
        PLANTED.get_or_init(|| Self::load(&["-DTOLLGATE_PLANTS"])).as_ref()
    }

    fn load(options: &[&str]) -> Option<Self> {
        if let Err(error) = Command::new(COMPILER).arg("--version").output() {
            assert!(variable("TOLLGATE_GATE").is_none(), "{COMPILER}: {error}");
            println!("not run: {COMPILER}: {error}");
            return None;
        }
        Some(Self::open(&build(options)))
    }

    fn open(path: &Path) -> Self {
        // SAFETY: the library is our own; what runs at its start fills a list.
        let library = unsafe { Library::new(path) }
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        // SAFETY: the signatures are those of emulator.cpp, and the library
        // stays for as long as they do.
        unsafe {
            Self {
                allocate: *library.get(b"tollgate_alloc\0").expect("emulator.cpp has it"),
                free: *library.get(b"tollgate_free\0").expect("emulator.cpp has it"),
                is_whole: *library.get(b"tollgate_is_whole\0").expect("emulator.cpp has it"),
                plant: *library.get(b"tollgate_plant\0").expect("emulator.cpp has it"),
                launch: *library.get(b"tollgate_launch\0").expect("emulator.cpp has it"),
                _library: library,
            }
        }
    }

    /// Plants `bug` in what this thread launches from now on.
    pub(crate) fn plant(&self, bug: Bug) {
        // SAFETY: it stores a number.
        unsafe { (self.plant)(bug as u32) }
    }

    /// Room for `length` elements, all bits set.
    pub(crate) fn memory<T: Plain>(&self, length: usize) -> Memory<'_, T> {
        // SAFETY: it maps pages, or returns null.
        let data: *mut T = unsafe { (self.allocate)(length * size_of::<T>()) }.cast();
        assert!(length == 0 || !data.is_null(), "pages for {length} elements");
        Memory { emulator: self, data, length }
    }

    /// A copy of `elements`.
    pub(crate) fn copy<T: Plain>(&self, elements: &[T]) -> Memory<'_, T> {
        let mut memory = self.memory(elements.len());
        memory.as_mut_slice().copy_from_slice(elements);
        memory
    }

    /// Runs a kernel in one of [`ORDERS`].
    ///
    /// # Errors
    /// What went wrong, in words.
    pub(crate) fn launch<A>(&self, launch: &Launch<A>, order: u32) -> Result<(), String> {
        let Launch { kernel, grid, threads, args } = launch;
        let kernel = CString::new(*kernel).expect("names have no NUL");
        let args = std::ptr::from_ref(args).cast();
        // SAFETY: the emulator checks the arguments' size; what the kernel
        // touches outside the card's memory is an error.
        let said = unsafe {
            (self.launch)(kernel.as_ptr(), grid.as_ptr(), *threads, args, size_of::<A>(), order)
        };
        if said.is_null() {
            return Ok(());
        }
        // SAFETY: a string that stays until this thread's next launch.
        Err(unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
    }
}

impl<T: Plain> Memory<'_, T> {
    /// Its address on the card.
    pub(crate) fn at(&self) -> DevicePointer {
        self.data as DevicePointer
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: the piece has as many elements, and no launch is under way.
        unsafe { std::slice::from_raw_parts(self.data, self.length) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.length) }
    }

    /// Whether nothing was written behind its end.
    pub(crate) fn is_whole(&self) -> bool {
        // SAFETY: it is a piece of the card's.
        unsafe { (self.emulator.is_whole)(self.data.cast()) }
    }
}

impl<T> Drop for Memory<'_, T> {
    fn drop(&mut self) {
        // SAFETY: it is a piece of the card's, and nobody has it any more.
        unsafe { (self.emulator.free)(self.data.cast()) }
    }
}

/// What the gate tells its tests.
#[allow(clippy::disallowed_methods, reason = "a test is told by its runner what must be there")]
pub(crate) fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name)
}

/// Builds the library unless one of the same sources and options is there.
fn build(options: &[&str]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    let fused = fused();
    (UNIT, INCLUDED, EMULATOR, options, OPTIONS, &fused).hash(&mut hasher);
    let folder = folder().join(format!("{:016x}", hasher.finish()));
    let library = folder.join("kernels.so");
    if library.exists() {
        return library;
    }
    std::fs::create_dir_all(&folder).expect("target is ours to write");
    for (name, text) in [UNIT].into_iter().chain(INCLUDED).chain(EMULATOR) {
        write(&folder.join(name), text);
    }
    // Under a name of its own first: another process may build the same.
    let made = folder.join(format!("kernels.{}.so", std::process::id()));
    let output = Command::new(COMPILER)
        .args(OPTIONS)
        .args(fused)
        .args(options)
        .arg("-o")
        .arg(&made)
        .arg(folder.join("emulator.cpp"))
        .output()
        .expect("it has just said its version");
    assert!(output.status.success(), "{COMPILER}: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&made, &library).expect("both are in one folder");
    library
}

/// Writes a file so that whoever reads it finds it whole.
fn write(path: &Path, text: &str) {
    let made = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&made, text).expect("the folder is ours to write");
    std::fs::rename(&made, path).expect("both are in one folder");
}

/// Beside the folder of the test program.
fn folder() -> PathBuf {
    let program = std::env::current_exe().expect("a program knows where it lies");
    program.ancestors().nth(2).expect("it lies in target/PROFILE/deps").join("emulated-kernels")
}

/// Orders to run a kernel in: forwards and backwards, asynchronous copies as
/// late as they may come and as early.
pub(crate) const ORDERS: std::ops::Range<u32> = 0..4;
const COMPILER: &str = "g++";
const OPTIONS: [&str; 7] =
    ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"];
const EMULATOR: [(&str, &str); 2] =
    [("emulator.h", include_str!("emulator.h")), ("emulator.cpp", include_str!("emulator.cpp"))];
