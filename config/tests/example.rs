//! The example file contains the defaults, and its examples can be uncommented.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::path::Path;

use tollgate_config::{Config, Sources};

const FILE: &str = include_str!("../tollgate.toml");

#[test]
#[allow(clippy::disallowed_methods, reason = "the switch of a test, not a setting of the product")]
fn example_file_equals_the_codes_example() {
    if std::env::var_os("TOLLGATE_REGENERATE").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tollgate.toml");
        std::fs::write(path, Config::example()).expect("the file is written");
        return;
    }
    assert!(
        FILE == Config::example(),
        "config/tollgate.toml is stale: run \
         TOLLGATE_REGENERATE=1 cargo test -p tollgate-config --test example"
    );
}

#[test]
fn example_file_contains_the_defaults() {
    let written = Config::from_toml(Path::new("tollgate.toml"), FILE).expect("it is a config");
    let defaults = Config::show(&Sources::default()).expect("the defaults are a config");
    assert_eq!(without_places(&shown(FILE)), without_places(&defaults));
    assert!(written.is_demo());
}

#[test]
fn example_lines_can_be_uncommented() {
    // An issuer has only one source of keys.
    for left_out in [["jwks =", "jwks_url =", "jwks_ca ="], ["keys =", "jwks =", "-"]] {
        let whole: String = FILE
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if left_out.iter().any(|key| rest.starts_with(key)) => String::new(),
                Some(rest) if !rest.is_empty() && !rest.starts_with(' ') => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        let errors = Config::from_toml(Path::new("tollgate.toml"), &whole);
        for problem in errors.expect_err("no such files").problems() {
            assert!(problem.message.ends_with("does not exist"), "{problem}");
        }
    }
}

/// The shown config loads to the same values.
#[test]
fn shown_config_loads_to_same_values() {
    for text in ["", include_str!("team.toml")] {
        let config = Config::from_toml(Path::new("team.toml"), text).expect("it is a config");
        let first = shown(text);
        let again = Config::from_toml(Path::new("shown.toml"), &first).expect("it is a config");
        assert_eq!(without_places(&first), without_places(&shown(&first)));
        assert_eq!(config.tenants().collect::<Vec<_>>(), again.tenants().collect::<Vec<_>>());
        assert_eq!(config.models().collect::<Vec<_>>(), again.models().collect::<Vec<_>>());
    }
}

fn shown(text: &str) -> String {
    Config::show_toml(Path::new("shown.toml"), text).expect("it is a config")
}

fn without_places(shown: &str) -> Vec<&str> {
    shown.lines().map(|line| line.rsplit_once("  # ").map_or(line, |(line, _)| line)).collect()
}
