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

static inline int32_t clamp(int32_t value, int32_t low, int32_t high)
{
    return value < low ? low : value > high ? high : value;
}

static inline int32_t saturate(int64_t value)
{
    return value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : (int32_t)value;
}

/* Tables with linear interpolation: sigmoid on [-16, 16) with 16 intervals per unit, tanh on [-8, 8) with 32. */
static inline int32_t interpolate(const int16_t *table, int32_t x, int32_t range, int bits)
{
    const int32_t at = clamp(x, -range, range - 1) + range, left = table[at >> bits];
    return left + shift_right((table[(at >> bits) + 1] - left) * (at & ((1 << bits) - 1)), bits);
}

static inline int32_t sigmoid(int32_t x)
{
    return interpolate(sigmoid_table, x, 16 << pre_fraction, pre_fraction - 4);
}

static inline int32_t hyperbolic_tangent(int32_t x)
{
    return interpolate(tanh_table, x, 8 << pre_fraction, pre_fraction - 5);
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
