//! The response object: what a request asked for, what came of it, and how it ended.

use engine::{FinishReason, RequestOutcome, Speculation};
use serde::Serialize;
use serde_json::Value;

use super::output::{Item, Status};
use crate::errors::ApiError;
use crate::ids;
use crate::openai::Timings;

/// What a response says whatever comes of it.
pub(super) struct Echo {
    pub(super) id: String,
    pub(super) created_at: u64,
    pub(super) model: String,
    pub(super) fingerprint: String,
    pub(super) seed: u64,
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<usize>,
    pub(super) max_tool_calls: Option<usize>,
    pub(super) metadata: Value,
    pub(super) parallel_tool_calls: bool,
    pub(super) previous_response_id: Option<String>,
    pub(super) prompt_cache_key: Option<String>,
    pub(super) reasoning: Value,
    pub(super) safety_identifier: Option<String>,
    pub(super) store: bool,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) text: Value,
    pub(super) tool_choice: Value,
    pub(super) tools: Vec<Value>,
    pub(super) top_logprobs: usize,
    pub(super) user: Option<String>,
}

/// How a response stands.
pub(super) enum End<'a> {
    /// The text is being written.
    Not,
    /// The text is written.
    Ended(&'a RequestOutcome),
    /// The text has ended early, for this reason.
    Failed(&'a ApiError),
}

impl End<'_> {
    /// Whether what was written last is whole.
    pub(super) fn status(&self) -> Status {
        match self {
            End::Not => Status::InProgress,
            End::Ended(outcome) if outcome.finish == FinishReason::Length => Status::Incomplete,
            End::Ended(_) => Status::Completed,
            End::Failed(_) => Status::Incomplete,
        }
    }

    /// The word for it.
    fn name(&self) -> &'static str {
        match (self, self.status()) {
            (End::Failed(_), _) => "failed",
            (_, Status::InProgress) => "in_progress",
            (_, Status::Completed) => "completed",
            (_, Status::Incomplete) => "incomplete",
        }
    }

    /// The name of the stream's last event.
    pub(super) fn event(&self) -> &'static str {
        match self.name() {
            "failed" => "response.failed",
            "incomplete" => "response.incomplete",
            "completed" => "response.completed",
            _ => "response.in_progress",
        }
    }
}

/// A response.
#[derive(Serialize)]
pub(super) struct Document<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    status: &'static str,
    error: Option<Failure<'a>>,
    incomplete_details: Option<IncompleteDetails>,
    background: bool,
    instructions: Option<&'a str>,
    max_output_tokens: Option<usize>,
    max_tool_calls: Option<usize>,
    metadata: &'a Value,
    model: &'a str,
    output: &'a [Item],
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    prompt_cache_key: Option<&'a str>,
    reasoning: &'a Value,
    safety_identifier: Option<&'a str>,
    service_tier: &'static str,
    store: bool,
    temperature: f32,
    top_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    text: &'a Value,
    tool_choice: &'a Value,
    tools: &'a [Value],
    top_logprobs: usize,
    truncation: &'static str,
    usage: Option<Usage>,
    user: Option<&'a str>,
    system_fingerprint: &'a str,
    seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<&'a Speculation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
}

#[derive(Serialize)]
struct Failure<'a> {
    code: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

/// Tokens of a request.
#[derive(Serialize)]
pub(super) struct Usage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

#[derive(Serialize)]
struct InputDetails {
    cached_tokens: usize,
    /// Newer libraries look for it; nothing is charged for keeping a prompt.
    cache_write_tokens: usize,
}

#[derive(Serialize)]
struct OutputDetails {
    reasoning_tokens: usize,
}

impl Usage {
    pub(super) fn new(outcome: &RequestOutcome) -> Self {
        let usage = outcome.usage;
        Usage {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails {
                cached_tokens: usage.cached_tokens,
                cache_write_tokens: 0,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails {
                reasoning_tokens: usage.reasoning_tokens,
            },
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
        }
    }
}

impl Echo {
    /// The response with these items, which stands as `end` says.
    pub(super) fn document<'a>(&'a self, items: &'a [Item], end: &End<'a>) -> Document<'a> {
        let outcome = match end {
            End::Ended(outcome) => Some(*outcome),
            End::Not | End::Failed(_) => None,
        };
        let failure = match end {
            End::Failed(error) => Some(Failure {
                code: error.label(),
                message: &error.message,
            }),
            End::Not | End::Ended(_) => None,
        };
        let is_cut = outcome.is_some() && end.status() == Status::Incomplete;
        Document {
            id: &self.id,
            object: "response",
            created_at: self.created_at,
            completed_at: outcome.filter(|_| !is_cut).map(|_| ids::unix_seconds()),
            status: end.name(),
            error: failure,
            incomplete_details: is_cut.then_some(IncompleteDetails {
                reason: "max_output_tokens",
            }),
            background: false,
            instructions: self.instructions.as_deref(),
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            metadata: &self.metadata,
            model: &self.model,
            output: items,
            parallel_tool_calls: self.parallel_tool_calls,
            previous_response_id: self.previous_response_id.as_deref(),
            prompt_cache_key: self.prompt_cache_key.as_deref(),
            reasoning: &self.reasoning,
            safety_identifier: self.safety_identifier.as_deref(),
            service_tier: "default",
            store: self.store,
            temperature: self.temperature,
            top_p: self.top_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            text: &self.text,
            tool_choice: &self.tool_choice,
            tools: &self.tools,
            top_logprobs: self.top_logprobs,
            truncation: "disabled",
            usage: outcome.map(Usage::new),
            user: self.user.as_deref(),
            system_fingerprint: &self.fingerprint,
            seed: self.seed,
            speculation: outcome.map(|outcome| &outcome.speculation),
            timings: outcome.map(Timings::new),
        }
    }
}
