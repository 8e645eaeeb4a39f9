//! Whether, how hard and how long the model reasons before it answers, under the names that
//! OpenAI, vLLM, llama-server, Ollama, OpenRouter and Anthropic's clients have for it.
//!
//! | asked for | what it does |
//! | --- | --- |
//! | on, off | the argument `enable_thinking` of the chat template |
//! | effort | `none` is off, `high` and `xhigh` on; the argument `reasoning_effort` where the template reads it; where it does not, `minimal` and `low` are a budget of [`LOW_EFFORT_TOKENS`] |
//! | budget | tokens of reasoning, at most; 0 is off |
//!
//! Several fields may ask for the same. Fields that contradict each other are a 400.

use serde_json::{Map, Value, json};

use crate::errors::ApiError;
use crate::fields::Fields;

/// Tokens of reasoning that a low effort allows where the template does not read the effort.
const LOW_EFFORT_TOKENS: usize = 1024;
/// Fields that are a budget.
const BUDGETS: &[&str] = &[
    "thinking_budget",
    "thinking_token_budget",
    "reasoning_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
];
/// Most tokens of a budget; no context is longer.
const BUDGET_MAX: i64 = u32::MAX as i64;
/// The template's arguments.
const ENABLE: &str = "enable_thinking";
const EFFORT: &str = "reasoning_effort";

/// What a request says of reasoning.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Thinking {
    /// On or off, and the field that says so.
    switch: Option<(&'static str, bool)>,
    /// The effort by name.
    effort: Option<String>,
    /// Tokens, at most.
    budget: Option<usize>,
}

