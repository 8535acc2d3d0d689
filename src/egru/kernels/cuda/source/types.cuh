// Types used in the argument structs.
// LOW selects the type that operands of products are rounded to: 0 float32, 1 bf16, 2 fp16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if LOW == 0
typedef float Operand;
typedef float4 Reserve;  // see reserve.cuh
#else
typedef u16 Operand;
typedef u32 Reserve;
#endif
