// Attention of prompts by warpgroups (wgmma), for compute capability 9.0 alone: keys and values of 16 bits, heads of
// 256 or 512 columns. The bits are those of attention.cu: tensor cores sum 16 columns, or keys, at a time there and
// here.
//
//                 global             shared                               registers
//   producer warp q,      -- TMA --> f32 - consumers: f16 - queries -> A +
//   producer warp keys,   -- TMA --> [stages] of 128 columns ------> B + wgmma -> scores - softmax of a page +
//   producer warp values, -- TMA --> [stages] of 128 columns ------> B +                                     |
//                                    probabilities <---------------------------------------------------------+
//                                                  +-----------------> A + wgmma -> x - rescale -> totals -> y
//
// Two consumer warpgroups multiply, and a producer warp for each of their pipelines has the copy engine fill STAGES
// stages of 128 columns of a page's keys or values. With heads of 256 columns a warpgroup has 64 queries of its own,
// and both read one pipeline. With 512 the two share 64 queries: each has the scores of every other page and half of
// the output's columns, with half of the stages. Queries come first, in f32, to where probabilities and stages lie
// later.
//
// A split is taken at a time, as above: the scores of its pages, which become probabilities in shared memory; then its
// values, 128 columns at a time. With PAGES_ONLY, for heads of 256 columns in layers whose units of keys are all pages,
// a page is taken at a time: its probabilities stay in registers, and its values are multiplied 64 columns at a time,
// while the results of the 64 before are added to the totals.

#define SHARED_BY (HEAD_DIM / 256)      // warpgroups that share queries
#define BLOCK_QUERIES (128 / SHARED_BY) // queries
#define STAGE_BYTES 16384
#define PAGE_BYTES (HEAD_DIM * PAGE_ROWS * 2)                  // of a head's keys, and of its values
#define QUERY_BYTES (BLOCK_QUERIES * HEAD_DIM * 2)             // [BLOCK / 8, HEAD / 8, 8, 8]
#define PAGE_PROBABILITY_BYTES (BLOCK_QUERIES * PAGE_ROWS * 2) // [BLOCK / 8, 8, 8, 8]
#define PROBABILITY_BYTES (PAGES_ONLY ? 0 : 4 * PAGE_PROBABILITY_BYTES)
#define SUM_BYTES (BLOCK_QUERIES * 4 * 8) // [BLOCK / 16, 4, 16, 2] each page's maximum and sum

// Shared memory descriptor of 8 x 8 matrices at `at`: STRIDE bytes to the next 8 rows, 128 to the next 8 columns. With
// `bytes` added, that of what lies so far behind.
template <u32 STRIDE>
struct MatrixDescriptor {
    u32 low;
    DEVICE explicit MatrixDescriptor(u32 at) : low(at >> 4 | 128u >> 4 << 16) {}
    DEVICE u64 operator+(u32 bytes) const { return (u64) (STRIDE >> 4) << 32 | low + (bytes >> 4); }
};
using QueryDescriptor = MatrixDescriptor<HEAD_DIM * 16>;
using StageDescriptor = MatrixDescriptor<512>;
using ProbabilityDescriptor = MatrixDescriptor<PAGE_ROWS * 16>;

