// The gated delta rule by chunks of rows. common.cuh and mbarrier.cuh go before this.
//
//   S = S decay + k (beta (v - (S decay) k))     y = S q     a state S of [dk, dv] a value head
//
// A sequence's rows are cut into chunks of CHUNK, counted from its first one. A block has COLUMNS columns of values. A
// chunk's rows read the state S before the chunk, and what the rows before them in the chunk add to it: row i adds k_i
// d_i.
//
//   decay(i, j)  product of the decays of rows i + 1 .. j, in this order; i = -1 is the state before the chunk
//   x_j = v_j - decay(-1, j) S k_j
//   d_j = beta_j (x_j - sum over i < j of decay(i, j) (k_i k_j) d_i), which is sum over i <= j of solution(j, i) x_i
//   y_j = decay(-1, j) S q_j + sum over i <= j of decay(i, j) (k_i q_j) d_i
//   after the chunk: S = decay(-1, last) S + sum over i of decay(i, last) k_i d_i
//
// Products with S, and of keys and queries with keys, are tensor cores', of numbers in two parts of f16: DK_PARTS sums
// over parts of dk, which are added one after the other. Sums over rows of a chunk go from the first one on. Row j of
// `solution`, the inverse of a triangular matrix, depends on rows up to j alone. So a row has the same bits whatever
// rows of its chunk come in one step with it: those of steps before are remembered.
//
// Memory of a slot, in floats:
//   state   [nv, SPLITS, KEY_COLUMNS * COLUMNS]
//               before the chunk that the row after the last certain one is in, as threads have it
//   history [taps - 1 + TENTATIVE, C]
//               rows before the convolution: those that end where the last certain row does, then the tentative ones
//   keys    [nk, PENDING, dk]
//               of the rows since `state`: the certain ones, then the tentative ones (of a draft), in two parts of f16
//   values  [nv, SPLITS, VALUE_HEADER + PENDING * VALUE_FLOATS]
//               how many of those rows are certain (an integer, the same in all blocks); of each, decay, beta, x, d.
//               Floats that nobody reads bring x to a multiple of 16 bytes.

struct Delta {
    float *state, *history, *keys, *values;
    Batch batch;
    int nk, nv, dk, dv, channels;
    int is_settled; // no kernel that may still run writes `state`, `history`, `keys` or `values`
};

#define PENDING (CHUNK - 1 + TENTATIVE) // rows since a slot's state, at most
// Keys and queries are in two parts of f16 that add up to KEY_SCALE times the number: dk high ones, then dk low ones.
#define KEY_SCALE 256.0f

// ---- what is remembered of a slot
#define SPLITS ((DV + COLUMNS - 1) / COLUMNS)
#define KEY_COLUMNS ((DK + 16 * DK_PARTS - 1) / (16 * DK_PARTS) * (16 * DK_PARTS)) // dk, and zeros
#define WARPS (2 * DK_PARTS)
#define THREADS (32 * WARPS)
#define VALUE_HEADER 4
#define VALUE_FLOATS (4 + 2 * COLUMNS)
DEVICE float *state_of(const Delta &d, const u32 *seq) {
    return d.state + ((u64) seq[SEQ_SLOT] * d.nv * SPLITS + blockIdx.x) * (KEY_COLUMNS * COLUMNS);
}
DEVICE float *keys_of(const Delta &d, const u32 *seq, int key_head) {
    return d.keys + ((u64) seq[SEQ_SLOT] * d.nk + key_head) * (PENDING * DK);
}
DEVICE float *values_of(const Delta &d, const u32 *seq, int block) {
    return d.values + ((u64) seq[SEQ_SLOT] * d.nv * SPLITS + block) * (VALUE_HEADER + PENDING * VALUE_FLOATS);
}
// Rows of a sequence, counted from the slot's state on.
struct Span {
    u32 known;   // those that are remembered and stay
    u32 total;   // with the step's own rows, which follow
    u32 certain; // of all
    u32 base;    // the first row of the chunk that the row after the certain ones is in
    bool is_new;
    DEVICE Span(const u32 *seq, const float *values) {
        is_new = seq[SEQ_NEW];
        known = is_new ? 0 : *(const u32 *) values + seq[SEQ_KEPT];
        total = known + seq[SEQ_ROWS];
        certain = known + seq[SEQ_CERTAIN];
        base = certain / CHUNK * CHUNK;
    }
    // Whether row `r` is remembered for the next step, where it is not yet: as number r - base.
    DEVICE bool is_stored(u32 r) const { return r >= base && r < total && (r >= known || base > 0); }
};

