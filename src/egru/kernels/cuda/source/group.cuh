// Division of work in the persistent kernels: groups, blocks and warps.
//
// A group is CPG blocks. Together they hold one copy of the recurrent weights and process R rows of the batch. Each block
// holds the columns of UT tiles of 8 units. In each step a block multiplies the values that the whole group exchanged (y in
// the forward pass, gradients of the pre-activations in the backward pass) with its columns.
//
// The exchange goes through global memory (in practice L2), in the layout [2 parities][group][k / 8][row][8]. The tensor
// cores read this layout directly, so that a slice of KS k16-tiles is one contiguous bulk copy into one slot of a ring in
// shared memory.
//
// Consumers (warps 0 to 7, two warpgroups) take alternate slices, multiply, and compute the element-wise part. Producers
// (the third warpgroup) wait for the group and fill the ring. One thread of each producer warp copies every fourth slice,
// because a single thread cannot issue copies fast enough. They also prefetch later inputs into L2.
//
// Constants defined by persistent.py: H units, HP = H rounded up to 8, KT = H in k16-tiles, RING slots, SCRATCH bytes for
// adding the warpgroups' partial products. ALIAS: scratch shares memory with the ring. INLINE: the input has one feature,
// and the kernel computes x W. KEEP: zoneout. RAGGED: sequences have lengths.

constexpr int CONSUMERS = 256, THREADS = 384;  // producers give registers to consumers
constexpr int PRODUCERS = RING % 4 == 0 ? 4 : 2;
static_assert(RING % 2 == 0, "each slot needs a fixed producer and consumer: its barriers' parity identifies one lap only");
constexpr int SLOT = KS * R * 32;  // bytes of a slice: KS k16-tiles

// Exchanges and weights are padded with zeros to whole slices.
__host__ __device__ constexpr int slices(int tiles) { return (tiles + KS - 1) / KS; }
__host__ __device__ constexpr int padded(int tiles) { return slices(tiles) * KS; }

struct Ring {
  u32 data, full, empty;  // addresses in shared memory
};

// Sets the error flag after a timeout, then waits for copies in flight, which must finish before the block exits.
__device__ __forceinline__ void report_timeout(int* error) {
  atomicExch_system(error, 1);
  for (int i = 0; i < 100; i++) __nanosleep(10000);
}

// Signals the group that this block has written its part of the next exchange. Called by all consumers. One release is
// enough, since the barrier before it orders the other threads' writes. The reader fences the copy engine, in await.
__device__ __forceinline__ void arrive(u32* counter) {
  sync_consumers();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ bool await(const u32* counter, u32 target, i64& timeout) {
  i64 start = clock64();
  for (;;) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (seen >= target) break;
    if (clock64() - start > timeout) {
      timeout = 0;
      return false;
    }
  }
  proxy_fence();  // in the waiting thread: any fence between the writes and the copies orders them
  return true;
}

// Producers: waits until the group has written an exchange of TILES k16-tiles, then copies it into the ring. Returns false
// after a timeout.
template <int TILES>
__device__ __forceinline__ bool produce(const char* exchange, const u32* counter, u32 target, const Ring& ring, u32& it,
                                        volatile int* stalled, i64& timeout) {
  const int producer = __shfl_sync(~0u, (threadIdx.x - CONSUMERS) >> 5, 0);
  if (threadIdx.x == CONSUMERS && !await(counter, target, timeout)) *stalled = 1;
  sync_producers();
  if (*stalled) return false;
  if (producer < PRODUCERS) {
    u32 slot = (it + producer) % RING, lap = (it + producer) / RING;
    for (int i = producer; i < slices(TILES); i += PRODUCERS) {
      barrier_wait(ring.empty + 8 * slot, (lap & 1) ^ 1, timeout);
      if (elected()) {
        barrier_expect(ring.full + 8 * slot, SLOT);
        bulk_copy(ring.data + slot * SLOT, exchange + i * SLOT, SLOT, ring.full + 8 * slot);
      }
      slot += PRODUCERS;
      if (slot >= RING) slot -= RING, lap++;
    }
    if (timeout == 0) *stalled = 1;
  }
  it += slices(TILES);
  return true;
}

// Prefetches `bytes` at `p` into L2 for a later step: loading inputs from memory takes longer than a step.
__device__ __forceinline__ void prefetch_span(const void* p, int bytes) {
  for (int at = 0; at < bytes; at += 128) prefetch((const char*)p + at);
  prefetch((const char*)p + bytes - 1);
}

__device__ __forceinline__ void release(const Ring& ring, u32 slot) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(ring.empty + 8 * slot);
}

// The work of one consumer thread: one row, and two neighbouring units of each tile.
struct Position {
  int wg, lane;      // warpgroup, and thread in the warpgroup
  int group, block;  // group, and block in the group
  int row, b;        // row in the group, and in the batch
  int unit;          // first unit in tile 0
  bool active;       // false for rows beyond the batch, and for producers
};

__device__ __forceinline__ Position position(int b0, int B) {
  Position p;
  int tid = threadIdx.x;
  p.wg = __shfl_sync(~0u, tid >> 7, 0);  // shuffled, so that the compiler knows it is uniform in a warp
  p.lane = tid & 127;
  p.group = blockIdx.x / CPG;
  p.block = blockIdx.x % CPG;
  p.row = 16 * (p.lane >> 5) + ((tid & 31) >> 2) + 8 * p.wg;
  p.b = b0 + p.group * R + p.row;
  p.unit = p.block * UT * 8 + 2 * (tid & 3);
  p.active = tid < CONSUMERS && p.row < R && p.b < B;
  return p;
}

