// Times the matrix products of a dense layer on a GPU from compute capability 9.0 on, with few rows: each kind alone,
// one after the other as a recorded step launches them, and in the chain of a layer with the small kernels between them
// (residual and norm, gate) but without attention. Shapes are those of a sliding layer of Gemma 4 31B in codes of 4
// bits in groups of 64, weights are random. Needs nvcc of CUDA 12.4 or later:
//
//   nvcc -O3 -std=c++17 -arch=sm_90 --fmad=false --expt-relaxed-constexpr -w -I. -o products benchmarks/products.cu
//   products [ROWS ...]
//
// from the repository's root; a changed copy of crates/cuda/kernels is measured with -DKERNELS_MOVED and `-I FOLDER`
// (the copy as FOLDER/kernels). -DNO_COPIES leaves out what brings weights and activations to shared memory: what is
// left is the time of the instructions. -DNO_PRODUCTS leaves out dequantization and tensor cores: what is left is the
// time of the memory. One line of JSON a figure: microseconds, and gigabytes of weights a second.
#include <algorithm>
#include <functional>
#include <vector>

#ifdef KERNELS_MOVED
#define KERNEL_FILE(name) <kernels/name>
#else
#define KERNEL_FILE(name) <crates/cuda/kernels/name>
#endif
// The host's pass sees the kernels of this capability, too.
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#define HOST_PASS
#endif
// What crates/cuda/src/constants.rs and the packing of the weights define.
#define FORMAT 4
#define GROUP 64
#define GEMV_PIPELINE_BYTES 12384
#define GEMV_REDUCTION_BYTES 2048
#define PAIRS_PER_THREAD 3
#define ROW_FOLD 1
#define GLU_CHUNKS 4
#include KERNEL_FILE(common.cuh)
#undef KERNEL
#define KERNEL __global__ void
#include KERNEL_FILE(math.cuh)
#include KERNEL_FILE(mbarrier.cuh)
#include KERNEL_FILE(rows.cuh)
#include KERNEL_FILE(elementwise.cu)
#include KERNEL_FILE(row_norm.cu)
#ifdef NO_COPIES
#define cp_async_16(to, from) ((void) (from))
#define cp_async_16_if(yes, to, from) ((void) (from))
#endif
// As many row tiles at once as src/matmul.rs chooses for these shapes and 132 multiprocessors.
#define SLICES 8
#define STAGE_ROW_TILES 4
namespace slices_8 {
#include KERNEL_FILE(weight_tile.cuh)
#ifdef NO_PRODUCTS
#define mma_tile(sums, tile, b) (sums[0][0] += __uint_as_float(b[0].w[0]))
#endif
#include KERNEL_FILE(gemv_pipelined.cuh)
#include KERNEL_FILE(gemv_pipelined.cu)
#undef mma_tile
} // namespace slices_8
#undef SLICES
#undef STAGE_ROW_TILES
#define SLICES 16
#define STAGE_ROW_TILES 3
namespace slices_16 {
#include KERNEL_FILE(weight_tile.cuh)
#ifdef NO_PRODUCTS
#define mma_tile(sums, tile, b) (sums[0][0] += __uint_as_float(b[0].w[0]))
#endif
#include KERNEL_FILE(gemv_pipelined.cuh)
#include KERNEL_FILE(gemv_pipelined.cu)
} // namespace slices_16
#ifdef HOST_PASS
#undef __CUDA_ARCH__
#endif

#include "graph.cuh"

constexpr int LAYERS = 16, HIDDEN = 5376, INNER = 21504, QKV = 16384, HEADS = 8192, MOST_ROWS = 8, TILE_SIZE = 576;