// ---- products of numbers in two parts of f16, by tensor cores: (h + l) (h' + l') without l l'
template <int N>
struct Split {
    u32 high[N], low[N];
    DEVICE void set(int i, float first, float second) {
        high[i] = pack_f16x2(first, second);
        low[i] = pack_f16x2(first - f16_to_f32((u16) high[i]), second - f16_to_f32((u16) (high[i] >> 16)));
    }
};
// c += a b
DEVICE void multiply(float (&c)[4], const Split<4> &a, const Split<2> &b) {
    mma_m16n8k16(c, a.low, b.high[0], b.high[1]);
    mma_m16n8k16(c, a.high, b.low[0], b.low[1]);
    mma_m16n8k16(c, a.high, b.high[0], b.high[1]);
}
// Four matrices of 8 x 8, whose rows the lanes' addresses are of.
template <bool TRANSPOSED>
DEVICE void load_matrices(u32 (&v)[4], u32 from) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(from)
                     : "memory");
}
// Loads both parts of keys or queries.
template <bool TRANSPOSED>
DEVICE void load_keys(Split<4> &v, u32 from) {
    load_matrices<TRANSPOSED>(v.high, from);
    load_matrices<TRANSPOSED>(v.low, from + 2 * KEY_COLUMNS);
}

// ---- a chunk, by block (value head and its columns' split, sequence). Warp w has columns 16 (w % 2) .. and part w / 2
// of dk of the state, transposed: tile t is [16 columns, 8 of dk] as accumulators of mma.m16n8k16 lie. Two tiles are
// what the warp needs as operand B of the product with keys, for 8 columns each.
#define TILES (KEY_COLUMNS / (8 * DK_PARTS))
#define BLOCKS_PER_SM (KEY_COLUMNS > 128 ? 1 : 2) // at least
// Floats from row to row in shared memory: lanes that load matrices, and store products, meet in no bank.
#define KEY_STRIDE (KEY_COLUMNS + 4)
#define PRODUCT_STRIDE (COLUMNS + 8)
#define DOT_STRIDE (CHUNK + 8)
#define D_STRIDE (COLUMNS + 4)
#define WEIGHT_STRIDE (CHUNK + 4)
struct State {
    float v[TILES][4];
    // Where the thread's numbers lie in the block's state: tile by tile, 128 floats apart.
    DEVICE static int offset() { return (threadIdx.x >> 5) * (TILES * 128) + (threadIdx.x & 31) * 4; }
    DEVICE void load(const float *state, bool is_new) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const float4 four =
                is_new ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *(const float4 *) (state + offset() + t * 128);
            v[t][0] = four.x, v[t][1] = four.y, v[t][2] = four.z, v[t][3] = four.w;
        }
    }
    DEVICE void store(float *state) const {
#pragma unroll
        for (int t = 0; t < TILES; t++)
            *(float4 *) (state + offset() + t * 128) = make_float4(v[t][0], v[t][1], v[t][2], v[t][3]);
    }
};
// What a chunk of a value head has that does not depend on the state.
struct ChunkMatrices {
    float solution[CHUNK][CHUNK];      // [j][i]
    float query_weights[CHUNK][CHUNK]; // decay(i, j) (k_i q_j) as [j][i]
    float from_state[CHUNK];           // decay(-1, j)
    float to_end[CHUNK];               // decay(i, last)
    float gates[CHUNK][2];             // decay and beta of each row
};
// What makes it.
struct Weights {
    float decays[CHUNK][CHUNK];       // decay(i, j) as [j][i]
    float keys[CHUNK][WEIGHT_STRIDE]; // -decay(i, j) (k_i k_j) as [i][j]
};
// Products of keys (0) and of queries (1), by parts of dk.
template <int STRIDE>
struct Products {
    float v[DK_PARTS][2][CHUNK][STRIDE];
    DEVICE float sum(int what, int row, int column) const {
        float sum = v[0][what][row][column];
#pragma unroll
        for (int p = 1; p < DK_PARTS; p++) sum += v[p][what][row][column];
        return sum;
    }
};
using Dots = Products<DOT_STRIDE>; // with keys
struct ChunkMemory {
    Products<PRODUCT_STRIDE> products; // with the state
    float x[CHUNK][COLUMNS], d[CHUNK][D_STRIDE];
};
// What only steps of few rows have, whose blocks make the matrices of a chunk themselves.
struct PrepareMemory {
    Dots dots;
    Weights weights;
    ChunkMatrices matrices;
};
// Where the rows of a chunk are, in shared memory but for `known_d`. The first `known` rows are remembered ones; there
// may be more of them than `count`. `queries` is where the query of row 0 would be: known rows have none. `values` are
// x of known rows, and v of others.
struct ChunkRows {
    const float *keys, *queries, *values, *gates; // KEY_STRIDE, KEY_STRIDE, COLUMNS and 2 (decay, beta) floats apart
    const float *known_d;                         // VALUE_FLOATS apart
    const ChunkMatrices *matrices;
    int count, known; // rows
};
// Where the lane's row `j` of a matrix of 16 rows and 16 columns of keys or queries `rows` lies, as `load_matrices`
// takes it.
DEVICE u32 matrix_row(const float *rows, int j, int column) {
    return smem_address(rows + j * KEY_STRIDE) + 2 * column + ((threadIdx.x & 31) >> 4) * 16;
}
// Where the lane's rows of a matrix of keys and of one of queries lie, of all `count` rows of the chunk, of which
// `known` have no query: those of `rows`, or constants where they are known when this is compiled. In place of rows
// that do not exist, other rows are multiplied, and nobody reads the results.
DEVICE void matrix_rows(u32 (&at)[2], const ChunkRows &rows, int known, int count, int column) {
    const int row = threadIdx.x & 15, last = count - 1;
    at[0] = matrix_row(rows.keys, min(row, last), column);
    at[1] = matrix_row(rows.queries, min(max(row, known), last), column);
}
// Stores two neighboring columns of a matrix as tensor cores give it, times `scale`: of the lane's first row, and of
// the one 8 rows below.
template <int N>
DEVICE void store_results(float (&first)[N], float (&second)[N], int column, const float (&c)[4], float scale) {
    *(float2 *) &first[column] = make_float2(c[0] * scale, c[1] * scale);
    *(float2 *) &second[column] = make_float2(c[2] * scale, c[3] * scale);
}
// Dot products of all rows: each warp has a part of dk, and 8 keys.
DEVICE void compute_dots(Dots &dots, const ChunkRows &rows) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = warp & 1, part = warp >> 1,
              column = part * (8 * TILES), last = rows.count - 1;
    u32 own[2];
    matrix_rows(own, rows, rows.known, rows.count, column);
    // Two matrices of 8 keys and 8 columns each, twice.
    const u32 keys =
        smem_address(rows.keys + min(8 * half + (lane & 7), last) * KEY_STRIDE) + 2 * column + (lane >> 3 & 1) * 16;
    float sums[2][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
        Split<4> k, a;
        load_keys<false>(k, keys + 16 * t);
        const Split<2> b = {{k.high[0], k.high[1]}, {k.low[0], k.low[1]}};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_keys<false>(a, own[i] + 16 * t);
            multiply(sums[i], a, b);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        auto &to = dots.v[part][i];
        store_results(to[lane >> 2], to[(lane >> 2) + 8], 8 * half + 2 * (lane & 3), sums[i], 1.0f);
    }
}
// Products of decays, by a warp, from the gates of `count` rows.
DEVICE void compute_decays(ChunkMatrices &to, Weights &weights, const float *gates, int count) {
    const int lane = threadIdx.x & 31;
    float decay = 1.0f; // decay(lane, j); of lane CHUNK, decay(-1, j)
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const float own = j < count ? gates[2 * j] : 1.0f;
        decay = j == lane ? 1.0f : decay * own;
        if (lane < CHUNK) weights.decays[j][lane] = decay;
        if (lane == CHUNK) to.from_state[j] = decay;
    }
    if (lane < CHUNK) to.to_end[lane] = decay;
    to.gates[lane >> 1][lane & 1] = lane >> 1 < count ? gates[lane] : 0.0f;
}
// Weights of keys and queries, a thread each. Those where row i comes after row j are not read.
static_assert(THREADS == CHUNK * CHUNK);
DEVICE void compute_weights(ChunkMatrices &to, Weights &weights, const Dots &dots) {
    const int i = threadIdx.x % CHUNK, j = threadIdx.x / CHUNK;
    const float decay = weights.decays[j][i] * (1.0f / KEY_SCALE / KEY_SCALE);
    weights.keys[i][j] = -decay * dots.sum(0, j, i);
    to.query_weights[j][i] = decay * dots.sum(1, j, i);
}
// The solution, by a warp: a lane has a column.
DEVICE void compute_solution(ChunkMatrices &to, const Weights &weights, const float *gates, int count) {
    const int lane = threadIdx.x & 31;
    float sums[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; j++) sums[j] = j == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        if (j >= count) return;
        const float v = sums[j] * gates[2 * j + 1];
        if (lane < CHUNK) to.solution[j][lane] = v;
#pragma unroll
        for (int l = j + 1; l < CHUNK; l++) sums[l] = fmaf(weights.keys[j][l], v, sums[l]);
    }
}
static_assert(CHUNK == 2 * WARPS);
// Adds to `sum` rows i <= j, the lane's column of each, times weights[j][i].
template <int N>
DEVICE float sum_of_rows(float sum, const float (&weights)[CHUNK][CHUNK], const float (&rows)[CHUNK][N], int j) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        if (i <= j) sum = fmaf(weights[j][i], rows[i][threadIdx.x & 31], sum);
    return sum;
}
// Adds to sums[0] rows i <= j times weights[j][i], and to sums[1] rows i <= j + 8 times weights[j + 8][i]: the lane's
// column of each. `j` is below 8.
template <int N>
DEVICE void sum_of_rows(float (&sums)[2], const float (&weights)[CHUNK][CHUNK], const float (&rows)[CHUNK][N], int j) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        const float4 second = *(const float4 *) &weights[j + 8][i];
        const float b[4] = {second.x, second.y, second.z, second.w};
        float a[4] = {};
        if (i < 8) {
            const float4 first = *(const float4 *) &weights[j][i];
            a[0] = first.x, a[1] = first.y, a[2] = first.z, a[3] = first.w;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float v = rows[i + n][lane];
            if (i < 8) {
                if (i + n <= j) sums[0] = fmaf(a[n], v, sums[0]);
                sums[1] = fmaf(b[n], v, sums[1]);
            } else if (i + n - 8 <= j) sums[1] = fmaf(b[n], v, sums[1]);
        }
    }
}
// Where the lane's column of results is.
struct Results {
    float *y;
    u64 stride;
    bool exists;
    DEVICE Results(const Delta &d, const u32 *seq, float *results) {
        const int head = blockIdx.x / SPLITS, column = blockIdx.x % SPLITS * COLUMNS + (threadIdx.x & 31);
        y = results + ((u64) seq[SEQ_START] * d.nv + head) * DV + column;
        stride = (u64) d.nv * DV;
        exists = DV % COLUMNS == 0 || column < DV;
    }
    DEVICE void store(u32 row, float v) const {
        if (exists) y[row * stride] = v;
    }
};
// The power of two that brings all numbers of a warp to the range of f16, `most` the largest of the lane's.
DEVICE float scale_of_warp(float most) {
    return normalising_scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most))));
}
// Products of N matrices of 16 rows of keys or queries, where the lane's rows of them lie at `from`, with the warp's
// part of the state times `up`: two tiles of 8 columns each.
template <int N>
DEVICE void multiply_state(float (&products)[N][2][4], const State &s, float up, const u32 (&from)[N]) {
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
        Split<2> b[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < 2; n++) b[n].set(i, s.v[t + i][2 * n] * up, s.v[t + i][2 * n + 1] * up);
#pragma unroll
        for (int i = 0; i < N; i++) {
            Split<4> a;
            load_keys<false>(a, from[i] + 16 * t);
#pragma unroll
            for (int n = 0; n < 2; n++) multiply(products[i][n], a, b[n]);
        }
    }
}
// The block's part of a chunk: the state that comes after it, if `updates`, and results; `store(j, y)` gets what the
// lane has of row j. All threads have met since the rows were loaded and since the last chunk. Where matrices are not
// prepared, `rows.matrices` are those of `own`, for which `compute_decays` has been called. IS_WHOLE: 16 new rows.
template <bool IS_PREPARED, bool IS_WHOLE, class F>
DEVICE void compute_chunk(ChunkMemory &m, State &s, const ChunkRows &rows, PrepareMemory *own, bool updates, F store) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp & 1, part = warp >> 1, row = lane >> 2,
              pair = 2 * (lane & 3), column = part * (8 * TILES);
    const int known = IS_WHOLE ? 0 : rows.known, count = IS_WHOLE ? CHUNK : rows.count;
    const ChunkMatrices &matrices = *rows.matrices;
    if (!IS_PREPARED) compute_dots(own->dots, rows);
    float maxima[4] = {};
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) maxima[i] = fmaxf(maxima[i], fabsf(s.v[t][i]));
    const float most = fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
    float up = scale_of_warp(most), down = inverse_pow2(up) * (1.0f / KEY_SCALE);
    auto &to = m.products.v[part];
    if constexpr (IS_PREPARED) {
        float products[2][2][4] = {};
        u32 from[2];
        matrix_rows(from, rows, known, count, column);
        multiply_state(products, s, up, from);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                store_results(to[i][row], to[i][row + 8], 16 * group + 8 * n + pair, products[i][n], down);
    } else {
        // Of few rows, keys and queries of 8 are one matrix.
#pragma unroll 1
        for (int first = known; first < count; first += 8) {
            float products[1][2][4] = {};
            const int j = min(first + (lane & 7), count - 1);
            multiply_state(products, s, up, {matrix_row(lane & 8 ? rows.queries : rows.keys, j, column)});
            if (first + row < count)
#pragma unroll
                for (int n = 0; n < 2; n++)
                    store_results(to[0][first + row], to[1][first + row], 16 * group + 8 * n + pair, products[0][n],
                                  down);
        }
    }
    __syncthreads();
    if (!IS_PREPARED) compute_weights(own->matrices, own->weights, own->dots);
    // Columns that a head does not have are zeros: all columns of a warp have one scale.
    const bool exists = DV % COLUMNS == 0 || blockIdx.x % SPLITS * COLUMNS + lane < DV;
