// Rotations of rows of keys, values and queries, as quant/src/kv/rotation.rs defines them and with its bits: a Hadamard
// transform with fixed signs, R = D(after) H / sqrt(n) D(before). common.cuh goes before this.

// Rotates a group of 32 N columns that a warp has, lane l columns l + 32 k, or undoes that.
template <int N>
DEVICE void rotate_group(float (&x)[N], bool undo) {
    constexpr u32 BEFORE[4] = {0xe46a0359, 0x42f85949, 0xa4c63bbb, 0x49f250a9},
                  AFTER[4] = {0x16acee90, 0x3f628fdc, 0xb7a5357a, 0xbea56562};
    const int lane = threadIdx.x & 31;
    auto sign = [&](float v, u32 first, u32 second) {
        return __uint_as_float(__float_as_uint(v) ^ (undo ? second : first) >> lane << 31);
    };
#pragma unroll
    for (int k = 0; k < N; k++) {
        x[k] = sign(x[k], BEFORE[k], AFTER[k]);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_xor_sync(~0u, x[k], step);
            x[k] = lane & step ? other - x[k] : x[k] + other;
        }
    }
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int k = 0; k < N; k++)
            if (!(k & step)) {
                const float a = x[k], b = x[k + step];
                x[k] = a + b;
                x[k + step] = a - b;
            }
    const float scale = 1.0f / sqrtf(32.0f * N);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = sign(x[k] * scale, AFTER[k], BEFORE[k]);
}
// Columns of the group that starts at column `first` of a row of `cols`, where groups have `group` columns: those of
// 128 may end with one of 64.
DEVICE int group_columns(int first, int cols, int group) { return cols - first < group ? 64 : group; }
// Rotates a group of `columns` columns, at most GROUP, in shared memory by one warp, or undoes that.
template <int GROUP>
DEVICE void rotate_columns(float *x, int columns, bool undo) {
    const int lane = threadIdx.x & 31;
    auto rotate = [&](auto &v) {
        constexpr int N = sizeof(v) / sizeof(float);
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = x[32 * k + lane];
        rotate_group(v, undo);
#pragma unroll
        for (int k = 0; k < N; k++) x[32 * k + lane] = v[k];
        __syncwarp();
    };
    float large[GROUP / 32], small[2];
    if (columns == GROUP) rotate(large);
    else rotate(small);
}
