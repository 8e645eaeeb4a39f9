// Products with a few rows. tile.cuh goes before this.

// Adds the slices of R * N accumulators and writes the results. `out` gives the
// row of y for an activation row, negative for nobody.
template <int R, int N, class Out>
__device__ __forceinline__ void write(float (&o)[R][N][4], float *shared, int slices, const float *factors, float *y, int rows, int tile, Out out) {
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
            y[(u64) to * rows + row] = v * factors[row >> 4];
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

// Has L2 bring the factor of a row tile, or its first use waits for memory.
__device__ __forceinline__ void ask_factor(const float *factor) { asm volatile("prefetch.global.L2 [%0];" :: "l"(factor)); }

// One block: R tiles of 16 rows by N * 8 activation rows; a warp a slice.
template <int R, int N>
__device__ __forceinline__ void product(const Matrices &m, const Half &x, int n_rows, int tiles, int per, float *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; i++) which += (int) blockIdx.x >= m.first[i];
    const u8 *w = m.w[0];
    float *y = m.y[0];
    int rows = m.rows[0], first = m.first[0];
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (which == i) { w = m.w[i]; y = m.y[i]; rows = m.rows[i]; first = m.first[i]; }
    const int tile = ((int) blockIdx.x - first) * R, base = blockIdx.y * N * 8;
    ask_factor(factors_of(w, rows, tiles) + tile);
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
    Row x_rows[N];
#pragma unroll
    for (int n = 0; n < N; n++) x_rows[n] = Row(x, base + n * 8 + g < n_rows ? base + n * 8 + g : -1, begin, end);
#pragma unroll UNROLL
    for (int k = begin; k < end; k++) {
        Tile tile[R];
#pragma unroll
        for (int r = 0; r < R; r++) tile[r] = fetch(run + (r < last ? r : 0) * BESIDE + (u64) (k - begin) * ALONG, lane);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const Inputs in = x_rows[n].inputs(k);
#pragma unroll
            for (int r = 0; r < R; r++) multiply(tile[r], in, o[r][n]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) settle(o, n, x_rows[n].unit);
    write<R, N>(o, shared, blockDim.x >> 5, factors_of(w, rows, tiles), y, rows, tile, [&](int i, int &to) {
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
#define RING 12384 // bytes of a warp's weights and activations on their way, and of ratios
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
// Experts of a step, and row tiles of each.
struct ChosenExperts {
    const Chosen *list;
    int row_tiles;
};
__device__ __forceinline__ Group group_at(const ChosenExperts &m, int most, int at, int stop, int tiles) {
    const int which = at / m.row_tiles, tile = at - which * m.row_tiles;
    return {m.list[which].w + row_of_tiles(tile, tiles), which, tile, min(most, min(m.row_tiles - tile, stop - at))};
}
// What a warp asks for next: tiles `next_k` of a group of rows, from the block's run.
template <class Source> struct Cursor {
    const Source &m;
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
#if !ENGINE
__device__ __forceinline__ void copy16(u32 to, const u8 *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
// Without a branch.
__device__ __forceinline__ void copy16_if(bool yes, u32 to, const u8 *from) {
    asm volatile("{.reg .pred yes; setp.ne.u32 yes, %2, 0; @yes cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" :: "r"(to), "l"(from), "r"((u32) yes) : "memory");
}
// How a warp brings MOST rows of activations, at most, to shared memory, a tile at a time:
// 16 bytes a lane, four rows at once; the halves of odd rows change places, or lanes would
// meet in a bank. `ratios`, [SLICE_TILES, MOST], take values to the slices' units.
template <int MOST> struct Way {
    static constexpr int BYTES = MOST * 128, RATIOS = SLICE_TILES * MOST * 4;
    const u8 *mine; // what the lane copies of the next tile
    const float *factors; // of the lane's row
    u32 *ratios;
    u32 four_rows;
    u32 to, read;
    int rows, lane;
    float unit;
    __device__ __forceinline__ Way(const Half &x, int lane, int base, int n_rows, int begin) : lane(lane) {
        rows = max(1, min(MOST, n_rows - base));
        four_rows = 8 * x.kp;
        auto row = [&](int i) { return (u64) min(base + i, n_rows - 1); };
        mine = (const u8 *) (x.values + row(lane >> 3) * x.kp + begin * 64) + (lane & 7) * 16;
        factors = x.factors + row(lane >> 2) * (x.kp / 64) + begin;
        to = (lane >> 3) * 128 + ((lane & 7) * 16 ^ (lane >> 3 & 1) * 64);
        const int g = min(lane >> 2, rows - 1);
        read = g * 128 + ((lane & 3) * 16 ^ (g & 1) * 64);
        // Or they would be worked out again for every tile.
        asm volatile("" : "+r"(to), "+r"(read));
    }
    // Calls f(i, whether the lane copies it, to, from) for the i-th of the next tile.
    template <class F> __device__ __forceinline__ void each(F f) const {
        f(0, lane >> 3 < rows, to, mine);
        if (MOST > 4) f(1, (lane >> 3) + 4 < rows, to + 512, mine + four_rows);
    }
    // Goes on by so many tiles.
    __device__ __forceinline__ void go(int tiles) { mine += tiles * 128; }
    // Finds the unit of a slice, and its ratios; `space` is for those.
    __device__ __forceinline__ void fill(int length, u8 *space) {
        ratios = (u32 *) space + min(lane >> 2, rows - 1);
        unit = put_ratios(factors, length, ratios, MOST);
    }
    // Of tile `k`, which lies at `at`.
    __device__ __forceinline__ Inputs inputs(const u8 *at, int k) const {
        Inputs v;
        v.set(*(const uint4 *) (at + read), *(const uint4 *) (at + (read ^ 64)), ratios[k * MOST]);
        return v;
    }
};
// Activations that are in shared memory before: no stage has any.
struct NoWay {
    static constexpr int BYTES = 0;
    template <class F> __device__ __forceinline__ void each(F) const {}
    __device__ __forceinline__ void go(int) {}
    __device__ __forceinline__ void fill(int, u8 *) {}
    static constexpr int RATIOS = 0;
};
// Lanes copy codes, and beside them what their stage needs of the activations, or every
// tile would wait for a round trip. All that a stage needs of addresses is known before it.
// `SPACE`: bytes that it may take.
template <class Source, int N, class Way, int SPACE> struct Ring {
    static constexpr int R = ROWS(N), WEIGHTS = R * TILE_BYTES;
    static constexpr int STAGE = (WEIGHTS + N * Way::BYTES + 31) & ~31; // or copies would straddle
    static constexpr int MOST = (SPACE - N * Way::RATIOS) / STAGE, DEPTH = MOST < DEEPEST ? MOST : DEEPEST, END = DEPTH * STAGE;
    static_assert(DEPTH > 1, "a stage ahead");
    // A row of a stage is copied by whole warps, and then its rest by some lanes: by
    // each of another row, if there are enough of them.
    static constexpr int REST = TILE_BYTES % 512 / 16, WHOLE = TILE_BYTES / 512 * 512;
    static constexpr bool TOGETHER = REST > 0 && REST * R <= 32;
    Cursor<Source> next;
    Way way[2];
    u8 *ring;
    u32 to, beside, rest_to;
    int lane, rest_row, slot = 0;
    u64 rest_from;
    const u8 *stage;
    __device__ __forceinline__ Ring(const Cursor<Source> &cursor, const Way &low, const Way &high, u8 *ring, int lane)
        : next(cursor), way{low, high}, ring(ring), to(shared_at(ring)), lane(lane) {
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
                if (with_inputs) way[n].each([&](int, bool yes, u32 to, const u8 *from) { copy16_if(yes, inputs + n * Way::BYTES + to, from); });
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
        uint4 v[DEPTH - 1][2];
#pragma unroll
        for (int n = 0; n < N; n++) {
            Way way = this->way[n];
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
            this->way[n].fill(next.length, ring + END + n * Way::RATIOS);
#pragma unroll
            for (int i = 0; i < DEPTH - 1; i++)
                way.each([&](int j, bool yes, u32 to, const u8 *) {
                    if (yes) *(uint4 *) (ring + i * STAGE + WEIGHTS + n * Way::BYTES + to) = v[i][j];
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
    __device__ __forceinline__ Inputs inputs(int n, int k) { return way[n].inputs(stage + WEIGHTS + n * Way::BYTES, k); }
    __device__ __forceinline__ float unit(int n) const { return way[n].unit; }
    __device__ __forceinline__ void used() {}
};
#else
// Where a lane finds its row of activations in a warp's slice.
template <int> struct Way {
    const u16 *values;
    const float *factors;
    float unit, unit_inverse;
    // What a tile has, as it is.
    struct Ahead {
        uint4 a, b;
        float factor;
    };
    __device__ __forceinline__ Way(const Half &x, int lane, int base, int n_rows, int begin) {
        const u64 row = min(base + (lane >> 2), n_rows - 1);
        values = x.values + row * x.kp + begin * 64 + (lane & 3) * 8;
        factors = x.factors + row * (x.kp / 64) + begin;
    }
    __device__ __forceinline__ void fill(int length) {
        unit = unit_of(0, length, [&](int k) { return factors[k]; });
        unit_inverse = inverse(unit);
    }
    __device__ __forceinline__ Ahead at(int k) const { return {*(const uint4 *) (values + k * 64), *(const uint4 *) (values + k * 64 + 32), factors[k]}; }
    __device__ __forceinline__ Inputs inputs(const Ahead &at) const {
        Inputs v;
        v.set(at.a, at.b, ratio(at.factor, unit_inverse));
        return v;
    }
};
// The copy engine brings weights, and a barrier a stage says when. Lanes read
// activations from L2, a stage ahead.
template <class Source, int N, class Way, int> struct Ring {
    Cursor<Source> next;
    Way way[2];
    u8 *ring;
    u32 to, there;
    int lane, stage_bytes, depth, slot = 0;
    u32 round = 0;
    const u8 *stage;
    typename Way::Ahead ahead;
    Inputs in[N];
    __device__ __forceinline__ Ring(const Cursor<Source> &cursor, const Way &low, const Way &high, u8 *ring, int lane)
        : next(cursor), way{low, high}, ring(ring), to(shared_at(ring)), lane(lane) {
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
    __device__ __forceinline__ void fill() {
        ahead = way[0].at(0);
#pragma unroll
        for (int n = 0; n < N; n++) way[n].fill(next.length);
    }
    // Waits for the next stage, of tile `k` of the slice.
    __device__ __forceinline__ void take(int k) {
        in[0] = way[0].inputs(N == 1 ? ahead : way[0].at(k));
        if (N == 1) ahead = way[0].at(k + 1 == next.length ? 0 : k + 1);
        else in[N - 1] = way[1].inputs(way[1].at(k));
        await(there + 8 * slot, round);
        stage = ring + slot * stage_bytes;
    }
    __device__ __forceinline__ const Inputs &inputs(int n, int) const { return in[n]; }
    __device__ __forceinline__ float unit(int n) const { return way[n].unit; }
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
// Slices of a block's results on their way to each other.
struct Meeting {
    float *sums; // [SUMS, SLICES, 128]
    u64 *full, *empty;
};
__device__ __forceinline__ void open(const Meeting &meet) {
    if (threadIdx.x < SUMS) {
        arrivals(shared_at(meet.full + threadIdx.x), SLICES * 32);
        arrivals(shared_at(meet.empty + threadIdx.x), 32);
    }
}
// Multiplies the block's run, from number `at` of all row tiles to `stop`, as the ring brings
// it. `enter` hears of each group of rows and says how many columns its results have, and where
// the factors of its row tiles are;
// `inputs` gives activations of a tile, `unit` what results of the lane's row are in;
// `results` gives what takes a result.
template <int N, class Source, class Ring, class Enter, class In, class Unit, class Results>
__device__ __forceinline__ void walk(const Source &source, Ring &ring, const Meeting &meet, int at, int stop, int tiles, int length, Enter enter, In inputs, Unit unit, Results results) {
    constexpr int R = ROWS(N);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 turn = 0;
    while (at < stop) {
        const Group now = group_at(source, R, at, stop, tiles);
        at += now.count;
        // Columns of results that are looked at, and tiles whose results fit side by side.
        const float *factors;
        const int present = enter(now, factors), width = N > 1 || present > 4 ? 8 : present > 2 ? 4 : 2, side = 8 / width;
        const float factor = factors[min(lane, now.count - 1)]; // of a row tile a lane
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
                const Inputs in = inputs(n, k);
                auto some = [&](int count) {
#pragma unroll
                    for (int r = 0; r < R; r++)
                        if (r < count) multiply(fetch<true>(ring.stage + r * TILE_BYTES, lane), in, o[r][n]);
                };
                if (now.count == R) some(R);
                else if (now.count == 3) some(3);
                else if (now.count == 2) some(2);
                else some(1);
            }
            ring.used();
        }
#pragma unroll
        for (int n = 0; n < N; n++) settle(o, n, unit(n));
        const auto put = results(now);
        // Results of `side` tiles at a time: [tile, i, g, t] of each warp.
        const int t = lane & 3, quads = width / 2;
        const u32 before = turn;
#pragma unroll
        for (int c = 0; c < R * N; c++) {
            if (c / N >= now.count) break;
            const int beside = c & (side - 1), place = turn % SUMS;
            if (beside == 0) await(shared_at(meet.empty + place), turn / SUMS + 1);
            if (t < quads)
#pragma unroll
                for (int i = 0; i < 4; i++) meet.sums[(place * SLICES + warp) * 128 + (beside * 4 + i) * 8 * quads + (lane >> 2) * quads + t] = o[c / N][c % N][i];
            if (beside != side - 1 && c + 1 != now.count * N) continue;
            turn++;
            arrive(shared_at(meet.full + place));
        }
        // Warps take turns to add slices: whoever came last would come later still.
#pragma unroll 1
        for (u32 of = before; of < turn; of++) {
            if (of % SLICES != (u32) warp) continue;
            const int place = of % SUMS, first = (of - before) * side, here = min(side, now.count * N - first) * 32 * quads;
            const float *sums = meet.sums + place * SLICES * 128;
            await(shared_at(meet.full + place), of / SUMS);
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = sums[j * 32 + lane];
#pragma unroll
            for (int s = 1; s < SLICES; s++)
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] += sums[s * 128 + j * 32 + lane];
            arrive(shared_at(meet.empty + place));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int at = j * 32 + lane, column = at & (quads - 1), g = at / quads & 7, i = at / quads >> 3 & 3, tile = first / N + at / quads / 32;
                const float sum = v[j] * __shfl_sync(~0u, factor, tile);
                if (at < here) put((now.tile + tile) * 16 + g + (i >> 1) * 8, first % N * 8 + column * 2 + (i & 1), sum);
            }
        }
    }
}
template <int N, int MOST>
__device__ __forceinline__ void feed(const Matrices &m, const Half &x, int n_rows, int tiles, int per, int total) {
    extern __shared__ __align__(128) u8 staged[];
    constexpr int R = ROWS(N);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int base = blockIdx.y * N * 8, begin = warp * per, length = min(per, tiles - begin);
    __shared__ u64 full[SUMS], empty[SUMS];
    const Meeting meet = {(float *) (staged + SLICES * RING), full, empty};
    open(meet);
    const int at = (int) ((u64) total * blockIdx.x / gridDim.x);
    const int stop = (int) ((u64) total * (blockIdx.x + 1) / gridDim.x);
    Ring<Matrices, N, Way<MOST>, RING> ring({m, R, at, stop, tiles, begin, length}, {x, lane, base, n_rows, begin}, {x, lane, base + 8 * (N - 1), n_rows, begin}, staged + warp * RING, lane);
    start_next();
    ring.start();
    auto factors_at = [&](const Group &at) {
        const u8 *w = m.w[0];
        int rows = m.rows[0];
#pragma unroll
        for (int i = 1; i < 4; i++)
            if (at.which == i) { w = m.w[i]; rows = m.rows[i]; }
        return factors_of(w, rows, tiles) + at.tile;
    };
    // 8 lie in what L2 brings at a time.
    if (warp == 1 && at + lane * 8 < stop) ask_factor(factors_at(group_at(m, R, at + lane * 8, stop, tiles)));
    __syncthreads(); // the barriers are there
    wait_for_previous();
    ring.fill();
    walk<N>(m, ring, meet, at, stop, tiles, length, [&](const Group &now, const float *&factors) {
        factors = factors_at(now);
        return n_rows - base;
    }, [&](int n, int k) { return ring.inputs(n, k); }, [&](int n) { return ring.unit(n); }, [&](const Group &now) {
        float *y = m.y[0];
        int rows = m.rows[0];
#pragma unroll
        for (int i = 1; i < 4; i++)
            if (now.which == i) { y = m.y[i]; rows = m.rows[i]; }
        return [=](int row, int column, float v) {
            const int to = base + column;
            if (row < rows && to < n_rows) y[(u64) to * rows + row] = v;
        };
    });
}
// By the rows that there are, at most.
#define FEED_KERNEL(N, MOST, ROWS) KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) feed_##ROWS(Matrices m, Half x, int n_rows, int tiles, int per, int total) { feed<N, MOST>(m, x, n_rows, tiles, per, total); }
FEED_KERNEL(1, 3, 3)
FEED_KERNEL(1, 8, 8)
FEED_KERNEL(2, 8, 16)

#if !ENGINE
// Experts of up to 8 rows: at most 8 pairs each, for no row chooses one twice. `pairs` as
// below. The runs of blocks go through all row tiles of all experts in use.
#define EXPERTS_SPACE 12160 // bytes of a warp's activations and weights, as in src/moe.rs
// Copies a step's list of experts and its pairs, of which there are `most`, at most; returns how
// many experts there are. `f` is called while they are on their way. A warp or two of a block
// ask for them: all blocks do, and memory answers them one by one.
template <class F>
__device__ __forceinline__ int chosen_experts(Chosen *list, int *pair, const Chosen *from, const Chosen *header, const u32 *pairs, int most, F f) {
    __shared__ int used;
    const int i = threadIdx.x;
    uint4 own;
    int of = 0;
    if (i < most) {
        own = __ldcg((const uint4 *) (from + i));
        of = (int) __ldcg(pairs + i);
    }
    if (i == 0) used = __ldcg(&header->count);
    f();
    if (i < most) {
        *(uint4 *) (list + i) = own;
        pair[i] = of;
    }
#pragma unroll 1
    for (int j = i + blockDim.x; j < most; j += blockDim.x) {
        *(uint4 *) (list + j) = __ldcg((const uint4 *) (from + j));
        pair[j] = (int) __ldcg(pairs + j);
    }
    __syncthreads();
    return used;
}
// The first product, y[pair] = expert x[pair / top_k], like `feed`. A warp's slice of all
// rows of x is in shared memory, [tile, row], and DEPTH stages of weights behind it.
#define RECORD 144 // bytes of a tile of a row, its ratio, and in the first tile of a slice the unit
template <int DEPTH>
__device__ __forceinline__ void feed_experts(const Chosen *experts, float *y, const Half &x, const u32 *pairs, int n_rows, int top_k, int rows, int tiles, int per) {
    extern __shared__ __align__(128) u8 staged[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int begin = warp * per, length = min(per, tiles - begin), most = n_rows * top_k;
    __shared__ u64 full[SUMS], empty[SUMS];
    const Meeting meet = {(float *) (staged + SLICES * EXPERTS_SPACE), full, empty};
    Chosen *list = (Chosen *) (meet.sums + SLICES * SUMS * 128);
    int *pair = (int *) (list + most), *row_of = pair + most;
    open(meet);
    wait_for_previous();
    start_next(); // not before: the second product looks at the lists at once
    u8 *slice = staged + warp * EXPERTS_SPACE;
    const ChosenExperts chosen = {list, (rows + 15) / 16};
    const int used = chosen_experts(list, pair, experts + 1, experts, pairs, most, [&]() {
        // All rows of what a lane has of each.
        auto copy = [&](u32 to, const u8 *from, u64 step) {
#pragma unroll 4
            for (int r = 0; r < n_rows; r++, to += RECORD, from += step) copy16(to, from);
        };
        const u32 to = shared_at(slice);
        for (int c = lane; c < length * 8; c += 32) copy(to + (c >> 3) * n_rows * RECORD + (c & 7) * 16, (const u8 *) (x.values + begin * 64) + c * 16, 2 * (u64) x.kp);
        asm volatile("cp.async.commit_group;" ::: "memory");
        // A quad a row.
#pragma unroll 1
        for (int r = g; r < (n_rows + 7 & ~7); r += 8) {
            const float *factors = x.factors + (u64) min(r, n_rows - 1) * (x.kp / 64) + begin;
            u8 *record = slice + min(r, n_rows - 1) * RECORD;
            *(float *) (record + 132) = put_ratios(factors, length, (u32 *) (record + 128), n_rows * (RECORD / 4));
        }
    }), total = used * chosen.row_tiles;
    for (int i = threadIdx.x; i < most; i += blockDim.x) row_of[i] = pair[i] / top_k;
    __syncthreads();
    const int at = (int) ((u64) total * blockIdx.x / gridDim.x);
    const int stop = (int) ((u64) total * (blockIdx.x + 1) / gridDim.x);
    u8 *weights = slice + (n_rows * per * RECORD + 127 & ~127);
    Ring<ChosenExperts, 1, NoWay, DEPTH * ((ROWS(1) * TILE_BYTES + 31) & ~31)> ring({chosen, ROWS(1), at, stop, tiles, begin, length}, {}, {}, weights, lane);
    ring.start();
    if (warp == 1)
        for (int i = at + lane * 8; i < stop; i += 256) ask_factor(factors_of(list[i / chosen.row_tiles].w, rows, tiles) + i % chosen.row_tiles);
    u32 record;
    walk<1>(chosen, ring, meet, at, stop, tiles, length, [&](const Group &now, const float *&factors) {
        const Chosen &c = list[now.which];
        record = (u32) row_of[c.first + min(g, c.count - 1)] * RECORD;
        factors = factors_of(c.w, rows, tiles) + now.tile;
        return c.count;
    }, [&](int, int k) {
        const u8 *at = slice + k * n_rows * RECORD + record;
        Inputs v;
        v.set(*(const uint4 *) (at + t * 16), *(const uint4 *) (at + t * 16 + 64), *(const u32 *) (at + 128));
        return v;
    }, [&](int) { return *(const float *) (slice + record + 132); }, [&](const Group &now) {
        const Chosen &c = list[now.which];
        return [=](int row, int column, float v) {
            if (row < rows && column < c.count) y[(u64) pair[c.first + column] * rows + row] = v;
        };
    });
}
#define FEED_EXPERTS(DEPTH) KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) feed_experts_##DEPTH(const Chosen *experts, float *y, Half x, const u32 *pairs, int n_rows, int top_k, int rows, int tiles, int per) { \
    feed_experts<DEPTH>(experts, y, x, pairs, n_rows, top_k, rows, tiles, per); }
FEED_EXPERTS(2)
FEED_EXPERTS(4)
FEED_EXPERTS(5)
#endif
#endif

// Chosen rows of one matrix: block (i, r) takes ids 16 i .. of activation row r.
KERNEL __launch_bounds__(SLICES * 32, 1) product_rows(const u8 *w, float *y, Half x, const u32 *ids, int n_ids, int rows, int tiles, int per) {
    __shared__ float shared[SLICES * 128];
    in_order();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int first = blockIdx.x * 16, row = blockIdx.y;
    ids += (u64) row * n_ids;
    const u32 id[2] = {ids[min(first + g, n_ids - 1)], ids[min(first + g + 8, n_ids - 1)]};
    float o[1][1][4] = {{{0, 0, 0, 0}}};
    const int begin = warp * per, end = min(begin + per, tiles);
    const Row own(x, g == 0 ? row : -1, begin, end);
    for (int k = begin; k < end; k++) {
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
#if FORMAT != 16
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
#if FORMAT == 9
                const u32 scale = upper ? one.scales[group][0] >> 16 : one.scales[group][0] & 0xffffu;
                both.scales[group][0] = half ? both.scales[group][0] | scale << 16 : scale;
#else
                both.scales[group][half] = upper ? one.scales[group][1] : one.scales[group][0];
#endif
            }
#endif
        }
        multiply(both, own.inputs(k), o[0][0]);
    }
    settle(o, 0, own.unit);
    const float *factors = factors_of(w, rows, tiles);
    write<1, 1>(o, shared, blockDim.x >> 5, nullptr, y, n_ids, 0, [&](int, int &) { return false; });
    // One column of results, rows by their ids.
    for (int at = threadIdx.x; at < 16; at += blockDim.x) {
        const int i = (at >> 3) * 2, l = (at & 7) * 4;
        float v = shared[i * 32 + l];
        for (int s = 1; s < (int) (blockDim.x >> 5); s++) v += shared[s * 128 + i * 32 + l];
        if (first + at < n_ids) {
            y[(u64) row * n_ids + first + at] = v * factors[ids[first + at] >> 4];
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
__device__ __forceinline__ void experts(const u64 *table, float *y, const Half &x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per, float *shared) {
    constexpr int aside = N == 1 ? ASIDE : 1;
    const u32 *list = lists + 1 + 3 * blockIdx.y, used = lists[0], expert = list[0], first = list[1], stop = list[2];
    if (blockIdx.y >= used) return;
    const u8 *w = (const u8 *) table[expert];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
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
    ask_factor(factors_of(w, rows, tiles) + tile);
#pragma unroll 1
    for (u32 base = first; base < stop; base += N * 8) {
        auto row = [&](u32 i) { return base + i < stop ? (int) (by_pair ? pairs[base + i] : pairs[base + i] / top_k) : -1; };
        Row own[N];
#pragma unroll
        for (int n = 0; n < N; n++) own[n] = Row(x, row(n * 8 + g), begin, end);
        float o[2][N][4] = {};
#pragma unroll 1
        for (int k = begin; k < end; k += aside) {
            if (k > begin || base > first) load(k);
#pragma unroll
            for (int i = 0; i < aside; i++) {
                if (k + i >= end) break;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const Inputs in = own[n].inputs(k + i);
#pragma unroll
                    for (int r = 0; r < 2; r++) multiply(ahead[i][r], in, o[r][n]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) settle(o, n, own[n].unit);
        write<2, N>(o, shared, blockDim.x >> 5, factors_of(w, rows, tiles), y, rows, tile, [&](int i, int &to) {
            if (base + i >= stop) return false;
            to = (int) pairs[base + i];
            return true;
        });
        __syncthreads();
    }
}
KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) product_experts(const u64 *table, float *y, Half x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per) {
    __shared__ float shared[SLICES * 2 * 128];
    wait_for_previous();
    start_next(); // not before: product_gated looks at the lists at once
    experts<1>(table, y, x, lists, pairs, top_k, by_pair, rows, tiles, per, shared);
}
// Many pairs.
#define MANY 2
KERNEL __launch_bounds__(SLICES * 32, SLICES > 8 ? 1 : 2) product_experts_many(const u64 *table, float *y, Half x, const u32 *lists, const u32 *pairs, int top_k, int by_pair, int rows, int tiles, int per) {
    __shared__ float shared[SLICES * 2 * MANY * 128];
    in_order();
    experts<MANY>(table, y, x, lists, pairs, top_k, by_pair, rows, tiles, per, shared);
}

// Results of a row of tiles that one warp walks, slice after slice.
struct Slices {
    float o[4] = {0, 0, 0, 0}, total[4] = {0, 0, 0, 0}; // of this slice, and of those before
    int per, left;
    __device__ __forceinline__ Slices(int per) : per(per), left(per) {}
    // Tile `k` of `tiles` has been multiplied; `unit` is that of its slice, for the lane's
    // results 0 and 1.
    template <class F> __device__ __forceinline__ void step(int k, int tiles, F unit) {
        if (--left > 0 && k + 1 < tiles) return;
        const bool whole = k < per; // the first slice
        left = per;
        const float units[2] = {unit(0), unit(1)};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float v = o[j] * units[j & 1];
            total[j] = whole ? v : total[j] + v;
            o[j] = 0.0f;
        }
    }
};
// Takes tile `k` of a row, which lies at `values`, to the unit of its slice, by a warp.
template <class F> __device__ __forceinline__ float unify(u32 *values, int k, int per, int tiles, F factor) {
    const float unit = unit_around(k, per, tiles, factor);
    u32 &own = values[threadIdx.x & 31];
    own = mul2(own, ratio(factor(k), inverse(unit)));
    return unit;
}
// The second product of experts, of few pairs: what it multiplies is activation(gate) up of
// the first one's results `both`, [pair, 2 columns], which a block makes for itself, as
// products read it. Beside them the product of an expert that all rows share, if there is
// one: it has the last block column. A warp has a row of tiles, slice after slice. The kernel
// before is the first product, which has waited for the lists before it lets this one start;
// so weights are asked for meanwhile.
struct Everyone {
    const u8 *w; // null: there is none
    float *y;
    Half x;
    int n_rows;
};
#define GATED_WARPS 8 // as in src/moe.rs
#define AHEAD (FORMAT == 16 ? 2 : CODE_WORDS <= 4 && GROUPS == 1 ? 8 : CODE_WORDS <= 8 && GROUPS == 1 ? 4 : 3) // tiles on their way
KERNEL __launch_bounds__(GATED_WARPS * 32, 2) product_gated(const u64 *table, float *y, const float *both, const u32 *lists, const u32 *pairs, int f, int rows, int cols, int tiles, int per, Everyone all) {
    extern __shared__ __align__(128) u8 staged[]; // 8 rows of tiles, their factors, and units of their slices
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
    const Half made = {(u16 *) staged, (float *) (staged + 8 * 128 * tiles), tiles * 64};
    float *units = made.factors + 8 * tiles;
    const float factor = factors_of(w, rows, tiles)[min(tile, last)];
#pragma unroll 1
    for (u32 base = first; base < stop; base += 8) {
        const int here = min(stop - base, 8);
        if (base > first) __syncthreads(); // what was made before is used
#pragma unroll 1
        for (int at = warp; at < here * tiles; at += GATED_WARPS) {
            const int i = at / tiles, k = at % tiles, c = k * 64 + 2 * lane;
            if (everyone) {
                ((u32 *) made.values)[at * 32 + lane] = ((const u32 *) (all.x.values + (u64) (base + i) * all.x.kp + k * 64))[lane];
                if (lane == 0) made.factors[at] = all.x.factors[(base + i) * (all.x.kp / 64) + k];
                continue;
            }
            const float *gate = both + (u64) pairs[base + i] * 2 * cols, *up = gate + cols;
            float v[2];
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = c + j < cols ? activate(f, gate[c + j]) * up[c + j] : 0.0f;
            put_half(made, i, k, v[0], v[1]);
        }
        __syncthreads();
#pragma unroll 1
        for (int at = warp; at < here * tiles; at += GATED_WARPS) {
            const int i = at / tiles;
            units[at] = unify((u32 *) made.values + at * 32, at - i * tiles, per, tiles, [&](int k) { return made.factors[i * tiles + k]; });
        }
        __syncthreads();
        // Columns that nobody looks at are the last one's.
        const u16 *own = made.values + min(g, here - 1) * made.kp + t * 8;
        Slices sum(per);
#pragma unroll 1
        for (int k = 0; k < tiles; k += AHEAD) {
            if (k > 0 || base > first) load(k);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (k + i >= tiles) break;
                Inputs in;
                in.set(*(const uint4 *) (own + (k + i) * 64), *(const uint4 *) (own + (k + i) * 64 + 32));
                multiply(ahead[i], in, sum.o);
                sum.step(k + i, tiles, [&](int j) { return units[min(2 * t + j, here - 1) * tiles + k + i]; });
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = tile * 16 + g + (i >> 1) * 8, of = 2 * t + (i & 1);
            if (at >= rows || of >= here) continue;
            const float v = sum.total[i] * factor;
            if (everyone) all.y[(u64) (base + of) * rows + at] = v;
            else y[(u64) pairs[base + of] * rows + at] = v;
        }
    }
}

#if __CUDA_ARCH__ >= 900 && !ENGINE
// The same for up to 8 rows where memory is fast, and an expert that all rows share one more:
// the runs of blocks go through the row tiles of all. A warp takes every GATED_WARPS-th of its
// block's, a few tiles of a row at a time, through a ring that runs ahead of the experts.
#define AT_ONCE (TILE_BYTES <= 640 ? 4 : 2) // tiles of a stage
#define STAGES 4
#define MADE_RECORD 192 // of a tile of 8 rows, so that rows lie in other banks; both as in src/moe.rs
KERNEL __launch_bounds__(GATED_WARPS * 32, 2) feed_gated(const Chosen *experts, float *y, const float *both, const u32 *pairs, int f, int most, int rows, int cols, int tiles, int per, Everyone all) {
    extern __shared__ __align__(128) u8 staged[]; // rings, then [tile, row], then the lists
    constexpr int STAGE = AT_ONCE * TILE_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    u8 *made = staged + GATED_WARPS * STAGES * STAGE, *ring = staged + warp * STAGES * STAGE;
    Chosen *list = (Chosen *) (made + 8 * tiles * MADE_RECORD);
    int *pair = (int *) (list + most + 1);
    start_next();
    const int used = chosen_experts(list, pair, experts + 1 + most, experts, pairs, most, []() {});
    if (all.w && threadIdx.x == 0) list[used] = {all.w, 0, all.n_rows};
    __syncthreads();
    const int row_tiles = (rows + 15) / 16, total = (used + (all.w != nullptr)) * row_tiles;
    const int start = (int) ((u64) total * blockIdx.x / gridDim.x), stop = (int) ((u64) total * (blockIdx.x + 1) / gridDim.x);
    if (start == stop) return;
    // What is asked for next: tiles from `ask_k` on of row tile `ask_at`.
    const u32 to = shared_at(ring);
    int ask_at = start + warp, ask_k = 0, ask_slot = 0;
    const u8 *from = nullptr;
    auto ask = [&]() {
        if (ask_at < stop) {
            if (ask_k == 0) {
                const int e = ask_at / row_tiles;
                from = list[e].w + row_of_tiles(ask_at - e * row_tiles, tiles) + lane * 16;
            }
            const int here = min(AT_ONCE, tiles - ask_k), bytes = here * TILE_BYTES - lane * 16;
#pragma unroll
            for (int i = 0; i < STAGE; i += 512) copy16_if(i < bytes, to + ask_slot + lane * 16 + i, from + i);
            from += STAGE;
            ask_k += here;
            if (ask_k == tiles) {
                ask_k = 0;
                ask_at += GATED_WARPS;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        ask_slot = ask_slot + STAGE == STAGES * STAGE ? 0 : ask_slot + STAGE;
    };
    if (ask_at < stop && lane == 0) ask_factor(factors_of(list[ask_at / row_tiles].w, rows, tiles) + ask_at % row_tiles);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) ask();
    wait_for_previous();
    int at = start + warp, slot = 0;
#pragma unroll 1
    for (int e = start / row_tiles; e * row_tiles < stop; e++) {
        const Chosen now = list[e];
        const bool everyone = e == used;
        __syncthreads(); // what was made before is used
#pragma unroll 1
        for (int unit = warp; unit < now.count * tiles; unit += GATED_WARPS) {
            const int i = unit / tiles, k = unit - i * tiles;
            u8 *record = made + (k * 8 + i) * MADE_RECORD;
            if (everyone) {
                if (lane < 8) ((uint4 *) record)[lane] = ((const uint4 *) (all.x.values + (u64) i * all.x.kp + k * 64))[lane];
                else if (lane == 8) ((float *) record)[32] = all.x.factors[i * (all.x.kp / 64) + k];
                continue;
            }
            const float *gate = both + (u64) pair[now.first + i] * 2 * cols, *up = gate + cols;
            const int c = k * 64 + 2 * lane;
            float v[2];
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = c + j < cols ? activate(f, gate[c + j]) * up[c + j] : 0.0f;
            put_half({(u16 *) record, (float *) (record + 128), 64}, 0, 0, v[0], v[1]);
        }
        __syncthreads();
#pragma unroll 1
        for (int unit = warp; unit < now.count * tiles; unit += GATED_WARPS) {
            const int i = unit / tiles, k = unit - i * tiles;
            u8 *record = made + (k * 8 + i) * MADE_RECORD;
            *(float *) (record + 132) = unify((u32 *) record, k, per, tiles, [&](int k) { return *(const float *) (made + (k * 8 + i) * MADE_RECORD + 128); });
        }
        __syncthreads();
        // Columns that nobody looks at are the last one's.
        const u32 own = min(g, now.count - 1) * MADE_RECORD + t * 16;
        const u32 units[2] = {min(2 * t, now.count - 1) * MADE_RECORD + 132u, min(2 * t + 1, now.count - 1) * MADE_RECORD + 132u};
#pragma unroll 1
        for (const int end = min(stop, (e + 1) * row_tiles); at < end; at += GATED_WARPS) {
            Slices sum(per);
            const float factor = factors_of(now.w, rows, tiles)[at - e * row_tiles];
#pragma unroll 1
            for (int k = 0; k < tiles; k += AT_ONCE) {
                asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
                __syncwarp(); // all lanes' copies are there, and the stage before is used
                ask();
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    if (k + i >= tiles) break;
                    const u8 *of = made + (k + i) * 8 * MADE_RECORD;
                    const uint4 a = *(const uint4 *) (of + own), b = *(const uint4 *) (of + own + 64);
                    Inputs in;
                    in.set(a, b);
                    multiply(fetch<true>(ring + slot + i * TILE_BYTES, lane), in, sum.o);
                    sum.step(k + i, tiles, [&](int j) { return *(const float *) (of + units[j]); });
                }
                slot = slot + STAGE == STAGES * STAGE ? 0 : slot + STAGE;
            }
            float *out = everyone ? all.y : y;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = (at - e * row_tiles) * 16 + g + (i >> 1) * 8, of = 2 * t + (i & 1);
                if (row < rows && of < now.count) out[(u64) (everyone ? of : pair[now.first + of]) * rows + row] = sum.total[i] * factor;
            }
        }
    }
}
#endif

// Rows of a table: y = value(token, column) * factor. `tokens` null: the batch's.
__device__ __forceinline__ float value(const u8 *w, const float *factors, u32 row, int col, int tiles) {
    const u8 *tile = w + row_of_tiles(row >> 4, tiles) + (u64) (col / 64) * ALONG;
    const int half = row >> 3 & 1, c = col & 63, h = c >> 5, t = c >> 3 & 3, lane = (row & 7) * 4 + t, at = c & 7;
    [[maybe_unused]] const int i = at >> 1, odd = at & 1; // pair and its end
#if FORMAT == 16
    return f16_to_f32(*(const u16 *) (tile + ((half * 2 + h) * 32 + lane) * 16 + at * 2)) * factors[row >> 4];
#elif FORMAT == 9
    const u32 b = tile[(half * 32 + lane) * 16 + h * 8 + at];
    const u16 scale = *(const u16 *) (tile + CODE_WORDS * 128 + ((c / GROUP * 8 + (row & 7)) * 2 + half) * 2);
    return f16_to_f32(scale) * f16_to_f32((u16) ((b & 0x80) << 8 | (b & 0x7f) << 7)) * factors[row >> 4];
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
    const u32 both = *(const u32 *) (tile + CODE_WORDS * 128 + ((c / GROUP * 8 + (row & 7)) * 2 + half) * 4);
    return fmaf(f16_to_f32((u16) both), (float) code * 0x1p-24f, f16_to_f32((u16) (both >> 16))) * factors[row >> 4];
#endif
}
KERNEL embed(const u8 *w, const u32 *tokens, Batch batch, float *y, int rows, int cols, int tiles, float scale, u64 n) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 row = (u32) (i / cols);
    y[i] = value(w, factors_of(w, rows, tiles), tokens ? tokens[row] : batch.token(row), (int) (i % cols), tiles) * scale;
}

// Random weights of about `gain` in size, for measurements: a thread a word of `words`, and then
// the factors.
KERNEL random_tiles(u32 *w, float gain, u64 words, u64 all) {
    in_order();
    u64 i = (u64) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= all) return;
    u32 x = (u32) i * 0x9e3779b9u ^ (u32) (i >> 32);
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
    float factor = 1.0f;
#if FORMAT == 16
    // Two f16 of either sign with an exponent like the gain's.
    u32 one = f32_to_f16(gain) & 0x7c00u;
    x = (x & 0x83ff83ffu) | one | one << 16;
#elif FORMAT == 9
    // Any of less than 2 in size, and scales.
    const u32 scale = f32_to_f16(512.0f * gain);
    x = (int) (i % (TILE_BYTES / 4)) < CODE_WORDS * 32 ? x & 0xbfbfbfbfu : scale | scale << 16;
#else
    if ((int) (i % (TILE_BYTES / 4)) >= CODE_WORDS * 32) {
        const float scale = gain / (float) (1 << (FORMAT - 1)), bias = scale * -0.5f * (float) ((1 << FORMAT) - 1);
        x = f32_to_f16(scale * 0x1p18f) | (u32) f32_to_f16(bias * 0x1p-6f) << 16;
    }
    factor = 0x1p6f;
#endif
    w[i] = i < words ? x : __float_as_uint(factor);
}
