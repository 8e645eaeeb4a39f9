// Times what it takes a GPU to fetch a kernel's instructions: kernels of straight code, which run once each, as those
// of a decoding step do, launched one after the other from a recorded graph. Each takes turns with as many others of
// the same length as `kernels` says, less one; a single kernel finds its instructions where the launch before has left
// them. Needs nvcc of CUDA 12.4 or later:
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o instructions benchmarks/instructions.cu && ./instructions
//
// One line of JSON a figure: microseconds of a launch.
#include <cstdio>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t error = (call);                                                                                    \
        if (error != cudaSuccess) {                                                                                    \
            fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(error));                                     \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

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
int measure(int multiprocessors, int warps) {
    constexpr int LAUNCHES = 320, TURNS = 12;
    cudaStream_t stream;
    cudaEvent_t before, after;
    float *y;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    CHECK(cudaMalloc(&y, 4096));
    for (int kernels = 1; kernels <= 16; kernels *= 2) {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        for (int i = 0; i < LAUNCHES; i++) {
            cudaLaunchAttribute attribute;
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t config = {};
            config.gridDim = dim3(multiprocessors);
            config.blockDim = dim3(32 * warps);
            config.stream = stream;
            config.attrs = &attribute;
            config.numAttrs = 1;
            CHECK(cudaLaunchKernelEx(&config, kernel_of<COUNT>(i % kernels), y, 0.5f));
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        float best = 1e9f;
        for (int turn = 0; turn < TURNS; turn++) {
            float ms;
            CHECK(cudaEventRecord(before, stream));
            CHECK(cudaGraphLaunch(executable, stream));
            CHECK(cudaEventRecord(after, stream));
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaEventElapsedTime(&ms, before, after));
            best = ms < best ? ms : best;
        }
        printf("{\"instructions\":%d,\"warps\":%d,\"kernels\":%d,\"us\":%.2f}\n", COUNT, warps, kernels,
               best * 1e3 / LAUNCHES);
    }
    return 0;
}
int main() {
    int multiprocessors;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    for (int warps : {4, 8, 16}) {
        if (measure<256>(multiprocessors, warps) || measure<512>(multiprocessors, warps) ||
            measure<1024>(multiprocessors, warps) || measure<2048>(multiprocessors, warps) ||
            measure<4096>(multiprocessors, warps))
            return 1;
    }
}
