// Wrappers of Hopper's asynchronous instructions: barriers in shared memory, bulk copies, warpgroup products.
// `wgmma(acc, a, b)` is generated on the host, with one overload per width that a kernel uses.

// Every wait is bounded. Each thread has a `timeout` in cycles (about two seconds), which is set to 0 when it expires. The
// thread then waits no more and runs through its remaining steps with invalid data. Control flow never depends on it:
// warpgroup products are asynchronous only in code that the compiler can prove to be uniform.
constexpr i64 TIMEOUT = 4000000000LL;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ bool barrier_try(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity, i64& timeout) {
  if (barrier_try(bar, parity)) return;
  i64 start = clock64();
  while (!barrier_try(bar, parity))
    if (clock64() - start > timeout) {
      timeout = 0;
      break;
    }
}

// Copies from global to shared memory and signals a barrier.
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar) : "memory");
}

// True for one thread of a converged warp. With `elect`, the compiler issues copies without a loop over threads.
__device__ __forceinline__ bool elected() {
  u32 yes;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(yes));
  return yes;
}

// Orders ordinary memory accesses before those of the copy engine and the tensor cores.
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.global; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
template <int COUNT>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void sync_producers() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Prevents the compiler from moving accumulators across an asynchronous product.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Descriptor of an operand in shared memory without swizzle: 8 rows x 16 bytes contiguous, `stride` bytes between
// groups of 8 in k.
__device__ __forceinline__ u64 operand(u32 address, u32 stride) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(stride >> 4) << 16) | ((u64)(128 >> 4) << 32);
}
