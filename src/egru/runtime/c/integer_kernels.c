/* ---- kernels: integers only ---- */

/* Pre-activations have PRE fractional bits, gates and candidates fifteen. */
enum { pre_fraction = PRE };

/* value / 2^bits, rounded to nearest. */
static inline int32_t shift_right(int32_t value, int bits)
{
    const int32_t rounded = bits > 0 ? value + (1 << (bits - 1)) : value;
    return rounded >= 0 ? rounded >> bits : ~(~rounded >> bits);
}

static inline int64_t shift_right_long(int64_t value, int bits)
{
    const int64_t rounded = bits > 0 ? value + ((int64_t)1 << (bits - 1)) : value;
    return rounded >= 0 ? rounded >> bits : ~(~rounded >> bits);
}

/* a * b / 2^32, rounded down. */
static inline int32_t multiply_high(int32_t a, int32_t b)
{
    return (int32_t)(uint32_t)((uint64_t)((int64_t)a * b) >> 32);
}

/* The nearest number with a sign and this many bits. */
#if defined(__ARM_FEATURE_SAT) && defined(__GNUC__)
#define CLAMP(value, bits) ((int32_t)__builtin_arm_ssat(value, (bits) + 1))
#else
#define CLAMP(value, bits) clamp(value, -(1 << (bits)), (1 << (bits)) - 1)
static inline int32_t clamp(int32_t value, int32_t low, int32_t high)
{
    return value < low ? low : value > high ? high : value;
}
#endif

static inline int32_t saturate(int64_t value)
{
    return value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : (int32_t)value;
}

/* Tables with linear interpolation: sigmoid on [-16, 16) with 16 intervals per unit, tanh on [-8, 8) with 32. */
static inline int32_t interpolate(const int16_t *table, int32_t at, int bits)
{
    const int32_t left = table[at >> bits];
    return left + shift_right((table[(at >> bits) + 1] - left) * (at & ((1 << bits) - 1)), bits);
}

static inline int32_t sigmoid(int32_t x)
{
    return interpolate(sigmoid_table, CLAMP(x, pre_fraction + 4) + (16 << pre_fraction), pre_fraction - 4);
}

static inline int32_t hyperbolic_tangent(int32_t x)
{
    return interpolate(tanh_table, CLAMP(x, pre_fraction + 3) + (8 << pre_fraction), pre_fraction - 5);
}

static void copy(int32_t *to, const int32_t *from, int count)
{
    int i;
    for (i = 0; i < count; ++i)
        to[i] = from[i];
}

static void clear(int32_t *to, int count)
{
    int i;
    for (i = 0; i < count; ++i)
        to[i] = 0;
}
#if INT16

/* Add value * row to pre-activations for every entry of a sparse vector of few inputs. Sums start at `start`. */
static void add_rows_int16(int32_t *restrict sum, const int32_t *start, int columns, const int16_t *rows, const int32_t *scale, int drop,
                           const uint16_t *index, const int16_t *value, int count)
{
    int j, k;
    copy(sum, start, columns);
    for (k = 0; k < count; ++k) {
        const int16_t *row = rows + index[k] * (size_t)columns;
        const int32_t v = shift_right(value[k], drop);
        for (j = 0; j < columns; ++j)
            sum[j] += multiply_high(v * row[j], scale[j]);
    }
}
#endif
#if INT8

/* Shorten a vector to nine bits and a sign, but at least by `drop` bits: value ~ q * 2^(drop + result). */
static int quantise(const int16_t *value, int count, int drop, int16_t *q)
{
    int32_t magnitude = 0;
    int bits = drop, k;
    for (k = 0; k < count; ++k) {
        const int32_t v = value[k] < 0 ? -value[k] : value[k];
        magnitude = v > magnitude ? v : magnitude;
    }
    while (shift_right(magnitude, bits) > 511)
        ++bits;
    for (k = 0; k < count; ++k)
        q[k] = (int16_t)shift_right(value[k], bits);
    return bits - drop;
}

static inline void add_scaled(int32_t *restrict sum, const int32_t *total, int columns, const int32_t *scale, int bits)
{
    int j;
    for (j = 0; j < columns; ++j)
        sum[j] += multiply_high(total[j] * (1 << bits), scale[j]);
}
#endif
