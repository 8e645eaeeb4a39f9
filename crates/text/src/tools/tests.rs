//! Tests of the streaming parsers: every form, in any pieces, whole and broken.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::testing::{GEMMA, QWEN};

/// A call as a client sees it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    name: String,
    arguments: String,
    is_whole: bool,
    is_broken: bool,
}

/// A reply as a client sees it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Reply {
    text: String,
    calls: Vec<Seen>,
    /// Text and calls in order, calls in their wire form.
    wire: String,
}

impl Reply {
    fn take(&mut self, event: ToolEvent<'_>) {
        match event {
            ToolEvent::Text(text) => {
                assert!(!text.is_empty());
                self.text += text;
                self.wire += text;
            }
            ToolEvent::Begin { index, name } => {
                assert_eq!(index, self.calls.len(), "calls are numbered as they begin");
                assert!(!name.is_empty());
                let name = name.to_owned();
                self.calls.push(Seen {
                    name,
                    ..Seen::default()
                });
            }
            ToolEvent::Arguments { index, json } => {
                assert!(index + 1 == self.calls.len() && !json.is_empty());
                let call = &mut self.calls[index];
                assert!(!call.is_whole && !call.is_broken);
                call.arguments += json;
            }
            ToolEvent::End { index, wire } => {
                self.calls[index].is_whole = true;
                self.wire += wire;
            }
            ToolEvent::Broken { index } => self.calls[index].is_broken = true,
        }
    }

    /// Names and arguments of the calls that are whole.
    fn whole(&self) -> Vec<(String, Value)> {
        let whole = self.calls.iter().filter(|call| call.is_whole);
        whole
            .map(|call| {
                let arguments: Value =
                    serde_json::from_str(&call.arguments).expect(&call.arguments);
                assert!(arguments.is_object());
                (call.name.clone(), arguments)
            })
            .collect()
    }
}

/// Tools whose schemas say some of the types.
fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"},
            "maybe": {"type": ["string", "null"]}}}}},
        {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}},
    ])
}

fn parser(format: ToolFormat) -> ToolCalls {
    ToolCalls::new(format, Arc::new(Tools::new(&tools())))
}

/// Reads pieces of text whose marks are characters.
fn read_pieces<'a>(name: &str, pieces: impl IntoIterator<Item = &'a str>) -> Reply {
    let mut calls = parser(ToolFormat::named(name).unwrap());
    let mut reply = Reply::default();
    for piece in pieces {
        calls.push(piece, &mut |event| reply.take(event));
    }
    calls.finish(&mut |event| reply.take(event));
    assert_eq!(calls.n_whole(), reply.whole().len());
    assert!(!calls.is_open());
    reply
}

fn read(name: &str, text: &str) -> Reply {
    read_pieces(name, [text])
}

/// Reads what a tokenizer makes of `text`; the marks are tokens.
fn read_tokens(tokenizer: &Tokenizer, name: &str, text: &str) -> Reply {
    let format = FORMATS.iter().find(|f| f.name == name).unwrap();
    let found = ToolFormat { format, ids: None };
    let ids = ToolMark::ALL.map(|mark| tokenizer.id_of(found.spelling(mark)?));
    let format = ToolFormat {
        format,
        ids: Some(ids),
    };
    let mut calls = parser(format);
    let mut reply = Reply::default();
    for id in tokenizer.encode(text, false).unwrap() {
        match calls.mark(id) {
            Some(mark) => calls.turn(mark, &mut |event| reply.take(event)),
            None => {
                let text = tokenizer.detokenize(&[id], crate::Specials::Show);
                calls.push(&text, &mut |event| reply.take(event));
            }
        }
    }
    calls.finish(&mut |event| reply.take(event));
    reply
}