// Four 8 x 8 matrices, a fragment of A; each lane has the address of a row of one.
DEVICE void store_matrices(u32 at, const uint4 &v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE uint4 load_matrices(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

// Divides a warp's totals by the sums of their rows and stores them. `sum`: of the lane's first row; that of its second
// one lies 8 behind. `half`: which 256 columns of the heads.
DEVICE void store_results(const AttentionArgs &a, const Activations &h, const QueryTile &own, int tile, int half,
                          float (&totals)[2][16][4], const float *sum) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u64 row[2];
    int column[2];
    bool exists[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int q = tile * 16 + g + 8 * i;
        exists[i] = q < own.count;
        row[i] = own.row(q), column[i] = own.head(q) * HEAD_DIM + half * 256;
        const float of = sum[8 * i];
        // A reciprocal and a correction have the bits of division (Markstein) where remainders are exact: of results
        // from 2^-100 on, for sums are at least about 1/2. Smaller ones are divided, as zeros are, which would lose
        // their sign.
        const float inverse = 1.0f / of;
        float least = INF;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int n = 0; n < 16; n++)
                least = fminf(fminf(least, fabsf(totals[c][n][2 * i])), fabsf(totals[c][n][2 * i + 1]));
        if (least < 0x1p-100f) {
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int n = 0; n < 16; n++) totals[c][n][2 * i] /= of, totals[c][n][2 * i + 1] /= of;
        } else {
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int o = 0; o < 2; o++) {
                        float &v = totals[c][n][2 * i + o];
                        const float q = v * inverse;
                        v = fmaf(fmaf(-of, q, v), inverse, q);
                    }
        }
        if (a.y && exists[i]) {
            float *y = a.y + row[i] * a.heads * HEAD_DIM + column[i] + 2 * t;
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int n = 0; n < 16; n++)
                    *(float2 *) (y + c * 128 + n * 8) = make_float2(totals[c][n][2 * i], totals[c][n][2 * i + 1]);
        }
    }
    if (h.stride == 0) return;
    // Tiles of 64 columns, as `store_activation_tile` does; four lanes have them.
    u32 largest[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            float v = 0.0f;
#pragma unroll
            for (int n = part % 2 * 8; n < part % 2 * 8 + 8; n++)
                v = fmaxf(fmaxf(v, fabsf(totals[part / 2][n][2 * i])), fabsf(totals[part / 2][n][2 * i + 1]));
            largest[i][part] = __float_as_uint(v);
        }
#pragma unroll
    for (int o = 1; o < 4; o *= 2)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int part = 0; part < 4; part++)
                largest[i][part] = max(largest[i][part], __shfl_xor_sync(~0u, largest[i][part], o));
    const bool odd = t & 1;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const float up = normalising_scale(__uint_as_float(largest[i][part]));
            const int first = column[i] + part * 64;
            auto f16 = [&](int n) {
                const float (&v)[4] = totals[part / 2][part % 2 * 8 + n];
                return f32_to_f16(v[2 * i] * up) | (u32) f32_to_f16(v[2 * i + 1] * up) << 16;
            };
            // Neighboring lanes exchange, so that each has four columns.
            u16 *to = h.values + row[i] * h.stride + first + 8 * odd + 4 * (t >> 1);
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                const u32 v0 = f16(n), v1 = f16(n + 1), other = __shfl_xor_sync(~0u, odd ? v0 : v1, 1);
                if (exists[i]) *(uint2 *) (to + n * 8) = odd ? make_uint2(other, v1) : make_uint2(v0, other);
            }
            if (exists[i] && t == 0) h.scales[row[i] * (h.stride / 64) + first / 64] = inverse_pow2(up);
        }
}

