//! Sources of grammars, compiled within limits and kept.

use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::{GrammarInit, GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher as Parser};
use serde_json::Value;

use crate::matcher::too_complex;
use crate::{Error, Grammar, Limits, Vocabulary, gbnf, pattern, schema};

/// Bytes of the stack of a thread that compiles: the library recurses into a schema, by at most
/// [`Limits::reference_depth`] levels and by the properties of an object.
const STACK_BYTES: usize = 256 << 20;
/// About what a symbol of a compiled grammar takes, with its rules.
const SYMBOL_BYTES: usize = 128;
/// About what a node of the lexer's expressions takes.
const NODE_BYTES: usize = 64;

/// What a text must be.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Spec {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that is valid under a schema; see [`schema`](crate::schema).
    JsonSchema(Value),
    /// A text that a regular expression matches from start to end; see
    /// [`pattern`](crate::pattern) for its dialect.
    Regex(String),
    /// A grammar in llguidance's variant of the Lark language, beginning at `start`. Control
    /// tokens stand in it without quotes: `start: <|tool_call> /[a-z]+/ <tool_call|>`.
    /// Terminals match as much as they can.
    Lark(String),
    /// A Lark grammar that mentions JSON values by name: `@name` is a value under the schema
    /// of that name.
    LarkWithSchemas {
        /// The grammar.
        lark: String,
        /// Names, of letters, digits and `_`, and their schemas.
        schemas: Vec<(String, Value)>,
    },
    /// A grammar in llama.cpp's GBNF language, beginning at `root`; see
    /// [`gbnf`](crate::gbnf).
    Gbnf(String),
    /// One of some texts.
    Choice(Vec<String>),
}

impl Spec {
    /// What messages call it.
    fn name(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) | Self::LarkWithSchemas { .. } => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
            Self::Choice(_) => "list of choices",
        }
    }

    /// A text that no other source has.
    fn key(&self) -> String {
        match self {
            Self::JsonObject => "o".to_owned(),
            Self::JsonSchema(schema) => format!("j{schema}"),
            Self::Regex(text) => format!("r{text}"),
            Self::Lark(text) => format!("l{text}"),
            Self::LarkWithSchemas { lark, schemas } => {
                let schemas = schemas
                    .iter()
                    .map(|(name, schema)| Value::Array(vec![name.clone().into(), schema.clone()]));
                format!("s{}{lark}", schemas.collect::<Value>())
            }
            Self::Gbnf(text) => format!("g{text}"),
            Self::Choice(texts) => {
                let texts = texts.iter().cloned().map(Value::from);
                format!("c{}", texts.collect::<Value>())
            }
        }
    }
}

/// Compiles grammars for one vocabulary, and keeps those that were used last. A clone is cheap
/// and shares what is kept; threads may use it together.
#[derive(Clone)]
pub struct Compiler {
    shared: Arc<Shared>,
}

struct Shared {
    vocabulary: Vocabulary,
    limits: Limits,
    kept: Mutex<Kept>,
    /// The number of threads that compile, and a signal that one has finished.
    compiling: Mutex<usize>,
    finished: Condvar,
}

/// Compiled grammars by their sources.
#[derive(Default)]
struct Kept {
    grammars: HashMap<String, (Grammar, u64)>,
    bytes: usize,
    /// Counts uses; a grammar remembers its latest.
    clock: u64,
}

impl Compiler {
    /// A compiler for the tokens of `vocabulary`.
    pub fn new(vocabulary: Vocabulary, limits: Limits) -> Self {
        Self {
            shared: Arc::new(Shared {
                vocabulary,
                limits,
                kept: Mutex::default(),
                compiling: Mutex::new(0),
                finished: Condvar::new(),
            }),
        }
    }

