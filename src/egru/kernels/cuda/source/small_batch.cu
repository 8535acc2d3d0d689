// One kernel runs a whole sequence forward for few rows, reading only the weights of units that fired.
//
// A group is BLOCKS blocks that together hold one copy of the recurrent weights and work on R rows of the batch. A block
// owns UNITS units and keeps their columns for every k in shared memory, [k][column]. What the group exchanges (y, and r*y
// in the "before" form) travels as 64-bit words that carry, beside the values of up to VALUES rows, the number of the
// exchange. A word is written and read whole, so who finds the number it waits for has the values too: there is no
// barrier between blocks, and no fence. Two buffers take turns. A block writes exchange n + 2 only after it has read all of
// n + 1, whose writers had read all of n, so a buffer is overwritten only when everybody is done with it.
//
// At each exchange a warp reads its share of the units, lists those that are not zero, and adds up value times row of
// weights. The warps' sums meet in shared memory, where one thread a unit (and word) finishes the step.

constexpr int THREADS = 32 * WARPS;
constexpr i64 PATIENCE = 4000000000LL;  // cycles: no wait is unbounded
constexpr int SHARE = (H + THREADS - 1) / THREADS;  // units that one thread reads
constexpr int VALUES = LOW == 0 ? 1 : R < 3 ? R : 3;  // rows of one word
constexpr int WORDS = (R + VALUES - 1) / VALUES;
__host__ __device__ constexpr int up4(int n) { return (n + 3) / 4 * 4; }
constexpr int FIRST = up4((AFTER ? 3 : 2) * UNITS);  // columns of the first product of a step, gate after gate
constexpr int SECOND = AFTER ? 0 : up4(UNITS);       // and of the second
constexpr int ROW = FIRST + SECOND;

struct alignas(R == 1 ? 8 : R == 3 ? 16 : 4) Entry {
  u32 k;
  float value[R];
};
struct Memory {
  Operand weights[H * ROW];
  alignas(16) float sums[2][WARPS][R][FIRST];
  alignas(16) Entry list[WARPS][SHARE * 32];
};

__device__ __forceinline__ u64 number(u32 n) { return LOW == 0 ? (u64)(n + 1) : (u64)((n + 1) & 0xffff); }
__device__ __forceinline__ bool carries(u64 word, u32 n) { return (word & (LOW == 0 ? 0xffffffff : 0xffff)) == number(n); }
__device__ __forceinline__ u64 make_word(const float (&v)[VALUES], u32 n) {
#if LOW == 0
  return number(n) | (u64)__float_as_uint(v[0]) << 32;
#else
  u64 word = number(n);
#pragma unroll
  for (int i = 0; i < VALUES; i++) word |= (u64)to_operand(v[i]) << (16 + 16 * i);
  return word;
#endif
}
__device__ __forceinline__ float value_of(u64 word, int i) {
  return LOW == 0 ? __uint_as_float((u32)(word >> 32)) : from_operand((u32)(word >> (16 + 16 * i)) & 0xffff);
}
__device__ __forceinline__ void publish(u64* p, u64 word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
}
__device__ __forceinline__ u64 look(const u64* p) {
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

// Waits for exchange n, and leaves this warp's share of its product with `COLUMNS` columns from `first` on in sums[n & 1].
template <int COLUMNS>
__device__ __forceinline__ void product(Memory& m, const u64* exchange, u32 n, int first, i64& patience) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 word[SHARE][WORDS];
  bool waiting = false;
#pragma unroll
  for (int i = 0; i < SHARE; i++)
#pragma unroll
    for (int j = 0; j < WORDS; j++) word[i][j] = look(exchange + j * SHARE * THREADS + i * THREADS + threadIdx.x);
  i64 start = 0;
  do {
    waiting = false;
#pragma unroll
    for (int i = 0; i < SHARE; i++)
#pragma unroll
      for (int j = 0; j < WORDS; j++)
        if (!carries(word[i][j], n) && i * THREADS + threadIdx.x < H) {
          waiting = true;
          word[i][j] = look(exchange + j * SHARE * THREADS + i * THREADS + threadIdx.x);
        }
    if (waiting) {
      const i64 now = clock64();
      if (start == 0) start = now;
      if (now - start > patience) patience = 0, waiting = false;
    }
  } while (waiting);
  __syncwarp();

  Entry* const list = m.list[warp];
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
      Entry& entry = list[count + __popc(mask & ((1u << lane) - 1))];
      entry.k = k;
#pragma unroll
      for (int r = 0; r < R; r++) entry.value[r] = value_of(word[i][r / VALUES], r % VALUES);
    }
    count += __popc(mask);
  }
  __syncwarp();

  constexpr int LANES = COLUMNS / 4, PARTS = 32 / LANES;  // lanes of one row of weights, and rows at a time
  const int part = lane / LANES, column = lane % LANES * 4;
  float acc[R][4] = {};
