// Lookups in a table of packed weights (token embeddings), and random weights for measurements. weight_tile.cuh goes
// before this.
//
//   global: one code, its scale and bias --> registers: f32 --> y

// A thread a value of y: row `token` times `scale`. `tokens` null: the step's own.
KERNEL embed(const u8 *w, const u32 *tokens, Batch batch, float *y, int rows, int cols, int k_tiles, float scale,
             u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 at = (u32) (i / cols);
    const int column = (int) (i % cols);
    const u32 row = known_token(tokens ? tokens[at] : batch.token(at));
    const float *scales = row_tile_scales(w, rows, k_tiles);
    const u8 *tile = w + row_tile_offset(row >> 4, k_tiles) + (u64) (column / 64) * K_STRIDE;
    float v = Tile::value(tile, row, column) * scales[row >> 4];
    if constexpr (Tile::IS_ROTATED) {
        // Back to what was rotated: a warp has 32 columns of a row, or none, for rows are whole blocks of those.
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_xor_sync(~0u, v, step);
            v = column & step ? other - v : v + other;
        }
        v *= ROTATED_SCALE * rotated_sign(column);
    }
    y[i] = v * scale;
}

// Random weights of about `gain` in size: a thread a word of `words`, and then the row tiles' scales.
KERNEL random_tiles(u32 *w, float gain, u64 words, u64 all) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= all) return;
    u32 x = (u32) i * 0x9e3779b9u ^ (u32) (i >> 32);
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    float row_tile_scale = 1.0f;
    const bool is_code = (int) (i % (TILE_BYTES / 4)) < Tile::CODE_BYTES / 4;
    if constexpr (Tile::IS_PLAIN) {
        // Two f16 of either sign with an exponent like the gain's.
        u32 one = f32_to_f16(gain) & 0x7c00u;
        x = (x & 0x83ff83ffu) | one | one << 16;
    } else if constexpr (Tile::IS_ROTATED) {
        // Any codes, and scales.
        const u32 scale = f32_to_f16(gain);
        x = is_code ? x : scale | scale << 16;
    } else if constexpr (Tile::IS_E4M3) {
        // Any of less than 2 in size, and scales.
        const u32 scale = f32_to_f16(512.0f * gain);
        x = is_code ? x & 0xbfbfbfbfu : scale | scale << 16;
    } else {
        if (!is_code) {
            const float scale = gain / (float) (1 << (FORMAT - 1)), bias = scale * -0.5f * (float) ((1 << FORMAT) - 1);
            x = f32_to_f16(scale * 0x1p18f) | (u32) f32_to_f16(bias * 0x1p-6f) << 16;
        }
        row_tile_scale = 0x1p6f;
    }
    w[i] = i < words ? x : __float_as_uint(row_tile_scale);
}