extern __shared__ __align__(128) u8 smem[];
// Attention of a block of queries to all keys that they see. `h` takes its results in f16, unless the stride of `h` is
// 0; where `h` takes them, `a.y` may be null.
KERNEL __launch_bounds__(384, 1) attention_wgmma(AttentionArgs a, Activations h) {
    static_assert(!PAGES_ONLY || HEAD_DIM == 256, "warpgroups that share queries need all probabilities of a page");
    constexpr int RING_STAGES = STAGES / SHARED_BY, COLUMN_CHUNKS = HEAD_DIM / 128;
    __shared__ u64 full[2 * STAGES], queries_there;
    u64 *const empty = full + STAGES;
    // In shared memory, for registers are scarce: which queries, and the keys that all of them see.
    __shared__ u32 place[2], whole[2];
    u8 *queries = smem;
    float2 *page_sums = (float2 *) (queries + QUERY_BYTES);
    float *sum = (float *) ((u8 *) page_sums + SUM_BYTES); // [BLOCK] so far
    float *most = sum + BLOCK_QUERIES;                     // [8, 16] of warps: maximum so far
    const u32 probabilities_at = smem_address(most + 8 * 16), stages_at = probabilities_at + PROBABILITY_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    pdl_launch();
    u32 seq, first;
    // Blocks with the longest context go first.
    if (!find_queries(a, gridDim.x - 1 - blockIdx.x, BLOCK_QUERIES, seq, first)) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(smem_address(full + i), 1);
            mbarrier_init(smem_address(empty + i), 8 / SHARED_BY * WARP_ARRIVALS);
        }
        mbarrier_init(smem_address(&queries_there), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        place[0] = seq, place[1] = first;
    }
    __syncthreads();
    const int half = SHARED_BY == 1 ? 0 : warp < 8 ? warp >> 2 : warp - 8; // of the columns, pages and stages
    const int tile = SHARED_BY == 1 ? warp : warp & 3;
    const QueryTile own(a, seq, first, BLOCK_QUERIES, tile);
    const u32 *table = a.batch.table(seq, a.group);
    pdl_wait();
    u32 turn = 0; // of the ring
    auto all_sync = []() { asm volatile("bar.sync 2, %0;" ::"n"(256 + 32 * SHARED_BY) : "memory"); };
    if (threadIdx.x == 0) {
        u32 unused;
        visible_keys(a, own.row(own.count - 1), whole[0], unused);
        visible_keys(a, own.row(0), unused, whole[1]);
    }
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp >= 8 + SHARED_BY) return;
        // Queries in f32 come to where probabilities and stages are later.
        if (warp == 8) {
            const u32 barrier = smem_address(&queries_there);
            if (lane == 0) mbarrier_expect_tx(barrier, own.count * (HEAD_DIM * 4));
            __syncwarp();
            for (int q = lane; q < own.count; q += 32)
                bulk_copy(probabilities_at + q * (HEAD_DIM * 4),
                          a.q + ((u64) own.row(q) * a.heads + own.head(q)) * HEAD_DIM, HEAD_DIM * 4, barrier);
        }
        all_sync();
        // Copies the two halves of a stage.
        auto produce = [&](const u8 *from, u32 second) {
            const int at = half * RING_STAGES + turn % RING_STAGES;
            mbarrier_wait(smem_address(empty + at), turn / RING_STAGES + 1);
            if (lane == 0) {
                const u32 to = stages_at + at * STAGE_BYTES, barrier = smem_address(full + at);
                mbarrier_expect_tx(barrier, STAGE_BYTES);
                bulk_copy(to, from, STAGE_BYTES / 2, barrier);
                bulk_copy(to + STAGE_BYTES / 2, from + second, STAGE_BYTES / 2, barrier);
            }
            __syncwarp();
            turn++;
        };
#if PAGES_ONLY
        const u32 end = (own.most + PAGE_ROWS - 1) / PAGE_ROWS;
        for (u32 at = own.least / PAGE_ROWS; at < end; at++) {
            const u64 page = ((u64) table[at] * a.kv_heads + own.kv_head) * PAGE_BYTES;
            for (int c = 0; c < 2; c++) produce(a.keys + page + c * STAGE_BYTES, STAGE_BYTES / 2);
            for (int c = 0; c < 2; c++) produce(a.values + page + c * (STAGE_BYTES / 2), PAGE_BYTES / 2);
        }
#else
        // Consumers take all pages of a split. Another page is copied for those that no query sees: scores are masked.
        const u32 seen = own.least < own.most ? table[own.least / PAGE_ROWS] : 0; // 0: no query sees any
        for (u32 split = own.least / SPLIT_KEYS; split * SPLIT_KEYS < own.most; split++) {
            const u32 pages = own.load_page_of_split(table, split), existing = pages == NO_PAGE ? seen : pages;
            auto page_of = [&](const u8 *of, int i) {
                return of + ((u64) __shfl_sync(~0u, existing, i) * a.kv_heads + own.kv_head) * PAGE_BYTES;
            };
            for (int i = half; i < 4; i += SHARED_BY) {
                const u8 *from = page_of(a.keys, i);
                for (int c = 0; c < COLUMN_CHUNKS; c++) produce(from + c * STAGE_BYTES, STAGE_BYTES / 2);
            }
            for (int c = 2 * half; c < 2 * half + 2; c++)
                for (int i = 0; i < 4; i++) produce(page_of(a.values, i) + c * (STAGE_BYTES / 2), PAGE_BYTES / 2);
        }
