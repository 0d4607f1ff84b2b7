//! The vendor's compiler NVRTC, as a function from source to machine code.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::{result, sys};

use super::library::{Library, find};

/// Source text and the headers that it includes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelSource {
    /// The name that the compiler prints in messages.
    pub(crate) name: &'static str,
    /// Text of the source file.
    pub(crate) text: &'static str,
    /// The name and the text of each header.
    pub(crate) headers: &'static [(&'static str, &'static str)],
    /// Compiler options beside the target.
    pub(crate) options: &'static [&'static str],
}

/// A compiler that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compiler {
    version: (u32, u32),
}

impl Compiler {
    /// Finds the compiler's library, in `folders` first.
    ///
    /// # Errors
    /// A sentence about the missing library or symbol.
    pub(crate) fn find(folders: &[PathBuf]) -> Result<Self, String> {
        find(Library::Nvrtc, folders).map_err(|fault| fault.to_string())?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library and the symbol exist; both pointers are to local
        // integers.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|error| format!("the CUDA compiler does not answer: {error}"))?;
        Ok(Self { version: (major.max(0) as u32, minor.max(0) as u32) })
    }

    /// Returns the compiler's name and version, which is part of the names of files
    /// that it makes.
    pub(crate) fn name(self) -> String {
        format!("nvrtc{}.{}", self.version.0, self.version.1)
    }

    /// Compiles the source to machine code.
    ///
    /// # Errors
    /// The compiler's messages.
    pub(crate) fn compile(
        self,
        source: &KernelSource,
        options: &[String],
    ) -> Result<Vec<u8>, String> {
        let program = Program::new(source)?;
        let text = |option: &String| CString::new(option.as_str()).map_err(|e| e.to_string());
        let options = options.iter().map(text).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program lives, and so do the strings that the pointers refer to.
        let compiled = unsafe {
            sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr())
        };
        match compiled.result() {
            Ok(()) => program.code().map_err(|error| format!("the compiler gave no code: {error}")),
            Err(NvrtcError(code)) => {
                Err(format!("{} does not compile ({code:?}): {}", source.name, program.log()))
            }
        }
    }
}

/// A program inside the compiler, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &KernelSource) -> Result<Self, String> {
        let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (name, body) = (text(source.name)?, text(source.text)?);
        let headers = source.headers.iter();
        let names = headers.clone().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let texts = headers.map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
        let pointers =
            |strings: &[CString]| strings.iter().map(|it| it.as_ptr()).collect::<Vec<_>>();
        let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
        let mut program = std::ptr::null_mut();
        // SAFETY: every pointer is to a string that lives until the call returns; the
        // compiler keeps copies.
        let made = unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                body.as_ptr(),
                name.as_ptr(),
                names.len() as i32,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        made.result().map_err(|error| format!("the compiler does not start: {error}"))?;
        Ok(Self(program))
    }

    fn code(&self) -> Result<Vec<u8>, NvrtcError> {
        let mut length = 0;
        // SAFETY: the program lives and was compiled.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut length) }.result()?;
        let mut code = vec![0_u8; length];
        // SAFETY: the vector has room for all of the code.
        unsafe { sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()) }.result()?;
        Ok(code)
    }

    /// Returns the first characters of the compiler's messages.
    fn log(&self) -> String {
        // SAFETY: the program lives.
        let Ok(log) = (unsafe { result::get_program_log(self.0) }) else { return String::new() };
        let bytes: Vec<u8> = log.iter().map(|&byte| byte as u8).collect();
        let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy();
        text.chars().take(MOST_LOG).collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// The most characters of the compiler's messages that are kept.
const MOST_LOG: usize = 2_000;
