// How a group of blocks works on its slice of the batch, step after step.
//
// A group is CPG blocks that together hold one copy of the recurrent weights, each the columns of UT tiles of 8 units, and
// work on R rows of the batch. Each step multiplies what the whole group exchanged (y going forward, the gradients of
// the pre-activations going backward) with the block's own columns. The exchange goes through global memory (in
// practice L2): [2 parities][group][k / 8][row][8], which is already the layout the tensor cores read, so that a piece of
// it is one contiguous bulk copy. Warps 0 to 7 (two warpgroups, alternate pieces
// of k each) multiply and do the element-wise part. The third warpgroup waits for the group, feeds the ring, one thread
// of each warp every fourth piece (one thread alone cannot issue fast enough), and fetches later inputs into L2.

constexpr int WORKERS = 256, THREADS = 384;  // the third warpgroup lends its registers to the others
constexpr int FEEDERS = RING % 4 == 0 ? 4 : 2;
static_assert(RING % 2 == 0, "a slot must always meet the same feeder and warpgroup: its parity tells one lap only");
constexpr int SLOT = KS * R * 32;  // bytes of a piece: KS tiles of k16

// Exchanges and weights are padded with zeros to whole pieces.
__host__ __device__ constexpr int pieces(int tiles) { return (tiles + KS - 1) / KS; }
__host__ __device__ constexpr int padded(int tiles) { return pieces(tiles) * KS; }

struct Ring {
  u32 data, full, empty;  // addresses in shared memory
};

// The end of a kernel that ran out of patience: say so, and let copies in flight land before the block goes.
__device__ __forceinline__ void fail(int* error) {
  atomicExch_system(error, 1);
  for (int i = 0; i < 100; i++) __nanosleep(10000);
}

// Tells the group that this block's part of the next exchange is written. Called by all workers. One release covers
// what the barrier before it ordered; the fence towards the copy engine is the reader's, in await.
__device__ __forceinline__ void arrive(u32* counter) {
  workers_sync();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ bool await(const u32* counter, u32 target, i64& patience) {
  i64 start = clock64();
  for (;;) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (seen >= target) break;
    if (clock64() - start > patience) {
      patience = 0;
      return false;
    }
  }
  proxy_fence();  // the waiting thread only: a fence anywhere between the writes and the copies orders them
  return true;
}

// The third warpgroup, at each exchange of TILES k16-tiles: waits until the group has written it, then copies it into the
// ring. False once the group has stalled.
template <int TILES>
__device__ __forceinline__ bool feed(const char* exchange, const u32* counter, u32 target, const Ring& ring, u32& it,
                                     volatile int* stalled, i64& patience) {
  const int feeder = __shfl_sync(~0u, (threadIdx.x - WORKERS) >> 5, 0);
  if (threadIdx.x == WORKERS && !await(counter, target, patience)) *stalled = 1;
  feeders_sync();
  if (*stalled) return false;
  if (feeder < FEEDERS) {
    u32 slot = (it + feeder) % RING, lap = (it + feeder) / RING;
    for (int i = feeder; i < pieces(TILES); i += FEEDERS) {
      barrier_wait(ring.empty + 8 * slot, (lap & 1) ^ 1, patience);
      if (elected()) {
        barrier_expect(ring.full + 8 * slot, SLOT);
        bulk_copy(ring.data + slot * SLOT, exchange + i * SLOT, SLOT, ring.full + 8 * slot);
      }
      slot += FEEDERS;
      if (slot >= RING) slot -= RING, lap++;
    }
    if (patience == 0) *stalled = 1;
  }
  it += pieces(TILES);
  return true;
}

// Brings `bytes` from `p` on closer, for a step to come: inputs come from memory, and a step is short.
__device__ __forceinline__ void prefetch_span(const void* p, int bytes) {
  for (int at = 0; at < bytes; at += 128) prefetch((const char*)p + at);
  prefetch((const char*)p + bytes - 1);
}

