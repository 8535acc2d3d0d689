// Persistent kernel: the forward pass of a whole sequence. group.cuh describes the division of work.
//
// The critical path of a step is barrier, exchange, product, element-wise part. Stores of a step's outputs and loads of
// the next step's inputs overlap with the next product, tile by tile.

constexpr int COLUMNS = UT * 8;
constexpr u32 WEIGHT_BYTES = padded(KT) * 32 * 3 * COLUMNS;
constexpr u64 EXCHANGE = (u64)padded(KT) * 32 * R;  // bytes per parity and group
constexpr int CONSTANTS = INLINE ? 8 : 5;           // biases of r, u, z and q, theta, input weights

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ SequenceForward a) {
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared_address(memory);
  char* after_ring = memory + WEIGHT_BYTES + RING * SLOT;
  float2* scratch = (float2*)(ALIAS ? memory + WEIGHT_BYTES : after_ring);
  float(*constant)[COLUMNS] = (float(*)[COLUMNS])(after_ring + (ALIAS ? 0 : SCRATCH));
  u64* barriers = (u64*)(constant + CONSTANTS);
  Ring ring = {base + WEIGHT_BYTES, shared_address(barriers), shared_address(barriers + RING)};
  const u32 loaded = shared_address(barriers + 2 * RING);
  volatile int* const stalled = (volatile int*)(barriers + 2 * RING + 1);
  if (threadIdx.x == 0) *stalled = 0;
  const int tid = threadIdx.x;
  const Position pos = position(a.b0, a.B);
  const int T = a.T, B = a.B;
  char* const exchange = a.exchange + pos.group * EXCHANGE;
  const u64 parity_stride = gridDim.x / CPG * EXCHANGE;
  u32* const counter = a.counter + pos.group * 32;

  for (int i = tid; i < COLUMNS; i += THREADS) {
    int unit = pos.block * COLUMNS + i;
    bool valid = unit < H;
    float ih[3], hh[3];
    for (int g = 0; g < 3; g++) {
      ih[g] = valid && a.bias_ih ? a.bias_ih[g * H + unit] : 0.f;
      hh[g] = valid && a.bias_hh ? a.bias_hh[g * H + unit] : 0.f;
      if (INLINE) constant[CONSTANTS - 3 + g][i] = valid ? rounded(a.weight_ih[g * H + unit]) : 0.f;
    }
    constant[0][i] = ih[0] + hh[0];
    constant[1][i] = ih[1] + hh[1];
    constant[2][i] = AFTER ? ih[2] : ih[2] + hh[2];
    constant[3][i] = hh[2];
    constant[4][i] = valid ? a.theta[unit] : 1e30f;  // padding never emits an event
  }
  init_barriers(ring, loaded);

  i64 timeout = TIMEOUT;
  u32 it = 0;
  if (pos.wg == 2) {
    decrease_registers<40>();
    if (tid == CONSUMERS) load_weights(base, a.weights + (u64)pos.block * WEIGHT_BYTES, WEIGHT_BYTES, loaded);
    for (int n = 0; n < (AFTER ? 1 : 2) * T; n++) {
      if (!produce<KT>(exchange + (n & 1) * parity_stride, counter, (u32)(n + 1) * CPG, ring, it, stalled, timeout))
        break;
#if !INLINE
      const int t = (AFTER ? n : n / 2) + 3;  // three steps ahead
      if (t < T && (AFTER || n % 2 == 0))
        for (int i = tid - CONSUMERS; i < 3 * R; i += 128) {
          int b = pos.group * R + a.b0 + i % R, unit = pos.block * COLUMNS;
          if (b < B && unit < HP)
            prefetch_span(a.projected + ((i64)t * B + b) * (3 * HP) + i / R * HP + unit, min(COLUMNS, HP - unit) * 4);
        }
#endif
    }
    if (timeout == 0) report_timeout(a.error);
  } else {
    increase_registers<232>();
    const float rho = *a.rho;
    const int first = 2 * (tid & 3);
    const int length = RAGGED && pos.active ? (int)min((i64)T, a.lengths[pos.b]) : T;
    float c[UT][2], y[UT][2];
    u32 fired = 0;
#pragma unroll
    for (int i = 0; i < UT; i++) {
      int unit = pos.unit + 8 * i;
      float2 c0 = make_float2(0.f, 0.f), y0 = c0;
      if (pos.active) {
        c0 = load_pair(a.c0 + (i64)pos.b * a.state_stride, unit);
        y0 = load_pair(a.y0 + (i64)pos.b * a.state_stride, unit);
        if (unit < HP) exchange_store(exchange, unit, pos.row, pack_low(y0.x, y0.y));
      }
      c[i][0] = c0.x, c[i][1] = c0.y, y[i][0] = y0.x, y[i][1] = y0.y;
      fired |= (y0.x != 0.f ? 1u : 0u) << (2 * i) | (y0.y != 0.f ? 2u : 0u) << (2 * i);
    }
    arrive(counter);

    float2 p[UT][3];
    float x = 0.f;
    SavedPair saved[UT] = {};
    float2 y_out[UT] = {}, c_out[UT] = {};
    auto store = [&](int t, int i) {
      const int unit = pos.unit + 8 * i;
      if (!pos.active || t < 0) return;
      const i64 at = (i64)t * B + pos.b;
      store_pair(a.y + at * H, unit, y_out[i]);
      store_pair(a.c + at * H, unit, c_out[i]);
      if (a.reserve) save_pair(a.reserve, (i64)T * B, at, unit, saved[i]);
    };
    auto fetch = [&](int t, int i) {
      const int unit = pos.unit + 8 * i;
      if (!pos.active || unit >= HP) return;
#if INLINE
      if (i == 0) x = a.input[(i64)t * B + pos.b];
#else
#pragma unroll
      for (int g = 0; g < 3; g++)
        p[i][g] = __ldcs((const float2*)(a.projected + ((i64)t * B + pos.b) * (3 * HP) + g * HP + unit));
#endif
    };
#pragma unroll
    for (int i = 0; i < UT; i++)
#pragma unroll
      for (int g = 0; g < 3; g++) p[i][g] = make_float2(0.f, 0.f);
    barrier_wait(loaded, 0, timeout);

    for (int t = 0; t < T; t++) {
      auto overlapped = [&](int i) {
        store(t - 1, i);
        fetch(t, i);
      };
#if AFTER
      float v[3 * UT][2];
      {
        float acc[UT * 12];
        product<COLUMNS * 3, KT, UT>(acc, base, ring, it, pos, timeout, overlapped);
        combine<3 * UT>(acc, v, scratch, pos.wg, pos.lane);
      }
#else
      float gate_r[UT][2], gate_u[UT][2], v[UT][2];
      {
        float acc[UT * 8], w[2 * UT][2];
        product<COLUMNS * 2, KT, UT>(acc, base, ring, it, pos, timeout, overlapped);
        combine<2 * UT>(acc, w, scratch, pos.wg, pos.lane);
        if (INLINE) x = rounded(x);
#pragma unroll
        for (int i = 0; i < UT; i++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int k = first + 8 * i + h;
            float pr = (h ? p[i][0].y : p[i][0].x) + constant[0][k], pu = (h ? p[i][1].y : p[i][1].x) + constant[1][k];
            if (INLINE) pr += x * constant[CONSTANTS - 3][k], pu += x * constant[CONSTANTS - 2][k];
            gate_r[i][h] = sigmoid(pr + w[2 * i][h]);
            gate_u[i][h] = sigmoid(-(pu + w[2 * i + 1][h]));
          }
          if (pos.active && pos.unit + 8 * i < HP)
            exchange_store(exchange + parity_stride, pos.unit + 8 * i, pos.row,
                           pack_low(gate_r[i][0] * y[i][0], gate_r[i][1] * y[i][1]));
        }
        arrive(counter);
      }
      {
        float acc[UT * 4];
        product<COLUMNS, KT, 0>(acc, base + padded(KT) * 32 * 2 * COLUMNS, ring, it, pos, timeout, [](int) {});
        combine<UT>(acc, v, scratch, pos.wg, pos.lane);
      }
#endif
      if (INLINE && AFTER) x = rounded(x);
      const bool valid = !RAGGED || t < length;
      char* const next = exchange + (AFTER ? (t + 1) & 1 : 0) * parity_stride;
#pragma unroll
      for (int i = 0; i < UT; i++) {
        float2 keep = pos.active ? load_keep(a.keep, t, pos.b, pos.unit + 8 * i) : make_float2(0.f, 0.f);
        float q[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int k = first + 8 * i + h;
          float pz = (h ? p[i][2].y : p[i][2].x) + constant[2][k], theta = constant[4][k];
          if (INLINE) pz += x * constant[CONSTANTS - 1][k];
#if AFTER
          float pr = (h ? p[i][0].y : p[i][0].x) + constant[0][k], pu = (h ? p[i][1].y : p[i][1].x) + constant[1][k];
          if (INLINE) pr += x * constant[CONSTANTS - 3][k], pu += x * constant[CONSTANTS - 2][k];
          float r = sigmoid(pr + v[3 * i][h]), u = sigmoid(-(pu + v[3 * i + 1][h]));
          q[h] = v[3 * i + 2][h] + constant[3][k];
          float z = tangent(pz + r * q[h]);
#else
          float r = gate_r[i][h], u = gate_u[i][h];
          float z = tangent(pz + v[i][h]);
#endif
          (h ? saved[i].ur.y : saved[i].ur.x) = pack_half(u, r);
          bool e = fired >> (2 * i + h) & 1;
          float c_seen = next_state(u, z, c[i][h], y[i][h], e, rho);
          float keep_h = h ? keep.y : keep.x;
          if (KEEP) c_seen = keep_h * c[i][h] + (1.f - keep_h) * c_seen;
          e = c_seen > theta;
          if (valid) {  // a sequence that has ended keeps its state
            fired = (fired & ~(1u << (2 * i + h))) | (e ? 1u : 0u) << (2 * i + h);
            c[i][h] = carried_state(c_seen, e, theta, rho);
            y[i][h] = e ? c_seen : 0.f;
          }
          (h ? c_out[i].y : c_out[i].x) = valid ? c_seen : 0.f;
          (h ? y_out[i].y : y_out[i].x) = valid ? y[i][h] : 0.f;
        }
        saved[i].q = AFTER ? pack_half(q[0], q[1]) : 0;
        if (pos.active && pos.unit + 8 * i < HP) exchange_store(next, pos.unit + 8 * i, pos.row, pack_low(y[i][0], y[i][1]));
      }
      if (t + 1 < T) arrive(counter);
    }
#pragma unroll
    for (int i = 0; i < UT; i++) store(T - 1, i);
    if (timeout == 0) report_timeout(a.error);
    if (pos.active) {
#pragma unroll
      for (int i = 0; i < UT; i++) {
        store_pair(a.c_last + (i64)pos.b * H, pos.unit + 8 * i, make_float2(c[i][0], c[i][1]));
        store_pair(a.y_last + (i64)pos.b * H, pos.unit + 8 * i, make_float2(y[i][0], y[i][1]));
      }
    }
  }
}
