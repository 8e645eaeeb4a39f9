// Turns what attention adds up of rotated values back, where no merge of partial results does (attention.cu): in place.
// hadamard.cuh goes before this.
//
//   y: [n, heads, head_dim] --> registers of a warp: a group of 128 columns or 64 --> y and h

template <int N>
DEVICE void undo_rotation(float *y, const Activations &h, u32 row, int column) {
    const int lane = threadIdx.x & 31;
    float v[N];
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = y[32 * k + lane];
    rotate_group(v, true);
#pragma unroll
    for (int k = 0; k < N; k++) y[32 * k + lane] = v[k];
    if (!h.stride) return;
    // Two neighbors a lane.
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float low = __shfl_sync(~0u, v[k], 2 * lane + i & 31),
                        high = __shfl_sync(~0u, v[k + 1], 2 * lane + i & 31);
            pair[i] = lane < 16 ? low : high;
        }
        store_activation_tile(h, row, column / 64 + k / 2, pair[0], pair[1]);
    }
}
// A warp for each of `parts` groups; groups have `group` columns, the last of a head perhaps half of that.
KERNEL __launch_bounds__(128) undo_rotations(float *y, Activations h, int heads, int head_dim, int group, u64 parts) {
    pdl_sync();
    const u64 part = (u64) blockIdx.x * 4 + (threadIdx.x >> 5);
    if (part >= parts) return;
    const int of_head = (head_dim + group - 1) / group, first = (int) (part % of_head) * group;
    const u64 head = part / of_head, at = head * head_dim + first;
    const u32 row = (u32) (head / heads);
    const int column = (int) (head % heads) * head_dim + first;
    if (group_columns(first, head_dim, group) == 128) undo_rotation<4>(y + at, h, row, column);
    else undo_rotation<2>(y + at, h, row, column);
}
