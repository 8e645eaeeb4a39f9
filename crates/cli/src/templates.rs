//! Chat templates that `serve --chat-template` can name, and those in files.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::Read;
use text::template::TEMPLATE_BYTES_MAX;

/// The built-in templates: name and source.
const BUILT_IN: &[(&str, &str)] = &[("chatml", include_str!("templates/chatml.jinja"))];

/// The source of the built-in template called `template`, or of the one in the file there.
pub(crate) fn source(template: &str) -> Result<String> {
    let built_in = BUILT_IN.iter().find(|(name, _)| *name == template);
    if let Some((_, source)) = built_in {
        return Ok((*source).to_owned());
    }
    let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    let cannot = || {
        format!(
            "cannot read a chat template, and those that are built in are {}: `{template}`",
            names.join(", ")
        )
    };
    let mut source = String::new();
    let file = File::open(template).with_context(cannot)?;
    file.take(TEMPLATE_BYTES_MAX as u64 + 1)
        .read_to_string(&mut source)
        .with_context(cannot)?;
    if source.len() > TEMPLATE_BYTES_MAX {
        bail!(
            "a chat template has at most {TEMPLATE_BYTES_MAX} bytes, there are more in `{template}`"
        );
    }
    Ok(source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use text::ChatTemplate;

    #[test]
    fn a_template_is_named_or_in_a_file() {
        let chatml = source("chatml").unwrap();
        let template = ChatTemplate::new(Some(&chatml), &serde_json::Value::Null).unwrap();
        let messages = serde_json::json!([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]);
        let prompt = template.render(&messages, None, true, &serde_json::Map::new());
        assert_eq!(
            prompt.unwrap(),
            "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        );
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/templates/chatml.jinja");
        assert_eq!(source(file).unwrap(), chatml);
        let error = format!("{:#}", source("no such file").unwrap_err());
        assert!(
            error.contains("built in are chatml: `no such file`"),
            "{error}"
        );
    }
}
