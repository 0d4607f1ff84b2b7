//! Tests of the CUDA backend without a GPU: the engine's own code runs over a stand-in
//! driver that emulates the kernels. Results and speed of a real GPU are not tested
//! here.

#![allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(unreachable_pub, reason = "the modules serve two test programs")]
#![allow(dead_code, reason = "neither of the two test programs uses every item")]

mod agree;
#[path = "../../examples/gpu_check/attribution.rs"]
mod attribution;
#[path = "../../examples/gpu_check/cases.rs"]
mod cases;
#[path = "../../examples/gpu_check/compare.rs"]
mod compare;
mod determinism;
mod load;
#[path = "../../examples/gpu_check/meter.rs"]
mod meter;
#[path = "../../examples/gpu_check/options.rs"]
mod options;
mod probe;
mod sampling;
#[path = "../../examples/gpu_check/speed.rs"]
mod speed;
mod standin;
#[path = "../../examples/gpu_check/table.rs"]
mod table;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use agree::{
    BLOCKS, LONG_CONTEXT, Pair, everything, far_into_a_context, models, open, scattered, span, text,
};
use load::load;
use standin::Part;
use tollgate_engine::Instructions;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::cuda::{
    CodeFolders, CudaBackend, CudaError, CudaOptions, DeviceSelector, KernelChoice, Launches,
    NoDevice,
};
use tollgate_engine::backend::{Backend, BackendError, BlockCopy, LogitRows, StepOutput, StepPlan};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::random_model::ModelSpec;

/// The folder of this crate's sources.
const ENGINE: &str = env!("CARGO_MANIFEST_DIR");

