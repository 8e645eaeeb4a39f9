//! What the model's chat template reads.

use text::Text;

/// Whether the model's chat template has the word `name`, so that a field or an argument
/// of that name may change the prompt.
pub(crate) fn template_uses(text: &Text, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.template.as_ref().is_some_and(|template| {
        let source = template.source();
        let mut found = source.match_indices(name);
        found.any(|(at, _)| {
            !name.is_empty()
                && !source[..at].ends_with(is_part)
                && !source[at + name.len()..].starts_with(is_part)
        })
    })
}
