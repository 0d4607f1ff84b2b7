//! A temporary gateway: `tollgate up` as a child process on loopback, with a fresh
//! data folder that is removed at the end. Tests of limits and drills use it, so
//! that they affect no other gateway.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tollgate_config::Flags;
use tollgate_domain::{PlanName, TenantId};
use tollgate_gateway::auth::{KeyOptions, KeyStore, NewKey, Scopes};

use crate::common::{load, now};
use crate::data;

/// A running temporary gateway. Dropping it ends it.
pub struct OwnGateway {
    child: Child,
    folder: Folder,
    /// The address for callers: `https://127.0.0.1:PORT`.
    pub url: String,
    /// The address for admins, of the same form.
    pub admin_url: String,
    /// The secrets of each tenant's keys, in the order of the request.
    pub keys: BTreeMap<String, Vec<String>>,
}

/// Keys that a temporary gateway is created with.
#[derive(Clone, Debug)]
pub struct WantedKeys {
    /// The tenant of the keys.
    pub tenant: String,
    /// The number of keys.
    pub count: u32,
    /// The plan of each key, besides its tenant's.
    pub plan: Option<PlanName>,
}

/// Time that the gateway has to start. A large model is calibrated first.
const LONGEST_START: Duration = Duration::from_secs(300);

/// Time that the gateway has to end after SIGTERM.
const LONGEST_END: Duration = Duration::from_secs(20);

/// The file of the log, within the folder.
const LOG: &str = "log";

/// Lines of the log that an error at the start shows.
const SHOWN_LINES: usize = 12;

impl OwnGateway {
    /// Starts a gateway with `config` (TOML) and keys, and waits until it accepts
    /// requests.
    ///
    /// # Errors
    /// The config is invalid, or the gateway does not start. The error contains the
    /// last lines of the log.
    pub fn start(config: &str, wanted: &[WantedKeys]) -> Result<Self> {
        Self::start_prepared(config, wanted, |_| Ok(()))
    }

    /// Starts a gateway as [`Self::start`] does, after `prepare` has changed its new data
    /// folder.
    ///
    /// # Errors
    /// As [`Self::start`], or the error of `prepare`.
    pub fn start_prepared(
        config: &str,
        wanted: &[WantedKeys],
        prepare: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        let folder = Folder::make()?;
        let config_path = folder.0.join("tollgate.toml");
        fs::write(&config_path, config)?;
        let data = folder.0.join("data");
        let keys = make_keys(&config_path, &data, wanted)?;
        // After the keys, which make the data folder.
        prepare(&data)?;
        let log = folder.0.join(LOG);
        let program = std::env::current_exe().context("this program's own path")?;
        let mut child = Command::new(program)
            // Port 0 takes a free port, so that several of these gateways can run at
            // once.
            .args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .arg("--config")
            .arg(&config_path)
            .arg("--data")
            .arg(&data)
            // The child must not read the terminal's input.
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // A file: a pipe that nobody reads would fill up and block the child.
            .stderr(File::create(&log)?)
            .spawn()
            .context("cannot start a gateway")?;
        let ready = await_ready(&mut child);
        // From here on, dropping the value ends the child process.
        let mut gateway =
            Self { child, folder, url: String::new(), admin_url: String::new(), keys };
        match ready {
            Ok((url, admin_url)) => {
                gateway.url = url;
                gateway.admin_url = admin_url;
                Ok(gateway)
            }
            Err(error) => Err(error.context(last_lines(&log))),
        }
    }

    /// Returns the path of the gateway's CA certificate.
    pub fn ca(&self) -> PathBuf {
        self.folder.0.join("data/tls/ca.pem")
    }

    /// Returns the path of the log of the gateway and its workers.
    pub fn log(&self) -> PathBuf {
        self.folder.0.join(LOG)
    }

