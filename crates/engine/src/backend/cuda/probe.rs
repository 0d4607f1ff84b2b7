//! The search for a CUDA device that this process can use, and a sentence for people if
//! there is none.
//!
//! The checks are ordered by cost: the library and each of its symbols, the driver and
//! its version, the list of devices and the selected one. Only then is a context
//! opened, which fails if another process uses the device exclusively.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tollgate_domain::DeviceClass;

use super::driver::{self, Context, DriverFault, Library, LibraryFault, ListedDevice};

/// The selection of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceSelector {
    /// The first device that can be used.
    #[default]
    First,
    /// The device with this index in the driver's list.
    Index(u32),
    /// The device with this UUID, with or without `GPU-` or `MIG-`.
    Uuid(String),
}

/// The reasons why no CUDA device can be used. Each is a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoDevice {
    /// No driver is installed.
    #[error("no NVIDIA driver on this machine: libcuda.so.1 was not found")]
    NoDriver,
    /// The driver's library lacks a symbol.
    #[error(
        "the NVIDIA driver is too old: its library lacks {0}, \
         driver R570 (CUDA 12.8) or newer is needed"
    )]
    Symbol(&'static str),
    /// The driver's CUDA version is too old.
    #[error(
        "the NVIDIA driver is too old: it speaks CUDA {}.{}, driver R570 (CUDA 12.8) or newer \
         is needed", .0 / 1000, .0 % 1000 / 10
    )]
    Old(u32),
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: {0}")]
    DriverStart(DriverFault),
    /// The driver lists no devices.
    #[error("the NVIDIA driver finds no device")]
    NoneListed,
    /// The selected device is not in the list.
    #[error("there is no CUDA device {wanted}; {}", listing(wanted, .listed))]
    NotFound {
        /// The device that was selected.
        wanted: DeviceSelector,
        /// Index, UUID and name of each device that this process may see.
        listed: Vec<String>,
    },
    /// The device's generation is older than the kernels support.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or newer is needed")]
    Generation {
        /// Product name of the device.
        name: String,
        /// Major number of its compute capability.
        major: u32,
        /// Minor number of its compute capability.
        minor: u32,
    },
    /// Another process uses the device exclusively, or an administrator has closed it.
    #[error(
        "{name} ({uuid}) is busy: another process uses it exclusively, or an administrator closed it"
    )]
    Busy {
        /// Product name of the device.
        name: String,
        /// UUID of the device.
        uuid: String,
    },
    /// The device cannot be opened for another reason.
    #[error("{name} ({uuid}) cannot be found: {fault}")]
    Unusable {
        /// Product name of the device.
        name: String,
        /// UUID of the device.
        uuid: String,
        /// The error of the driver.
        fault: DriverFault,
    },
}

/// A device that was opened.
pub(super) struct OpenedDevice {
    pub(super) context: Arc<Context>,
    pub(super) listed: ListedDevice,
}

/// Opens the selected device.
pub(super) fn open(wanted: &DeviceSelector) -> Result<OpenedDevice, NoDevice> {
    let listed = find(wanted)?;
    let (name, uuid) = (listed.name.clone(), listed.uuid.clone());
    match Context::open(listed.ordinal) {
        Ok(context) => Ok(OpenedDevice { context, listed }),
        Err(fault) if fault.is_busy() => Err(NoDevice::Busy { name, uuid }),
        Err(fault) => Err(NoDevice::Unusable { name, uuid, fault }),
    }
}

/// Finds the selected device without opening it.
pub(super) fn find(wanted: &DeviceSelector) -> Result<ListedDevice, NoDevice> {
    driver::check(Library::Driver).map_err(|fault| match fault {
        LibraryFault::Missing(_) => NoDevice::NoDriver,
        LibraryFault::Symbol { symbol, .. } => NoDevice::Symbol(symbol),
    })?;
    // Without any device some drivers fail to start instead of listing none.
    let does_not_start = |fault: DriverFault| match fault.is_no_device() {
        true => no_device_listed(wanted),
        false => NoDevice::DriverStart(fault),
    };
    driver::start().map_err(does_not_start)?;
    let version = driver::version().map_err(does_not_start)?;
    if version < OLDEST_DRIVER {
        return Err(NoDevice::Old(version));
    }
    choose(driver::devices().map_err(does_not_start)?, wanted)
}

