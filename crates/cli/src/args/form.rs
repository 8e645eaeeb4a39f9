//! What the text of `run` and `chat` has to follow: JSON, a schema, a grammar.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// The form of a reply: any text, or one JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TextForm {
    Text,
    Json,
}

/// What every reply has to follow; at most one of them. Reasoning before the answer is free.
#[derive(Debug, Args)]
#[command(next_help_heading = "Form")]
pub(crate) struct FormArgs {
    /// Form of the answer: any text, or one JSON object [default: text]
    #[arg(long, value_name = "FORM")]
    pub(crate) format: Option<TextForm>,
    /// JSON Schema under which the answer has to be valid: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON")]
    pub(crate) schema: Option<String>,
    /// Grammar that the answer has to follow: a file in llama.cpp's GBNF, or in Lark if its name ends
    /// in .lark
    #[arg(long, value_name = "FILE", conflicts_with_all = ["format", "schema"])]
    pub(crate) grammar: Option<PathBuf>,
    /// Regular expression that the whole answer has to match
    #[arg(long, value_name = "PATTERN", conflicts_with_all = ["format", "schema", "grammar"])]
    pub(crate) regex: Option<String>,
}
