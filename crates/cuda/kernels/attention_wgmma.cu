// Attention of prompts by warpgroups (wgmma), for compute capability 9.0 alone: keys and values of 16 bits, heads of
// 256 or 512 columns. The bits are those of attention.cu: tensor cores sum 16 columns, or keys, at a time there and
// here.
//
//                 global             shared                               registers
//                 q -- f16 ------->  queries ----------------------> A +
//   producer warp keys,   -- TMA --> [stages] of 128 columns ------> B + wgmma -> scores - softmax of a page +
//   producer warp values, -- TMA --> [stages] of 128 columns ------> B +                                     |
//                                    probabilities <---------------------------------------------------------+
//                                                  +-----------------> A + wgmma -> x - rescale -> totals -> y
//
// Two consumer warpgroups multiply, and a producer warp for each of their pipelines has the copy engine fill STAGES
// stages of 128 columns of a page's keys or values. With heads of 256 columns a warpgroup has 64 queries of its own,
// and both read one pipeline. With 512 the two share 64 queries: each has the scores of every other page and half of
// the output's columns, with half of the stages. A split is taken at a time: the scores of its pages, which become
// probabilities in shared memory, where a lane finds its own again; then its values, 128 columns after the other.

#define SHARED_BY (HEAD_DIM / 256)      // warpgroups that share queries
#define BLOCK_QUERIES (128 / SHARED_BY) // queries
#define STAGE_BYTES 16384
#define PAGE_BYTES (HEAD_DIM * PAGE_ROWS * 2)      // of a head's keys, and of its values
#define QUERY_BYTES (BLOCK_QUERIES * HEAD_DIM * 2) // [BLOCK / 8, HEAD / 8, 8, 8]
#define PROBABILITY_BYTES                                                                                              \
    (BLOCK_QUERIES * SPLIT_KEYS * 2)      // [BLOCK / 16, 4, 4, 32, 8] of tiles, pages, 16 keys and lanes
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

extern __shared__ __align__(128) u8 smem[];
// Attention of a block of queries to all keys that they see. `h` takes its results in f16, unless the stride of `h` is
// 0; where `h` takes them, `a.y` may be null.
KERNEL __launch_bounds__(384, 1) attention_wgmma(AttentionArgs a, Activations h) {
    constexpr int RING_STAGES = STAGES / SHARED_BY, COLUMN_CHUNKS = HEAD_DIM / 128;
    __shared__ u64 full[2 * STAGES];
    u64 *const empty = full + STAGES;
    // In shared memory, for registers are scarce: which queries, and the keys that all of them see.
    __shared__ u32 place[2], whole[2];
    u8 *queries = smem;
    uint4 *probabilities = (uint4 *) (queries + QUERY_BYTES);
    float2 *page_sums = (float2 *) ((u8 *) probabilities + PROBABILITY_BYTES);
    float *sum = (float *) ((u8 *) page_sums + SUM_BYTES); // [BLOCK] so far
    float *most = sum + BLOCK_QUERIES;                     // [8, 16] of warps: maximum so far
    const u32 stages_at = smem_address(most + 8 * 16);
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
    auto my_page = [&](int page) { return SHARED_BY == 1 || (page & 1) == half; };
    if (threadIdx.x == 0) {
        u32 unused;
        visible_keys(a, own.row(own.count - 1), whole[0], unused);
        visible_keys(a, own.row(0), unused, whole[1]);
    }
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp >= 8 + SHARED_BY) return;
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
        for (u32 split = own.least / SPLIT_KEYS; split * SPLIT_KEYS < own.most; split++) {
            const u32 pages = own.load_page_of_split(table, split);
            for (int i = 0; i < 4; i++) {
                const u32 page = __shfl_sync(~0u, pages, i);
                if (page == NO_PAGE || !my_page(i)) continue;
                const u8 *from = a.keys + ((u64) page * a.kv_heads + own.kv_head) * PAGE_BYTES;
                for (int c = 0; c < COLUMN_CHUNKS; c++) produce(from + c * STAGE_BYTES, STAGE_BYTES / 2);
            }
            for (int c = 2 * half; c < 2 * half + 2; c++)
                for (int i = 0; i < 4; i++) {
                    const u32 page = __shfl_sync(~0u, pages, i);
                    if (page == NO_PAGE) continue;
                    const u8 *from = a.values + ((u64) page * a.kv_heads + own.kv_head) * PAGE_BYTES;
                    produce(from + c * (STAGE_BYTES / 2), PAGE_BYTES / 2);
                }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    // A warp has 8 queries at a time, 16 columns an instruction.
#pragma unroll 1
    for (int q = warp * 8 + g; q < BLOCK_QUERIES; q += 64)
#pragma unroll 1
        for (int first = 4 * t; first < HEAD_DIM; first += 256) {
            u8 *to = queries + q / 8 * HEAD_DIM * 16 + first / 8 * 128 + q % 8 * 16 + first % 8 * 2;
            float4 v[16];
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] = own.load(a, q, first + i * 16);
#pragma unroll
            for (int i = 0; i < 16; i++) *(uint2 *) (to + i * 256) = QueryTile::to_f16(v[i]);
        }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    auto consumers_sync = []() { asm volatile("bar.sync 1, 256;" ::: "memory"); };
    const QueryDescriptor of_group(smem_address(queries) +
                                   (SHARED_BY == 1 ? __shfl_sync(~0u, warp, 0) / 4 * (64 * HEAD_DIM * 2) : 0));
    uint4 *mine = probabilities + tile * (4 * 4 * 32) + lane;
    float2 *found = page_sums + tile * (4 * 16) + g;
    consumers_sync();
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
#pragma unroll 1
    for (u32 split = own.least / SPLIT_KEYS; split * SPLIT_KEYS < own.most; split++) {
        const u32 pages = own.load_page_of_split(table, split);
        const bool units_are_pages_here = units_are_pages(a, split * SPLIT_KEYS);
#pragma unroll 1
        for (int page = 0; page < 4; page++) {
            if (!my_page(page)) continue;
            if (__shfl_sync(~0u, pages, page) == NO_PAGE) {
                if (t == 0) found[page * 16] = found[page * 16 + 8] = make_float2(-INF, 0.0f);
                continue;
            }
            float s[8][4];
            // Stages whose products run while those of the next one are committed; with 512 columns registers are few.
            constexpr int COMMITTED = SHARED_BY == 1;
#pragma unroll
            for (int c = 0; c < COLUMN_CHUNKS; c++) {
                const StageDescriptor keys = acquire();
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 8; j++)
                    wgmma(s, of_group + (c * 8 + j) * 256, keys + (j / 2 * 4096 + j % 2 * 256), c > 0 || j > 0);
                wgmma_commit();
                if (c < COMMITTED) continue;
                if (COMMITTED > 0) wgmma_wait<1>();
                else wgmma_wait(s);
                release(COMMITTED);
            }
            if (COMMITTED > 0) {
                wgmma_wait(s);
                release(0);
            }
            const u32 at = split * 4 + page;
            if (whole[0] <= at * PAGE_ROWS && whole[1] >= (at + 1) * PAGE_ROWS) {
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[n][i] *= a.scale * LOG2E;
            } else {
                const QueryTile again(a, place[0], place[1], BLOCK_QUERIES, tile);
#pragma unroll
                for (int n = 0; n < 8; n++) again.mask(s[n], at, n, a.scale * LOG2E);
            }
            const PageSoftmax p(s);
#pragma unroll
            for (int j = 0; j < 4; j++) mine[(page * 4 + j) * 32] = p.keys(j);
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; i++) found[page * 16 + 8 * i] = make_float2(p.max[i], p.sum[i]);
        }
        if (SHARED_BY == 1) __syncwarp();
        else consumers_sync();
        float max[2], by_before[2];
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
        }
        __syncwarp();
        if (!__all_sync(~0u, same))
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) totals[c][n][i] *= by_before[i >> 1];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float x[16][4];
            bool chained = false;
            auto add = [&](float f0, float f1) {
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) totals[c][n][i] = fmaf(x[n][i], i < 2 ? f0 : f1, totals[c][n][i]);
            };
