//! Arguments of kernels: numbers, addresses, and structs, laid out as in kernels/.
//!
//! Fields of structs have the kernels' names and order; a test compares sizes and offsets with what the
//! compiler makes of the kernels' structs.

/// An address in the device's memory; 0 is none.
pub(crate) type Address = u64;

/// A kernel's argument of several fields.
pub(crate) trait KernelStruct {
    /// The struct's bytes in whole words, padding being zeros.
    fn words(&self) -> Vec<u64>;
}

/// Arguments of a launch, by value.
#[derive(Clone, Default)]
pub(crate) struct Args {
    words: Vec<u64>,
    /// Where each argument starts in `words`.
    starts: Vec<usize>,
}

impl Args {
    pub(crate) fn ptr(mut self, x: Address) -> Self {
        self.starts.push(self.words.len());
        self.words.push(x);
        self
    }
    pub(crate) fn int(self, x: usize) -> Self {
        assert!(i32::try_from(x).is_ok(), "{x} fits a kernel's int");
        self.ptr(x as u64)
    }
    pub(crate) fn long(self, x: usize) -> Self {
        self.ptr(x as u64)
    }
    pub(crate) fn float(self, x: f32) -> Self {
        self.ptr(u64::from(x.to_bits()))
    }
    pub(crate) fn of(mut self, x: &impl KernelStruct) -> Self {
        self.starts.push(self.words.len());
        self.words.extend(x.words());
        self
    }
    /// The words of each argument, in order.
    pub(crate) fn each(&self) -> impl Iterator<Item = &[u64]> {
        let ends = self
            .starts
            .iter()
            .skip(1)
            .copied()
            .chain([self.words.len()]);
        let ranges = self.starts.iter().copied().zip(ends);
        ranges.map(|(from, to)| &self.words[from..to])
    }
}

/// A field's bytes, as the device has them.
trait Field {
    fn put(&self, to: &mut [u8]);
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Field for $number {
            fn put(&self, to: &mut [u8]) {
                to[..size_of::<Self>()].copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}
numbers!(u32 i32 u64 f32);

impl<T: Field, const N: usize> Field for [T; N] {
    fn put(&self, to: &mut [u8]) {
        for (value, to) in self.iter().zip(to.chunks_exact_mut(size_of::<T>())) {
            value.put(to);
        }
    }
}

macro_rules! kernel_structs {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default)]
            pub(crate) struct $name {
                $($(#[$field_doc])* pub(crate) $field: $kind,)*
            }

            impl Field for $name {
                fn put(&self, to: &mut [u8]) {
                    $(self.$field.put(&mut to[std::mem::offset_of!($name, $field)..]);)*
                }
            }

            impl KernelStruct for $name {
                fn words(&self) -> Vec<u64> {
                    let mut bytes = vec![0; size_of::<Self>().next_multiple_of(8)];
                    self.put(&mut bytes);
                    let words = bytes.chunks_exact(8);
                    words.map(|w| u64::from_ne_bytes(w.try_into().expect("8 bytes"))).collect()
                }
            }
        )*

        /// Each struct's name and size, and its fields with their offsets.
        #[cfg(test)]
        pub(crate) fn layouts() -> Vec<(&'static str, usize, Vec<(&'static str, usize)>)> {
            vec![$((
                stringify!($name),
                size_of::<$name>(),
                vec![$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
            ),)*]
        }
    };
}

