//! Which texts follow which grammars.

mod common;

use common::{accepts, compiler, schema};
use constrain::{Error, Spec};
use serde_json::json;

#[track_caller]
fn check(spec: Spec, yes: &[&str], no: &[&str]) {
    let grammar = compiler().compile(&spec).unwrap();
    for text in yes {
        assert!(accepts(&grammar, text), "{text:?} follows {spec:?}");
    }
    for text in no {
        assert!(
            !accepts(&grammar, text),
            "{text:?} does not follow {spec:?}"
        );
    }
}

#[test]
fn a_json_object_is_any_object() {
    check(
        Spec::JsonObject,
        &[
            "{}",
            r#"{"a":1}"#,
            r#"{"a": [1, -2.5e3, true, null, "x\n\"\\"], "é字": {}}"#,
            r#"{"a":{"b": [1,2, 3]},"c":[]}"#,
        ],
        &[
            "",
            "[]",
            "1",
            " {}",
            "{} ",
            "{}{}",
            r#"{"a":1"#,
            r#"{a:1}"#,
            r#"{"a":01}"#,
            r#"{"a":1,}"#,
            "{\"a\":\"\n\"}",
            r#"{"a":"\x"}"#,
            r#"{"a":"\ud800"}"#,
            r#"{"a":+1}"#,
        ],
    );
}

#[test]
fn white_space_is_one_space_after_commas_and_colons() {
    check(
        Spec::JsonObject,
        &[
            r#"{"a":1,"b":[1,2]}"#,
            r#"{"a": 1, "b": [1, 2]}"#,
            r#"{"a": 1,"b":[1, 2]}"#,
        ],
        &[
            "{ }",
            r#"{ "a":1}"#,
            r#"{"a" :1}"#,
            r#"{"a":  1}"#,
            r#"{"a":1 }"#,
            r#"{"a":1 ,"b":2}"#,
            r#"{"a":1,  "b":2}"#,
            "{\n\"a\":1}",
            "{\"a\":\t1}",
            r#"{"a":[ 1]}"#,
        ],
    );
}

#[test]
fn strings_are_unicode_and_have_one_spelling() {
    let grammar = schema(json!({"type": "string"})).unwrap();
    for text in [r#""""#, r#""é字👍""#, r#""\\\"\n""#] {
        assert!(accepts(&grammar, text), "{text}");
    }
    for text in [r#""\u00e9""#, r#""\/""#, "\"\u{7f}\"", "\"\u{1}\""] {
        assert!(!accepts(&grammar, text), "{text}");
    }
    // A lone byte of a longer character, a surrogate, and an overlong form.
    for bytes in [&b"\"\xC3\""[..], b"\"\xED\xA0\x80\"", b"\"\xC0\x80\""] {
        let mut matcher = grammar.start();
        let all = bytes
            .iter()
            .all(|&byte| matcher.push(u32::from(byte)).unwrap());
        assert!(!all, "{bytes:?}");
    }
}

