// Prepares the operands of a persistent kernel in one launch, where torch would need several.

__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(pack_low(v[0], v[1]), pack_low(v[2], v[3]), pack_low(v[4], v[5]), pack_low(v[6], v[7]));
}

__device__ __forceinline__ int padded(int chunks, int multiple) {
  return (chunks + multiple - 1) / multiple * multiple;
}

// Columns are (tile, gate, unit); see pack.py. Neighbouring threads write neighbouring columns.
__device__ __forceinline__ void pack_forward(const Pack& a) {
  const int chunks = padded(a.k_chunks, a.multiple), columns = a.tiles * 8;
  const i64 per_block = (i64)chunks * columns * 3, total = per_block * a.blocks;
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
    const int block = at / per_block;
    int rest = at % per_block, gates = 3, first = 0;
    if (!a.after) {
      const int both = chunks * columns * 2;
      gates = rest < both ? 2 : 1;
      if (rest >= both) rest -= both, first = 2;
    }
    const int chunk = rest / (columns * gates), n = rest % (columns * gates);
    const int tile = n / (8 * gates), gate = first + n / 8 % gates, unit = (block * a.tiles + tile) * 8 + n % 8;
    float v[8];
    const float* from = a.weight + ((i64)gate * a.H + unit) * a.H + chunk * 8;
    if (unit < a.H && chunk * 8 + 8 <= a.H && a.H % 2 == 0) {
      for (int j = 0; j < 4; j++) {
        const float2 x = *((const float2*)from + j);
        v[2 * j] = x.x, v[2 * j + 1] = x.y;
      }
    } else {
      for (int j = 0; j < 8; j++) v[j] = unit < a.H && chunk * 8 + j < a.H ? from[j] : 0.f;
    }
    a.out[at] = pack8(v);
  }
}

__device__ __forceinline__ void pack_backward(const Pack& a) {
  const int columns = a.tiles * 8, K = a.k_chunks;
  const int one = padded(K, a.multiple), chunks = a.after ? padded(3 * K, a.multiple) : one + padded(2 * K, a.multiple);
  const i64 per_block = (i64)chunks * columns, total = per_block * a.blocks;
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
    const int block = at / per_block, rest = at % per_block;
    int chunk = rest / columns;
    const int unit = block * columns + rest % columns;
    int gate;
    bool in_range;
    if (a.after) {
      gate = chunk / K;
      in_range = gate < 3;
    } else if (chunk < one) {
      gate = 2;
      in_range = chunk < K;
    } else {
      chunk -= one;
      gate = chunk / K;
      in_range = gate < 2;
    }
    float v[8];
    for (int j = 0; j < 8; j++) {
      const int k = chunk % K * 8 + j;
      v[j] = in_range && unit < a.H && k < a.H ? a.weight[((i64)gate * a.H + k) * a.H + unit] : 0.f;
    }
    a.out[at] = pack8(v);
  }
}

__device__ __forceinline__ void pad(const Pad& a) {
  const int width = a.columns_out / 8;
  const i64 total = (i64)a.blocks * a.rows_out * width;
  if (a.rows == a.rows_out && a.columns == a.columns_out) {  // no padding, so no division per element
    const float4* in = (const float4*)a.in;
#pragma unroll 4
    for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
      const float4 x = __ldcs(in + 2 * at), y = __ldcs(in + 2 * at + 1);
      a.out[at] = make_uint4(pack_low(x.x, x.y), pack_low(x.z, x.w), pack_low(y.x, y.y), pack_low(y.z, y.w));
    }
    return;
  }
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
    const int c = at % width * 8;
    const i64 line = at / width;
    const int row = line % a.rows_out;
    const float* p = a.in + ((line / a.rows_out) * a.rows + row) * a.columns + c;
    float v[8];
    if (row < a.rows && c + 8 <= a.columns && a.columns % 4 == 0) {
      const float4 x = __ldcs((const float4*)p), y = __ldcs((const float4*)p + 1);
      v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w, v[4] = y.x, v[5] = y.y, v[6] = y.z, v[7] = y.w;
    } else if (row < a.rows && c + 8 <= a.columns && a.columns % 2 == 0) {
      for (int j = 0; j < 4; j++) {
        const float2 x = __ldcs((const float2*)p + j);
        v[2 * j] = x.x, v[2 * j + 1] = x.y;
      }
    } else {
      for (int j = 0; j < 8; j++) v[j] = row < a.rows && c + j < a.columns ? p[j] : 0.f;
    }
    a.out[at] = pack8(v);
  }
}

// Clears the workspace, packs the recurrent weights, and pads the operands of products over time.
extern "C" __global__ void prepare(const __grid_constant__ Prepare a) {
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < a.words; at += (i64)gridDim.x * blockDim.x)
    a.workspace[at] = make_uint4(0, 0, 0, 0);
  if (a.pack.blocks && a.backward) pack_backward(a.pack);
  if (a.pack.blocks && !a.backward) pack_forward(a.pack);
  if (a.weight_ih.in) pad(a.weight_ih);
  if (a.input.in) pad(a.input);
}