/// Form, reply, text, and the calls as a list of names and arguments.
const GOOD: &[(&str, &str, &str, &str)] = &[
    (
        "gemma4",
        "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:1}<tool_call|>",
        "",
        r#"[["weather", {"city": "Rome", "days": 1}]]"#,
    ),
    (
        "gemma4",
        "I look.\n<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:[],b:{}}<tool_call|>\n",
        "I look.",
        r#"[["f", {}], ["g", {"a": [], "b": {}}]]"#,
    ),
    (
        "gemma4",
        "<|tool_call>call:f{a:<|\"|>x\"y\\z\n{,}<|\"|>,b:{c:[1,-2.5e3,true,null],d:false}}<tool_call|> Done.\n",
        " Done.\n",
        r#"[["f", {"a": "x\"y\\z\n{,}", "b": {"c": [1, -2500.0, true, null], "d": false}}]]"#,
    ),
    // What a model may write that templates do not.
    (
        "gemma4",
        "<|tool_call>call: f{ <|\"|>a b<|\"|> : None , \"c\\n\" : \"d\\\"\" , e:12:30 pm\n, g:[1,] ,}",
        "",
        r#"[["f", {"a b": null, "c\n": "d\"", "e": "12:30 pm", "g": [1]}]]"#,
    ),
    (
        "gemma4",
        "<|tool_call>call:f<tool_call|>",
        "",
        r#"[["f", {}]]"#,
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        r#"[["weather", {"city": "Rome", "days": 1}]]"#,
    ),
    (
        "qwen3.5",
        "I look.\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=a>\n[1, \"b\"]\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        r#"[["f", {}], ["f", {"a": [1, "b"]}]]"#,
    ),
    (
        "qwen3.5",
        "<tool_call><function=weather><parameter=city>12</parameter><parameter=days>\nmany\n</parameter><parameter=deep>{\"a\":\n1}</parameter><parameter=maybe>null</parameter><parameter=other>true</parameter></function></tool_call>",
        "",
        r#"[["weather", {"city": "12", "days": "many", "deep": {"a": 1}, "maybe": null, "other": true}]]"#,
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=write>\n<parameter=text>\n\n a</parameter> <b> \"\\\n</parameter>\n</parame\n</parameter>\n</function>\n</tool_call>",
        "",
        r#"[["write", {"text": "\n a</parameter> <b> \"\\\n</parameter>\n</parame"}]]"#,
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=write>\n<parameter=text>\nx</parameter>\n</parameter>\n</function>\n</tool_call>",
        "",
        r#"[["write", {"text": "x</parameter>"}]]"#,
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=write>\n<parameter=text>\n\n</parameter>\n</tool_call>",
        "",
        r#"[["write", {"text": ""}]]"#,
    ),
    (
        "hermes",
        "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"</b>\\u00e9\"]}}\n</tool_call>",
        "So:",
        r#"[["f", {"a": [1, "</b>é"]}]]"#,
    ),
    (
        "hermes",
        "<tool_call>{\"id\": [1, {}], \"parameters\" : {\"a\": 1} , \"name\":\"f\"}</tool_call>\n<tool_call>{\"name\":\"g\"}</tool_call>",
        "",
        r#"[["f", {"a": 1}], ["g", {}]]"#,
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call><tool_call>{\"name\": \"f\", \"arguments\": null, \"n\": 1}</tool_call>",
        "",
        r#"[["f", {"a": 1}], ["f", {}]]"#,
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b\nc\"}}",
        "",
        r#"[["f", {"a": "b\nc"}]]"#,
    ),
    // White space between text, calls and text.
    (
        "hermes",
        " a \n<tool_call>{\"name\": \"f\"}</tool_call>\n\n b \n",
        " a\n\n b \n",
        r#"[["f", {}]]"#,
    ),
    (
        "hermes",
        "\n<tool_call>{\"name\": \"f\"}\n</tool_call>\n\n  b",
        "  b",
        r#"[["f", {}]]"#,
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\"}\n<tool_call>{\"name\": \"g\"} and",
        " and",
        r#"[["f", {}], ["g", {}]]"#,
    ),
    (
        "hermes",
        "a <tool b </tool_call> < \n",
        "a <tool b </tool_call> < \n",
        "[]",
    ),
];

/// Form and reply; all of it is text.
const BROKEN: &[(&str, &str)] = &[
    ("gemma4", "a <|tool_call>call:f{a:1<tool_call|> b"),
    ("gemma4", "<|tool_call>call:f{a:1"),
    ("gemma4", "<|tool_call>call:f{a:1,a:2}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{a}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{a:}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{a:[1}]<tool_call|>"),
    (
        "gemma4",
        "<|tool_call>call:f{a:<|\"|>x<|\"|><|\"|>}<tool_call|>",
    ),
    ("gemma4", "<|tool_call>call:{}<tool_call|>"),
    ("gemma4", "<|tool_call>cell:f{}<tool_call|>"),
    ("gemma4", "<|tool_call> <|\"|> <tool_call|> <|\"|>"),
    (
        "qwen3.5",
        "a\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>\nb",
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
    ),
    (
        "qwen3.5",
        "<tool_call>\n<function=f>\n<parameter=>\n</parameter>\n</function>\n</tool_call>",
    ),
    ("qwen3.5", "<tool_call>\n{\"name\": \"f\"}\n</tool_call>"),
    (
        "qwen3.5",
        "<tool_call>\n<function=f>\n<parameter=a>\nlong text\n",
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
    ),
    (
        "hermes",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
    ),
    ("hermes", "<tool_call>{\"arguments\": {}}</tool_call>"),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"name\": \"g\"}</tool_call>",
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": }}</tool_call>",
    ),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b",
    ),
    ("hermes", "<tool_call>{\"name\": \"a b\"}</tool_call>"),
    ("hermes", "  <tool_call>  "),
    ("hermes", "<tool_"),
];