// Tiles of codes at random, with scales and biases of ordinary size, and a factor for each row tile behind them.
__global__ void fill_tiles(u32 *words, u64 tiles, u64 factors, u32 seed) {
    const u64 first = (u64) blockIdx.x * blockDim.x + threadIdx.x, step = (u64) gridDim.x * blockDim.x;
    for (u64 i = first; i < tiles * (TILE_SIZE / 4); i += step) {
        u64 v = (i + seed) * 0x9e3779b97f4a7c15ull;
        v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9ull;
        const u32 r = (u32) (v >> 32);
        const u32 scale_and_bias = (0x5800u + (r & 0x7ff)) | (0x9800u + (r >> 12 & 0x3ff)) << 16;
        words[i] = i % (TILE_SIZE / 4) < 128 ? r : scale_and_bias;
    }
    for (u64 i = first; i < factors; i += step) ((float *) words)[tiles * (TILE_SIZE / 4) + i] = 0.0625f;
}
__global__ void fill_floats(float *x, u64 n, u32 seed) {
    const u64 first = (u64) blockIdx.x * blockDim.x + threadIdx.x, step = (u64) gridDim.x * blockDim.x;
    for (u64 i = first; i < n; i += step) {
        u64 v = (i + seed) * 0x9e3779b97f4a7c15ull;
        v = (v ^ v >> 31) * 0xbf58476d1ce4e5b9ull;
        x[i] = (float) (int) (u32) (v >> 32) * 0x1p-31f;
    }
}

int multiprocessors;

template <class T>
T *allocate(u64 count) {
    T *p;
    CHECK(cudaMalloc(&p, count * sizeof(T)));
    CHECK(cudaMemset(p, 0, count * sizeof(T)));
    return p;
}
// The median of a recorded graph's microseconds.
double time_graph(const std::function<void()> &work) {
    const cudaGraphExec_t recorded = record(work);
    std::vector<float> all;
    for (int turn = 0; turn < 15; turn++)
        all.push_back(elapsed([&] { CHECK(cudaGraphLaunch(recorded, stream)); }) * 1e3f);
    std::sort(all.begin(), all.end());
    CHECK(cudaGraphExecDestroy(recorded));
    return all[all.size() / 2];
}

struct Matrix {
    u32 *words;
    int rows, tiles; // tiles of a row tile
    u64 bytes;
    Matrix(int rows, int cols) : rows(rows), tiles(cols / 64) {
        static u32 seed = 1;
        const u64 all = (u64) (rows / 16) * tiles;
        bytes = all * TILE_SIZE + rows / 16 * 4;
        words = allocate<u32>(bytes / 4);
        fill_tiles<<<1024, 256, 0, stream>>>(words, all, rows / 16, seed += 77777);
    }
};
float *random_floats(u64 n) {
    static u32 seed = 5;
    float *x = allocate<float>(n);
    fill_floats<<<256, 256, 0, stream>>>(x, n, seed += 1234567);
    return x;
}
Activations random_activations(int cols) {
    const Activations x = {allocate<u16>((u64) MOST_ROWS * cols), allocate<float>(MOST_ROWS * cols / 64), cols};
    launch(to_activations, dim3((cols + 511) / 512, MOST_ROWS), 256, 0, 1, random_floats((u64) MOST_ROWS * cols), cols,
           x);
    return x;
}

typedef std::vector<std::pair<Matrix, float *>> Group;
template <class Matrices>
Matrices matrices_of(const Group &group, int &row_tiles) {
    Matrices m = {};
    row_tiles = 0;
    for (int i = 0; i < 4; i++) m.first_block[i] = 0x7fffffff;
    for (size_t i = 0; i < group.size(); i++) {
        m.w[i] = (const u8 *) group[i].first.words;
        m.y[i] = group[i].second;
        m.rows[i] = group[i].first.rows;
        m.first_block[i] = row_tiles;
        row_tiles += group[i].first.rows / 16;
    }
    return m;
}
// As crates/cuda/src/matmul.rs cuts a sum and lays out a launch.
void product(const Group &group, Activations x, int rows) {
    const int tiles = group[0].first.tiles, slices = tiles < 128 ? 8 : 16, per_slice = (tiles + slices - 1) / slices;
    const int shared = slices * (GEMV_PIPELINE_BYTES + GEMV_REDUCTION_BYTES);
    int row_tiles;
#define LAUNCH(space, blocks)                                                                                          \
    do {                                                                                                               \
        const auto m = matrices_of<space::MatrixGroup>(group, row_tiles);                                              \
        const auto kernel = rows <= 3 ? space::gemv_pipelined_3 : space::gemv_pipelined_8;                             \
        launch(kernel, dim3(std::min(row_tiles, blocks)), slices * 32, shared, 1, m, x, rows, tiles, per_slice,        \
               row_tiles);                                                                                             \
    } while (0)
    if (slices == 8) LAUNCH(slices_8, 2 * multiprocessors);
    else LAUNCH(slices_16, multiprocessors);
}
void residual_norm(float *from, float *x, float *y, float *weights, float *normed, Activations f16, int rows) {
    NormEpilogue norms = {};
    norms.weight[0] = weights;
    norms.y[0] = normed;
    norms.f16[0] = f16;
    norms.count = 1;
    const int cluster = rows <= 4 ? 4 : 1;
    launch(add_norm, dim3(rows * cluster), 1024 / cluster, 0, cluster, from, x, y, weights, HIDDEN, 1.0f, 1e-6f, norms);
}

