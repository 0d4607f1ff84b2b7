//! Fields that fix the form of an answer: OpenAI's `response_format`, and vLLM's
//! `structured_outputs` with its older names `guided_json`, `guided_regex` and
//! `guided_choice`.

use serde_json::Value;
use serde_json::value::RawValue;
use tollgate_domain::Grammar;

use crate::Violation;
use crate::fields::{Field, known_fields, object};
use crate::request::SharedFields;
use crate::schema_check::{self, FieldPath};

known_fields! {
    /// The fields of `structured_outputs`.
    OutputFields { json, regex, choice, json_object, grammar, structural_tag }
}

known_fields! {
    /// The fields of `response_format`.
    FormatFields { r#type, json_schema }
}

known_fields! {
    /// The fields of `response_format.json_schema`.
    SchemaFields { name, description, schema, strict }
}

/// Reads vLLM's fields. Returns the form with the name of the field that set it.
///
/// # Errors
/// A field that breaks a rule, or two fields that each set a form.
pub(crate) fn structured_outputs(
    fields: &SharedFields<'_>,
) -> Result<Option<(Grammar, &'static str)>, Violation> {
    let mut form = None;
    let nested = fields.structured_outputs.filter(|raw| !is_null(raw)).map_or("{}", RawValue::get);
    let nested: OutputFields<'_> = object(nested, "structured_outputs")?;
    for (name, raw) in [
        ("structured_outputs.grammar", nested.grammar),
        ("structured_outputs.structural_tag", nested.structural_tag),
    ] {
        Field::new(name, raw).only_neutral(&[])?;
    }
    for (name, raw, read) in [
        ("guided_json", fields.guided_json, Read::Schema),
        ("guided_regex", fields.guided_regex, Read::Regex),
        ("guided_choice", fields.guided_choice, Read::Choice),
        ("structured_outputs.json", nested.json, Read::Schema),
        ("structured_outputs.regex", nested.regex, Read::Regex),
        ("structured_outputs.choice", nested.choice, Read::Choice),
        ("structured_outputs.json_object", nested.json_object, Read::Object),
    ] {
        let Some(raw) = raw.filter(|raw| !is_null(raw)) else { continue };
        // `json_object: false` asks for no form.
        let Some(grammar) = read.grammar(raw, name)? else { continue };
        if let Some((_, other)) = form {
            return Err(two_forms(name, other));
        }
        form = Some((grammar, name));
    }
    Ok(form)
}

/// Reads `response_format`. Returns `None` for free text.
///
/// # Errors
/// A field that breaks a rule; a schema that is not enforced, with the path to its place.
pub(crate) fn response_format(raw: Option<&RawValue>) -> Result<Option<Grammar>, Violation> {
    let Some(raw) = raw.filter(|raw| !is_null(raw)) else { return Ok(None) };
    let fields: FormatFields<'_> = object(raw.get(), "response_format")?;
    let kind: String = Field::new("response_format.type", fields.r#type)
        .required("'text', 'json_object' or 'json_schema'")?;
    match kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(Grammar::JsonObject)),
        "json_schema" => json_schema(fields.json_schema).map(Some),
        _ => Err(Violation::field(
            "response_format.type",
            "'response_format.type' must be 'text', 'json_object' or 'json_schema'.",
        )),
    }
}

/// Returns the violation that two fields set the form of the answer.
pub(crate) fn two_forms(name: &str, other: &str) -> Violation {
    let message = format!("'{name}' and '{other}' both set the form of the answer; send one.");
    Violation::field(name, message)
}

fn json_schema(raw: Option<&RawValue>) -> Result<Grammar, Violation> {
    const PLACE: &str = "response_format.json_schema";
    let missing = || Field::new(PLACE, None).missing("an object with a 'schema'");
    let raw = raw.filter(|raw| !is_null(raw)).ok_or_else(missing)?;
    let fields: SchemaFields<'_> = object(raw.get(), PLACE)?;
    Field::new("response_format.json_schema.name", fields.name).text(MAX_NAME_BYTES)?;
    Field::new("response_format.json_schema.description", fields.description)
        .text(MAX_DESCRIPTION_BYTES)?;
    // Every schema is enforced, so the flag changes nothing.
    Field::new("response_format.json_schema.strict", fields.strict).flag()?;
    let name = "response_format.json_schema.schema";
    let schema: Value = Field::new(name, fields.schema).required("a JSON schema, an object")?;
    checked(schema, name)
}

/// The ways to read a form.
#[derive(Clone, Copy)]
enum Read {
    Schema,
    Regex,
    Choice,
    Object,
}

impl Read {
    fn grammar(self, raw: &RawValue, name: &'static str) -> Result<Option<Grammar>, Violation> {
        let field = Field::new(name, Some(raw));
        Ok(match self {
            Self::Schema => {
                let schema: Value = field.required("a JSON schema")?;
                // vLLM also takes the schema as text.
                let schema = match &schema {
                    Value::String(text) => serde_json::from_str(text)
                        .map_err(|_| field.must_be("a JSON schema", "text that is not JSON"))?,
                    _ => schema,
                };
                Some(checked(schema, name)?)
            }
            Self::Regex => {
                let regex: String = field.required("a regular expression, a string")?;
                schema_check::check_regex(&regex, FieldPath(name))?;
                Some(Grammar::Regex(regex))
            }
            Self::Choice => {
                let expected = format!("an array of 1 to {MAX_CHOICES} texts that are not empty");
                let texts: Vec<String> = field.list(MAX_CHOICES, &expected)?.unwrap_or_default();
                if texts.is_empty() || texts.iter().any(String::is_empty) {
                    return Err(field.must_be(&expected, "not"));
                }
                let bytes: usize = texts.iter().map(String::len).sum();
                if bytes > MAX_CHOICE_BYTES {
                    let most = format!("an array of texts with at most {MAX_CHOICE_BYTES} bytes");
                    return Err(field.must_be(&most, &format!("{bytes} bytes long")));
                }
                Some(Grammar::Choice(texts))
            }
            Self::Object => field.flag()?.unwrap_or(false).then_some(Grammar::JsonObject),
        })
    }
}

fn checked(schema: Value, name: &str) -> Result<Grammar, Violation> {
    schema_check::check(schema, name).map(Grammar::JsonSchema)
}

fn is_null(raw: &RawValue) -> bool {
    raw.get() == "null"
}

/// Bytes of a schema's name, which changes nothing.
pub(crate) const MAX_NAME_BYTES: usize = 64;
/// Bytes of a schema's description, which changes nothing.
pub(crate) const MAX_DESCRIPTION_BYTES: usize = 4 << 10;
/// Texts of `guided_choice`.
pub(crate) const MAX_CHOICES: u32 = 256;
/// Bytes of all texts of `guided_choice`.
const MAX_CHOICE_BYTES: usize = 16 << 10;
