//! How much a grammar may cost.

/// Limits of compiling and following grammars. A grammar comes from a request, so each of its
/// costs has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a grammar's source; a JSON Schema counts as compact JSON.
    pub source_bytes: usize,
    /// Levels of nesting of a schema, a regular expression or a GBNF grammar.
    pub depth: usize,
    /// Subschemas, properties and `enum` entries of a JSON Schema, counted once each.
    pub schema_nodes: usize,
    /// Levels of nesting of a JSON Schema, where a `$ref` leads one level deeper.
    pub reference_depth: usize,
    /// Characters that one regular expression needs when its nested counted repetitions are
    /// written out, or the largest count of `minLength`, `maxLength`, `minItems`, `maxItems`.
    pub repetitions: u64,
    /// Milliseconds that [`Compiler::compile`](crate::Compiler::compile) waits.
    pub compile_ms: u64,
    /// Grammars that are compiled at the same time, each on a thread of its own.
    pub compiling: usize,
    /// Symbols of a compiled grammar.
    pub grammar_symbols: usize,
    /// Nodes of the lexer's regular expressions.
    pub lexer_nodes: u64,
    /// States of a lexer, built while a text is written: 1 to 2 KB each, owned by the text.
    pub lexer_states: usize,
    /// Work of one mask in nodes of regular expressions, about 14,000 a millisecond.
    pub mask_lexer_nodes: u64,
    /// Work of one mask in items of the parser, about 20,000 a millisecond.
    pub mask_items: usize,
    /// Compiled grammars that are kept.
    pub cached_grammars: usize,
    /// Bytes of the compiled grammars that are kept, estimated.
    pub cached_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            source_bytes: 512 << 10,
            depth: 128,
            schema_nodes: 20_000,
            reference_depth: 512,
            repetitions: 100_000,
            compile_ms: 2_000,
            compiling: 2,
            grammar_symbols: 200_000,
            lexer_nodes: 1_000_000,
            lexer_states: 50_000,
            mask_lexer_nodes: 200_000,
            mask_items: 100_000,
            cached_grammars: 64,
            cached_bytes: 64 << 20,
        }
    }
}
