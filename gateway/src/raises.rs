//! The raises in force: higher limits of tenants for a bounded time. A file of the data
//! folder keeps them over restarts.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tollgate_config::{Config, RaisedLimits};
use tollgate_domain::{TenantId, UtcTime};

/// A higher value of one limit of one tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RaisedLimit {
    #[schemars(with = "String")]
    pub(crate) tenant: TenantId,
    /// The key of the limit in a plan.
    pub(crate) limit: String,
    /// The value, as a plan has it.
    pub(crate) value: Value,
    /// The end (Unix, UTC).
    #[schemars(with = "u64")]
    #[serde(rename = "until_ns")]
    pub(crate) until: UtcTime,
    #[schemars(with = "u64")]
    #[serde(rename = "since_ns")]
    pub(crate) since: UtcTime,
    /// The admin that raised the limit.
    pub(crate) actor: String,
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RaiseFile {
    raises: Vec<RaisedLimit>,
}

/// The file of raises cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RaiseFileError {
    /// The file cannot be read or written.
    #[error("{}: cannot be read or written", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// The text is none of this program.
    #[error(
        "{}: is damaged; delete the file to go on without the raised limits in it",
        path.display()
    )]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The mistake in the text.
        #[source]
        source: serde_json::Error,
    },
}

/// Reads the raises in the data folder `data`.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub(crate) fn read(data: &Path) -> Result<Vec<RaisedLimit>, RaiseFileError> {
    let path = data.join(FILE);
    match fs::read(&path) {
        Ok(text) => match serde_json::from_slice(&text) {
            Ok(RaiseFile { raises }) => Ok(raises),
            Err(source) => Err(RaiseFileError::Damaged { path, source }),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(RaiseFileError::File { path, source }),
    }
}

/// Replaces the raises in the data folder `data`, and returns once they are on the disk.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(data: &Path, raises: &[RaisedLimit]) -> Result<(), RaiseFileError> {
    let path = data.join(FILE);
    let draft = data.join(format!("{FILE}.new"));
    let text = serde_json::json!({ "raises": raises }).to_string();
    let written = File::create(&draft)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        // Atomic, so that a crash leaves the old file or the new one.
        .and_then(|()| fs::rename(&draft, &path))
        // The new name is on the disk only once the folder is.
        .and_then(|()| File::open(data)?.sync_all());
    written.map_err(|source| RaiseFileError::File { path, source })
}

/// Returns `config` with those of `raises` that hold at `now`.
pub(crate) fn apply(config: &Config, raises: &[RaisedLimit], now: UtcTime) -> Config {
    let holding = raises.iter().filter(|raise| raise.until > now);
    // A raise was checked when it was made. A later version may not know its limit any more.
    let parsed: Vec<_> =
        holding.filter_map(|raise| Some((&raise.tenant, raise.parsed()?))).collect();
    config.with_raises(parsed.iter().map(|(tenant, limits)| (*tenant, limits)))
}

/// Returns `raises` with `new` ones. A new raise replaces an earlier one of the same limit.
pub(crate) fn with(raises: &[RaisedLimit], new: &[RaisedLimit]) -> Vec<RaisedLimit> {
    let is_replaced = |old: &RaisedLimit| {
        new.iter().any(|new| new.tenant == old.tenant && new.limit == old.limit)
    };
    let kept = raises.iter().filter(|old| !is_replaced(old));
    kept.chain(new).cloned().collect()
}

/// Splits `raises` into those that fulfil `ends` and the others.
pub(crate) fn split(
    raises: &[RaisedLimit],
    ends: impl Fn(&RaisedLimit) -> bool,
) -> (Vec<RaisedLimit>, Vec<RaisedLimit>) {
    raises.iter().cloned().partition(ends)
}

impl RaisedLimit {
    /// Returns the limit in the form that a config takes.
    fn parsed(&self) -> Option<RaisedLimits> {
        let limits = Map::from_iter([(self.limit.clone(), self.value.clone())]);
        match RaisedLimits::from_json(&limits) {
            Ok(limits) => Some(limits),
            Err(error) => {
                let (tenant, limit) = (self.tenant.as_str(), self.limit.as_str());
                tracing::error!(
                    tenant,
                    limit,
                    error = &error as &dyn std::error::Error,
                    "a raise of a limit is ignored; the limit of the plan applies"
                );
                None
            }
        }
    }
}

/// The file in the data folder.
const FILE: &str = "raises.json";

/// The longest time of a raise. A higher limit for longer belongs into a plan.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// The largest number of raises at a time.
pub(crate) const MOST: usize = 10_000;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn raise(limit: &str, value: u64, until: u64) -> RaisedLimit {
        RaisedLimit {
            tenant: TenantId::new("acme").expect("a name"),
            limit: limit.to_owned(),
            value: json!(value),
            until: UtcTime(until),
            since: UtcTime(1),
            actor: "admin alice".to_owned(),
        }
    }

    #[test]
    fn raise_file_keeps_raises() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(read(folder.path()).expect("reads"), []);
        let raises = [raise("concurrent", 8, 5), raise("queued", 9, 6)];
        write(folder.path(), &raises).expect("writes");
        assert_eq!(read(folder.path()).expect("reads"), raises);
        fs::write(folder.path().join(FILE), "{\"raises\": [{}]}").expect("writes");
        let error = read(folder.path()).expect_err("damaged").to_string();
        assert!(error.contains("raises.json: is damaged; delete the file"), "{error}");
    }

    #[test]
    fn raises_hold_until_their_end() {
        let text = "[plans.team]\nconcurrent = 4\n[tenants.acme]\nplan = \"team\"\n";
        let config = Config::from_toml(Path::new("test.toml"), text).expect("a config");
        let raises = [raise("concurrent", 8, 5), raise("unknown", 8, 9)];
        let concurrent = |now: u64| {
            let raised = apply(&config, &raises, UtcTime(now));
            let acme = raised.tenant(&raises[0].tenant).expect("the tenant");
            acme.plan.as_ref().expect("a plan").limits.concurrent
        };
        assert_eq!((concurrent(4), concurrent(5)), (Some(8), Some(4)));
    }

    #[test]
    fn new_raise_replaces_earlier_of_limit() {
        let raises =
            with(&[raise("concurrent", 8, 5), raise("queued", 9, 6)], &[raise("queued", 3, 7)]);
        assert_eq!(raises, [raise("concurrent", 8, 5), raise("queued", 3, 7)]);
        let (ended, kept) = split(&raises, |raise| raise.until <= UtcTime(5));
        assert_eq!((ended.len(), kept), (1, vec![raise("queued", 3, 7)]));
    }
}