    /// Returns the process id of the gateway.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the process ids of the gateway's workers.
    pub fn workers(&self) -> Vec<u32> {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return Vec::new();
        };
        // The kernel lists children by thread, so all threads are asked.
        let children = tasks
            .filter_map(Result::ok)
            .filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let pids: Vec<String> = children.collect();
        pids.iter()
            .flat_map(|pids| pids.split_whitespace())
            .filter_map(|pid| pid.parse().ok())
            .collect()
    }

    /// Ends the gateway and waits for it.
    ///
    /// # Errors
    /// The gateway did not end in time, or ended with an error.
    #[expect(clippy::disallowed_methods, reason = "the wait for the process has a bound")]
    pub fn end(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let asked = Instant::now();
        while asked.elapsed() < LONGEST_END {
            if let Some(status) = self.child.try_wait()? {
                if status.success() {
                    return Ok(());
                }
                bail!("the gateway ended with {status}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the gateway did not end within {} s", LONGEST_END.as_secs())
    }
}

impl Drop for OwnGateway {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        // Without the wait, the ended child would stay as a zombie.
        let _ = self.child.wait();
    }
}

fn make_keys(
    config: &Path,
    data: &Path,
    wanted: &[WantedKeys],
) -> Result<BTreeMap<String, Vec<String>>> {
    let flags = Flags { data: Some(data.to_owned()), ..Flags::default() };
    let config = load(Some(config.to_owned()), flags)?;
    data::make(data)?;
    let store = KeyStore::open(data).context("cannot open the keys of the temporary gateway")?;
    let mut keys = BTreeMap::new();
    for WantedKeys { tenant, count, plan } in wanted {
        let name = TenantId::new(tenant)?;
        if config.tenant(&name).is_none() {
            bail!("no tenant {tenant} in the gateway's config");
        }
        let made: Result<Vec<String>> = (0..*count)
            .map(|_| Ok(make_key(&store, &name, plan.clone(), None)?.secret.expose().to_owned()))
            .collect();
        keys.insert(tenant.clone(), made?);
    }
    Ok(keys)
}

/// Creates a key of `tenant`.
///
/// # Errors
/// The key cannot be stored.
pub fn make_key(
    store: &KeyStore,
    tenant: &TenantId,
    plan: Option<PlanName>,
    expires_in: Option<Duration>,
) -> Result<NewKey> {
    let after = |span: Duration| now().0.saturating_add(span.as_nanos() as u64);
    let options = KeyOptions {
        label: "a test of limits".to_owned(),
        scopes: Scopes::everything(),
        plan,
        expires: expires_in.map(|span| tollgate_domain::UtcTime(after(span))),
    };
    Ok(store.create(tenant, options, now())?)
}

/// Waits until the gateway is ready. Returns its addresses.
#[expect(clippy::disallowed_methods, reason = "the wait for the process has a bound")]
fn await_ready(child: &mut Child) -> Result<(String, String)> {
    let output = child.stdout.take().context("its output was piped")?;
    let (sender, lines) = sync_channel(64);
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // Later lines are read and dropped, so that the child never blocks on a
            // full pipe.
            let _ = sender.try_send(line);
        }
    });
    let until = Instant::now() + LONGEST_START;
    loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let words: Vec<&str> = line.split_whitespace().collect();
                // `banner::print` writes this line last, once requests succeed.
                if let ["ready", url, "admin", admin] = words[..] {
                    return Ok((url.to_owned(), admin.to_owned()));
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!("the gateway was not ready within {} s", LONGEST_START.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait()?;
                return Err(anyhow!("the gateway did not start ({status})"));
            }
        }
    }
}

fn last_lines(log: &Path) -> String {
    // An unreadable log must not hide the error that it would explain.
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
    format!("the last lines of its log:\n{}\n", last.join("\n"))
}

/// A temporary folder for its owner only. Dropping it removes the folder.
struct Folder(PathBuf);

impl Folder {
    fn make() -> Result<Self> {
        let within = std::env::temp_dir();
        // Process ids are reused, so an older folder may have the first names.
        for number in 0..1_000 {
            let path = within.join(format!("tollgate-own-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).context(format!("folder {}", path.display())),
            }
        }
        bail!("cannot create a folder in {}", within.display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that stays behind contains only keys of a gateway that is gone.
        let _ = fs::remove_dir_all(&self.0);
    }
}
