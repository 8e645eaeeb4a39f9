//! Instructions that work on registers alone, as safe functions.

/// Declares functions that are one instruction each, under the names of [`std::arch`].
///
/// A line gives the types of the operands and of the result, and the instructions that have
/// them. Those after `[i32]` or `[u32]` instead of `fn` also take an immediate operand of that
/// type, as a constant parameter. The module that uses the macro has the module of its
/// architecture in [`std::arch`] as `arch`.
///
/// ```text
/// instructions! {
///     fn(__m256, __m256) -> __m256: _mm256_add_ps _mm256_sub_ps;
///     [i32](__m256i) -> __m256i: _mm256_slli_epi32;
/// }
/// ```
///
/// Only instructions that touch no memory may be listed, and only code that runs inside
/// [`Detected::run`](super::Detected::run) and its like may call them: implementations of
/// [`Lanes`](super::Lanes) and [`Bytes`](super::Bytes).
macro_rules! instructions {
    (@operands $kind:tt $name:ident () -> $out:ty) => {
        instructions! { @$kind $name() -> $out }
    };
    (@operands $kind:tt $name:ident ($a:ty) -> $out:ty) => {
        instructions! { @$kind $name(a: $a) -> $out }
    };
    (@operands $kind:tt $name:ident ($a:ty, $b:ty) -> $out:ty) => {
        instructions! { @$kind $name(a: $a, b: $b) -> $out }
    };
    (@operands $kind:tt $name:ident ($a:ty, $b:ty, $c:ty) -> $out:ty) => {
        instructions! { @$kind $name(a: $a, b: $b, c: $c) -> $out }
    };
    (@fn $name:ident($($x:ident: $t:ty),*) -> $out:ty) => {
        #[inline(always)]
        pub(super) fn $name($($x: $t),*) -> $out {
            // SAFETY: `Detected` found the instruction set before it entered the kernel that
            // this is inlined into, and the instruction touches no memory.
            unsafe { arch::$name($($x),*) }
        }
    };
    (@[$immediate:ty] $name:ident($($x:ident: $t:ty),*) -> $out:ty) => {
        #[inline(always)]
        pub(super) fn $name<const N: $immediate>($($x: $t),*) -> $out {
            // SAFETY: `Detected` found the instruction set before it entered the kernel that
            // this is inlined into, and the instruction touches no memory.
            unsafe { arch::$name::<N>($($x),*) }
        }
    };
    ($($kind:tt $operands:tt -> $out:ty: $($name:ident)*;)*) => {
        $($(instructions! { @operands $kind $name $operands -> $out })*)*
    };
}
pub(super) use instructions;
