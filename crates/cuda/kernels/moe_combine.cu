// The end of a mixture of experts: a row's weighted sum over its experts, alone or fused with what follows it in a
// model's layer (a shared expert or a dense block beside it, the residual and norms). mbarrier.cuh and rows.cuh go
// before this.
//
//   experts' outputs [row, rank] -+
//   shared expert, or dense ------+-> RowFragment (registers) --> + residual --> norm epilogue --> f32 and f16
//   residual ---------------------+

// Outputs of the experts for each pair, and the weights of the pairs.
struct ExpertOutputs {
    const float *parts, *weights;
    int top_k;
};
// Loads under way at once.
#define RANKS_AHEAD (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 8 : 4)
DEVICE RowFragment combine_experts(const ExpertOutputs &p, u64 row, int cols) {
    RowFragment y;
    const float *weight = p.weights + row * p.top_k;
    for_each_pair([&](int i, int c) {
        y.v[i] = make_float2(0.0f, 0.0f);
        if (c >= cols) return;
        const float *part = p.parts + row * p.top_k * cols + c;
        const bool pair = c + 1 < cols;
#pragma unroll 1
        for (int rank = 0; rank < p.top_k; rank += RANKS_AHEAD) {
            float2 v[RANKS_AHEAD];
#pragma unroll
            for (int j = 0; j < RANKS_AHEAD; j++) {
                const float *from = part + (u64) min(rank + j, p.top_k - 1) * cols;
                if (cols % 2 == 0) v[j] = *(const float2 *) from;
                else v[j] = make_float2(from[0], pair ? from[1] : 0.0f);
            }
#pragma unroll
            for (int j = 0; j < RANKS_AHEAD; j++)
                if (rank + j < p.top_k) {
                    y.v[i].x = fmaf(weight[rank + j], v[j].x, y.v[i].x);
                    y.v[i].y = fmaf(weight[rank + j], v[j].y, y.v[i].y);
                }
        }
    });
    return y;
}
// An expert that all rows share, and its gate for each row.
struct GatedSharedExpert {
    const float *x, *gate;
    int activation;
};
// `combine`, `gate_rows`, `add` and `add_norm` fused, with their bits: y = experts + gate shared, x = (from + y)
// factor, and the norm epilogue of x. A block a row, or a cluster.
KERNEL ROW_BOUNDS(3) moe_shared_norm(ExpertOutputs m, GatedSharedExpert g, const float *from, float *x, int cols,
                                     float factor, float eps, NormEpilogue norms) {
    __shared__ RowPartials<1> partials;
    pdl_launch();
    const u64 row = blockIdx.x / cluster_blocks();
    if (cluster_blocks() > 1) {
        expect_partials(partials);
        cluster_sync();
    }
    prefetch_norm_weights(norms, 0, cols);
    pdl_wait();
    RowFragment k = load_row(g.x + row * cols, cols), r = load_row(from + row * cols, cols);
    const float gate = activate(g.activation, g.gate[row]);
    RowFragment y = combine_experts(m, row, cols);
#pragma unroll
    for (int i = 0; i < PAIRS_PER_THREAD; i++) {
        k.v[i].x *= gate;
        k.v[i].y *= gate;
    }
    add_and_scale(y, k, 1.0f);
    const RowFragment w = load_optional_row(norms.weight[0], cols);
    add_and_scale(r, y, factor);
    store_row(x + row * cols, cols, r);
    store_norms(norms, row, cols, r, w, eps, partials);
}
// A dense block beside the experts, and the norms of both.
struct DenseBranch {
    const float *dense, *dense_weight, *own_weight;
};
// `combine`, the norms of the dense block and of the experts, their sum and `add_norm` fused:
// x = (from + rms(rms(dense) + rms(experts)) post) factor. A block a row, or a cluster.
KERNEL ROW_BOUNDS(3) moe_dense_norm(ExpertOutputs m, DenseBranch b, const float *from, float *x, const float *post,
                                    int cols, float factor, float eps, NormEpilogue norms) {
    __shared__ RowPartials<2> of_parts;
    __shared__ RowPartials<1> partials[2];
    pdl_launch();
    const u64 row = blockIdx.x / cluster_blocks();
    if (cluster_blocks() > 1) {
        expect_partials(of_parts);
        expect_partials(partials[0]);
        expect_partials(partials[1]);
        cluster_sync();
    }
    prefetch_row(b.dense_weight, cols);
    prefetch_row(b.own_weight, cols);
    prefetch_row(post, cols);
    prefetch_norm_weights(norms, 0, cols);
    pdl_wait();
    RowFragment k = load_row(b.dense + row * cols, cols), r = load_row(from + row * cols, cols);
    RowFragment y = combine_experts(m, row, cols);
    const RowFragment of_dense = load_row(b.dense_weight, cols), of_own = load_row(b.own_weight, cols);
    const RowSum own[2] = {sum_of_squares(k), sum_of_squares(y)};
    float sums[2];
    row_sums(own, sums, of_parts);
    apply_norm(k, inverse_rms(sums[0], cols, eps), of_dense, true);
    apply_norm(y, inverse_rms(sums[1], cols, eps), of_own, true);
    add_and_scale(k, y, 1.0f);
    const RowFragment of_sum = load_optional_row(post, cols);
    rms_norm_row(k, cols, eps, of_sum, post, partials[0]);
    const RowFragment w = load_optional_row(norms.weight[0], cols);
    add_and_scale(r, k, factor);
    store_row(x + row * cols, cols, r);
    store_norms(norms, row, cols, r, w, eps, partials[1]);
}
// y[row] = sum over ranks of weight * part, by fused multiply-add from 0.
KERNEL combine(const float *parts, const float *weights, float *y, int cols, int top_k, u64 n) {
    pdl_sync();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 row = i / cols;
    float sum = 0.0f;
    for (int rank = 0; rank < top_k; rank++) {
        u64 pair = row * top_k + rank;
        sum = fmaf(weights[pair], parts[pair * cols + i % cols], sum);
    }
    y[i] = sum;
}
