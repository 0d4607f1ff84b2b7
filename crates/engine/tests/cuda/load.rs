//! Loads a stand-in before the engine looks for the real library: the loader
//! gives who asks for a name the library that already bears it.

use std::path::Path;

use libloading::Library;

/// Loads a library for the rest of the process.
pub fn load(library: &Path) -> &'static Library {
    // SAFETY: it is one of ours, and does nothing when it is loaded.
    Box::leak(Box::new(unsafe { Library::new(library) }.unwrap()))
}
