//! The channels of a reply: its answer, the reasoning before it, and calls of tools.

/// What a part of a reply is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// What the model writes to the reader.
    Answer,
    /// What the model writes to itself before it answers ([`crate::Reasoning`]).
    Reasoning,
    /// A call of a tool ([`crate::ToolCalls`]).
    ToolCall,
}
