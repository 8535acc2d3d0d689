/* A dense GRU with int8 weights and activations, int32 sums and tables for the gates, as runtimes for microcontrollers
 * compute it: dot products of four outputs at a time, with the dual multiply-add of the DSP extension where it exists.
 * HIDDEN, OUTPUTS and the arrays come from weights.h. */
#include "weights.h"

#include <stddef.h>
#include <stdint.h>

#include "tables.h"

#if defined(__ARM_FEATURE_DSP) && defined(__ARM_FEATURE_SIMD32)
#include <arm_acle.h>
#define DUAL 1
#endif

static int8_t h8[HIDDEN];
static int16_t h[HIDDEN];
static int32_t sum[3 * HIDDEN];

#ifdef DUAL
static inline int32_t load(const int8_t *from)
{
    int32_t word;
    __builtin_memcpy(&word, from, 4);
    return word;
}

static inline int32_t odd(int32_t word)
{
    return (int32_t)((uint32_t)word >> 8 | (uint32_t)word << 24);
}

/* Four products: bytes 0 and 2, then bytes 1 and 3. */
#define DOT(total, row) \
    do { \
        const int32_t word = load((row) + k); \
        total = __smlad(__sxtb16(word), even_x, total); \
        total = __smlad(__sxtb16(odd(word)), odd_x, total); \
    } while (0)
#endif

static void product(int32_t *restrict to, const int8_t *rows, const int8_t *x, int outputs, int inputs)
{
    int j = 0, k;
    for (; j + 4 <= outputs; j += 4) {
        const int8_t *a = rows + (size_t)j * (size_t)inputs, *b = a + inputs, *c = b + inputs, *d = c + inputs;
        int32_t sa = to[j], sb = to[j + 1], sc = to[j + 2], sd = to[j + 3];
        k = 0;
#ifdef DUAL
        for (; k + 4 <= inputs; k += 4) {
            const int32_t word = load(x + k);
            const int32_t even_x = __sxtb16(word), odd_x = __sxtb16(odd(word));
            DOT(sa, a);
            DOT(sb, b);
            DOT(sc, c);
            DOT(sd, d);
        }
#endif
        for (; k < inputs; ++k) {
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

static inline int32_t scaled(int32_t total, int32_t factor)
{
    return (int32_t)(((int64_t)total * factor) >> 32);
}

void dense_step(int16_t x, int32_t *out)
{
    int j;
    for (j = 0; j < 3 * HIDDEN; ++j)
        sum[j] = 0;
    product(sum, v, h8, 3 * HIDDEN, HIDDEN);
    for (j = 0; j < HIDDEN; ++j) {
        const int32_t r = bias[j] + ((x * w[j]) >> 12) + scaled(sum[j], scale[j]);
        const int32_t u = bias[HIDDEN + j] + ((x * w[HIDDEN + j]) >> 12) + scaled(sum[HIDDEN + j], scale[HIDDEN + j]);
        const int32_t q = bias_q[j] + scaled(sum[2 * HIDDEN + j], scale[2 * HIDDEN + j]);
        const int32_t a = bias[2 * HIDDEN + j] + ((x * w[2 * HIDDEN + j]) >> 12) + ((sigmoid(r) * (q >> 3)) >> 12);
        h[j] = (int16_t)(h[j] + ((sigmoid(-u) * (hyperbolic_tangent(a) - h[j])) >> 15));
        h8[j] = (int8_t)(h[j] >> 8);
    }
    for (j = 0; j < OUTPUTS; ++j)
        out[j] = readout_bias[j];
    product(out, readout, h8, OUTPUTS, HIDDEN);
}