// acc = exchanged rows x the block's columns, over this warpgroup's half of the slices. Rows R to 63 are undefined.
// `overlapped(j)`, j < OVERLAPS, loads and stores while the tensor cores are busy. Directly after the exchange it would
// delay the group's barrier.
template <int N, int TILES, int OVERLAPS, class Overlapped>
__device__ __forceinline__ void product(float (&acc)[N / 2], u32 weights, const Ring& ring, u32& it,
                                        const Position& pos, i64& timeout, Overlapped overlapped) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) acc[i] = 0.f;
  int i = (pos.wg ^ it) & 1;
  u32 slot = (it + i) % RING, lap = (it + i) / RING;
  auto start = [&]() {
    barrier_wait(ring.full + 8 * slot, lap & 1, timeout);
    u64 a = operand(ring.data + slot * SLOT, R * 16), b = operand(weights + i * KS * N * 32, N * 16);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KS; k++) wgmma(acc, a + k * (R * 2), b + k * (N * 2));
    wgmma_commit();
  };
  auto finish = [&]() {
    wgmma_wait<0>();
    release(ring, slot);
    i += 2;
    slot += 2;
    if (slot >= RING) slot -= RING, lap++;
  };
#pragma unroll
  for (int j = 0; j < OVERLAPS; j++) {  // separate from the loop below, which is not unrolled
    if (2 * j + 1 < slices(TILES) || i < slices(TILES)) {
      start();
      overlapped(j);
      finish();
    } else {
      overlapped(j);
    }
  }
  while (i < slices(TILES)) {
    start();
    finish();
  }
  pin(acc);
  it += slices(TILES);
}

// Adds the two warpgroups' partial products. A thread has two rows of each 16 x 8 tile and keeps the sum of its own row.
template <int NT>
__device__ __forceinline__ void combine(const float (&acc)[NT * 4], float (&out)[NT][2], float2* scratch, int wg, int lane) {
#if ALIAS
  sync_consumers();  // scratch overlaps the ring, which the other warpgroup may still be reading
#endif
#pragma unroll
  for (int j = 0; j < NT; j++)
    scratch[(wg * NT + j) * 128 + lane] = wg ? make_float2(acc[4 * j], acc[4 * j + 1])
                                             : make_float2(acc[4 * j + 2], acc[4 * j + 3]);
  sync_consumers();
#pragma unroll
  for (int j = 0; j < NT; j++) {
    float2 v = scratch[((1 - wg) * NT + j) * 128 + lane];
    out[j][0] = v.x + (wg ? acc[4 * j + 2] : acc[4 * j]);
    out[j][1] = v.y + (wg ? acc[4 * j + 3] : acc[4 * j + 1]);
  }
}

// Writes two units of one row, in low precision, into an exchange.
__device__ __forceinline__ void exchange_store(char* exchange, int k, int row, u32 pair) {
  *(u32*)(exchange + ((i64)(k >> 3) * R + row) * 16 + (k & 7) * 2) = pair;
}

// Two neighbouring units of a (.., H) array: one access if H is even, else two.
__device__ __forceinline__ float2 load_pair(const float* p, int unit) {
  float2 v = make_float2(0.f, 0.f);
#if H % 2 == 0
  if (unit < H) v = __ldcs((const float2*)(p + unit));
#else
  if (unit < H) v.x = __ldcs(p + unit);
  if (unit + 1 < H) v.y = __ldcs(p + unit + 1);
#endif
  return v;
}
__device__ __forceinline__ void store_pair(float* p, int unit, float2 v) {
#if H % 2 == 0
  if (unit < H) __stcs((float2*)(p + unit), v);
#else
  if (unit < H) __stcs(p + unit, v.x);
  if (unit + 1 < H) __stcs(p + unit + 1, v.y);
#endif
}

// Two neighbouring units of one row of the reserve.
struct SavedPair {
  uint2 ur;
  u32 q;
};
__device__ __forceinline__ void save_pair(Reserve* reserve, i64 rows, i64 row, int unit, const SavedPair& pair) {
  constexpr int width = reserve_width(H);
  if (unit >= H) return;
  __stcs((uint2*)(reserve + row * width + unit), pair.ur);
  if (AFTER) __stcs((u32*)(q_plane(reserve, rows, width) + row * width + unit), pair.q);
}
__device__ __forceinline__ SavedPair saved_pair(const Reserve* reserve, i64 rows, i64 row, int unit) {
  constexpr int width = reserve_width(H);
  SavedPair pair = {};
  if (unit >= H) return pair;
  pair.ur = __ldcs((const uint2*)(reserve + row * width + unit));
  if (AFTER) pair.q = __ldcs((const u32*)(q_plane((Reserve*)reserve, rows, width) + row * width + unit));
  if (unit + 1 == H) pair.ur.y = 0, pair.q &= 0xffff;  // behind an odd last unit, memory is uninitialised
  return pair;
}

__device__ __forceinline__ float2 load_keep(const Keep& k, i64 t, i64 b, int unit) {
  float2 v = make_float2(0.f, 0.f);
#if !KEEP
  return v;
#endif
  const float* q = k.p + t * k.t + b * k.b;
  if (unit < H) v.x = q[unit * k.h];
  if (unit + 1 < H) v.y = q[(unit + 1) * k.h];
  return v;
}

// Initialises the barriers of the ring and of the weights.
__device__ __forceinline__ void init_barriers(const Ring& ring, u32 loaded) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 4);  // one arrival per warp that reads the slice
    }
    barrier_init(loaded, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

__device__ __forceinline__ void load_weights(u32 dst, const char* src, u32 bytes, u32 loaded) {
  barrier_expect(loaded, bytes);
  for (u32 done = 0; done < bytes; done += 16384)
    bulk_copy(dst + done, src + done, bytes - done < 16384 ? bytes - done : 16384, loaded);
}
