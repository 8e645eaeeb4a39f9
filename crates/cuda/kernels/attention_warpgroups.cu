// Attention of prompts by warpgroups, for compute capability 9.0 alone, keys and values of 16
// bits, heads of 256 or 512 columns. Bits are those of attention.cu: tensor cores sum 16
// columns, or keys, at a time there and here.
//
// Two warpgroups multiply, and a warp of a third one for each of their rings has the copy
// engine fill STAGES stages of a page's keys or values of 128 columns. Where heads have 256
// columns, a warpgroup has 64 queries of its own, and both read one ring. Where they have 512,
// the two share 64 queries: each finds the scores of every other page and weighs half of the
// columns, with half of the stages. A split is taken at a time: the scores of its pages, which
// become probabilities in shared memory, where a lane finds its own again; then its values, 128
// columns after the other.

#define SHARE (HEAD / 256)      // warpgroups that share queries
#define BLOCK (128 / SHARE)     // queries
#define STAGE_BYTES 16384
#define QUERY_BYTES (BLOCK * HEAD * 2) // [BLOCK / 8, HEAD / 8, 8, 8]
#define POWER_BYTES (BLOCK * SPLIT * 2) // [BLOCK / 16, 4, 4, 32, 8] of tiles, pages, 16 keys and lanes
#define SUM_BYTES (BLOCK * 4 * 8) // [BLOCK / 16, 4, 16, 2] each page's maximum and sum

// Rows of 8 numbers lie side by side, 8 rows together; `along` bytes are between those of the
// 8 rows that come next, and 128 to the next 8 numbers.
__device__ __forceinline__ u64 matrix(u32 at, u32 along) { return (at & 0x3ffff) >> 4 | (u64) (128 >> 4) << 16 | (u64) (along >> 4) << 32; }