#endif
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    // A warp has 8 queries at a time, 16 columns an instruction.
    mbarrier_wait(smem_address(&queries_there), 0);
#pragma unroll 1
    for (int q = warp * 8 + g; q < BLOCK_QUERIES; q += 64) {
        const float4 *from = (const float4 *) (smem + (probabilities_at - smem_address(smem)) + q * (HEAD_DIM * 4)) + t;
        u8 *to = queries + q / 8 * HEAD_DIM * 16 + t / 2 * 128 + q % 8 * 16 + t % 2 * 8;
        const bool exists = q < own.count;
#pragma unroll 8
        for (int i = 0; i < HEAD_DIM / 16; i++)
            *(uint2 *) (to + i * 256) = QueryTile::to_f16(exists ? from[i * 4] : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const QueryDescriptor of_group(smem_address(queries) +
                                   (SHARED_BY == 1 ? __shfl_sync(~0u, warp, 0) / 4 * (64 * HEAD_DIM * 2) : 0));
    float2 *found = page_sums + tile * (4 * 16) + g;
    all_sync();
    auto acquire = [&]() {
        const u32 at = half * RING_STAGES + turn % RING_STAGES;
        mbarrier_wait(smem_address(full + at), turn / RING_STAGES);
        turn++;
        return StageDescriptor(stages_at + at * STAGE_BYTES);
    };
    // Gives back the stage that was acquired so many turns before the last one.
    auto release = [&](u32 before) {
        mbarrier_arrive_warp(smem_address(empty + half * RING_STAGES + (turn - 1 - before) % RING_STAGES), lane);
    };
    sum += tile * 16 + g;
    most += warp * 16 + g;
    if (t == 0) {
        if (half == 0) sum[0] = sum[8] = 0.0f;
        most[0] = most[8] = -INF;
    }
    __syncwarp();
    float totals[2][16][4];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) totals[c][n][i] = 0.0f;
    // Scales the scores of page `at`, to logarithms to base 2; -infinity where keys are not visible.
    auto scale_and_mask = [&](float (&s)[8][4], u32 at) {
        if (whole[0] <= at * PAGE_ROWS && whole[1] >= (at + 1) * PAGE_ROWS) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] *= a.scale * LOG2E;
        } else {
#pragma unroll
            for (int n = 0; n < 8; n++) own.mask(s[n], at, n, a.scale * LOG2E);
        }
    };
    auto rescale_totals = [&](const float (&by)[2]) {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) totals[c][n][i] *= by[i >> 1];
    };
#if PAGES_ONLY
    {
        const u32 pages_end = (own.most + PAGE_ROWS - 1) / PAGE_ROWS;
        float x[2][8][4], max[2] = {-INF, -INF}, all[2] = {0.0f, 0.0f};
        // Starts the products of queries and a page's keys. They run while the last results of the page before are
        // added.
        auto start_scores = [&]() {
            const StageDescriptor keys0 = acquire(), keys1 = acquire();
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 16; j++)
                wgmma(x[0], of_group + j * 256, (j < 8 ? keys0 : keys1) + (j % 8 / 2 * 4096 + j % 2 * 256), j > 0);
            wgmma_commit();
        };
        u32 at = own.least / PAGE_ROWS;
        if (at < pages_end) start_scores();
