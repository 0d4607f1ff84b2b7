//! Schemas of answers: a schema that passes the check is compiled without an abort.

use std::sync::OnceLock;

use serde_json::Value;
use tollgate_domain::Grammar;
use tollgate_engine::grammar::{COMPILE_STACK, GrammarCompiler, Vocabulary};
use tollgate_openai::schema_check;

/// Checks a schema and compiles it.
pub(crate) fn schema(data: &[u8]) {
    // A request's JSON has a bound of its own; serde_json's is 128 levels.
    let Ok(schema) = serde_json::from_slice::<Value>(data) else { return };
    let text = match schema_check::check(schema, "s") {
        Ok(text) => text,
        Err(violation) => {
            let param = violation.param.unwrap_or_default();
            // Names of properties may have any character, and the place ends in one of them.
            assert!(param == "s" || param.starts_with("s."), "{param}");
            assert!(!violation.message.is_empty());
            return;
        }
    };
    // Some formats become patterns, so the text may be longer than the schema.
    assert!(serde_json::from_str::<Value>(&text).is_ok());
    // As a worker does: on a thread with a large stack, where an overflow would end the process.
    let compilation = std::thread::Builder::new()
        .stack_size(COMPILE_STACK)
        .spawn(move || compiler().compile(&Grammar::JsonSchema(text)).map(|_| ()));
    // A refusal is as good; it says why in one line.
    if let Err(error) = compilation.expect("a thread").join().expect("no panic") {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

/// Returns a compiler over a vocabulary of single bytes.
fn compiler() -> &'static GrammarCompiler {
    static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| {
        let mut tokens: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
        tokens.push(b"<end>".to_vec());
        let vocabulary = Vocabulary { tokens, controls: vec![256], end_tokens: vec![256] };
        GrammarCompiler::new(vocabulary).expect("the vocabulary is whole")
    })
}
