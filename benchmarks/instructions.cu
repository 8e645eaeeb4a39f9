// Times what it takes a GPU to fetch a kernel's instructions: kernels of straight code, which run once each, as those
// of a decoding step do, launched one after the other from a recorded graph. Each takes turns with as many others of
// the same length as `kernels` says, less one; a single kernel finds its instructions where the launch before has left
// them. Needs nvcc of CUDA 12.4 or later:
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o instructions benchmarks/instructions.cu && ./instructions
//
// One line of JSON a figure: microseconds of a launch.
#include "graph.cuh"

// So many instructions, of which four can run at once.
template <int COUNT>
struct Code {
    static __device__ __forceinline__ void run(float (&v)[4], float a) {
        Code<COUNT / 2>::run(v, a);
        Code<COUNT - COUNT / 2>::run(v, a);
    }
};
template <>
struct Code<4> {
    static __device__ __forceinline__ void run(float (&v)[4], float a) {
        asm volatile("fma.rn.f32 %0, %0, %4, %1; fma.rn.f32 %1, %1, %4, %2; "
                     "fma.rn.f32 %2, %2, %4, %3; fma.rn.f32 %3, %3, %4, %0;"
                     : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
                     : "f"(a));
    }
};
template <int NUMBER, int COUNT>
__global__ void kernel(float *y, float a) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float v[4] = {a, a + 1, a + 2, (float) NUMBER};
    Code<COUNT>::run(v, a);
    if (v[0] + v[1] + v[2] + v[3] == 12345.0f) y[threadIdx.x] = v[0];
}
typedef void (*Kernel)(float *, float);
template <int COUNT>
Kernel kernel_of(int number) {
    static const Kernel all[16] = {kernel<0, COUNT>,  kernel<1, COUNT>,  kernel<2, COUNT>,  kernel<3, COUNT>,
                                   kernel<4, COUNT>,  kernel<5, COUNT>,  kernel<6, COUNT>,  kernel<7, COUNT>,
                                   kernel<8, COUNT>,  kernel<9, COUNT>,  kernel<10, COUNT>, kernel<11, COUNT>,
                                   kernel<12, COUNT>, kernel<13, COUNT>, kernel<14, COUNT>, kernel<15, COUNT>};
    return all[number];
}
template <int COUNT>
void measure(int multiprocessors, int warps) {
    constexpr int LAUNCHES = 320, TURNS = 12;
    float *y;
    CHECK(cudaMalloc(&y, 4096));
    for (int kernels = 1; kernels <= 16; kernels *= 2) {
        const cudaGraphExec_t recorded = record([&] {
            for (int i = 0; i < LAUNCHES; i++)
                launch(kernel_of<COUNT>(i % kernels), dim3(multiprocessors), 32 * warps, 0, 1, y, 0.5f);
        });
        float best = 1e9f;
        for (int turn = 0; turn < TURNS; turn++) {
            const float ms = elapsed([&] { CHECK(cudaGraphLaunch(recorded, stream)); });
            best = ms < best ? ms : best;
        }
        CHECK(cudaGraphExecDestroy(recorded));
        printf("{\"instructions\":%d,\"warps\":%d,\"kernels\":%d,\"us\":%.2f}\n", COUNT, warps, kernels,
               best * 1e3 / LAUNCHES);
    }
    CHECK(cudaFree(y));
}
int main() {
    int multiprocessors;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaStreamCreate(&stream));
    for (int warps : {4, 8, 16}) {
        measure<256>(multiprocessors, warps);
        measure<512>(multiprocessors, warps);
        measure<1024>(multiprocessors, warps);
        measure<2048>(multiprocessors, warps);
        measure<4096>(multiprocessors, warps);
    }
}
