//! One rendering, with the cost of every instruction counted.
//!
//! The interpreter counts instructions, not what one costs: `x ~ x` is one, whether `x`
//! has ten bytes or a gigabyte. So the compiled program is rewritten before it runs
//! (`rewrite`). Before an instruction that can be costly stands a hook that looks at the
//! operands and puts them back; after one that makes a value stands a hook that counts it:
//!
//! ```text
//! Add        →  ApplyFilter(check +, 2)  UnpackList(2)  Add  ApplyFilter(made, 1)
//! EmitRaw(s) →  LoadConst(s)  Emit
//! ```
//!
//! A hook is a filter whose name no template can spell (`hooks`). A template within its
//! budget computes by the same instructions what it computes without hooks; one that
//! doubles a string forty times fails when its values have 8 MiB and sixteen times the
//! bytes of its input (`meter`).

use std::collections::BTreeMap;

use minijinja::machinery::{eval, get_compiled_template, make_string_output};
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, Value};
use serde_json::Map;

use super::rewrite::with_hooks;

/// Renders the template `name`. Returns the text that was written, and the error that ended
/// the rendering early.
pub(super) fn render(
    env: &Environment<'_>,
    name: &str,
    context: &Map<String, serde_json::Value>,
) -> (String, Result<(), Error>) {
    let mut text = String::new();
    let result = (|| {
        let template = env.get_template(name)?;
        let compiled = get_compiled_template(&template);
        let code = with_hooks(&compiled.instructions, Some(input_bytes(context)))?;
        let blocks: BTreeMap<_, _> = compiled
            .blocks
            .iter()
            .map(|(name, code)| Ok((*name, with_hooks(code, None)?)))
            .collect::<Result<_, Error>>()?;
        let root = Value::from(Serde(context));
        let mut out = make_string_output(&mut text);
        eval(env, &code, root, &blocks, &mut out, AutoEscape::None).map(drop)
    })();
    (text, result)
}

/// About how many bytes the arguments of a rendering take.
fn input_bytes(context: &Map<String, serde_json::Value>) -> usize {
    fn bytes(value: &serde_json::Value) -> usize {
        const NODE: usize = 64;
        match value {
            serde_json::Value::String(text) => NODE + text.len(),
            serde_json::Value::Array(items) => NODE + items.iter().map(bytes).sum::<usize>(),
            serde_json::Value::Object(map) => {
                let entries = map
                    .iter()
                    .map(|(key, value)| NODE + key.len() + bytes(value));
                NODE + entries.sum::<usize>()
            }
            _ => NODE,
        }
    }
    context.values().map(bytes).sum()
}
