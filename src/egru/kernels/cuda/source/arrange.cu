// Arranging tensors around the recursion, one launch each where torch would need several.

__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(pack_low(v[0], v[1]), pack_low(v[2], v[3]), pack_low(v[4], v[5]), pack_low(v[6], v[7]));
}

struct Pack {
  const float* weight;  // (3, H, H)
  uint4* out;
  int H, k_chunks;  // k8-chunks of one gate block
  int piece;        // k8-chunks are padded to a multiple of this
  int tiles, blocks, after;
};

__device__ __forceinline__ int padded(int chunks, int piece) { return (chunks + piece - 1) / piece * piece; }

// Columns (tile, gate, unit); see pack.py. Neighbouring threads write neighbouring columns.
__device__ __forceinline__ void pack_forward(const Pack& a) {
  const int chunks = padded(a.k_chunks, a.piece), columns = a.tiles * 8;
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
  const int one = padded(K, a.piece), chunks = a.after ? padded(3 * K, a.piece) : one + padded(2 * K, a.piece);
  const i64 per_block = (i64)chunks * columns, total = per_block * a.blocks;
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
    const int block = at / per_block, rest = at % per_block;
    int chunk = rest / columns;
    const int unit = block * columns + rest % columns;
    int gate;
    bool real;
    if (a.after) {
      gate = chunk / K;
      real = gate < 3;
    } else if (chunk < one) {
      gate = 2;
      real = chunk < K;
    } else {
      chunk -= one;
      gate = chunk / K;
      real = gate < 2;
    }
    float v[8];
    for (int j = 0; j < 8; j++) {
      const int k = chunk % K * 8 + j;
      v[j] = real && unit < a.H && k < a.H ? a.weight[((i64)gate * a.H + k) * a.H + unit] : 0.f;
    }
    a.out[at] = pack8(v);
  }
}

struct Pad {
  const float* in;  // (blocks, rows, columns)
  uint4* out;       // (blocks, rows_out, columns_out) in low precision, zeros around
  int blocks, rows, columns, rows_out, columns_out;
};

__device__ __forceinline__ void pad(const Pad& a) {
  const int width = a.columns_out / 8;
  const i64 total = (i64)a.blocks * a.rows_out * width;
  if (a.rows == a.rows_out && a.columns == a.columns_out) {  // nothing to pad: no element needs a division
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

// Everything a persistent kernel finds ready: packed weights, operands of products over time, a zeroed workspace.
struct Prepare {
  Pack pack;
  Pad input, weight_ih;  // null where no product needs them
  uint4* workspace;
  i64 words;
  int backward;
};

extern "C" __global__ void prepare(const __grid_constant__ Prepare a) {
  for (i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x; at < a.words; at += (i64)gridDim.x * blockDim.x)
    a.workspace[at] = make_uint4(0, 0, 0, 0);
  if (a.pack.blocks && a.backward) pack_backward(a.pack);
  if (a.pack.blocks && !a.backward) pack_forward(a.pack);
  if (a.weight_ih.in) pad(a.weight_ih);
  if (a.input.in) pad(a.input);
}

struct Gather {
  const float* hh;    // (3 or 2, HP, HP + 8): blocks V_z ("after" only), r, u; then columns of sums and of inputs
  const float* hh_z;  // (HP, HP), "before" only
  const float* ih;    // (3, HP, IP), or null where there is nothing to gather
  const float* sums;  // (parts, 2 or 3, HP): theta, a_z, a_z times the input
  float *weight_hh, *weight_ih, *bias_ih, *bias_hh, *theta;
  int H, HP, I, IP;
  int kinds, parts;  // of sums; three kinds for a one-feature input
  int after;
};

// A block takes whole rows, so that no element needs a division.
extern "C" __global__ void gather(const __grid_constant__ Gather a) {
  const int H = a.H, HP = a.HP, width = HP + 8, first = a.after ? 1 : 0, kinds = a.kinds;
  for (int line = blockIdx.x; line < (a.ih ? 6 : 3) * H; line += gridDim.x) {
    const int gate = line / H % 3, row = line % H;
    const bool recurrent = line < 3 * H;
    const float* from;
    if (!recurrent)
      from = a.ih + ((i64)gate * HP + row) * a.IP;
    else if (gate < 2)
      from = a.hh + ((i64)(first + gate) * HP + row) * width;
    else
      from = a.after ? a.hh + (i64)row * width : a.hh_z + (i64)row * HP;
    float* to = recurrent ? a.weight_hh + (i64)line * H : a.weight_ih + (i64)(line - 3 * H) * a.I;
    for (int column = threadIdx.x; column < (recurrent ? H : a.I); column += blockDim.x) to[column] = from[column];
  }
  for (int unit = blockIdx.x * blockDim.x + threadIdx.x; unit < H; unit += gridDim.x * blockDim.x) {
    float theta = 0.f, z = 0.f, xz = 0.f;
    for (int p = 0; p < a.parts; p++) {
      const float* s = a.sums + (i64)p * kinds * HP + unit;
      theta += s[0];
      z += s[HP];
      if (kinds == 3) xz += s[2 * HP];
    }
    const float* r = a.hh + ((i64)first * HP + unit) * width + HP;
    const float* u = r + (i64)HP * width;
    a.theta[unit] = theta;
    a.bias_ih[unit] = a.bias_hh[unit] = r[0];
    a.bias_ih[H + unit] = a.bias_hh[H + unit] = u[0];
    a.bias_ih[2 * H + unit] = z;
    a.bias_hh[2 * H + unit] = a.after ? a.hh[(i64)unit * width + HP] : z;
    if (kinds == 3) {
      a.weight_ih[unit] = r[1];
      a.weight_ih[H + unit] = u[1];
      a.weight_ih[2 * H + unit] = xz;
    }
  }
}
