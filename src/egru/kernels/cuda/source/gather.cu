// Collects the gradients of weights, biases and theta from the products over time, in one launch.

// Each block copies whole rows, which avoids a division per element.
extern "C" __global__ void gather(const __grid_constant__ Gather a) {
  const int H = a.H, HP = a.HP, width = a.width, first = a.after ? 1 : 0, quantities = a.quantities;
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
      const float* s = a.sums + (i64)p * quantities * HP + unit;
      theta += s[0];
      z += s[HP];
      if (quantities == 3) xz += s[2 * HP];
    }
    const float* r = a.hh + ((i64)first * HP + unit) * width + HP;
    const float* u = r + (i64)HP * width;
    a.theta[unit] = theta;
    a.bias_ih[unit] = a.bias_hh[unit] = r[0];
    a.bias_ih[H + unit] = a.bias_hh[H + unit] = u[0];
    a.bias_ih[2 * H + unit] = z;
    a.bias_hh[2 * H + unit] = a.after ? a.hh[(i64)unit * width + HP] : z;
    if (quantities == 3) {
      a.weight_ih[unit] = r[1];
      a.weight_ih[H + unit] = u[1];
      a.weight_ih[2 * H + unit] = xz;
    }
  }
}
