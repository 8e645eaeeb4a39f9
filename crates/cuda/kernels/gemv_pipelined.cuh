// GEMV through a multistage pipeline in shared memory, from compute capability 9.0 on: what gemv_pipelined.cu and
// moe_gemv.cu share. weight_tile.cuh and mbarrier.cuh go before this.
//
//   global                           shared: a pipeline a warp            registers                  shared
//   packed  - cp.async, or TMA -->  [stages][M row tiles]     -- load --> Tile -dequantize-> A +
//   weights                                                                                    +- mma -> accumulators
//   activations - cp.async, or -->  [stages][activation rows] -----------------------------> B +    | one slice
//                 loads of L2                                                                        v a warp
//                                                       y <-- epilogue <-- add slices <-- [stage][warp][partials]
//
// A persistent block takes a run of the row tiles of all matrices, M at a time (a group); each of its warps has a slice
// of K (sliced-K) and a pipeline of its own, a stage of which is one tile of each of the M row tiles. The prologue asks
// for weights before the kernel waits for its input (PDL), and the pipeline never drains between row tiles. Nor does a
// warp wait for the others at every row tile: partial results meet in shared memory, where the warps take turns to add
// them (`SliceReduction`). Rows that do not exist are read as the last one; nobody looks at their results.

// The copy engine brings weights, or lanes do (cp.async): whichever was faster on sm_90.
#define BULK_COPY (FORMAT == 16 || FORMAT == 9)
constexpr bool USE_BULK_COPY = BULK_COPY;
// Bytes of a warp's pipeline: stages, with barriers (bulk copies) or rescales (cp.async) behind them.
constexpr int PIPELINE_BYTES = USE_BULK_COPY ? 12288 : 12384;
// At most. With one row tile of 4 bits a stage, 12 are what a warp's memory holds.
constexpr int MAX_STAGES = USE_BULK_COPY ? 16 : 12;
constexpr int REDUCTION_STAGES = 4; // of partial results, 16 rows by 8 each
static_assert(PIPELINE_BYTES <= GEMV_PIPELINE_BYTES && REDUCTION_STAGES * 512 == GEMV_REDUCTION_BYTES,
              "as src/matmul.rs lays out shared memory");

// ---- the order of a block's row tiles
// Row tiles that lie in one matrix.
struct TileGroup {
    const u8 *w;
    int matrix, row_tile, count;
};
// The group of `max` row tiles, at most, from number `at` of all matrices' row tiles on.
DEVICE TileGroup tile_group_at(const MatrixGroup &m, int max, int at, int stop, int k_tiles) {
    TileGroup v = {m.w[0], 0, at, min(max, min(m.first_block[1], stop) - at)};
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (at >= m.first_block[i]) {
            v = {m.w[i], i, at - m.first_block[i], min(max, stop - at)};
            if (i < 3) v.count = min(v.count, m.first_block[i + 1] - at);
        }
    v.w += row_tile_offset(v.row_tile, k_tiles);
    return v;
}
// What a warp's pipeline asks for next: the tiles number `k` of its slice, of a group of row tiles.
template <class Matrices>
struct TileIterator {
    const Matrices &matrices;
    int max, at, stop, k_tiles, begin, length; // `length` tiles from `begin` on are the slice
    const u8 *from;
    int count, k = 0;
    int before; // row tiles until the next pair of interleaved ones
    // Whether there are more tiles; they are at `from`, `offset` bytes on.
    DEVICE bool valid(int offset) {
        if (at >= stop) return false;
        if (k == 0) {
            const TileGroup next = tile_group_at(matrices, max, at, stop, k_tiles);
            from = next.w + begin * K_STRIDE + offset;
            count = next.count;
            before = INTERLEAVE - next.row_tile % INTERLEAVE;
        }
        return true;
    }
    // Returns whether the group ends.
    DEVICE bool advance() {
        from += K_STRIDE;
        if (++k < length) return false;
        k = 0;
        at += count;
        return true;
    }
};

