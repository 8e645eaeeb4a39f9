// How kernels of a mixture of experts (MoE) hand each other which experts a step's rows chose. A pair is a row and one
// of its experts, numbered row * top_k + rank; pairs are sorted by expert. moe_route.cu writes all of this.
//
//   lists        experts in use, then of each its number, first pair and end (u32); `pairs` has the sorted pairs
//   ActiveExpert the same with addresses, for few rows
//   ExpertBlock  an expert's pairs cut into blocks, for many rows

// An expert that rows chose: its matrix, its first pair and how many. A list of at most `max_experts` begins with one
// whose `count` says how many there are; a second list, of the experts' other matrix, follows it without one.
struct ActiveExpert {
    const u8 *w;
    int first, count;
};
// Some of an expert's pairs. A list begins with one whose `count` says how many there are.
struct ExpertBlock {
    u32 expert, first, count;
};
// Copies a step's list of experts and its at most `max_pairs` pairs to shared memory; returns how many experts there
// are. `meanwhile` is called while they are on their way. Only as many threads as there are pairs ask for them: all
// blocks do, and memory answers them one by one.
template <class F>
DEVICE int load_active_experts(ActiveExpert *list, int *pair, const ActiveExpert *from, const ActiveExpert *header,
                               const u32 *pairs, int max_pairs, F meanwhile) {
    __shared__ int used;
    const int i = threadIdx.x;
    uint4 own;
    int own_pair = 0;
    if (i < max_pairs) {
        own = __ldcg((const uint4 *) (from + i));
        own_pair = (int) __ldcg(pairs + i);
    }
    if (i == 0) used = __ldcg(&header->count);
    meanwhile();
    if (i < max_pairs) {
        *(uint4 *) (list + i) = own;
        pair[i] = own_pair;
    }
#pragma unroll 1
    for (int j = i + blockDim.x; j < max_pairs; j += blockDim.x) {
        *(uint4 *) (list + j) = __ldcg((const uint4 *) (from + j));
        pair[j] = (int) __ldcg(pairs + j);
    }
    __syncthreads();
    return used;
}
