//! Checks that the generated code in the repository matches the schema. To renew
//! the code after a change of `proto/worker.proto`, run
//! `TOLLGATE_REGENERATE=1 cargo test -p tollgate-wire`.
#![allow(missing_docs)]

use std::path::Path;

#[test]
#[allow(clippy::disallowed_methods, reason = "the switch of a test, not a setting of the product")]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let schema = root.join("proto/worker.proto");
    let set = protox::compile([&schema], [root.join("proto")]).expect("the schema compiles");
    let fresh = tempfile::tempdir().expect("a temporary folder");
    tonic_prost_build::configure()
        .out_dir(fresh.path())
        .compile_fds(set)
        .expect("code is generated");
    let fresh = std::fs::read_to_string(fresh.path().join("tollgate.worker.v1.rs"))
        .expect("one file for the package");
    let checked_in = root.join("src/generated/tollgate.worker.v1.rs");
    if std::env::var_os("TOLLGATE_REGENERATE").is_some() {
        std::fs::write(&checked_in, fresh).expect("writes");
    } else {
        let current = std::fs::read_to_string(&checked_in).unwrap_or_default();
        assert!(
            current == fresh,
            "src/generated is stale: run TOLLGATE_REGENERATE=1 cargo test -p tollgate-wire"
        );
    }
}
