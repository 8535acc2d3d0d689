// The element-wise part of one step of an LSTM, one thread per unit and sequence. cuBLAS computes the products between.

extern "C" __global__ void lstm_forward(const __grid_constant__ LstmForward a) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= a.B * a.H) return;
  int b = at / a.H, unit = at % a.H;
  const float rho = *a.rho, theta = a.theta[unit];
  const i64 row = (i64)a.t * a.B + b, n = row * a.H + unit;
  const float* p = a.projected + row * 4 * a.HP + unit;
  const float* v = a.product + (i64)b * 4 * a.HP + unit;
  float x[4];
  for (int g = 0; g < 4; g++)
    x[g] = (p[g * a.HP] + bias(a.bias_ih, g * a.H + unit)) + (v[g * a.HP] + bias(a.bias_hh, g * a.H + unit));
  const LstmGates gate = {sigmoid(x[0]), sigmoid(x[1]), tangent(x[2]), sigmoid(x[3])};
  const float c_prev = a.c_last[at], y_prev = a.y_last[at];
  const float memory = memory_of({c_prev, y_prev, a.fired[at] != 0}, rho);
  float c = gate.f * memory + gate.i * gate.g;
  if (RESET == 0) c -= rho * y_prev;
  if (a.keep.p) {
    float keep = a.keep.p[a.t * a.keep.t + b * a.keep.b + unit * a.keep.h];
    c = keep * c_prev + (1.f - keep) * c;
  }
  const float value = gate.o * tangent(c), seen = OUTPUT ? value : c;
  const bool e = lstm_event(seen, y_prev, theta), valid = a.lengths == nullptr || a.t < a.lengths[b];
  const float y = e ? value : EVENTS == 2 ? y_prev : 0.f;
  if (a.reserve) save_lstm(a.reserve, (i64)a.T * a.B * a.H, n, gate, c, y_prev);
  a.y[n] = valid ? y : 0.f;
  a.c[n] = valid ? seen : 0.f;
  if (valid) {
    a.c_last[at] = lstm_carried(c, seen, e, theta, rho);
    a.y_last[at] = y;
    a.fired[at] = e;
    a.operand[(i64)b * a.HP + unit] = to_operand(y);
  }
}

// Restores the carried c, y and e of the previous step. `n` is the unit of this step.
__device__ __forceinline__ Previous lstm_previous(const LstmBackward& a, int at, i64 n, float theta, float rho) {
  if (a.t == 0) return {a.c0[at], a.y0[at], a.y0[at] != 0.f};
  const i64 units = (i64)a.T * a.B * a.H, before = n - (i64)a.B * a.H;
  const float seen = a.c[before], c = saved_cell(a.reserve, units, before, seen);
  if (EVENTS == 2) return {c, saved_output(a.reserve, units, n), false};  // there is no reset, so no one reads e
  const bool e = lstm_event(seen, 0.f, theta);
  float y = 0.f;
  if (e) y = OUTPUT ? seen : saved_lstm_gates(a.reserve, before).o * tangent(c);
  return {lstm_carried(c, seen, e, theta, rho), y, e};
}

extern "C" __global__ void lstm_backward(const __grid_constant__ LstmBackward a) {
  int padded = blockIdx.x * blockDim.x + threadIdx.x;
  if (padded >= a.B * a.HP) return;
  int b = padded / a.HP, unit = padded % a.HP;
  const i64 row = (i64)a.t * a.B + b;
  Operand* out = a.gates + row * 4 * a.HP + unit;
  Operand* source = a.source + row * a.HP + unit;
  if (unit >= a.H) {  // the products over time read the padding
    for (int g = 0; g < 4; g++) out[g * a.HP] = to_operand(0.f);
    *source = to_operand(0.f);
    return;
  }
  const int at = b * a.H + unit;
  const i64 n = row * a.H + unit;
  const float rho = *a.rho, theta = a.theta[unit];
  const bool valid = a.lengths == nullptr || a.t < a.lengths[b];
  const float dy = a.dy[at] + (a.product ? a.product[padded] : 0.f);
  if (!valid) {  // the gradients pass a padded step unchanged
    for (int g = 0; g < 4; g++) out[g * a.HP] = to_operand(0.f);
    *source = to_operand(0.f);
    a.dy[at] = dy;
    return;
  }
  const LstmGates gate = saved_lstm_gates(a.reserve, n);
  const Previous prev = lstm_previous(a, at, n, theta, rho);
  const float seen = a.c[n], c = saved_cell(a.reserve, (i64)a.T * a.B * a.H, n, seen);
  const float keep = a.keep.p ? a.keep.p[a.t * a.keep.t + b * a.keep.b + unit * a.keep.h] : 0.f;
  const LstmGradients s =
      backward_lstm(gate, c, seen, prev, theta, rho, dy + (a.grad_y ? a.grad_y[n] : 0.f), a.dc[at], a.de[at],
                    a.grad_c ? a.grad_c[n] : 0.f, keep, a.surrogate);
  a.dc[at] = s.dc, a.de[at] = s.de, a.dy[at] = s.dy;
  a.dtheta[at] += s.theta;
  for (int g = 0; g < 4; g++) out[g * a.HP] = to_operand(s.a[g]);
  *source = to_operand(prev.y);
}
