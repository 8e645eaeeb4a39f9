// RMS norms of rows that fit the registers of a block or cluster, alone or fused with what goes before and after them
// in a model's layer. common.cuh, math.cuh, mbarrier.cuh and rows.cuh go before this.
//
//   global --> RowFragment (registers) --> y in f32
//                                      +-> Activations (f16), if the next op is a matrix product

// x / sqrt(mean(x²) + eps) * weight over runs of `width`; a block a run.
KERNEL ROW_BOUNDS(4) rms_norm(const float *x, const float *weight, float *y, int width, float eps, Activations h) {
    __shared__ RowPartials<1> partials;
    pdl_launch();
    const u64 run = blockIdx.x;
    const RowFragment w = load_optional_row(weight, width);
    pdl_wait();
    RowFragment k = load_row(x + run * width, width);
    rms_norm_row(k, width, eps, w, weight, partials);
    store_row(y + run * width, width, k);
    if (h.stride) store_row_f16(h, run, k);
}

// n = rms_norm(x) and y = activation(gate) n, fused, with runs of whole tiles: a block a run. `n` and `y` may be null,
// and `y` may be `gate`.
KERNEL ROW_BOUNDS(4) rms_norm_glu(const float *x, const float *weight, float *n, const float *gate, float *y, int width,
                                  float eps, int f, Activations h) {
    __shared__ RowPartials<1> partials;
    pdl_launch();
    const u64 run = blockIdx.x;
    const int runs = h.stride / width;
    const RowFragment w = load_optional_row(weight, width);
    pdl_wait();
    RowFragment k = load_row(x + run * width, width), g = load_row(gate + run * width, width);
    rms_norm_row(k, width, eps, w, weight, partials);
    if (n) store_row(n + run * width, width, k);
#pragma unroll
    for (int i = 0; i < PAIRS_PER_THREAD; i++) {
        k.v[i].x = activate(f, g.v[i].x) * k.v[i].x;
        k.v[i].y = activate(f, g.v[i].y) * k.v[i].y;
    }
    if (y) store_row(y + run * width, width, k);
    for_each_pair([&](int i, int c) {
        if (c < width) store_activation_tile(h, run / runs, (run % runs * width + c) / 64, k.v[i].x, k.v[i].y);
    });
}

// x = (from + rms(y) post) factor, and the norm epilogue of x: a block a row, or a cluster. The bits are those of the
// kernels one after the other, whose threads have the same columns.
KERNEL ROW_BOUNDS(4) add_norm(const float *from, float *x, const float *y, const float *post, int cols, float factor,
                              float eps, NormEpilogue norms) {
    __shared__ RowPartials<1> partials[2];
    pdl_launch();
    const u64 row = blockIdx.x / cluster_blocks();
    if (cluster_blocks() > 1) {
        expect_partials(partials[0]);
        expect_partials(partials[1]);
        cluster_sync(); // all blocks have started
    }
    const RowFragment p = load_optional_row(post, cols), w = load_optional_row(norms.weight[0], cols);
    prefetch_norm_weights(norms, 1, cols);
    pdl_wait();
    RowFragment k = load_row(y + row * cols, cols), r = load_row(from + row * cols, cols);
    if (post) rms_norm_row(k, cols, eps, p, true, partials[0]);
    add_and_scale(r, k, factor);
    store_row(x + row * cols, cols, r);
    store_norms(norms, row, cols, r, w, eps, partials[1]);
}