#pragma unroll 1
        for (; at < pages_end; at++) {
            wgmma_wait(x[0]);
            release(1);
            release(0);
            scale_and_mask(x[0], at);
            const PageSoftmax p(x[0]);
            float by[2], before[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float now = larger(max[i], p.max[i]);
                before[i] = softmax_rescale(max[i], now), by[i] = softmax_rescale(p.max[i], now);
                all[i] = fmaf(p.sum[i], by[i], all[i] * before[i]);
                max[i] = now;
            }
            if (!__all_sync(~0u, before[0] == 1.0f && before[1] == 1.0f)) rescale_totals(before);
            u32 fragments[4][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 v = p.keys(j);
                fragments[j][0] = v.x, fragments[j][1] = v.y, fragments[j][2] = v.z, fragments[j][3] = v.w;
            }
            // Starts the products of 64 columns of values.
            auto start = [&](const StageDescriptor &values, float (&x)[8][4], int part) {
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    wgmma(x, fragments[j], values + (part * 4096 + j / 2 * (STAGE_BYTES / 2) + j % 2 * 256), j > 0);
                wgmma_commit();
            };
            auto add = [&](float (&x)[8][4], int c, int part) {
                wgmma_pin(x);
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float &v = totals[c][part * 8 + n][i];
                        v = fmaf(x[n][i], by[i >> 1], v);
                    }
            };
            const StageDescriptor values0 = acquire();
            start(values0, x[0], 0);
            start(values0, x[1], 1);
            wgmma_wait<1>();
            add(x[0], 0, 0);
            const StageDescriptor values1 = acquire();
            start(values1, x[0], 0);
            wgmma_wait<1>();
            release(1);
            add(x[1], 0, 1);
            start(values1, x[1], 1);
            wgmma_wait<1>();
            add(x[0], 1, 0);
            if (at + 1 < pages_end) {
                start_scores();
                wgmma_wait<1>();
                release(2);
            } else {
                wgmma_wait<0>();
                release(0);
            }
            keep_in_registers(fragments);
            add(x[1], 1, 1);
        }
        if (t == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) sum[8 * i] = all[i], most[8 * i] = max[i];
        __syncwarp();
    }
#else
    constexpr int OWN_PAGES = 4 / SHARED_BY; // of a split, whose scores the warpgroup has
    // Of warpgroups that share queries, or of one alone: a barrier, and one that shows that nobody reads probabilities
    // any more, at which a thread arrives once when it has read them, and once more before it writes the next.
    const int barriers = SHARED_BY == 1 ? 3 + 2 * (warp >> 2) : 3;
    auto group_sync = [&]() { asm volatile("bar.sync %0, %1;" ::"r"(barriers), "n"(128 * SHARED_BY) : "memory"); };
    auto free_probabilities = [&]() {
        asm volatile("bar.arrive %0, %1;" ::"r"(barriers + 1), "n"(256 * SHARED_BY) : "memory");
    };
    auto wait_for_probabilities = [&]() {
        asm volatile("bar.sync %0, %1;" ::"r"(barriers + 1), "n"(256 * SHARED_BY) : "memory");
    };
    // The row of a matrix of the warp's probabilities that the lane stores and loads.
    const u32 my_probabilities =
        probabilities_at + (tile * 2 + (lane >> 3 & 1)) * (PAGE_ROWS * 16) + (lane >> 4) * 128 + lane % 8 * 16;
    const ProbabilityDescriptor of_pages(probabilities_at +
                                         (SHARED_BY == 1 ? __shfl_sync(~0u, warp, 0) / 4 * (64 * PAGE_ROWS * 2) : 0));
    // In one place, for registers are few: scores of a page, then products with values.
    float x[16][4];
    float (&s)[8][4] = *(float (*)[8][4]) x;
    free_probabilities();
