// Runs the cluster kernels on the CPU. Each CUDA thread is a coroutine that runs to its next barrier before another one
// continues, in an order that changes from barrier to barrier: a missing barrier gives wrong results in every run.

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <memory>
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
template <class T>
T min(T a, T b) { return b < a ? b : a; }

enum State { READY, AT_WARP_BARRIER, AT_BLOCK_BARRIER, AT_CLUSTER_BARRIER, FINISHED };
struct Coroutine {
  ucontext_t context;
  State state;
  int exchanges;  // between the lanes of a warp so far
  float exchanged[2];  // by the last even and the last odd one
};
const int STACK = 1 << 16;

static Index threadIdx, blockIdx;
static int block_rank;
static bool failed;  // a store behind the end of shared memory or into a block that has finished, or a deadlock
static Coroutine* current;
static ucontext_t scheduler;
static std::vector<std::vector<float>> shared_memory;  // of each block
static std::vector<std::vector<Coroutine>> coroutines;  // of each block

inline void stop_at(State state) {
  current->state = state;
  swapcontext(&current->context, &scheduler);
}
inline void __syncthreads() { stop_at(AT_BLOCK_BARRIER); }
inline void cluster_sync() { stop_at(AT_CLUSTER_BARRIER); }
// Two places suffice: a lane writes the first one again only after all lanes have reached the exchange in between.
inline float __shfl_xor_sync(unsigned, float value, int distance) {
  const int place = current->exchanges++ % 2;
  current->exchanged[place] = value;
  stop_at(AT_WARP_BARRIER);
  return coroutines[block_rank][threadIdx.x ^ distance].exchanged[place];
}
inline float4* block_memory() { return (float4*)shared_memory[block_rank].data(); }
inline bool all_at(const std::vector<Coroutine>& block, State state) {
  for (auto& coroutine : block)
    if (coroutine.state != state) return false;
  return true;
}
inline void release(std::vector<Coroutine>& block) {
  for (auto& coroutine : block) coroutine.state = READY;
}
inline void share_with(int blocks, float* place, float value) {
  const auto at = place - shared_memory[block_rank].data();
  for (int rank = 0; rank < blocks; rank++) {
    shared_memory[rank][at] = value;
    failed = failed || all_at(coroutines[rank], FINISHED);
  }
}

// Runs the threads of one block until none of them can continue: all wait for the cluster, or all have finished.
inline void run_block(int first, int rank, int threads, int& turn) {
  auto& block = coroutines[rank];
  for (bool ready = true; ready;) {
    turn++;
    for (int i = 0; i < threads; i++) {
      const int t = turn % 2 ? i : threads - 1 - i;
      if (block[t].state != READY) continue;
      threadIdx.x = t, blockIdx.x = first + rank, block_rank = rank;
      current = &block[t];
      swapcontext(&scheduler, &current->context);
    }
    ready = all_at(block, AT_BLOCK_BARRIER);
    if (ready) release(block);
    for (int lane = 0; lane < threads; lane += 32) {
      int waiting = 0;
      for (int t = lane; t < lane + 32; t++) waiting += block[t].state == AT_WARP_BARRIER;
      for (int t = lane; t < lane + 32 && waiting == 32; t++) block[t].state = READY;
      ready = ready || waiting == 32;
    }
  }
}

// Runs `clusters` clusters of `blocks` blocks one after the other. Shared memory starts with NaN, as memory may.
inline bool run_unprotected(void (*kernel)(), int clusters, int blocks, int threads, int bytes) {
  const std::unique_ptr<char[]> stacks(new char[(size_t)blocks * threads * STACK]);
  failed = false;
  for (int cluster = 0, turn = 0; cluster < clusters; cluster++) {
    shared_memory.assign(blocks, std::vector<float>(bytes / 4 + 4, NAN));
    coroutines.assign(blocks, std::vector<Coroutine>(threads));
    for (int b = 0; b < blocks; b++)
      for (int t = 0; t < threads; t++) {
        auto& context = coroutines[b][t].context;
        getcontext(&context);
        context.uc_stack.ss_sp = &stacks[(size_t)(b * threads + t) * STACK], context.uc_stack.ss_size = STACK;
        context.uc_link = &scheduler;
        makecontext(&context, kernel, 0);
      }
    for (bool running = true; running;) {
      const bool ascending = turn % 2;
      for (int i = 0; i < blocks; i++) run_block(cluster * blocks, ascending ? i : blocks - 1 - i, threads, turn);
      running = false;
      for (auto& block : coroutines) running = running || !all_at(block, FINISHED);
      for (auto& block : coroutines) failed = failed || !all_at(block, running ? AT_CLUSTER_BARRIER : FINISHED);
      if (failed) return false;
      for (auto& block : coroutines)
        if (running) release(block);
    }
    for (auto& block : shared_memory)
      for (int i = 0; i < 4; i++) failed = failed || !std::isnan(block[bytes / 4 + i]);
  }
  return !failed;
}

static sigjmp_buf invalid_access;

// Returns whether all barriers were reached and all accesses to memory were valid.
inline bool run_clusters(void (*kernel)(), int clusters, int blocks, int threads, int bytes) {
  struct sigaction action = {}, previous;
  action.sa_handler = [](int) { siglongjmp(invalid_access, 1); };
  sigaction(SIGSEGV, &action, &previous);
  const bool valid = !sigsetjmp(invalid_access, 1) && run_unprotected(kernel, clusters, blocks, threads, bytes);
  sigaction(SIGSEGV, &previous, nullptr);
  return valid;
}
