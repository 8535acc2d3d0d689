// How values are kept outside the arithmetic: operands of products, saved gates, zoneout.
// LOW: 0 float32, 1 bf16, 2 fp16.

#if LOW == 0
typedef float Operand;
__device__ __forceinline__ Operand to_operand(float x) { return x; }
#else
typedef unsigned short Operand;
__device__ __forceinline__ Operand to_operand(float x) {
  Operand d;
#if LOW == 1
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
#endif
  return d;
}
#endif

#if LOW == 0
typedef float4 Gates;
__device__ __forceinline__ Gates to_gates(float u, float r, float z, float q) { return make_float4(u, r, z, q); }
__device__ __forceinline__ float4 from_gates(Gates g) { return g; }
#else
typedef uint2 Gates;  // fp16, as the persistent kernels save them
__device__ __forceinline__ u32 half2(float a, float b) {
  u32 d;
  a = fminf(fmaxf(a, -65504.f), 65504.f);
  b = fminf(fmaxf(b, -65504.f), 65504.f);
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
  return d;
}
__device__ __forceinline__ float2 unhalf2(u32 d) {
  float2 v;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(v.x), "=f"(v.y) : "r"(d));
  return v;
}
__device__ __forceinline__ Gates to_gates(float u, float r, float z, float q) {
  return make_uint2(half2(u, r), half2(z, q));
}
__device__ __forceinline__ float4 from_gates(Gates g) {
  float2 a = unhalf2(g.x), b = unhalf2(g.y);
  return make_float4(a.x, a.y, b.x, b.y);
}
#endif

struct Keep {
  const float* p;
  i64 t, b, h;
};

__device__ __forceinline__ float bias(const float* p, int i) { return p ? p[i] : 0.f; }
