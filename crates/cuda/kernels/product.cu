// Products with a few rows. tile.cuh goes before this.

// Adds the slices of R * N accumulators and writes the results. `out` gives the
// row of y for an activation row, negative for nobody.
template <int R, int N, class Out>
__device__ __forceinline__ void write(float (&o)[R][N][4], float *shared, int slices, const float *factor, float *y, int rows, int tile, Out out) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) shared[(((warp * R + r) * N + n) * 4 + i) * 32 + lane] = o[r][n][i];
    __syncthreads();
    for (int at = threadIdx.x; at < R * N * 128; at += blockDim.x) {
        float v = shared[at];
        for (int s = 1; s < slices; s++) v += shared[s * R * N * 128 + at];
        const int l = at & 31, i = at >> 5 & 3, n = at >> 7 & (N - 1), r = at / (N * 128);
        const int row = (tile + r) * 16 + (l >> 2) + (i >> 1) * 8;
        int to;
        if (row < rows && out(n * 8 + (l & 3) * 2 + (i & 1), to)) {
            if (factor) v *= factor[row];
            y[(u64) to * rows + row] = v;
        }
    }
}

// Asks for a warp's columns of `count` rows of tiles, of those whose band starts there.
__device__ __forceinline__ void ask_run(const u8 *w, int tile, int count, int tiles, int begin, int end) {
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x & 31;
    if (lane < count && (tile + lane) % BAND == 0 && begin < end)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(w + row_of_tiles(tile + lane, tiles) + begin * ALONG), "r"((end - begin) * ALONG) : "memory");
#endif
}

// One block: R tiles of 16 rows by N * 8 activation rows; a warp a slice.
template <int R, int N>
__device__ __forceinline__ void product(const Matrices &m, const Half &x, int n_rows, int tiles, int per, float *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) blockIdx.x >= m.first[i];
    const u8 *w = m.w[0];
    const float *factor = m.factor[0];
    float *y = m.y[0];
    int rows = m.rows[0], first = m.first[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { w = m.w[i]; factor = m.factor[i]; y = m.y[i]; rows = m.rows[i]; first = m.first[i]; }
    const int tile = ((int) blockIdx.x - first) * R, base = blockIdx.y * N * 8;
    const int begin = warp * per, end = min(begin + per, tiles);
    const u8 *run = w + row_of_tiles(tile, tiles) + begin * ALONG;
    const int last = (rows + 15) / 16 - tile; // tiles from here on that exist
    ask_run(w, tile, min(R, last), tiles, begin, end);
    in_order();
    float o[R][N][4];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[r][n][i] = 0.0f;
    const u32 magic = offset();
    auto row = [&](int i) { return base + i < n_rows ? base + i : -1; };
#pragma unroll UNROLL
    for (int k = begin; k < end; k++) {
        Tile tile[R];
#pragma unroll
        for (int r = 0; r < R; r++) tile[r] = fetch(run + (r < last ? r : 0) * BESIDE + (u64) (k - begin) * ALONG, lane);
#pragma unroll
        for (int n = 0; n < N; n++) {
            Inputs in = inputs(x, k, lane, row(n * 8 + g), row(n * 8 + 2 * t), row(n * 8 + 2 * t + 1));
#pragma unroll
            for (int r = 0; r < R; r++) multiply(tile[r], in, o[r][n], magic);
        }
    }
    write<R, N>(o, shared, blockDim.x >> 5, factor, y, rows, tile, [&](int i, int &to) {
        to = base + i;
        return to < n_rows;
    });
}
#define PRODUCT(R, N) KERNEL __launch_bounds__(SLICES * 32) product_##R##_##N(Matrices m, Half x, int n_rows, int tiles, int per) { \
    __shared__ float shared[SLICES * R * N * 128]; product<R, N>(m, x, n_rows, tiles, per, shared); }
PRODUCT(1, 1)
PRODUCT(2, 1)
PRODUCT(1, 2)

