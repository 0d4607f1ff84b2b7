//! Conversions between grammars and their messages.

use tollgate_domain::{CallForm, CallGrammar, Grammar};

use crate::v1;
use crate::v1::grammar::Form;

impl From<&Grammar> for v1::Grammar {
    fn from(grammar: &Grammar) -> Self {
        let form = match grammar {
            Grammar::JsonObject => Form::JsonObject(v1::JsonObject {}),
            Grammar::JsonSchema(schema) => Form::JsonSchema(schema.clone()),
            Grammar::Regex(regex) => Form::Regex(regex.clone()),
            Grammar::Choice(texts) => Form::Choice(v1::TextChoice { texts: texts.clone() }),
            Grammar::Calls(CallGrammar { calls, trigger, required, separator, content }) => {
                Form::Calls(v1::CallGrammar {
                    calls: calls.iter().map(v1::CallForm::from).collect(),
                    trigger: trigger.clone(),
                    required: *required,
                    separator: separator.clone(),
                    content: content.clone(),
                })
            }
        };
        Self { form: Some(form) }
    }
}

impl From<&CallForm> for v1::CallForm {
    fn from(CallForm { begin, schema, end }: &CallForm) -> Self {
        Self { begin: begin.clone(), schema: schema.clone(), end: end.clone() }
    }
}

impl v1::Grammar {
    /// Returns the grammar; `None` if it has no form that this version knows.
    pub fn into_domain(self) -> Option<Grammar> {
        Some(match self.form? {
            Form::JsonObject(v1::JsonObject {}) => Grammar::JsonObject,
            Form::JsonSchema(schema) => Grammar::JsonSchema(schema),
            Form::Regex(regex) => Grammar::Regex(regex),
            Form::Choice(v1::TextChoice { texts }) => Grammar::Choice(texts),
            Form::Calls(v1::CallGrammar { calls, trigger, required, separator, content }) => {
                let call = |v1::CallForm { begin, schema, end }| CallForm { begin, schema, end };
                let calls = calls.into_iter().map(call).collect();
                Grammar::Calls(CallGrammar { calls, trigger, required, separator, content })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammar_survives_the_wire() {
        let call = CallForm {
            begin: "<tool_call>\n{\"name\": \"f\", \"arguments\": ".into(),
            schema: "{}".into(),
            end: "}\n</tool_call>".into(),
        };
        let calls = |required, separator, content| CallGrammar {
            calls: vec![call.clone()],
            trigger: "<tool_call>".into(),
            required,
            separator,
            content,
        };
        for grammar in [
            Grammar::JsonObject,
            Grammar::JsonSchema(r#"{"type": "string"}"#.into()),
            Grammar::Regex("[a-z]+".into()),
            Grammar::Choice(vec!["yes".into(), "no".into()]),
            Grammar::Calls(calls(true, None, None)),
            Grammar::Calls(calls(false, Some("\n".into()), None)),
            Grammar::Calls(calls(false, None, Some("{}".into()))),
        ] {
            assert_eq!(v1::Grammar::from(&grammar).into_domain(), Some(grammar));
        }
        assert_eq!(v1::Grammar { form: None }.into_domain(), None);
    }
}
