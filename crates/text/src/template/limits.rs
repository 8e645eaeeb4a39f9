//! What one chat template may take: the limits of compiling and of one rendering.
//!
//! All are counts, never times: a slow machine renders what a fast one renders.

/// Longest template; the largest in use have 40 KB.
pub const TEMPLATE_BYTES_MAX: usize = 128 << 10;
/// Arithmetic characters (`+ - * / % ~`) of one template, in text or code.
///
/// Compiling a chain of operators takes time quadratic in its length: 64
/// thousand took 108 s, and this many take 2 s (unoptimised). Tags count too;
/// a template of 40 KB has about 3000.
pub const OPERATORS_MAX: usize = 8192;
/// Named templates of one checkpoint.
pub const TEMPLATES_MAX: usize = 16;
/// Longest rendered prompt.
pub const RENDERED_BYTES_MAX: usize = 8 << 20;
/// How far a prompt that is too long is rendered on, to say how long it is: twice the
/// longest conversation that the server reads.
pub(super) const COUNTED_BYTES_MAX: usize = 64 << 20;
/// Instructions of one rendering: a tool schema of 512 KB or a conversation of
/// several thousand messages stays below a tenth of it.
pub const FUEL: u64 = 5_000_000;
/// Nested macro calls and blocks. Each takes native stack.
pub const RECURSION_MAX: usize = 64;

/// Stack of the thread that compiles or renders.
///
/// A stack overflow cannot be caught, so whatever recurses has a limit: chains of the
/// source (`nesting`), blocks and brackets (the compiler), macros ([`RECURSION_MAX`]) and
/// nested values (`meter`).
pub const STACK_BYTES: usize = 16 << 20;
