// Forward pass of a whole sequence for small batches, reading only the weights of units that emitted an event.
//
// A group is BLOCKS blocks. Together they hold one copy of the recurrent weights and process R rows of the batch. A block
// computes UNITS units and keeps their columns for every k in shared memory, [k][column].
//
// The group exchanges y (and r*y for "before") as 64-bit words. A word contains the values of up to VALUES rows and the
// number of the exchange as a tag. Words are written and read atomically: a reader that sees the expected tag has the
// values too, so no barrier or fence between blocks is needed. Two buffers alternate. A block writes exchange n + 2 only
// after it has read all of n + 1, whose writers had read all of n, so no unread word is overwritten.
//
// In each exchange a warp reads its share of the units, lists those that are not zero, and accumulates value times row of
// weights. The warps' sums are added in shared memory, where one thread per unit and word finishes the step.

constexpr int THREADS = 32 * WARPS;
constexpr i64 TIMEOUT = 4000000000LL;                 // cycles, about two seconds: every wait is bounded
constexpr int SHARE = (H + THREADS - 1) / THREADS;    // units per thread
constexpr int VALUES = LOW == 0 ? 1 : R < 3 ? R : 3;  // rows per word
constexpr int WORDS = (R + VALUES - 1) / VALUES;
__host__ __device__ constexpr int round_up4(int n) { return (n + 3) / 4 * 4; }
constexpr int FIRST = round_up4((AFTER ? 3 : 2) * UNITS);  // columns of a step's first product, gate by gate
constexpr int SECOND = AFTER ? 0 : round_up4(UNITS);       // columns of its second product
constexpr int ROW = FIRST + SECOND;

struct alignas(R == 1 ? 8 : R == 3 ? 16 : 4) ActiveUnit {
  u32 k;
  float value[R];
};
struct Memory {
  Operand weights[H * ROW];
  alignas(16) float sums[2][WARPS][R][FIRST];
  alignas(16) ActiveUnit list[WARPS][SHARE * 32];
};

__device__ __forceinline__ u64 tag(u32 n) { return LOW == 0 ? (u64)(n + 1) : (u64)((n + 1) & 0xffff); }
__device__ __forceinline__ bool has_tag(u64 word, u32 n) { return (word & (LOW == 0 ? 0xffffffff : 0xffff)) == tag(n); }
__device__ __forceinline__ u64 make_word(const float (&v)[VALUES], u32 n) {
#if LOW == 0
  return tag(n) | (u64)__float_as_uint(v[0]) << 32;
#else
  u64 word = tag(n);
#pragma unroll
  for (int i = 0; i < VALUES; i++) word |= (u64)to_operand(v[i]) << (16 + 16 * i);
  return word;
#endif
}
__device__ __forceinline__ float value_of(u64 word, int i) {
  return LOW == 0 ? __uint_as_float((u32)(word >> 32)) : from_operand((u32)(word >> (16 + 16 * i)) & 0xffff);
}
__device__ __forceinline__ void store_word(u64* p, u64 word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
}
__device__ __forceinline__ u64 load_word(const u64* p) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(p) : "memory");
  return word;
}

__device__ __forceinline__ void load4(const Operand* p, float (&w)[4]) {
#if LOW == 0
  const float4 v = *(const float4*)p;
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
#else
  const uint2 v = *(const uint2*)p;
  w[0] = from_operand(v.x & 0xffff), w[1] = from_operand(v.x >> 16);
  w[2] = from_operand(v.y & 0xffff), w[3] = from_operand(v.y >> 16);
#endif
}

// Waits for exchange n and writes this warp's part of its product with COLUMNS columns, starting at `first`, to sums[n & 1].
template <int COLUMNS>
__device__ __forceinline__ void product(Memory& m, const u64* exchange, u32 n, int first, i64& timeout) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 word[SHARE][WORDS];
  bool waiting = false;
#pragma unroll
  for (int i = 0; i < SHARE; i++)
#pragma unroll
    for (int j = 0; j < WORDS; j++) word[i][j] = load_word(exchange + j * SHARE * THREADS + i * THREADS + threadIdx.x);
  i64 start = 0;
  do {
    waiting = false;
#pragma unroll
    for (int i = 0; i < SHARE; i++)
#pragma unroll
      for (int j = 0; j < WORDS; j++)
        if (!has_tag(word[i][j], n) && i * THREADS + threadIdx.x < H) {
          waiting = true;
          word[i][j] = load_word(exchange + j * SHARE * THREADS + i * THREADS + threadIdx.x);
        }
    if (waiting) {
      const i64 now = clock64();
      if (start == 0) start = now;
      if (now - start > timeout) timeout = 0, waiting = false;
    }
  } while (waiting);
  __syncwarp();

  ActiveUnit* const list = m.list[warp];
  int count = 0;
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const int k = i * THREADS + threadIdx.x;
    bool active = false;
