//! Published forms of chat templates, and hostile ones (threat T37).

use tollgate_domain::UtcTime;
use tollgate_text::{
    Chat, ChatMessage, ChatTemplate, Role, TextError, Tokenizer, TokenizerConfig, encode_chat,
    is_template_argument,
};

fn render(source: &str, contents: &[&str]) -> Result<String, TextError> {
    render_with(source, contents, &serde_json::json!({}))
}

fn render_with(
    source: &str,
    contents: &[&str],
    arguments: &serde_json::Value,
) -> Result<String, TextError> {
    let tokenizer = Tokenizer::from_json(include_bytes!("fixtures/byte_level.json"))?;
    let config = TokenizerConfig {
        chat_template: None,
        bos_token: Some("<s>".into()),
        eos_token: Some("</s>".into()),
    };
    let template = ChatTemplate::compile(source, &config)?;
    let messages = contents.iter().map(|&content| ChatMessage::new(Role::User, content)).collect();
    let arguments = arguments.as_object().cloned().unwrap_or_default().into_iter().collect();
    let ids = encode_chat(
        &tokenizer,
        &template,
        &Chat { messages, arguments, ..Chat::default() },
        UtcTime(1_795_203_723_000_000_000),
        usize::MAX,
    )?;
    Ok(tokenizer.decode(&ids))
}

#[test]
fn templates_read_arguments_of_the_client() {
    use serde_json::json;
    let thinking = "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}";
    for (source, arguments, expected) in [
        (thinking, json!({"enable_thinking": false}), "off"),
        (thinking, json!({"enable_thinking": true}), "on"),
        (thinking, json!({}), "on"),
        ("{{ date_string }}", json!({"date_string": "1 May"}), "1 May"),
        (
            "{{ a.b[1] }} {{ n + 1 }} {{ x }}",
            json!({"a": {"b": [1, 2]}, "n": 3, "x": null}),
            "2 4 None",
        ),
        ("{{ level == 'high' }}", json!({"level": "high"}), "True"),
        // No argument replaces a value or an operator of the gateway.
        (
            "{{ bos_token }}{{ messages | length }}{{ 'a' + 'b' }}",
            json!({"bos_token": "x", "messages": [], "+": 7, "~": 8}),
            "<s>1ab",
        ),
    ] {
        let found = render_with(source, &["one"], &arguments);
        assert_eq!(found.expect("renders"), expected, "{source} {arguments}");
    }
}

#[test]
fn arguments_that_could_spell_control_tokens_are_refused() {
    use serde_json::json;
    for arguments in [
        json!({"a": "<s>"}),
        json!({"a": "x<"}),
        json!({"a": [{"b": "<"}]}),
        json!({"a": {"<": 1}}),
    ] {
        let error = render_with("{{ bos_token }}", &["one"], &arguments).expect_err("refused");
        assert_eq!(error.to_string(), "'a' holds '<', which begins a control token of the model");
    }
}

#[test]
fn arguments_cannot_exceed_the_allowance() {
    use serde_json::json;
    let source =
        "{% for a in range(n) %}{% for b in range(n) %}{{ text * n }}{% endfor %}{% endfor %}";
    for n in [100, 100_000, i64::MAX] {
        let arguments = json!({"n": n, "text": "x".repeat(4_000)});
        let error = render_with(source, &["one"], &arguments).expect_err("stopped");
        assert!(matches!(error, TextError::Allowance(_)), "{n}: {error}");
    }
}

#[test]
fn argument_names_are_identifiers_without_a_meaning() {
    for (name, is_allowed) in [
        ("enable_thinking", true),
        ("_x9", true),
        ("", false),
        ("9x", false),
        ("a-b", false),
        ("+", false),
        ("~", false),
        ("é", false),
        ("messages", false),
        ("tools", false),
        ("add_generation_prompt", false),
        ("bos_token", false),
        ("eos_token", false),
        ("raise_exception", false),
        ("strftime_now", false),
        ("range", false),
    ] {
        assert_eq!(is_template_argument(name), is_allowed, "{name}");
    }
}

#[test]
fn templates_render_common_constructs() {
    for (source, expected) in [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>one</s>"),
        ("{{ messages | length }} {{ messages[-1].content | upper }}", "2 TWO"),
        ("{{ strftime_now('%d %b %Y') }}", "20 Nov 2026"),
        ("{{ messages[0].content.startswith('o') }} {{ none }}", "True None"),
        ("{{ messages[0].content.split('n')[0] + 'k' }}", "ok"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ ns.n * 3 }}",
            "12",
        ),
        (
            "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
            "one",
        ),
        ("{% for m in messages %}\n    {{ m.content }}\n{% endfor %}\n", "    one\n    two\n"),
        ("{{ messages | map(attribute='content') | join(', ') }}", "one, two"),
        ("{{ messages[0] | tojson }}", "{\"role\": \"user\", \"content\": \"one\"}"),
        ("{{ {'a': '<&é'} | tojson }}", "{\"a\": \"<&é\"}"),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{% macro hi(x) %}[{{ x }}]{% endmacro %}{{ hi(messages[1].content) }}", "[two]"),
        ("{% set x %}a{{ messages[0].content }}{% endset %}{{ x ~ x ~ 1 }}", "aoneaone1"),
        ("{{ (messages[1:] + messages[:1])[1].content }}", "one"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}{{ range(4, 0, -2) | list | length }}", "0122"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'ab' | replace('b', 'c') }}", "a+bac"),
        ("{% if tools is defined and tools %}x{% else %}y{% endif %}{{ undefined_thing }}", "y"),
        (
            "{% if messages[0].role not in ['user', 'system'] %}{{ raise_exception('x') }}{% endif %}ok",
            "ok",
        ),
        ("{{ 'x' * 3 }}{{ 1.5 + 1 }}", "xxx2.5"),
    ] {
        let text = render(source, &["one", "two"]).expect(source);
        assert_eq!(text, expected, "{source}");
    }
}

