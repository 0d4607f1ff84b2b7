//! The message that a start prints: addresses, paths, and commands that work when
//! pasted.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use tollgate_config::Config;
use tollgate_gateway::Gateway;

/// The addresses that the gateway listens on.
#[derive(Clone, Copy)]
pub struct Addresses {
    /// The address for callers.
    pub public: SocketAddr,
    /// The address for admins, probes and metrics.
    pub admin: SocketAddr,
}

/// Prints the message. The last line begins with `ready`.
pub fn print(config: &Config, addresses: Addresses, gateway: &Gateway) -> Result<()> {
    let Addresses { public, admin } = addresses;
    let mut text = String::new();
    let version = env!("CARGO_PKG_VERSION");
    writeln!(text, "tollgate {version}   gateway https://{public}   admin https://{admin}")?;
    for report in gateway.worker_reports() {
        let models: Vec<&str> = report.models.iter().map(|name| name.as_str()).collect();
        match report.device {
            Some(device) => {
                let models = models.join(", ");
                writeln!(text, "  worker {}   {device}   model {models}", report.name)?;
            }
            // A worker on another machine may come later.
            None => writeln!(text, "  worker {}   not connected yet", report.name)?,
        }
    }
    let data = config.data();
    let own_certificate = config.gateway().tls.certificate.is_none();
    let ca = data.join("tls/ca.pem");
    write!(text, "  data {}", data.display())?;
    if own_certificate {
        write!(text, "   CA {}", ca.display())?;
    }
    if config.is_demo() {
        let key = data.join("demo.key");
        writeln!(text, "   key in {} (tenant demo)", key.display())?;
        if own_certificate {
            commands(&mut text, config, public, &ca, &key)?;
        }
    } else {
        writeln!(text)?;
        if let Some(tenant) = config.tenants().next() {
            let count = config.tenants().count();
            let path = config.path().map(|path| format!(" --config {}", path.display()));
            let options = path.unwrap_or_default() + &data_option(config);
            let create = format!("{} keys create{options} --tenant {}", program(), tenant.name);
            writeln!(text, "  tenants: {count}   make a key: {create}")?;
        }
    }
    if own_certificate {
        let ca = ca.display();
        writeln!(text, "  for SDKs: SSL_CERT_FILE={ca} (Python), NODE_EXTRA_CA_CERTS={ca} (Node)")?;
    }
    writeln!(text, "ready https://{public} admin https://{admin}")?;
    // One write keeps the message together, and the flush shows it to a waiting
    // script.
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes())?;
    Ok(output.flush()?)
}

fn commands(
    text: &mut String,
    config: &Config,
    public: SocketAddr,
    ca: &Path,
    key: &Path,
) -> std::fmt::Result {
    let Some(model) = config.models().next() else { return Ok(()) };
    let (model, ca, key) = (&model.name, ca.display(), key.display());
    let question = "What is a rate limit?";
    let mut options = String::new();
    if public.to_string() != "127.0.0.1:8443" {
        write!(options, " --url https://{public}")?;
    }
    options.push_str(&data_option(config));
    writeln!(text, "  try: {} chat{options} \"{question}\"", program())?;
    writeln!(
        text,
        "   or: curl --cacert {ca} https://{public}/v1/chat/completions \
         -H \"authorization: Bearer $(cat {key})\" -H \"content-type: application/json\" \
         -d '{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"{question}\"}}]}}'"
    )
}

/// Returns the option that names the data folder, if it is not the default.
fn data_option(config: &Config) -> String {
    match config.data() {
        data if data == Path::new("data") => String::new(),
        data => format!(" --data {}", data.display()),
    }
}

/// Returns the command that started this program. A path below `target` means that
/// cargo built it.
fn program() -> String {
    let started = std::env::args().next().unwrap_or_default();
    if started.starts_with("target/") { "cargo run --".to_owned() } else { started }
}
