// Cluster kernel: the backward pass of a whole sequence. See cluster.cuh and cluster_forward.cu.
//
// Blocks exchange the gradients of the pre-activations: a_r, a_u and r a_z for "after", in one exchange per step; a_z, then
// a_r and a_u, for "before". The sums over time of theta and a_z accumulate in registers. All others come from the product
// over time with `source`, whose rows are y of the previous step, 1 and, if the kernel of the forward pass computes x W,
// the input.

constexpr int SOURCE = H + 1 + I;  // used columns of `source`

extern "C" __global__ void __launch_bounds__(THREADS) cluster_backward(const __grid_constant__ ClusterBackward a) {
  extern __shared__ __align__(16) float4 memory[];
  float4* const weights = memory;                        // [gate][KC][U]
  float* const grads = (float*)(weights + 3 * KC * U);   // "after": [2][R][3][HK]; "before": [R][HK], [R][2][HK]
  float* const scratch = grads + (AFTER ? 6 : 3) * R * HK;  // [WARPS][R][32]
  const Place p = place_of(a.B);
  const int T = a.T, B = a.B;

  {
    const int first = blockIdx.x % C * U;
    for (int at = threadIdx.x; at < 3 * KC * U; at += THREADS) {
      const int unit = at % U, k = at / U % KC * 4, gate = at / (KC * U);
      float v[4];
      for (int j = 0; j < 4; j++)
        v[j] = first + unit < H && k + j < H ? a.weights[((i64)gate * H + k + j) * H + first + unit] : 0.f;
      weights[at] = make_float4(v[0], v[1], v[2], v[3]);
    }
    for (int i = threadIdx.x; i < (AFTER ? 6 : 3) * R * HK; i += THREADS) grads[i] = 0.f;
  }

  const float rho = *a.rho;
  const i64 state = (i64)p.b * H + p.unit, start = (i64)p.b * a.state_stride + p.unit;
  float dc = 0.f, dy = 0.f, de = 0.f, theta = 0.f, sum_theta = 0.f, sum_z = 0.f;
  float c = 0.f;  // the state that was compared with the threshold at this step
  float c_prev = 0.f, grad_y = 0.f;
  Gates gate = {};
  int length = 0;
  auto fetch = [&](int t, Gates& gate, float& c_prev, float& grad_y) {
    if (!p.active || t < 0) return;
    const i64 row = (i64)t * B + p.b;
    gate = saved_gates(a.reserve, (i64)T * B, row, H, p.unit);
    c_prev = t > 0 ? __ldcs(a.c + (row - B) * H + p.unit) : a.c0[start];
    if (a.grad_y) grad_y = __ldcs(a.grad_y + row * H + p.unit);
  };
  if (p.active) {
    theta = a.theta[p.unit];
    if (a.grad_c_last) dc = a.grad_c_last[state];
    if (a.grad_y_last) dy = a.grad_y_last[state];
    c = a.c[(i64)(T - 1) * B * H + state];
    length = RAGGED ? (int)min((i64)T, a.lengths[p.b]) : T;
  }
  fetch(T - 1, gate, c_prev, grad_y);
  cluster_sync();

  for (int t = T - 1; t >= -1; t--) {
    if (t < T - 1) {  // the gradient of y_t through the weights
      float sums[4][R] = {}, v[4] = {};
#if AFTER
      accumulate<1, 0, 1, 0, 3 * KC>(sums, weights, grads + ((t + 1) & 1) * 3 * R * HK, p);
#else
      accumulate<1, 0, 1, 0, 2 * KC>(sums, weights, grads + R * HK, p);
#endif
      combine<1, 1>(sums, v, scratch, p);
      dy += v[0];
    }
    if (t < 0) break;

    Gates gate_next = {};
    float c_next = 0.f, grad_y_next = 0.f;
    fetch(t - 1, gate_next, c_next, grad_y_next);
    const bool valid = !RAGGED || t < length;
    Previous prev = {};
    ElementGradients s = {};
    float a_z = 0.f, a_u = 0.f, a_r = 0.f;
    const i64 row = (i64)t * B + p.b;
    if (p.active) {
      if (t > 0) {
        prev = previous_step(c_prev, theta, rho);
      } else {
        const float y = a.y0[start];
        prev = {c_prev, y, y != 0.f};
      }
      const float keep = load_keep(a.keep, t, p.b, p.unit), grad_c = a.grad_c ? a.grad_c[row * H + p.unit] : 0.f;
      s = backward_element(gate.u, gate.z, c, prev, theta, rho, dy + grad_y, dc, de, grad_c, keep, a.surrogate);
      if (valid) {  // a sequence that has ended passes its gradients on unchanged
        a_u = s.a_u, a_z = s.a_z;
        dc = s.dc, dy = s.dy, de = s.de;
        sum_theta += s.theta;
        sum_z += a_z;
      }
    }
#if AFTER
    a_r = a_z * gate.q * gate.r * (1.f - gate.r);
    if (p.active) {
      float* const row_grads = grads + ((t & 1) * R + p.row) * 3 * HK + p.unit;
      share(row_grads, a_r);
      share(row_grads + HK, a_u);
      share(row_grads + 2 * HK, gate.r * a_z);
    }
#else
    if (p.active) share(grads + p.row * HK + p.unit, a_z);
    cluster_sync();
    float sums[4][R] = {}, m[4] = {};
    accumulate<1, 0, 1, 0, KC>(sums, weights + 2 * KC * U, grads, p);
    combine<1, 1>(sums, m, scratch, p);
    if (p.active) {
      if (valid) {
        a_r = m[0] * prev.y * gate.r * (1.f - gate.r);
        dy += gate.r * m[0];
      }
      float* const row_grads = grads + (R + 2 * p.row) * HK + p.unit;
      share(row_grads, a_r);
      share(row_grads + HK, a_u);
      __stcs(a.source_z + row * H + p.unit, gate.r * prev.y);
    }
#endif
    if (p.active) {
      float* const out = a.gates + row * 4 * H + p.unit;
      if (AFTER) __stcs(out, gate.r * a_z);
      __stcs(out + H, a_r);
      __stcs(out + 2 * H, a_u);
      __stcs(out + 3 * H, a_z);
      float* const source = a.source + row * a.source_width;
      source[p.unit] = prev.y;
      for (int i = p.unit; i <= I; i += H) source[H + i] = i ? a.input[row * I + i - 1] : 1.f;
    }
    c = c_prev, c_prev = c_next, grad_y = grad_y_next, gate = gate_next;
    cluster_sync();
  }
  if (p.active) a.dc0[state] = dc, a.dy0[state] = dy;

  // Add the rows of the cluster.
  __syncthreads();
  for (int s = 0; s < 2; s++) {
    if (p.row < R) scratch[p.row * 32 + p.lane] = p.active ? (s ? sum_z : sum_theta) : 0.f;
    __syncthreads();
    if (p.warp == 0 && p.lane < U && p.unit < H) {
      float total = 0.f;
      for (int r = 0; r < R; r++) total += scratch[r * 32 + p.lane];
      a.sums[((i64)p.cluster * 2 + s) * H + p.unit] = total;
    }
    __syncthreads();
  }
}
