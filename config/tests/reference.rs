//! `docs/reference/config.md` is the page that the declarations of the keys
//! generate. To renew it after a change of a key:
//! `TOLLGATE_REGENERATE=1 cargo test -p tollgate-config --test reference`.

use std::path::Path;

use tollgate_config::Config;

#[test]
#[allow(clippy::disallowed_methods, reason = "the switch of a test, not a setting of the product")]
fn reference_page_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/config.md");
    let page = Config::reference();
    if std::env::var_os("TOLLGATE_REGENERATE").is_some() {
        std::fs::write(&path, page).expect("the page is written");
    } else {
        let current = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            current == page,
            "docs/reference/config.md is stale: run \
             TOLLGATE_REGENERATE=1 cargo test -p tollgate-config --test reference"
        );
    }
}
