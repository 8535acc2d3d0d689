// Division of work in the cluster kernels: whole sequences of small layers in float32, one launch per direction.
//
// A cluster of C blocks processes R rows of the batch, independently of other clusters. Each block holds the weights of U
// units in shared memory, and after each step it stores their new values in the shared memory of all blocks of its
// cluster. Within a block, lane i of every warp works on unit i. The warps share the terms of the products; row r of the
// element-wise part belongs to warp r.
//
// Constants defined by cluster.py: H units, I input features (0 if x W is computed beforehand), C, U, R, KEEP, RAGGED.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int KC = (H + 3) / 4, IC = (I + 3) / 4;  // chunks of four terms
constexpr int HK = 4 * KC, IK = 4 * IC;
static_assert(U <= 32 && R <= WARPS && U * C >= H, "a lane has one unit, and a warp one row");

#ifndef EMULATED
__device__ __forceinline__ void cluster_sync() {
  if (C == 1) {
    __syncthreads();
    return;
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores a value at the same place in the shared memory of every block of the cluster.
__device__ __forceinline__ void share(float* place, float value) {
  if (C == 1) {
    *place = value;
    return;
  }
  const u32 local = (u32)__cvta_generic_to_shared(place);
#pragma unroll
  for (int rank = 0; rank < C; rank++) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
  }
}
#endif

// The row and the unit of a thread in the element-wise part.
struct Place {
  int cluster, warp, lane, b, unit;
  bool active;  // false for units and rows beyond the layer and the batch
};

__device__ __forceinline__ Place place_of(int B) {
  Place p;
  p.warp = threadIdx.x / 32, p.lane = threadIdx.x % 32;
  p.cluster = blockIdx.x / C;
  p.b = p.cluster * R + p.warp;
  p.unit = blockIdx.x % C * U + p.lane;
  p.active = p.warp < R && p.b < B && p.lane < U && p.unit < H;
  return p;
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ bool is_zero(float4 v) { return v.x == 0.f && v.y == 0.f && v.z == 0.f && v.w == 0.f; }

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

__device__ __forceinline__ float load_keep(const Keep& k, i64 t, i64 b, int unit) {
  return KEEP ? k.p[t * k.t + b * k.b + unit * k.h] : 0.f;
}