#pragma unroll 1
            for (int page = 0; page < 4; page++) {
                if (__shfl_sync(~0u, pages, page) == NO_PAGE) continue;
                const float of[2] = {found[page * 16].x, found[page * 16 + 8].x};
                u32 p[4][4], rescales[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float f = units_are_pages_here ? 1.0f : softmax_rescale(of[i], max[i]);
                    rescales[i] = pack_f16x2(f, f);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint4 v = rescale_fragment(mine[(page * 4 + j) * 32], rescales[0], rescales[1]);
                    p[j][0] = v.x, p[j][1] = v.y, p[j][2] = v.z, p[j][3] = v.w;
                }
                const StageDescriptor values = acquire();
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    wgmma(x, p[j], values + (j / 2 * (STAGE_BYTES / 2) + j % 2 * 256), chained || j > 0);
                wgmma_commit();
                wgmma_wait(x);
                release(0);
                if (units_are_pages_here) add(softmax_rescale(of[0], most[0]), softmax_rescale(of[1], most[8]));
                else chained = true;
            }
            if (!units_are_pages_here) add(softmax_rescale(max[0], most[0]), softmax_rescale(max[1], most[8]));
        }
        if (SHARED_BY > 1) consumers_sync(); // nobody reads the probabilities
        else __syncwarp();
    }
    __syncwarp();
    const QueryTile again(a, place[0], place[1], BLOCK_QUERIES, tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int q = tile * 16 + g + 8 * i;
        if (q >= again.count) continue;
        const float of = sum[8 * i];
        const u64 row = again.row(q);
        const int column = again.head(q) * HEAD_DIM + half * 256;
        float *y = a.y + row * a.heads * HEAD_DIM + column + 2 * t;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int n = 0; n < 16; n++) {
                totals[c][n][2 * i] /= of;
                totals[c][n][2 * i + 1] /= of;
                if (a.y) *(float2 *) (y + c * 128 + n * 8) = make_float2(totals[c][n][2 * i], totals[c][n][2 * i + 1]);
            }
        if (h.stride == 0) continue;
        // Tiles of 64 columns, as `store_activation_tile` does; four lanes have them.
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                u32 largest = 0;
#pragma unroll
                for (int n = part * 8; n < part * 8 + 8; n++)
                    largest = max(largest,
                                  __float_as_uint(larger(fabsf(totals[c][n][2 * i]), fabsf(totals[c][n][2 * i + 1]))));
#pragma unroll
                for (int o = 1; o < 4; o *= 2) largest = max(largest, __shfl_xor_sync(0xfu << (lane & 28), largest, o));
                const float up = normalising_scale(__uint_as_float(largest));
                const int first = column + c * 128 + part * 64;
                u32 *values = (u32 *) (h.values + row * h.stride + first) + t;
#pragma unroll
                for (int n = 0; n < 8; n++)
                    values[n * 4] = f32_to_f16(totals[c][part * 8 + n][2 * i] * up) |
                                    (u32) f32_to_f16(totals[c][part * 8 + n][2 * i + 1] * up) << 16;
                if (t == 0) h.scales[row * (h.stride / 64) + first / 64] = inverse_pow2(up);
            }
    }
}