fn choose(listed: Vec<ListedDevice>, wanted: &DeviceSelector) -> Result<ListedDevice, NoDevice> {
    if listed.is_empty() {
        return Err(no_device_listed(wanted));
    }
    let found = listed.iter().find(|device| match wanted {
        DeviceSelector::First => is_new_enough(device),
        DeviceSelector::Index(index) => device.ordinal == *index,
        DeviceSelector::Uuid(uuid) => plain(&device.uuid) == plain(uuid),
    });
    let device = match (found, wanted) {
        (Some(device), _) => device,
        // All devices are too old. The first one serves as the example in the error
        // below.
        (None, DeviceSelector::First) => &listed[0],
        (None, _) => {
            let describe = |it: &ListedDevice| format!("{} {} ({})", it.ordinal, it.uuid, it.name);
            let listed = listed.iter().map(describe).collect();
            return Err(NoDevice::NotFound { wanted: wanted.clone(), listed });
        }
    };
    if !is_new_enough(device) {
        let (major, minor) = device.capability;
        return Err(NoDevice::Generation { name: device.name.clone(), major, minor });
    }
    Ok(device.clone())
}

/// Returns the error for an empty list. A device that was selected by its UUID may
/// exist but be hidden from this process.
fn no_device_listed(wanted: &DeviceSelector) -> NoDevice {
    match wanted {
        DeviceSelector::Uuid(_) => NoDevice::NotFound { wanted: wanted.clone(), listed: vec![] },
        DeviceSelector::First | DeviceSelector::Index(_) => NoDevice::NoneListed,
    }
}

fn is_new_enough(device: &ListedDevice) -> bool {
    device.capability >= OLDEST_GENERATION
}

/// Returns a UUID without its prefix, without dashes and in lower case.
fn plain(uuid: &str) -> String {
    let digits = uuid.trim_start_matches("GPU-").trim_start_matches("MIG-");
    digits.chars().filter(char::is_ascii_hexdigit).collect::<String>().to_ascii_lowercase()
}

/// Returns the end of the sentence about a device that was not found: the devices that
/// are listed, and why others may be hidden.
fn listing(wanted: &DeviceSelector, listed: &[String]) -> String {
    if listed.is_empty() {
        return "`nvidia-smi -L` lists those that there are".to_owned();
    }
    let there_are = format!("there are {}", listed.join(", "));
    match wanted {
        DeviceSelector::Uuid(uuid) if uuid.to_ascii_uppercase().starts_with("MIG-") => {
            format!("{there_are}: of slices a process sees the one in CUDA_VISIBLE_DEVICES alone")
        }
        _ => there_are,
    }
}

/// Returns the class of a device from its product name. Times of devices of one class
/// are comparable, and limits are set by class.
#[expect(clippy::expect_used, reason = "the fallback is a constant that follows the rules")]
pub fn device_class(name: &str) -> DeviceClass {
    let lower = name.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let known = CLASSES.iter().find(|(word, _)| words.contains(word)).map(|(_, class)| *class);
    let class = match known {
        Some(class) if !driver::is_slice(name) => class.to_owned(),
        // A slice has only a part of the device's speed, so it must not share the class
        // of whole devices.
        _ => slug(&lower),
    };
    // A name without letters or digits gives no class of its own.
    DeviceClass::new(&class)
        .unwrap_or_else(|_| DeviceClass::new("gpu").expect("a short name of letters is a class"))
}

/// Joins the letters and digits of a name with single dashes, without the maker's name.
fn slug(lower: &str) -> String {
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    let words: Vec<&str> =
        words.filter(|word| !word.is_empty() && !["nvidia", "geforce"].contains(word)).collect();
    words.join("-").chars().take(LONGEST_CLASS).collect()
}

