// The equations of one unit at one step, shared by all kernels of the GRU. Names follow the paper; u = 1 - z_torch.
// lstm.cuh uses the activations and `memory_of`.
// RESET: 0 output, 1 threshold, 2 hard, 3 none.
// ACCURATE selects expf and tanhf (float32) instead of the fast approximations (low-precision products).

#if ACCURATE
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float tangent(float x) { return tanhf(x); }
#else
// If the exponential overflows, the quotient is 0, not NaN.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
// 2 sigmoid(2x) - 1, with an absolute error near 1e-7.
__device__ __forceinline__ float tangent(float x) {
  x = fminf(fmaxf(x, -15.f), 15.f);
  return 1.f - __fdividef(2.f, 1.f + __expf(2.f * x));
}
#endif

// The state that is compared with the threshold at this step.
__device__ __forceinline__ float next_state(float u, float z, float c_prev, float y_prev, bool e_prev, float rho) {
  float memory = RESET == 2 && e_prev ? c_prev * (1.f - rho) : c_prev;
  float c = u * z + (1.f - u) * memory;
  return RESET == 0 ? c - rho * y_prev : c;
}

// The state that is carried to the next step.
__device__ __forceinline__ float carried_state(float c, bool e, float theta, float rho) {
  return RESET == 1 && e ? c - rho * theta : c;
}

struct Previous {  // state, output and event of the previous step
  float c, y;
  bool e;
};

// Restores the previous step from the state that was compared with the threshold.
__device__ __forceinline__ Previous previous_step(float c_seen, float theta, float rho) {
  bool e = c_seen > theta;
  return {carried_state(c_seen, e, theta, rho), e ? c_seen : 0.f, e};
}

// The memory that a step mixes with its candidate.
__device__ __forceinline__ float memory_of(const Previous& prev, float rho) {
  return RESET == 2 && prev.e ? prev.c * (1.f - rho) : prev.c;
}

// Computes the candidate z of a step from u and the states before and after it. The error of z is the error of u times the
// distance between z and the memory. If zoneout kept the old state, or if u is 0, z is undefined and no gradient needs it.
__device__ __forceinline__ float candidate(float u, float c, const Previous& prev, float keep, float rho) {
  if (keep != 0.f) c = (c - keep * prev.c) / fmaxf(1.f - keep, 1e-6f);
  if (RESET == 0) c += rho * prev.y;
  float z = __fdividef(c - (1.f - u) * memory_of(prev, rho), fmaxf(u, 5e-8f));  // fp16's smallest u is 6e-8
  return fminf(fmaxf(z, -1.f), 1.f);
}

struct ElementGradients {
  float a_u, a_z;    // of the pre-activations; a_u with torch's sign (of 1 - u)
  float dc, dy, de;  // of the previous step's carried state, y (element-wise path only) and e
  float theta;
};

// The part of the backward step that needs no matrix product.
__device__ __forceinline__ ElementGradients backward_element(float u, float z, float c, const Previous& prev, float theta,
                                                             float rho, float dy, float dc, float de, float grad_c,
                                                             float keep, const Surrogate& g) {
  bool e = c > theta;
  float s = g.height * fmaxf(0.f, 1.f - fabsf(c - theta) * g.inverse_width);
  float k = (e ? 1.f : 0.f) + c * s;
  if (g.bounded) k = fminf(fmaxf(k, 0.f), 1.f);
  ElementGradients out;
  float dc_seen = dy * k + dc + grad_c;
  out.theta = -dy * c * s;
  if (RESET == 2) {
    dc_seen += de * s;
    out.theta -= de * s;
  }
  if (RESET == 1) {
    dc_seen -= dc * rho * theta * s;
    out.theta -= dc * rho * ((e ? 1.f : 0.f) - theta * s);
  }
  float dc_new = (1.f - keep) * dc_seen;
  float memory = memory_of(prev, rho);
  out.a_u = -dc_new * (z - memory) * u * (1.f - u);
  out.a_z = dc_new * u * (1.f - z * z);
  float dmemory = dc_new * (1.f - u);
  out.dc = (RESET == 2 && prev.e ? dmemory * (1.f - rho) : dmemory) + keep * dc_seen;
  out.de = RESET == 2 ? -rho * dmemory * prev.c : 0.f;
  out.dy = RESET == 0 ? -rho * dc_new : 0.f;
  return out;
}