#pragma unroll 4
  for (int i = part < PARTS ? part : count; i < count; i += PARTS) {
    const Entry entry = list[i];
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

  // one thread finishes a unit, for the rows of one word
  const int own = tid % UNITS, unit = first + own, j = tid / UNITS;
  const bool finishes = j < WORDS && unit < H;
  u64* const mine = exchange + j * SHARE * THREADS + unit;
  const float rho = *a.rho;
  float bias_r = 0.f, bias_u = 0.f, bias_z = 0.f, bias_q = 0.f, theta = 0.f;
#if INLINE
  float weight_in[3] = {};
#endif
  float c[VALUES], y[VALUES], p[VALUES][3], keep[VALUES];
  bool fired[VALUES], real[VALUES];
  int b[VALUES], length[VALUES];
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    const int row = j * VALUES + v;
    b[v] = a.b0 + group * R + row;
    real[v] = finishes && row < R && b[v] < B;
    c[v] = real[v] ? a.c0[(i64)b[v] * a.state_stride + unit] : 0.f;
    y[v] = real[v] ? a.y0[(i64)b[v] * a.state_stride + unit] : 0.f;
    fired[v] = y[v] != 0.f;
    length[v] = RAGGED && real[v] ? (int)min((i64)T, a.lengths[b[v]]) : T;
    keep[v] = 0.f;
    p[v][0] = p[v][1] = p[v][2] = 0.f;
  }
  if (finishes) {
    publish(mine, make_word(y, 0));
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
      if (!real[v]) continue;
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

  // The block's columns, a warp for each, coalesced along k.
  for (int column = tid >> 5; column < ROW; column += WARPS) {
    const int gate = column < FIRST ? column / UNITS : 2, of = column < FIRST ? column % UNITS : column - FIRST;
    const bool exists = gate < (column < FIRST && !AFTER ? 2 : 3) && of < UNITS && first + of < H;
    const float* from = a.weights + ((i64)gate * H + first + of) * H;
#pragma unroll 16
    for (int k = tid & 31; k < H; k += 32) m.weights[k * ROW + column] = to_operand(exists ? __ldcs(from + k) : 0.f);
  }
  __syncthreads();

  i64 patience = PATIENCE;
  for (int t = 0; t < T; t++) {
    const u32 n = AFTER ? t : 2 * t;
    product<FIRST>(m, exchange + (n & 1) * buffer, n, 0, patience);
#if !AFTER
    float gate_r[VALUES], gate_u[VALUES], ry[VALUES];
    if (finishes) {
#pragma unroll
      for (int v = 0; v < VALUES; v++) {
        const int row = min(j * VALUES + v, R - 1);
        gate_r[v] = sigmoid(p[v][0] + bias_r + total(m, n, row, own));
        gate_u[v] = sigmoid(-(p[v][1] + bias_u + total(m, n, row, UNITS + own)));
        ry[v] = real[v] ? gate_r[v] * y[v] : 0.f;
      }
      publish(mine + ((n + 1) & 1) * buffer, make_word(ry, n + 1));
    }
    product<SECOND>(m, exchange + ((n + 1) & 1) * buffer, n + 1, FIRST, patience);
#endif
    if (finishes) {
      float seen[VALUES];
      Gates gates[VALUES];
      bool counts[VALUES];
#pragma unroll
      for (int v = 0; v < VALUES; v++) {
        const int row = min(j * VALUES + v, R - 1);
#if AFTER
        const float r = sigmoid(p[v][0] + bias_r + total(m, n, row, own));
        const float u = sigmoid(-(p[v][1] + bias_u + total(m, n, row, UNITS + own)));
        const float q = bias_q + total(m, n, row, 2 * UNITS + own);
        const float z = tangent(p[v][2] + bias_z + r * q);
#else
        const float r = gate_r[v], u = gate_u[v], q = 0.f;
        const float z = tangent(p[v][2] + bias_z + bias_q + total(m, n + 1, row, own));
#endif
        gates[v] = {u, r, z, q};
        seen[v] = next_state(u, z, c[v], y[v], fired[v], rho);
        if (KEEP) seen[v] = keep[v] * c[v] + (1.f - keep[v]) * seen[v];
        counts[v] = real[v] && (!RAGGED || t < length[v]);
        if (counts[v]) {  // a finished row keeps its state
          fired[v] = seen[v] > theta;
          c[v] = carried_state(seen[v], fired[v], theta, rho);
          y[v] = fired[v] ? seen[v] : 0.f;
        }
      }
      const u32 next = AFTER ? n + 1 : n + 2;
      if (t + 1 < T) publish(mine + (next & 1) * buffer, make_word(y, next));
#pragma unroll
      for (int v = 0; v < VALUES; v++) {
        if (!real[v]) continue;
        const i64 at = (i64)t * B + b[v];
        __stcs(a.y + at * H + unit, counts[v] ? y[v] : 0.f);
        __stcs(a.c + at * H + unit, counts[v] ? seen[v] : 0.f);
        if (a.reserve) save_gates(a.reserve, (i64)T * B, at, reserve_width(H), unit, gates[v]);
      }
      if (t + 1 < T) fetch(t + 1);
    }
  }
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    if (!real[v]) continue;
    a.c_last[(i64)b[v] * H + unit] = c[v];
    a.y_last[(i64)b[v] * H + unit] = y[v];
  }
  if (patience == 0) atomicExch_system(a.error, 1);
}
