//! Settings of the C library's allocator, which every thread uses.

/// Cores for each arena. An arena is a part of memory with a lock of its own.
const CORES_PER_ARENA: usize = 4;
/// The smallest size, in bytes, that gets a mapping of its own and goes back to the system at
/// once. Without a fixed value the allocator raises it to the largest size that was freed.
const OWN_MAPPING: i32 = 128 * 1024;

/// Sets few arenas, so that memory which one request has freed serves the next one, whatever
/// threads they run on. The default is eight arenas for each core, and each keeps what its
/// busiest moment needed. Called before any thread is started.
pub fn bound_arenas() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let arenas = cores.div_ceil(CORES_PER_ARENA).max(2);
    #[cfg(target_env = "gnu")]
    for (setting, value) in
        [(libc::M_ARENA_MAX, arenas as i32), (libc::M_MMAP_THRESHOLD, OWN_MAPPING)]
    {
        // SAFETY: `mallopt` takes two integers and changes only the allocator's settings. It
        // refuses a value that it does not know, which leaves the default.
        unsafe { libc::mallopt(setting, value) };
    }
}
