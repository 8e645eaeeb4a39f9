//! Limits of compiling a chat template and of one rendering.
//!
//! Limits are counts, never times, so that a slow machine renders what a fast one renders.
//! The memory of a rendering is limited in `meter`.

/// Longest template in bytes; the largest in use have 40 KB.
pub const TEMPLATE_BYTES_MAX: usize = 128 << 10;
/// Most characters `+ - * / % ~` in one template, in text or code.
///
/// Compiling a chain of operators takes time quadratic in its length: 64 thousand took
/// 108 s, and this many take 2 s (unoptimized). Tags count too; a template of 40 KB has
/// about 3000.
pub const OPERATORS_MAX: usize = 8192;
/// Most named templates of one checkpoint.
pub const TEMPLATES_MAX: usize = 16;
/// Longest rendered prompt in bytes.
pub const RENDERED_BYTES_MAX: usize = 8 << 20;
/// Bytes up to which a prompt that is too long is rendered, so that the error can say how
/// long it is: twice the longest conversation that the server reads.
pub(super) const COUNTED_BYTES_MAX: usize = 64 << 20;
/// Most instructions of one rendering. A tool schema of 512 KB or a conversation of several
/// thousand messages takes less than a tenth of it.
pub const FUEL: u64 = 5_000_000;
/// Most nested macro calls and blocks; each takes native stack.
pub const RECURSION_MAX: usize = 64;

/// Stack of the thread that compiles or renders, in bytes.
///
/// A stack overflow cannot be caught, so whatever recurses has a limit: chains of the
/// source (`source`), blocks and brackets (the compiler), macros ([`RECURSION_MAX`]) and
/// nested values (`meter`).
pub const STACK_BYTES: usize = 16 << 20;
