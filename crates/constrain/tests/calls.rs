//! Grammars of tool calls: what follows one is read back as calls that fit the tools' schemas.

mod common;

use std::sync::Arc;

use constrain::{Compiler, Grammar, Limits, Spec};
use serde_json::{Map, Value, json};
use text::tools::grammar::{Unsupported, Want, grammar};
use text::{ChatTemplate, Text, ToolCalls, ToolEvent, ToolFormat, ToolMark, Tools};

/// A model and the form of its calls.
struct Model {
    text: Arc<Text>,
    compiler: Compiler,
    format: ToolFormat,
    /// A call of `f` with the arguments `{"a": "x", "n": 1}`.
    call: &'static str,
}

/// The form of each family: of the bundled models, and JSON in Qwen's vocabulary.
fn models() -> [Model; 3] {
    let model = |name, call, template: Option<&str>| {
        let text = common::bundled(name);
        let compiler = Compiler::new(common::vocabulary(&text), Limits::default());
        let other = template.map(|source| {
            let config = json!({"chat_template": source});
            let template = ChatTemplate::new(None, &config).unwrap();
            ToolFormat::new(&text.tokenizer, &template).unwrap()
        });
        Model {
            format: other.or(text.tools).unwrap(),
            text,
            compiler,
            call,
        }
    };
    [
        model(
            "tiny-gemma4",
            "<|tool_call>call:f{a:<|\"|>x<|\"|>,n:1}<tool_call|>",
            None,
        ),
        model(
            "tiny-qwen3.5",
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
            None,
        ),
        model(
            "tiny-qwen3.5",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"n\": 1}}\n</tool_call>",
            Some("{{ tools }}"),
        ),
    ]
}

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

/// `f` takes a text and a number, `g` takes nothing.
fn tools() -> Value {
    json!([
        tool(
            "f",
            json!({"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a"]})
        ),
        tool("g", Value::Null),
    ])
}

impl Model {
    fn compile(&self, tools: &Value, want: Want<'_>, most: Option<usize>) -> Grammar {
        let grammar = grammar(&self.format, tools, want, most).unwrap();
        let spec = Spec::LarkWithSchemas {
            lark: grammar.lark.clone(),
            schemas: grammar.schemas,
        };
        match self.compiler.compile(&spec) {
            Ok(grammar) => grammar,
            Err(err) => panic!("{err}\n{}", grammar.lark),
        }
    }

    fn spelled(&self, token: u32) -> Vec<u8> {
        match self.compiler.vocabulary().bytes(token) {
            Some(bytes) => bytes.to_vec(),
            None => self
                .text
                .tokenizer
                .entry(token)
                .unwrap_or_default()
                .into_bytes(),
        }
    }