/// Each of these templates would grow or run without end.
#[test]
fn template_allowance_stops_hostile_programs() {
    let doubling = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}";
    for (source, reason) in [
        ("{% for i in range(1000000000) %}x{% endfor %}".to_owned(), "memory"),
        (format!("{doubling}{{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = ns.s + ns.s %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = ns.s * 2 %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = [ns.s, ns.s] | join %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = ns.s | replace('x', 'xx') %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = ns.s.replace('x', 'xx') %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = ''.join([ns.s, ns.s]) %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set t %}}{{{{ ns.s }}}}{{{{ ns.s }}}}{{% endset %}}{{% set ns.s = t %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = [ns.s, ns.s] | string %}}{{% endfor %}}"), "memory"),
        (format!("{doubling}{{% set ns.s = [ns.s, ns.s] | tojson %}}{{% endfor %}}"), "memory"),
        ("{{ 'x' * 100000000000 }}".to_owned(), "memory"),
        ("{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}".to_owned(), "memory"),
        ("{% for a in range(1000) %}{% for b in range(1000) %}{% set x = 1 %}{% endfor %}{% endfor %}".to_owned(), "steps"),
    ] {
        match render(&source, &["a"]) {
            Err(TextError::Allowance(what)) => assert_eq!(what, reason, "{source}"),
            other => panic!("{source}: {other:?}"),
        }
    }
    let recursion = "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('xxxxxxxx') }}";
    assert!(render(recursion, &["a"]).is_err());
    for outside in [
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a' | indent(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ debug() }}",
    ] {
        let error = render(outside, &["a"]).expect_err(outside);
        assert!(matches!(error, TextError::Template { .. }), "{outside}: {error:?}");
    }
}

#[test]
fn template_mistakes_name_their_line() {
    for (source, expected) in [
        ("a\n{% if %}", "chat template, line 2: "),
        ("{{ messages[0].content.nonsense() }}", "chat template, line 1: "),
    ] {
        let error = render(source, &["a"]).expect_err(source).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let large = "x".repeat(300 << 10);
    assert!(render(&large, &["a"]).is_err());
    let literal = "x".repeat(20 << 10);
    assert!(render(&literal, &["a"]).is_err());
}

#[test]
fn template_allowance_fits_long_conversation() {
    let content = "word ".repeat(200);
    let contents = vec![content.as_str(); 2_048];
    let source = include_str!("fixtures/thinking.jinja");
    assert!(render(source, &contents).is_ok());
}

#[test]
fn tokenizer_config_accepts_known_shapes() {
    for (json, template, bos, eos) in [
        ("{}", None, None, None),
        (
            r#"{"chat_template": "x", "bos_token": null, "eos_token": "</s>"}"#,
            Some("x"),
            None,
            Some("</s>"),
        ),
        (
            r#"{"chat_template": [{"name": "rag", "template": "t"}, {"name": "default", "template": "d"}],
                "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": false}}"#,
            Some("d"),
            Some("<s>"),
            None,
        ),
    ] {
        let config = TokenizerConfig::from_json(json.as_bytes()).expect(json);
        assert_eq!(config.chat_template.as_deref(), template, "{json}");
        assert_eq!(config.bos_token.as_deref(), bos, "{json}");
        assert_eq!(config.eos_token.as_deref(), eos, "{json}");
    }
    for (json, part) in [
        ("{", "tokenizer_config.json: EOF"),
        (r#"{"chat_template": 3}"#, "tokenizer_config.json"),
        (r#"{"chat_template": [{"name": "x", "template": "t"}]}"#, "named default"),
    ] {
        let error = TokenizerConfig::from_json(json.as_bytes()).expect_err(json).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn template_for_tools_is_used_with_tools_alone() {
    let tokenizer =
        Tokenizer::from_json(include_bytes!("fixtures/byte_level.json")).expect("a tokenizer");
    let render = |source: &str, tools: &[serde_json::Value]| {
        let template = ChatTemplate::compile(source, &TokenizerConfig::default()).expect(source);
        let messages = vec![ChatMessage::new(Role::User, "hi")];
        let chat = Chat { messages, tools: tools.to_vec(), ..Chat::default() };
        let ids = encode_chat(&tokenizer, &template, &chat, UtcTime(0), usize::MAX).expect(source);
        tokenizer.decode(&ids)
    };
    let tool = serde_json::json!({ "type": "function", "function": { "name": "f" } });
    // Line feeds and spaces at the ends of a template are as in the template alone.
    for (with_tools, without) in [
        ("T{{ tools[0].function.name }}", "D{{ messages[0].content }}"),
        ("\n  T{{ tools | length }}\n\n", "\nD\n  \n"),
        ("{% if true %}\n  T{% endif %}\n", "  {% set a = 1 %}\nD{{ a }}  "),
        ("T\n", "{# a #}\nD"),
    ] {
        let json = serde_json::json!({ "chat_template": [
            { "name": "default", "template": without },
            { "name": "tool_use", "template": with_tools },
        ] });
        let config = TokenizerConfig::from_json(json.to_string().as_bytes()).expect("valid");
        let both = config.chat_template.expect("a template");
        let tools = std::slice::from_ref(&tool);
        assert_eq!(render(&both, tools), render(with_tools, tools), "{with_tools:?}");
        assert_eq!(render(&both, &[]), render(without, &[]), "{without:?}");
    }
}
