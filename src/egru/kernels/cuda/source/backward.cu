// Persistent kernel: the backward pass of a whole sequence. See group.cuh and forward.cu.
//
// Exchange n belongs to step t = T - 1 - n. It contains the gradients of the pre-activations in blocks of KT k16-tiles:
// a_r, a_u and r a_z for "after"; a_z, and in a second exchange a_r and a_u, for "before". The sums over time of theta and
// a_z accumulate in registers. All others come from the product over time with `source`, which has a column of ones and,
// if the input has one feature, a column of inputs.

constexpr int COLUMNS = UT * 8;
constexpr int BLOCKS = AFTER ? 3 : 2;  // gate blocks in the widest exchange
constexpr u32 WEIGHT_BYTES = (AFTER ? padded(3 * KT) : padded(KT) + padded(2 * KT)) * 32 * COLUMNS;
constexpr u64 EXCHANGE = (u64)padded(BLOCKS * KT) * 32 * R;
constexpr int SUMS = INLINE ? 3 : 2;  // theta, a_z, and a_z times the input

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ SequenceBackward a) {
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared_address(memory);
  char* after_ring = memory + WEIGHT_BYTES + RING * SLOT;
  float2* scratch = (float2*)(ALIAS ? memory + WEIGHT_BYTES : after_ring);
  float* thresholds = (float*)(after_ring + (ALIAS ? 0 : SCRATCH));
  u64* barriers = (u64*)(thresholds + COLUMNS);
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

  for (int i = tid; i < COLUMNS; i += THREADS)
    thresholds[i] = pos.block * COLUMNS + i < H ? a.theta[pos.block * COLUMNS + i] : 1e30f;
  init_barriers(ring, loaded);

  i64 timeout = TIMEOUT;
  u32 it = 0;
  if (pos.wg == 2) {
    decrease_registers<40>();
    if (tid == CONSUMERS) load_weights(base, a.weights + (u64)pos.block * WEIGHT_BYTES, WEIGHT_BYTES, loaded);
    for (int n = 0; n < T; n++) {
#if AFTER
      if (!produce<3 * KT>(exchange + (n & 1) * parity_stride, counter, (u32)(n + 1) * CPG, ring, it, stalled, timeout))
        break;
#else
      if (!produce<KT>(exchange, counter, (u32)(2 * n + 1) * CPG, ring, it, stalled, timeout) ||
          !produce<2 * KT>(exchange + parity_stride, counter, (u32)(2 * n + 2) * CPG, ring, it, stalled, timeout))
        break;
#endif
      const int t = T - 1 - n - 3;  // three steps ahead
      const int i = tid - CONSUMERS, row = i % 64, b = a.b0 + pos.group * R + row, unit = pos.block * COLUMNS;
      if (t > 0 && row < R && b < B && unit < H) {
        const i64 at = (i64)t * B + b;
        if (i < 64) {
          constexpr int width = reserve_width(H);
          prefetch_span(a.reserve + at * width + unit, min(COLUMNS, H - unit) * 4);
          if (AFTER)
            prefetch_span(q_plane((Reserve*)a.reserve, (i64)T * B, width) + at * width + unit, min(COLUMNS, H - unit) * 2);
        } else {
          prefetch_span(a.c + (at - B) * H + unit, min(COLUMNS, H - unit) * 4);
          if (GRAD_Y) prefetch_span(a.grad_y + at * H + unit, min(COLUMNS, H - unit) * 4);
        }
      }
    }
    if (timeout == 0) report_timeout(a.error);
  } else {
    increase_registers<232>();
    const float rho = *a.rho;
    const int first = 2 * (tid & 3);
    const int length = RAGGED && pos.active ? (int)min((i64)T, a.lengths[pos.b]) : T;
    const float2 zero = make_float2(0.f, 0.f);
    float dc[UT][2], dy[UT][2], de[UT][2], sums[SUMS][UT][2];
    float2 c[UT];  // the state that was compared with the threshold at this step
    SavedPair gates[UT] = {};
    float2 c_prev[UT], grad[UT];
    float x = 0.f;
    const i64 state_at = (i64)pos.b * H;
    u32 out[UT][4] = {}, y_low[UT] = {};
    float x_stored = 0.f;  // the input of the step that `store` writes next
#if !AFTER
    u32 z_low[UT] = {};
    float y_prev[UT][2] = {};
#endif
    auto store = [&](int t, int i) {
      const int unit = pos.unit + 8 * i;
      if (!pos.active || unit >= HP) return;
      const i64 at = (i64)t * B + pos.b;
#pragma unroll
      for (int g = 0; g < (GRAD_INPUT ? 4 : 3); g++) __stcs(a.gates + ((at * 4 + g) * HP + unit) / 2, out[i][g]);
      __stcs(a.source + (at * (HP + 8) + unit) / 2, y_low[i]);
      if (i == 0 && pos.unit == 0)
        __stcs((uint4*)(a.source + (at * (HP + 8) + HP) / 2), make_uint4(pack_low(1.f, x_stored), 0, 0, 0));
#if !AFTER
      __stcs(a.source_z + (at * HP + unit) / 2, z_low[i]);
#endif
    };
    auto fetch = [&](int t, int i) {
      const int unit = pos.unit + 8 * i;
      if (!pos.active || t < 0) return;
      const i64 at = (i64)t * B + pos.b;
      if (INLINE && i == 0) x = a.input[at];
      gates[i] = saved_pair(a.reserve, (i64)T * B, at, unit);
      c_prev[i] = t > 0 ? load_pair(a.c + (at - B) * H, unit) : load_pair(a.c0 + (i64)pos.b * a.state_stride, unit);
      if (GRAD_Y) grad[i] = load_pair(a.grad_y + at * H, unit);
    };
#pragma unroll
    for (int i = 0; i < UT; i++) {
      int unit = pos.unit + 8 * i;
      float2 gc = pos.active && a.grad_c_last ? load_pair(a.grad_c_last + state_at, unit) : zero;
      float2 gy = pos.active && a.grad_y_last ? load_pair(a.grad_y_last + state_at, unit) : zero;
      c[i] = pos.active ? load_pair(a.c + (i64)(T - 1) * B * H + state_at, unit) : zero;
      c_prev[i] = grad[i] = zero;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        dc[i][h] = h ? gc.y : gc.x;
        dy[i][h] = h ? gy.y : gy.x;
        de[i][h] = 0.f;
#pragma unroll
        for (int s = 0; s < SUMS; s++) sums[s][i][h] = 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < UT; i++) fetch(T - 1, i);
    barrier_wait(loaded, 0, timeout);

    for (int t = T - 1; t >= -1; t--) {
      float v[UT][2];  // the gradient of y_t through the weights
      if (t < T - 1) {
        auto overlapped = [&](int i) {
          store(t + 1, i);
          fetch(t, i);
        };
        float acc[UT * 4];
#if AFTER
        product<COLUMNS, 3 * KT, UT>(acc, base, ring, it, pos, timeout, overlapped);
#else
        product<COLUMNS, 2 * KT, UT>(acc, base + padded(KT) * 32 * COLUMNS, ring, it, pos, timeout, overlapped);
#endif
        combine<UT>(acc, v, scratch, pos.wg, pos.lane);
#pragma unroll
        for (int i = 0; i < UT; i++) dy[i][0] += v[i][0], dy[i][1] += v[i][1];
      }
      if (t < 0) break;

      if (INLINE) x = rounded(x);
      const bool valid = !RAGGED || t < length;
      char* const next = exchange + (AFTER ? (T - 1 - t) & 1 : 0) * parity_stride;
#pragma unroll
      for (int i = 0; i < UT; i++) {
        const int unit = pos.unit + 8 * i;
        float2 keep = zero, gc = zero, y_first = zero;
        if (pos.active) {
          keep = load_keep(a.keep, t, pos.b, unit);
          if (GRAD_C) gc = load_pair(a.grad_c + (i64)t * B * H + state_at, unit);
          if (t == 0) y_first = load_pair(a.y0 + (i64)pos.b * a.state_stride, unit);
        }
        const float2 q = unpack_half(gates[i].q);
        float a_u[2], a_z[2], a_q[2], a_r[2], y[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float theta = thresholds[first + 8 * i + h];
          float2 ur = unpack_half(h ? gates[i].ur.y : gates[i].ur.x);
          float cp = h ? c_prev[i].y : c_prev[i].x, yf = h ? y_first.y : y_first.x;
          Previous prev = t > 0 ? previous_step(cp, theta, rho) : Previous{cp, yf, yf != 0.f};
          float dy_t = dy[i][h] + (h ? grad[i].y : grad[i].x);
          float c_seen = h ? c[i].y : c[i].x, kept = h ? keep.y : keep.x;
          float z = candidate(ur.x, c_seen, prev, kept, rho);
          ElementGradients s = backward_element(ur.x, z, c_seen, prev, theta, rho, dy_t, dc[i][h], de[i][h],
                                                h ? gc.y : gc.x, kept, a.surrogate);
          a_u[h] = valid ? s.a_u : 0.f;
          a_z[h] = valid ? s.a_z : 0.f;
          a_q[h] = AFTER ? ur.y * a_z[h] : a_z[h];
          a_r[h] = AFTER ? a_z[h] * (h ? q.y : q.x) * ur.y * (1.f - ur.y) : 0.f;
          y[h] = prev.y;
          if (valid) {  // a sequence that has ended passes its gradients on unchanged
            dc[i][h] = s.dc, dy[i][h] = s.dy, de[i][h] = s.de;
            sums[0][i][h] += s.theta;
          }
          sums[1][i][h] += a_z[h];
          if (INLINE) sums[SUMS - 1][i][h] += x * a_z[h];
#if !AFTER
          y_prev[i][h] = prev.y;
#endif
        }
        out[i][0] = pack_low(a_q[0], a_q[1]);
        out[i][1] = pack_low(a_r[0], a_r[1]);
        out[i][2] = pack_low(a_u[0], a_u[1]);
        out[i][3] = pack_low(a_z[0], a_z[1]);
        y_low[i] = pack_low(y[0], y[1]);
        c[i] = c_prev[i];
        if (pos.active && unit < HP) {
#if AFTER
          exchange_store(next, unit, pos.row, out[i][1]);
          exchange_store(next, 16 * KT + unit, pos.row, out[i][2]);
          exchange_store(next, 32 * KT + unit, pos.row, out[i][0]);
#else
          exchange_store(next, unit, pos.row, out[i][3]);
#endif
        }
      }
      x_stored = x;
      arrive(counter);
#if !AFTER
      {
        float acc[UT * 4];
        product<COLUMNS, KT, 0>(acc, base, ring, it, pos, timeout, [](int) {});
        combine<UT>(acc, v, scratch, pos.wg, pos.lane);
#pragma unroll
        for (int i = 0; i < UT; i++) {
          const int unit = pos.unit + 8 * i;
          float ry[2], a_r[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float r = unpack_half(h ? gates[i].ur.y : gates[i].ur.x).y, y = y_prev[i][h];
            ry[h] = r * y;
            a_r[h] = valid ? v[i][h] * y * r * (1.f - r) : 0.f;
            if (valid) dy[i][h] += r * v[i][h];
          }
          z_low[i] = pack_low(ry[0], ry[1]);
          out[i][1] = pack_low(a_r[0], a_r[1]);
          if (pos.active && unit < HP) {
            exchange_store(exchange + parity_stride, unit, pos.row, out[i][1]);
            exchange_store(exchange + parity_stride, 16 * KT + unit, pos.row, out[i][2]);
          }
        }
        arrive(counter);
      }
#endif
    }
    if (timeout == 0) report_timeout(a.error);
    if (pos.active) {
#pragma unroll
      for (int i = 0; i < UT; i++) {
        store_pair(a.dc0 + state_at, pos.unit + 8 * i, make_float2(dc[i][0], dc[i][1]));
        store_pair(a.dy0 + state_at, pos.unit + 8 * i, make_float2(dy[i][0], dy[i][1]));
      }
    }
    float* const sums_out = a.sums + (i64)((a.group0 + pos.group) * 8 + (tid >> 5)) * SUMS * HP;
#pragma unroll
    for (int s = 0; s < SUMS; s++)
#pragma unroll
      for (int i = 0; i < UT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float total = pos.active ? sums[s][i][h] : 0.f;
          total += __shfl_xor_sync(~0u, total, 4);
          total += __shfl_xor_sync(~0u, total, 8);
          total += __shfl_xor_sync(~0u, total, 16);
          if ((tid & 31) < 4 && pos.unit + 8 * i < HP) sums_out[s * HP + pos.unit + 8 * i + h] = total;
        }
  }
}
