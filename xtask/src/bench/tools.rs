//! The peers of benchmarks: nginx as Debian builds it, and llama.cpp built for this
//! processor. Both lie under `target/tools/bench`; the system itself gets no package
//! and no service.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::run::{check, command, exists, target};

/// The pinned version, because published figures name the version of the peer.
const LLAMA_CPP: &str = "llama-cpp-python==0.3.36";

/// The package that contains the vocabulary of Qwen.
const DASHSCOPE: &str = "dashscope==2.0.2";

/// Returns a file with the tokens of Qwen's vocabulary, 151,643 without control tokens: in each line
/// the bytes of one in hexadecimal digits.
pub(super) fn vocabulary() -> Result<PathBuf> {
    let folder = folder()?.join("vocabulary");
    let tokens = folder.join("qwen.hex");
    if !tokens.exists() {
        std::fs::create_dir_all(&folder)?;
        let pip = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":none:", DASHSCOPE];
        check(command("python3").args(pip).current_dir(&folder))?;
        // A line of the file has the token in base64, and its id.
        let read = "import base64, glob, zipfile; archive = zipfile.ZipFile(glob.glob('dashscope-*.whl')[0]); \
            name = next(name for name in archive.namelist() if name.endswith('qwen.tiktoken')); \
            lines = [line.split() for line in archive.read(name).splitlines()]; \
            lines.sort(key=lambda line: int(line[1])); \
            open('qwen.part', 'w').writelines(base64.b64decode(line[0]).hex() + '\\n' for line in lines)";
        check(command("python3").args(["-c", read]).current_dir(&folder))?;
        std::fs::rename(folder.join("qwen.part"), &tokens)?;
    }
    Ok(tokens)
}

/// Returns the program nginx, unpacked from its package without an installation.
pub(super) fn nginx() -> Result<PathBuf> {
    let folder = folder()?.join("nginx");
    let program = folder.join("usr/sbin/nginx");
    if !program.exists() {
        std::fs::create_dir_all(&folder)?;
        check(command("apt-get").args(["download", "-q", "nginx"]).current_dir(&folder))?;
        check(command("sh").args(["-c", "dpkg -x nginx_*.deb ."]).current_dir(&folder))?;
    }
    Ok(program)
}

/// Checks that h2load is installed.
///
/// # Errors
///
/// h2load is missing.
pub(super) fn h2load() -> Result<()> {
    if !exists("h2load") {
        bail!("h2load is missing: apt-get install nghttp2-client");
    }
    Ok(())
}

/// Returns a Python with llama.cpp, built from source with every instruction of this
/// processor, and with the writer of its file format.
pub(super) fn llama_cpp() -> Result<PathBuf> {
    let folder = folder()?.join("python");
    let python = folder.join("bin/python");
    let mark = folder.join("installed");
    if std::fs::read_to_string(&mark).is_ok_and(|text| text == LLAMA_CPP) {
        return Ok(python);
    }
    check(command("python3").args(["-m", "venv"]).arg(&folder))?;
    let pip = || {
        let mut pip = command("nice");
        pip.args(["-n", "19"]).arg(&python).args(["-m", "pip", "install", "-q"]);
        pip
    };
    check(pip().args(["cmake", "ninja", "gguf", "numpy"]))?;
    let options = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF";
    check(pip().env("CMAKE_ARGS", options).args([
        "--no-binary",
        "llama-cpp-python",
        "--no-cache-dir",
        LLAMA_CPP,
    ]))?;
    std::fs::write(&mark, LLAMA_CPP).with_context(|| mark.display().to_string())?;
    Ok(python)
}

fn folder() -> Result<PathBuf> {
    let folder = target().join("tools/bench");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}
