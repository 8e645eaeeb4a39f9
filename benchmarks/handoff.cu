// What it takes a GPU to hand a row of activations from one op of a step to the next: by kernels of a recorded graph
// with programmatic dependent launch, which is how the engine runs a step, and by barriers inside of one persistent
// kernel, which is the other way to run one. From compute capability 9.0 on:
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o handoff benchmarks/handoff.cu
//   handoff [COLUMNS ...]
//
// An op is a block a multiprocessor; each block reads the whole row, as a product reads its activations, sums it, and
// writes its part of the next row. Nothing else is done, so the time of an op is that of the handoff. One line of JSON
// a figure: microseconds an op, medians; the rows at the end are compared.
#include "graph.cuh"
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

constexpr int OPS = 400, THREADS = 256;

__device__ __forceinline__ float load(const float *p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
// The work of an op: everybody reads `x`; block b writes its part of `y`.
__device__ __forceinline__ void op(const float *x, float *y, int cols) {
    __shared__ float sums[THREADS / 32];
    float sum = 0.0f;
#pragma unroll 8
    for (int c = threadIdx.x; c < cols; c += THREADS) sum += load(x + c);
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < THREADS / 32; i++) sum += sums[i];
    for (int c = blockIdx.x * THREADS + threadIdx.x; c < cols; c += gridDim.x * THREADS)
        y[c] = load(x + c) + sum * 0x1p-20f;
    __syncthreads();
}
__global__ void one_op(const float *x, float *y, int cols) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    op(x, y, cols);
}
// Everybody counts one number up and watches it.
struct Counter {
    unsigned *counter;
    __device__ void wait(int turn) {
        if (threadIdx.x == 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
            unsigned seen;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
            while (seen < (turn + 1) * gridDim.x);
        }
        __syncthreads();
    }
};
// A number a block, which a thread of every block watches.
struct Flags {
    unsigned *flags;
    __device__ void wait(int turn) {
        if (threadIdx.x == 0)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flags + blockIdx.x), "r"(turn + 1) : "memory");
        if (threadIdx.x < gridDim.x) {
            unsigned seen;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flags + threadIdx.x) : "memory");
            while (seen < turn + 1);
        }
        __syncthreads();
    }
};
template <class Barrier>
__global__ void all_ops(float *a, float *b, int cols, Barrier barrier) {
    for (int i = 0; i < OPS; i++) {
        op(i % 2 ? b : a, i % 2 ? a : b, cols);
        barrier.wait(i);
    }
}

int main(int argc, char **argv) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    const int blocks = std::min(properties.multiProcessorCount, THREADS);
    std::vector<int> all_cols;
    for (int i = 1; i < argc; i++) all_cols.push_back(std::max(1, atoi(argv[i])));
    if (all_cols.empty()) all_cols = {256, 2560, 5376};
    for (int cols : all_cols) {
        float *a, *b;
        unsigned *words;
        CHECK(cudaMalloc(&a, cols * 4));
        CHECK(cudaMalloc(&b, cols * 4));
        CHECK(cudaMalloc(&words, THREADS * 4));
        std::vector<float> first(cols), row(cols), expected;
        for (int c = 0; c < cols; c++) first[c] = (c * 37 % 101) * 0.01f - 0.5f;
        auto measure = [&](const char *what, const std::function<void()> &work) {
            std::vector<float> all;
            for (int turn = 0; turn < 15; turn++) {
                CHECK(cudaMemcpyAsync(a, first.data(), cols * 4, cudaMemcpyHostToDevice, stream));
                CHECK(cudaMemsetAsync(words, 0, THREADS * 4, stream));
                all.push_back(elapsed(work) * 1e3f / OPS);
            }
            std::sort(all.begin(), all.end());
            CHECK(cudaMemcpy(row.data(), a, cols * 4, cudaMemcpyDeviceToHost));
            if (expected.empty()) expected = row;
            const bool equal = !memcmp(expected.data(), row.data(), cols * 4);
            printf("{\"device\":\"%s\",\"columns\":%d,\"what\":\"%s\",\"us_per_op\":%.3f,\"equal\":%s}\n",
                   properties.name, cols, what, all[all.size() / 2], equal ? "true" : "false");
        };
        const cudaGraphExec_t recorded = record([&] {
            for (int i = 0; i < OPS; i++)
                launch(one_op, dim3(blocks), THREADS, 0, 1, i % 2 ? b : a, i % 2 ? a : b, cols);
        });
        measure("kernels of a graph", [&] { CHECK(cudaGraphLaunch(recorded, stream)); });
        auto persistent = [&](auto barrier) {
            void *arguments[] = {&a, &b, &cols, &barrier};
            CHECK(cudaLaunchCooperativeKernel((const void *) all_ops<decltype(barrier)>, dim3(blocks), dim3(THREADS),
                                              arguments, 0, stream));
        };
        measure("persistent, one counter", [&] { persistent(Counter{words}); });
        measure("persistent, a flag a block", [&] { persistent(Flags{words}); });
        CHECK(cudaGraphExecDestroy(recorded));
        for (void *p : {(void *) a, (void *) b, (void *) words}) CHECK(cudaFree(p));
    }
    return 0;
}
