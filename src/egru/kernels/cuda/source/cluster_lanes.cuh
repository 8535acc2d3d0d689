// Cluster kernels, division of work among lanes, for layers that fit into one block: the recurrent weights are in registers.
//
// LANES neighbouring threads work on one unit and share the terms of its products; row r of the element-wise part belongs
// to the r-th of them. There is no barrier beyond the block, and a step reads only the weights of the input from memory.

static_assert(C == 1 && U == H && R <= LANES && THREADS % 32 == 0 && U * LANES <= THREADS, "a row per lane of a unit");

__device__ __forceinline__ Place place_of(int B) {
  Place p;
  p.warp = threadIdx.x / 32, p.lane = threadIdx.x % 32;
  p.cluster = blockIdx.x;
  p.row = threadIdx.x % LANES;
  p.b = p.cluster * R + p.row;
  p.unit = threadIdx.x / LANES;
  p.active = p.row < R && p.b < B && p.unit < H;
  return p;
}

// A thread's share of the recurrent weights: chunks LANES apart.
struct Registers {
  float4 w[KC / LANES][3];
};

__device__ __forceinline__ Registers load_registers(const float* from, const Place& p) {
  Registers weights;
#pragma unroll
  for (int i = 0; i < KC / LANES; i++)
#pragma unroll
    for (int g = 0; g < 3; g++) weights.w[i][g] = weight_chunk(from, g, p.unit, 4 * (i * LANES + threadIdx.x % LANES), H);
  return weights;
}

// Adds this thread's share of a product to `sums`; see cluster_warps.cuh.
template <int GATES, int FIRST, int COUNT, int Z, int CHUNKS>
__device__ __forceinline__ void accumulate(float (&sums)[4][R], const Registers& weights, const float* rows, const Place&) {
#pragma unroll
  for (int i = 0; i < CHUNKS / LANES; i++)
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float4 v = ((const float4*)rows)[r * CHUNKS + i * LANES + threadIdx.x % LANES];
#pragma unroll
      for (int g = FIRST; g < FIRST + COUNT; g++)
        sums[g == 2 ? Z : g][r] = dot(weights.w[i][g], v, sums[g == 2 ? Z : g][r]);
    }
}

template <int GATES, int FIRST, int COUNT, int Z, int CHUNKS>
__device__ __forceinline__ void accumulate(float (&sums)[4][R], const float4* weights, const float* rows, const Place&) {
  const float4* mine = weights + (threadIdx.x < U * LANES ? threadIdx.x : 0);
#pragma unroll 2
  for (int i = 0; i < CHUNKS / LANES; i++)
#pragma unroll
    for (int g = FIRST; g < FIRST + COUNT; g++) {
      const float4 w = mine[(i * GATES + g) * U * LANES];
#pragma unroll
      for (int r = 0; r < R; r++)
        sums[g == 2 ? Z : g][r] = dot(w, ((const float4*)rows)[r * CHUNKS + i * LANES + threadIdx.x % LANES],
                                      sums[g == 2 ? Z : g][r]);
    }
}

// Adds the sums of the lanes that share a unit. `out[g]` is the total of the thread's row and unit, for the gates in MASK.
template <int MASK, int GATES>
__device__ __forceinline__ void combine(const float (&sums)[4][R], float (&out)[4], float*, const Place& p) {
#pragma unroll
  for (int g = 0; g < GATES; g++)
    if (MASK >> g & 1) {
      out[g] = 0.f;
#pragma unroll
      for (int r = 0; r < R; r++) {
        float total = sums[g][r];
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
        if (p.row == r) out[g] = total;
      }
    }
}