    /// The tokens that grammars are compiled for.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.shared.vocabulary
    }

    /// The compiled form of `spec`, kept from an earlier call if there was one.
    ///
    /// It is compiled on a thread of its own. A thread that is late goes on until the limits of
    /// memory stop it, and counts as one of [`Limits::compiling`] until then.
    ///
    /// # Errors
    ///
    /// Any but [`Error::Vocabulary`]. [`Error::TimedOut`] and [`Error::Busy`] after
    /// [`Limits::compile_ms`]; the rest say what is wrong with `spec`.
    pub fn compile(&self, spec: &Spec) -> Result<Grammar, Error> {
        let key = spec.key();
        let limits = &self.shared.limits;
        if key.len() > limits.source_bytes {
            return Err(Error::TooLarge {
                what: "size of the grammar in bytes",
                limit: limits.source_bytes as u64,
            });
        }
        if let Some(grammar) = lock(&self.shared.kept).get(&key) {
            return Ok(grammar);
        }
        let deadline = Instant::now() + Duration::from_millis(limits.compile_ms);
        let slot = Slot::take(&self.shared, deadline).ok_or(Error::Busy)?;
        let (sender, receiver) = sync_channel(1);
        let spec = spec.clone();
        let job = move || {
            let grammar = compile(&slot.0, &spec);
            drop(spec);
            drop(slot);
            // Nobody waits any more if it was late.
            let _ = sender.send(grammar);
        };
        let thread = std::thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES);
        thread.spawn(job).map_err(|_| Error::Busy)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let grammar = receiver.recv_timeout(left).map_err(|err| match err {
            RecvTimeoutError::Timeout => Error::TimedOut {
                limit_ms: limits.compile_ms,
            },
            RecvTimeoutError::Disconnected => Error::Invalid {
                what: "grammar",
                reason: "the compiler failed on it".to_owned(),
            },
        })??;
        lock(&self.shared.kept).insert(key, grammar.clone(), limits);
        Ok(grammar)
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler")
            .field("vocabulary", &self.shared.vocabulary)
            .field("limits", &self.shared.limits)
            .finish_non_exhaustive()
    }
}

/// The right to compile, given back when dropped.
struct Slot(Arc<Shared>);

impl Slot {
    /// Waits for a slot until `deadline`.
    fn take(shared: &Arc<Shared>, deadline: Instant) -> Option<Self> {
        let left = deadline.saturating_duration_since(Instant::now());
        let full = |n: &mut usize| *n >= shared.limits.compiling.max(1);
        let waited = shared
            .finished
            .wait_timeout_while(lock(&shared.compiling), left, full);
        let (mut n, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return None;
        }
        *n += 1;
        Some(Self(shared.clone()))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *lock(&self.0.compiling) -= 1;
        self.0.finished.notify_one();
    }
}

impl Kept {
    fn get(&mut self, key: &str) -> Option<Grammar> {
        self.clock += 1;
        let (grammar, used) = self.grammars.get_mut(key)?;
        *used = self.clock;
        Some(grammar.clone())
    }

    /// Keeps `grammar` and forgets the ones that were not used for longest, until the limits
    /// are met. A grammar that is over them by itself is not kept.
    fn insert(&mut self, key: String, grammar: Grammar, limits: &Limits) {
        if grammar.bytes() > limits.cached_bytes || limits.cached_grammars == 0 {
            return;
        }
        self.clock += 1;
        self.bytes += grammar.bytes();
        if let Some((old, _)) = self.grammars.insert(key, (grammar, self.clock)) {
            self.bytes -= old.bytes();
        }
        while self.grammars.len() > limits.cached_grammars || self.bytes > limits.cached_bytes {
            let oldest = self.grammars.iter().min_by_key(|(_, (_, used))| *used);
            let Some(key) = oldest.map(|(key, _)| key.clone()) else {
                return;
            };
            if let Some((old, _)) = self.grammars.remove(&key) {
                self.bytes -= old.bytes();
            }
        }
    }
}

/// Compiles `spec`, on this thread.
fn compile(shared: &Shared, spec: &Spec) -> Result<Grammar, Error> {
    let limits = &shared.limits;
    let lark = |text: String| GrammarWithLexer::from_lark(text);
    let json = |schema: &Value| schema::normalize(schema, limits);
    let grammars = match spec {
        Spec::JsonObject => {
            let schema = serde_json::json!({"type": "object"});
            vec![GrammarWithLexer::from_json_schema(json(&schema)?)]
        }
        Spec::JsonSchema(schema) => vec![GrammarWithLexer::from_json_schema(json(schema)?)],
        Spec::Regex(text) => vec![lark(pattern::to_lark(text, limits)?)],
        Spec::Lark(text) => {
            check_lark(text, &[])?;
            vec![lark(text.clone())]
        }
        Spec::LarkWithSchemas {
            lark: text,
            schemas,
        } => {
            let names: Vec<&str> = schemas.iter().map(|(name, _)| name.as_str()).collect();
            check_lark(text, &names)?;
            let mut grammars = vec![lark(text.clone())];
            for (name, schema) in schemas {
                let mut grammar = GrammarWithLexer::from_json_schema(json(schema)?);
                grammar.name = Some(name.clone());
                grammars.push(grammar);
            }
            grammars
        }
        Spec::Gbnf(text) => vec![lark(gbnf::to_lark(text, limits)?)],
        Spec::Choice(texts) => vec![lark(choice(texts)?)],
    };
    let top = TopLevelGrammar {
        grammars,
        max_tokens: None,
    };
    build(shared, top, spec.name())
}