#pragma unroll
    for (int j = 0; j < WORDS; j++) active |= (word[i][j] >> (LOW == 0 ? 32 : 16)) != 0;
    active = active && k < H;
    const u32 mask = __ballot_sync(~0u, active);
    if (active) {
      ActiveUnit& entry = list[count + __popc(mask & ((1u << lane) - 1))];
      entry.k = k;
#pragma unroll
      for (int r = 0; r < R; r++) entry.value[r] = value_of(word[i][r / VALUES], r % VALUES);
    }
    count += __popc(mask);
  }
  __syncwarp();

  constexpr int LANES = COLUMNS / 4, PARTS = 32 / LANES;  // lanes per row of weights, and concurrent rows
  const int part = lane / LANES, column = lane % LANES * 4;
  float acc[R][4] = {};
#pragma unroll 4
  for (int i = part < PARTS ? part : count; i < count; i += PARTS) {
    const ActiveUnit entry = list[i];
    float w[4];
    load4(m.weights + entry.k * ROW + first + column, w);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[r][c] += entry.value[r] * w[c];
  }
  __syncwarp();
#pragma unroll
  for (int left = PARTS; left > 1; left = (left + 1) / 2) {
    const int half = (left + 1) / 2;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float other = __shfl_down_sync(~0u, acc[r][c], half * LANES);
        if (part + half < left) acc[r][c] += other;
      }
  }
  if (part == 0)
#pragma unroll
    for (int r = 0; r < R; r++)
      *(float4*)&m.sums[n & 1][warp][r][column] = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  __syncthreads();
}

