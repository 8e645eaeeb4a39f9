//! Grammars that a text must follow: JSON, JSON Schema, regular expressions, Lark, GBNF.
//!
//! A language model chooses one token after the other. To make its text follow a grammar, the
//! tokens that would leave the grammar are ruled out before each choice: a *mask*, one bit a
//! token. This crate computes the masks.
//!
//! ```text
//! Spec ─ Compiler ─→ Grammar ─ start ─→ Matcher ─ allowed ─→ mask ─→ the model's choice
//!                                          ↑                              │
//!                                          └────────────── push ──────────┘
//! ```
//!
//! - A [`Vocabulary`] is built once a model from the bytes of its tokens.
//! - A [`Compiler`] turns a [`Spec`] into a [`Grammar`], within [`Limits`], and keeps those that
//!   were used last.
//! - A [`Matcher`] is the state of one text. [`allowed`](Matcher::allowed) is the mask of the
//!   next token, [`push`](Matcher::push) appends a token and [`pop`](Matcher::pop) takes tokens
//!   back, so that guesses can be checked row by row and rejected ones forgotten. Where the
//!   grammar leaves no choice, [`forced`](Matcher::forced) gives the tokens to come: guesses
//!   that cost nothing.
//!
//! A grammar is about bytes and a model chooses tokens, which may end in the middle of a
//! character, span several parts of the grammar, or spell the same text in many ways. The
//! parser is llguidance's: it walks the tree of all tokens' bytes and the grammar together. What
//! this crate adds is that nothing is approximated in silence ([`schema`]), that every cost has
//! a limit, and that masks depend on nothing but the grammar and the text.
//!
//! | room | what it does |
//! | --- | --- |
//! | `vocabulary` | the tokens of a model |
//! | `compiler` | [`Spec`] → [`Grammar`]: limits, a thread, what is kept |
//! | `matcher` | masks, push and pop, forced tokens |
//! | [`schema`] | JSON Schemas, checked and rewritten so that they are enforced exactly |
//! | [`pattern`] | regular expressions in the dialect of JSON Schema |
//! | [`gbnf`] | llama.cpp's grammar language |
//!
//! No model, no sampling, no HTTP. `examples/shopping_list.rs` follows a schema token by token.

#![forbid(unsafe_code)]

mod compiler;
mod error;
pub mod gbnf;
mod limits;
mod matcher;
pub mod pattern;
pub mod schema;
mod vocabulary;

pub use compiler::{Compiler, Spec};
pub use error::Error;
pub use limits::Limits;
pub use matcher::{Grammar, Matcher};
pub use vocabulary::{Token, Tokenize, Vocabulary};
