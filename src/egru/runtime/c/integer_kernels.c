/* ---- kernels: integers only ---- */

/* Pre-activations have PRE fractional bits: those of r and u one less, and u has the opposite sign. The recurrent part
 * of z has one more if it is multiplied by r. Gates and candidates have fifteen. */
#if (-1 >> 1) != -1
#error "model.c requires right shifts that keep the sign"
#endif

/* Loops over columns that do little: unrolled, so that the loop itself takes a smaller part of the instructions. */
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLLED _Pragma("GCC unroll 4")
#else
#define UNROLLED
#endif

/* value / 2^bits, rounded to nearest. */
static inline int32_t shift_right(int32_t value, int bits)
{
    return (bits > 0 ? value + (1 << (bits - 1)) : value) >> bits;
}
#if LONG_SHIFT

static inline int64_t shift_right_long(int64_t value, int bits)
{
    return (bits > 0 ? value + ((int64_t)1 << (bits - 1)) : value) >> bits;
}
#endif

/* a * b / 2^32, rounded down. */
static inline int32_t multiply_high(int32_t a, int32_t b)
{
    return (int32_t)(((int64_t)a * b) >> 32);
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

/* Tables with linear interpolation in 512 intervals: sigmoid on [-16, 16), tanh on [-8, 8). */
static inline int32_t interpolate(const int16_t *table, int32_t x)
{
    const int32_t at = CLAMP(x, 15) + 32768, left = table[at >> 7];
    return left + shift_right((table[(at >> 7) + 1] - left) * (at & 127), 7);
}
#if defined(__SSE2__) || MODEL_NEON
#define MODEL_BATCHES 1 /* compute gates in loops over several units */
enum { batch = 64 };

/* Two neighbours in a table. */
static inline uint32_t load_pair(const int16_t *from)
{
    uint32_t pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return pair;
}
#else
#define MODEL_BATCHES 0
#endif
#if MODEL_BATCHES

/* gate[j] = interpolate(table, x[j]) */
static void look_up(int16_t *restrict gate, const int16_t *table, const int32_t *x, int count)
{
    int j;
    for (j = 0; j + 8 <= count; j += 8) {
#if defined(__SSE2__)
        const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(x + j));
        const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(x + j + 4));
        const __m128i at = _mm_xor_si128(_mm_packs_epi32(low, high), _mm_set1_epi16(-32768));
        const __m128i index = _mm_srli_epi16(at, 7), part = _mm_and_si128(at, _mm_set1_epi16(127));
        const __m128i rest = _mm_sub_epi16(_mm_set1_epi16(128), part), half = _mm_set1_epi32(64);
#define PAIR(i) _mm_cvtsi32_si128((int32_t)load_pair(table + _mm_extract_epi16(index, i)))
#define PAIRS(i) \
    _mm_unpacklo_epi64(_mm_unpacklo_epi32(PAIR(i), PAIR((i) + 1)), _mm_unpacklo_epi32(PAIR((i) + 2), PAIR((i) + 3)))
        const __m128i a = _mm_madd_epi16(PAIRS(0), _mm_unpacklo_epi16(rest, part));
        const __m128i b = _mm_madd_epi16(PAIRS(4), _mm_unpackhi_epi16(rest, part));
        const __m128i value =
            _mm_packs_epi32(_mm_srai_epi32(_mm_add_epi32(a, half), 7), _mm_srai_epi32(_mm_add_epi32(b, half), 7));
        _mm_storeu_si128((__m128i *)(void *)(gate + j), value);
#else
        const int16x8_t clamped = vqmovn_high_s32(vqmovn_s32(vld1q_s32(x + j)), vld1q_s32(x + j + 4));
        const uint16x8_t at = veorq_u16(vreinterpretq_u16_s16(clamped), vdupq_n_u16(0x8000u)), index = vshrq_n_u16(at, 7);
        const int16x8_t part = vreinterpretq_s16_u16(vandq_u16(at, vdupq_n_u16(127))), rest = vsubq_s16(vdupq_n_s16(128), part);
#define PAIR(i) load_pair(table + vgetq_lane_u16(index, i))
        const uint32x4_t low = {PAIR(0), PAIR(1), PAIR(2), PAIR(3)}, high = {PAIR(4), PAIR(5), PAIR(6), PAIR(7)};
        const int16x8_t left = vuzp1q_s16(vreinterpretq_s16_u32(low), vreinterpretq_s16_u32(high));
        const int16x8_t right = vuzp2q_s16(vreinterpretq_s16_u32(low), vreinterpretq_s16_u32(high));
        const int32x4_t a = vmlal_s16(vmull_s16(vget_low_s16(left), vget_low_s16(rest)), vget_low_s16(right), vget_low_s16(part));
        const int32x4_t b = vmlal_high_s16(vmull_high_s16(left, rest), right, part);
        vst1q_s16(gate + j, vrshrn_high_n_s32(vrshrn_n_s32(a, 7), b, 7));
#endif
    }
    for (; j < count; ++j)
        gate[j] = (int16_t)interpolate(table, x[j]);
}
#if AFTER_ANY

