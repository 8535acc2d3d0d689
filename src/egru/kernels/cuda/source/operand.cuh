// Conversions between float32 and the formats in memory: operands of products and pairs of fp16.

#if LOW == 0
__device__ __forceinline__ Operand to_operand(float x) { return x; }
__device__ __forceinline__ float from_operand(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float rounded(float x) { return x; }
#else
#if LOW == 1
#define LOW_TYPE "bf16"
#else
#define LOW_TYPE "f16"
#endif
__device__ __forceinline__ Operand to_operand(float x) {
  Operand d;
  asm("cvt.rn." LOW_TYPE ".f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}
__device__ __forceinline__ float from_operand(u32 bits) {
#if LOW == 1
  return __uint_as_float(bits << 16);
#else
  float d;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(d) : "r"(bits));
  return d;
#endif
}
__device__ __forceinline__ float rounded(float x) { return from_operand(to_operand(x)); }
// Packs two operands, the first in the low half.
__device__ __forceinline__ u32 pack_low(float a, float b) {
  u32 d;
  asm("cvt.rn." LOW_TYPE "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
  return d;
}
#endif

// Packs two values as fp16 for any LOW, clamped to the range of fp16.
__device__ __forceinline__ u32 pack_half(float a, float b) {
  u32 d;
  a = fminf(fmaxf(a, -65504.f), 65504.f);
  b = fminf(fmaxf(b, -65504.f), 65504.f);
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
  return d;
}
__device__ __forceinline__ float2 unpack_half(u32 d) {
  float2 v;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(v.x), "=f"(v.y) : "r"(d));
  return v;
}

__device__ __forceinline__ float bias(const float* p, int i) { return p ? p[i] : 0.f; }
