// The reserve: what a forward pass saves for its backward pass, in addition to the states.
//
// float32: u, r, z and q of every unit and step, (T, B, width).
// bf16 and fp16: a plane of (u, r) pairs, followed by a plane of q if the reset gate is "after", each (T, B, width) with an
// even width. Both are fp16, which has 3 bits more than bf16. z is not saved: `candidate` in element.cuh computes it from u
// and the states before and after the step, to within the rounding of u.

__host__ __device__ constexpr int reserve_width(int units) { return LOW == 0 ? units : (units + 1) / 2 * 2; }

struct Gates {
  float u, r, z, q;
};

#if LOW == 0
__device__ __forceinline__ void save_gates(Reserve* reserve, i64, i64 row, int width, int unit, const Gates& g) {
  reserve[row * width + unit] = make_float4(g.u, g.r, g.z, g.q);
}
__device__ __forceinline__ Gates saved_gates(const Reserve* reserve, i64, i64 row, int width, int unit) {
  const float4 v = reserve[row * width + unit];
  return {v.x, v.y, v.z, v.w};
}
#else
__device__ __forceinline__ u16* q_plane(Reserve* reserve, i64 rows, int width) { return (u16*)(reserve + rows * width); }

// Saves one unit; `rows` is T * B, and `row` is t * B + b.
__device__ __forceinline__ void save_gates(Reserve* reserve, i64 rows, i64 row, int width, int unit, const Gates& g) {
  reserve[row * width + unit] = pack_half(g.u, g.r);
  if (AFTER) q_plane(reserve, rows, width)[row * width + unit] = (u16)pack_half(g.q, 0.f);
}
// Loads one unit; z is left at 0.
__device__ __forceinline__ Gates saved_gates(const Reserve* reserve, i64 rows, i64 row, int width, int unit) {
  const float2 ur = unpack_half(reserve[row * width + unit]);
  const float q = AFTER ? unpack_half(q_plane((Reserve*)reserve, rows, width)[row * width + unit]).x : 0.f;
  return {ur.x, ur.y, 0.f, q};
}
#endif
