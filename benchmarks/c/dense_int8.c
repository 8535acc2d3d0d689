/* A dense GRU with int8 weights and activations and int32 sums, as runtimes for microcontrollers compute it. Its gates
 * are integers from tables, or float32 with FLOAT_GATES; the functions are those of the exported code. With the DSP
 * extension of Arm, a dual multiply-add takes two of four inputs at a time, as in CMSIS-NN, and inputs are expanded once
 * per step. Elsewhere the compiler vectorises. With INTRINSICS, the products on aarch64 are written in NEON. HIDDEN,
 * OUTPUTS and the arrays come from weights.h. ROWS outputs are computed at a time, and ACTIVATION is the type of expanded
 * activations: the benchmark counts the combination that takes the fewest instructions on a target. RANGE is the
 * exponential's, if it is to be a constant. */
#include "weights.h"

#include <stddef.h>
#include <stdint.h>

#if FLOAT_GATES
#include "exponential.h"
static float h[HIDDEN];
#else
#include "gates.h"
static int16_t h[HIDDEN];
#endif

#if defined(__ARM_FEATURE_DSP) && defined(__ARM_FEATURE_SIMD32)
#include <arm_acle.h>
#define DUAL 1
#endif

#define STRIDE ((HIDDEN + 15) / 16 * 16) /* inputs, with zeros at the end */
static int32_t sum[3 * HIDDEN];

#ifdef DUAL
typedef struct {
    int16x2_t even, odd;
} inputs_4;
static inputs_4 x[STRIDE / 4];

static inline int32_t word(const int8_t *from)
{
    int32_t bytes;
    __builtin_memcpy(&bytes, from, 4);
    return bytes;
}

/* Bytes 1 and 3. The intrinsic does not take the rotation. */
static inline int16x2_t odd(int32_t bytes)
{
    int16x2_t result;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(result) : "r"(bytes));
    return result;
}

static void expand(const int8_t *from)
{
    int k;
    for (k = 0; k < STRIDE / 4; ++k) {
        x[k].even = __sxtb16(word(from + 4 * k));
        x[k].odd = odd(word(from + 4 * k));
    }
}

#define INPUTS (STRIDE / 4)
#define DOT(i) \
    do { \
        const int32_t bytes = word(row + 4 * k + (i)*STRIDE); \
        s##i = __smlad(__sxtb16(bytes), x[k].even, s##i); \
        s##i = __smlad(odd(bytes), x[k].odd, s##i); \
    } while (0)
#else
static ACTIVATION x[STRIDE];

static void expand(const int8_t *from)
{
    int k;
    for (k = 0; k < STRIDE; ++k)
        x[k] = from[k];
}

#define INPUTS STRIDE
#define DOT(i) s##i += row[k + (i)*STRIDE] * x[k]
#endif

#if INTRINSICS && defined(__aarch64__)
#include <arm_neon.h>

/* Two products of seven bits each are added in sixteen bits, pairs of these in 32 bits. */
static void product(int32_t *restrict to, const int8_t *row, int outputs)
{
    int i, k, n;
    for (n = 0; n < outputs; n += 4, to += 4, row += 4 * STRIDE) {
        int32x4_t s0 = vdupq_n_s32(0), s1 = s0, s2 = s0, s3 = s0;
        for (k = 0; k < STRIDE; k += 16) {
            const int8x16_t in = vld1q_s8(x + k), a = vld1q_s8(row + k), b = vld1q_s8(row + k + STRIDE);
            const int8x16_t c = vld1q_s8(row + k + 2 * STRIDE), d = vld1q_s8(row + k + 3 * STRIDE);
#define PAIRS(w) vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(in)), w, in)
            s0 = vpadalq_s16(s0, PAIRS(a));
            s1 = vpadalq_s16(s1, PAIRS(b));
            s2 = vpadalq_s16(s2, PAIRS(c));
            s3 = vpadalq_s16(s3, PAIRS(d));
        }
        const int32x4_t sum = vpaddq_s32(vpaddq_s32(s0, s1), vpaddq_s32(s2, s3));
        if (n + 4 <= outputs)
            vst1q_s32(to, vaddq_s32(vld1q_s32(to), sum));
        else
            for (i = 0; n + i < outputs; ++i)
                to[i] += sum[i];
    }
}
#else
static void product(int32_t *restrict to, const int8_t *row, int outputs)
{
    int k;
    for (; outputs >= ROWS; outputs -= ROWS, to += ROWS, row += ROWS * STRIDE) {
        int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        for (k = 0; k < INPUTS; ++k) {
            DOT(0);
#if ROWS > 1
            DOT(1);
#endif
#if ROWS > 2
            DOT(2);
#endif
#if ROWS > 3
            DOT(3);
#endif
        }
        to[0] += s0;
#if ROWS > 1
        to[1] += s1;
#endif
#if ROWS > 2
        to[2] += s2;
#endif
#if ROWS > 3
        to[3] += s3;
#endif
        (void)s1, (void)s2, (void)s3;
    }
    for (; outputs > 0; --outputs, ++to, row += STRIDE) {
        int32_t s0 = 0;
        for (k = 0; k < INPUTS; ++k)
            DOT(0);
        *to += s0;
    }
}
#endif