    /// Whether `text` follows `grammar` from start to end, by the longest tokens that fit.
    fn follows(&self, grammar: &Grammar, text: &str) -> bool {
        let mut matcher = grammar.start();
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            // A model writes marks as the tokens they are.
            let marks = [ToolMark::Open, ToolMark::Close, ToolMark::Quote];
            let spellings = marks.iter().filter_map(|&mark| self.format.spelling(mark));
            let text = std::str::from_utf8(rest).unwrap_or_default();
            let limit = spellings.filter_map(|mark| text.find(mark)).min();
            let limit = limit.unwrap_or(rest.len());
            let mut allowed = common::allowed(&mut matcher, self.compiler.vocabulary());
            allowed.retain(|&token| (limit == 0) == self.format.mark_of(token).is_some());
            let words = allowed
                .into_iter()
                .map(|token| (token, self.spelled(token)));
            let fits = |word: &[u8]| !word.is_empty() && rest.starts_with(word);
            let fitting =
                words.filter(|(_, word)| fits(word) && (limit == 0 || word.len() <= limit));
            let Some((token, word)) = fitting.max_by_key(|(_, word)| word.len()) else {
                return false;
            };
            assert!(matcher.push(token).unwrap());
            rest = &rest[word.len()..];
        }
        matcher.may_end()
    }

    /// The text and the calls that `tokens` say; broken calls are text.
    fn read(&self, tools: &Value, tokens: &[u32]) -> (String, Vec<(String, Value)>) {
        let mut calls = ToolCalls::new(self.format, Arc::new(Tools::new(tools)));
        let (mut text, mut said) = (String::new(), Vec::<(String, String, bool)>::new());
        let mut take = |event: ToolEvent<'_>| match event {
            ToolEvent::Text(piece) => text += piece,
            ToolEvent::Begin { name, .. } => said.push((name.to_owned(), String::new(), false)),
            ToolEvent::Arguments { index, json } => said[index].1 += json,
            ToolEvent::End { index, .. } => said[index].2 = true,
            ToolEvent::Broken { .. } => {}
        };
        let mut detokenizer = text::Detokenizer::new(text::Specials::Show);
        for &token in tokens {
            match calls.mark(token) {
                Some(mark) => {
                    calls.push(detokenizer.part(), &mut take);
                    calls.turn(mark, &mut take);
                }
                None => calls.push(&detokenizer.push(&self.text.tokenizer, token), &mut take),
            }
        }
        calls.push(detokenizer.finish(), &mut take);
        calls.finish(&mut take);
        let whole = said.into_iter().filter(|(.., is_whole)| *is_whole);
        let whole = whole.filter_map(|(name, json, _)| match serde_json::from_str(&json) {
            Ok(arguments) => Some((name, arguments)),
            // JSON has no largest number, this crate's numbers have.
            Err(err) if err.to_string().contains("out of range") => None,
            Err(err) => panic!("{err}: {json}"),
        });
        (text, whole.collect())
    }

    /// Tokens that follow `grammar`, chosen at random; `None` if they do not end.
    fn walk(&self, grammar: &Grammar, random: &mut impl FnMut(usize) -> usize) -> Option<Vec<u32>> {
        // What ends strings, lists and calls: no random walk would find it.
        const ENDS: &[&str] = &[
            "\n</parameter>\n",
            "</parameter>\n",
            "<|\"|>",
            "\"",
            "}",
            "]",
            "</parameter>\n<parameter=n>",
            "null",
        ];
        let vocabulary = self.compiler.vocabulary();
        let (mut matcher, mut tokens) = (grammar.start(), Vec::new());
        for _ in 0..400 {
            if random(3) == 0 {
                let end = ENDS[random(ENDS.len())];
                for token in self.text.tokenizer.encode(end, false).unwrap() {
                    if !matcher.push(token).unwrap() {
                        break;
                    }
                    tokens.push(token);
                }
            }
            let allowed = common::allowed(&mut matcher, vocabulary);
            let token = allowed[random(allowed.len())];
            if matcher.may_end() && (random(2) == 0 || vocabulary.eos().contains(&token)) {
                return Some(tokens);
            }
            if vocabulary.eos().contains(&token) {
                continue;
            }
            assert!(matcher.push(token).unwrap());
            tokens.push(token);
        }
        None
    }
}