// The same for few rows where memory is fast: a block for each multiprocessor, or
// two, walks a run of the row tiles of all matrices, ROWS(N) at a time; a warp has its
// slice of each. Weights come through a ring in shared memory, a stage a tile of each
// row, that is filled before the kernel waits for its input and never drains (`Ring`).
// Rows that are not there are read as the last one, for nobody looks at their results.
// Nor does a warp wait for the others at every tile: their slices meet in shared memory,
// where warps take turns to add them.
#if __CUDA_ARCH__ >= 900
// Whether the copy engine brings weights, and not lanes: as measured on sm_90.
#define ENGINE (FORMAT == 16 || FORMAT == 9)
#if ENGINE
#define RING 12288 // bytes of a warp's weights on their way, and of its barriers
#define DEEPEST 16 // stages at once, at most
#else
#define RING 12384 // bytes of a warp's weights and activations on their way
#define DEEPEST 5
#endif
#define SUMS 4     // results of 16 rows by 8 that wait for slices, at most
#define ROWS(N) (N == 2 ? TILE_BYTES <= 1088 ? 2 : 1 : TILE_BYTES <= 640 ? 4 : TILE_BYTES <= 1152 ? 2 : 1)
// Row tiles of one matrix, `most` at most, from number `at` of all matrices on.
struct Group {
    const u8 *w;
    int which, tile, count;
};
__device__ __forceinline__ Group group_at(const Matrices &m, int most, int at, int stop, int tiles) {
    Group v = {m.w[0], 0, at, min(most, min(m.first[1], stop) - at)};
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (at >= m.first[i]) {
            v = {m.w[i], i, at - m.first[i], min(most, stop - at)};
            if (i < 3) v.count = min(v.count, m.first[i + 1] - at);
        }
    v.w += row_of_tiles(v.tile, tiles);
    return v;
}
// What a warp asks for next: tiles `next_k` of a group of rows, from the block's run.
struct Cursor {
    const Matrices &m;
    int most, at, stop, tiles, begin, length;
    const u8 *from;
    int count, k = 0;
    int before; // rows until the next band
    // The next tiles are at `from`; false after the last.
    __device__ __forceinline__ bool look(int offset) {
        if (at >= stop) return false;
        if (k == 0) {
            const Group next = group_at(m, most, at, stop, tiles);
            from = next.w + begin * ALONG + offset;
            count = next.count;
            before = BAND - next.tile % BAND;
        }
        return true;
    }
    // Whether the group of rows ends.
    __device__ __forceinline__ bool step() {
        from += ALONG;
        if (++k < length) return false;
        k = 0;
        at += count;
        return true;
    }
};
// Barriers in shared memory; `round` counts how often one is used.
__device__ __forceinline__ void arrivals(u32 barrier, u32 threads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 round) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" :: "r"(barrier), "r"(round & 1) : "memory");
}
#if !ENGINE
__device__ __forceinline__ void copy16(u32 to, const u8 *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
// Without a branch.
__device__ __forceinline__ void copy16_if(bool yes, u32 to, const u8 *from) {
    asm volatile("{.reg .pred yes; setp.ne.u32 yes, %2, 0; @yes cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" :: "r"(to), "l"(from), "r"((u32) yes) : "memory");
}
// How a warp brings MOST rows of activations, at most, to shared memory, a tile at a time.
// Values: 16 bytes a lane, four rows at once; the halves of odd rows change places, or lanes
// would meet in a bank; then what is known of the tile, which up to three rows leave lanes for.
template <int MOST> struct Way {
    static constexpr int BYTES = MOST * 144, KNOWN = MOST * 128;
    const u8 *mine, *known; // what the lane copies of the next tile
    u64 four_rows;
    u32 to, read[4];
    int rows, lane, step;
    bool copies;
    __device__ __forceinline__ Way(const Half &x, int lane, int base, int n_rows, int begin) : lane(lane) {
        rows = max(1, min(MOST, n_rows - base));
        four_rows = 8 * (u64) x.kp;
        auto row = [&](int i) { return (u64) min(base + i, n_rows - 1); };
        const bool values = MOST > 3 || lane < 24;
        const int i = values ? lane >> 3 : lane - 24, tiles = x.kp / 64;
        mine = values ? (const u8 *) (x.values + row(i) * x.kp + begin * 64) + (lane & 7) * 16 : (const u8 *) (x.tiles + row(i) * tiles + begin);
        known = (const u8 *) (x.tiles + row(lane) * tiles + begin);
        step = values ? 128 : 16;
        to = values ? i * 128 + ((lane & 7) * 16 ^ (i & 1) * 64) : KNOWN + i * 16;
        copies = i < rows;
        const int g = min(lane >> 2, rows - 1), t = lane & 3;
        read[0] = g * 128 + (t * 16 ^ (g & 1) * 64);
        read[1] = read[0] ^ 64;
        for (int i = 0; i < 2; i++) read[2 + i] = KNOWN + min(2 * t + i, rows - 1) * 16;
        // Or they would be worked out again for every tile.
        asm volatile("" : "+r"(to), "+r"(read[0]), "+r"(read[1]), "+r"(read[2]), "+r"(read[3]));
    }
    // Calls f(i, whether the lane copies it, to, from) for the i-th of the next tile.
    template <class F> __device__ __forceinline__ void each(F f) const {
        f(0, copies, to, mine);
        if (MOST <= 3) return;
        f(1, (lane >> 3) + 4 < rows, to + 512, mine + four_rows);
        f(2, lane < rows, KNOWN + lane * 16, known);
    }
    // Goes on by so many tiles.
    __device__ __forceinline__ void go(int tiles) {
        mine += tiles * step;
        known += tiles * 16;
    }
    __device__ __forceinline__ Inputs inputs(const u8 *at) const {
        const uint4 a = *(const uint4 *) (at + read[0]), b = *(const uint4 *) (at + read[1]);
        Inputs v;
        v.w[0] = a.x; v.w[1] = a.y; v.w[2] = a.z; v.w[3] = a.w;
        v.w[4] = b.x; v.w[5] = b.y; v.w[6] = b.z; v.w[7] = b.w;
        v.tiles[0] = *(const float4 *) (at + read[2]);
        v.tiles[1] = *(const float4 *) (at + read[3]);
        return v;
    }
};
// Lanes copy codes, and beside them what their stage needs of the activations, or every
// tile would wait for a round trip. All that a stage needs of addresses is known before it.
template <int N, int MOST> struct Ring {
    static constexpr int R = ROWS(N), WEIGHTS = R * TILE_BYTES;
    static constexpr int STAGE = (WEIGHTS + N * Way<MOST>::BYTES + 31) & ~31; // or copies would straddle
    static constexpr int DEPTH = RING / STAGE < DEEPEST ? RING / STAGE : DEEPEST, END = DEPTH * STAGE;
    static_assert(DEPTH > 1, "a stage ahead");
    // A row of a stage is copied by whole warps, and then its rest by some lanes: by
    // each of another row, if there are enough of them.
    static constexpr int REST = TILE_BYTES % 512 / 16, WHOLE = TILE_BYTES / 512 * 512;
    static constexpr bool TOGETHER = REST > 0 && REST * R <= 32;
    Cursor next;
    Way<MOST> way[2];
    u8 *ring;
    u32 to, beside, rest_to;
    int lane, rest_row, slot = 0;
    u64 rest_from;
    const u8 *stage;
    __device__ __forceinline__ Ring(const Half &x, const Cursor &cursor, u8 *ring, int lane, int base, int n_rows)
        : next(cursor), way{{x, lane, base, n_rows, cursor.begin}, {x, lane, base + 8 * (N - 1), n_rows, cursor.begin}}, ring(ring), to((u32) __cvta_generic_to_shared(ring)), lane(lane) {
        beside = next.tiles * TILE_BYTES;
        rest_row = TOGETHER ? lane / max(REST, 1) : 0;
        // From the lane's 16 bytes of the first row to those of its rest.
        const int in = WHOLE + (TOGETHER ? lane % max(REST, 1) : lane) * 16 - lane * 16;
        rest_to = rest_row * TILE_BYTES + in;
        rest_from = (u64) rest_row * beside + in;
        // As above.
        asm volatile("" : "+r"(to), "+r"(beside), "+r"(rest_to), "+r"(rest_row), "+l"(rest_from));
    }
    __device__ __forceinline__ void ask(int place, bool with_inputs) {
        if (next.look(lane * 16)) {
            const u32 inputs = to + place + WEIGHTS, at = to + place + lane * 16;
            auto copy = [&](int rows) {
                const u8 *p = next.from;
#pragma unroll
                for (int r = 0; r < R; r++, p += beside)
                    if (r < rows) {
#pragma unroll
                        for (int i = 0; i < WHOLE; i += 512) copy16(at + r * TILE_BYTES + i, p + i);
                        if (REST && !TOGETHER) copy16_if(lane < REST, at + r * TILE_BYTES + rest_to, p + rest_to);
                    }
                if (TOGETHER) copy16_if(rest_row < rows, at + rest_to, next.from + rest_from);
            };
            if (next.count == R) copy(R);
            else copy(next.count);
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (with_inputs) way[n].each([&](int, bool yes, u32 to, const u8 *from) { copy16_if(yes, inputs + n * Way<MOST>::BYTES + to, from); });
                way[n].go(1);
            }
            if (next.step())
#pragma unroll
                for (int n = 0; n < N; n++) way[n].go(-next.length);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    // Asks for the first stages' weights.
    __device__ __forceinline__ void start() {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; i++) ask(i * STAGE, false);
    }
    // Brings their activations, which were not there.
    __device__ __forceinline__ void fill() {
        uint4 v[DEPTH - 1][3];
#pragma unroll
        for (int n = 0; n < N; n++) {
            Way<MOST> way = this->way[n];
            way.go(-next.k);
#pragma unroll
            for (int i = 0, k = 0; i < DEPTH - 1; i++) {
                way.each([&](int j, bool yes, u32, const u8 *from) {
                    if (yes) v[i][j] = *(const uint4 *) from;
                });
                way.go(1);
                if (++k == next.length) {
                    k = 0;
                    way.go(-next.length);
                }
            }
#pragma unroll
            for (int i = 0; i < DEPTH - 1; i++)
                way.each([&](int j, bool yes, u32 to, const u8 *) {
                    if (yes) *(uint4 *) (ring + i * STAGE + WEIGHTS + n * Way<MOST>::BYTES + to) = v[i][j];
                });
        }
    }
    // Waits for the next stage.
    __device__ __forceinline__ void take(int) {
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncwarp(); // all lanes' copies are there, and the stage before is used
        ask((slot == 0 ? END : slot) - STAGE, true);
        stage = ring + slot;
        slot = slot + STAGE == END ? 0 : slot + STAGE;
    }
    __device__ __forceinline__ Inputs inputs(int n) const { return way[n].inputs(stage + WEIGHTS + n * Way<MOST>::BYTES); }
    __device__ __forceinline__ void used() {}
};
#else
// Tells a barrier of bytes to come, and has them come.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bring(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Where a lane finds 8 rows of activations in a warp's slice.
struct Way {
    const u16 *values;
    const float4 *tiles[2];
    int rows;
    __device__ __forceinline__ Way(const Half &x, int lane, int base, int n_rows, int begin) : rows(n_rows - base) {
        auto row = [&](int i) { return (u64) min(base + i, n_rows - 1); };
        values = x.values + row(lane >> 2) * x.kp + begin * 64 + (lane & 3) * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) tiles[i] = x.tiles + row(2 * (lane & 3) + i) * (x.kp / 64) + begin;
    }
    __device__ __forceinline__ Inputs at(int k) const {
        const uint4 a = *(const uint4 *) (values + k * 64), b = *(const uint4 *) (values + k * 64 + 32);
        Inputs v;
        v.w[0] = a.x; v.w[1] = a.y; v.w[2] = a.z; v.w[3] = a.w;
        v.w[4] = b.x; v.w[5] = b.y; v.w[6] = b.z; v.w[7] = b.w;
        v.tiles[0] = tiles[0][k];
        v.tiles[1] = tiles[1][k];
        return v;
    }
};
// The copy engine brings weights, and a barrier a stage says when. Lanes read
// activations from L2, a stage ahead.
template <int N, int> struct Ring {
    Cursor next;
    const Way way[2];
    u8 *ring;
    u32 to, there;
    int lane, stage_bytes, depth, slot = 0;
    u32 round = 0;
    const u8 *stage;
    Inputs ahead, in[N];
    __device__ __forceinline__ Ring(const Half &x, const Cursor &cursor, u8 *ring, int lane, int base, int n_rows)
        : next(cursor), way{{x, lane, base, n_rows, cursor.begin}, {x, lane, base + 8 * (N - 1), n_rows, cursor.begin}}, ring(ring), to((u32) __cvta_generic_to_shared(ring)), lane(lane) {
        there = to + RING - 8 * DEEPEST;
        stage_bytes = min(ROWS(N), next.stop - next.at) * TILE_BYTES;
        depth = min((RING - 8 * DEEPEST) / stage_bytes, DEEPEST);
    }
    __device__ __forceinline__ void ask(int slot) { // by one lane
        if (!next.look(0)) return;
        const u32 at = to + slot * stage_bytes, barrier = there + 8 * slot;
        expect(barrier, next.count * TILE_BYTES);
        const int near = min(next.count, next.before);
        bring(at, next.from, near * TILE_BYTES, barrier);
        if (near < next.count) bring(at + near * TILE_BYTES, next.from + near * TILE_BYTES + (next.tiles - 1) * ALONG, (next.count - near) * TILE_BYTES, barrier);
        next.step();
    }
    // Asks for the first stages.
    __device__ __forceinline__ void start() {
        if (lane != 0) return;
        for (int i = 0; i < depth; i++) arrivals(there + 8 * i, 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        for (int i = 0; i < depth; i++) ask(i);
    }
    // Reads the first activations.
    __device__ __forceinline__ void fill() { ahead = way[0].at(0); }
    // Waits for the next stage, of tile `k` of the slice.
    __device__ __forceinline__ void take(int k) {
        in[0] = N == 1 ? ahead : way[0].at(k);
        if (N == 1) ahead = way[0].at(k + 1 == next.length ? 0 : k + 1);
        else in[N - 1] = way[1].at(k);
        await(there + 8 * slot, round);
        stage = ring + slot * stage_bytes;
    }
    __device__ __forceinline__ const Inputs &inputs(int n) const { return in[n]; }
    __device__ __forceinline__ void used() {
        __syncwarp(); // all lanes have used the stage
        if (lane == 0) ask(slot);
        if (++slot == depth) {
            slot = 0;
            round++;
        }
    }
};
#endif
template <int N, int MOST>
__device__ __forceinline__ void feed(const Matrices &m, const Half &x, int n_rows, int tiles, int per, int total) {
    extern __shared__ __align__(128) u8 staged[];
    constexpr int R = ROWS(N);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int base = blockIdx.y * N * 8, begin = warp * per, length = min(per, tiles - begin);
    __shared__ u64 full[SUMS], empty[SUMS];
    if (threadIdx.x < SUMS) {
        arrivals((u32) __cvta_generic_to_shared(full + threadIdx.x), SLICES * 32);
        arrivals((u32) __cvta_generic_to_shared(empty + threadIdx.x), 32);
    }
    int at = (int) ((u64) total * blockIdx.x / gridDim.x);
    const int stop = (int) ((u64) total * (blockIdx.x + 1) / gridDim.x);
    float *meet = (float *) (staged + SLICES * RING); // [SUMS, SLICES, 128]
    Ring<N, MOST> ring(x, {m, R, at, stop, tiles, begin, length}, staged + warp * RING, lane, base, n_rows);
    start_next();
    ring.start();
    __syncthreads(); // the barriers are there
    wait_for_previous();
    ring.fill();
    const u32 magic = offset();
    // Columns of results that are looked at, and tiles whose results fit side by side.
    const int present = n_rows - base, width = N > 1 || present > 4 ? 8 : present > 2 ? 4 : 2, side = 8 / width;
    u32 turn = 0;
    while (at < stop) {
        const Group now = group_at(m, R, at, stop, tiles);
        at += now.count;
        float o[R][N][4];
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[r][n][i] = 0.0f;
#pragma unroll 1
        for (int k = 0; k < length; k++) {
            ring.take(k);
            // Tiles side by side hide each other's latency.
#pragma unroll
            for (int n = 0; n < N; n++) {
                const Inputs in = ring.inputs(n);
                auto some = [&](int count) {
#pragma unroll
                    for (int r = 0; r < R; r++)
                        if (r < count) multiply(fetch<true>(ring.stage + r * TILE_BYTES, lane), in, o[r][n], magic);
                };
                if (now.count == R) some(R);
                else if (now.count == 3) some(3);
                else if (now.count == 2) some(2);
                else some(1);
            }
            ring.used();
        }
        const float *factor = m.factor[0];
        float *y = m.y[0];
        int rows = m.rows[0];
#pragma unroll
        for (int i = 1; i < 4; i++)
            if (now.which == i) { factor = m.factor[i]; y = m.y[i]; rows = m.rows[i]; }
        // Results of `side` tiles at a time: [tile, i, g, t] of each warp.
        const int t = lane & 3, quads = width / 2;
        const u32 before = turn;
#pragma unroll
        for (int c = 0; c < R * N; c++) {
            if (c / N >= now.count) break;
            const int beside = c & (side - 1), place = turn % SUMS;
            if (beside == 0) await((u32) __cvta_generic_to_shared(empty + place), turn / SUMS + 1);
            if (t < quads)
#pragma unroll
                for (int i = 0; i < 4; i++) meet[(place * SLICES + warp) * 128 + (beside * 4 + i) * 8 * quads + (lane >> 2) * quads + t] = o[c / N][c % N][i];
            if (beside != side - 1 && c + 1 != now.count * N) continue;
            turn++;
            arrive((u32) __cvta_generic_to_shared(full + place));
        }
        // Warps take turns to add slices: whoever came last would come later still.
#pragma unroll 1
        for (u32 of = before; of < turn; of++) {
            if (of % SLICES != (u32) warp) continue;
            const int place = of % SUMS, first = (of - before) * side, here = min(side, now.count * N - first) * 32 * quads;
            const float *sums = meet + place * SLICES * 128;
            await((u32) __cvta_generic_to_shared(full + place), of / SUMS);
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = sums[j * 32 + lane];
#pragma unroll
            for (int s = 1; s < SLICES; s++)
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] += sums[s * 128 + j * 32 + lane];
            arrive((u32) __cvta_generic_to_shared(empty + place));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = j * 32 + lane, column = at & (quads - 1), g = at / quads & 7, i = at / quads >> 3 & 3;
                const int row = (now.tile + first / N + at / quads / 32) * 16 + g + (i >> 1) * 8, to = base + first % N * 8 + column * 2 + (i & 1);
                if (at < here && row < rows && to < n_rows) y[(u64) to * rows + row] = factor ? v[j] * factor[row] : v[j];
            }
        }
    }
}
// By the rows that there are, at most.
#define FEED_KERNEL(N, MOST, ROWS) KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) feed_##ROWS(Matrices m, Half x, int n_rows, int tiles, int per, int total) { feed<N, MOST>(m, x, n_rows, tiles, per, total); }
FEED_KERNEL(1, 3, 3)
FEED_KERNEL(1, 8, 8)
FEED_KERNEL(2, 8, 16)
#endif