#pragma unroll
    for (int j = warp; j < CHUNK; j += WARPS) {
        if (j >= count) break;
        const float v = exists ? rows.values[j * COLUMNS + lane] : 0.0f;
        m.x[j][lane] = j < known ? v : fmaf(-matrices.from_state[j], m.products.sum(0, j, lane), v);
        if (j < known) m.d[j][lane] = rows.known_d[j * VALUE_FLOATS + lane];
    }
    __syncthreads();
    if (!IS_PREPARED) {
        if (warp == 0) compute_solution(own->matrices, own->weights, rows.gates, count);
        __syncthreads();
    }
    if constexpr (IS_WHOLE) {
        float d[2] = {};
        sum_of_rows(d, matrices.solution, m.x, warp);
        m.d[warp][lane] = d[0];
        m.d[warp + 8][lane] = d[1];
    } else
#pragma unroll 1
        for (int j = known + warp; j < count; j += WARPS) m.d[j][lane] = sum_of_rows(0.0f, matrices.solution, m.x, j);
    __syncthreads();
    if (updates) {
        const float decay = matrices.from_state[CHUNK - 1];
        float added[4][2], maxima[2] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int r = pair + j + 8 * (i / 2);
                added[i][j] = m.d[r][16 * group + row + 8 * (i % 2)] * matrices.to_end[r];
                maxima[j] = fmaxf(maxima[j], fabsf(added[i][j]));
            }
        up = scale_of_warp(fmaxf(maxima[0], maxima[1]));
        down = inverse_pow2(up) * (1.0f / KEY_SCALE);
        Split<4> a;