/// Whether `value` is valid under `schema`, a part of `root`; for the keywords of these tests.
fn fits(schema: &Value, root: &Value, value: &Value) -> bool {
    let Some(map) = schema.as_object() else {
        return schema == true;
    };
    let is = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    let length = value.as_str().map(|text| text.chars().count() as u64);
    let items = value.as_array().map(|list| list.len() as u64);
    map.iter().all(|(key, of)| match key.as_str() {
        "type" => match of {
            Value::String(name) => is(name),
            names => names
                .as_array()
                .unwrap()
                .iter()
                .any(|name| is(name.as_str().unwrap())),
        },
        "enum" => of.as_array().unwrap().contains(value),
        "const" => of == value,
        "anyOf" => of.as_array().unwrap().iter().any(|s| fits(s, root, value)),
        "oneOf" => {
            of.as_array()
                .unwrap()
                .iter()
                .filter(|s| fits(s, root, value))
                .count()
                == 1
        }
        "allOf" => of.as_array().unwrap().iter().all(|s| fits(s, root, value)),
        "$ref" => fits(
            root.pointer(&of.as_str().unwrap()[1..]).unwrap(),
            root,
            value,
        ),
        "minLength" => length.is_none_or(|n| n >= of.as_u64().unwrap()),
        "maxLength" => length.is_none_or(|n| n <= of.as_u64().unwrap()),
        "minItems" => items.is_none_or(|n| n >= of.as_u64().unwrap()),
        "maxItems" => items.is_none_or(|n| n <= of.as_u64().unwrap()),
        "minimum" => value.as_f64().is_none_or(|x| x >= of.as_f64().unwrap()),
        "items" => value
            .as_array()
            .is_none_or(|list| list.iter().all(|x| fits(of, root, x))),
        "required" => value.as_object().is_none_or(|map| {
            of.as_array()
                .unwrap()
                .iter()
                .all(|name| map.contains_key(name.as_str().unwrap()))
        }),
        "properties" => {
            let none = Map::new();
            let own = value.as_object().unwrap_or(&none);
            own.iter()
                .all(|(key, x)| of.get(key).is_none_or(|s| fits(s, root, x)))
        }
        "additionalProperties" => {
            let known = &map["properties"];
            of != false
                || value
                    .as_object()
                    .is_none_or(|map| map.keys().all(|k| known.get(k).is_some()))
        }
        "$defs" | "description" | "title" | "default" => true,
        other => panic!("no such keyword in these tests: {other}"),
    })
}

/// Schemas of parameters in every supported shape.
fn schemas() -> Vec<Value> {
    let object = |properties: Value, required: Value| json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
    vec![
        object(json!({}), json!([])),
        object(
            json!({"b": {"type": "string"}, "A": {"type": "integer"}, "c": {"type": "boolean"}}),
            json!(["c"]),
        ),
        object(
            json!({"a": {"type": "string", "minLength": 2, "maxLength": 5}, "n": {"type": ["string", "null"]}}),
            json!(["a", "n"]),
        ),
        object(
            json!({"e": {"enum": ["x y", "z\n\"", ""]}, "k": {"const": 7}, "f": {"type": "string", "enum": ["q", 1]}, "m": {"enum": ["a", null, true]}}),
            json!(["e", "k", "f", "m"]),
        ),
        object(
            json!({"l": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3}, "z": {"type": "null"}}),
            json!(["l"]),
        ),
        object(
            json!({"o": object(json!({"p": {"type": "number"}, "q": {"type": "array", "items": {"type": "boolean"}}}), json!(["q"]))}),
            json!(["o"]),
        ),
        object(
            json!({"u": {"anyOf": [{"type": "string", "title": "S"}, {"type": "null"}], "default": null}, "i": {"type": "integer", "minimum": 3}}),
            json!(["u"]),
        ),
        json!({"type": "object", "properties": {"r": {"$ref": "#/$defs/R"}, "s": {"allOf": [{"$ref": "#/$defs/S"}], "description": "d"}},
            "required": ["r", "s"],
            "$defs": {"S": {"enum": ["low", "high"]}, "R": object(json!({"s": {"$ref": "#/$defs/S"}, "w": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}}), json!(["s"]))}}),
        object(
            json!({"t": {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "v": {"type": ["integer", "boolean"]}}),
            json!([]),
        ),
    ]
}

