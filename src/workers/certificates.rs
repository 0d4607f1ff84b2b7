//! Certificates for gateways and workers, by an authority of their own.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use tollgate_domain::{ClusterName, GatewayName, UtcDay, WorkerName};
use tollgate_wire::LinkOwner;

use crate::common::{now, say};

/// Make an authority and certificates for gateways and workers.
///
/// Writes ca.pem and ca.key into the folder, unless both exist, and NAME.pem and
/// NAME.key for each gateway and worker. Keep ca.key off the machines of workers: it
/// can make a gateway's certificate.
#[derive(clap::Args)]
pub struct CertificatesArguments {
    /// The folder to write to.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The cluster's name, as in the key cluster.name of the config.
    #[arg(long, value_name = "NAME")]
    cluster: ClusterName,
    /// A gateway. Each gateway needs a certificate of its own.
    #[arg(long = "gateway", value_name = "NAME")]
    gateways: Vec<GatewayName>,
    /// A worker, by its name in [cluster.workers].
    #[arg(long = "worker", value_name = "NAME")]
    workers: Vec<WorkerName>,
    /// Days until the certificates expire.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3_650))]
    days: u32,
}

/// Days until the authority expires.
const AUTHORITY_DAYS: u32 = 3_650;
/// The mode of a private key: only its owner may read it.
const SECRET: u32 = 0o600;
const PUBLIC: u32 = 0o644;

/// Makes the files and prints their paths.
///
/// # Errors
/// A file exists already or cannot be written, or a name cannot be a file's name.
pub fn make(arguments: &CertificatesArguments) -> Result<()> {
    let CertificatesArguments { out, cluster, gateways, workers, days } = arguments;
    let gateways = gateways.iter().map(|name| (name.as_str(), LinkOwner::Gateway(name.clone())));
    let workers = workers.iter().map(|name| (name.as_str(), LinkOwner::Worker(name.clone())));
    let owners: Vec<(&str, LinkOwner)> = gateways.chain(workers).collect();
    if owners.is_empty() {
        bail!("name at least one --gateway or --worker");
    }
    if cluster.as_str().contains(['/', ':']) {
        bail!("the cluster's name must not contain / or :");
    }
    // Every name is checked before the first file is written.
    for (index, (name, _)) in owners.iter().enumerate() {
        if name.contains(['/', ':']) || *name == "ca" {
            bail!("{name:?} cannot be the name of a file; use letters, digits, . _ and -");
        }
        if owners[..index].iter().any(|(other, _)| other == name) {
            bail!("the name {name} is given twice");
        }
        for path in [out.join(format!("{name}.pem")), out.join(format!("{name}.key"))] {
            if path.exists() {
                bail!("{} exists; remove it to make a new one", path.display());
            }
        }
    }
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let issuer = authority(out, cluster)?;
    let mut lines = format!("authority    {}\n", out.join("ca.pem").display());
    for (name, owner) in &owners {
        let uri = owner.uri(cluster);
        let (certificate, key) = (out.join(format!("{name}.pem")), out.join(format!("{name}.key")));
        let pair = KeyPair::generate()?;
        let signed = leaf(name, owner, &uri, *days)?.signed_by(&pair, &issuer)?;
        // The key first: a certificate without its key would be of no use.
        write(&key, &pair.serialize_pem(), SECRET)?;
        write(&certificate, &signed.pem(), PUBLIC)?;
        lines.push_str(&format!("certificate  {}   {uri}\n", certificate.display()));
    }
    say(lines)
}

/// Reads the authority of the folder, or makes one.
fn authority(folder: &Path, cluster: &ClusterName) -> Result<Issuer<'static, KeyPair>> {
    let (certificate, key) = (folder.join("ca.pem"), folder.join("ca.key"));
    match (certificate.exists(), key.exists()) {
        (true, true) => {
            let read = |path: &Path| {
                fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
            };
            let pair = KeyPair::from_pem(&read(&key)?)
                .with_context(|| format!("{} is no private key", key.display()))?;
            Issuer::from_ca_cert_pem(&read(&certificate)?, pair)
                .with_context(|| format!("{} is no certificate", certificate.display()))
        }
        (false, false) => {
            let pair = KeyPair::generate()?;
            let mut params = params(&format!("tollgate cluster {cluster}"), AUTHORITY_DAYS);
            // No authority below this one: it signs gateways and workers only.
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let signed = params.self_signed(&pair)?;
            write(&key, &pair.serialize_pem(), SECRET)?;
            write(&certificate, &signed.pem(), PUBLIC)?;
            Ok(Issuer::new(params, pair))
        }
        (true, false) => bail!("{} is missing: without it nothing can be signed", key.display()),
        (false, true) => bail!("{} is missing; it belongs to ca.key", certificate.display()),
    }
}

fn leaf(name: &str, owner: &LinkOwner, uri: &str, days: u32) -> Result<CertificateParams> {
    let mut params = params(name, days);
    params.subject_alt_names = vec![SanType::URI(uri.try_into()?)];
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // A worker only listens and a gateway only connects, so neither certificate passes for the
    // other.
    params.extended_key_usages = vec![match owner {
        LinkOwner::Worker(_) => ExtendedKeyUsagePurpose::ServerAuth,
        LinkOwner::Gateway(_) => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Returns parameters that are valid from yesterday, for machines with a late clock.
#[expect(clippy::expect_used, reason = "a civil date has a month up to 12 and a day up to 31")]
fn params(name: &str, days: u32) -> CertificateParams {
    let date = |UtcDay(day)| {
        let (year, month, day) = UtcDay(day).civil();
        date_time_ymd(
            i32::try_from(year).unwrap_or(9_999),
            u8::try_from(month).expect("1 to 12"),
            u8::try_from(day).expect("1 to 31"),
        )
    };
    let UtcDay(today) = now().day();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date(UtcDay(today.saturating_sub(1)));
    params.not_after = date(UtcDay(today.saturating_add(days)));
    params
}

/// Writes a new file.
fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    OpenOptions::new()
        .write(true)
        // Another run may have made the file since the check, and its key may be in use.
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
