//! Every TOML example in the documents is a config that loads.

use std::fs;
use std::path::Path;

use tollgate_config::Config;

#[test]
fn toml_examples_in_documents_load() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut examples = 0;
    for entry in fs::read_dir(docs).expect("the folder is read") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let page = fs::read_to_string(&path).expect("UTF-8");
        for block in page.split("```toml\n").skip(1) {
            let block = block.split("```").next().unwrap_or_default();
            // Documents shorten the UUIDs of devices.
            let text = block.replace("...\"", "-0000-0000-0000-000000000000\"");
            let problems = match Config::from_toml(&path, &text) {
                Ok(_) => Vec::new(),
                Err(errors) => errors.problems().to_vec(),
            };
            // An excerpt may name a file, or a plan of another section.
            let elsewhere = ["path", "certificate", "key", "plan", "password", "ca"];
            let real: Vec<String> = problems
                .iter()
                .filter(|problem| !elsewhere.iter().any(|name| problem.key.ends_with(name)))
                .map(ToString::to_string)
                .collect();
            assert!(real.is_empty(), "{}:\n{}\n{block}", path.display(), real.join("\n"));
            examples += 1;
        }
    }
    assert!(examples >= 5, "only {examples} examples were found");
}