#[test]
fn calls_that_must_come_are_all_that_may_come() {
    for model in models() {
        let (tools, call) = (tools(), model.call);
        let required = model.compile(&tools, Want::Required, None);
        let single = model.compile(&tools, Want::Required, Some(1));
        let named = model.compile(&tools, Want::Named("f"), None);
        let between = if model.format.name() == "gemma4" {
            ""
        } else {
            "\n"
        };
        let two = format!("{call}{between}{call}");
        let short = call.replace(['1'], "12");
        for (grammar, good, bad) in [
            (&required, vec![call, &two, &short], vec!["", "So", " "]),
            (&single, vec![call], vec![&two]),
            (&named, vec![call], vec![&two]),
        ] {
            for text in good {
                assert!(
                    model.follows(grammar, text),
                    "{}: {text}",
                    model.format.name()
                );
            }
            for text in bad {
                assert!(
                    !model.follows(grammar, text),
                    "{}: {text}",
                    model.format.name()
                );
            }
            let others = match model.format.name() {
                "gemma4" => [
                    ("call:f", "call:h"),
                    ("n:", "m:"),
                    ("1", "x"),
                    ("1", "1.5"),
                    (",n", "n"),
                ],
                "qwen3.5" => [
                    ("=f>", "=h>"),
                    ("=n>", "=m>"),
                    ("1", "x"),
                    ("1", "1.5"),
                    ("</function>", ""),
                ],
                _ => [
                    ("\"f\"", "\"h\""),
                    ("\"a\": \"x\", ", ""),
                    ("1", "x"),
                    ("1", "1.5"),
                    ("}}", "}"),
                ],
            };
            for (from, to) in others {
                let other = call.replace(from, to);
                assert_ne!(other, call);
                assert!(!model.follows(grammar, &other), "{other}");
            }
        }
        // A call of the other tool, and one without what it must have.
        let tokens = model.text.tokenizer.encode(call, false).unwrap();
        let (text, calls) = model.read(&tools, &tokens);
        assert_eq!(
            (text.as_str(), &calls[0].1),
            ("", &json!({"a": "x", "n": 1}))
        );
        let g = match model.format.name() {
            "gemma4" => "<|tool_call>call:g{}<tool_call|>",
            "qwen3.5" => "<tool_call>\n<function=g>\n</function>\n</tool_call>",
            _ => "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        };
        assert!(model.follows(&required, g) && !model.follows(&named, g));
        assert!(!model.follows(&required, &g.replace(['g'], "f")));
    }
}

#[test]
fn whatever_follows_a_grammar_is_read_as_calls_that_fit() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % n
    };
    for model in models() {
        for schema in schemas() {
            let tools = json!([tool("f", schema.clone()), tool("g", Value::Null)]);
            let grammar = model.compile(&tools, Want::Required, Some(3));
            let (mut n, mut n_arguments) = (0, 0);
            for _ in 0..40 {
                let Some(tokens) = model.walk(&grammar, &mut random) else {
                    continue;
                };
                let (text, calls) = model.read(&tools, &tokens);
                let wire = model
                    .text
                    .tokenizer
                    .detokenize(&tokens, text::Specials::Show);
                assert_eq!(text, "", "{wire:?}");
                assert!(calls.len() <= 3, "{wire:?}");
                for (name, arguments) in calls {
                    n += 1;
                    if name == "f" {
                        n_arguments += arguments.as_object().unwrap().len();
                        assert!(
                            fits(&schema, &schema, &arguments),
                            "{schema}\n{wire:?}\n{arguments}"
                        );
                    } else {
                        assert_eq!((name.as_str(), arguments), ("g", json!({})));
                    }
                }
            }
            assert!(n > 5, "{}: {n} calls of {schema}", model.format.name());
            assert!(
                n_arguments > 0 || schema["properties"] == json!({}),
                "{schema}"
            );
        }
    }
}