/* a[j] = z[j] + reset[j] * q[j] / 2^16 */
static void apply_reset(int32_t *restrict a, const int32_t *z, const int32_t *q, const int16_t *reset, int count)
{
    int j;
    for (j = 0; j + 8 <= count; j += 8) {
#if defined(__SSE2__)
        const __m128i gate = _mm_loadu_si128((const __m128i *)(const void *)(reset + j)), zero = _mm_setzero_si128();
        const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(q + j));
        const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(q + j + 4));
        const __m128i x = _mm_add_epi32(_mm_madd_epi16(low, _mm_unpacklo_epi16(zero, gate)),
                                        _mm_mulhi_epu16(low, _mm_unpacklo_epi16(gate, zero)));
        const __m128i y = _mm_add_epi32(_mm_madd_epi16(high, _mm_unpackhi_epi16(zero, gate)),
                                        _mm_mulhi_epu16(high, _mm_unpackhi_epi16(gate, zero)));
        _mm_storeu_si128((__m128i *)(void *)(a + j), _mm_add_epi32(x, _mm_loadu_si128((const __m128i *)(const void *)(z + j))));
        _mm_storeu_si128((__m128i *)(void *)(a + j + 4), _mm_add_epi32(y, _mm_loadu_si128((const __m128i *)(const void *)(z + j + 4))));
#else
        const int16x8_t gate = vld1q_s16(reset + j);
        const int32x4_t x = vqdmulhq_s32(vld1q_s32(q + j), vshll_n_s16(vget_low_s16(gate), 15));
        const int32x4_t y = vqdmulhq_s32(vld1q_s32(q + j + 4), vshll_high_n_s16(gate, 15));
        vst1q_s32(a + j, vaddq_s32(vld1q_s32(z + j), x));
        vst1q_s32(a + j + 4, vaddq_s32(vld1q_s32(z + j + 4), y));
#endif
    }
    for (; j < count; ++j)
        a[j] = z[j] + (int32_t)(((int64_t)reset[j] * q[j]) >> 16);
}
#endif
#endif
#if BEFORE

/* gated[k] = sigmoid(r[active[k]]) * value[k] */
static void apply_reset_gate(int16_t *restrict gated, const int32_t *r, const uint16_t *active, const int16_t *value,
                             int count)
{
#if MODEL_BATCHES
    int j, k;
    for (k = 0; k < count; k += batch) {
        const int n = count - k < batch ? count - k : batch;
        int32_t x[batch];
        int16_t gate[batch];
        UNROLLED for (j = 0; j < n; ++j)
            x[j] = r[active[k + j]];
        look_up(gate, sigmoid_table, x, n);
        for (j = 0; j < n; ++j)
            gated[k + j] = (int16_t)shift_right(gate[j] * value[k + j], 15);
    }
#else
    int k;
    for (k = 0; k < count; ++k)
        gated[k] = (int16_t)shift_right(interpolate(sigmoid_table, r[active[k]]) * value[k], 15);
#endif
}
#endif

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

static void clear_state(int16_t *to, int count)
{
    int i;
    for (i = 0; i < count; ++i)
        to[i] = 0;
}

FIRED_FUNCTION
#if INT16

/* Add value * row / 2^shift to pre-activations for every entry of a sparse vector of few inputs. Sums start at
 * `start`. */
static void add_rows_int16(int32_t *restrict sum, const int32_t *start, int columns, const int16_t *rows, int shift,
                           const uint16_t *index, const int16_t *value, int count)
{
    int j, k;
    if (count == 0)
        copy(sum, start, columns);
    for (k = 0; k < count; ++k, start = sum) {
        const int16_t *row = rows + index[k] * (size_t)columns;
        const int16_t v = value[k];
        UNROLLED for (j = 0; j < columns; ++j)
            sum[j] = start[j] + (v * row[j] >> shift);
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

/* Sums of products times 2^bits are multiplied by scale / 2^32. The lower 16 - shift bits of a scale are zero, and its
 * upper shift + 1 bits too. */
typedef struct {
    int bits, shift;
} scaling;

static inline void add_scaled(int32_t *restrict sum, const int32_t *total, int columns, const int32_t *scale,
                              scaling unit)
{
    int j = 0;
#if defined(__SSE2__)
    const __m128i bits = _mm_cvtsi32_si128(unit.bits), shift = _mm_cvtsi32_si128(unit.shift);
    UNROLLED for (; j + 4 <= columns; j += 4) { /* the products of the upper and the lower sixteen bits */
        const __m128i x = _mm_sll_epi32(_mm_loadu_si128((const __m128i *)(const void *)(total + j)), bits);
        const __m128i upper = _mm_sll_epi32(_mm_loadu_si128((const __m128i *)(const void *)(scale + j)), shift);
        const __m128i product =
            _mm_add_epi32(_mm_madd_epi16(x, upper), _mm_mulhi_epu16(x, _mm_srli_epi32(upper, 16)));
        __m128i *const to = (__m128i *)(void *)(sum + j);
        _mm_storeu_si128(to, _mm_add_epi32(_mm_loadu_si128(to), _mm_sra_epi32(product, shift)));
    }
#elif MODEL_NEON
    const int32x4_t bits = vdupq_n_s32(unit.bits);
    UNROLLED for (; j + 4 <= columns; j += 4) {
        const int32x4_t product = vqdmulhq_s32(vshlq_s32(vld1q_s32(total + j), bits), vld1q_s32(scale + j));
        vst1q_s32(sum + j, vsraq_n_s32(vld1q_s32(sum + j), product, 1));
    }
#endif
    for (; j < columns; ++j)
        sum[j] += multiply_high(total[j] * (1 << unit.bits), scale[j]);
}
#endif