// Chosen rows of one matrix: block (i, r) takes ids 16 i .. of activation row r.
KERNEL __launch_bounds__(SLICES * 32, 1) product_rows(const u8 *w, const float *factor, float *y, Half x, const u32 *ids, int n_ids, int tiles, int per) {
    __shared__ float shared[SLICES * 128];
    in_order();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int first = blockIdx.x * 16, row = blockIdx.y;
    ids += (u64) row * n_ids;
    const u32 id[2] = {ids[min(first + g, n_ids - 1)], ids[min(first + g + 8, n_ids - 1)]};
    float o[1][1][4] = {{{0, 0, 0, 0}}};
    const u32 magic = offset();
    for (int k = warp * per; k < min(warp * per + per, tiles); k++) {
        Tile both;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The lane and the half that hold the chosen row in its own tile.
            const u8 *from = w + row_of_tiles(id[half] >> 4, tiles) + (u64) k * ALONG;
            const int in = id[half] & 15;
            Tile one = fetch(from, (in & 7) * 4 + (lane & 3));
            const bool upper = in >> 3;
#pragma unroll
            for (int j = 0; j < CODE_WORDS; j++) {
#if FORMAT == 5 || FORMAT == 3
                // The plane of single bits holds both rows in one word.
                if (j == CODE_WORDS - 1) {
                    u32 bits = (upper ? one.codes.w[j] >> 8 : one.codes.w[j]) & 0x00ff00ffu;
                    both.codes.w[j] = half ? both.codes.w[j] | bits << 8 : bits;
                    continue;
                }
#endif
#if FORMAT == 16
                constexpr int each = 8;
                const int part = j / each;
#elif FORMAT == 9 || FORMAT == 8
                constexpr int each = 4;
                const int part = j / each;
#elif FORMAT >= 4
                const int each = j < 4 ? 2 : 1, part = j < 4 ? j / 2 : j - 4;
#else
                const int each = 1, part = j;
#endif
                if (part == half) both.codes.w[j] = upper ? one.codes.w[j + (1 - part) * each] : one.codes.w[j - part * each];
            }
#ifdef CODES
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                both.s[group][half].scale = upper ? one.s[group][1].scale : one.s[group][0].scale;
                both.s[group][half].bias = upper ? one.s[group][1].bias : one.s[group][0].bias;
            }
#endif
        }
        const int self = g == 0 ? row : -1, first_result = (lane & 3) == 0 ? row : -1;
        multiply(both, inputs(x, k, lane, self, first_result, -1), o[0][0], magic);
    }
    write<1, 1>(o, shared, blockDim.x >> 5, nullptr, y, n_ids, 0, [&](int, int &) { return false; });
    // One column of results, rows by their ids.
    for (int at = threadIdx.x; at < 16; at += blockDim.x) {
        const int i = (at >> 3) * 2, l = (at & 7) * 4;
        float v = shared[i * 32 + l];
        for (int s = 1; s < (int) (blockDim.x >> 5); s++) v += shared[s * 128 + i * 32 + l];
        if (first + at < n_ids) {
            if (factor) v *= factor[ids[first + at]];
            y[(u64) row * n_ids + first + at] = v;
        }
    }
}