extern __shared__ __align__(128) u8 memory[];
KERNEL __launch_bounds__(384, 1) attend_prompt(Attend a) {
    constexpr int RING = STAGES / SHARE, CHUNKS = HEAD / 128;
    __shared__ u64 full[2 * STAGES];
    u64 *const empty = full + STAGES;
    // Of the queries, and what all of them see: registers are scarce.
    __shared__ u32 place[2], whole[2];
    u8 *queries = memory;
    uint4 *powers = (uint4 *) (queries + QUERY_BYTES);
    float2 *sums = (float2 *) ((u8 *) powers + POWER_BYTES);
    float *sum = (float *) ((u8 *) sums + SUM_BYTES); // [BLOCK] so far
    float *most = sum + BLOCK;                        // [8, 16] of warps: maximum so far
    const u32 ring = shared_at(most + 8 * 16);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    start_next();
    u32 seq, first;
    // Whose context is longest go first.
    if (!find(a, gridDim.x - 1 - blockIdx.x, BLOCK, seq, first)) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            arrivals(shared_at(full + i), 1);
            arrivals(shared_at(empty + i), 8 / SHARE);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        place[0] = seq, place[1] = first;
    }
    __syncthreads();
    const int half = SHARE == 1 ? 0 : warp < 8 ? warp >> 2 : warp - 8; // of columns, of pages and of stages
    const int tile = SHARE == 1 ? warp : warp & 3;
    const Queries own(a, seq, first, BLOCK, tile);
    const u32 *table = a.batch.table(seq, a.group);
    wait_for_previous();
    u32 turn = 0; // of the ring
    auto my_page = [&](int page) { return SHARE == 1 || (page & 1) == half; };
    if (threadIdx.x == 0) {
        u32 unused;
        visible(a, own.row(own.count - 1), whole[0], unused);
        visible(a, own.row(0), unused, whole[1]);
    }
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp >= 8 + SHARE) return;
        // Two pieces of a stage.
        auto fill = [&](const u8 *from, u32 second) {
            const int at = half * RING + turn % RING;
            await(shared_at(empty + at), turn / RING + 1);
            if (lane == 0) {
                const u32 to = ring + at * STAGE_BYTES, barrier = shared_at(full + at);
                expect(barrier, STAGE_BYTES);
                bring(to, from, STAGE_BYTES / 2, barrier);
                bring(to + STAGE_BYTES / 2, from + second, STAGE_BYTES / 2, barrier);
            }
            __syncwarp();
            turn++;
        };
        for (u32 split = own.least / SPLIT; split * SPLIT < own.most; split++) {
            const u32 pages = own.page_of(table, split);
            for (int i = 0; i < 4; i++) {
                const u32 page = __shfl_sync(~0u, pages, i);
                if (page == NO_PAGE || !my_page(i)) continue;
                const u8 *from = a.keys + ((u64) page * a.kv_heads + own.kv_head) * PAGE_BYTES;
                for (int c = 0; c < CHUNKS; c++) fill(from + c * STAGE_BYTES, STAGE_BYTES / 2);
            }
            for (int c = 2 * half; c < 2 * half + 2; c++)
                for (int i = 0; i < 4; i++) {
                    const u32 page = __shfl_sync(~0u, pages, i);
                    if (page == NO_PAGE) continue;
                    const u8 *from = a.values + ((u64) page * a.kv_heads + own.kv_head) * PAGE_BYTES;
                    fill(from + c * (STAGE_BYTES / 2), PAGE_BYTES / 2);
                }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    for (int i = threadIdx.x; i < BLOCK * (HEAD / 4); i += 256) {
        const int q = i / (HEAD / 4), c = i % (HEAD / 4) * 4;
        *(uint2 *) (queries + q / 8 * HEAD * 16 + c / 8 * 128 + q % 8 * 16 + c % 8 * 2) = Queries::rounded(own.load(a, q, c));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    auto meet = []() { asm volatile("bar.sync 1, 256;" ::: "memory"); };
    const u32 of_group = shared_at(queries) + (SHARE == 1 ? warp / 4 * (64 * HEAD * 2) : 0);
    uint4 *mine = powers + tile * (4 * 4 * 32) + lane;
    float2 *found = sums + tile * (4 * 16) + g;
    meet();
    auto taken = [&]() {
        const u32 at = half * RING + turn % RING;
        await(shared_at(full + at), turn / RING);
        return ring + at * STAGE_BYTES;
    };
    auto used = [&]() {
        __syncwarp();
        if (lane == 0) arrive(shared_at(empty + half * RING + turn % RING));
        turn++;
    };
    sum += tile * 16 + g;
    most += warp * 16 + g;
    if (t == 0) {
        if (half == 0) sum[0] = sum[8] = 0.0f;
        most[0] = most[8] = -INFINITE;
    }
    __syncwarp();
    float total[2][16][4];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[c][n][i] = 0.0f;
#pragma unroll 1
    for (u32 split = own.least / SPLIT; split * SPLIT < own.most; split++) {
        const u32 pages = own.page_of(table, split);
        const bool apart = fine(a, split * SPLIT);
#pragma unroll 1
        for (int page = 0; page < 4; page++) {
            if (!my_page(page)) continue;
            if (__shfl_sync(~0u, pages, page) == NO_PAGE) {
                if (t == 0) found[page * 16] = found[page * 16 + 8] = make_float2(-INFINITE, 0.0f);
                continue;
            }
            float s[8][4];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const u32 keys = taken();
                before_products();
#pragma unroll
                for (int j = 0; j < 8; j++) wgmma(s, matrix(of_group + (c * 8 + j) * 256, HEAD * 16), matrix(keys + j / 2 * 4096 + j % 2 * 256, 512), c > 0 || j > 0);
                await_products(s);
                used();
            }
            const u32 at = split * 4 + page;
            if (whole[0] <= at * PAGE_ROWS && whole[1] >= (at + 1) * PAGE_ROWS) {
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[n][i] *= a.scale * LOG2E;
            } else {
                const Queries again(a, place[0], place[1], BLOCK, tile);
#pragma unroll
                for (int n = 0; n < 8; n++) again.mask(s[n], at, n, a.scale * LOG2E);
            }
            const Powers p(s);
#pragma unroll
            for (int j = 0; j < 4; j++) mine[(page * 4 + j) * 32] = p.keys(j);
            if (t == 0)
#pragma unroll
                for (int i = 0; i < 2; i++) found[page * 16 + 8 * i] = make_float2(p.max[i], p.sum[i]);
        }
        if (SHARE == 1) __syncwarp();
        else meet();
        float max[2], by_before[2];
        bool same = true;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Together unit([&](int page) { return found[page * 16 + 8 * i]; });
            const float was = most[8 * i], now = larger(was, unit.max), before = rescale(was, now);
            max[i] = unit.max;
            same &= before == 1.0f;
            if (half == 0 && t == 0) {
                float v = sum[8 * i] * before;
                for (int page = 0; page < 4 && apart; page++) v = fmaf(found[page * 16 + 8 * i].y, rescale(found[page * 16 + 8 * i].x, now), v);
                sum[8 * i] = apart ? v : fmaf(unit.sum, rescale(unit.max, now), v);
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
                    for (int i = 0; i < 4; i++) total[c][n][i] *= by_before[i >> 1];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float x[16][4];
            bool chained = false;
            auto add = [&](float f0, float f1) {
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) total[c][n][i] = fmaf(x[n][i], i < 2 ? f0 : f1, total[c][n][i]);
            };
#pragma unroll 1
            for (int page = 0; page < 4; page++) {
                if (__shfl_sync(~0u, pages, page) == NO_PAGE) continue;
                const float of[2] = {found[page * 16].x, found[page * 16 + 8].x};
                u32 p[4][4], by[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float f = apart ? 1.0f : rescale(of[i], max[i]);
                    by[i] = pair(f, f);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint4 v = scaled(mine[(page * 4 + j) * 32], by[0], by[1]);
                    p[j][0] = v.x, p[j][1] = v.y, p[j][2] = v.z, p[j][3] = v.w;
                }
                const u32 values = taken();
                before_products();
#pragma unroll
                for (int j = 0; j < 4; j++) wgmma(x, p[j], matrix(values + j / 2 * (STAGE_BYTES / 2) + j % 2 * 256, 512), chained || j > 0);
                await_products(x);
                used();
                if (apart) add(rescale(of[0], most[0]), rescale(of[1], most[8]));
                else chained = true;
            }
            if (!apart) add(rescale(max[0], most[0]), rescale(max[1], most[8]));
        }
        if (SHARE > 1) meet(); // the probabilities are used
        else __syncwarp();
    }
    __syncwarp();
    const Queries again(a, place[0], place[1], BLOCK, tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int q = tile * 16 + g + 8 * i;
        if (q >= again.count) continue;
        const float of = sum[8 * i];
        float *y = a.y + ((u64) again.row(q) * a.heads + again.head(q)) * HEAD + half * 256 + 2 * t;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int n = 0; n < 16; n++) *(float2 *) (y + c * 128 + n * 8) = make_float2(total[c][n][2 * i] / of, total[c][n][2 * i + 1] / of);
    }
}
