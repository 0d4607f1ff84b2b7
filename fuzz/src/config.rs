//! Config: read whole or refused with every mistake named.

use std::path::Path;

use tollgate_config::Config;

pub(crate) fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::from_toml(Path::new("fuzz.toml"), text) {
        Ok(config) => {
            let name = Path::new("fuzz.toml");
            let shown = Config::show_toml(name, text).expect("what is right can be shown");
            let again = Config::from_toml(name, &shown);
            assert!(again.is_ok(), "what is shown is a config: {again:?}\n{shown}");
            for tenant in config.tenants() {
                assert!(tenant.plan.is_some() || tenant.pool.is_some(), "{}", tenant.name);
                assert!(tenant.weight.is_finite() && tenant.weight > 0.0);
            }
        }
        Err(errors) => {
            let told = errors.to_string();
            assert!(!told.is_empty());
            let fits = |line: &str| !line.chars().any(|c| c.is_control() && c != '\t');
            assert!(told.lines().all(fits), "{told:?}");
        }
    }
}