// Experts: block column `blockIdx.y` is the i-th expert that any row chose.
// `lists`: number of those, then for each its number, first pair and end; pairs
// follow in `pairs`, each row * top_k + rank. A pair reads activation row
// `by_pair ? pair : pair / top_k` and writes row `pair`.
#define ASIDE (FORMAT == 16 ? 1 : CODE_WORDS <= 4 && GROUPS == 1 ? 4 : 2) // pairs of tiles on their way
// N * 8 pairs at a time, for as many of which weights are read once.
template <int N>
__device__ __forceinline__ void experts(const u64 *table, const u64 *factors, float *y, const Half &x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per, float *shared) {
    constexpr int aside = N == 1 ? ASIDE : 1;
    const u32 *list = lists + 1 + 3 * blockIdx.y, used = lists[0], expert = list[0], first = list[1], stop = list[2];
    if (blockIdx.y >= used) return;
    const u8 *w = (const u8 *) table[expert];
    const float *factor = factors ? (const float *) factors[expert] : nullptr;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x * 2, begin = warp * per, end = min(begin + per, tiles);
    const u8 *run = w + row_of_tiles(tile, tiles);
    const u64 beside = tile + 1 < (rows + 15) / 16 ? BESIDE : 0;
    Tile ahead[aside][2];
    auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < aside; i++)
            if (k + i < end)
