//! A string, one part and several parts are the same prompt, in any role.

use serde_json::{Value, json};

use crate::subjects::{all, conversation};

const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// A text as a string, and as lists of parts whose text is the same.
fn forms() -> Vec<(Value, Vec<Value>)> {
    let text = |text: &str| json!({"type": "text", "text": text});
    let mut forms = Vec::new();
    for whole in [
        "Be brief and kind.",
        "Two\nlines,\n\nand a third",
        "字 – 👩‍👩‍👧 'quoted' \"twice\"",
        " edges ",
        "",
    ] {
        let at = whole.char_indices().nth(whole.chars().count() / 2);
        let (first, second) = whole.split_at(at.map_or(0, |(at, _)| at));
        forms.push((
            json!(whole),
            vec![
                json!([text(whole)]),
                json!([text(first), text(second)]),
                json!([text(first), text(""), text(second)]),
                json!([whole]),
                json!([first, text(second)]),
                json!([{"text": whole}]),
                json!([{"type": "input_text", "text": whole}]),
                json!([{"type": "output_text", "text": first, "annotations": []}, {"type": "input_text", "text": second}]),
                json!([{"type": "refusal", "refusal": whole}]),
            ],
        ));
    }
    forms
}

#[test]
fn text_of_any_form_has_the_ids_of_the_string() {
    for subject in all() {
        for role in ROLES {
            let mut n_answered = 0;
            for (string, lists) in forms() {
                let expected = subject.ids(&conversation(role, &string), None);
                n_answered += usize::from(expected.is_ok());
                for list in lists {
                    let ids = subject.ids(&conversation(role, &list), None);
                    assert_eq!(ids, expected, "{}, {role}: {list}", subject.name);
                }
            }
            let may_refuse = ["tool", "function"].contains(role);
            assert!(
                n_answered == forms().len() || may_refuse,
                "{}, {role}",
                subject.name
            );
        }
    }
}

#[test]
fn text_of_any_form_is_in_the_prompt_as_it_was_sent() {
    for subject in all() {
        for role in ["system", "developer", "user", "assistant"] {
            for content in [
                json!("Two\nlines"),
                json!(["Two\n", {"type": "text", "text": "lines"}]),
            ] {
                let prompt =
                    subject.spell(&subject.ids(&conversation(role, &content), None).unwrap());
                assert!(
                    prompt.contains("Two\nlines"),
                    "{}, {role}: {prompt}",
                    subject.name
                );
                assert!(!prompt.contains("'text'") && !prompt.contains("\"text\""));
            }
        }
    }
}
