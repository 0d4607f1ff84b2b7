//! Compiler options of the device emulators, both in the kernels' own tests and in
//! tests of whole models.

/// Returns options that fuse products with sums, as a GPU's compiler does, if the
/// machine can.
pub(super) fn fused() -> Vec<&'static str> {
    let mut options = vec!["-ffp-contract=fast"];
    #[cfg(target_arch = "x86_64")]
    options.extend(is_x86_feature_detected!("fma").then_some("-mfma"));
    options
}