#[test]
fn a_string_may_end_without_a_line_break() {
    let [_, model, _] = models();
    let value = |a: &str| format!("<parameter=a>\n{a}</parameter>\n");
    for (lengths, text, read) in [
        (json!({}), "", Some("")),
        (json!({}), "\n", Some("")),
        (json!({}), "x", Some("x")),
        (json!({}), "x\n\n", Some("x\n")),
        (json!({"maxLength": 2}), "xy", Some("xy")),
        (json!({"maxLength": 2}), "xy\n", Some("xy")),
        (json!({"maxLength": 2}), "xyz", None),
        (json!({"minLength": 1}), "", None),
        (json!({"minLength": 1}), "\n", None),
        (json!({"minLength": 1}), "\n\n", Some("\n")),
        (json!({"minLength": 2, "maxLength": 2}), "xy", Some("xy")),
        (json!({"minLength": 2, "maxLength": 2}), "x\n", None),
        (json!({"minLength": 2, "maxLength": 2}), "x", None),
    ] {
        let mut schema = lengths.clone();
        schema["type"] = json!("string");
        let tools = json!([tool(
            "f",
            json!({"properties": {"a": schema}, "required": ["a"]})
        )]);
        let grammar = model.compile(&tools, Want::Required, None);
        let call = format!(
            "<tool_call>\n<function=f>\n{}</function>\n</tool_call>",
            value(text)
        );
        assert_eq!(
            model.follows(&grammar, &call),
            read.is_some(),
            "{lengths} {call:?}"
        );
        if let Some(read) = read {
            let tokens = model.text.tokenizer.encode(&call, false).unwrap();
            let (_, calls) = model.read(&tools, &tokens);
            assert_eq!(calls, [("f".to_owned(), json!({"a": read}))], "{call:?}");
        }
    }
}

#[test]
fn a_strict_call_fits_and_text_around_it_is_free() {
    for model in models() {
        let (tools, call) = (tools(), model.call);
        let strict = model.compile(&tools, Want::Strict(&[true, false]), None);
        let single = model.compile(&tools, Want::Strict(&[true, false]), Some(1));
        let wrong = call.replace(['1'], "one");
        let g = call
            .replace("call:f", "call:g")
            .replace("=f>", "=g>")
            .replace("\"f\"", "\"g\"");
        for text in ["", "So.\n", call, &format!("So: {call}"), &g] {
            assert!(model.follows(&strict, text), "{text}");
            assert!(model.follows(&single, text), "{text}");
        }
        let both = format!("a\n{call}\n{call}");
        assert!(model.follows(&strict, &both) && !model.follows(&single, &both));
        for text in [
            wrong.as_str(),
            &format!("So {wrong}"),
            &format!("{call}\n{wrong}"),
        ] {
            assert!(!model.follows(&strict, text), "{text}");
        }
    }
}

