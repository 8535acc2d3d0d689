/* A dense GRU in float32, one step at a time: the rival of the exported code. HIDDEN, OUTPUTS and the arrays come from
 * weights.h. Both orders of summation are here; the benchmark counts the one that takes fewer instructions on a target.
 * The gates use the exponential of the exported code. */
#include "weights.h"

#include <stddef.h>
#include <stdint.h>

#include "exponential.h"

static float h[HIDDEN], sum[3 * HIDDEN];

#if BY_ROWS
/* Rows of weights belong to outputs: four dot products share the loads of the vector. */
static void product(float *restrict to, const float *rows, const float *x, int outputs, int inputs)
{
    int j = 0, k;
    for (; j + 4 <= outputs; j += 4) {
        const float *a = rows + (size_t)j * (size_t)inputs, *b = a + inputs, *c = b + inputs, *d = c + inputs;
        float sa = to[j], sb = to[j + 1], sc = to[j + 2], sd = to[j + 3];
        for (k = 0; k < inputs; ++k) {
            sa += a[k] * x[k];
            sb += b[k] * x[k];
            sc += c[k] * x[k];
            sd += d[k] * x[k];
        }
        to[j] = sa;
        to[j + 1] = sb;
        to[j + 2] = sc;
        to[j + 3] = sd;
    }
    for (; j < outputs; ++j)
        for (k = 0; k < inputs; ++k)
            to[j] += rows[(size_t)j * (size_t)inputs + (size_t)k] * x[k];
}
#else
/* Rows of weights belong to inputs: eight rows share the loads and stores of the sums. */
static void product(float *restrict to, const float *rows, const float *x, int outputs, int inputs)
{
    int j, k = 0;
    for (; k + 8 <= inputs; k += 8) {
        const float *a = rows + (size_t)k * (size_t)outputs, *b = a + outputs, *c = b + outputs, *d = c + outputs;
        const float *e = d + outputs, *f = e + outputs, *g = f + outputs, *i = g + outputs;
        const float x0 = x[k], x1 = x[k + 1], x2 = x[k + 2], x3 = x[k + 3];
        const float x4 = x[k + 4], x5 = x[k + 5], x6 = x[k + 6], x7 = x[k + 7];
        for (j = 0; j < outputs; ++j) {
            float s = to[j];
            s += x0 * a[j];
            s += x1 * b[j];
            s += x2 * c[j];
            s += x3 * d[j];
            s += x4 * e[j];
            s += x5 * f[j];
            s += x6 * g[j];
            s += x7 * i[j];
            to[j] = s;
        }
    }
    for (; k < inputs; ++k)
        for (j = 0; j < outputs; ++j)
            to[j] += x[k] * rows[(size_t)k * (size_t)outputs + (size_t)j];
}
#endif

void dense_step(float x, float *out)
{
    const float limit = LARGEST_ARGUMENT;
    const float *r = sum, *u = sum + HIDDEN;
    float *z = sum + 2 * HIDDEN;
    static float q[HIDDEN];
    int j;
    for (j = 0; j < 3 * HIDDEN; ++j)
        sum[j] = bias[j] + x * w[j];
    for (j = 0; j < HIDDEN; ++j) {
        q[j] = z[j];
        z[j] = bias_q[j];
    }
    product(sum, v, h, 3 * HIDDEN, HIDDEN);
    for (j = 0; j < HIDDEN; ++j) {
        const float a = q[j] + z[j] / (1.0f + exponential(-r[j], limit));
        const float eu = 1.0f + exponential(u[j], limit), ez = exponential(-2.0f * a, limit);
        const float both = 1.0f / (eu * (1.0f + ez));
        h[j] += (1.0f + ez) * both * ((1.0f - ez) * eu * both - h[j]);
    }
    for (j = 0; j < OUTPUTS; ++j)
        out[j] = readout_bias[j];
    product(out, readout, h, OUTPUTS, HIDDEN);
}