__device__ __forceinline__ float total(const Memory& m, u32 n, int row, int column) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += m.sums[n & 1][w][row][column];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_batch(const __grid_constant__ SmallBatch a) {
  extern __shared__ __align__(1024) char memory[];
  Memory& m = *(Memory*)memory;
  const int tid = threadIdx.x, T = a.T, B = a.B;
  const int group = blockIdx.x / BLOCKS, first = blockIdx.x % BLOCKS * UNITS;
  const u64 buffer = (u64)gridDim.x / BLOCKS * WORDS * SHARE * THREADS;
  u64* const exchange = a.exchange + (u64)group * WORDS * SHARE * THREADS;

  // One thread finishes one unit for the rows of one word.
  const int local = tid % UNITS, unit = first + local, j = tid / UNITS;
  const bool finishes = j < WORDS && unit < H;
  u64* const word_out = exchange + j * SHARE * THREADS + unit;
  const float rho = *a.rho;
  float bias_r = 0.f, bias_u = 0.f, bias_z = 0.f, bias_q = 0.f, theta = 0.f;
#if INLINE
  float weight_in[3] = {};
#endif
  float c[VALUES], y[VALUES], p[VALUES][3], keep[VALUES];
  bool fired[VALUES], exists[VALUES];
  int b[VALUES], length[VALUES];
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    const int row = j * VALUES + v;
    b[v] = a.b0 + group * R + row;
    exists[v] = finishes && row < R && b[v] < B;
    c[v] = exists[v] ? a.c0[(i64)b[v] * a.state_stride + unit] : 0.f;
    y[v] = exists[v] ? a.y0[(i64)b[v] * a.state_stride + unit] : 0.f;
    fired[v] = y[v] != 0.f;
    length[v] = RAGGED && exists[v] ? (int)min((i64)T, a.lengths[b[v]]) : T;
    keep[v] = 0.f;
    p[v][0] = p[v][1] = p[v][2] = 0.f;
  }
  if (finishes) {
    store_word(word_out, make_word(y, 0));
    bias_r = bias(a.bias_ih, unit) + bias(a.bias_hh, unit);
    bias_u = bias(a.bias_ih, H + unit) + bias(a.bias_hh, H + unit);
    bias_z = bias(a.bias_ih, 2 * H + unit);
    bias_q = bias(a.bias_hh, 2 * H + unit);
    theta = a.theta[unit];
#if INLINE
    for (int g = 0; g < 3; g++) weight_in[g] = rounded(a.weight_ih[g * H + unit]);
#endif
  }
  auto fetch = [&](int t) {
#pragma unroll
    for (int v = 0; v < VALUES; v++) {
      if (!exists[v]) continue;
      const i64 at = (i64)t * B + b[v];
#if INLINE
      const float x = rounded(a.input[at]);
      for (int g = 0; g < 3; g++) p[v][g] = x * weight_in[g];
#else
      for (int g = 0; g < 3; g++) p[v][g] = __ldcs(a.projected + (at * 3 + g) * STRIDE + unit);
#endif
      if (KEEP) keep[v] = a.keep.p[t * a.keep.t + b[v] * a.keep.b + unit * a.keep.h];
    }
  };
  fetch(0);

  // Load the block's columns, one warp per column, coalesced along k.
  for (int column = tid >> 5; column < ROW; column += WARPS) {
    const int gate = column < FIRST ? column / UNITS : 2, of = column < FIRST ? column % UNITS : column - FIRST;
    const bool in_range = gate < (column < FIRST && !AFTER ? 2 : 3) && of < UNITS && first + of < H;
    const float* from = a.weights + ((i64)gate * H + first + of) * H;
#pragma unroll 16
    for (int k = tid & 31; k < H; k += 32) m.weights[k * ROW + column] = to_operand(in_range ? __ldcs(from + k) : 0.f);
  }
  __syncthreads();

  i64 timeout = TIMEOUT;
  for (int t = 0; t < T; t++) {
    const u32 n = AFTER ? t : 2 * t;
    product<FIRST>(m, exchange + (n & 1) * buffer, n, 0, timeout);
#if !AFTER
    float gate_r[VALUES], gate_u[VALUES], ry[VALUES];
    if (finishes) {
#pragma unroll
      for (int v = 0; v < VALUES; v++) {
        const int row = min(j * VALUES + v, R - 1);
        gate_r[v] = sigmoid(p[v][0] + bias_r + total(m, n, row, local));
        gate_u[v] = sigmoid(-(p[v][1] + bias_u + total(m, n, row, UNITS + local)));
        ry[v] = exists[v] ? gate_r[v] * y[v] : 0.f;
      }
      store_word(word_out + ((n + 1) & 1) * buffer, make_word(ry, n + 1));
    }
    product<SECOND>(m, exchange + ((n + 1) & 1) * buffer, n + 1, FIRST, timeout);
#endif
    if (finishes) {
      float c_seen[VALUES];
      Gates gates[VALUES];
      bool valid[VALUES];
#pragma unroll
      for (int v = 0; v < VALUES; v++) {
        const int row = min(j * VALUES + v, R - 1);
#if AFTER
        const float r = sigmoid(p[v][0] + bias_r + total(m, n, row, local));
        const float u = sigmoid(-(p[v][1] + bias_u + total(m, n, row, UNITS + local)));
        const float q = bias_q + total(m, n, row, 2 * UNITS + local);
        const float z = tangent(p[v][2] + bias_z + r * q);
#else
        const float r = gate_r[v], u = gate_u[v], q = 0.f;
        const float z = tangent(p[v][2] + bias_z + bias_q + total(m, n + 1, row, local));
#endif
        gates[v] = {u, r, z, q};
        c_seen[v] = next_state(u, z, c[v], y[v], fired[v], rho);
        if (KEEP) c_seen[v] = keep[v] * c[v] + (1.f - keep[v]) * c_seen[v];
        valid[v] = exists[v] && (!RAGGED || t < length[v]);
        if (valid[v]) {  // a sequence that has ended keeps its state
          fired[v] = c_seen[v] > theta;
          c[v] = carried_state(c_seen[v], fired[v], theta, rho);
          y[v] = fired[v] ? c_seen[v] : 0.f;
        }
      }
      const u32 next = AFTER ? n + 1 : n + 2;
      if (t + 1 < T) store_word(word_out + (next & 1) * buffer, make_word(y, next));
#pragma unroll
      for (int v = 0; v < VALUES; v++) {
        if (!exists[v]) continue;
        const i64 at = (i64)t * B + b[v];
        __stcs(a.y + at * H + unit, valid[v] ? y[v] : 0.f);
        __stcs(a.c + at * H + unit, valid[v] ? c_seen[v] : 0.f);
        if (a.reserve) save_gates(a.reserve, (i64)T * B, at, reserve_width(H), unit, gates[v]);
      }
      if (t + 1 < T) fetch(t + 1);
    }
  }
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    if (!exists[v]) continue;
    a.c_last[(i64)b[v] * H + unit] = c[v];
    a.y_last[(i64)b[v] * H + unit] = y[v];
  }
  if (timeout == 0) atomicExch_system(a.error, 1);
}
