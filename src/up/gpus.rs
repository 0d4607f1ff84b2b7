//! The identity of a GPU, from its name in the config. No driver is asked here: a
//! faulty driver must fail the worker and not `up`.

use tollgate_config::DeviceSelector;

/// Returns true if both names mean the same GPU as far as names tell. An index and
/// a UUID never match, because only the driver knows the index of a UUID.
pub fn are_same(one: &DeviceSelector, other: &DeviceSelector) -> bool {
    one == other || digits(one).is_some_and(|digits| Some(digits) == self::digits(other))
}

/// Returns the UUID in a name, in the driver's spelling. The worker's process gets
/// it in `CUDA_VISIBLE_DEVICES`: a process sees a MIG slice only if the slice is
/// named there, and sees no whole GPU that has slices.
pub fn identity(device: &DeviceSelector) -> Option<String> {
    let (kind, _) = name(device)?.split_once('-')?;
    let kind = KINDS.into_iter().find(|known| known.eq_ignore_ascii_case(kind))?;
    let mut written = kind.to_owned();
    for (index, digit) in digits(device)?.chars().enumerate() {
        // The driver groups the digits as 8-4-4-4-12.
        if matches!(index, 0 | 8 | 12 | 16 | 20) {
            written.push('-');
        }
        written.push(digit);
    }
    Some(written)
}

/// Returns the 32 hexadecimal digits of the UUID in a name, in lower case.
fn digits(device: &DeviceSelector) -> Option<String> {
    let lower = name(device)?.to_ascii_lowercase();
    let rest = lower.strip_prefix("gpu-").or(lower.strip_prefix("mig-")).unwrap_or(&lower);
    let digits: String = rest.chars().filter(|&c| c != '-').collect();
    let is_whole = digits.len() == DIGITS && digits.chars().all(|c| c.is_ascii_hexdigit());
    is_whole.then_some(digits)
}

fn name(device: &DeviceSelector) -> Option<&str> {
    match device {
        DeviceSelector::Cuda(Some(name)) => Some(name),
        DeviceSelector::Auto | DeviceSelector::Cpu | DeviceSelector::Cuda(None) => None,
    }
}

/// The prefixes of the UUIDs of whole GPUs and of MIG slices.
const KINDS: [&str; 2] = ["GPU", "MIG"];
/// Hexadecimal digits of a UUID.
const DIGITS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: &str = "cuda:MIG-00010203-0405-0607-0809-0a0b0c0d0e0f";

    fn device(text: &str) -> DeviceSelector {
        text.parse().expect("a device")
    }

    #[test]
    fn gpu_identity_has_drivers_spelling() {
        for (text, expected) in [
            (SLICE, Some("MIG-00010203-0405-0607-0809-0a0b0c0d0e0f")),
            ("cuda:mig-000102030405060708090A0B0C0D0E0F", Some(&SLICE[5..])),
            (
                "cuda:GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
                Some("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
            ),
            // Without a prefix only the driver can tell a GPU from a slice.
            ("cuda:00010203-0405-0607-0809-0a0b0c0d0e0f", None),
            ("cuda:GPU-0001", None),
            ("cuda:0", None),
            ("cuda:one", None),
            ("cuda", None),
            ("auto", None),
            ("cpu", None),
        ] {
            assert_eq!(identity(&device(text)).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn same_gpu_matches_by_any_spelling() {
        for (one, other, expected) in [
            (SLICE, SLICE, true),
            (SLICE, "cuda:000102030405060708090A0B0C0D0E0F", true),
            (SLICE, "cuda:MIG-10010203-0405-0607-0809-0a0b0c0d0e0f", false),
            ("cuda:1", "cuda:1", true),
            ("cuda:1", "cuda:0", false),
            ("cuda:1", SLICE, false),
            ("auto", "auto", true),
        ] {
            assert_eq!(are_same(&device(one), &device(other)), expected, "{one} {other}");
        }
    }
}
