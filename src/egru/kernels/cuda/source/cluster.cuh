// What the cluster kernels share: whole sequences of small layers in float32, one launch per direction.
//
// A cluster of C blocks processes R rows of the batch, independently of other clusters. Each block computes U units, and
// after each step it stores their new values in the shared memory of all blocks of its cluster. The threads of a block
// divide the products in one of two ways: see cluster_warps.cuh and cluster_lanes.cuh.
//
// Constants defined by cluster.py: H units, I input features (0 if x W is computed beforehand), C, U, R, LANES, THREADS,
// KEEP, RAGGED.

// Chunks of four terms, the same number for each of the lanes that share a unit.
__device__ constexpr int chunks_of(int terms) { return (terms + 4 * LANES - 1) / (4 * LANES) * LANES; }
constexpr int KC = chunks_of(H), IC = chunks_of(I);
constexpr int HK = 4 * KC, IK = 4 * IC;
static_assert(U * C >= H, "every unit has a block");

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
  int cluster, warp, lane, row, b, unit;
  bool active;  // false for units and rows beyond the layer and the batch
};

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ bool is_zero(float4 v) { return v.x == 0.f && v.y == 0.f && v.z == 0.f && v.w == 0.f; }

// Four weights of a gate and a unit, from column k of a (3 H, `columns`) matrix on; zero beyond the matrix.
__device__ __forceinline__ float4 weight_chunk(const float* from, int gate, int unit, int k, int columns) {
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (unit >= H || k >= columns) return v;
  const float* const row = from + ((i64)gate * H + unit) * columns + k;
  if (columns % 4 == 0) return *(const float4*)row;
  v.x = row[0];
  if (k + 1 < columns) v.y = row[1];
  if (k + 2 < columns) v.z = row[2];
  if (k + 3 < columns) v.w = row[3];
  return v;
}

__device__ __forceinline__ float load_keep(const Keep& k, i64 t, i64 b, int unit) {
  return KEEP ? k.p[t * k.t + b * k.b + unit * k.h] : 0.f;
}
