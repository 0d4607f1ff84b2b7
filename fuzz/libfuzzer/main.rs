//! The program of every target. The name of the binary chooses the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let target = tollgate_fuzz::target(env!("CARGO_BIN_NAME")).expect("a target with the name of the binary");
    target(data);
});
