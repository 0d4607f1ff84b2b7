//! `tollgate chat` on a terminal.

use std::io::{Read, Write};
use std::process::{ChildStdout, Command, Stdio};

use crate::support::{self, Tollgate};

/// A device that needs a minute and more for an answer.
const SLOW: &str = r#"
[worker]
engine = "synthetic"

[worker.synthetic]
speed = 0.25
context = 4_096

[plans.open]
requests_per_minute = 100_000

[tenants.acme]
plan = "open"
"#;

/// Reads the terminal until its text since the last call fulfils `is_enough`.
fn read_until(terminal: &mut ChildStdout, is_enough: impl Fn(&str) -> bool) -> String {
    let (mut seen, mut buffer) = (String::new(), [0; 256]);
    while !is_enough(&seen) {
        let length = terminal.read(&mut buffer).expect("reads");
        assert!(length > 0, "the terminal closed after {seen:?}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    seen
}

#[test]
fn chat_interrupt_ends_the_answer_alone() {
    let Some(script) = support::program("script") else { return };
    let gateway = Tollgate::with_config(SLOW);
    let key = gateway.data().join("acme.key");
    std::fs::write(&key, gateway.key("acme", &[])).expect("writes");
    // The shell becomes the program: a shell that waits would end by the interrupt itself.
    let chat = format!(
        "exec {} chat --url {} --data {} --key-file {}",
        support::binary(),
        gateway.url,
        gateway.data().display(),
        key.display()
    );
    // The program gets a terminal of its own. Its exit code is that of the chat.
    let mut child = Command::new(script)
        .args(["-qefc", &chat, "/dev/null"])
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut keyboard = child.stdin.take().expect("it was piped");
    let mut terminal = child.stdout.take().expect("it was piped");
    let mut press = |keys: &str| keyboard.write_all(keys.as_bytes()).expect("writes");
    read_until(&mut terminal, |text| text.contains("> "));
    for _ in 0..2 {
        press("Tell me a story. [4000 tokens]\n");
        // The terminal repeats the question; words of the answer follow.
        read_until(&mut terminal, |text| {
            text.split_once("tokens]\r\n").is_some_and(|(_, answer)| answer.contains(' '))
        });
        press("\u{3}");
        read_until(&mut terminal, |text| text.ends_with("\r\n> "));
    }
    press("\u{3}");
    assert_eq!(child.wait().expect("ends").code(), Some(0));
}

#[test]
fn commands_without_key_name_the_option() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().display().to_string();
    for (words, option) in
        [(&["chat", "Hello"][..], "with --key-file"), (&["loadtest"], "with --tenant NAME=FILE")]
    {
        let said = support::failing(&[words, &["--data", &data]].concat());
        assert!(said.contains("there is no ") && said.contains(option), "{said}");
        assert!(said.contains("tollgate keys create --tenant NAME"), "{said}");
    }
}
