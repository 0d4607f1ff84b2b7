//! `tollgate loadtest`: sends open-loop load to a gateway, shows the progress, and
//! prints a report as a table and optionally as JSON. With `--scenario` it runs an
//! attack drill.

use std::fs::File;
use std::io::BufWriter;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tokio_util::sync::CancellationToken;
use tollgate_loadtest::client::{Protocol, Target};
use tollgate_loadtest::csv;
use tollgate_loadtest::prompts::{self, WordRange};
use tollgate_loadtest::{
    Arrivals, Finished, Load, Progress, Prompt, Prompts, Rates, Report, Spike, Tenant,
};

use crate::common::{self, demo_key, report, say};

mod drill;

/// Send open-loop load to a gateway, or run an attack drill.
///
/// With --scenario, honest tenants and attackers send requests together to a
/// gateway that is started for the drill, or to the gateway at --url. Exit code 0:
/// every expectation of the scenario held; 1: one was broken; 2: no verdict.
#[derive(clap::Args)]
pub struct LoadtestArguments {
    /// Run this scenario: the name of a built-in one, or a TOML file.
    #[arg(long, value_name = "NAME|FILE")]
    scenario: Option<String>,
    /// List the built-in scenarios.
    #[arg(long)]
    list: bool,
    /// Print the TOML of a built-in scenario, to write another one from it.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["scenario", "list"])]
    show: Option<String>,
    /// Show the reports of two earlier loads (--json) side by side, and send nothing.
    #[arg(long, num_args = 2, value_names = ["A.json", "B.json"])]
    #[arg(conflicts_with_all = ["scenario", "list", "show"])]
    compare: Vec<PathBuf>,
    /// Write the drill's report as a web page to FILE, and as JSON beside it.
    #[arg(long, value_name = "FILE.html", requires = "scenario")]
    report: Option<PathBuf>,
    /// The admin listener of the gateway at --url, to monitor its memory.
    #[arg(long, value_name = "URL", requires = "url")]
    admin_url: Option<String>,
    /// Allow attacks on this host, although it is not this machine. The host must
    /// be yours.
    #[arg(long, value_name = "HOST", requires = "url")]
    allow_remote: Option<String>,
    /// The gateway [default: https://127.0.0.1:8443; with --scenario, a temporary
    /// one].
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The data folder with the CA and the demo key.
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// The CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A sender with a name and a file with its API key (with --scenario, one key a
    /// line). Can be repeated [default: demo=DATA/demo.key].
    #[arg(long = "tenant", value_name = "NAME=KEYFILE")]
    tenants: Vec<String>,
    /// The model.
    #[arg(long, default_value = "tollgate-demo")]
    model: String,
    /// The requests a second, over all tenants: constant (5), a ramp from the start to
    /// the end (5..50), or steps of the same length (5,20,50).
    #[arg(long, value_name = "N|FROM..TO|N,N,...", default_value = "5")]
    rate: Rates,
    /// Another rate from second AT for FOR seconds, instead of that of --rate.
    #[arg(long, value_name = "RATE@AT+FOR", conflicts_with = "scenario")]
    spike: Option<Spike>,
    /// The number of seconds in which requests are sent.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// The distribution of the times between requests.
    #[arg(long, value_enum, default_value_t = Spacing::Poisson)]
    arrivals: Spacing,
    /// The percentage of requests with a streamed answer.
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    stream: u8,
    /// The prompt. Can be repeated; prompts are used in turn.
    #[arg(long, value_name = "TEXT", default_value = "What is a rate limit?")]
    prompt: Vec<String>,
    /// A file with one prompt a line, or with lines of JSON that have `prompt` or
    /// `messages`, and optionally `max_tokens`. The prompts are used in a random order.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "scenario"])]
    prompts: Option<PathBuf>,
    /// Random prompts of at least LOW and at most HIGH words, a new one for each
    /// request.
    #[arg(long, value_name = "LOW..HIGH", conflicts_with_all = ["prompt", "prompts", "scenario"])]
    prompt_words: Option<WordRange>,
    /// The largest number of tokens in an answer, unless a prompt has its own.
    #[arg(long, value_name = "N", default_value = "64")]
    max_tokens: NonZeroU32,
    /// The number of connections of each tenant.
    #[arg(long, value_name = "N", default_value = "4")]
    connections: NonZeroU32,
    /// The HTTP version.
    #[arg(long, value_enum, default_value_t = Wire::H2)]
    protocol: Wire,
    /// The largest number of requests in flight.
    #[arg(long, value_name = "N", default_value = "4096")]
    in_flight: NonZeroU32,
    /// The seconds after which an answer counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
    /// The random seed. The same seed sends the same requests at the same times
    /// [default: 1, or the scenario's].
    #[arg(long)]
    seed: Option<u64>,
    /// The number of random shapes (scenario random_shapes).
    #[arg(long, value_name = "N", requires = "scenario")]
    requests: Option<NonZeroU32>,
    /// Also write the report as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a line for each request, with its times, as CSV.
    #[arg(long, value_name = "FILE", conflicts_with = "scenario")]
    csv: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Spacing {
    Poisson,
    Uniform,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Wire {
    H1,
    H2,
}

impl LoadtestArguments {
    fn ca(&self) -> PathBuf {
        self.ca.clone().unwrap_or_else(|| self.data.join("tls/ca.pem"))
    }

    fn seed(&self) -> u64 {
        self.seed.unwrap_or(1)
    }
}

/// Runs the subcommand.
pub fn run(arguments: LoadtestArguments) -> ExitCode {
    if let Some(name) = &arguments.show {
        return common::exit(drill::show(name));
    }
    match &arguments.scenario {
        _ if arguments.list => common::exit(drill::list()),
        _ if !arguments.compare.is_empty() => common::exit(compare(&arguments.compare)),
        None => common::exit(send_load(&arguments)),
        Some(name) => drill::run(name, &arguments).unwrap_or_else(|error| {
            report(&error);
            ExitCode::from(drill::UNCLEAR)
        }),
    }
}

/// Sends the load and prints the report.
fn send_load(arguments: &LoadtestArguments) -> Result<()> {
    let load = load(arguments)?;
    // Several threads keep the client from being slower than the gateway that it
    // measures.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // Opened before the run, so that a mistake in the path loses no figures.
    let csv = arguments.csv.as_deref().map(create).transpose()?;
    let names: Vec<String> = load.tenants.iter().map(|tenant| tenant.name.clone()).collect();
    let Finished { report, samples } = runtime.block_on(send(load))?;
    say(report.to_string())?;
    if let Some((path, file)) = csv {
        let written = csv::write(BufWriter::new(file), &names, &samples);
        written.with_context(|| format!("could not write {}", path.display()))?;
    }
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&report).context("the report as JSON")?;
        std::fs::write(path, json)
            .with_context(|| format!("could not write {}", path.display()))?;
    }
    Ok(())
}

