/* ---- kernels: the same operations in the same order as the engine ---- */

/* Loops over columns and units that do little: without vectors, half of their instructions would be the loop's own. */
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLLED _Pragma("GCC unroll 4")
#else
#define UNROLLED
#endif

typedef union {
    float value;
    uint32_t bits;
} float_bits;

/* The largest argument of the exponential. It is read as a volatile value, once per loop, so that compilers do not
 * evaluate the exponential for it: they would replace a minimum by a long sequence of selections. */
static const float largest_argument = 40.0f;
#define LARGEST_ARGUMENT (*(const volatile float *)&largest_argument)

/* The clamped argument; NaN stays NaN. */
static inline float clamp(float x, float limit)
{
#if defined(__ARM_NEON) && defined(__aarch64__)
    /* Compilers replace comparisons of these vectors by longer ones of the opposite sense, but not masks. */
    float_bits result, low, high;
    uint32_t mask = x > limit ? 0xFFFFFFFFu : 0u;
    result.value = x;
    high.value = limit;
    low.value = -limit;
    result.bits ^= (result.bits ^ high.bits) & mask;
    mask = x < -limit ? 0xFFFFFFFFu : 0u;
    result.bits ^= (result.bits ^ low.bits) & mask;
    return result.value;
#else
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
#endif
}

/* exp, to about one unit in the last place on [-limit, limit]; arguments are clamped to this range. NaN stays NaN. */
static inline float exponential(float x, float limit)
{
    const float magic = 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    float_bits shifted, power;
    float n, f, p;
    x = clamp(x, limit);
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

static inline float sigmoid(float x, float limit)
{
    return 1.0f / (1.0f + exponential(-x, limit));
}

#if LSTM_ANY

static inline float hyperbolic_tangent(float x, float limit)
{
    const float e = exponential(-2.0f * x, limit);
    return (1.0f - e) / (1.0f + e);
}
#endif
#if GRU_ANY

typedef struct {
    float update, candidate;
} gru_gates;

/* update = 1 / (1 + exp(u)) and candidate = tanh(a) share one division. */
static inline gru_gates compute_gates(float u, float a, float limit)
{
    const float eu = 1.0f + exponential(u, limit), ez = exponential(-2.0f * a, limit);
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

/* Whether all values are finite. */
static int are_finite(const float *values, int count)
{
    int i;
#if MODEL_NEON
    const float32x4_t none = vdupq_n_f32(0.0f);
    float32x4_t zero = none; /* remains zero unless a value is infinite or NaN */
    float tail = 0.0f;
    UNROLLED for (i = 0; i + 4 <= count; i += 4)
        zero = vfmaq_f32(zero, vld1q_f32(values + i), none);
    for (; i < count; ++i)
        tail += values[i] - values[i];
    return vaddvq_f32(zero) + tail == 0.0f;
#elif defined(__SSE2__) || defined(__ARM_NEON)
    uint32_t special = 0;
    for (i = 0; i < count; ++i) {
        float_bits v;
        v.value = values[i];
        special |= (v.bits & 0x7F800000u) == 0x7F800000u;
    }
    return special == 0;
#else
    float zero = 0.0f; /* compilers do not vectorise this sum, which takes fewer instructions without vectors */
    UNROLLED for (i = 0; i < count; ++i)
        zero += values[i] - values[i];
    return zero == 0.0f;
#endif
}

FIRED_FUNCTION
#if BEFORE

/* gated[k] = sigmoid(r[active[k]]) * value[k]. */
static void apply_reset_gate(float *restrict gated, const float *r, const uint16_t *active, const float *value, int count)
{
    const float limit = LARGEST_ARGUMENT;
    int k;
    UNROLLED for (k = 0; k < count; ++k)
        gated[k] = r[active[k]];
    for (k = 0; k < count; ++k)
        gated[k] = sigmoid(gated[k], limit) * value[k];
}
#endif
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

/* sum[j] = value * row[j] + sum[j] for every entry of a sparse vector, in order. Sums start at `start` if it is not
 * null. */
static void add_rows(float *restrict sum, const float *start, int columns, const float *rows, const uint16_t *index,
                     const float *value, int count)
{
    const size_t stride = (size_t)columns;
    int k = 0, j;
    if (start != NULL && count == 0)
        copy(sum, start, columns);
    if (start != NULL && count > 0) {
        const float *a = rows + index[0] * stride;
        const float va = value[0];
        UNROLLED for (j = 0; j < columns; ++j)
            sum[j] = va * a[j] + start[j];
        k = 1;
    }
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
    float_bits v;
    uint32_t bits = 0;
    float largest_value, per_unit;
    int k;
    for (k = 0; k < count; ++k) { /* magnitudes are ordered like their bits */
        v.value = value[k];
        v.bits &= 0x7FFFFFFFu;
        bits = v.bits > bits ? v.bits : bits;
    }
    v.bits = bits;
    largest_value = v.value;
    per_unit = largest_value > 0.0f ? 255.0f / largest_value : 0.0f;
    if (!is_finite(per_unit)) /* the vector is almost zero */
        per_unit = 0.0f;
    for (k = 0; k < count; ++k) {
        const float scaled = value[k] * per_unit;
        q[k] = (int16_t)(int)(scaled < 0.0f ? scaled - 0.5f : scaled + 0.5f);
    }
    return largest_value / 255.0f;
}

/* The product of integers, in real numbers. */
static inline void add_scaled(float *restrict sum, const int32_t *total, int columns, const float *scale, float unit)
{
    int j;
    UNROLLED for (j = 0; j < columns; ++j)
        sum[j] = (float)total[j] * (unit * scale[j]) + sum[j];
}
#endif
