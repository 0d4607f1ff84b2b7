//! Tests of the same sources as NVRTC compiles them for real devices: no spills, no
//! stack, and registers and shared memory within bounds. No device is needed.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::backend::cuda::kernels::emulator::variable;
use crate::backend::cuda::kernels::{INCLUDED, NAMES, OPTIONS, UNIT};

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];
/// The most registers of a thread. The exceptions hold a head's sums in registers, and
/// the kernels for single tokens two KV blocks as well. Of blocks of 128 threads, three
/// fit on a multiprocessor with 168 registers, and two with 255.
const MOST_REGISTERS: u32 = 128;
const EXCEPTIONS: [(&str, u32); 3] =
    [("decode_64", 168), ("decode_128", 255), ("prefill_128", 168)];
const MOST_SHARED: u32 = 48 << 10;

/// The assembler's report on a kernel.
#[derive(Debug, Default)]
struct Resources {
    registers: u32,
    shared: u32,
    stack: u32,
    spilled: u32,
}

#[test]
fn every_kernel_compiles_within_bounds() {
    let Some(folder) = folder() else {
        assert!(variable("TOLLGATE_GATE").is_none(), "the gate installs NVRTC");
        println!("not run: no NVRTC in the environment that `cargo xtask tools` makes");
        return;
    };
    let compiler = Compiler::open(&folder);
    for architecture in ARCHITECTURES {
        let log = compiler.compile(architecture);
        let found = resources(&log);
        for name in NAMES {
            let kernel =
                found.get(name).unwrap_or_else(|| panic!("{architecture}: no {name}: {log}"));
            let exception = EXCEPTIONS.iter().find(|(other, _)| *other == name);
            let most = exception.map_or(MOST_REGISTERS, |(_, most)| *most);
            println!("{architecture} {name}: {kernel:?}");
            assert!(kernel.registers > 0 && kernel.registers <= most, "{name}: {kernel:?}");
            assert!(kernel.shared <= MOST_SHARED, "{name}: {kernel:?}");
            assert!(kernel.stack == 0 && kernel.spilled == 0, "{name}: {kernel:?}");
        }
        assert_eq!(found.len(), NAMES.len(), "{architecture}: kernels that no list has");
    }
}

#[test]
fn assembler_reports_are_parsed() {
    let log = "ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
        ptxas info    : Function properties for a\n\
        ptxas         .     8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads\n\
        ptxas info    : Used 31 registers, used 1 barriers, 64 bytes smem, 376 bytes cmem[0]\n";
    let found = resources(log);
    let Resources { registers, shared, stack, spilled } = found["a"];
    assert_eq!((registers, shared, stack, spilled), (31, 64, 8, 6));
}

fn resources(log: &str) -> BTreeMap<String, Resources> {
    let mut found = BTreeMap::<String, Resources>::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("entry function '") {
            name = rest.split('\'').next().unwrap_or_default().to_owned();
            found.insert(name.clone(), Resources::default());
        }
        let Some(kernel) = found.get_mut(&name) else { continue };
        let number_before = |what: &str| {
            let before = line.split_once(what)?.0;
            before.trim_end().rsplit(' ').next()?.parse::<u32>().ok()
        };
        kernel.registers += number_before(" registers").unwrap_or(0);
        kernel.shared += number_before(" bytes smem").unwrap_or(0);
        kernel.stack += number_before(" bytes stack").unwrap_or(0);
        kernel.spilled += number_before(" bytes spill stores").unwrap_or(0);
        kernel.spilled += number_before(" bytes spill loads").unwrap_or(0);
    }
    found
}

/// Returns the folder in which the tools' Python has NVIDIA's libraries.
fn folder() -> Option<PathBuf> {
    let python = PathBuf::from(variable("TOLLGATE_PYTHON")?);
    let lib = python.parent()?.parent()?.join("lib");
    let versions = std::fs::read_dir(lib).ok()?;
    let mut folders = versions
        .flatten()
        .map(|version| version.path().join("site-packages/nvidia/cu13/lib"))
        .filter(|folder| folder.is_dir());
    folders.next()
}

struct Compiler {
    // Unloaded in this order.
    nvrtc: Library,
    _builtins: Library,
}

impl Compiler {
    fn open(folder: &Path) -> Self {
        let open = |prefix: &str, flags| {
            let path = std::fs::read_dir(folder)
                .expect("the folder was there")
                .flatten()
                .map(|file| file.path())
                .find(|path| {
                    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
                })
                .unwrap_or_else(|| panic!("no {prefix} in {}", folder.display()));
            // SAFETY: this is the library that the gate has installed.
            unsafe { Library::open(Some(&path), flags) }
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        // NVRTC finds its builtins by name only, so they must be loaded first.
        let builtins = open("libnvrtc-builtins.so", RTLD_NOW | RTLD_GLOBAL);
        Self { nvrtc: open("libnvrtc.so", RTLD_NOW), _builtins: builtins }
    }

    /// Compiles for one architecture and returns the log.
    fn compile(&self, architecture: &str) -> String {
        type Create = unsafe extern "C" fn(
            *mut *mut c_void,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> c_int;
        type LogSize = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
        type Log = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
        let text = |text: &str| CString::new(text).expect("sources have no NUL");
        let architecture = format!("--gpu-architecture={architecture}");
        let options: Vec<CString> = OPTIONS
            .into_iter()
            .chain([architecture.as_str(), "--ptxas-options=-v"])
            .map(text)
            .collect();
        let (names, texts): (Vec<CString>, Vec<CString>) =
            INCLUDED.into_iter().map(|(name, source)| (text(name), text(source))).unzip();
        let pointers =
            |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (unit_name, unit) = (text(UNIT.0), text(UNIT.1));
        let mut program = null_mut();
        // SAFETY: the signatures are those of nvrtc.h, the strings outlive the calls,
        // and the log has the reported size.
        unsafe {
            let create = self.nvrtc.get::<Create>(b"nvrtcCreateProgram\0").expect("NVRTC has it");
            let compile =
                self.nvrtc.get::<Compile>(b"nvrtcCompileProgram\0").expect("NVRTC has it");
            let log_size =
                self.nvrtc.get::<LogSize>(b"nvrtcGetProgramLogSize\0").expect("NVRTC has it");
            let log = self.nvrtc.get::<Log>(b"nvrtcGetProgramLog\0").expect("NVRTC has it");
            let destroy =
                self.nvrtc.get::<Destroy>(b"nvrtcDestroyProgram\0").expect("NVRTC has it");
            let created = create(
                &mut program,
                unit.as_ptr(),
                unit_name.as_ptr(),
                names.len() as c_int,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            );
            assert_eq!(created, 0, "NVRTC takes the sources");
            let compiled = compile(program, options.len() as c_int, pointers(&options).as_ptr());
            let mut size = 0;
            assert_eq!(log_size(program, &mut size), 0, "NVRTC has a log");
            let mut bytes = vec![0_u8; size + 1];
            assert_eq!(log(program, bytes.as_mut_ptr().cast()), 0, "NVRTC hands out its log");
            destroy(&mut program);
            let log = CStr::from_bytes_until_nul(&bytes).expect("it ends with NUL");
            let log = log.to_string_lossy().into_owned();
            assert_eq!(compiled, 0, "{log}");
            log
        }
    }
}
