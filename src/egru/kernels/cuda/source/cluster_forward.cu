// Cluster kernel: the forward pass of a whole sequence. See cluster.cuh.

constexpr int GATES = I ? 4 : 3;  // sums per unit: r, u, the recurrent part of z, and its input part

// Copies the rows of three gates of a (3 H, `columns`) matrix as [chunk / LANES][gate][unit][chunk % LANES].
__device__ __forceinline__ void load_weights(float4* to, const float* from, int columns, int chunks) {
  const int first = blockIdx.x % C * U;
  for (int at = threadIdx.x; at < chunks * 3 * U; at += THREADS) {
    const int k = at % chunks, gate = at / chunks % 3, unit = at / (3 * chunks);
    to[((k / LANES * 3 + gate) * U + unit) * LANES + k % LANES] = weight_chunk(from, gate, first + unit, 4 * k, columns);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) cluster_forward(const __grid_constant__ ClusterForward a) {
  extern __shared__ __align__(16) float4 memory[];
  const Place p = place_of(a.B);
  const int T = a.T, B = a.B, b0 = p.cluster * R;
#if LANES == 1
  float4* const weights = memory;                      // [KC][3][U]
  float4* const input_weights = weights + KC * 3 * U;  // [IC][3][U]
  load_weights(weights, a.weights, H, KC);
#else
  const Registers weights = load_registers(a.weights, p);
  float4* const input_weights = memory;  // [IC / LANES][3][U][LANES]
#endif
  float* const y_rows = (float*)(input_weights + IC * 3 * U);  // [2][R][HK]: y; "before": y, then r y
  float* const x_rows = y_rows + 2 * R * HK;                   // [2][R][IK]
  float* const scratch = x_rows + 2 * R * IK;                  // [WARPS][GATES][R][32], if warps share the terms
  if (I) load_weights(input_weights, a.weight_ih, I, IC);
  for (int i = threadIdx.x; i < 2 * R * (HK + IK); i += THREADS) y_rows[i] = 0.f;
  __syncthreads();
  for (int i = threadIdx.x; i < R * H; i += THREADS)
    if (b0 + i / H < B) y_rows[i / H * HK + i % H] = a.y0[(i64)(b0 + i / H) * a.state_stride + i % H];
  auto input = [&](int t, int i) { return b0 + i / I < B && t < T ? a.input[((i64)t * B + b0) * I + i] : 0.f; };
  if (I)
    for (int i = threadIdx.x; i < R * I; i += THREADS) x_rows[i / I * IK + i % I] = input(0, i);

  float c = 0.f, y = 0.f, theta = 0.f, offset[3] = {}, offset_q = 0.f, projected[3] = {};
  const float rho = *a.rho;
  auto fetch = [&](int t) {
    if (I || !p.active || t >= T) return;
#pragma unroll
    for (int g = 0; g < 3; g++) projected[g] = __ldcs(a.projected + (((i64)t * B + p.b) * 3 + g) * H + p.unit);
  };
  int length = 0;
  if (p.active) {
    c = a.c0[(i64)p.b * a.state_stride + p.unit];
    y = a.y0[(i64)p.b * a.state_stride + p.unit];
    theta = a.theta[p.unit];
    for (int g = 0; g < 3; g++) offset[g] = bias(a.bias_ih, g * H + p.unit);
    for (int g = 0; g < 2; g++) offset[g] += bias(a.bias_hh, g * H + p.unit);
    offset_q = bias(a.bias_hh, 2 * H + p.unit);
    length = RAGGED ? (int)min((i64)T, a.lengths[p.b]) : T;
  }
  bool fired = y != 0.f;
  fetch(0);
  cluster_sync();

  constexpr int LOADS = (R * I + THREADS - 1) / THREADS;
  for (int t = 0; t < T; t++) {
    const float* const x_now = x_rows + (t & 1) * R * IK;
    float x_next[LOADS + 1], input_z = 0.f;
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
      const int i = j * THREADS + threadIdx.x;
      x_next[j] = i < R * I ? input(t + 1, i) : 0.f;
    }
    float sums[4][R] = {}, v[4] = {}, r, u, z, q;
    const float p_r = offset[0] + projected[0], p_u = offset[1] + projected[1], p_z = offset[2] + projected[2];
    fetch(t + 1);
    if (I) accumulate<3, 0, 3, 3, IC>(sums, input_weights, x_now, p);
#if AFTER
    accumulate<3, 0, 3, 2, KC>(sums, weights, y_rows + (t & 1) * R * HK, p);
    combine<I ? 15 : 7, GATES>(sums, v, scratch, p);
    if (I) input_z = v[GATES - 1];
    r = sigmoid(p_r + v[0]);
    u = sigmoid(-(p_u + v[1]));
    q = offset_q + v[2];
    z = tangent(p_z + input_z + r * q);
#else
    accumulate<3, 0, 2, 2, KC>(sums, weights, y_rows, p);
    combine<I ? 11 : 3, GATES>(sums, v, scratch, p);
    if (I) input_z = v[GATES - 1];
    r = sigmoid(p_r + v[0]);
    u = sigmoid(-(p_u + v[1]));
    if (p.active) share(y_rows + (R + p.row) * HK + p.unit, r * y);
    cluster_sync();
    accumulate<3, 2, 1, 2, KC>(sums, weights, y_rows + R * HK, p);
    combine<4, GATES>(sums, v, scratch, p);
    q = offset_q;
    z = tangent(p_z + input_z + q + v[2]);
#endif
    if (p.active) {
      const i64 row = (i64)t * B + p.b, at = row * H + p.unit;
      const bool valid = !RAGGED || t < length;
      float c_seen = next_state(u, z, c, y, fired, rho);
      if (KEEP) {
        const float keep = load_keep(a.keep, t, p.b, p.unit);
        c_seen = keep * c + (1.f - keep) * c_seen;
      }
      const bool e = c_seen > theta;
      if (a.reserve) save_gates(a.reserve, (i64)T * B, row, H, p.unit, {u, r, z, q});
      if (valid) {  // a sequence that has ended keeps its state
        c = carried_state(c_seen, e, theta, rho);
        y = e ? c_seen : 0.f;
        fired = e;
      }
      if (t + 1 < T) share(y_rows + ((AFTER ? ((t + 1) & 1) * R : 0) + p.row) * HK + p.unit, y);
      __stcs(a.y + at, valid ? y : 0.f);
      __stcs(a.c + at, valid ? c_seen : 0.f);
    }
    if (t + 1 == T) break;
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
      const int i = j * THREADS + threadIdx.x;
      if (i < R * I) x_rows[(((t + 1) & 1) * R + i / I) * IK + i % I] = x_next[j];
    }
    cluster_sync();
  }
  if (p.active) {
    a.c_last[(i64)p.b * H + p.unit] = c;
    a.y_last[(i64)p.b * H + p.unit] = y;
  }
}
