//! The container image. The `Dockerfile` is built as it is, but the compiler is a script
//! that takes the binary under test, and the base has the C library of this machine alone.
//! The result runs read-only, as process 1 and as the image's user.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tollgate_loadtest::client::{Protocol, Target};

use crate::support::{self, get};

/// Settings for a container without a port of its own.
const CONFIG: &str = r#"
[gateway]
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"

[plans.open]
requests_per_minute = 1_000

[tenants.acme]
plan = "open"
"#;

/// Time in which the program must be ready. A loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// The user of the image.
const USER: &str = "65532";

/// An image store of its own, with the image.
struct Image {
    folder: TempDir,
    buildah: PathBuf,
    bwrap: PathBuf,
    /// The root of the image's file system.
    root: PathBuf,
    /// The part of the image's settings that containers read.
    settings: Value,
}

impl Image {
    /// Builds the image, unless the tools are missing or this user may not use them.
    fn build() -> Option<Self> {
        let (buildah, bwrap) = (support::program("buildah")?, support::program("bwrap")?);
        let busybox = support::program("busybox")?;
        if !may_contain(&bwrap) {
            eprintln!("skipped: a container needs root and namespaces, which this user lacks");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut image =
            Self { folder, buildah, bwrap, root: PathBuf::new(), settings: Value::Null };
        image.base("base", None);
        image.base("build", Some(&busybox));
        let context = image.context();
        let words =
            ["build", "-q", "--isolation", "chroot", "--format", "docker", "-t", "tollgate"];
        let arguments =
            ["--build-arg", "BUILD=localhost/build", "--build-arg", "BASE=localhost/base"];
        let context = context.display().to_string();
        image.buildah(&[&words[..], &arguments, &[&context]].concat());
        let settings = image.buildah(&["inspect", "--type", "image", "localhost/tollgate"]);
        let settings: Value = serde_json::from_str(&settings).expect("JSON");
        image.settings = settings["Docker"]["config"].clone();
        let container = image.buildah(&["from", "--pull-never", "localhost/tollgate"]);
        image.root = PathBuf::from(image.buildah(&["mount", &container]));
        Some(image)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs buildah on this store and returns its output.
    fn buildah(&self, words: &[&str]) -> String {
        let mut command = Command::new(&self.buildah);
        command.arg("--root").arg(self.path("store")).arg("--runroot").arg(self.path("run"));
        // The driver that needs nothing of the kernel.
        command.args(["--storage-driver", "vfs"]).args(words);
        let output = command.output().expect("buildah runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "buildah {}: {error}", words.join(" "));
        String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
    }

    /// Makes a base image with the C library, and with a shell and a compiler's stand-in
    /// if `busybox` is given.
    fn base(&self, name: &str, busybox: Option<&Path>) {
        let root = self.path(&format!("{name}.root"));
        for folder in ["dev", "proc", "tmp", "etc/tollgate", "var/lib", "bin", "cargo"] {
            fs::create_dir_all(root.join(folder)).expect("a folder");
        }
        for library in libraries() {
            let to = root.join(library.strip_prefix("/").expect("absolute"));
            fs::create_dir_all(to.parent().expect("it is in a folder")).expect("a folder");
            fs::copy(&library, to).expect("copies");
        }
        if let Some(busybox) = busybox {
            fs::copy(busybox, root.join("bin/busybox")).expect("copies");
            for name in ["sh", "cp", "mkdir", "rm"] {
                symlink("busybox", root.join("bin").join(name)).expect("a link");
            }
            let cargo = root.join("bin/cargo");
            fs::write(&cargo, CARGO).expect("writes");
            fs::set_permissions(&cargo, Permissions::from_mode(0o755)).expect("closes");
        }
        let container = self.buildah(&["from", "scratch"]);
        self.buildah(&["copy", "-q", &container, &root.display().to_string(), "/"]);
        self.buildah(&["commit", "-q", &container, &format!("localhost/{name}")]);
    }

    /// Makes the folder that the build reads: the checkout without its sources.
    fn context(&self) -> PathBuf {
        let (context, checkout) = (self.path("context"), Path::new(env!("CARGO_MANIFEST_DIR")));
        fs::create_dir(&context).expect("a folder");
        for file in ["Dockerfile", ".dockerignore", "LICENSE"] {
            fs::copy(checkout.join(file), context.join(file)).expect("copies");
        }
        // Without its debug info the copies take a fraction of the time.
        let stripped = Command::new("strip")
            .arg("-o")
            .arg(context.join("prebuilt"))
            .arg(support::binary())
            .status();
        assert!(stripped.expect("binutils come with gcc").success());
        context
    }

    /// Returns a command in a new container whose root cannot be written.
    fn container(&self) -> Command {
        let mut command = Command::new(&self.bwrap);
        command.arg("--ro-bind").arg(&self.root).arg("/");
        command.args(["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]);
        command.arg("--bind").arg(self.path("data")).arg("/var/lib/tollgate");
        command.arg("--ro-bind").arg(self.path("config")).arg("/etc/tollgate");
        command.args(["--unshare-pid", "--as-pid-1", "--die-with-parent", "--clearenv"]);
        command.args(["--unshare-user", "--uid", USER, "--gid", USER]);
        command
    }

    /// Starts the image's program with the image's arguments.
    fn start(&self) -> Child {
        for folder in ["data", "config"] {
            fs::create_dir(self.path(folder)).expect("a folder");
        }
        fs::write(self.path("config").join("tollgate.toml"), CONFIG).expect("writes");
        let mut command = self.container();
        command.args(self.words("Entrypoint")).args(self.words("Cmd"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("bwrap runs")
    }

    /// Returns the words of a setting of the image.
    fn words(&self, setting: &str) -> Vec<String> {
        serde_json::from_value(self.settings[setting].clone()).expect("words")
    }

    /// Runs the image's health check in a second container on the same data.
    fn is_healthy(&self) -> bool {
        let check: Vec<String> =
            serde_json::from_value(self.settings["Healthcheck"]["Test"].clone()).expect("words");
        assert_eq!(check[0], "CMD");
        self.container().args(&check[1..]).output().expect("bwrap runs").status.success()
    }

    /// Runs the image's program in a second container on the same data and returns the
    /// output.
    fn command(&self, words: &[&str]) -> String {
        let mut command = self.container();
        command.args(self.words("Entrypoint")).args(words);
        command.args(["--config", "/etc/tollgate", "--data", "/var/lib/tollgate"]);
        let output = command.output().expect("bwrap runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "tollgate {}: {error}", words.join(" "));
        String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
    }
}

/// Returns true if this user may mount images and make containers.
fn may_contain(bwrap: &Path) -> bool {
    let mut command = Command::new(bwrap);
    command.args(["--ro-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--unshare-user"]);
    rustix::process::geteuid().is_root()
        && command.arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The stand-in for cargo in the build stage.
const CARGO: &str = "#!/bin/sh\nmkdir -p target/dist && cp prebuilt target/dist/tollgate\n";

/// Returns the libraries that the binary under test needs.
fn libraries() -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(support::binary()).output().expect("ldd runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    paths.map(PathBuf::from).collect()
}

/// Returns the process of the program in the container that `bwrap` started.
fn program_of(bwrap: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{bwrap}/task/{bwrap}/children"));
    let children = children.expect("it runs");
    children.split_whitespace().next().expect("a child").parse().expect("a process id")
}

#[tokio::test]
async fn image_serves_read_only_and_drains() {
    let Some(image) = Image::build() else { return };
    assert_eq!(image.settings["User"], "65532:65532");
    let state = fs::metadata(image.root.join("var/lib/tollgate")).expect("it is there");
    assert_eq!((state.uid(), state.mode() & 0o777), (65532, 0o700));
    assert!(!image.root.join("bin/sh").exists());

    let mut child = image.start();
    let lines = support::lines_of(child.stdout.take().expect("it was piped"));
    let url = loop {
        let line = lines.recv_timeout(PATIENCE).expect("the line `ready`");
        if let ["ready", url, ..] = line.split_whitespace().collect::<Vec<_>>()[..] {
            break url.to_owned();
        }
    };
    assert!(image.is_healthy());
    let key = image.command(&["keys", "create", "--quiet", "--tenant", "acme"]);
    let ca = image.path("data").join("tls/ca.pem");
    let target = Target::new(&url, &ca, &key).expect("a target");
    let connection = target.connect(Protocol::Either).await.expect("connects");
    let (status, models) = get(&connection, "/v1/models").await;
    assert_eq!(status, 200, "{models}");
    support::signal(program_of(child.id()), "TERM");
    assert!(child.wait().expect("it was started").success());
    assert!(!image.is_healthy());
}
