//! Every target's program: which one it is, its name says.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let target = tollgate_fuzz::target(env!("CARGO_BIN_NAME")).expect("a target of that name");
    target(data);
});