int main(int argc, char **argv) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    multiprocessors = properties.multiProcessorCount;
    struct Layer {
        Matrix qkv = {QKV, HIDDEN}, o = {HIDDEN, HEADS}, gate = {INNER, HIDDEN}, up = {INNER, HIDDEN},
               down = {HIDDEN, INNER};
    };
    const std::vector<Layer> layers(LAYERS);
    const Activations heads = random_activations(HEADS), hidden = random_activations(HIDDEN),
                      inner = random_activations(INNER);
    float *residual = random_floats(MOST_ROWS * HIDDEN), *sum = random_floats(MOST_ROWS * HIDDEN),
          *y = random_floats(MOST_ROWS * HIDDEN), *normed = random_floats(MOST_ROWS * HIDDEN),
          *weights = random_floats(HIDDEN), *gate = random_floats((u64) MOST_ROWS * INNER),
          *up = random_floats((u64) MOST_ROWS * INNER), *qkv = random_floats((u64) MOST_ROWS * QKV);
    u32 *unread = allocate<u32>(1);
    CHECK(cudaDeviceSynchronize());
    const Layer &one = layers[0];
    auto print = [&](const char *what, int rows, u64 bytes, const std::function<void(const Layer &)> &work) {
        const double us = time_graph([&] {
                              for (const Layer &layer : layers) work(layer);
                          }) /
                          LAYERS;
        printf("{\"device\":\"%s\",\"what\":\"%s\",\"rows\":%d,\"us\":%.2f,\"gb_per_s\":%.0f}\n", properties.name, what,
               rows, us, bytes / us / 1e3);
    };
    print("read", 0, one.gate.bytes, [&](const Layer &l) {
        launch(read_all, dim3(4 * multiprocessors), 512, 0, 1, (const uint4 *) l.gate.words, l.gate.bytes / 16, unread);
    });
    std::vector<int> all_rows;
    for (int i = 1; i < argc; i++) all_rows.push_back(std::min(MOST_ROWS, std::max(1, atoi(argv[i]))));
    if (all_rows.empty()) all_rows = {1, 4, 8};
    for (int rows : all_rows) {
        const u64 gate_up = one.gate.bytes + one.up.bytes, all = gate_up + one.qkv.bytes + one.o.bytes + one.down.bytes;
        auto gate_and_up = [&](const Layer &l) { product({{l.gate, gate}, {l.up, up}}, hidden, rows); };
        auto of_qkv = [&](const Layer &l) { product({{l.qkv, qkv}}, hidden, rows); };
        auto of_o = [&](const Layer &l) { product({{l.o, y}}, heads, rows); };
        auto of_down = [&](const Layer &l) { product({{l.down, y}}, inner, rows); };
        print("gate, up", rows, gate_up, gate_and_up);
        print("q, k, v", rows, one.qkv.bytes, of_qkv);
        print("o", rows, one.o.bytes, of_o);
        print("down", rows, one.down.bytes, of_down);
        print("layer without attention", rows, all, [&](const Layer &l) {
            of_o(l);
            residual_norm(residual, sum, y, weights, normed, hidden, rows);
            gate_and_up(l);
            const GluArgs gates = {gate, up, INNER, INNER, gate, nullptr, INNER, 1, inner};
            launch(glu, dim3((INNER + 511) / 512, rows), 256, 0, 1, gates);
            of_down(l);
            residual_norm(sum, residual, y, weights, normed, hidden, rows);
            of_qkv(l);
        });
    }
    return 0;
}
