//! Templates that render, and templates that were written to do harm.

use std::time::Instant;

use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(
        Some(source),
        &json!({"bos_token": "<bos>", "eos_token": null}),
    )
    .unwrap()
}

fn render(source: &str) -> Result<String, TextError> {
    template(source).render(
        &json!([{"role": "user", "content": "hi"}]),
        None,
        true,
        &Map::new(),
    )
}

#[test]
fn endless_templates_run_out_of_fuel() {
    for bomb in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ] {
        let started = Instant::now();
        let result = render(bomb);
        assert!(
            matches!(
                result,
                Err(TextError::OutOfFuel { .. } | TextError::Template { .. })
            ),
            "{bomb}: {result:?}"
        );
        // Three renderings (two of them probes) of an unoptimized build;
        // the limit only has to tell seconds from for ever.
        assert!(
            started.elapsed().as_secs() < 60,
            "{bomb}: {:?}",
            started.elapsed()
        );
    }
}

#[test]
fn huge_values_are_refused() {
    for bomb in [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 'a' * 10000000 }}",
        "{{ range(90000) | list | tojson(indent=1000000) }}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 2 ** 100000 }}",
    ] {
        let result = render(bomb);
        assert!(
            matches!(
                result,
                Err(TextError::TooLarge { .. } | TextError::Template { .. })
            ),
            "{bomb}: {:?}",
            result.map(|text| text.len())
        );
    }
    assert!(matches!(
        render("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}"),
        Err(TextError::TooLarge {
            limit: RENDERED_BYTES_MAX,
            ..
        })
    ));
}

#[test]
fn a_prompt_that_is_too_long_says_how_long() {
    let template = ChatTemplate::new(Some("<{{ messages[0].content }}>"), &Value::Null);
    let template = template.unwrap();
    let render = |n: usize| {
        let messages = json!([{"role": "user", "content": "a".repeat(n)}]);
        template.render(&messages, None, true, &Map::new())
    };
    assert_eq!(
        render(RENDERED_BYTES_MAX - 2).unwrap().len(),
        RENDERED_BYTES_MAX
    );
    assert_eq!(
        render(RENDERED_BYTES_MAX + 90).unwrap_err().to_string(),
        "8388700 rendered prompt bytes are too many: at most 8388608 are allowed"
    );
}

#[test]
fn deep_nesting_ends_as_an_error() {
    assert!(matches!(
        render("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
        Err(TextError::Template { .. })
    ));
    let fill = |start: &str, link: &str, end: &str| {
        let n_operators = link.bytes().filter(|byte| b"+-*/%~".contains(byte)).count();
        let n =
            ((TEMPLATE_BYTES_MAX - 200) / link.len()).min((OPERATORS_MAX - 8) / n_operators.max(1));
        format!("{start}{}{end}", link.repeat(n))
    };
    for deep in ["(", "[", "not ", "-", "{1:", "f(", "a if ", "a[", "a|d("] {
        let source = fill("{{ ", deep, " }}");
        assert!(
            ChatTemplate::new(Some(&source), &Value::Null).is_err(),
            "{deep}"
        );
    }
    for link in [
        "{%if a%}",
        "{%for a in a%}",
        "{%macro a()%}",
        "{%filter a%}",
        "{%set a%}",
    ] {
        assert!(
            ChatTemplate::new(Some(&fill("", link, "")), &Value::Null).is_err(),
            "{link}"
        );
    }
    let many = format!("{{{{ 1{} }}}}", "+1".repeat(OPERATORS_MAX + 1));
    assert!(matches!(
        ChatTemplate::new(Some(&many), &Value::Null),
        Err(TextError::TooLarge {
            limit: OPERATORS_MAX,
            ..
        })
    ));
    // Chains are no nesting to the parser; they compile or fail, and end.
    for link in [
        "+1",
        "-1",
        "%1",
        ".b",
        "|d",
        "[0]",
        "()",
        "~a",
        " or a",
        " and a",
        " is a",
        "**1",
        "<1",
        " if a else a",
        " in a",
    ] {
        let _ = ChatTemplate::new(Some(&fill("{{ a", link, " }}")), &Value::Null);
    }
    let _ = ChatTemplate::new(
        Some(&fill("{%if a%}", "{%elif a%}", "{%endif%}")),
        &Value::Null,
    );
}

#[test]
fn values_nested_without_end_are_refused() {
    for nest in ["[ns.x]", "{'a': ns.x}", "(ns.x,)", "namespace(x=ns.x)"] {
        for after in [
            "",
            "{{ ns.x }}",
            "{{ ns.x | tojson }}",
            "{{ ns.x | string | length }}",
            "{{ ns.x == ns.y }}",
        ] {
            let source = format!(
                "{{% set ns = namespace(x=[], y=[]) %}}{{% for i in range(9000) %}}{{% for j in range(9) %}}\
                 {{% set ns.y = ns.x %}}{{% set ns.x = {nest} %}}{{% endfor %}}{{% endfor %}}{after}"
            );
            let _ = render(&source);
        }
    }
    for nest in ["[ns.x]", "{'a': ns.x}"] {
        let bomb = format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}\
             {{% set ns.x = {nest} %}}{{% endfor %}}{{% endfor %}}"
        );
        assert!(matches!(
            render(&bomb),
            Err(TextError::Template { reason, .. }) if reason.contains("too deeply")
        ));
    }
}