#pragma unroll 1
    for (u32 split = own.least / SPLIT_KEYS; split * SPLIT_KEYS < own.most; split++) {
        const bool units_are_pages_here = units_are_pages(a, split * SPLIT_KEYS);
#pragma unroll 1
        for (int o = 0; o < OWN_PAGES; o++) {
            const int page = o * SHARED_BY + half;
#pragma unroll
            for (int c = 0; c < COLUMN_CHUNKS; c++) {
                const StageDescriptor keys = acquire();
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 8; j++)
                    wgmma(s, of_group + (c * 8 + j) * 256, keys + (j / 2 * 4096 + j % 2 * 256), c > 0 || j > 0);
                wgmma_commit();
                if (c == 0) continue;
                wgmma_wait<1>();
                release(1);
            }
            wgmma_wait(s);
            release(0);
            if (o == 0) wait_for_probabilities();
            scale_and_mask(s, split * 4 + page);
            const PageSoftmax of(s);
#pragma unroll
            for (int j = 0; j < 4; j++)
                store_matrices(my_probabilities + page * PAGE_PROBABILITY_BYTES + j * 256, of.keys(j));
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; i++) found[page * 16 + 8 * i] = make_float2(of.max[i], of.sum[i]);
        }
        if (SHARED_BY == 1) __syncwarp();
        else group_sync();
        float max[2], by_before[2];
        u32 rescales[OWN_PAGES][2];
        bool same = true;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const SplitSoftmax unit([&](int page) { return found[page * 16 + 8 * i]; });
            const float was = most[8 * i], now = larger(was, unit.max), before = softmax_rescale(was, now);
            max[i] = unit.max;
            same &= before == 1.0f;
            if (half == 0 && t == 0) {
                float v = sum[8 * i] * before;
                for (int page = 0; page < 4 && units_are_pages_here; page++)
                    v = fmaf(found[page * 16 + 8 * i].y, softmax_rescale(found[page * 16 + 8 * i].x, now), v);
                sum[8 * i] = units_are_pages_here ? v : fmaf(unit.sum, softmax_rescale(unit.max, now), v);
            }
            __syncwarp();
            if (t == 0) most[8 * i] = now;
            by_before[i] = before;
#pragma unroll
            for (int o = 0; o < OWN_PAGES; o++)
                rescales[o][i] = SHARED_BY == 1 ? unit.rescales[o]
                                 : half == 0    ? unit.rescales[2 * o]
                                                : unit.rescales[2 * o + 1];
        }
        __syncwarp();
        if (!units_are_pages_here) {
#pragma unroll
            for (int o = 0; o < OWN_PAGES; o++) {
                const int page = o * SHARED_BY + half;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 at = my_probabilities + page * PAGE_PROBABILITY_BYTES + j * 256;
                    store_matrices(at, rescale_fragment(load_matrices(at), rescales[o][0], rescales[o][1]));
                }
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        group_sync();
        if (!__all_sync(~0u, same)) rescale_totals(by_before);
        auto add = [&](float (&to)[16][4], float f0, float f1) {
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) to[n][i] = fmaf(x[n][i], i < 2 ? f0 : f1, to[n][i]);
        };
        auto page_factor = [&](int page, int i) { return softmax_rescale(found[page * 16 + 8 * i].x, most[8 * i]); };
#pragma unroll
        for (int c = 0; c < 2; c++) {
            bool chained = false;
#pragma unroll 1
            for (int page = 0; page < 4; page++) {
                const StageDescriptor values = acquire();
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    wgmma(x, of_pages + (page * PAGE_PROBABILITY_BYTES + j * 256),
                          values + (j / 2 * (STAGE_BYTES / 2) + j % 2 * 256), chained || j > 0);
                wgmma_commit();
                if (units_are_pages_here) {
                    wgmma_wait(x);
                    release(0);
                    add(totals[c], page_factor(page, 0), page_factor(page, 1));
                } else {
                    if (chained) {
                        wgmma_wait<1>();
                        release(1);
                    }
                    chained = true;
                }
            }
            if (!units_are_pages_here) {
                wgmma_wait(x);
                release(0);
                add(totals[c], softmax_rescale(max[0], most[0]), softmax_rescale(max[1], most[8]));
            }
        }
        free_probabilities();
    }
    wait_for_probabilities(); // no barrier is left half full
#endif
    __syncwarp();
    store_results(a, h, QueryTile(a, place[0], place[1], BLOCK_QUERIES, tile), tile, half, totals, sum);
}
