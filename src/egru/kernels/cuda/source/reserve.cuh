// What a forward pass leaves for its backward pass, beside the states themselves.
//
// float32: u, r, z and q of every unit and step, (T, B, width). Else fp16, which has 3 bits more than bf16: a plane of pairs
// (u, r) and, in the "after" form, behind it a plane of q, each (T, B, width) with an even width. z is not kept: the states
// on both sides of a step and u give it (`candidate` in element.cuh), to within u's own rounding.

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

// One unit at one of `rows` steps and batch rows.
__device__ __forceinline__ void save_gates(Reserve* reserve, i64 rows, i64 row, int width, int unit, const Gates& g) {
  reserve[row * width + unit] = pack_half(g.u, g.r);
  if (AFTER) q_plane(reserve, rows, width)[row * width + unit] = (u16)pack_half(g.q, 0.f);
}
// Without z.
__device__ __forceinline__ Gates saved_gates(const Reserve* reserve, i64 rows, i64 row, int width, int unit) {
  const float2 ur = unpack_half(reserve[row * width + unit]);
  const float q = AFTER ? unpack_half(q_plane((Reserve*)reserve, rows, width)[row * width + unit]).x : 0.f;
  return {ur.x, ur.y, 0.f, q};
}
#endif
