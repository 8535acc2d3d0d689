/* ---- kernels: the same operations in the same order as the engine ---- */

typedef union {
    float value;
    uint32_t bits;
} float_bits;

/* exp, to about one unit in the last place on [-40, 40]; arguments are clamped to this range. NaN stays NaN. */
static inline float exponential(float x)
{
    const float magic = 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    float_bits shifted, power;
    float n, f, p;
    x = x > 40.0f ? 40.0f : x;
    x = x < -40.0f ? -40.0f : x;
    shifted.value = x * 1.44269504f + magic;
    n = shifted.value - magic;
    f = n * -0.693359375f + x;
    f = n * 2.12194440e-4f + f;
    p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + (f + 1.0f);
    power.bits = (shifted.bits - 0x4B400000u + 127u) << 23; /* 0x4B400000: the bits of `magic` */
    return p * power.value;
}

static inline float sigmoid(float x)
{
    return 1.0f / (1.0f + exponential(-x));
}

#if LSTM_ANY

static inline float hyperbolic_tangent(float x)
{
    const float e = exponential(-2.0f * x);
    return (1.0f - e) / (1.0f + e);
}
#endif
#if GRU_ANY

typedef struct {
    float update, candidate;
} gru_gates;

/* update = 1 / (1 + exp(u)) and candidate = tanh(a) share one division. */
static inline gru_gates compute_gates(float u, float a)
{
    const float eu = 1.0f + exponential(u), ez = exponential(-2.0f * a);
    const float both = 1.0f / (eu * (1.0f + ez));
    gru_gates g;
    g.update = (1.0f + ez) * both;
    g.candidate = (1.0f - ez) * eu * both;
    return g;
}
#endif
#if MAGNITUDE

static inline float magnitude(float x)
{
    return x < 0.0f ? -x : x;
}
#endif

static inline int is_finite(float x)
{
    return x - x == 0.0f;
}

static void copy(float *to, const float *from, int count)
{
    int i;
    for (i = 0; i < count; ++i)
        to[i] = from[i];
}

static void clear(float *to, int count)
{
    int i;
    for (i = 0; i < count; ++i)
        to[i] = 0.0f;
}
#if DELTA_ANY

/* List the units whose receivers hold a value other than zero. */
static int list_held(const float *y, int hidden, uint16_t *index, float *value)
{
    int count = 0, j;
    for (j = 0; j < hidden; ++j)
        if (y[j] != 0.0f) {
            index[count] = (uint16_t)j;
            value[count++] = y[j];
        }
    return count;
}
#endif
#if SKIP

/* A unit while input and output of its layer do not change: after n steps its state is
 * target + decay^n (c - target) + n slope. */
typedef struct {
    double decay, target, slope;
} relaxation;
#if GRU_ANY

/* `moves` is the part of the state that zoneout does not keep. Rounding may make a gate exceed one. */
static inline relaxation gru_relaxation(float update, float candidate, double moves)
{
    relaxation r;
    r.decay = 1.0 - ((double)update < 1.0 ? moves * (double)update : moves);
    r.target = (double)candidate;
    r.slope = 0.0;
    return r;
}
#endif
#if LSTM_ANY

static inline relaxation lstm_relaxation(float forget, float added, double moves)
{
    const double rate = 1.0 - (double)forget, change = rate < 1.0 ? moves * rate : moves;
    relaxation r;
    r.decay = 1.0 - change;
    r.target = change != 0.0 ? (double)added / rate : 0.0;
    r.slope = change != 0.0 ? 0.0 : moves * (double)added;
    return r;
}
#endif

/* base^n for 0 <= base <= 1 by repeated squaring. Values below 1e-150 become zero: subnormal numbers are slow. */
static double power(double base, int64_t n)
{
    double result = 1.0;
    for (;; n >>= 1) {
        if (n & 1) {
            result = result * base;
            result = result < 1e-150 ? 0.0 : result;
        }
        if (n <= 1)
            return result;
        base = base * base;
        base = base < 1e-150 ? 0.0 : base;
    }
}

static float relaxed(relaxation r, int64_t steps, float c)
{
    return (float)(r.target + power(r.decay, steps) * ((double)c - r.target) + (double)steps * r.slope);
}
#endif
#if FLOAT32

/* sum[j] = value * row[j] + sum[j] for every entry of a sparse vector, in order. */
static void add_rows(float *restrict sum, int columns, const float *rows, const uint16_t *index, const float *value,
                     int count)
{
    const size_t stride = (size_t)columns;
    int k = 0, j;
    for (; k + 8 <= count; k += 8) {
        const float *row[8];
        float v[8];
        for (j = 0; j < 8; ++j) {
            row[j] = rows + index[k + j] * stride;
            v[j] = value[k + j];
        }
        for (j = 0; j < columns; ++j) {
            float s = sum[j];
            s = v[0] * row[0][j] + s;
            s = v[1] * row[1][j] + s;
            s = v[2] * row[2][j] + s;
            s = v[3] * row[3][j] + s;
            s = v[4] * row[4][j] + s;
            s = v[5] * row[5][j] + s;
            s = v[6] * row[6][j] + s;
            s = v[7] * row[7][j] + s;
            sum[j] = s;
        }
    }
    for (; k + 4 <= count; k += 4) {
        const float *a = rows + index[k] * stride, *b = rows + index[k + 1] * stride;
        const float *c = rows + index[k + 2] * stride, *d = rows + index[k + 3] * stride;
        const float va = value[k], vb = value[k + 1], vc = value[k + 2], vd = value[k + 3];
        for (j = 0; j < columns; ++j) {
            float s = sum[j];
            s = va * a[j] + s;
            s = vb * b[j] + s;
            s = vc * c[j] + s;
            s = vd * d[j] + s;
            sum[j] = s;
        }
    }
    for (; k < count; ++k) {
        const float *a = rows + index[k] * stride;
        const float va = value[k];
        for (j = 0; j < columns; ++j)
            sum[j] = va * a[j] + sum[j];
    }
}
#endif
#if INT8

/* Quantise a vector to eight bits and a sign: value ~ unit * q. Returns the unit. */
static float quantise(const float *value, int count, int16_t *q)
{
    float magnitude = 0.0f, per_unit;
    int k;
    for (k = 0; k < count; ++k) {
        const float v = value[k] < 0.0f ? -value[k] : value[k];
        magnitude = v > magnitude ? v : magnitude;
    }
    per_unit = magnitude > 0.0f ? 255.0f / magnitude : 0.0f;
    for (k = 0; k < count; ++k) {
        const float v = (value[k] < 0.0f ? -value[k] : value[k]) * per_unit + 0.5f;
        const int16_t level = (int16_t)(v < 256.0f ? (int)v : 0); /* infinite if 255 / magnitude overflows */
        q[k] = value[k] < 0.0f ? (int16_t)-level : level;
    }
    return magnitude / 255.0f;
}

/* The product of integers, in real numbers. */
static void add_scaled(float *restrict sum, const int32_t *total, int columns, const float *scale, float unit)
{
    int j;
    for (j = 0; j < columns; ++j)
        sum[j] = (float)total[j] * (unit * scale[j]) + sum[j];
}
#endif
