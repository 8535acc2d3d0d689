// The element-wise part of one step, one thread per unit and sequence. cuBLAS computes the products between the kernels.

// "before" only: computes r and u, and r*y for the second product.
extern "C" __global__ void forward_gates(const __grid_constant__ StepForward a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.B * a.H) return;
  int b = i / a.H, unit = i % a.H;
  const float* p = a.projected + ((i64)a.t * a.B + b) * 3 * a.HP + unit;
  const float* v = a.product + (i64)b * 2 * a.HP + unit;
  float r = sigmoid(p[0] + bias(a.bias_ih, unit) + bias(a.bias_hh, unit) + v[0]);
  a.gate_u[i] = sigmoid(-(p[a.HP] + bias(a.bias_ih, a.H + unit) + bias(a.bias_hh, a.H + unit) + v[a.HP]));
  a.gate_r[i] = r;
  a.operand[(i64)b * a.HP + unit] = to_operand(r * a.y_last[i]);
}

extern "C" __global__ void forward_state(const __grid_constant__ StepForward a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.B * a.H) return;
  int b = i / a.H, unit = i % a.H;
  const float rho = *a.rho, theta = a.theta[unit];
  const i64 row = (i64)a.t * a.B + b;
  const float* p = a.projected + row * 3 * a.HP + unit;
  float pz = p[2 * a.HP] + bias(a.bias_ih, 2 * a.H + unit), q = bias(a.bias_hh, 2 * a.H + unit);
#if AFTER
  const float* v = a.product + (i64)b * 3 * a.HP + unit;
  float r = sigmoid(p[0] + bias(a.bias_ih, unit) + bias(a.bias_hh, unit) + v[0]);
  float u = sigmoid(-(p[a.HP] + bias(a.bias_ih, a.H + unit) + bias(a.bias_hh, a.H + unit) + v[a.HP]));
  q += v[2 * a.HP];
  float z = tangent(pz + r * q);
#else
  float r = a.gate_r[i], u = a.gate_u[i];
  float z = tangent(pz + q + a.product[(i64)b * a.HP + unit]);
#endif
  float c_prev = a.c_last[i];
  float c_seen = next_state(u, z, c_prev, a.y_last[i], a.fired[i], rho);
  if (a.keep.p) {
    float keep = a.keep.p[a.t * a.keep.t + b * a.keep.b + unit * a.keep.h];
    c_seen = keep * c_prev + (1.f - keep) * c_seen;
  }
  bool e = c_seen > theta, valid = a.lengths == nullptr || a.t < a.lengths[b];
  if (a.reserve) save_gates(a.reserve, (i64)a.T * a.B, row, reserve_width(a.H), unit, {u, r, z, q});
  a.y[row * a.H + unit] = valid && e ? c_seen : 0.f;
  a.c[row * a.H + unit] = valid ? c_seen : 0.f;
  if (valid) {
    a.c_last[i] = carried_state(c_seen, e, theta, rho);
    a.y_last[i] = e ? c_seen : 0.f;
    a.fired[i] = e;
  }
  a.operand[(i64)b * a.HP + unit] = to_operand(a.y_last[i]);
}

__device__ __forceinline__ Previous load_previous(const StepBackward& a, int i, int b, int unit, float theta, float rho) {
  if (a.t > 0) return previous_step(a.c[((i64)(a.t - 1) * a.B + b) * a.H + unit], theta, rho);
  float y = a.y0[i];
  return {a.c0[i], y, y != 0.f};
}

extern "C" __global__ void backward_state(const __grid_constant__ StepBackward a) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= a.B * a.HP) return;
  int b = at / a.HP, unit = at % a.HP;
  const i64 row = (i64)a.t * a.B + b;
  Operand* out = a.gates + row * 4 * a.HP + unit;
  if (unit >= a.H) {  // the products over time read the padding
    for (int g = 0; g < 4; g++) out[g * a.HP] = to_operand(0.f);
    a.source[row * a.HP + unit] = to_operand(0.f);
    if (!AFTER) a.source_z[row * a.HP + unit] = to_operand(0.f);
    return;
  }
  const int i = b * a.H + unit;
  const float rho = *a.rho, theta = a.theta[unit];
  const Gates gate = saved_gates(a.reserve, (i64)a.T * a.B, row, reserve_width(a.H), unit);
  const Previous prev = load_previous(a, i, b, unit, theta, rho);
  const bool valid = a.lengths == nullptr || a.t < a.lengths[b];
  float dy = a.dy[i] + (a.product ? a.product[at] : 0.f);
  float dy_t = dy + (a.grad_y ? a.grad_y[row * a.H + unit] : 0.f);
  float keep = a.keep.p ? a.keep.p[a.t * a.keep.t + b * a.keep.b + unit * a.keep.h] : 0.f;
  const float c = a.c[row * a.H + unit], z = LOW == 0 ? gate.z : candidate(gate.u, c, prev, keep, rho);
  ElementGradients s = backward_element(gate.u, z, c, prev, theta, rho, dy_t, a.dc[i], a.de[i],
                                        a.grad_c ? a.grad_c[row * a.H + unit] : 0.f, keep, a.surrogate);
  if (valid) {
    a.dc[i] = s.dc, a.de[i] = s.de;
    a.dtheta[i] += s.theta;
  }
  a.dy[i] = valid ? s.dy : dy;
  float a_u = valid ? s.a_u : 0.f, a_z = valid ? s.a_z : 0.f;
  out[2 * a.HP] = to_operand(a_u);
  out[3 * a.HP] = to_operand(a_z);
#if AFTER
  out[0] = to_operand(gate.r * a_z);
  out[a.HP] = to_operand(a_z * gate.q * gate.r * (1.f - gate.r));
#else
  out[0] = to_operand(a_z);
  a.source_z[row * a.HP + unit] = to_operand(gate.r * prev.y);
#endif
  a.source[row * a.HP + unit] = to_operand(prev.y);
}

// "before" only: computes a_r and the gradient through r*y from a_z V_z, which is in `product`.
extern "C" __global__ void backward_reset(const __grid_constant__ StepBackward a) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= a.B * a.HP) return;
  int b = at / a.HP, unit = at % a.HP;
  if (unit >= a.H) return;
  const int i = b * a.H + unit;
  const i64 row = (i64)a.t * a.B + b;
  const float r = saved_gates(a.reserve, (i64)a.T * a.B, row, reserve_width(a.H), unit).r, m = a.product[at];
  const Previous prev = load_previous(a, i, b, unit, a.theta[unit], *a.rho);
  const bool valid = a.lengths == nullptr || a.t < a.lengths[b];
  a.gates[row * 4 * a.HP + a.HP + unit] = to_operand(valid ? m * prev.y * r * (1.f - r) : 0.f);
  if (valid) a.dy[i] += r * m;
}
