//! The config: a text is either read whole, or refused with its mistakes.

use std::path::Path;

use tollgate_config::Config;

pub(crate) fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::from_toml(Path::new("fuzz.toml"), text) {
        Ok(config) => {
            let name = Path::new("fuzz.toml");
            let shown = Config::show_toml(name, text).expect("a valid config can be printed");
            let again = Config::from_toml(name, &shown);
            assert!(again.is_ok(), "the printed config is invalid: {again:?}\n{shown}");
            for tenant in config.tenants() {
                assert!(tenant.plan.is_some() || tenant.pool.is_some(), "{}", tenant.name);
                assert!(tenant.weight.is_finite() && tenant.weight > 0.0);
            }
        }
        Err(errors) => {
            let message = errors.to_string();
            assert!(!message.is_empty());
            // The message goes to a terminal, so it must not carry control characters
            // of the input.
            let is_printable = |line: &str| !line.chars().any(|c| c.is_control() && c != '\t');
            assert!(message.lines().all(is_printable), "{message:?}");
        }
    }
}
