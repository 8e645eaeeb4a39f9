//! Numbers that kernels share with the modules that launch them, under the names that kernels have for
//! them: the compiler gets them as definitions.

/// A file of kernels that needs a target of its own, which only one architecture has.
pub(crate) const GEMM_WGMMA: &str = "gemm_wgmma";

/// Another such file.
pub(crate) const ATTENTION_WGMMA: &str = "attention_wgmma";

/// Bytes of a warp's pipeline of weights in `gemv_pipelined`.
pub(crate) const GEMV_PIPELINE_BYTES: usize = 12_384;

/// Bytes of a warp's partial results, on their way to the warps of other slices.
pub(crate) const GEMV_REDUCTION_BYTES: usize = 2_048;

/// Bytes of shared memory that a warp of `moe_gemv_pipelined` has for its slice of the rows
/// and for stages of weights.
pub(crate) const MOE_PIPELINE_BYTES: usize = 12_160;

/// Bytes of a tile of a row in `moe_gemv_pipelined`: values, their rescale and the scale of the slice.
pub(crate) const MOE_RECORD_BYTES: usize = 64 * 2 + 16;

/// Warps of a block of `moe_gemv_glu`, a row tile each.
pub(crate) const MOE_GLU_WARPS: usize = 8;

/// Stages of a warp's pipeline in `moe_gemv_glu_pipelined`.
pub(crate) const MOE_GLU_STAGES: usize = 4;

/// Bytes of a tile of a row in `moe_gemv_glu_pipelined`.
pub(crate) const MOE_GLU_RECORD_BYTES: usize = 192;

/// Tiles of columns that a warp of `glu_rows` takes.
pub(crate) const GLU_TILES: usize = 4;

/// Rows of activations of a cluster of `gated_projection`.
pub(crate) const GATED_ROWS: usize = 8;

/// Warps of a block of `gated_projection` for each slice of the gate's K.
pub(crate) const GATED_WARPS_OF_SLICE: usize = 2;

/// Row tiles of the gate, at most, in `gated_projection`.
pub(crate) const GATED_ROW_TILES: usize = 16;

/// Tiles of a slice of the gate's K, at most, in `gated_projection`.
pub(crate) const GATED_SLICE_TILES: usize = 8;

/// Row tiles of the projection, at most, of a block of `gated_projection`.
pub(crate) const GATED_PROJECTION_TILES: usize = 64;

/// Rows of activations of a block of a GEMM.
pub(crate) const GEMM_ROWS: usize = 128;

/// Row tiles of weights of a block of a GEMM.
pub(crate) const GEMM_TILES: usize = 8;

/// Keys of a split of attention.
pub(crate) const SPLIT_KEYS: usize = 256;

/// Keys before which units of attention are pages, and not splits.
pub(crate) const PAGE_UNIT_KEYS: usize = 2048;

/// Columns of a head that a block of `attention_merge` takes.
pub(crate) const MERGE_COLUMNS: usize = 128;

/// Warps of a block of `norm_rope_append_rows` and of `norm_append_values`.
pub(crate) const HEAD_WARPS: usize = 8;

/// Rows that a warp of `norm_append_values` takes, of one head.
pub(crate) const VALUE_ROWS: usize = 8;

/// Rows whose convolution is one block's in the delta rule, where one kernel does not take them all.
pub(crate) const CONVOLUTION_ROWS: usize = 32;

/// Rows that a thread of the delta rule's convolution loads at once, where one kernel does not take them all.
pub(crate) const ROWS_AHEAD: usize = 8;

/// The numbers that a file of kernels is compiled with.
pub(crate) fn of(file: &str) -> Vec<(&'static str, usize)> {
    let gemv = [
        ("GEMV_PIPELINE_BYTES", GEMV_PIPELINE_BYTES),
        ("GEMV_REDUCTION_BYTES", GEMV_REDUCTION_BYTES),
    ];
    let moe_gemv = [
        ("MOE_PIPELINE_BYTES", MOE_PIPELINE_BYTES),
        ("MOE_RECORD_BYTES", MOE_RECORD_BYTES),
    ];
    let moe_glu = [
        ("MOE_GLU_WARPS", MOE_GLU_WARPS),
        ("MOE_GLU_STAGES", MOE_GLU_STAGES),
        ("MOE_GLU_RECORD_BYTES", MOE_GLU_RECORD_BYTES),
    ];
    match file {
        "elementwise" => vec![("GLU_TILES", GLU_TILES)],
        "gemv_pipelined" => gemv.into(),
        "moe_gemv" => [gemv, moe_gemv].concat(),
        "moe_gemv_glu" => gemv.into_iter().chain(moe_glu).collect(),
        "gated_projection" => vec![
            ("GATED_ROWS", GATED_ROWS),
            ("GATED_WARPS_OF_SLICE", GATED_WARPS_OF_SLICE),
            ("GATED_ROW_TILES", GATED_ROW_TILES),
            ("GATED_SLICE_TILES", GATED_SLICE_TILES),
            ("GATED_PROJECTION_TILES", GATED_PROJECTION_TILES),
        ],
        "gemm" => vec![("GEMM_ROWS", GEMM_ROWS), ("GEMM_TILES", GEMM_TILES)],
        GEMM_WGMMA => vec![("GEMM_TILES", GEMM_TILES)],
        "attention" | "kv_append" | ATTENTION_WGMMA => vec![
            ("SPLIT_KEYS", SPLIT_KEYS),
            ("PAGE_UNIT_KEYS", PAGE_UNIT_KEYS),
            ("MERGE_COLUMNS", MERGE_COLUMNS),
            ("HEAD_WARPS", HEAD_WARPS),
            ("VALUE_ROWS", VALUE_ROWS),
        ],
        "delta" => vec![
            ("CONVOLUTION_ROWS", CONVOLUTION_ROWS),
            ("ROWS_AHEAD", ROWS_AHEAD),
            ("TENTATIVE", backend::MAX_TENTATIVE),
        ],
        _ => Vec::new(),
    }
}