// ---- pipeline of cp.async copies
// Activations that go through the stages, MAX_ROWS at most: of each tile 16 bytes a lane, four rows at once. The halves
// of odd rows are swapped (swizzle), or lanes would meet in a bank. `rescales`, [MAX_SLICE_TILES, MAX_ROWS], bring
// values to the scale of the slice.
template <int MAX_ROWS>
struct SmemActivations {
    static constexpr int BYTES = MAX_ROWS * 128, RESCALE_BYTES = MAX_SLICE_TILES * MAX_ROWS * 4;
    const u8 *from;      // what the lane copies of the next tile
    const float *scales; // of the lane's row
    u32 *rescales;
    u32 four_rows;
    u32 to, read;
    int rows, lane;
    float scale;
    DEVICE SmemActivations(const Activations &x, int lane, int base, int n_rows, int begin) : lane(lane) {
        rows = max(1, min(MAX_ROWS, n_rows - base));
        four_rows = 8 * x.stride;
        auto row = [&](int i) { return (u64) min(base + i, n_rows - 1); };
        from = (const u8 *) (x.values + row(lane >> 3) * x.stride + begin * 64) + (lane & 7) * 16;
        scales = x.scales + row(lane >> 2) * (x.stride / 64) + begin;
        to = (lane >> 3) * 128 + ((lane & 7) * 16 ^ (lane >> 3 & 1) * 64);
        const int g = min(lane >> 2, rows - 1);
        read = g * 128 + ((lane & 3) * 16 ^ (g & 1) * 64);
        // Keeps them in registers: the compiler would compute them again for every tile.
        asm volatile("" : "+r"(to), "+r"(read));
    }
    // Calls f(i, whether the lane copies it, to, from) for the lane's i-th copy of the next tile.
    template <class F>
    DEVICE void for_each_copy(F f) const {
        f(0, lane >> 3 < rows, to, from);
        if (MAX_ROWS > 4) f(1, (lane >> 3) + 4 < rows, to + 512, from + four_rows);
    }
    DEVICE void advance(int tiles) { from += tiles * 128; }
    // Has the addresses of loads computed here, not where the loads are.
    DEVICE void keep() { asm volatile("" : "+l"(from), "+l"(scales)); }
    // Finds the slice's scale and the rescales, which it stores in `space`.
    DEVICE void load_scales(int length, u8 *space) {
        rescales = (u32 *) space + min(lane >> 2, rows - 1);
        scale = store_rescales(scales, length, rescales, MAX_ROWS);
    }
    // Of tile `k`, which lies at `stage`.
    DEVICE ActivationFragment load(const u8 *stage, int k) const {
        ActivationFragment v;
        v.set(*(const uint4 *) (stage + read), *(const uint4 *) (stage + (read ^ 64)), rescales[k * MAX_ROWS]);
        return v;
    }
};
// Activations that do not go through the stages.
struct NoActivations {
    static constexpr int BYTES = 0, RESCALE_BYTES = 0;
    template <class F>
    DEVICE void for_each_copy(F) const {}
    DEVICE void advance(int) {}
    DEVICE void keep() {}
    DEVICE void load_scales(int, u8 *) {}
};
// `BYTES`: shared memory of the warp's stages and rescales. All that a stage needs of addresses is computed before it.
template <int M, class Matrices, int N, class Activations, int BYTES>
struct CpAsyncPipeline {
    static constexpr int ROW_TILES = M, WEIGHT_BYTES = M * TILE_BYTES;
    // A multiple of 32, or copies would straddle.
    static constexpr int STAGE_BYTES = (WEIGHT_BYTES + N * Activations::BYTES + 31) & ~31;
    static constexpr int FITTING = (BYTES - N * Activations::RESCALE_BYTES) / STAGE_BYTES;
    static constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES, END = STAGES * STAGE_BYTES;
    static_assert(STAGES > 1, "a stage ahead");
    // A tile of a stage is copied by whole warps, and then its rest by some lanes: by each of another row tile, if
    // there are enough of them.
    static constexpr int REST = TILE_BYTES % 512 / 16, WHOLE = TILE_BYTES / 512 * 512;
    static constexpr bool RESTS_TOGETHER = REST > 0 && REST *M <= 32;
    TileIterator<Matrices> next;
    Activations activations[2];
    u8 *smem;
    u32 to, row_tile_stride, rest_to;
    int lane, rest_tile, slot = 0;
    u64 rest_from;
    const u8 *stage;
    DEVICE CpAsyncPipeline(const TileIterator<Matrices> &tiles, const Activations &low, const Activations &high,
                           u8 *smem, int lane)
        : next(tiles), activations{low, high}, smem(smem), to(smem_address(smem)), lane(lane) {
        row_tile_stride = next.k_tiles * TILE_BYTES;
        rest_tile = RESTS_TOGETHER ? lane / max(REST, 1) : 0;
        // From the lane's 16 bytes of the first row tile to those of its rest.
        const int in = WHOLE + (RESTS_TOGETHER ? lane % max(REST, 1) : lane) * 16 - lane * 16;
        rest_to = rest_tile * TILE_BYTES + in;
        rest_from = (u64) rest_tile * row_tile_stride + in;
        // Keeps them in registers, as above.
        asm volatile("" : "+r"(to), "+r"(row_tile_stride), "+r"(rest_to), "+r"(rest_tile), "+l"(rest_from));
    }
    // Copies the next tiles to the stage at `place`, and commits.
    DEVICE void produce(int place, bool with_activations) {
        if (next.valid(lane * 16)) {
            const u32 activations_at = to + place + WEIGHT_BYTES, at = to + place + lane * 16;
            auto copy = [&](int count) {
                const u8 *p = next.from;
#pragma unroll
                for (int m = 0; m < M; m++, p += row_tile_stride)
                    if (m < count) {
#pragma unroll
                        for (int i = 0; i < WHOLE; i += 512) cp_async_16(at + m * TILE_BYTES + i, p + i);
                        if (REST && !RESTS_TOGETHER)
                            cp_async_16_if(lane < REST, at + m * TILE_BYTES + rest_to, p + rest_to);
                    }
                if (RESTS_TOGETHER) cp_async_16_if(rest_tile < count, at + rest_to, next.from + rest_from);
            };
            if (next.count == M) copy(M);
            else copy(next.count);
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (with_activations)
                    activations[n].for_each_copy([&](int, bool yes, u32 to, const u8 *from) {
                        cp_async_16_if(yes, activations_at + n * Activations::BYTES + to, from);
                    });
                activations[n].advance(1);
            }
            if (next.advance())
#pragma unroll
                for (int n = 0; n < N; n++) activations[n].advance(-next.length);
        }
        cp_async_commit();
    }
    // Fills the first stages with weights, before `pdl_wait`.
    DEVICE void prologue() {
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) produce(i * STAGE_BYTES, false);
    }
    // And with activations, which were not there: calls `wait` before it reads any. What can be computed before is, for
    // a multiprocessor fetches instructions that it runs for the first time at about one a nanosecond.
    template <class F>
    DEVICE void prologue_activations(F wait) {
        uint4 v[STAGES - 1][2];
        int at[STAGES - 1]; // bytes from the slice's first tile
#pragma unroll
        for (int i = 0, k = 0; i < STAGES - 1; i++) {
            at[i] = 128 * k;
            if (++k == next.length) k = 0;
            asm volatile("" : "+r"(at[i]));
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            Activations own = activations[n];
            own.advance(-next.k);
            own.keep();
            if (n == 0) wait();
#pragma unroll
            for (int i = 0; i < STAGES - 1; i++)
                own.for_each_copy([&](int j, bool yes, u32, const u8 *from) {
                    if (yes) v[i][j] = *(const uint4 *) (from + at[i]);
                });
            // All loads are issued before `load_scales`, whose shuffles wait for loads of its own.
            __syncwarp();
            activations[n].load_scales(next.length, smem + END + n * Activations::RESCALE_BYTES);
#pragma unroll
            for (int i = 0; i < STAGES - 1; i++)
                own.for_each_copy([&](int j, bool yes, u32 to, const u8 *) {
                    if (yes) *(uint4 *) (smem + i * STAGE_BYTES + WEIGHT_BYTES + n * Activations::BYTES + to) = v[i][j];
                });
        }
    }
    // Waits for the next stage, and fills the one before again.
    DEVICE void acquire(int) {
        cp_async_wait<STAGES - 2>();
        __syncwarp(); // all lanes' copies are there, and nobody reads the stage before
        produce((slot == 0 ? END : slot) - STAGE_BYTES, true);
        stage = smem + slot;
        slot = slot + STAGE_BYTES == END ? 0 : slot + STAGE_BYTES;
    }
    DEVICE ActivationFragment fragment(int n, int k) {
        return activations[n].load(stage + WEIGHT_BYTES + n * Activations::BYTES, k);
    }
    DEVICE float slice_scale(int n) const { return activations[n].scale; }
    DEVICE void release() {}
};