#pragma unroll
                for (int r = 0; r < 2; r++) ahead[i][r] = fetch(run + r * beside + (u64) (k + i) * ALONG, lane);
    };
    load(begin);
    const u32 magic = offset();
#pragma unroll 1
    for (u32 base = first; base < stop; base += N * 8) {
        auto row = [&](u32 i) { return base + i < stop ? (int) (by_pair ? pairs[base + i] : pairs[base + i] / top_k) : -1; };
        int own[N], r0[N], r1[N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            own[n] = row(n * 8 + g);
            r0[n] = row(n * 8 + 2 * t);
            r1[n] = row(n * 8 + 2 * t + 1);
        }
        float o[2][N][4] = {};
#pragma unroll 1
        for (int k = begin; k < end; k += aside) {
            if (k > begin || base > first) load(k);
#pragma unroll
            for (int i = 0; i < aside; i++) {
                if (k + i >= end) break;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const Inputs in = inputs(x, k + i, lane, own[n], r0[n], r1[n]);
#pragma unroll
                    for (int r = 0; r < 2; r++) multiply(ahead[i][r], in, o[r][n], magic);
                }
            }
        }
        write<2, N>(o, shared, blockDim.x >> 5, factor, y, rows, tile, [&](int i, int &to) {
            if (base + i >= stop) return false;
            to = (int) pairs[base + i];
            return true;
        });
        __syncthreads();
    }
}
KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) product_experts(const u64 *table, const u64 *factors, float *y, Half x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per) {
    __shared__ float shared[SLICES * 2 * 128];
    wait_for_previous();
    start_next(); // not before: product_gated looks at the lists at once
    experts<1>(table, factors, y, x, lists, pairs, top_k, by_pair, rows, tiles, per, shared);
}
// Many pairs.
#define MANY 2
KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) product_experts_many(const u64 *table, const u64 *factors, float *y, Half x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per) {
    __shared__ float shared[SLICES * 2 * MANY * 128];
    in_order();
    experts<MANY>(table, factors, y, x, lists, pairs, top_k, by_pair, rows, tiles, per, shared);
}