#pragma unroll
        for (int i = 0; i < 4; i++) a.set(i, added[i][0] * up, added[i][1] * up);
        const u32 keys = matrix_row(rows.keys, lane & 15, column);
#pragma unroll
        for (int t = 0; t < TILES; t += 2) {
            Split<4> k;
            load_keys<true>(k, keys + 16 * t);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Split<2> b = {{k.high[2 * i], k.high[2 * i + 1]}, {k.low[2 * i], k.low[2 * i + 1]}};
                float sum[4] = {};
                multiply(sum, a, b);
#pragma unroll
                for (int j = 0; j < 4; j++) s.v[t + i][j] = fmaf(decay, s.v[t + i][j], sum[j] * down);
            }
        }
    }
    if constexpr (IS_WHOLE) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; i++) y[i] = matrices.from_state[warp + 8 * i] * m.products.sum(1, warp + 8 * i, lane);
        sum_of_rows(y, matrices.query_weights, m.d, warp);
        store(warp, y[0]);
        store(warp + 8, y[1]);
    } else
#pragma unroll 1
        for (int j = known + warp; j < count; j += WARPS)
            store(j, sum_of_rows(matrices.from_state[j] * m.products.sum(1, j, lane), matrices.query_weights, m.d, j));
}
// The block's part of all rows, chunk by chunk: `load(first)` says where those from `first` on are, with all threads
// having met since they were loaded and since the last chunk. `store(r, y)` gets what the lane has of the step's row r.
template <bool IS_PREPARED, class L, class F>
DEVICE void compute_chunks(const Delta &d, const u32 *seq, const Span &span, State &s, ChunkMemory &m, float *values,
                           PrepareMemory *own, L load, F store) {
    const int lane = threadIdx.x & 31;
    float *state = state_of(d, seq);
    if (span.base == 0 && span.is_new) s.store(state);
#pragma unroll 1
    for (u32 first = 0; first < span.total; first += CHUNK) {
        const ChunkRows rows = load(first);
        const bool updates = first + CHUNK < span.total || first + CHUNK <= span.base;
        auto store_row = [&](int j, float v) { store(first + j - span.known, v); };
        if (IS_PREPARED && rows.count - rows.known == CHUNK)
            compute_chunk<IS_PREPARED, true>(m, s, rows, own, updates, store_row);
        else compute_chunk<IS_PREPARED, false>(m, s, rows, own, updates, store_row);
        if (first + CHUNK == span.base) s.store(state);
        if (first + CHUNK > span.base)
            for (int j = threadIdx.x >> 5; j < rows.count; j += WARPS)
                if (span.is_stored(first + j)) {
                    float *value = values + VALUE_HEADER + (first + j - span.base) * VALUE_FLOATS;
                    if (lane < 2) value[lane] = rows.gates[2 * j + lane];
                    value[4 + lane] = m.x[j][lane];
                    value[4 + COLUMNS + lane] = m.d[j][lane];
                }
    }
    if (threadIdx.x == 0) *(u32 *) values = span.certain - span.base;
}
