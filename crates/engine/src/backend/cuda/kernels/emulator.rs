//! The kernels built with g++ for an emulated device, and the memory of that device.
//!
//! The library is built once for all tests and kept under `target`. An access outside
//! the device's memory, a barrier that some threads never reach, or a wrong argument is
//! an error that names the kernel, the block and the thread.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_char, c_void};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

use super::fused::fused;
use super::{DevicePointer, INCLUDED, Launch, UNIT};

/// The emulated device. A launch runs on the calling thread until the kernel has ended.
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

/// Bugs that a test can switch on, in the order of the enumeration in `emulator.h`.
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

/// Elements that device memory can hold.
///
/// # Safety
/// Every bit pattern must be a value, and there must be no padding.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: any bits are an f32.
unsafe impl Plain for f32 {}
// SAFETY: any bits are an f64.
unsafe impl Plain for f64 {}
// SAFETY: any bits are a u16.
unsafe impl Plain for u16 {}
// SAFETY: any bits are a u32.
unsafe impl Plain for u32 {}
// SAFETY: the structure consists of four u32.
unsafe impl Plain for super::KernelSpan {}
// SAFETY: the structure consists of numbers without padding.
unsafe impl Plain for super::SampleRow {}

/// A piece of the device's memory, freed when dropped.
pub(crate) struct Memory<'e, T> {
    emulator: &'e Emulator,
    data: *mut T,
    length: usize,
}

impl Emulator {
    /// Returns the correct kernels. Without a compiler, prints the reason and returns
    /// `None`; in the gate a missing compiler is an error.
    pub(crate) fn sound() -> Option<&'static Self> {
        static SOUND: OnceLock<Option<Emulator>> = OnceLock::new();
        SOUND.get_or_init(|| Self::load(&[])).as_ref()
    }

    /// Returns the kernels with bugs that [`Self::plant`] can switch on.
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
        // SAFETY: the library is our own; its initialisation only fills a list.
        let library = unsafe { Library::new(path) }
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        // SAFETY: the signatures are those of emulator.cpp, and the library lives as
        // long as the functions.
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

    /// Switches `bug` on for further launches of this thread.
    pub(crate) fn plant(&self, bug: Bug) {
        // SAFETY: the function stores a number.
        unsafe { (self.plant)(bug as u32) }
    }

    /// Takes memory for `length` elements, with all bits set.
    pub(crate) fn memory<T: Plain>(&self, length: usize) -> Memory<'_, T> {
        // SAFETY: the function maps pages or returns null.
        let data: *mut T = unsafe { (self.allocate)(length * size_of::<T>()) }.cast();
        assert!(length == 0 || !data.is_null(), "pages for {length} elements");
        Memory { emulator: self, data, length }
    }

    /// Returns device memory with a copy of `elements`.
    pub(crate) fn copy<T: Plain>(&self, elements: &[T]) -> Memory<'_, T> {
        let mut memory = self.memory(elements.len());
        memory.as_mut_slice().copy_from_slice(elements);
        memory
    }

    /// Runs a kernel in one of [`ORDERS`].
    ///
    /// # Errors
    /// A sentence about the failure.
    pub(crate) fn launch<A>(&self, launch: &Launch<A>, order: u32) -> Result<(), String> {
        let Launch { kernel, grid, threads, args } = launch;
        let kernel = CString::new(*kernel).expect("names have no NUL");
        let args = std::ptr::from_ref(args).cast();
        // SAFETY: the emulator checks the arguments' size and reports every access
        // outside the device's memory as an error.
        let said = unsafe {
            (self.launch)(kernel.as_ptr(), grid.as_ptr(), *threads, args, size_of::<A>(), order)
        };
        if said.is_null() {
            return Ok(());
        }
        // SAFETY: the string lives until this thread's next launch.
        Err(unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
    }
}

impl<T: Plain> Memory<'_, T> {
    /// Returns the address on the device.
    pub(crate) fn at(&self) -> DevicePointer {
        self.data as DevicePointer
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: the piece has this many elements, and no launch is running.
        unsafe { std::slice::from_raw_parts(self.data, self.length) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: the same conditions hold, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.length) }
    }

    /// Returns true if nothing was written behind the end of the piece.
    pub(crate) fn is_whole(&self) -> bool {
        // SAFETY: the pointer is to a piece of the device.
        unsafe { (self.emulator.is_whole)(self.data.cast()) }
    }
}

impl<T> Drop for Memory<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the pointer is to a piece of the device, and nothing else refers to
        // the piece.
        unsafe { (self.emulator.free)(self.data.cast()) }
    }
}

/// Returns an environment variable, which the gate sets for its tests.
#[allow(clippy::disallowed_methods, reason = "a test is told by its runner what must be there")]
pub(crate) fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name)
}

/// Builds the library, unless one of the same sources and options exists.
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
    // The library gets a temporary name first, because another process may build the
    // same.
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

/// Writes a file atomically, so that other processes read the whole file.
fn write(path: &Path, text: &str) {
    let made = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&made, text).expect("the folder is ours to write");
    std::fs::rename(&made, path).expect("both are in one folder");
}

/// Returns a folder beside that of the test program.
fn folder() -> PathBuf {
    let program = std::env::current_exe().expect("a program knows where it lies");
    program.ancestors().nth(2).expect("it lies in target/PROFILE/deps").join("emulated-kernels")
}

/// The orders in which a kernel is run: threads forwards or backwards, and asynchronous
/// copies as late or as early as possible.
pub(crate) const ORDERS: std::ops::Range<u32> = 0..4;
const COMPILER: &str = "g++";
const OPTIONS: [&str; 7] =
    ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"];
const EMULATOR: [(&str, &str); 2] =
    [("emulator.h", include_str!("emulator.h")), ("emulator.cpp", include_str!("emulator.cpp"))];