#[test]
fn calls_of_every_form_are_read() {
    for (name, text, answer, calls) in GOOD {
        let reply = read(name, text);
        let calls: Vec<(String, Value)> = serde_json::from_str(calls).unwrap();
        assert_eq!(
            (reply.text.as_str(), reply.whole()),
            (*answer, calls),
            "{text}"
        );
        assert_eq!(reply.calls.len(), reply.whole().len(), "{text}");
    }
}

#[test]
fn what_is_broken_is_text() {
    for (name, text) in BROKEN {
        let reply = read(name, text);
        assert_eq!(reply.text, *text);
        assert_eq!(reply.whole(), []);
        assert!(reply.calls.iter().all(|call| call.is_broken));
    }
}

#[test]
fn a_broken_call_does_not_hide_the_next() {
    let good = "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
    for broken in [
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"",
        "<tool_call>{",
        "<tool_call>",
    ] {
        let reply = read("hermes", &format!("{broken}{good}"));
        assert_eq!(reply.text, broken);
        assert_eq!(reply.whole(), [("g".to_owned(), json!({}))]);
    }
}

#[test]
fn what_comes_after_the_last_call_is_passed_over() {
    let call = "<tool_call>{\"name\": \"f\"}";
    for (most, rest) in [(1, "</tool_call>"), (1, ""), (2, "</tool_call>"), (2, "\n")] {
        let format = ToolFormat::named("hermes").unwrap();
        let mut calls = ToolCalls::up_to(most, format, Arc::default());
        let mut reply = Reply::default();
        let text = format!("a\n{call}{rest}{call}{rest}{call} b");
        for c in text.chars() {
            calls.push(&c.to_string(), &mut |event| reply.take(event));
        }
        assert!(calls.is_full());
        calls.finish(&mut |event| reply.take(event));
        assert_eq!((reply.text.as_str(), reply.calls.len()), ("a", most));
        assert_eq!(calls.n_whole(), most);
    }
}

#[test]
fn marks_are_tokens_where_the_vocabulary_has_them() {
    for (tokenizer, name) in [(&GEMMA, "gemma4"), (&QWEN, "qwen3.5"), (&QWEN, "hermes")] {
        for (form, text, ..) in GOOD.iter().filter(|good| good.0 == name) {
            assert_eq!(
                read_tokens(tokenizer, name, text),
                read(form, text),
                "{text}"
            );
        }
        for (form, text) in BROKEN.iter().filter(|broken| broken.0 == name) {
            assert_eq!(
                read_tokens(tokenizer, name, text),
                read(form, text),
                "{text}"
            );
        }
    }
    // Spelled with letters, a mark is text, even inside a call.
    let format = ToolFormat {
        ids: Some([Some(1), Some(2), None]),
        ..ToolFormat::named("hermes").unwrap()
    };
    let mut calls = parser(format);
    let mut reply = Reply::default();
    let mut take = |event: ToolEvent<'_>| reply.take(event);
    assert_eq!(calls.mark(2), None);
    calls.push("<tool_call>", &mut take);
    calls.turn(calls.mark(1).unwrap(), &mut take);
    calls.push(
        "{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\"}}",
        &mut take,
    );
    calls.turn(calls.mark(2).unwrap(), &mut take);
    calls.finish(&mut take);
    assert_eq!(reply.text, "<tool_call>");
    assert_eq!(
        reply.whole(),
        [("f".to_owned(), json!({"a": "</tool_call>"}))]
    );
}

