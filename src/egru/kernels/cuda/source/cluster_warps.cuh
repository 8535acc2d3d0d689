// Cluster kernels, division of work among warps: all weights are in shared memory.
//
// Lane i of every warp works on unit i. The warps share the terms of the products; row r of the element-wise part belongs
// to warp r.

constexpr int WARPS = THREADS / 32;
static_assert(LANES == 1 && U <= 32 && R <= WARPS, "a lane has one unit, and a warp one row");

__device__ __forceinline__ Place place_of(int B) {
  Place p;
  p.warp = threadIdx.x / 32, p.lane = threadIdx.x % 32;
  p.cluster = blockIdx.x / C;
  p.row = p.warp;
  p.b = p.cluster * R + p.row;
  p.unit = blockIdx.x % C * U + p.lane;
  p.active = p.row < R && p.b < B && p.lane < U && p.unit < H;
  return p;
}

// Adds this warp's share of a product to `sums`: R rows of CHUNKS chunks, times COUNT of the GATES blocks of weights,
// from FIRST on. Gate g is added to sums[g], gate 2 to sums[Z]. Few rows often have no event in a chunk, whose weights are
// then not read.
template <int GATES, int FIRST, int COUNT, int Z, int CHUNKS>
__device__ __forceinline__ void accumulate(float (&sums)[4][R], const float4* weights, const float* rows, const Place& p) {
  const float4* mine = weights + (p.lane < U ? p.lane : 0);
#pragma unroll 2
  for (int k = p.warp; k < CHUNKS; k += WARPS) {
    float4 v[R];
    bool none = true;
#pragma unroll
    for (int r = 0; r < R; r++) {
      v[r] = ((const float4*)rows)[r * CHUNKS + k];
      none = none && is_zero(v[r]);
    }
    if (R <= 2 && none) continue;
#pragma unroll
    for (int g = FIRST; g < FIRST + COUNT; g++) {
      const float4 w = mine[(k * GATES + g) * U];
#pragma unroll
      for (int r = 0; r < R; r++) sums[g == 2 ? Z : g][r] = dot(w, v[r], sums[g == 2 ? Z : g][r]);
    }
  }
}

// Adds the warps' sums. `out[g]` is the total of the thread's row and unit, for the gates in MASK.
template <int MASK, int GATES>
__device__ __forceinline__ void combine(const float (&sums)[4][R], float (&out)[4], float* scratch, const Place& p) {
#pragma unroll
  for (int g = 0; g < GATES; g++)
    if (MASK >> g & 1)
#pragma unroll
      for (int r = 0; r < R; r++) scratch[((p.warp * GATES + g) * R + r) * 32 + p.lane] = sums[g][r];
  __syncthreads();
  if (p.warp >= R) return;
#pragma unroll
  for (int g = 0; g < GATES; g++)
    if (MASK >> g & 1) {
      out[g] = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) out[g] += scratch[((w * GATES + g) * R + p.warp) * 32 + p.lane];
    }
}