/// Control functions of the stand-in driver. One test at a time may use them, because
/// memory and failures concern the whole process.
struct Card(&'static libloading::Library);

fn card() -> (MutexGuard<'static, ()>, &'static Card) {
    static ALONE: Mutex<()> = Mutex::new(());
    static CARD: OnceLock<Card> = OnceLock::new();
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let card = CARD.get_or_init(|| {
        let folder = standin::folder("emulated");
        load(&standin::build(Part::Compiler, &folder, &[]));
        Card(load(&standin::build(Part::Driver, &folder, &[])))
    });
    card.set_memory(96 << 20);
    card.fail_after(-1);
    (alone, card)
}

impl Card {
    fn set_memory(&self, bytes: usize) {
        // SAFETY: the stand-in defines the function with this signature.
        unsafe { self.0.get::<unsafe extern "C" fn(usize)>(b"standin_memory").unwrap()(bytes) }
    }

    fn fail_after(&self, launches: i32) {
        // SAFETY: the stand-in defines the function with this signature.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(b"standin_fail_after").unwrap()(launches) }
    }

    fn replays(&self) -> u32 {
        // SAFETY: the stand-in defines the function with this signature.
        unsafe { self.0.get::<unsafe extern "C" fn() -> u32>(b"standin_replays").unwrap()() }
    }

    fn taken(&self) -> usize {
        // SAFETY: the stand-in defines the function with this signature.
        unsafe { self.0.get::<unsafe extern "C" fn() -> usize>(b"standin_taken").unwrap()() }
    }
}

fn options(kept: &Path) -> CudaOptions {
    CudaOptions {
        device: DeviceSelector::First,
        memory_share: 0.9,
        step_tokens: 256,
        folders: CodeFolders { kept: kept.to_owned(), ..CodeFolders::default() },
        kernels: KernelChoice::Fastest,
        launches: Launches::Overlapping,
        search: Duration::from_millis(200),
    }
}

fn reference_options() -> CpuOptions {
    CpuOptions { threads: 1, kv_tokens: BLOCKS * 16, step_tokens: 256, instructions: None }
}

fn reference(files: &ModelFiles) -> CpuBackend {
    CpuBackend::new(files, &reference_options()).unwrap()
}

#[test]
fn every_model_family_agrees_with_the_cpu() {
    let (_alone, card) = card();
    for (name, spec, window) in models() {
        let (_folder, files) = open(&spec, window, 7);
        let kept = tempfile::tempdir().unwrap();
        let mut cpu = reference(&files);
        let mut cuda = CudaBackend::new(&files, &options(kept.path())).unwrap();
        assert_eq!(cuda.device().class.as_str(), "h100");
        assert!(cuda.kv_blocks() >= BLOCKS, "{name}: {} blocks", cuda.kv_blocks());
        let mut pair = Pair::new(&mut cpu, &mut cuda);
        everything(&mut pair, spec.vocabulary);
        if spec.context == LONG_CONTEXT {
            far_into_a_context(&mut pair, spec.vocabulary);
        }
        let Pair { rows, clear, worst, .. } = pair;
        println!("{name}: {rows} rows, {clear} clear; {worst} of the largest logit");
        assert!(rows > 300 && clear > 30, "{name}");
        let replays = card.replays();
        let draws = sampling::check(&mut cuda, spec.vocabulary);
        println!("{draws} draws, {} kinds of steps as graphs", cuda.graphs());
        assert!(cuda.graphs() > 0 && card.replays() > replays + 10, "{name}");
        drop(cuda);
        assert_eq!(card.taken(), 0, "{name}: all memory is given back");
    }
}

#[test]
fn deterministic_logits_do_not_depend_on_the_batch() {
    let (_alone, _card) = card();
    for (name, spec, window) in models() {
        let (_folder, files) = open(&spec, window, 7);
        for instructions in Instructions::ALL.into_iter().filter(|it| it.is_available()) {
            let cpu =
                CpuOptions { instructions: Some(instructions), threads: 3, ..reference_options() };
            let mut cpu = CpuBackend::new(&files, &cpu).unwrap();
            let is_alike = determinism::differing(&mut cpu, spec.vocabulary) == 0;
            let promised = instructions <= Instructions::best_deterministic();
            assert!(is_alike || !promised, "{name}, {instructions}");
        }
        let kept = tempfile::tempdir().unwrap();
        let differing = |kernels| {
            let options = CudaOptions { kernels, ..options(kept.path()) };
            determinism::differing(
                &mut CudaBackend::new(&files, &options).unwrap(),
                spec.vocabulary,
            )
        };
        assert_eq!(differing(KernelChoice::Deterministic), 0, "{name}");
        if name == "qwen2" {
            assert!(differing(KernelChoice::Own) > 0, "the test sees a difference");
        }
    }
}

#[test]
fn machine_code_is_compiled_once_and_kept() {
    let (_alone, _card) = card();
    let (_folder, files) = open(&models()[0].1, None, 1);
    let kept = tempfile::tempdir().unwrap();
    let notes = || CudaBackend::new(&files, &options(kept.path())).unwrap().notes().join("; ");
    let first = notes();
    assert!(first.contains("kernels compiled by nvrtc13.0, kept as"), "{first}");
    assert!(first.contains("libcublasLt.so) was not found: own kernels multiply"), "{first}");
    assert!(notes().contains("kernels from"));
    // A truncated file is compiled again.
    let path = std::fs::read_dir(kept.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&path, "torn").unwrap();
    assert!(notes().contains("kernels compiled by"));
    // The file is intact, but no machine code, so the driver refuses it.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.splice(32.., *b"something else");
    let sum = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &bytes[32..]);
    bytes[..32].copy_from_slice(sum.as_ref());
    std::fs::write(&path, bytes).unwrap();
    let error = CudaBackend::new(&files, &options(kept.path())).err().unwrap().to_string();
    assert!(error.starts_with("the device cannot be set up: cuModuleLoadData failed"), "{error}");
}

#[test]
fn oversized_model_is_refused_before_loading() {
    let (_alone, card) = card();
    let kept = tempfile::tempdir().unwrap();
    let (_folder, files) = open(&models()[0].1, None, 1);
    card.set_memory(256 << 10);
    let error = CudaBackend::new(&files, &options(kept.path())).err().unwrap();
    assert!(matches!(error, CudaError::Memory { .. }), "{error}");
    assert!(error.leaves_the_cpu());
    assert_eq!(card.taken(), 0);
    // Enough memory for the weights, and for hardly anything else.
    card.set_memory(2 << 20);
    let error = CudaBackend::new(&files, &options(kept.path())).err().unwrap();
    assert!(matches!(error, CudaError::Memory { .. } | CudaError::Driver(_)), "{error}");
    assert_eq!(card.taken(), 0, "what was taken is given back");
}

