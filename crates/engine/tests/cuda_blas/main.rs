//! Tests of the CUDA backend with the vendor's library of matrix products. The library
//! is a stand-in too; it counts the plans, of which there must be one for each shape.
//! The tests are a process of their own, because a loaded library stays loaded.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(unreachable_pub, reason = "the modules serve two test programs")]
#![allow(dead_code, reason = "neither of the two test programs uses every item")]

#[path = "../cuda/agree.rs"]
mod agree;
#[path = "../cuda/load.rs"]
mod load;
#[path = "../cuda/sampling.rs"]
mod sampling;
#[path = "../cuda/standin.rs"]
mod standin;

use std::time::Duration;

use agree::{BLOCKS, Pair, everything, models, open};
use load::load;
use standin::Part;
use tollgate_engine::backend::Backend;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::cuda::{
    CodeFolders, CudaBackend, CudaOptions, DeviceSelector, KernelChoice, Launches,
};

/// The folder of this crate's sources.
const ENGINE: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn models_with_vendor_gemm_agree_with_the_cpu() {
    let folder = standin::folder("emulated-blas");
    load(&standin::build(Part::Compiler, &folder, &[]));
    load(&standin::build(Part::Driver, &folder, &[]));
    // The library is found by its folder, as an administrator may configure it.
    let libraries = standin::folder("blas");
    let blas = standin::build(Part::Blas, &libraries, &[]);
    let kept = tempfile::tempdir().unwrap();
    // All ways are measured, or the library's proposal is used, which includes a way
    // that it refuses.
    let searches = [Duration::from_millis(200), Duration::ZERO];
    for ((name, spec, window), search) in models().into_iter().zip(searches) {
        let (_folder, files) = open(&spec, window, 9);
        let cpu =
            CpuOptions { threads: 1, kv_tokens: BLOCKS * 16, step_tokens: 256, instructions: None };
        let mut cpu = CpuBackend::new(&files, &cpu).unwrap();
        let options = CudaOptions {
            device: DeviceSelector::First,
            memory_share: 0.9,
            step_tokens: 256,
            folders: CodeFolders {
                kept: kept.path().to_owned(),
                bundles: Vec::new(),
                libraries: vec![libraries.clone()],
            },
            kernels: KernelChoice::Fastest,
            launches: Launches::Overlapping,
            search,
        };
        let mut cuda = CudaBackend::new(&files, &options).unwrap();
        assert!(cuda.kv_blocks() >= BLOCKS);
        let notes = cuda.notes().join("; ");
        assert!(!notes.contains("own kernels multiply"), "{notes}");
        assert!(notes.contains(" products measured"), "{notes}");
        let mut pair = Pair::new(&mut cpu, &mut cuda);
        everything(&mut pair, spec.vocabulary);
        println!("{name}: {} rows", pair.rows);
        sampling::check(&mut cuda, spec.vocabulary);
        assert!(cuda.graphs() > 0);
    }
    let blas = load(&blas);
    let count = |symbol: &[u8]| {
        // SAFETY: the stand-in defines both symbols with this signature.
        unsafe { blas.get::<unsafe extern "C" fn() -> u32>(symbol).unwrap()() }
    };
    let (searches, products) = (count(b"standin_searches"), count(b"standin_products"));
    println!("{searches} searches, {products} products");
    assert!(searches > 0 && products > searches, "{searches} searches, {products} products");
}
