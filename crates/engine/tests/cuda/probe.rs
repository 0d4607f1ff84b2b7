//! Each way in which a machine has no GPU for us, and the sentence that says
//! so. Every case is a process of its own, in which the loader finds just the
//! stand-ins of that case.

use std::path::Path;
use std::process::Command;

use super::standin::{self, Part};
use tollgate_engine::backend::cuda::{DeviceSelector, build_kernels, describe_device};

/// What a child's process says of the device that it finds.
fn said(libraries: &Path, child: &str) -> String {
    said_where(libraries, child, None)
}

/// What it says where the driver is to show it one device alone.
fn said_where(libraries: &Path, child: &str, shown: Option<&str>) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("probe::{child}"), "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", libraries)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(shown.map(|uuid| ("CUDA_VISIBLE_DEVICES", uuid)))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = text.lines().find_map(|line| line.split_once(SAYS));
    said.unwrap_or_else(|| panic!("{text}{errors}")).1.to_owned()
}

/// Stands between what the test program prints and what the child says.
const SAYS: &str = "it says: ";

#[test]
#[ignore = "a child of the tests below"]
fn child_looks() {
    match describe_device(&DeviceSelector::First) {
        Ok(device) => println!("{SAYS}{} {} {}", device.class, device.name, device.uuid),
        Err(absent) => println!("{SAYS}{absent}"),
    }
}

#[test]
#[ignore = "a child of the tests below"]
fn child_looks_for_another() {
    let wanted = "GPU-ffffffff-0000-0000-0000-000000000000".parse().unwrap();
    println!("{SAYS}{}", describe_device(&wanted).unwrap_err());
}

#[test]
#[ignore = "a child of the tests below"]
fn child_looks_for_a_slice() {
    let wanted = "MIG-ffffffff-0000-0000-0000-000000000000".parse().unwrap();
    println!("{SAYS}{}", describe_device(&wanted).unwrap_err());
}

#[test]
#[ignore = "a child of the tests below"]
fn child_compiles() {
    let out = tempfile::tempdir().unwrap();
    match build_kernels(out.path(), &[]) {
        Ok(files) => println!("{SAYS}{} files", files.len()),
        Err(error) => println!("{SAYS}{error}"),
    }
}

/// A folder with a driver of these macros and nothing else.
fn driver(case: &str, macros: &[&str]) -> std::path::PathBuf {
    let folder = standin::folder(&format!("probe-{case}"));
    let macros: Vec<&str> = macros.iter().copied().chain(["NO_KERNELS"]).collect();
    standin::build(Part::Driver, &folder, &macros);
    folder
}

#[test]
fn every_way_to_have_no_device_has_its_sentence() {
    let too_old = "driver R570 (CUDA 12.8) or newer is needed";
    let uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";
    for (case, macros, expected) in [
        ("whole", &[][..], format!("h100 Emulated H100 {uuid}")),
        (
            "slice",
            &["SLICES"],
            "emulated-h100-mig-1g-10gb Emulated H100 MIG 1g.10gb \
             MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"
                .to_owned(),
        ),
        (
            "symbol",
            &["NO_ELAPSED"],
            format!(
                "the NVIDIA driver is too old: its library lacks cuEventElapsedTime_v2, {too_old}"
            ),
        ),
        (
            "old",
            &["VERSION=12040"],
            format!("the NVIDIA driver is too old: it speaks CUDA 12.4, {too_old}"),
        ),
        ("none", &["INIT=100"], "the NVIDIA driver finds no device".to_owned()),
        ("empty", &["DEVICES=0"], "the NVIDIA driver finds no device".to_owned()),
        (
            "mismatch",
            &["INIT=803"],
            "the NVIDIA driver does not start: cuInit failed: system has unsupported display \
             driver / cuda driver combination (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"
                .to_owned(),
        ),
        (
            "busy",
            &["BUSY"],
            format!(
                "Emulated H100 ({uuid}) is busy: another process uses it exclusively, or an \
                 administrator closed it"
            ),
        ),
        (
            "generation",
            &["MAJOR=7", "NAME=\"Tesla V100\""],
            "Tesla V100 has compute capability 7.0; 8.0 or newer is needed".to_owned(),
        ),
    ] {
        assert_eq!(said(&driver(case, macros), "child_looks"), expected, "{case}");
    }
}

#[test]
fn a_machine_without_a_driver_says_so() {
    let nothing = tempfile::tempdir().unwrap();
    // A machine that tests with a GPU has a driver to find.
    let said = said(nothing.path(), "child_looks");
    let absent = "no NVIDIA driver on this machine: libcuda.so.1 was not found";
    assert!(said == absent || Path::new("/dev/nvidiactl").exists(), "{said}");
}

#[test]
fn a_device_that_is_not_there_is_told_from_those_that_are() {
    let said = said(&driver("two", &["DEVICES=2"]), "child_looks_for_another");
    assert_eq!(
        said,
        "there is no CUDA device cuda:GPU-ffffffff-0000-0000-0000-000000000000; there are \
         0 GPU-00010203-0405-0607-0809-0a0b0c0d0e0f (Emulated H100), \
         1 GPU-10111213-1415-1617-1819-1a1b1c1d1e1f (Emulated H100)"
    );
}

/// As the driver has it: of several slices a process sees the first, or the
/// one that is named to it.
#[test]
fn a_process_sees_the_slice_that_is_named_to_it() {
    let folder = driver("slices", &["SLICES", "DEVICES=2"]);
    let [first, second] =
        ["MIG-00010203-0405-0607-0809-0a0b0c0d0e0f", "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f"];
    let found = |uuid| format!("emulated-h100-mig-1g-10gb Emulated H100 MIG 1g.10gb {uuid}");
    assert_eq!(said(&folder, "child_looks"), found(first));
    assert_eq!(said_where(&folder, "child_looks", Some(second)), found(second));
    assert_eq!(
        said(&folder, "child_looks_for_a_slice"),
        format!(
            "there is no CUDA device cuda:MIG-ffffffff-0000-0000-0000-000000000000; there are 0 \
             {first} (Emulated H100 MIG 1g.10gb): of slices a process sees the one in \
             CUDA_VISIBLE_DEVICES alone"
        )
    );
    let absent = "MIG-ffffffff-0000-0000-0000-000000000000";
    assert_eq!(
        said_where(&folder, "child_looks_for_a_slice", Some(absent)),
        format!(
            "there is no CUDA device cuda:{absent}; `nvidia-smi -L` lists those that there are"
        )
    );
}

#[test]
fn a_compiler_that_fails_is_quoted() {
    let folder = standin::folder("probe-compiler");
    standin::build(Part::Compiler, &folder, &["FAILS=1"]);
    let said = said(&folder, "child_compiles");
    assert_eq!(
        said,
        "no kernels for sm_80: kernels.cu does not compile (NVRTC_ERROR_COMPILATION): \
         line 1: this compiler is out of sorts"
    );
    let folder = standin::folder("probe-compiles");
    standin::build(Part::Compiler, &folder, &[]);
    assert_eq!(self::said(&folder, "child_compiles"), "2 files");
}