// The second product of experts, of few pairs: what it multiplies is activation(gate) up of
// the first one's results `both`, [pair, 2 columns], which a block makes for itself, as
// products read it. Beside them the product of an expert that all rows share, if there is
// one: it has the last block column. A warp has a row of tiles, slice after slice. The kernel
// before is the first product, which has waited for the lists before it lets this one start;
// so weights are asked for meanwhile.
struct Everyone {
    const u8 *w; // null: there is none
    const float *factor;
    float *y;
    Half x;
    int n_rows;
};
#define GATED_WARPS 8 // as in src/moe.rs
#define AHEAD (FORMAT == 16 ? 2 : CODE_WORDS <= 4 && GROUPS == 1 ? 8 : CODE_WORDS <= 8 && GROUPS == 1 ? 4 : 3) // tiles on their way
KERNEL __launch_bounds__(GATED_WARPS * 32, 2) product_gated(const u64 *table, const u64 *factors, float *y, const float *both, const u32 *lists, const u32 *pairs, int f, int rows, int cols, int tiles, int per, Everyone all) {
    extern __shared__ __align__(128) u8 staged[]; // 8 rows of tiles
    start_next();
    const bool everyone = all.w && blockIdx.y + 1 == gridDim.y;
    u32 expert = 0, first = 0, stop = all.n_rows;
    if (!everyone) {
        const u32 *list = lists + 1 + 3 * blockIdx.y, used = __ldcg(lists);
        expert = __ldcg(list);
        first = __ldcg(list + 1);
        stop = __ldcg(list + 2);
        if (blockIdx.y >= used) return;
    }
    const u8 *w = everyone ? all.w : (const u8 *) table[expert];
    const float *factor = everyone ? all.factor : factors ? (const float *) factors[expert] : nullptr;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int last = (rows + 15) / 16 - 1, tile = blockIdx.x * GATED_WARPS + warp;
    const u8 *run = w + row_of_tiles(min(tile, last), tiles);
    Tile ahead[AHEAD];
    auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (k + i < tiles) ahead[i] = fetch(run + (u64) (k + i) * ALONG, lane);
    };
    load(0);
    wait_for_previous();
    const Half made = {(u16 *) staged, (float4 *) (staged + 8 * 128 * tiles), tiles * 64};
    const Half x = everyone ? all.x : made;
    const u32 magic = offset();