#[test]
fn marks_may_be_characters() {
    let tools = tools();
    for (name, call) in [
        (
            "hermes",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"n\": 1}}\n</tool_call>",
        ),
        (
            "qwen3.5",
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ] {
        let format = ToolFormat::named(name).unwrap();
        let compile = |want| {
            let grammar = grammar(&format, &tools, want, None).unwrap();
            let spec = Spec::LarkWithSchemas {
                lark: grammar.lark,
                schemas: grammar.schemas,
            };
            common::compiler().compile(&spec).unwrap()
        };
        let wrong = call.replace(['1'], "one");
        let required = compile(Want::Required);
        assert!(common::accepts(&required, call));
        assert!(common::accepts(&required, &format!("{call}\n{call}")));
        assert!(!common::accepts(&required, &wrong));
        assert!(!common::accepts(&required, &format!("So {call}")));
        let strict = compile(Want::Strict(&[true, false]));
        let free = call.replace("=f>", "=g>").replace("\"f\"", "\"g\"");
        for text in [
            "",
            "So <t",
            call,
            &format!("So <tool {call}\n{call} then"),
            &free,
        ] {
            assert!(common::accepts(&strict, text), "{text}");
        }
        for text in [&wrong, &format!("So {wrong}"), &format!("{call}{wrong}")] {
            assert!(!common::accepts(&strict, text), "{text}");
        }
    }
}

#[test]
fn what_has_no_form_is_named() {
    let with = |schema: Value| {
        json!([tool(
            "f",
            json!({"type": "object", "properties": {"p": schema}})
        )])
    };
    let [gemma, qwen, hermes] = models();
    for (schema, keyword, at_gemma, at_qwen) in [
        (
            json!({"type": "string", "pattern": "x"}),
            "pattern",
            true,
            true,
        ),
        (
            json!({"type": "string", "format": "date"}),
            "format",
            true,
            true,
        ),
        (
            json!({"type": "array", "uniqueItems": true}),
            "uniqueItems",
            true,
            false,
        ),
        (
            json!({"type": "object", "patternProperties": {}}),
            "patternProperties",
            true,
            false,
        ),
        (json!({"not": {"type": "string"}}), "not", true, true),
        (
            json!({"allOf": [{"type": "string"}, {"minLength": 1}]}),
            "allOf",
            true,
            true,
        ),
        (json!({"$ref": "#/properties/p"}), "$ref", true, true),
        (json!({"$ref": "other.json"}), "$ref", true, true),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            "oneOf",
            true,
            false,
        ),
        (json!({"type": ["string", "integer"]}), "type", false, true),
        (json!({"enum": ["a</parameter>"]}), "enum", false, true),
        (json!({"enum": ["1", 2]}), "enum", false, true),
        (
            json!({"type": "integer", "enum": ["a"]}),
            "enum",
            true,
            true,
        ),
        (
            json!({"type": "string", "maxLength": 1e9}),
            "maxLength",
            true,
            true,
        ),
        (json!(false), "false", true, true),
    ] {
        let tools = with(schema.clone());
        for (model, is_refused) in [(&gemma, at_gemma), (&qwen, at_qwen)] {
            let found = grammar(&model.format, &tools, Want::Required, None);
            match found {
                Err(Unsupported {
                    keyword: named,
                    tool,
                    pointer,
                    ..
                }) => {
                    assert!(is_refused, "{schema} {named}");
                    assert_eq!((named.as_str(), tool.as_str()), (keyword, "f"), "{schema}");
                    assert!(pointer.starts_with("/properties/p"), "{pointer}");
                }
                Ok(_) => assert!(!is_refused, "{schema}"),
            }
        }
        // JSON is checked where it is compiled.
        assert!(grammar(&hermes.format, &tools, Want::Required, None).is_ok());
    }
    for key in ["", "a<b", "a\nb"] {
        let tools = json!([tool("f", json!({"properties": {key: {"type": "string"}}}))]);
        for model in [&gemma, &qwen] {
            let found = grammar(&model.format, &tools, Want::Named("f"), None);
            let is_fine = key == "a<b" && model.format.name() == "gemma4";
            assert_eq!(found.is_ok(), is_fine, "{key:?}");
        }
    }
    let tools = json!([tool("f", json!({"properties": {}, "required": ["x"]}))]);
    assert_eq!(
        grammar(&gemma.format, &tools, Want::Required, None)
            .unwrap_err()
            .keyword,
        "required"
    );
    // Schemas that mention each other many times are given up in time.
    let mut definitions = Map::new();
    for i in 0..12 {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        let many: Map<String, Value> = (0..9).map(|k| (format!("k{k}"), next.clone())).collect();
        definitions.insert(
            format!("d{i}"),
            json!({"type": "object", "properties": many}),
        );
    }
    definitions.insert("d12".to_owned(), json!({"type": "string"}));
    let wide = json!({"properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
    let found = grammar(
        &gemma.format,
        &json!([tool("f", wide)]),
        Want::Required,
        None,
    );
    assert_eq!(found.unwrap_err().keyword, "properties");
    let texts: Map<String, Value> = (0..3000)
        .map(|k| {
            (
                format!("k{k}"),
                json!({"type": "array", "items": {"$ref": "#/$defs/x"}}),
            )
        })
        .collect();
    let large = json!({"properties": texts, "$defs": {"x": {"enum": ["y".repeat(1000)]}}});
    let found = grammar(
        &qwen.format,
        &json!([tool("f", large)]),
        Want::Required,
        None,
    );
    assert_eq!(found.unwrap_err().keyword, "$ref");
    // A tool that is not asked for is not looked at.
    let tools = json!([tool("f", json!({"not": {}})), tool("g", Value::Null)]);
    assert!(grammar(&gemma.format, &tools, Want::Named("g"), None).is_ok());
    assert!(grammar(&gemma.format, &tools, Want::Strict(&[false, true]), None).is_ok());
}