// ---- pipeline of bulk copies (TMA)
// A lane's activation row in a warp's slice, read from L2.
struct GlobalActivations {
    const u16 *values;
    const float *scales;
    float scale, inverse_scale; // of the slice
    // What a tile has, as it is.
    struct Raw {
        uint4 a, b;
        float scale;
    };
    DEVICE GlobalActivations(const Activations &x, int lane, int base, int n_rows, int begin) {
        const u64 row = min(base + (lane >> 2), n_rows - 1);
        values = x.values + row * x.stride + begin * 64 + (lane & 3) * 8;
        scales = x.scales + row * (x.stride / 64) + begin;
    }
    DEVICE void load_scales(int length) {
        scale = slice_scale(0, length, [&](int k) { return scales[k]; });
        inverse_scale = inverse_pow2(scale);
    }
    DEVICE Raw load(int k) const {
        return {*(const uint4 *) (values + k * 64), *(const uint4 *) (values + k * 64 + 32), scales[k]};
    }
    DEVICE ActivationFragment rescaled(const Raw &raw) const {
        ActivationFragment v;
        v.set(raw.a, raw.b, rescale_f16x2(raw.scale, inverse_scale));
        return v;
    }
};
// One lane asks the copy engine for weights, with a full barrier a stage. Lanes read activations themselves, a tile
// ahead.
template <int M, class Matrices, int N, class Activations, int>
struct BulkCopyPipeline {
    static constexpr int ROW_TILES = M;
    static_assert(M <= INTERLEAVE + 1, "a stage is brought in two copies");
    TileIterator<Matrices> next;
    Activations activations[2];
    u8 *smem;
    u32 to, full;
    int lane, stage_bytes, stages, slot = 0;
    u32 phase = 0;
    const u8 *stage;
    typename Activations::Raw ahead;
    ActivationFragment fragments[N];
    DEVICE BulkCopyPipeline(const TileIterator<Matrices> &tiles, const Activations &low, const Activations &high,
                            u8 *smem, int lane)
        : next(tiles), activations{low, high}, smem(smem), to(smem_address(smem)), lane(lane) {
        full = to + PIPELINE_BYTES - 8 * MAX_STAGES;
        stage_bytes = min(M, next.stop - next.at) * TILE_BYTES;
        stages = min((PIPELINE_BYTES - 8 * MAX_STAGES) / stage_bytes, MAX_STAGES);
    }
    DEVICE void produce(int slot) { // by one lane
        if (!next.valid(0)) return;
        const u32 at = to + slot * stage_bytes, barrier = full + 8 * slot;
        mbarrier_expect_tx(barrier, next.count * TILE_BYTES);
        const int near = min(next.count, next.before);
        bulk_copy(at, next.from, near * TILE_BYTES, barrier);
        if (near < next.count)
            bulk_copy(at + near * TILE_BYTES, next.from + near * TILE_BYTES + (next.k_tiles - 1) * K_STRIDE,
                      (next.count - near) * TILE_BYTES, barrier);
        next.advance();
    }
    // Fills the first stages with weights, before `pdl_wait`.
    DEVICE void prologue() {
        if (lane != 0) return;
        for (int i = 0; i < stages; i++) mbarrier_init(full + 8 * i, 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        for (int i = 0; i < stages; i++) produce(i);
    }
    template <class F>
    DEVICE void prologue_activations(F wait) {
        asm volatile("" : "+l"(activations[0].values), "+l"(activations[0].scales));
        wait();
        ahead = activations[0].load(0);
#pragma unroll
        for (int n = 0; n < N; n++) activations[n].load_scales(next.length);
    }
    // Waits for the next stage, of tile `k` of the slice.
    DEVICE void acquire(int k) {
        fragments[0] = activations[0].rescaled(N == 1 ? ahead : activations[0].load(k));
        if (N == 1) ahead = activations[0].load(k + 1 == next.length ? 0 : k + 1);
        else fragments[N - 1] = activations[1].rescaled(activations[1].load(k));
        mbarrier_wait(full + 8 * slot, phase);
        stage = smem + slot * stage_bytes;
    }
    DEVICE const ActivationFragment &fragment(int n, int) const { return fragments[n]; }
    DEVICE float slice_scale(int n) const { return activations[n].scale; }
    DEVICE void release() {
        __syncwarp(); // all lanes have read the stage
        if (lane == 0) produce(slot);
        if (++slot == stages) {
            slot = 0;
            phase++;
        }
    }
};

// ---- the slices of a block's results on their way to each other
struct SliceReduction {
    float *partials; // [REDUCTION_STAGES, SLICES, 128]
    u64 *full, *empty;
};
DEVICE void init_barriers(const SliceReduction &reduction) {
    if (threadIdx.x < REDUCTION_STAGES) {
        mbarrier_init(smem_address(reduction.full + threadIdx.x), SLICES * 32);
        mbarrier_init(smem_address(reduction.empty + threadIdx.x), 32);
    }
}

// What kernels differ in: functions
//   int begin(group, scales)  how many activation rows the group has; where the scales of its row tiles are
//   fragment(n, k)            B of tile k of the slice, for activation rows 8 n to 8 n + 7
//   slice_scale(n)            scale of the slice, of the lane's activation row
//   epilogue(group)           returns a function that stores a result: (row of the matrix, activation row, value)
template <class Begin, class Fragment, class Scale, class Epilogue>
struct GemvProblem {
    Begin begin;
    Fragment fragment;
    Scale slice_scale;
    Epilogue epilogue;
};
template <class Begin, class Fragment, class Scale, class Epilogue>
__device__ GemvProblem(Begin, Fragment, Scale, Epilogue) -> GemvProblem<Begin, Fragment, Scale, Epilogue>;
// Multiplies the block's run of row tiles, from number `at` to `stop`, as the pipeline brings them. Activations are
// there when `start` has been called; what can be computed before, is.
template <int N, class Matrices, class Pipeline, class Problem, class Start>
DEVICE void gemv_mainloop(const Matrices &matrices, Pipeline &pipeline, const SliceReduction &reduction, int at,
                          int stop, int k_tiles, int length, Problem problem, Start start) {
    constexpr int M = Pipeline::ROW_TILES;
    static_assert(M <= 4, "a branch for each number of row tiles");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 turn = 0;
    TileGroup group;
    // Columns of results that anybody looks at, and row tiles whose results fit side by side.
    int width, side;
    float scale; // of a row tile a lane
    auto begin_group = [&]() {
        group = tile_group_at(matrices, M, at, stop, k_tiles);
        const float *scales;
        const int present = problem.begin(group, scales);
        width = N > 1 || present > 4 ? 8 : present > 2 ? 4 : 2;
        side = 8 / width;
        scale = scales[min(lane, group.count - 1)];
    };
    if (at < stop) begin_group();
    start();
    while (at < stop) {
        float accumulators[M][N][4];
        clear(accumulators);
#pragma unroll 1
        for (int k = 0; k < length; k++) {
            pipeline.acquire(k);
            // Row tiles side by side hide each other's latency.
            ActivationFragment b[N];
#pragma unroll
            for (int n = 0; n < N; n++) b[n] = problem.fragment(n, k);
            auto multiply = [&](int count) {
#pragma unroll
                for (int m = 0; m < M; m++)
                    if (m < count)
                        mma_tile(accumulators[m], Tile::load<true>(pipeline.stage + m * TILE_BYTES, lane), b);
            };
            if (group.count == M) multiply(M);
            else if (M > 3 && group.count == 3) multiply(3);
            else if (M > 2 && group.count == 2) multiply(2);
            else if (M > 1) multiply(1);
            pipeline.release();
        }
#pragma unroll
        for (int n = 0; n < N; n++) apply_slice_scale(accumulators, n, problem.slice_scale(n));
        const auto store = problem.epilogue(group);
        // Partial results of `side` row tiles a stage: [row tile, i, g, t] of each warp.
        const int t = lane & 3, quads = width / 2;
        const u32 before = turn;
#pragma unroll
        for (int c = 0; c < M * N; c++) {
            if (c / N >= group.count) break;
            const int beside = c & (side - 1), stage = turn % REDUCTION_STAGES;
            if (beside == 0) mbarrier_wait(smem_address(reduction.empty + stage), turn / REDUCTION_STAGES + 1);
            if (t < quads)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    reduction.partials[(stage * SLICES + warp) * 128 + (beside * 4 + i) * 8 * quads +
                                       (lane >> 2) * quads + t] = accumulators[c / N][c % N][i];
            if (beside != side - 1 && c + 1 != group.count * N) continue;
            turn++;
            mbarrier_arrive(smem_address(reduction.full + stage));
        }
        // Warps take turns to add slices: if the last to arrive did, it would be later still.
#pragma unroll 1
        for (u32 of = before; of < turn; of++) {
            if (of % SLICES != (u32) warp) continue;
            const int stage = of % REDUCTION_STAGES, first = (of - before) * side;
            const int here = min(side, group.count * N - first) * 32 * quads;
            const float *partials = reduction.partials + stage * SLICES * 128;
            mbarrier_wait(smem_address(reduction.full + stage), of / REDUCTION_STAGES);
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = partials[j * 32 + lane];
#pragma unroll
            for (int s = 1; s < SLICES; s++)
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] += partials[s * 128 + j * 32 + lane];
            mbarrier_arrive(smem_address(reduction.empty + stage));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = j * 32 + lane, column = at & (quads - 1), g = at / quads & 7, i = at / quads >> 3 & 3;
                const int tile = first / N + at / quads / 32;
                const float sum = v[j] * __shfl_sync(~0u, scale, tile);
                if (at < here)
                    store((group.row_tile + tile) * 16 + g + (i >> 1) * 8, first % N * 8 + column * 2 + (i & 1), sum);
            }
        }
        at += group.count;
        if (at < stop) begin_group();
    }
}
