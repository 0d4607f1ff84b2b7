//! Is there a CUDA device for us, and if not, why not: one sentence.
//!
//! Cheapest first, and nothing is taken until it is certain: the library and
//! each of its symbols, the driver and its age, the devices and the one that
//! was asked for. Only then is a context opened, which fails where another
//! process has the device for itself.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tollgate_domain::DeviceClass;

use super::driver::{self, Context, DriverFault, Library, LibraryFault, Listed};

/// Which device is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// The first that can be used.
    #[default]
    First,
    /// By its place in the driver's list.
    Index(u32),
    /// By its identity, with or without `GPU-` or `MIG-`.
    Uuid(String),
}

/// Why there is no CUDA device for us: each a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    /// No driver is installed.
    #[error("no NVIDIA driver on this machine: libcuda.so.1 was not found")]
    NoDriver,
    /// The driver's library lacks something that is called.
    #[error(
        "the NVIDIA driver is too old: its library lacks {0}, \
         driver R570 (CUDA 12.8) or newer is needed"
    )]
    Symbol(&'static str),
    /// The driver speaks a version of CUDA that is too old.
    #[error(
        "the NVIDIA driver is too old: it speaks CUDA {}.{}, driver R570 (CUDA 12.8) or newer \
         is needed", .0 / 1000, .0 % 1000 / 10
    )]
    Old(u32),
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: {0}")]
    DriverStart(DriverFault),
    /// The driver drives nothing.
    #[error("the NVIDIA driver finds no device")]
    NoDevice,
    /// There are devices, and not the one that was asked for.
    #[error("there is no CUDA device {wanted}; {}", listing(wanted, .listed))]
    NotFound {
        /// What was asked for.
        wanted: Wanted,
        /// Index, identity and name of each that this process may see.
        listed: Vec<String>,
    },
    /// The device is of a generation for which there are no kernels.
    #[error("{name} has compute capability {major}.{minor}; 8.0 or newer is needed")]
    Generation {
        /// The device.
        name: String,
        /// Its capability.
        major: u32,
        /// The rest of it.
        minor: u32,
    },
    /// Another process has it for itself, or an administrator has closed it.
    #[error("{name} ({uuid}) is busy: another process has it for itself, or it is closed")]
    Busy {
        /// The device.
        name: String,
        /// Its identity.
        uuid: String,
    },
    /// The device cannot be opened for another reason.
    #[error("{name} ({uuid}) cannot be opened: {fault}")]
    Unusable {
        /// The device.
        name: String,
        /// Its identity.
        uuid: String,
        /// What the driver said.
        fault: DriverFault,
    },
}

/// A device that was opened.
pub(super) struct Found {
    pub(super) context: Arc<Context>,
    pub(super) listed: Listed,
}

/// Opens the device that is wanted.
pub(super) fn open(wanted: &Wanted) -> Result<Found, Absent> {
    let listed = find(wanted)?;
    let (name, uuid) = (listed.name.clone(), listed.uuid.clone());
    match Context::open(listed.ordinal) {
        Ok(context) => Ok(Found { context, listed }),
        Err(fault) if fault.is_busy() => Err(Absent::Busy { name, uuid }),
        Err(fault) => Err(Absent::Unusable { name, uuid, fault }),
    }
}

/// Finds the device that is wanted, and takes nothing of it.
pub(super) fn find(wanted: &Wanted) -> Result<Listed, Absent> {
    driver::check(Library::Driver).map_err(|fault| match fault {
        LibraryFault::Missing(_) => Absent::NoDriver,
        LibraryFault::Symbol { symbol, .. } => Absent::Symbol(symbol),
    })?;
    let does_not_start = |fault: DriverFault| match fault.is_no_device() {
        true => nothing_is_seen(wanted),
        false => Absent::DriverStart(fault),
    };
    driver::start().map_err(does_not_start)?;
    let version = driver::version().map_err(does_not_start)?;
    if version < OLDEST_DRIVER {
        return Err(Absent::Old(version));
    }
    choose(driver::devices().map_err(does_not_start)?, wanted)
}

fn choose(listed: Vec<Listed>, wanted: &Wanted) -> Result<Listed, Absent> {
    if listed.is_empty() {
        return Err(nothing_is_seen(wanted));
    }
    let found = listed.iter().find(|device| match wanted {
        Wanted::First => is_new_enough(device),
        Wanted::Index(index) => device.ordinal == *index,
        Wanted::Uuid(uuid) => plain(&device.uuid) == plain(uuid),
    });
    let device = match (found, wanted) {
        (Some(device), _) => device,
        // All are too old: any of them says so below.
        (None, Wanted::First) => &listed[0],
        (None, _) => {
            let describe = |it: &Listed| format!("{} {} ({})", it.ordinal, it.uuid, it.name);
            let listed = listed.iter().map(describe).collect();
            return Err(Absent::NotFound { wanted: wanted.clone(), listed });
        }
    };
    if !is_new_enough(device) {
        let (major, minor) = device.capability;
        return Err(Absent::Generation { name: device.name.clone(), major, minor });
    }
    Ok(device.clone())
}