impl FromStr for DeviceSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        match plain(text).len() {
            32 => Ok(Self::Uuid(text.to_owned())),
            _ => Err(format!("{text:?} is neither a device's index nor its UUID")),
        }
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("cuda"),
            Self::Index(index) => write!(f, "cuda:{index}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
        }
    }
}

/// The oldest CUDA version of a driver: 12.8, which came with R570. cudarc reads the
/// times of events in the way of this version.
const OLDEST_DRIVER: u32 = 12_080;
/// The oldest compute capability: the first with bf16 matrix units and asynchronous
/// copies.
const OLDEST_GENERATION: (u32, u32) = (8, 0);
const LONGEST_CLASS: usize = 32;
/// Words of product names, and the class of each.
const CLASSES: [(&str, &str); 15] = [
    ("gh200", "gh200"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("h800", "h800"),
    ("h20", "h20"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("b100", "b100"),
    ("a100", "a100"),
    ("a800", "a800"),
    ("a30", "a30"),
    ("a10", "a10"),
    ("a40", "a40"),
    ("l40s", "l40s"),
    ("l4", "l4"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(ordinal: u32, capability: (u32, u32)) -> ListedDevice {
        ListedDevice {
            ordinal,
            name: format!("Card {ordinal}"),
            uuid: format!("GPU-0000000{ordinal}-0000-0000-0000-000000000000"),
            capability,
            multiprocessors: 1,
        }
    }

    #[test]
    fn selector_chooses_by_index_and_uuid() {
        let all = || vec![listed(0, (7, 5)), listed(1, (9, 0)), listed(2, (9, 0))];
        let chosen = |wanted| choose(all(), &wanted).map(|device| device.ordinal);
        assert_eq!(chosen(DeviceSelector::First), Ok(1), "the first that can be used");
        assert_eq!(chosen(DeviceSelector::Index(2)), Ok(2));
        assert_eq!(chosen("00000002000000000000000000000000".parse().unwrap()), Ok(2));
        assert_eq!(chosen("gpu-00000001-0000-0000-0000-000000000000".parse().unwrap()), Ok(1));
        assert!(matches!(
            chosen(DeviceSelector::Index(0)),
            Err(NoDevice::Generation { major: 7, .. })
        ));
        assert_eq!(
            chosen(DeviceSelector::Index(3)).unwrap_err().to_string(),
            "there is no CUDA device cuda:3; there are \
             0 GPU-00000000-0000-0000-0000-000000000000 (Card 0), \
             1 GPU-00000001-0000-0000-0000-000000000000 (Card 1), \
             2 GPU-00000002-0000-0000-0000-000000000000 (Card 2)"
        );
        let slice: DeviceSelector = "MIG-00000009-0000-0000-0000-000000000000".parse().unwrap();
        assert_eq!(
            choose(vec![listed(0, (9, 0))], &slice).unwrap_err().to_string(),
            "there is no CUDA device cuda:MIG-00000009-0000-0000-0000-000000000000; there are \
             0 GPU-00000000-0000-0000-0000-000000000000 (Card 0): of slices a process sees the \
             one in CUDA_VISIBLE_DEVICES alone"
        );
        assert_eq!(
            choose(vec![], &slice).unwrap_err().to_string(),
            "there is no CUDA device cuda:MIG-00000009-0000-0000-0000-000000000000; \
             `nvidia-smi -L` lists those that there are"
        );
        assert_eq!(choose(vec![], &DeviceSelector::First), Err(NoDevice::NoneListed));
        assert!(matches!(
            choose(vec![listed(0, (7, 5))], &DeviceSelector::First),
            Err(NoDevice::Generation { .. })
        ));
        for nonsense in ["", "h100", "GPU-12", "-1"] {
            assert!(nonsense.parse::<DeviceSelector>().is_err(), "{nonsense}");
        }
    }

    #[test]
    fn product_names_map_to_classes() {
        for (name, class) in [
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-80gb-hbm3-mig-1g-10gb"),
            ("Ünknown", "nknown"),
            ("", "gpu"),
        ] {
            assert_eq!(device_class(name).as_str(), class, "{name}");
        }
    }
}
