// How kernels of a mixture of experts (MoE) hand each other which experts a step's rows chose. A pair is a row and one
// of its experts, numbered row * top_k + rank; pairs are sorted by expert, unless there is only one row.
//
//   lists        experts in use, then of each its number, first pair and end (u32); `pairs` has the sorted pairs
//                (moe_route.cu, moe_choose.cuh)
//   ExpertBlock  an expert's pairs cut into blocks, for many rows (moe_route.cu)
//   ActiveExpert an expert in use with its matrix, for few rows (moe_choose.cuh)

// Some of an expert's pairs. A list begins with one whose `count` says how many there are.
struct ExpertBlock {
    u32 expert, first, count;
};
// An expert that rows chose: its matrix, its number, its first pair and how many.
struct ActiveExpert {
    const u8 *w;
    int first;
    u16 count, expert;
};
static_assert(sizeof(ActiveExpert) == 16, "as src/moe.rs lays out memory");