#if FLOAT_GATES
/* Quantise the state to int8, relative to its largest magnitude. Returns the unit. */
static float quantise(int8_t *h8)
{
    float magnitude = 0.0f, per_unit;
    int j;
    for (j = 0; j < HIDDEN; ++j) {
        const float value = h[j] < 0.0f ? -h[j] : h[j];
        magnitude = value > magnitude ? value : magnitude;
    }
    per_unit = magnitude > 0.0f ? 127.0f / magnitude : 0.0f;
    for (j = 0; j < HIDDEN; ++j)
        h8[j] = (int8_t)(h[j] * per_unit + (h[j] < 0.0f ? -0.5f : 0.5f));
    return magnitude / 127.0f;
}

void dense_step(float input, float *out)
{
#ifdef RANGE
    const float limit = RANGE;
#else
    const float limit = LARGEST_ARGUMENT;
#endif
    static int8_t h8[STRIDE];
    float unit = quantise(h8);
    int j;
    for (j = 0; j < 3 * HIDDEN; ++j)
        sum[j] = 0;
    expand(h8);
    product(sum, v, 3 * HIDDEN);
    for (j = 0; j < HIDDEN; ++j) {
        const float r = bias[j] + input * w[j] + (float)sum[j] * (unit * scale[j]);
        const float u = bias[HIDDEN + j] + input * w[HIDDEN + j] + (float)sum[HIDDEN + j] * (unit * scale[HIDDEN + j]);
        const float q = bias_q[j] + (float)sum[2 * HIDDEN + j] * (unit * scale[2 * HIDDEN + j]);
        const float a = bias[2 * HIDDEN + j] + input * w[2 * HIDDEN + j] + q / (1.0f + exponential(-r, limit));
        const float eu = 1.0f + exponential(u, limit), ez = exponential(-2.0f * a, limit);
        const float both = 1.0f / (eu * (1.0f + ez));
        h[j] += (1.0f + ez) * both * ((1.0f - ez) * eu * both - h[j]);
    }
    unit = quantise(h8);
    for (j = 0; j < OUTPUTS; ++j)
        sum[j] = 0;
    expand(h8);
    product(sum, readout, OUTPUTS);
    for (j = 0; j < OUTPUTS; ++j)
        out[j] = readout_bias[j] + (float)sum[j] * (unit * scale[j]);
}
#else
void dense_step(int16_t input, int32_t *out)
{
    static int8_t h8[STRIDE];
    int j;
    for (j = 0; j < 3 * HIDDEN; ++j)
        sum[j] = 0;
    expand(h8);
    product(sum, v, 3 * HIDDEN);
#if MODEL_BATCHES
    static int32_t pre[3 * HIDDEN], z[HIDDEN];
    const scaling unit = {0, 0};
    int k;
    for (j = 0; j < 2 * HIDDEN; ++j)
        pre[j] = bias[j] + (input * w[j] >> 12);
    for (j = 0; j < HIDDEN; ++j)
        z[j] = bias[2 * HIDDEN + j] + (input * w[2 * HIDDEN + j] >> 12);
    for (j = 0; j < HIDDEN; ++j)
        pre[2 * HIDDEN + j] = bias_q[j];
    add_scaled(pre, sum, 3 * HIDDEN, scale, unit);
    for (k = 0; k < HIDDEN; k += batch) {
        const int n = HIDDEN - k < batch ? HIDDEN - k : batch;
        int16_t update[batch], candidate[batch];
        int32_t a[batch];
        look_up(update, sigmoid_table, pre + k, n);
        apply_reset(a, z + k, pre + 2 * HIDDEN + k, update, n);
        look_up(candidate, tanh_table, a, n);
        look_up(update, sigmoid_table, pre + HIDDEN + k, n);
        for (j = 0; j < n; ++j) {
            const int32_t change = update[j] * candidate[j] - update[j] * h[k + j];
            h[k + j] = (int16_t)(h[k + j] + (change >> 15));
            h8[k + j] = (int8_t)(h[k + j] >> 8);
        }
    }
#else
    for (j = 0; j < HIDDEN; ++j) {
        const int32_t r = bias[j] + (input * w[j] >> 12) + multiply_high(sum[j], scale[j]);
        const int32_t u = bias[HIDDEN + j] + (input * w[HIDDEN + j] >> 12) +
                          multiply_high(sum[HIDDEN + j], scale[HIDDEN + j]);
        const int32_t q = bias_q[j] + multiply_high(sum[2 * HIDDEN + j], scale[2 * HIDDEN + j]);
        const int32_t p = bias[2 * HIDDEN + j] + (input * w[2 * HIDDEN + j] >> 12);
        const int32_t a = p + (int32_t)(((int64_t)interpolate(sigmoid_table, r) * q) >> 16);
        const int32_t change = interpolate(sigmoid_table, u) * (interpolate(tanh_table, a) - h[j]);
        h[j] = (int16_t)(h[j] + (change >> 15));
        h8[j] = (int8_t)(h[j] >> 8);
    }
#endif
    expand(h8);
    for (j = 0; j < OUTPUTS; ++j)
        out[j] = readout_bias[j];
    product(out, readout, OUTPUTS);
}
#endif
