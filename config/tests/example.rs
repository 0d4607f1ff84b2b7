//! The example file is the defaults, and what it shows can be uncommented.

use std::path::Path;

use tollgate_config::{Config, Sources};

const FILE: &str = include_str!("../tollgate.toml");

#[test]
fn the_example_file_is_the_one_the_code_describes() {
    assert_eq!(
        FILE,
        Config::example(),
        "put what `tollgate config example` prints into config/tollgate.toml"
    );
}

#[test]
fn the_example_file_is_the_defaults() {
    let written = Config::from_toml(Path::new("tollgate.toml"), FILE).expect("it is a config");
    let defaults = Config::show(&Sources::default()).expect("the defaults are a config");
    assert_eq!(without_places(&shown(FILE)), without_places(&defaults));
    assert!(written.is_demo());
}

#[test]
fn every_example_line_can_be_uncommented() {
    // An issuer's keys come from one place.
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

/// What is shown is a config of the same values.
#[test]
fn what_is_shown_loads() {
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
