//! Arguments in Qwen's form: a tagged value for each parameter, strings as they are.

use serde_json::{Map, Value};

use super::super::schema::Types;
use super::{Unsupported, Writer, literal, times};

/// What stands after a string.
const END: &str = "\n</parameter>\n";

impl Writer {
    /// The parameters of a call, in the order of `properties`.
    pub(super) fn qwen(&mut self, root: &Value) -> Result<String, Unsupported> {
        let schema = self.resolved(root, "")?;
        let mut out = Vec::new();
        for (key, schema, is_required) in self.properties(&schema, "")? {
            let at = format!("/properties/{key}");
            if key.is_empty() || key.contains(['<', '>', '\n']) {
                let reason = "a name cannot be empty or have `<`, `>` or a line break";
                return Err(self.unsupported("properties", &at, reason));
            }
            let value = self.value(&schema, &at)?;
            let parameter = format!("{} {value}", literal(&format!("<parameter={key}>\n")));
            out.push(match is_required {
                true => parameter,
                false => format!("({parameter})?"),
            });
        }
        Ok(out.join(" "))
    }

    /// A value and what stands after it.
    fn value(&mut self, schema: &Value, at: &str) -> Result<String, Unsupported> {
        let own = self.resolved(schema, at)?;
        let types = Types::allowed(schema, &self.root, &mut 256);
        if types.excludes(Types::TEXT) {
            let value = self.schema(schema.clone(), at)?;
            return Ok(format!("{value} {}", literal(END)));
        }
        if let Some(values) = self.listed(&own, at)? {
            return self.one_text(types, &values, at);
        }
        let known = ["type", "anyOf", "oneOf", "minLength", "maxLength"];
        self.only(&own, &known, at)?;
        // A text that is `null` is read as null, which is valid too; any other is a string.
        let texts = self.branches(&own, at)?;
        let [text] = &texts[..] else {
            let reason = "strings beside other types than null look alike here";
            return Err(self.unsupported("type", at, reason));
        };
        if types == Types::ANY {
            return Ok(self.text(None, None));
        }
        self.only(text, &["type", "minLength", "maxLength"], at)?;
        let least = self.count(text, "minLength", at)?;
        let most = self.count(text, "maxLength", at)?;
        let is_nullable = types != Types::TEXT;
        if is_nullable && (least.is_some_and(|n| n > 4) || most.is_some_and(|n| n < 4)) {
            let value = self.text(least, most);
            return Ok(format!("({value} | {})", literal(&format!("null{END}"))));
        }
        Ok(self.text(least, most))
    }

    /// The schemas of strings that `schema` allows, where it allows no other type but null.
    fn branches(
        &self,
        schema: &Map<String, Value>,
        at: &str,
    ) -> Result<Vec<Map<String, Value>>, Unsupported> {
        let key = ["anyOf", "oneOf"]
            .into_iter()
            .find(|key| schema.contains_key(*key));
        let Some(key) = key else {
            let types = Types::allowed(&Value::Object(schema.clone()), &self.root, &mut 256);
            let is_plain = types == Types::ANY && self.only(schema, &[], at).is_ok();
            let fits = is_plain || types.within(Types::TEXT_OR_NULL);
            return Ok(if fits {
                vec![schema.clone()]
            } else {
                Vec::new()
            });
        };
        self.only(schema, &[key], at)?;
        let list = schema[key]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        let mut texts = Vec::new();
        for (i, branch) in list.iter().enumerate() {
            let at = format!("{at}/{key}/{i}");
            let types = Types::allowed(branch, &self.root, &mut 256);
            let own = self.resolved(branch, &at)?;
            match () {
                () if types == Types::NULL => self.only(&own, &["type", "const"], &at)?,
                () if types == Types::TEXT => texts.push(own),
                () => return Ok(Vec::new()),
            }
        }
        Ok(texts)
    }

    /// One of some values, and what stands after it.
    fn one_text(&self, types: Types, values: &[Value], at: &str) -> Result<String, Unsupported> {
        let mut texts = Vec::new();
        for value in values {
            let text = match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let mut read = String::new();
            types.write(&text, &mut read);
            let is_same = serde_json::from_str::<Value>(&read).is_ok_and(|read| read == *value);
            if !is_same || text.contains("</parameter>") {
                let reason = "one of its values would be read as another";
                return Err(self.unsupported("enum", at, reason));
            }
            texts.push(literal(&(text + END)));
        }
        Ok(format!("({})", texts.join(" | ")))
    }

    /// A string of `least` to `most` characters, and what stands after it.
    ///
    /// The line break before the closing tag may be missing, for a model that has begun to write
    /// the tag without it could not end the string. The break is never part of the string, so
    /// a string that ends without one has its `least` characters before any break.
    fn text(&mut self, least: Option<u64>, most: Option<u64>) -> String {
        let whole = times(least, most);
        let without_break = match least {
            None | Some(0) => format!("(?s:.){whole}"),
            Some(least) => {
                let before_last = times(Some(least - 1), most.map(|most| most.saturating_sub(1)));
                format!(r"(?s:.){before_last}[^\n]")
            }
        };
        let end = r"<\/parameter>\n";
        self.terminal(&format!(
            r"/((?s:.){whole}\n|{without_break}){end}/ & ~/(?s:.*)<\/parameter>(?s:..+)/"
        ))
    }
}