#[test]
fn model_without_kernels_is_refused() {
    let (_alone, _card) = card();
    let kept = tempfile::tempdir().unwrap();
    let (_folder, files) = open(&ModelSpec::tiny(), None, 1);
    let error = CudaBackend::new(&files, &options(kept.path())).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the CUDA kernels do not serve this model: its head_dim is 16; 32, 64 and 128 are supported"
    );
}

#[test]
fn unknown_device_index_is_refused() {
    let (_alone, _card) = card();
    let kept = tempfile::tempdir().unwrap();
    let (_folder, files) = open(&models()[0].1, None, 1);
    let options = CudaOptions { device: DeviceSelector::Index(4), ..options(kept.path()) };
    let error = CudaBackend::new(&files, &options).err().unwrap();
    assert!(matches!(error, CudaError::NoDevice(NoDevice::NotFound { .. })), "{error}");
}

#[test]
fn failed_launch_is_a_device_error() {
    let (_alone, card) = card();
    let kept = tempfile::tempdir().unwrap();
    let (_folder, files) = open(&models()[0].1, None, 1);
    let mut cuda = CudaBackend::new(&files, &options(kept.path())).unwrap();
    let tokens = text(5, 1, 512);
    let blocks = scattered(5, 0, BLOCKS);
    let spans = [span(&tokens, 0, &blocks, LogitRows::Last)];
    let mut output = StepOutput::default();
    cuda.step(&StepPlan::logits(&spans), &mut output).unwrap();
    for launches in [0, 3] {
        card.fail_after(launches);
        let fault = cuda.step(&StepPlan::logits(&spans), &mut output).unwrap_err();
        assert_eq!(
            fault.to_string(),
            "cuLaunchKernelEx failed: the stand-in says no (CUDA_ERROR_LAUNCH_FAILED)"
        );
    }
    card.fail_after(0);
    cuda.copy_block(BlockCopy { from: 1, to: 2 });
    card.fail_after(-1);
    let fault = cuda.step(&StepPlan::logits(&spans), &mut output).unwrap_err();
    assert!(matches!(fault, BackendError::Device(_)), "a copy's fault is told at the next step");
}

/// The device's own tool is a script here, which prints a given figure.
#[test]
fn meter_check_detects_a_differing_device_tool() {
    let (_alone, _card) = card();
    let folder = tempfile::tempdir().unwrap();
    let tool = folder.path().join("tool");
    let told = |percent: &str| {
        let script = format!("#!/bin/sh\nwhile sleep 0.02; do echo {percent}; done\n");
        std::fs::write(&tool, script).unwrap();
        std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let nvidia_smi = Some(tool.clone());
        meter::run(&options::Options { is_quick: true, nvidia_smi, ..Default::default() }).unwrap()
    };
    let phases = |told: &serde_json::Value| told["phases"].as_array().unwrap().clone();
    let half = told("50");
    assert_eq!(half["passed"], false, "it cannot be half in every phase: {half:#}");
    for phase in phases(&half) {
        assert_eq!(phase["tool"], 0.5, "{phase:#}");
        assert!(phase["busy_ns"].as_u64() <= phase["wall_ns"].as_u64(), "{phase:#}");
        let apart = (phase["metered"].as_f64().unwrap() - 0.5).abs();
        assert_eq!(phase["passed"], apart <= 0.1, "{phase:#}");
    }
    assert!(phases(&told("no devices were found"))[0]["why_no_tool"].is_string());
}

