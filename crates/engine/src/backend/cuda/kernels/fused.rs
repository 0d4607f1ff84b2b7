//! What the compilers of stand-ins for a card are told, in the kernels' own tests
//! and in those of whole models.

/// A card's compiler fuses products with sums; so does this one where the machine
/// can.
pub(super) fn fused() -> Vec<&'static str> {
    let mut options = vec!["-ffp-contract=fast"];
    #[cfg(target_arch = "x86_64")]
    options.extend(is_x86_feature_detected!("fma").then_some("-mfma"));
    options
}
