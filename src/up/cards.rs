//! What the name of a device says about its card. No driver is asked here: a
//! fault in one is a worker's, and `up` outlives it.

use tollgate_config::DeviceSelector;

/// Whether both names mean the same card, as far as names tell. Which of them
/// has which place in the driver's list is not known.
pub fn are_one(one: &DeviceSelector, other: &DeviceSelector) -> bool {
    one == other || digits(one).is_some_and(|digits| Some(digits) == self::digits(other))
}

/// The identity in a name, as the driver writes it. A worker on such a device
/// is shown that one alone: of slices a process sees only the one that is
/// named to it, and where there are slices it sees no whole card.
pub fn identity(device: &DeviceSelector) -> Option<String> {
    let (kind, _) = name(device)?.split_once('-')?;
    let kind = KINDS.into_iter().find(|known| known.eq_ignore_ascii_case(kind))?;
    let mut written = kind.to_owned();
    for (index, digit) in digits(device)?.chars().enumerate() {
        if matches!(index, 0 | 8 | 12 | 16 | 20) {
            written.push('-');
        }
        written.push(digit);
    }
    Some(written)
}

/// The digits of an identity, with or without what kind of device it is of.
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

/// A whole card, and a slice of one.
const KINDS: [&str; 2] = ["GPU", "MIG"];
/// Hexadecimal, of an identity's sixteen bytes.
const DIGITS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: &str = "cuda:MIG-00010203-0405-0607-0809-0a0b0c0d0e0f";

    fn device(text: &str) -> DeviceSelector {
        text.parse().expect("a device")
    }

    #[test]
    fn an_identity_is_written_as_the_driver_writes_it() {
        for (text, expected) in [
            (SLICE, Some("MIG-00010203-0405-0607-0809-0a0b0c0d0e0f")),
            ("cuda:mig-000102030405060708090A0B0C0D0E0F", Some(&SLICE[5..])),
            (
                "cuda:GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
                Some("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
            ),
            // Of a card or of a slice: the driver's list says which.
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
    fn one_card_has_several_names() {
        for (one, other, expected) in [
            (SLICE, SLICE, true),
            (SLICE, "cuda:000102030405060708090A0B0C0D0E0F", true),
            (SLICE, "cuda:MIG-10010203-0405-0607-0809-0a0b0c0d0e0f", false),
            ("cuda:1", "cuda:1", true),
            ("cuda:1", "cuda:0", false),
            ("cuda:1", SLICE, false),
            ("auto", "auto", true),
        ] {
            assert_eq!(are_one(&device(one), &device(other)), expected, "{one} {other}");
        }
    }
}