/// Compiles `top` with the library and tries a first mask.
fn build(shared: &Shared, top: TopLevelGrammar, what: &'static str) -> Result<Grammar, Error> {
    let limits = &shared.limits;
    let parser_limits = ParserLimits {
        initial_lexer_fuel: limits.lexer_nodes,
        step_lexer_fuel: limits.mask_lexer_nodes,
        step_max_items: limits.mask_items,
        max_lexer_states: limits.lexer_states,
        max_grammar_size: limits.grammar_symbols,
        verbose_errors: false,
        ..ParserLimits::default()
    };
    let refuse = |err: &dyn std::fmt::Display| from_library(&err.to_string(), what, limits);
    let vocabulary = &shared.vocabulary;
    let env = Some(vocabulary.env().clone());
    let (grammar, lexer) = GrammarInit::Serialized(top)
        .to_internal(env, parser_limits.clone())
        .map_err(|err| refuse(&err))?;
    let n_symbols = grammar.num_symbols();
    let parser = vocabulary
        .factory()
        .create_parser_from_init_ext(
            GrammarInit::Internal(grammar, lexer),
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            parser_limits,
        )
        .map_err(|err| refuse(&err))?;
    let lexer = parser.parser.lexer_stats();
    let bytes = n_symbols * SYMBOL_BYTES + lexer.num_ast_nodes * NODE_BYTES + lexer.num_bytes;
    let mut fresh = Parser::new(Ok(parser));
    // The lexer builds its first states now, once, and not for each text.
    fresh.compute_ff_tokens();
    if !fresh.is_stopped() {
        fresh.compute_mask().map_err(too_complex)?;
    }
    Ok(Grammar::new(fresh, vocabulary.clone(), bytes))
}

/// The library's reason for refusing a grammar as an error of this crate.
fn from_library(message: &str, what: &'static str, limits: &Limits) -> Error {
    let reason: String = message.chars().take(400).collect();
    let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if says(&["nsatisfiable"]) {
        return Error::Unsatisfiable { what, reason };
    }
    if says(&["fuel", "too complex", "too many states"]) {
        return Error::TooLarge {
            what: "lexer of the grammar in nodes",
            limit: limits.lexer_nodes,
        };
    }
    if says(&[
        "too large",
        "too big",
        "grammar size",
        "stack level exceeded",
    ]) {
        return Error::TooLarge {
            what: "compiled grammar in symbols",
            limit: limits.grammar_symbols as u64,
        };
    }
    Error::Invalid { what, reason }
}

/// Refuses a Lark grammar with JSON Schemas of its own, which would not be checked, and one
/// that mentions another grammar than `names`.
fn check_lark(text: &str, names: &[&str]) -> Result<(), Error> {
    let invalid = |reason: String| {
        Err(Error::Invalid {
            what: "Lark grammar",
            reason,
        })
    };
    for (i, line) in text.lines().enumerate() {
        if line.contains("%json") {
            let reason = "`%json` is not supported, give the schema beside the grammar";
            return invalid(format!("{reason}, in line {}", i + 1));
        }
    }
    for name in names {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        if name.is_empty() || !name.bytes().all(plain) || *name == "lark_grammar" {
            return invalid(format!("a schema cannot have the name `{name}`"));
        }
    }
    Ok(())
}

/// One of `texts` as a Lark grammar.
fn choice(texts: &[String]) -> Result<String, Error> {
    let invalid = |reason: &str| Error::Invalid {
        what: "list of choices",
        reason: reason.to_owned(),
    };
    if texts.is_empty() {
        return Err(invalid("it is empty"));
    }
    if texts.iter().any(String::is_empty) {
        return Err(invalid("one of the choices is the empty text"));
    }
    let texts: Vec<String> = texts.iter().map(|text| pattern::literal(text)).collect();
    Ok(format!("start: CHOICE\nCHOICE: /{}/\n", texts.join("|")))
}

/// Locks `mutex`. What is behind these locks is whole at every step, so a panic elsewhere does
/// not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