kernel_structs! {
    /// Activations in f16 with a scale for each tile of a row.
    Activations {
        values: Address,
        scales: Address,
        /// Columns, whole tiles of them; 0: a kernel makes none.
        stride: i32,
    }

    /// Up to four matrices that multiply one input.
    MatrixGroup {
        w: [Address; 4],
        y: [Address; 4],
        rows: [i32; 4],
        /// Block, or row tile, that starts a matrix; `i32::MAX` where there is none.
        first_block: [i32; 4],
    }

    /// Norms that a kernel makes of a row at its end.
    NormEpilogue {
        weight: [Address; 3],
        y: [Address; 3],
        f16: [Activations; 3],
        count: i32,
    }

    /// A gated linear unit.
    GluArgs {
        gate: Address,
        x: Address,
        gate_stride: u64,
        x_stride: u64,
        y: Address,
        copy: Address,
        cols: i32,
        activation: i32,
        f16: Activations,
    }

    /// `z = (activation(x gateᵀ) v) projectionᵀ`.
    GatedProjection {
        gate: Address,
        projection: Address,
        /// The first of the columns that are gated.
        v: Address,
        /// Columns from a row of `v` to the next.
        v_stride: u64,
        z: Address,
        activation: i32,
        /// Columns of the gate.
        columns: i32,
        /// Rows of the projection.
        rows: i32,
    }

    /// What rows choose experts by, for blocks that route rows themselves.
    Routing {
        scores: Address,
        scale: Address,
        weights: Address,
        /// Tables of the experts' matrices, of the first product and the second.
        tables: [Address; 2],
        /// The experts in use as `ActiveExpert`s, for the second product; 0, if that reads `lists`.
        list: Address,
        /// The experts in use as lists of numbers (kernels/moe.cuh), for the second product; 0, if that reads `list`.
        lists: Address,
        /// The pairs of a row and a rank, by expert.
        pairs: Address,
        experts: i32,
        top_k: i32,
        rows: i32,
        /// Bytes of each matrix of the second product that go to L2 while the first is computed; 0: none.
        prefetched: i32,
    }

    /// Some of an expert's pairs.
    ExpertBlock {
        expert: u32,
        first: u32,
        count: u32,
    }

    /// Sums of single slices of K, until all of a row tile are there.
    SliceSums {
        sums: Address,
        counters: Address,
        slices: i32,
    }

    /// Experts' matrices of one shape, and what rows chose of them.
    ExpertGroup {
        table: Address,
        blocks: Address,
        pairs: Address,
        y: Address,
        rows: i32,
    }

    /// The second product of an expert that all rows share.
    SharedExpert {
        w: Address,
        y: Address,
        x: Activations,
        n_rows: i32,
    }

    /// Outputs of the experts for each pair, and the weights of pairs.
    ExpertOutputs {
        parts: Address,
        weights: Address,
        top_k: i32,
    }

    /// A shared expert's output and its gate.
    GatedSharedExpert {
        x: Address,
        gate: Address,
        activation: i32,
    }

    /// A dense block beside the experts, and the norms of both.
    DenseBranch {
        dense: Address,
        dense_weight: Address,
        own_weight: Address,
    }

    /// Norms of heads, their rotary embedding, and which of them become keys and values.
    HeadJobs {
        x: [Address; 3],
        weight: [Address; 3],
        y: [Address; 3],
        first: [i32; 4],
        kind: [i32; 3],
        frequencies: Address,
        batch: Address,
        keys: Address,
        values: Address,
        head_dim: i32,
        offset: i32,
        pairs: i32,
        group: i32,
        eps: f32,
    }

    /// Attention over pages of the KV cache.
    AttentionArgs {
        q: Address,
        keys: Address,
        values: Address,
        batch: Address,
        y: Address,
        partials: Address,
        scale: f32,
        group: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        units: i32,
        /// 0: none.
        window: u32,
    }

    /// Recurrent states of the gated delta rule.
    Delta {
        state: Address,
        history: Address,
        keys: Address,
        values: Address,
        batch: Address,
        nk: i32,
        nv: i32,
        dk: i32,
        dv: i32,
        channels: i32,
        is_settled: i32,
    }

    /// The norm of heads and the gate that follow the gated delta rule.
    GatedNormEpilogue {
        weight: Address,
        gate: Address,
        n: Address,
        y: Address,
        f16: Activations,
        eps: f32,
        activation: i32,
    }
}
