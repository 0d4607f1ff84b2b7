//! A gateway of one's own: `tollgate up` as a child on loopback, with a fresh
//! data folder that goes when it goes. What is tried on it harms nobody.

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

/// A running gateway; dropping it ends it.
pub struct OwnGateway {
    child: Child,
    folder: Folder,
    /// `https://127.0.0.1:PORT`
    pub url: String,
    /// The same for admins.
    pub admin_url: String,
    /// The secrets of each tenant's keys, in the order in which they were asked for.
    pub keys: BTreeMap<String, Vec<String>>,
}

/// Keys that a gateway has from its start.
#[derive(Clone, Debug)]
pub struct WantedKeys {
    /// Whose.
    pub tenant: String,
    /// How many.
    pub count: u32,
}

/// A model of some size is calibrated at the first start.
const LONGEST_START: Duration = Duration::from_secs(300);

/// How long it may take to end by itself.
const LONGEST_END: Duration = Duration::from_secs(20);

/// Lines of its log that are shown when it does not start.
const SHOWN_LINES: usize = 12;

impl OwnGateway {
    /// Starts one with `config` (TOML) and these keys, and waits until requests
    /// will succeed.
    ///
    /// # Errors
    /// The config is wrong, or the gateway does not start; its last words are
    /// part of the error.
    pub fn start(config: &str, wanted: &[WantedKeys]) -> Result<Self> {
        let folder = Folder::make()?;
        let config_path = folder.0.join("tollgate.toml");
        fs::write(&config_path, config)?;
        let data = folder.0.join("data");
        let keys = make_keys(&config_path, &data, wanted)?;
        let log = folder.0.join("log");
        let program = std::env::current_exe().context("this program's own path")?;
        let mut child = Command::new(program)
            .args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .arg("--config")
            .arg(&config_path)
            .arg("--data")
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .context("a gateway could not be started")?;
        let ready = await_ready(&mut child);
        // From here on dropping it ends the child.
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

    /// The CA that it made.
    pub fn ca(&self) -> PathBuf {
        self.folder.0.join("data/tls/ca.pem")
    }

    /// Its worker processes.
    pub fn workers(&self) -> Vec<u32> {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return Vec::new();
        };
        let children = tasks
            .filter_map(Result::ok)
            .filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let pids: Vec<String> = children.collect();
        pids.iter()
            .flat_map(|pids| pids.split_whitespace())
            .filter_map(|pid| pid.parse().ok())
            .collect()
    }

    /// Asks it to end and waits.
    ///
    /// # Errors
    /// It did not end in time, or not well.
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
        // Already gone is as good as killed.
        let _ = self.child.kill();
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
    let store = KeyStore::open(data).context("the keys of a gateway of our own")?;
    let mut keys = BTreeMap::new();
    for WantedKeys { tenant, count } in wanted {
        let name = TenantId::new(tenant)?;
        if config.tenant(&name).is_none() {
            bail!("no tenant {tenant} in the gateway's config");
        }
        let made: Result<Vec<String>> = (0..*count)
            .map(|_| Ok(make_key(&store, &name, None, None)?.secret.expose().to_owned()))
            .collect();
        keys.insert(tenant.clone(), made?);
    }
    Ok(keys)
}

/// Makes a key of `tenant`.
///
/// # Errors
/// The store does not take it.
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

/// Its addresses, once it says that it is ready.
fn await_ready(child: &mut Child) -> Result<(String, String)> {
    let output = child.stdout.take().context("its output was piped")?;
    let (sender, lines) = sync_channel(64);
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // Later lines are read and dropped, so that the child never blocks.
            let _ = sender.try_send(line);
        }
    });
    let until = Instant::now() + LONGEST_START;
    loop {
        match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let words: Vec<&str> = line.split_whitespace().collect();
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
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
    format!("its last words were:\n{}\n", last.join("\n"))
}

/// A fresh folder for its owner only, removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn make() -> Result<Self> {
        let within = std::env::temp_dir();
        for number in 0..1_000 {
            let path = within.join(format!("tollgate-own-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).context(format!("folder {}", path.display())),
            }
        }
        bail!("no folder could be made in {}", within.display())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left behind, it holds keys that no gateway knows any more.
        let _ = fs::remove_dir_all(&self.0);
    }
}