#pragma unroll 1
    for (u32 base = first; base < stop; base += 8) {
        const int here = min(stop - base, 8);
        if (!everyone) {
            if (base > first) __syncthreads(); // what was made before is used
#pragma unroll 1
            for (int unit = warp; unit < here * tiles; unit += GATED_WARPS) {
                const int i = unit / tiles, k = unit % tiles, c = k * 64 + 2 * lane;
                const float *gate = both + (u64) pairs[base + i] * 2 * cols, *up = gate + cols;
                float v[2];
#pragma unroll
                for (int j = 0; j < 2; j++) v[j] = c + j < cols ? activate(f, gate[c + j]) * up[c + j] : 0.0f;
                put_half(made, i, k, v[0], v[1]);
            }
            __syncthreads();
        }
        const int from = everyone ? (int) base : 0;
        auto row = [&](int i) { return i < here ? from + i : -1; };
        const int mine = row(g), r0 = row(2 * t), r1 = row(2 * t + 1);
        float o[4] = {0, 0, 0, 0}, total[4] = {0, 0, 0, 0};
        int left = per;
#pragma unroll 1
        for (int k = 0; k < tiles; k += AHEAD) {
            if (k > 0 || base > first) load(k);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (k + i >= tiles) break;
                multiply(ahead[i], inputs(x, k + i, lane, mine, r0, r1), o, magic);
                if (--left > 0 && k + i + 1 < tiles) continue;
                const bool whole = k + i < per; // the first slice
                left = per;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    total[j] = whole ? o[j] : total[j] + o[j];
                    o[j] = 0.0f;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = tile * 16 + g + (i >> 1) * 8, of = 2 * t + (i & 1);
            if (at >= rows || of >= here) continue;
            const float v = factor ? total[i] * factor[at] : total[i];
            if (everyone) all.y[(u64) (base + of) * rows + at] = v;
            else y[(u64) pairs[base + of] * rows + at] = v;
        }
    }
}

