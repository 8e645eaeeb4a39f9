//! System and developer messages are said, wherever they stand.

use serde_json::{Value, json};
use text::{ContentForm, SystemPlace};

use crate::subjects::{Subject, all, bundled};

fn says(subject: &Subject, messages: &Value, in_order: &[&str]) {
    let ids = subject.ids(messages, None);
    let prompt = subject.spell(&ids.unwrap_or_else(|err| panic!("{}: {err}", subject.name)));
    let mut at = 0;
    for words in in_order {
        let found = prompt[at..].find(words);
        at += found.unwrap_or_else(|| panic!("{}: {words} in {prompt}", subject.name));
    }
}

#[test]
fn what_clients_send_is_answered() {
    for subject in all() {
        // Three prompts and instructions, as pydantic-ai sends them.
        let messages = json!([
            {"role": "system", "content": "Rule one."},
            {"role": "system", "content": "Rule two."},
            {"role": "system", "content": "Rule three."},
            {"role": "user", "content": "Hello there"},
        ]);
        says(
            &subject,
            &messages,
            &["Rule one.\n\nRule two.\n\nRule three.", "Hello there"],
        );
        // Two developer messages of parts, then two user messages, as Codex.
        let part = |text: &str| json!([{"type": "input_text", "text": text}]);
        let messages = json!([
            {"role": "developer", "content": part("Rule one.")},
            {"role": "developer", "content": part("Rule two.")},
            {"role": "user", "content": part("Where am I?")},
        ]);
        says(
            &subject,
            &messages,
            &["Rule one.\n\nRule two.", "Where am I?"],
        );
        // A system message after the first user turn, as Claude Code; then the next turn.
        let mut messages = json!([
            {"role": "system", "content": [{"type": "text", "text": "Rule one."}, {"type": "text", "text": "\nRule two."}]},
            {"role": "user", "content": "Hello there"},
            {"role": "system", "content": "Late rule."},
        ]);
        says(
            &subject,
            &messages,
            &["Rule one.\nRule two.", "Hello there", "Late rule."],
        );
        let more = [
            json!({"role": "assistant", "content": "Hi."}),
            json!({"role": "user", "content": "What now?"}),
        ];
        messages.as_array_mut().unwrap().extend(more);
        let order = ["Hello there", "Late rule.", "Hi.", "What now?"];
        if subject.name != "inst" {
            says(&subject, &messages, &order);
        }
    }
}

#[test]
fn a_late_instruction_joins_the_user_turn() {
    for subject in bundled() {
        let ids = |messages: Value| subject.ids(&messages, None).unwrap();
        assert_eq!(
            ids(json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])),
            ids(json!([{"role": "user", "content": "a\n\nb"}])),
        );
        assert_eq!(
            ids(
                json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "developer", "content": "c"}, {"role": "user", "content": "d"}])
            ),
            ids(
                json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c\n\nd"}])
            ),
        );
    }
}

#[test]
fn templates_are_known_by_what_they_write() {
    use ContentForm::{Either, Parts, Text};
    use SystemPlace::{Anywhere, First, Nowhere};
    let known = |name: &str| match name {
        "chatml" | "headers" | "composed" | "plain-roles" | "role-marks" | "agent" | "tags" => {
            Some((Text, Text, Anywhere))
        }
        "sections" => Some((Text, Text, Anywhere)),
        "shouted" => Some((Text, Text, Anywhere)),
        "inst" | "fullwidth" | "speakers" => Some((Text, Text, First)),
        "start-of-turn" => Some((Text, Text, Nowhere)),
        "start-of-turn-parts" => Some((Either, Either, Anywhere)),
        "only-parts" => Some((Parts, Parts, Anywhere)),
        "parts-of-users" => Some((Text, Parts, Anywhere)),
        "render turns" => Some((Text, Either, First)),
        "render agent" => None,
        "render plain" => Some((Text, Text, Anywhere)),
        "render declare" => None,
        _ => Some((Text, Either, First)),
    };
    for subject in all() {
        let reads = subject.text.template.as_ref().unwrap().reads();
        if let Some(known) = known(&subject.name) {
            let found = (reads.system, reads.user, reads.place);
            assert_eq!(found, known, "{}", subject.name);
        }
    }
}
