//! Loads a stand-in library before the engine looks for the real one: the loader then
//! returns the library that already has the name.

use std::path::Path;

use libloading::Library;

/// Loads a library for the rest of the process.
pub fn load(library: &Path) -> &'static Library {
    // SAFETY: the library is one of the stand-ins, and loading it runs no code of note.
    Box::leak(Box::new(unsafe { Library::new(library) }.unwrap()))
}