/// The check that a machine with a GPU will run. Here it proves that the check runs,
/// and that it reports a device with wrong results.
#[test]
fn gpu_check_runs_and_detects_wrong_results() {
    let (_alone, card) = card();
    let options = options::Options { is_quick: true, ..Default::default() };
    // Without the vendor's library, its products are computed by our own kernels.
    let mut titles = compare::titles(&options);
    assert_eq!(titles.len(), 4 * models().len());
    // Another test compares every family; here the check itself is tested, in each way.
    titles.retain(|title| title.starts_with("qwen2/"));
    let agree = |case: &str| Ok(compare::run(&options, case).ok_or("no such case")?);
    let told = cases::gather("agree", &titles, &options, agree).unwrap();
    assert_eq!(told["passed"], true, "{told:#}");
    let agreed = told;
    assert!(compare::run(&options, "qwen2/nothing").is_none());
    let measure = |case: &str| Ok(speed::run(&options, case).ok_or("no such case")?);
    let told = cases::gather("speed", &speed::titles(&options), &options, measure).unwrap();
    assert_eq!(told["passed"], true, "{told:#}");
    for shape in told["cases"].as_array().unwrap() {
        assert!(shape["copy_bytes_per_second"].as_f64() > Some(0.0), "{shape:#}");
        assert_eq!(shape["decode"].as_array().map(Vec::len), Some(2));
        let rate = |of: &serde_json::Value| of["tokens_per_device_second"].as_f64();
        assert!(shape["decode"].as_array().unwrap().iter().all(|one| rate(one) > Some(0.0)));
        assert!(rate(&shape["prefill"]) > Some(0.0), "{shape:#}");
        let decode = shape["decode"].as_array().unwrap().iter();
        for measured in decode.chain([&shape["prefill"]]) {
            let operations = measured["operations"].as_array().unwrap();
            let names: Vec<_> = operations.iter().map(|it| it["operation"].as_str()).collect();
            assert_eq!(names.len(), 11, "{names:?}");
            assert!(operations.iter().all(|it| it["device_ns"].as_u64() > Some(0)));
        }
    }
    let attributed = attribution::run(&options, "tiny").unwrap();
    let mix = &attributed["mixes"][0];
    for shares in ["attributed_ns", "shapley_ns"] {
        let sequences = mix["sequences"].as_array().unwrap().iter();
        let sum: f64 = sequences.map(|one| one[shares].as_f64().unwrap()).sum();
        assert!((sum / mix["step_ns"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{mix:#}");
    }
    // The first adds 3 to nothing and 5 to the second; the second adds 5 and 7.
    assert_eq!(attribution::shapley(&[0.0, 3.0, 5.0, 10.0]), [4.0, 6.0]);
    let attributed = serde_json::json!({ "cases": [attributed] });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("attribution.json"), attributed.to_string()).unwrap();
    std::fs::write(folder.path().join("speed.json"), told.to_string()).unwrap();
    std::fs::write(folder.path().join("agree.json"), agreed.to_string()).unwrap();
    let peer = r#"{"measured":{"tiny":{"decode":[{"batch":3,"tokens_per_second":7777.0}]}}}"#;
    std::fs::write(folder.path().join("peer.json"), peer).unwrap();
    let tables = table::run(folder.path()).unwrap();
    // Five ways of a shape, each at two batch sizes and with a prompt; and each
    // operation of the three ways that use graphs with overlapping launches.
    let rows = |start: &str| tables.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(rows("| tiny"), 5 * 3 + 3 * 3 * 11 + 1, "{tables}");
    assert_eq!(rows("| qwen2/deterministic/overlapping, own products | true |"), 1, "{tables}");
    assert_eq!(rows("| tiny, own products, no graphs | 3 |"), 1, "{tables}");
    assert_eq!(tables.matches("| 7777 | ").count(), 5, "the peer's batch is compared: {tables}");
    assert_eq!(rows("| tiny, three |"), 1, "{tables}");
    card.fail_after(400);
    let told = cases::gather("agree", &titles[..1], &options, agree).unwrap();
    card.fail_after(-1);
    assert_eq!(told["passed"], false, "a card that fails does not pass: {told:#}");
    assert_eq!(card.taken(), 0, "all memory is given back");
}