// Rows of a table: y = value(token, column) * factor. `tokens` null: the batch's.
__device__ __forceinline__ float value(const u8 *w, const float *factor, u32 row, int col, int tiles) {
    const u8 *tile = w + row_of_tiles(row >> 4, tiles) + (u64) (col / 64) * ALONG;
    const int half = row >> 3 & 1, c = col & 63, h = c >> 5, t = c >> 3 & 3, lane = (row & 7) * 4 + t, at = c & 7;
    [[maybe_unused]] const int i = at >> 1, odd = at & 1; // pair and its end
#if FORMAT == 16
    float v = f16_to_f32(*(const u16 *) (tile + ((half * 2 + h) * 32 + lane) * 16 + at * 2));
    return factor ? v * factor[row] : v;
#elif FORMAT == 9
    u32 b = tile[(half * 32 + lane) * 16 + h * 8 + at];
    Scales both[2];
    scales(tile, c / GROUP, row & 7, both);
    return both[half].scale * f16_to_f32((u16) ((b & 0x80) << 8 | (b & 0x7f) << 7));
#else
    u32 code;
#if FORMAT == 8
    code = tile[(half * 32 + lane) * 16 + h * 8 + at];
#else
    const u32 *words = (const u32 *) tile;
#if FORMAT >= 4
    code = words[lane * 4 + half * 2 + h] >> (4 * i + 16 * odd) & 15;
#if FORMAT == 5
    code |= (words[128 + lane] >> (half * 8 + h * 4 + i + 16 * odd) & 1) << 4;
#elif FORMAT == 6
    code |= (words[128 + lane * 2 + half] >> (2 * (h * 4 + i) + 16 * odd) & 3) << 4;
#endif
#else
    code = words[lane * 2 + half] >> (2 * (h * 4 + i) + 16 * odd) & 3;
#if FORMAT == 3
    code |= (words[64 + lane] >> (half * 8 + h * 4 + i + 16 * odd) & 1) << 2;
#endif
#endif
#endif
    Scales both[2];
    scales(tile, c / GROUP, row & 7, both);
    return fmaf(both[half].scale, (float) code, both[half].bias);
#endif
}
KERNEL embed(const u8 *w, const float *factor, const u32 *tokens, Batch batch, float *y, int cols, int tiles, float scale, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / cols);
    y[i] = value(w, factor, tokens ? tokens[row] : batch.token(row), (int) (i % cols), tiles) * scale;
}

// Random weights of about `gain` in size, for measurements: a thread a word.
KERNEL random_tiles(u32 *w, float gain, u64 words) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= words) return;
    u32 x = (u32) i * 0x9e3779b9u ^ (u32) (i >> 32);
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
#if FORMAT == 16
    // Two f16 of either sign with an exponent like the gain's.
    u32 one = f32_to_f16(gain) & 0x7c00u;
    x = (x & 0x83ff83ffu) | one | one << 16;
#elif FORMAT == 9
    // Any of less than 2 in size, and scales.
    x = (int) (i % (TILE_BYTES / 4)) < CODE_WORDS * 32 ? x & 0xbfbfbfbfu : __float_as_uint(512.0f * gain);
#elif defined(CODES)
    int at = (int) (i % (TILE_BYTES / 4)) - CODE_WORDS * 32;
    if (at >= 0) {
        const float scale = gain / (float) (1 << (FORMAT - 1)), bias = scale * -0.5f * (float) ((1 << FORMAT) - 1);
#if SCALE == 32
        x = __float_as_uint(at & 1 ? bias : scale);
#elif SCALE_BF16
        x = f32_to_bf16(scale) | (u32) f32_to_bf16(bias) << 16;
#else
        x = f32_to_f16(scale) | (u32) f32_to_f16(bias) << 16;
#endif
    }
#endif
    w[i] = x;
}
