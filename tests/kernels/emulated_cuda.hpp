// Runs the cluster kernels on the CPU: one thread per CUDA thread, real barriers, shared memory per block.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define asm(...) (void)0

struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __ldcs(const float* p) { return *p; }
inline void __stcs(float* p, float v) { *p = v; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
using std::min;

thread_local Index threadIdx, blockIdx;
thread_local std::barrier<>*block_barrier, *cluster_barrier;
thread_local std::vector<float>* cluster_memory;
thread_local int block_rank;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void cluster_sync() { cluster_barrier->arrive_and_wait(); }
inline float4* block_memory() { return (float4*)cluster_memory[block_rank].data(); }
inline void share_with(int blocks, float* place, float value) {
  const auto at = place - cluster_memory[block_rank].data();
  for (int rank = 0; rank < blocks; rank++) cluster_memory[rank][at] = value;
}

// Runs `clusters` clusters of `blocks` blocks one after the other. Shared memory starts with NaN, as memory may.
template <class Kernel>
void run_clusters(Kernel kernel, int clusters, int blocks, int threads, int bytes) {
  for (int cluster = 0; cluster < clusters; cluster++) {
    std::vector<std::vector<float>> memory(blocks, std::vector<float>(bytes / 4 + 4, NAN));
    std::vector<std::unique_ptr<std::barrier<>>> barriers;
    for (int b = 0; b < blocks; b++) barriers.push_back(std::make_unique<std::barrier<>>(threads));
    std::barrier<> all(threads * blocks);
    std::vector<std::thread> pool;
    for (int b = 0; b < blocks; b++)
      for (int t = 0; t < threads; t++)
        pool.emplace_back([&, b, t] {
          threadIdx.x = t, blockIdx.x = cluster * blocks + b, block_rank = b;
          block_barrier = barriers[b].get(), cluster_barrier = &all, cluster_memory = memory.data();
          kernel();
        });
    for (auto& thread : pool) thread.join();
    for (auto& block : memory)
      if (!std::isnan(block[bytes / 4])) std::abort();  // written past the end
  }
}