impl Thinking {
    /// Reads what `fields` say of reasoning.
    ///
    /// # Errors
    ///
    /// 400 for a wrong value, and for fields that contradict each other.
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let mut thinking = Thinking::default();
        if let Some(on) = fields.bool(ENABLE)? {
            thinking.turn(fields, ENABLE, on)?;
        }
        thinking.think(fields)?;
        if let Some(effort) = fields.string(EFFORT)? {
            thinking.set_effort(fields, EFFORT, effort)?;
        }
        thinking.read_thinking(fields)?;
        thinking.read_reasoning(fields)?;
        for &name in BUDGETS {
            if let Some(tokens) = fields.integer(name, -1..=BUDGET_MAX)? {
                thinking.limit(fields, name, tokens)?;
            }
        }
        Ok(thinking)
    }

    /// What is meant where a request says nothing: `default`, if there is one.
    pub(crate) fn or(mut self, default: Option<bool>) -> Self {
        if let (true, Some(on)) = (self == Thinking::default(), default) {
            self.switch = Some(("reasoning", on));
        }
        self
    }

    /// Reads what a request of Ollama's API says of reasoning: its `think`.
    ///
    /// # Errors
    ///
    /// 400 for a wrong value.
    pub(crate) fn read_think(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let mut thinking = Thinking::default();
        thinking.think(fields)?;
        Ok(thinking)
    }

    /// Ollama's: on, off, or an effort by name.
    fn think(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        const NAME: &str = "think";
        match fields.get(NAME) {
            None => Ok(()),
            Some(Value::Bool(on)) => self.turn(fields, NAME, *on),
            Some(_) => {
                let effort = fields.string(NAME)?.unwrap_or_default();
                self.set_effort(fields, NAME, effort)
            }
        }
    }

    /// Reads what a request of Anthropic's Messages API says of reasoning: its `thinking`, and
    /// the `effort` of its `output_config`. Silence turns reasoning off and `adaptive` on; the
    /// effort limits reasoning, and does not turn it on or off.
    ///
    /// # Errors
    ///
    /// 400 for a wrong value.
    pub(crate) fn read_messages(
        fields: &Fields<'_>,
        effort: Option<&str>,
    ) -> Result<Self, ApiError> {
        const NAME: &str = "thinking";
        let mut thinking = Thinking::default();
        thinking.read_thinking(fields)?;
        if thinking.switch.is_none() {
            thinking.turn(fields, NAME, fields.get(NAME).is_some())?;
        }
        match effort {
            None | Some("low" | "medium" | "high" | "xhigh" | "max") => {}
            Some(_) => {
                let message = "must be one of low, medium, high, xhigh, max";
                return Err(fields.error("output_config.effort", message));
            }
        }
        thinking.effort = effort.map(str::to_owned);
        if let Some((_, false)) = thinking.switch {
            // Clients that did not ask for it read the first block as the answer; a model may
            // begin to reason whatever its template says.
            thinking.budget = Some(0);
        }
        Ok(thinking)
    }

    /// Anthropic's: `{"type": "enabled", "budget_tokens": 1024}`.
    fn read_thinking(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        const NAME: &str = "thinking";
        let Some(map) = fields.object(NAME)? else {
            return Ok(());
        };
        let inner = fields.inside(map, "thinking.");
        if let Some(tokens) = inner.integer("budget_tokens", 0..=BUDGET_MAX)? {
            self.limit(fields, NAME, tokens)?;
        }
        match inner.string("type")? {
            Some("enabled") => self.turn(fields, NAME, true)?,
            Some("disabled") => self.turn(fields, NAME, false)?,
            Some("adaptive" | "auto") => {}
            _ => return Err(inner.error("type", "must be one of enabled, disabled, adaptive")),
        }
        fields.note_ignored(inner.ignored());
        Ok(())
    }

    /// OpenRouter's and the Responses API's: `{"effort": "low"}`.
    fn read_reasoning(&mut self, fields: &Fields<'_>) -> Result<(), ApiError> {
        const NAME: &str = "reasoning";
        let Some(map) = fields.object(NAME)? else {
            return Ok(());
        };
        let inner = fields.inside(map, "reasoning.");
        if let Some(on) = inner.bool("enabled")? {
            self.turn(fields, NAME, on)?;
        }
        if let Some(effort) = inner.string("effort")? {
            self.set_effort(fields, NAME, effort)?;
        }
        if let Some(tokens) = inner.integer("max_tokens", 0..=BUDGET_MAX)? {
            self.limit(fields, NAME, tokens)?;
        }
        fields.note_ignored(inner.ignored());
        Ok(())
    }

    fn turn(&mut self, fields: &Fields<'_>, by: &'static str, on: bool) -> Result<(), ApiError> {
        match self.switch {
            Some((first, was)) if was != on => {
                let [first_word, word] = [was, on].map(|on| if on { "on" } else { "off" });
                let message =
                    format!("turns reasoning {word}, and `{first}` turns it {first_word}");
                Err(fields.error(by, message))
            }
            _ => {
                self.switch = Some((by, on));
                Ok(())
            }
        }
    }

    fn set_effort(
        &mut self,
        fields: &Fields<'_>,
        by: &'static str,
        effort: &str,
    ) -> Result<(), ApiError> {
        match effort {
            "none" => self.turn(fields, by, false)?,
            "minimal" | "low" | "medium" => {}
            "high" | "xhigh" | "max" => self.turn(fields, by, true)?,
            _ => {
                let message = "must be one of none, minimal, low, medium, high, xhigh";
                return Err(fields.error(by, message));
            }
        }
        self.effort = Some(effort.to_owned());
        Ok(())
    }

    /// Takes a budget; -1 is none.
    fn limit(
        &mut self,
        fields: &Fields<'_>,
        by: &'static str,
        tokens: i64,
    ) -> Result<(), ApiError> {
        match usize::try_from(tokens) {
            Ok(0) => self.turn(fields, by, false),
            Ok(tokens) => {
                self.budget = least(self.budget, Some(tokens));
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }

    /// The budget that the effort stands for.
    fn effort_budget(&self) -> Option<usize> {
        let is_low = matches!(self.effort.as_deref(), Some("minimal" | "low"));
        is_low.then_some(LOW_EFFORT_TOKENS)
    }

    /// Adds what the template is to know to its `arguments`, which come first; `uses` says which
    /// names it reads. Returns the most tokens of reasoning: 0 where reasoning is to be off and
    /// the template cannot be told, and the least of several budgets, of which a low effort is one
    /// where the template cannot be told of the effort.
    pub(crate) fn tell(
        &self,
        arguments: &mut Map<String, Value>,
        uses: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        if let Some((_, on)) = self.switch.filter(|_| uses(ENABLE)) {
            arguments.entry(ENABLE).or_insert(json!(on));
        }
        if let Some(effort) = self.effort.as_ref().filter(|_| uses(EFFORT)) {
            arguments.entry(EFFORT).or_insert(json!(effort));
        }
        match self.switch {
            Some((_, false)) if !uses(ENABLE) => Some(0),
            _ if uses(EFFORT) => self.budget,
            _ => least(self.budget, self.effort_budget()),
        }
    }
}

/// The least of two budgets, as far as there are any.
fn least(one: Option<usize>, other: Option<usize>) -> Option<usize> {
    one.into_iter().chain(other).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::tables::CHAT;

    fn read(body: Value) -> Result<Thinking, String> {
        let fields = Fields::new(body.as_object().unwrap(), &CHAT);
        Thinking::read(&fields).map_err(|error| error.message.clone())
    }

    #[test]
    fn every_spelling_is_read() {
        for (body, on, budget) in [
            (json!({}), None, None),
            (json!({"enable_thinking": true}), Some(true), None),
            (json!({"think": false}), Some(false), None),
            (json!({"think": "low"}), None, Some(1024)),
            (json!({"reasoning_effort": "medium"}), None, None),
            (json!({"reasoning_effort": "none"}), Some(false), None),
            (json!({"reasoning_effort": "high"}), Some(true), None),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 50}}),
                Some(true),
                Some(50),
            ),
            (json!({"thinking": {"type": "disabled"}}), Some(false), None),
            (json!({"reasoning": {"effort": "low"}}), None, Some(1024)),
            (json!({"reasoning": {"max_tokens": 9}}), None, Some(9)),
            (json!({"thinking_budget": -1}), None, None),
            (json!({"thinking_budget": 0}), Some(false), None),
            (
                json!({"thinking_budget": 70, "reasoning_effort": "low", "reasoning_budget": 80}),
                None,
                Some(70),
            ),
        ] {
            let thinking = read(body.clone()).unwrap();
            assert_eq!(thinking.switch.map(|(_, on)| on), on, "{body}");
            let told = thinking.tell(&mut Map::new(), |name| name == ENABLE);
            assert_eq!(told, budget, "{body}");
        }
    }

    #[test]
    fn an_effort_that_the_template_reads_is_no_budget() {
        for effort in ["minimal", "low"] {
            let thinking = read(json!({"reasoning_effort": effort})).unwrap();
            let mut arguments = Map::new();
            assert_eq!(thinking.tell(&mut arguments, |name| name == EFFORT), None);
            assert_eq!(Value::Object(arguments), json!({EFFORT: effort}));
            // One of the request's own counts as it is.
            let both = json!({"reasoning_effort": effort, "thinking_budget": 2000});
            let thinking = read(both).unwrap();
            assert_eq!(thinking.tell(&mut Map::new(), |_| true), Some(2000));
            assert_eq!(thinking.tell(&mut Map::new(), |_| false), Some(1024));
        }
    }

    #[test]
    fn messages_reason_where_they_ask_for_it() {
        for (body, effort, on, budget) in [
            (json!({}), Some("high"), false, Some(0)),
            (json!({"thinking": {"type": "adaptive"}}), None, true, None),
            (
                json!({"thinking": {"type": "adaptive"}}),
                Some("low"),
                true,
                Some(1024),
            ),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 9}}),
                Some("max"),
                true,
                Some(9),
            ),
            (
                json!({"thinking": {"type": "disabled"}}),
                Some("high"),
                false,
                Some(0),
            ),
        ] {
            let fields = Fields::new(body.as_object().unwrap(), &CHAT);
            let thinking = Thinking::read_messages(&fields, effort).unwrap();
            assert_eq!(thinking.switch.map(|(_, on)| on), Some(on), "{body}");
            let told = thinking.tell(&mut Map::new(), |name| name == ENABLE);
            assert_eq!(told, budget, "{body}");
            assert_eq!(thinking.effort.as_deref(), effort);
        }
        for (body, effort, param) in [
            (json!({}), "huge", "output_config.effort"),
            (json!({"thinking": {"type": "x"}}), "low", "thinking.type"),
        ] {
            let fields = Fields::new(body.as_object().unwrap(), &CHAT);
            let error = Thinking::read_messages(&fields, Some(effort)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn what_is_wrong_or_contradicts_is_named() {
        for (body, message) in [
            (
                json!({"reasoning_effort": "huge"}),
                "`reasoning_effort` must be one of none, minimal, low, medium, high, xhigh",
            ),
            (
                json!({"enable_thinking": true, "reasoning_effort": "none"}),
                "`reasoning_effort` turns reasoning off, and `enable_thinking` turns it on",
            ),
            (
                json!({"thinking": {"type": "x"}}),
                "`thinking.type` must be one of enabled, disabled, adaptive",
            ),
            (json!({"think": 3}), "`think` must be a string"),
        ] {
            assert_eq!(read(body), Err(message.to_owned()));
        }
    }

    #[test]
    fn what_a_template_cannot_turn_off_has_no_budget() {
        let budget = |body: Value, uses: bool| {
            let thinking = read(body).unwrap();
            thinking.tell(&mut Map::new(), |_| uses)
        };
        assert_eq!(budget(json!({"think": false}), false), Some(0));
        assert_eq!(budget(json!({"think": false}), true), None);
        assert_eq!(budget(json!({"thinking_budget": 9}), false), Some(9));
    }

    #[test]
    fn a_template_is_told_what_it_reads_and_arguments_come_first() {
        let thinking = read(json!({"reasoning_effort": "high"})).unwrap();
        let told = |uses: &[&str], arguments: Value| {
            let mut arguments = arguments.as_object().cloned().unwrap();
            thinking.tell(&mut arguments, |name| uses.contains(&name));
            Value::Object(arguments)
        };
        assert_eq!(told(&[], json!({})), json!({}));
        assert_eq!(
            told(&[ENABLE, EFFORT], json!({})),
            json!({"enable_thinking": true, "reasoning_effort": "high"})
        );
        assert_eq!(
            told(&[ENABLE], json!({"enable_thinking": false})),
            json!({"enable_thinking": false})
        );
    }
}