#[test]
fn a_long_conversation_stays_far_from_the_limits() {
    let source = "{%- for m in messages -%}{%- set t = m.content | trim -%}            {%- if m.role == 'user' and t is string -%}{{- '<u>' + t -}}{%- else -%}{{- '<a>' ~ t -}}{%- endif -%}{%- endfor -%}";
    let message = json!({"role": "user", "content": "x".repeat(500)});
    let messages = Value::Array(vec![message; 8000]);
    let text = template(source)
        .render(&messages, None, false, &Map::new())
        .unwrap();
    assert_eq!(text.len(), 8000 * 503);
}

#[test]
fn nothing_can_be_included_or_reached() {
    for source in [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}{{ x }}",
        "{% extends 'other' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ] {
        let result = render(source);
        assert!(
            result.as_deref().unwrap_or_default().is_empty(),
            "{source}: {result:?}"
        );
    }
}

#[test]
fn a_refusal_carries_the_templates_words() {
    assert!(matches!(
        render("{% macro f() %}{{ raise_exception('no ' ~ 'way') }}{% endmacro %}{{ f() }}"),
        Err(TextError::Refused { message }) if message == "no way"
    ));
}

#[test]
fn errors_name_the_line() {
    assert!(matches!(
        render("a\nb\n{{ 1 + 'x' }}"),
        Err(TextError::Template { line: 3, .. })
    ));
    assert!(matches!(
        ChatTemplate::new(Some("a\n{% if %}"), &Value::Null),
        Err(TextError::Template { line: 2, .. })
    ));
}

#[test]
fn requests_cannot_replace_the_template_or_its_tokens() {
    let template = template("{{ bos_token }}{{ mood }}");
    let render = |name: &str| {
        let extra = Map::from_iter([(name.to_owned(), json!("x"))]);
        template.render(&json!([]), None, true, &extra)
    };
    assert_eq!(render("mood").unwrap(), "<bos>x");
    for name in RESERVED_ARGUMENTS {
        assert!(
            matches!(render(name), Err(TextError::ReservedArgument { .. })),
            "{name}"
        );
    }
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let list = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
    let template = ChatTemplate::new(None, &json!({"chat_template": list})).unwrap();
    let render = |tools: Value| {
        template
            .render(&json!([]), Some(&tools), true, &Map::new())
            .unwrap()
    };
    assert_eq!(render(json!([{"type": "function"}])), "tools");
    assert_eq!(render(json!([])), "plain");
    assert_eq!(render(Value::Null), "plain");
    assert_eq!(template.source(), "plain");
    let one = ChatTemplate::new(None, &json!({"chat_template": "one"})).unwrap();
    assert_eq!(one.source(), "one");
    let file = ChatTemplate::new(Some("file"), &json!({"chat_template": "one"})).unwrap();
    assert_eq!(file.source(), "file");
    assert!(matches!(
        ChatTemplate::new(None, &json!({})),
        Err(TextError::NoTemplate)
    ));
    assert!(ChatTemplate::new(None, &json!({"chat_template": [1]})).is_err());
    let long = " ".repeat(TEMPLATE_BYTES_MAX + 1);
    assert!(ChatTemplate::new(Some(&long), &Value::Null).is_err());
}

#[test]
fn the_form_of_content_is_found_out() {
    let form = |source: &str| template(source).reads().user;
    assert_eq!(
        form("{% for m in messages %}{{ m.content }}{% endfor %}"),
        ContentForm::Text
    );
    assert_eq!(
        form("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"),
        ContentForm::Parts
    );
    assert_eq!(
        form(
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
        ),
        ContentForm::Either
    );
    assert_eq!(
        form("{% for m in messages %}{{ m.content | tojson }}{% endfor %}"),
        ContentForm::Text
    );
}

#[test]
fn schemas_keep_the_order_of_their_keys() {
    let tools: Value = serde_json::from_str(r#"[{"z": 1, "a": {"y": 2, "b": 3}}]"#).unwrap();
    let text = template("{{ tools | tojson }}").render(&json!([]), Some(&tools), true, &Map::new());
    assert_eq!(text.unwrap(), r#"[{"z": 1, "a": {"y": 2, "b": 3}}]"#);
}

#[test]
fn dates_can_be_asked_for() {
    let text = render("{{ strftime_now('%Y') }}").unwrap();
    assert!(text.parse::<u32>().is_ok_and(|year| year >= 2024), "{text}");
    assert!(render("{{ strftime_now('x' * 1000) }}").is_err());
}

proptest::proptest! {
    #[test]
    fn any_source_compiles_or_fails(source in "[ -~\n]{0,60}|(\\{%|%\\}|\\{\\{|\\}\\}|[a-z]{1,3}|[ '|.()\\[\\]0-9-]){0,24}") {
        if let Ok(template) = ChatTemplate::new(Some(&source), &Value::Null) {
            let _ = template.render(&json!([{"role": "user"}]), None, true, &Map::new());
        }
    }
}

#[test]
fn reasoning_is_off_where_it_is_not_asked_for_or_declined() {
    let arguments = |value: Value| value.as_object().unwrap().clone();
    for (source, expected) in [
        (
            "{% if enable_thinking %}think{% endif %}",
            [true, false, true],
        ),
        (
            "{% if enable_thinking is not defined or enable_thinking %}think{% endif %}",
            [false, false, true],
        ),
        ("{{ messages[0].content }}", [false, false, false]),
    ] {
        let template = template(source);
        let said = [
            json!({}),
            json!({"enable_thinking": true}),
            json!({"enable_thinking": false}),
        ];
        let found = said.map(|extra| template.turns_reasoning_off(&arguments(extra)));
        assert_eq!(found, expected, "{source}");
    }
}
