//! Any text as a reply that may have tool calls, and any JSON as a tool's schema.
//!
//! An input that begins with `{` is a tool's `parameters`: a grammar is written for it, or a
//! keyword is named. Of any other the first byte chooses the form of calls, the second how the
//! text is cut into pieces. Whatever the pieces, the events are the same, and nothing is lost.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use text::tools::grammar::{Want, grammar};
use text::{ToolCalls, ToolEvent, ToolFormat, Tools};

/// Texts that bytes above 127 stand for, since marks are rarely found by chance.
const WORDS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "call:f{",
    "<function=f>",
    "<parameter=a>",
    "<parameter=b>",
    "</parameter>",
    "</function>",
    "{\"name\": \"f\", \"arguments\": ",
    "\"name\"",
    "\"arguments\"",
    "\\u",
    "d83d",
    "\n",
    "é",
];

/// What a client puts together.
#[derive(Debug, Default, PartialEq)]
struct Reply {
    text: String,
    /// Text, and calls in their wire form.
    wire: String,
    /// Name, arguments, and whether the call is whole and broken.
    calls: Vec<(String, String, bool, bool)>,
}

fuzz_target!(|data: &[u8]| {
    if data.first() == Some(&b'{') {
        if let Ok(parameters) = serde_json::from_slice(data) {
            schema(&parameters);
        }
        return;
    }
    let [form, cut, rest @ ..] = data else { return };
    let names: Vec<&str> = ToolFormat::names().collect();
    let name = names[usize::from(*form) % names.len()];
    let text: String = rest.iter().map(|&byte| word(byte)).collect();
    let whole = read(name, &text, usize::MAX);
    let dense = |text: &str| text.split_whitespace().collect::<String>();
    assert_eq!(dense(&whole.wire), dense(&text), "{text:?}");
    assert_eq!(whole, read(name, &text, usize::from(*cut) + 1));
    for (_, arguments, is_whole, is_broken) in &whole.calls {
        assert!(is_whole != is_broken);
        if *is_whole {
            match serde_json::from_str::<Value>(arguments) {
                Ok(arguments) => assert!(arguments.is_object()),
                // JSON has no largest number.
                Err(err) => assert!(err.to_string().contains("out of range"), "{arguments}"),
            }
        }
    }
    if whole.calls.iter().all(|call| !call.2) {
        assert_eq!(whole.text, text);
    }
});

fn word(byte: u8) -> String {
    let word = usize::from(byte)
        .checked_sub(128)
        .and_then(|i| WORDS.get(i));
    word.map_or_else(|| char::from(byte).to_string(), |word| (*word).to_owned())
}

/// Reads `text` in pieces of `length` bytes.
fn read(name: &str, text: &str, length: usize) -> Reply {
    let properties = json!({"a": {"type": "string"}, "b": {"type": "integer"}});
    let tools = json!([{"name": "f", "parameters": {"properties": properties}}]);
    let format = ToolFormat::named(name).expect("a known form");
    let mut calls = ToolCalls::new(format, Arc::new(Tools::new(&tools)));
    let mut reply = Reply::default();
    let mut take = |event: ToolEvent<'_>| match event {
        ToolEvent::Text(text) => {
            reply.text += text;
            reply.wire += text;
        }
        ToolEvent::Begin { index, name } => {
            assert_eq!(index, reply.calls.len());
            let call = (name.to_owned(), String::new(), false, false);
            reply.calls.push(call);
        }
        ToolEvent::Arguments { index, json } => reply.calls[index].1 += json,
        ToolEvent::End { index, wire } => {
            reply.calls[index].2 = true;
            reply.wire += wire;
        }
        ToolEvent::Broken { index } => reply.calls[index].3 = true,
    };
    let mut rest = text;
    while !rest.is_empty() {
        let mut at = length.min(rest.len());
        while !rest.is_char_boundary(at) {
            at += 1;
        }
        calls.push(&rest[..at], &mut take);
        rest = &rest[at..];
    }
    calls.finish(&mut take);
    reply
}

/// Writes the grammars of a tool with these parameters.
fn schema(parameters: &Value) {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let _ = Tools::new(&tools);
    for name in ToolFormat::names() {
        let format = ToolFormat::named(name).expect("a known form");
        for want in [Want::Required, Want::Named("f"), Want::Strict(&[true])] {
            let _ = grammar(&format, &tools, want, Some(2));
        }
    }
}