#[test]
fn a_property_cannot_be_named_by_another_spelling() {
    let grammar = schema(json!({"properties": {"a": {"type": "integer"}}})).unwrap();
    assert!(accepts(&grammar, r#"{"a":1,"b":"x"}"#));
    assert!(!accepts(&grammar, r#"{"a":"x"}"#));
    assert!(!accepts(&grammar, r#"{"\u0061":"x"}"#));
    assert!(!accepts(&grammar, r#"{"a":1,"a":"x"}"#));
}

#[test]
fn schemas_hold() {
    let list = json!({
        "type": "object",
        "properties": {
            "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"$ref": "#/$defs/item"}},
            "note": {"type": ["string", "null"], "maxLength": 4},
        },
        "required": ["items", "note"],
        "additionalProperties": false,
        "$defs": {"item": {"oneOf": [
            {"type": "object", "properties": {"kind": {"const": "count"}, "n": {"type": "integer", "minimum": 1, "maximum": 12}},
                "required": ["kind", "n"], "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"enum": ["weight", "volume"]}, "x": {"type": "number", "exclusiveMinimum": 0}},
                "required": ["kind", "x"], "additionalProperties": false},
        ]}},
    });
    check(
        Spec::JsonSchema(list),
        &[
            r#"{"items":[{"kind":"count","n":12}],"note":null}"#,
            r#"{"items": [{"kind": "weight", "x": 0.5}, {"kind": "count", "n": 1}], "note": "abéd"}"#,
        ],
        &[
            r#"{"items":[],"note":null}"#,
            r#"{"items":[{"kind":"count","n":13}],"note":null}"#,
            r#"{"items":[{"kind":"count","x":1}],"note":null}"#,
            r#"{"items":[{"kind":"weight","x":0}],"note":null}"#,
            r#"{"items":[{"kind":"count","n":1}],"note":"abcde"}"#,
            r#"{"items":[{"kind":"count","n":1}]}"#,
            r#"{"items":[{"kind":"count","n":1}],"note":null,"more":1}"#,
        ],
    );
    let tree = json!({"$ref": "#/definitions/tree", "definitions": {"tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#/definitions/tree"}}},
        "required": ["children"],
        "additionalProperties": false,
    }}});
    check(
        Spec::JsonSchema(tree),
        &[r#"{"children":[{"children":[]},{"children":[]}]}"#],
        &[r#"{"children":[{}]}"#, r#"{"children":[1]}"#],
    );
    check(
        Spec::JsonSchema(json!({"type": "string", "format": "date", "pattern": "^2"})),
        &[r#""2024-02-29""#, r#""2000-02-29""#],
        &[
            r#""2023-02-29""#,
            r#""2100-02-29""#,
            r#""1999-01-01""#,
            r#""2024-13-01""#,
        ],
    );
    check(
        Spec::JsonSchema(
            json!({"allOf": [{"type": "integer"}, {"minimum": -3}], "anyOf": [{"maximum": 0}, {"minimum": 9, "multipleOf": 5}]}),
        ),
        &["-3", "0", "10", "15"],
        &["-4", "1", "9", "11", "1.0"],
    );
    check(
        Spec::JsonSchema(
            json!({"additionalProperties": {"type": "integer"}, "type": "object", "propertyNames": {"pattern": "^x"}}),
        ),
        &[r#"{}"#, r#"{"x":1,"xy":2}"#],
        &[r#"{"y":1}"#, r#"{"x":"a"}"#],
    );
}

#[test]
fn a_keyword_that_cannot_be_enforced_is_named_with_its_place() {
    for (schema, keyword, pointer) in [
        (json!({"not": {"type": "string"}}), "not", "#/not"),
        (
            json!({"properties": {"a/b": {"uniqueItems": true}}}),
            "uniqueItems",
            "#/properties/a~1b/uniqueItems",
        ),
        (
            json!({"items": [{"if": {}, "then": {}}]}),
            "if",
            "#/items/0/if",
        ),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            "oneOf",
            "#/oneOf",
        ),
        (
            json!({"type": "string", "format": "idn-email"}),
            "format",
            "#/format",
        ),
        (
            json!({"type": "string", "pattern": "(a)\\1"}),
            "pattern",
            "#/pattern",
        ),
        (
            json!({"type": "string", "nullable": true}),
            "nullable",
            "#/nullable",
        ),
        (
            json!({"type": "string", "minLenght": 3}),
            "minLenght",
            "#/minLenght",
        ),
        (
            json!({"$ref": "http://example.com/a.json"}),
            "$ref",
            "#/$ref",
        ),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}}),
            "contains",
            "#/$defs/a/contains",
        ),
        (
            json!({"allOf": [{"dependentRequired": {"a": ["b"]}}]}),
            "dependentRequired",
            "#/allOf/0/dependentRequired",
        ),
        (
            json!({"type": "object", "minProperties": 3}),
            "minProperties",
            "#/minProperties",
        ),
        (
            json!({"const": 9_007_199_254_740_993_u64}),
            "const",
            "#/const",
        ),
        (
            json!({"allOf": [{}], "unevaluatedProperties": false}),
            "unevaluatedProperties",
            "#/unevaluatedProperties",
        ),
    ] {
        let found = common::schema(schema.clone());
        match found {
            Err(Error::UnsupportedKeyword {
                keyword: k,
                pointer: p,
                ..
            }) => {
                assert_eq!((&*k, &*p), (keyword, pointer), "{schema}");
            }
            other => panic!("{schema}: {other:?}"),
        }
    }
}

#[test]
fn a_schema_that_is_wrong_or_that_nothing_satisfies_is_refused() {
    for schema in [
        json!({"type": "text"}),
        json!({"properties": []}),
        json!({"enum": []}),
        json!({"minLength": -1}),
        json!({"multipleOf": 0}),
        json!({"required": "a"}),
        json!({"items": 3}),
        json!({"$ref": "#/$defs/missing"}),
        json!({"$ref": "#"}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
    ] {
        let found = common::schema(schema.clone());
        assert!(
            matches!(found, Err(Error::InvalidSchema { .. })),
            "{schema}: {found:?}"
        );
    }
    for schema in [
        json!(false),
        json!({"type": "string", "minLength": 3, "maxLength": 2}),
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
        json!({"type": "string", "allOf": [{"type": "integer"}]}),
        json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ] {
        let found = common::schema(schema.clone());
        assert!(
            matches!(found, Err(Error::Unsatisfiable { .. })),
            "{schema}: {found:?}"
        );
    }
}

#[test]
fn a_regular_expression_matches_from_start_to_end() {
    check(
        Spec::Regex(r"\d{3}-[a-c]+|x.?".to_owned()),
        &["123-abc", "x", "xé"],
        &["12-a", "123-", "a123-a", "xyz", "x\n", "١٢٣-a"],
    );
    check(Spec::Regex("^a|b$".to_owned()), &["a", "b"], &["ab", ""]);
    check(
        Spec::Regex("(a|b)*abb".to_owned()),
        &["abb", "ababb"],
        &["ab", "abba"],
    );
    let found = compiler().compile(&Spec::Regex(r"(?=a)b".to_owned()));
    assert!(matches!(found, Err(Error::Invalid { .. })), "{found:?}");
}

#[test]
fn a_choice_is_one_of_its_texts() {
    let texts = ["yes", "no", "no way", "a/b|c", "\"q\"", "[x]"].map(str::to_owned);
    check(
        Spec::Choice(texts.to_vec()),
        &["yes", "no", "no way", "a/b|c", "\"q\"", "[x]"],
        &["", "n", "yesno", "no ", "a", "x"],
    );
    for texts in [vec![], vec![String::new()]] {
        assert!(compiler().compile(&Spec::Choice(texts)).is_err());
    }
}

#[test]
fn a_lark_grammar_may_mention_schemas_and_control_tokens() {
    let lark = r#"start: ("sum" | "list") " " value
value: NUMBER | "(" value ("," value)* ")"
NUMBER: /[0-9]+/
"#;
    check(
        Spec::Lark(lark.to_owned()),
        &["sum 12", "list (1,(2,3))"],
        &["sum", "sum (", "sum ()", "list 1,2"],
    );
    let spec = Spec::LarkWithSchemas {
        lark: "start: <|call|> \"f\" @arguments".to_owned(),
        schemas: vec![(
            "arguments".to_owned(),
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}),
        )],
    };
    let grammar = compiler().compile(&spec).unwrap();
    let mut matcher = grammar.start();
    assert_eq!(matcher.forced(1), [common::CALL]);
    assert!(matcher.push(common::CALL).unwrap());
    assert!(common::follow(&mut matcher, r#"f{"a":12"#));
    assert!(!matcher.may_end());
    assert!(common::follow(&mut matcher, "}"));
    assert!(matcher.must_end());
    for (lark, reason) in [
        ("start: %json {\"type\": \"string\"}", "%json"),
        ("start: \"a", "lark"),
        ("begin: \"a\"", "start"),
    ] {
        let found = compiler().compile(&Spec::Lark(lark.to_owned()));
        assert!(
            matches!(found, Err(Error::Invalid { .. })),
            "{reason}: {found:?}"
        );
    }
    let open = Spec::LarkWithSchemas {
        lark: "start: @other".to_owned(),
        schemas: vec![],
    };
    assert!(matches!(
        compiler().compile(&open),
        Err(Error::Invalid { .. })
    ));
}

#[test]
fn dates_are_days_of_the_years_1_to_9999() {
    check(
        Spec::JsonSchema(json!({"type": "string", "format": "date"})),
        &[
            r#""0001-01-01""#,
            r#""2000-02-29""#,
            r#""0400-02-29""#,
            r#""2024-02-29""#,
            r#""1990-12-31""#,
            r#""9999-11-30""#,
        ],
        &[
            r#""0000-01-01""#,
            r#""0000-02-29""#,
            r#""1900-02-29""#,
            r#""2023-02-29""#,
            r#""2023-11-31""#,
            r#""2023-00-10""#,
        ],
    );
}
