// What the programs here share that time kernels as the engine runs them: a step recorded as a CUDA graph, with
// programmatic dependent launch.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t error = (call);                                                                                    \
        if (error != cudaSuccess) {                                                                                    \
            fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(error));                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

cudaStream_t stream;

// Launches as crates/cuda/src/gpu.rs does: blocks may start before the kernel ahead has ended.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, int cluster, Arguments... arguments) {
    if (shared > 32 << 10)
        CHECK(cudaFuncSetAttribute((const void *) kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}
// Records what `work` launches.
template <class F>
cudaGraphExec_t record(F work) {
    cudaGraph_t graph;
    cudaGraphExec_t recorded;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    work();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&recorded, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return recorded;
}
// Milliseconds until all that `work` launches has run.
template <class F>
float elapsed(F work) {
    static cudaEvent_t before, after;
    if (!before) {
        CHECK(cudaEventCreate(&before));
        CHECK(cudaEventCreate(&after));
    }
    CHECK(cudaEventRecord(before, stream));
    work();
    CHECK(cudaEventRecord(after, stream));
    CHECK(cudaStreamSynchronize(stream));
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, before, after));
    return milliseconds;
}