__device__ __forceinline__ void release(const Ring& ring, u32 slot) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(ring.empty + 8 * slot);
}

// Where a worker stands: one row, and of each tile two neighbouring units.
struct Place {
  int wg, lane;      // warpgroup, thread in it
  int group, block;  // group, and block of the group
  int row, b;        // row of the group, and of the batch
  int unit;          // first unit of tile 0
  bool active;
};

__device__ __forceinline__ Place place(int b0, int B) {
  Place p;
  int tid = threadIdx.x;
  p.wg = __shfl_sync(~0u, tid >> 7, 0);  // the compiler then knows that warps agree on it
  p.lane = tid & 127;
  p.group = blockIdx.x / CPG;
  p.block = blockIdx.x % CPG;
  p.row = 16 * (p.lane >> 5) + ((tid & 31) >> 2) + 8 * p.wg;
  p.b = b0 + p.group * R + p.row;
  p.unit = p.block * UT * 8 + 2 * (tid & 3);
  p.active = tid < WORKERS && p.row < R && p.b < B;
  return p;
}

// acc = exchanged rows x own columns, over this warpgroup's half of the pieces. Rows from R to 63 are garbage.
// `aside(j)`, j < ASIDES, is work for the load and store units, done while the tensor cores are busy: right after the
// step's exchange it would delay the barrier instead.
template <int N, int TILES, int ASIDES, class Aside>
__device__ __forceinline__ void product(float (&acc)[N / 2], u32 weights, const Ring& ring, u32& it, const Place& me,
                                        i64& patience, Aside aside) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) acc[i] = 0.f;
  int i = (me.wg ^ it) & 1;
  u32 slot = (it + i) % RING, lap = (it + i) / RING;
  auto start = [&]() {
    barrier_wait(ring.full + 8 * slot, lap & 1, patience);
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
  for (int j = 0; j < ASIDES; j++) {  // unrolled apart from the loop below, which stays short
    if (2 * j + 1 < pieces(TILES) || i < pieces(TILES)) {
      start();
      aside(j);
      finish();
    } else {
      aside(j);
    }
  }
  while (i < pieces(TILES)) {
    start();
    finish();
  }
  pin(acc);
  it += pieces(TILES);
}

// Adds the two warpgroups' halves. Of each 16 x 8 tile a thread held two rows; it keeps the one it owns from here on.
template <int NT>
__device__ __forceinline__ void combine(const float (&acc)[NT * 4], float (&own)[NT][2], float2* scratch, int wg, int lane) {
#if ALIAS
  workers_sync();  // scratch lies on the ring: the other warpgroup must be done with it
#endif
#pragma unroll
  for (int j = 0; j < NT; j++)
    scratch[(wg * NT + j) * 128 + lane] = wg ? make_float2(acc[4 * j], acc[4 * j + 1])
                                             : make_float2(acc[4 * j + 2], acc[4 * j + 3]);
  workers_sync();
#pragma unroll
  for (int j = 0; j < NT; j++) {
    float2 v = scratch[((1 - wg) * NT + j) * 128 + lane];
    own[j][0] = v.x + (wg ? acc[4 * j + 2] : acc[4 * j]);
    own[j][1] = v.y + (wg ? acc[4 * j + 3] : acc[4 * j + 1]);
  }
}

// Writes two units of one row into an exchange, as low-precision operands.
__device__ __forceinline__ void exchange_store(char* exchange, int k, int row, u32 pair) {
  *(u32*)(exchange + ((i64)(k >> 3) * R + row) * 16 + (k & 7) * 2) = pair;
}

// Two neighbouring units of a (.., H) array: one access where H is even, else two.
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
  if (unit + 1 == H) pair.ur.y = 0, pair.q &= 0xffff;  // what lies behind an odd last unit, nobody need have written
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

// Sets up the barriers of the ring and of the weights.
__device__ __forceinline__ void set_up(const Ring& ring, u32 loaded) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 4);  // one arrival from each warp that read the piece
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