#[test]
fn names_and_strings_leave_before_the_call_ends() {
    for (name, text, json) in [
        ("gemma4", "<|tool_call>call:f{a:<|\"|>so f", r#"{"a":"so f"#),
        (
            "qwen3.5",
            "<tool_call>\n<function=write>\n<parameter=text>\nso f",
            r#"{"text":"so f"#,
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"so f",
            r#"{"a": "so f"#,
        ),
    ] {
        let mut calls = parser(ToolFormat::named(name).unwrap());
        let mut reply = Reply::default();
        calls.push(text, &mut |event| reply.take(event));
        assert_eq!(reply.calls[0].arguments, json);
        assert!(calls.is_open() && calls.index() == Some(0));
    }
}

#[test]
fn the_form_is_that_of_the_vocabulary_and_the_template() {
    let form = |tokenizer: &Tokenizer, source: &str| {
        let config = json!({"chat_template": source});
        let template = ChatTemplate::new(None, &config).unwrap();
        ToolFormat::new(tokenizer, &template).map(|f| (f.name(), f.ids.is_some()))
    };
    assert_eq!(form(&GEMMA, "{{ tools }}"), Some(("gemma4", true)));
    assert_eq!(
        form(&QWEN, "{{ tools }}<function=x>"),
        Some(("qwen3.5", true))
    );
    assert_eq!(form(&QWEN, "{{ tools }}"), Some(("hermes", true)));
    assert_eq!(form(&QWEN, "{{ messages }}"), None);
    let plain = Tokenizer::from_bytes(crate::testing::small_bpe().to_string().as_bytes()).unwrap();
    assert_eq!(form(&plain, "{{ tools }}"), Some(("hermes", false)));
    assert!(ToolFormat::names().all(|name| ToolFormat::named(name).is_some()));
}

#[test]
fn too_much_is_text_and_takes_linear_time() {
    let name = "n".repeat(NAME_BYTES_MAX + 1);
    for (form, text) in [
        (
            "hermes",
            format!("<tool_call>{{\"name\": \"{name}\"}}</tool_call>"),
        ),
        (
            "qwen3.5",
            format!("<tool_call><function={name}></function></tool_call>"),
        ),
        ("gemma4", format!("<|tool_call>call:{name}{{}}<tool_call|>")),
        (
            "gemma4",
            format!(
                "<|tool_call>call:f{{a:{}<tool_call|>",
                "[".repeat(DEPTH_MAX)
            ),
        ),
        ("hermes", "<".repeat(600_000)),
        ("hermes", "<tool_call>".repeat(60_000)),
        (
            "qwen3.5",
            "<tool_call><function=write><parameter=text>".to_owned()
                + &"\n</parameter>\n<".repeat(60_000),
        ),
        (
            "gemma4",
            "<|tool_call>call:f{a:<|\"|>".to_owned() + &"<|\"".repeat(200_000),
        ),
    ] {
        let start = std::time::Instant::now();
        let pieces = text
            .as_bytes()
            .chunks(1)
            .map(|c| std::str::from_utf8(c).unwrap());
        let reply = read_pieces(form, pieces);
        assert_eq!(reply.text.len(), text.len());
        assert!(reply.text == text);
        // Twice the length takes four times as long where the time is quadratic.
        assert!(start.elapsed().as_secs() < 40, "{form}");
    }
}

/// Fragments that calls are made of, and others.
const SOUP: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "call:f{",
    "call:",
    "a:",
    "b:",
    ",",
    "{",
    "}",
    "[",
    "]",
    "1",
    "true",
    "\"",
    "\\",
    "\n",
    " ",
    "é",
    "<",
    "<function=write>",
    "<function=",
    "<parameter=text>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "{\"name\": \"f\", \"arguments\": ",
    "{\"name\":",
    "\"f\"",
    "\"arguments\":",
    "{}",
    ":",
    "x",
    "\u{1}",
    "</",
    ">",
];

/// Without white space: that around a call belongs to the call.
fn dense(text: &str) -> String {
    text.split_whitespace().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_soup_loses_nothing_in_any_pieces(
        form in 0..FORMATS.len(),
        soup in vec(0..SOUP.len(), 0..24),
        cuts in vec(0..200_usize, 0..12),
    ) {
        let name = FORMATS[form].name;
        let text: String = soup.iter().map(|&i| SOUP[i]).collect();
        let whole = read(name, &text);
        prop_assert_eq!(dense(&whole.wire), dense(&text));
        if whole.whole().is_empty() {
            prop_assert_eq!(&whole.text, &text);
        }
        prop_assert!(whole.calls.iter().all(|call| call.is_whole != call.is_broken));
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&at| text.is_char_boundary(at.min(text.len()))).collect();
        cuts.push(text.len());
        cuts.sort_unstable();
        let mut from = 0;
        let pieces: Vec<&str> = cuts.iter().map(|&to| {
            let to = to.min(text.len());
            let piece = &text[from..to];
            from = to;
            piece
        }).collect();
        prop_assert_eq!(read_pieces(name, pieces), whole);
    }

    #[test]
    fn cut_anywhere_a_call_is_whole_or_text(which in 0..GOOD.len(), cut in 0..400_usize) {
        let (name, text, ..) = GOOD[which];
        let mut cut = cut.min(text.len());
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        let whole = read(name, &text[..cut]);
        prop_assert_eq!(dense(&whole.wire), dense(&text[..cut]));
        let single = text[..cut].char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(read_pieces(name, single), whole);
    }

    #[test]
    fn arguments_survive_the_templates(values in vec(("[a-z_]{1,6}", any_value()), 0..5)) {
        let arguments: serde_json::Map<String, Value> = values.into_iter().collect();
        let calls = json!([{"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}]);
        let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "So.", "tool_calls": calls}]);
        for (model, name) in [("tiny-gemma4", "gemma4"), ("tiny-qwen3.5", "qwen3.5")] {
            let text = TEXTS.iter().find(|text| text.0 == model).map(|text| &text.1).unwrap();
            let rendered = text.template.as_ref().unwrap().render(&messages, Some(&tools()), false, &Default::default()).unwrap();
            let mark = FORMATS.iter().find(|f| f.name == name).unwrap().open;
            let turn = rendered.rfind("model\n").or_else(|| rendered.rfind("assistant\n")).unwrap();
            prop_assert!(rendered[turn..].contains(mark));
            let reply = read(name, &rendered[turn..]);
            let [(called, said)] = &reply.whole()[..] else { panic!("one call: {rendered}") };
            prop_assert_eq!(called, "f");
            // Qwen's form does not say whether a value without a schema is a string.
            let expected = |value: &Value| match value.as_str().map(serde_json::from_str::<Value>) {
                Some(Ok(other)) if name == "qwen3.5" && !other.is_string() => other,
                _ => value.clone(),
            };
            for (key, value) in &arguments {
                prop_assert_eq!(&said[key], &expected(value), "{} in {}", key, rendered);
            }
            prop_assert_eq!(said.as_object().unwrap().len(), arguments.len());
        }
    }
}

static TEXTS: std::sync::LazyLock<Vec<(&str, crate::Text)>> = std::sync::LazyLock::new(|| {
    let open = |name| {
        (
            name,
            crate::TextFiles::open(&crate::testing::model_dir(name)).unwrap(),
        )
    };
    vec![open("tiny-gemma4"), open("tiny-qwen3.5")]
});

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-1000..1000_i64).prop_map(Value::from),
        "[a-z \"\\\\,:{}\\[\\]é\n]{0,12}".prop_map(|text| Value::from(text.trim())),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::from),
            vec(("[a-z]{1,4}", inner), 0..3)
                .prop_map(|items| Value::Object(items.into_iter().collect())),
        ]
    })
}
