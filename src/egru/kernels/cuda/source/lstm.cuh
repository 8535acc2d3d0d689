// The equations of one LSTM unit at one step, and its reserve. Gates are in torch's order: i, f, g, o.
// RESET: as in element.cuh. OUTPUT: 1 if o*tanh(c) is compared with the threshold, 0 if c is.
// EVENTS: 0 positive, 1 signed, 2 delta. Delta events require RESET 3 and OUTPUT 1.

struct LstmGates {
  float i, f, g, o;
};

__device__ __forceinline__ float direction(float seen) { return EVENTS == 1 ? (seen > 0.f) - (seen < 0.f) : 1.f; }

// Whether a unit emits an event; y_prev is the output of the previous step.
__device__ __forceinline__ bool lstm_event(float seen, float y_prev, float theta) {
  float compared = EVENTS == 2 ? seen - y_prev : seen;
  return (EVENTS ? fabsf(compared) : compared) > theta;
}

// The memory cell that is carried to the next step.
__device__ __forceinline__ float lstm_carried(float c, float seen, bool e, float theta, float rho) {
  return RESET == 1 && e ? c - rho * theta * direction(seen) : c;
}

// ---- the reserve -----------------------------------------------------------------------------------------------------
//
// Planes of (T, B, H) units: the gates; c if OUTPUT; y of the previous step with delta events. c and y are float32. Gates
// are float32, or fp16 for bf16 and fp16 products. Then 1 - f is saved, not f: gradients of long sequences are multiplied
// by f at every step, and f is often close to 1, where fp16 is coarse.

constexpr int LSTM_GATE_WORDS = LOW == 0 ? 4 : 2;

// `units` is T * B * H, and `n` the index of a unit among them.
__device__ __forceinline__ void save_lstm(float* reserve, i64 units, i64 n, const LstmGates& gate, float c, float y_prev) {
#if LOW == 0
  ((float4*)reserve)[n] = make_float4(gate.i, gate.f, gate.g, gate.o);
#else
  ((uint2*)reserve)[n] = make_uint2(pack_half(gate.i, 1.f - gate.f), pack_half(gate.g, gate.o));
#endif
  if (OUTPUT) reserve[LSTM_GATE_WORDS * units + n] = c;
  if (EVENTS == 2) reserve[(LSTM_GATE_WORDS + 1) * units + n] = y_prev;
}

__device__ __forceinline__ LstmGates saved_lstm_gates(const float* reserve, i64 n) {
#if LOW == 0
  const float4 v = ((const float4*)reserve)[n];
  return {v.x, v.y, v.z, v.w};
#else
  const uint2 v = ((const uint2*)reserve)[n];
  const float2 i_forgotten = unpack_half(v.x), g_o = unpack_half(v.y);
  return {i_forgotten.x, 1.f - i_forgotten.y, g_o.x, g_o.y};
#endif
}

// The memory cell of a step before the reset "threshold"; `seen` is what was compared with the threshold.
__device__ __forceinline__ float saved_cell(const float* reserve, i64 units, i64 n, float seen) {
  return OUTPUT ? reserve[LSTM_GATE_WORDS * units + n] : seen;
}

__device__ __forceinline__ float saved_output(const float* reserve, i64 units, i64 n) {
  return reserve[(LSTM_GATE_WORDS + 1) * units + n];
}

// ---- the backward step -----------------------------------------------------------------------------------------------

struct LstmGradients {
  float a[4];        // of the pre-activations
  float dc, dy, de;  // of the previous step's carried c, y (element-wise path only) and e
  float theta;
};

// The part of the backward step that needs no matrix product. dy, dc, de and grad_c are the gradients of y, of the carried
// c, of e and of what was compared with the threshold (`seen`).
__device__ __forceinline__ LstmGradients backward_lstm(const LstmGates& gate, float c, float seen, const Previous& prev,
                                                       float theta, float rho, float dy, float dc, float de, float grad_c,
                                                       float keep, const Surrogate& surrogate) {
  const float tanh_c = tangent(c), value = OUTPUT ? seen : gate.o * tanh_c;
  const float compared = EVENTS == 2 ? seen - prev.y : seen, jump = EVENTS == 2 ? value - prev.y : value;
  const float e = lstm_event(seen, prev.y, theta) ? 1.f : 0.f, sign = direction(seen);
  const float distance = (EVENTS ? fabsf(compared) : compared) - theta;
  const float s = surrogate.height * fmaxf(0.f, 1.f - fabsf(distance) * surrogate.inverse_width);
  float through = (EVENTS ? fabsf(jump) : jump) * s;  // the slope of y through the comparison
  if (surrogate.bounded) through = fminf(fmaxf(e + through, 0.f), 1.f) - e;
  float d_compared = dy * through;
  LstmGradients out;
  out.theta = -dy * jump * s;
  if (RESET == 2) {
    d_compared += sign * de * s;
    out.theta -= de * s;
  }
  if (RESET == 1) {
    d_compared -= dc * rho * theta * s;
    out.theta -= sign * dc * rho * (e - theta * s);
  }
  const float d_seen = d_compared + grad_c, d_value = dy * e + (OUTPUT ? d_seen : 0.f);
  const float d_cell = dc + (OUTPUT ? 0.f : d_seen) + d_value * gate.o * (1.f - tanh_c * tanh_c);
  const float d_new = (1.f - keep) * d_cell, memory = memory_of(prev, rho), d_memory = d_new * gate.f;
  out.a[0] = d_new * gate.g * gate.i * (1.f - gate.i);
  out.a[1] = d_new * memory * gate.f * (1.f - gate.f);
  out.a[2] = d_new * gate.i * (1.f - gate.g * gate.g);
  out.a[3] = d_value * tanh_c * gate.o * (1.f - gate.o);
  out.dc = (RESET == 2 && prev.e ? d_memory * (1.f - rho) : d_memory) + keep * d_cell;
  out.de = RESET == 2 ? -rho * d_memory * prev.c : 0.f;
  out.dy = EVENTS == 2 ? dy * (1.f - e - through) : RESET == 0 ? -rho * d_new : 0.f;
  return out;
}
