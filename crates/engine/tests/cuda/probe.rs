//! Tests of the sentence for each reason why a machine has no usable GPU. Every case is
//! a process of its own, in which the loader finds only the stand-ins of that case.

use std::path::Path;
use std::process::Command;

use super::standin::{self, Part};
use tollgate_engine::backend::cuda::{DeviceSelector, build_kernels, describe_device};

/// Returns the output of a child process about the device that it finds.
fn said(libraries: &Path, child: &str) -> String {
    said_where(libraries, child, None)
}

/// Returns the same output if the driver may show the child only one device.
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

/// The mark that separates the child's line from the test program's own output.
const SAYS: &str = "it says: ";

#[test]
#[ignore = "a child of the tests below"]
fn child_describes_the_device() {
    match describe_device(&DeviceSelector::First) {
        Ok(device) => println!("{SAYS}{} {} {}", device.class, device.name, device.uuid),
        Err(absent) => println!("{SAYS}{absent}"),
    }
}

#[test]
#[ignore = "a child of the tests below"]
fn child_describes_another_device() {
    let wanted = "GPU-ffffffff-0000-0000-0000-000000000000".parse().unwrap();
    println!("{SAYS}{}", describe_device(&wanted).unwrap_err());
}

#[test]
#[ignore = "a child of the tests below"]
fn child_describes_a_slice() {
    let wanted = "MIG-ffffffff-0000-0000-0000-000000000000".parse().unwrap();
    println!("{SAYS}{}", describe_device(&wanted).unwrap_err());
}

#[test]
#[ignore = "a child of the tests below"]
fn child_compiles_kernels() {
    let out = tempfile::tempdir().unwrap();
    match build_kernels(out.path(), &[]) {
        Ok(files) => println!("{SAYS}{} files", files.len()),
        Err(error) => println!("{SAYS}{error}"),
    }
}

/// Builds a folder with a driver of these macros and nothing else.
fn driver(case: &str, macros: &[&str]) -> std::path::PathBuf {
    let folder = standin::folder(&format!("probe-{case}"));
    let macros: Vec<&str> = macros.iter().copied().chain(["NO_KERNELS"]).collect();
    standin::build(Part::Driver, &folder, &macros);
    folder
}

#[test]
fn every_missing_device_reason_has_a_sentence() {
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
        assert_eq!(said(&driver(case, macros), "child_describes_the_device"), expected, "{case}");
    }
}

#[test]
fn missing_driver_is_reported() {
    let nothing = tempfile::tempdir().unwrap();
    // A test machine with a GPU has a real driver, which would be found.
    let said = said(nothing.path(), "child_describes_the_device");
    let absent = "no NVIDIA driver on this machine: libcuda.so.1 was not found";
    assert!(said == absent || Path::new("/dev/nvidiactl").exists(), "{said}");
}

#[test]
fn unknown_device_error_lists_the_devices() {
    let said = said(&driver("two", &["DEVICES=2"]), "child_describes_another_device");
    assert_eq!(
        said,
        "there is no CUDA device cuda:GPU-ffffffff-0000-0000-0000-000000000000; there are \
         0 GPU-00010203-0405-0607-0809-0a0b0c0d0e0f (Emulated H100), \
         1 GPU-10111213-1415-1617-1819-1a1b1c1d1e1f (Emulated H100)"
    );
}

/// The driver shows a process one slice: the first, or the one that is named to it.
#[test]
fn process_sees_the_slice_named_to_it() {
    let folder = driver("slices", &["SLICES", "DEVICES=2"]);
    let [first, second] =
        ["MIG-00010203-0405-0607-0809-0a0b0c0d0e0f", "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f"];
    let found = |uuid| format!("emulated-h100-mig-1g-10gb Emulated H100 MIG 1g.10gb {uuid}");
    assert_eq!(said(&folder, "child_describes_the_device"), found(first));
    assert_eq!(said_where(&folder, "child_describes_the_device", Some(second)), found(second));
    assert_eq!(
        said(&folder, "child_describes_a_slice"),
        format!(
            "there is no CUDA device cuda:MIG-ffffffff-0000-0000-0000-000000000000; there are 0 \
             {first} (Emulated H100 MIG 1g.10gb): of slices a process sees the one in \
             CUDA_VISIBLE_DEVICES alone"
        )
    );
    let absent = "MIG-ffffffff-0000-0000-0000-000000000000";
    assert_eq!(
        said_where(&folder, "child_describes_a_slice", Some(absent)),
        format!(
            "there is no CUDA device cuda:{absent}; `nvidia-smi -L` lists those that there are"
        )
    );
}

#[test]
fn compiler_errors_are_quoted() {
    let folder = standin::folder("probe-compiler");
    standin::build(Part::Compiler, &folder, &["FAILS=1"]);
    let said = said(&folder, "child_compiles_kernels");
    assert_eq!(
        said,
        "no kernels for sm_80: kernels.cu does not compile (NVRTC_ERROR_COMPILATION): \
         line 1: this compiler is out of sorts"
    );
    let folder = standin::folder("probe-compiles");
    standin::build(Part::Compiler, &folder, &[]);
    assert_eq!(self::said(&folder, "child_compiles_kernels"), "2 files");
}