/// Prints the figures of two reports side by side.
fn compare(paths: &[PathBuf]) -> Result<()> {
    let [a, b] = paths else { bail!("--compare takes two reports") };
    let read = |path: &Path| -> Result<Report> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("could not read {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is not the report of a load", path.display()))
    };
    let table = tollgate_loadtest::compare(&read(a)?, &read(b)?);
    say(format!("A: {}\nB: {}\n\n{table}", a.display(), b.display()))
}

fn create(path: &Path) -> Result<(&Path, File)> {
    let file = File::create(path).with_context(|| format!("could not write {}", path.display()))?;
    Ok((path, file))
}

fn load(arguments: &LoadtestArguments) -> Result<Load> {
    Ok(Load {
        tenants: tenants(arguments)?,
        model: arguments.model.clone(),
        rates: arguments.rate.clone().with_spike(arguments.spike),
        duration: Duration::from_secs(arguments.seconds),
        arrivals: match arguments.arrivals {
            Spacing::Poisson => Arrivals::Poisson,
            Spacing::Uniform => Arrivals::Uniform,
        },
        stream_percent: arguments.stream,
        prompts: prompts(arguments)?,
        max_tokens: arguments.max_tokens,
        connections: arguments.connections,
        protocol: match arguments.protocol {
            Wire::H1 => Protocol::Http1,
            Wire::H2 => Protocol::Http2,
        },
        in_flight: arguments.in_flight,
        timeout: Duration::from_secs(arguments.timeout),
        seed: arguments.seed(),
    })
}

fn prompts(arguments: &LoadtestArguments) -> Result<Prompts> {
    if let Some(words) = arguments.prompt_words {
        return Ok(Prompts::Words(words));
    }
    Ok(Prompts::InTurn(match &arguments.prompts {
        Some(path) => prompts::read(path, arguments.seed())?,
        None => arguments.prompt.iter().map(|text| Prompt::text(text)).collect(),
    }))
}

fn tenants(arguments: &LoadtestArguments) -> Result<Vec<Tenant>> {
    let ca = arguments.ca();
    let url = arguments.url.as_deref().unwrap_or("https://127.0.0.1:8443");
    let given = if arguments.tenants.is_empty() {
        let key = demo_key(&arguments.data, "--tenant NAME=FILE")?;
        vec![format!("demo={}", key.display())]
    } else {
        arguments.tenants.clone()
    };
    given
        .iter()
        .map(|tenant| {
            let (name, file) = name_and_file(tenant)?;
            let key = std::fs::read_to_string(file).with_context(|| format!("key {file}"))?;
            let target = Target::new(url, &ca, &key)?;
            Ok(Tenant { name: name.to_owned(), target })
        })
        .collect()
}

fn name_and_file(tenant: &str) -> Result<(&str, &str)> {
    match tenant.split_once('=') {
        Some(both) => Ok(both),
        None => bail!("--tenant {tenant:?} is not NAME=KEYFILE"),
    }
}

/// Runs the load with a progress line. Ctrl-C ends the load early, with a report.
async fn send(load: Load) -> Result<Finished> {
    let progress = Arc::new(Progress::default());
    let stop = CancellationToken::new();
    let seconds = load.duration.as_secs();
    let sending = tollgate_loadtest::run(load, Arc::clone(&progress), stop.clone());
    // Each round of the loop below polls the same future.
    tokio::pin!(sending);
    let bar = ProgressBar::new(seconds);
    let style = "{elapsed_precise} [{bar:30}] {msg}";
    bar.set_style(ProgressStyle::with_template(style).context("the progress line")?);
    let mut tick = tokio::time::interval(Duration::from_millis(250));
    loop {
        tokio::select! {
            finished = &mut sending => {
                bar.finish_and_clear();
                return Ok(finished?);
            }
            // After the cancel the load still ends in order, so the loop waits for
            // its report.
            _ = tokio::signal::ctrl_c() => stop.cancel(),
            _ = tick.tick() => {
                bar.set_position(bar.elapsed().as_secs());
                bar.set_message(line(&progress));
            }
        }
    }
}

fn line(progress: &Progress) -> String {
    let Progress { due, done, refused, failed } = progress;
    let [due, done, refused, failed] =
        [due, done, refused, failed].map(|counter| counter.load(Ordering::Relaxed));
    // Saturating: the counters are read one after the other, so a request may end
    // between the first read and the last.
    let under_way = due.saturating_sub(done + refused + failed);
    format!("{due} due, {done} answered, {refused} refused, {failed} failed, {under_way} under way")
}