/// A device by its identity may be the only one that this process may see.
fn nothing_is_seen(wanted: &Wanted) -> Absent {
    match wanted {
        Wanted::Uuid(_) => Absent::NotFound { wanted: wanted.clone(), listed: vec![] },
        Wanted::First | Wanted::Index(_) => Absent::NoDevice,
    }
}

fn is_new_enough(device: &Listed) -> bool {
    device.capability >= OLDEST_GENERATION
}

/// An identity without prefix, dashes and case.
fn plain(uuid: &str) -> String {
    let digits = uuid.trim_start_matches("GPU-").trim_start_matches("MIG-");
    digits.chars().filter(char::is_ascii_hexdigit).collect::<String>().to_ascii_lowercase()
}

/// What there is instead, and why there may be more.
fn listing(wanted: &Wanted, listed: &[String]) -> String {
    if listed.is_empty() {
        return "`nvidia-smi -L` lists those that there are".to_owned();
    }
    let there_are = format!("there are {}", listed.join(", "));
    match wanted {
        Wanted::Uuid(uuid) if uuid.to_ascii_uppercase().starts_with("MIG-") => {
            format!("{there_are}: of slices a process sees the one in CUDA_VISIBLE_DEVICES alone")
        }
        _ => there_are,
    }
}

/// The class of a device by its maker's name: devices of one class have
/// comparable time, and limits are set by class.
pub fn device_class(name: &str) -> DeviceClass {
    let lower = name.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let known = CLASSES.iter().find(|(word, _)| words.contains(word)).map(|(_, class)| *class);
    let class = match known {
        Some(class) if !driver::is_slice(name) => class.to_owned(),
        _ => slug(&lower),
    };
    DeviceClass::new(&class)
        .unwrap_or_else(|_| DeviceClass::new("gpu").expect("a short name of letters is a class"))
}

/// Letters and digits of a name, with single dashes between, makers left out.
fn slug(lower: &str) -> String {
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    let words: Vec<&str> =
        words.filter(|word| !word.is_empty() && !["nvidia", "geforce"].contains(word)).collect();
    words.join("-").chars().take(LONGEST_CLASS).collect()
}

impl FromStr for Wanted {
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

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("cuda"),
            Self::Index(index) => write!(f, "cuda:{index}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
        }
    }
}

/// CUDA 12.8, which came with driver R570: the first whose events are read as
/// cudarc reads them.
const OLDEST_DRIVER: u32 = 12_080;
/// The first generation with bf16 in its matrix units and asynchronous copies.
const OLDEST_GENERATION: (u32, u32) = (8, 0);
const LONGEST_CLASS: usize = 32;
/// A word of a device's name, and its class.
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

    fn listed(ordinal: u32, capability: (u32, u32)) -> Listed {
        Listed {
            ordinal,
            name: format!("Card {ordinal}"),
            uuid: format!("GPU-0000000{ordinal}-0000-0000-0000-000000000000"),
            capability,
            multiprocessors: 1,
        }
    }

    #[test]
    fn chooses_by_place_and_identity() {
        let all = || vec![listed(0, (7, 5)), listed(1, (9, 0)), listed(2, (9, 0))];
        let chosen = |wanted| choose(all(), &wanted).map(|device| device.ordinal);
        assert_eq!(chosen(Wanted::First), Ok(1), "the first that can be used");
        assert_eq!(chosen(Wanted::Index(2)), Ok(2));
        assert_eq!(chosen("00000002000000000000000000000000".parse().unwrap()), Ok(2));
        assert_eq!(chosen("gpu-00000001-0000-0000-0000-000000000000".parse().unwrap()), Ok(1));
        assert!(matches!(chosen(Wanted::Index(0)), Err(Absent::Generation { major: 7, .. })));
        assert_eq!(
            chosen(Wanted::Index(3)).unwrap_err().to_string(),
            "there is no CUDA device cuda:3; there are \
             0 GPU-00000000-0000-0000-0000-000000000000 (Card 0), \
             1 GPU-00000001-0000-0000-0000-000000000000 (Card 1), \
             2 GPU-00000002-0000-0000-0000-000000000000 (Card 2)"
        );
        let slice: Wanted = "MIG-00000009-0000-0000-0000-000000000000".parse().unwrap();
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
        assert_eq!(choose(vec![], &Wanted::First), Err(Absent::NoDevice));
        assert!(matches!(
            choose(vec![listed(0, (7, 5))], &Wanted::First),
            Err(Absent::Generation { .. })
        ));
        for nonsense in ["", "h100", "GPU-12", "-1"] {
            assert!(nonsense.parse::<Wanted>().is_err(), "{nonsense}");
        }
    }

    #[test]
    fn names_become_classes() {
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
