#if DENSE

/* total[j] = the sum of q[k] * row[j] over the entries of a sparse vector, |q[k]| <= 511. Columns are computed in blocks
 * of up to sixteen: `total` has room for `tile` columns, and the last row is followed by twelve more weights. */
#if MODEL_ROWS == 1
enum { tile = 256 };
#else
enum { tile = 512 };
#endif
#if MODEL_ROWS == 0 || MODEL_ROWS == 2

/* A multiple of eight entries is added. The last ones are copied, and followed by zeros. */
typedef struct {
    uint16_t index[8];
    int16_t q[8];
} entries;

static inline entries last_entries(const uint16_t *index, const int16_t *q, int count)
{
    entries e = {{0}, {0}};
    int k;
    for (k = 0; k < count % 8; ++k) {
        e.index[k] = index[count - count % 8 + k];
        e.q[k] = q[count - count % 8 + k];
    }
    return e;
}
#endif
#if MODEL_ROWS >= 2

/* A word of two columns is multiplied as a whole, and without its upper byte: the second product is that of the first
 * column, and their difference is 256 times that of the second column. It fits into 32 bits for 128 rows. */
enum { rows_per_block = 128 };
#endif
#if MODEL_ROWS == 3

/* Sums of 64 columns. */
typedef struct {
    int32x4_t both[8], first[8];
} sums;

/* Add the products of sixteen columns, or of all 64, with entry `lane` of q. */
#if defined(__GNUC__) && !defined(__clang__)
/* Compilers would keep copies of the words. */
#define ADD_COLUMNS(i, lane) \
    __asm__("smlal %0.4s, %4.4h, %5.h[" #lane "]\n" \
            "smlal2 %1.4s, %4.8h, %5.h[" #lane "]\n" \
            "bic %4.8h, #255, lsl #8\n" \
            "smlal %2.4s, %4.4h, %5.h[" #lane "]\n" \
            "smlal2 %3.4s, %4.8h, %5.h[" #lane "]" \
            : "+w"(s.both[2 * (i)]), "+w"(s.both[2 * (i) + 1]), "+w"(s.first[2 * (i)]), "+w"(s.first[2 * (i) + 1]), \
              "+w"(w##i) \
            : "x"(values))
/* One row after the other, each with one load of all words, for which their registers must be consecutive. */
#define ADD_ROW(lane) \
    do { \
        const weight *at = row[lane] + from; \
        __asm__("" : "+r"(at), "+w"(s.first[0]), "+w"(s.first[1])); \
        if (all) { \
            register uint16x8_t w0 __asm__("v4"); \
            register uint16x8_t w1 __asm__("v5"); \
            register uint16x8_t w2 __asm__("v6"); \
            register uint16x8_t w3 __asm__("v7"); \
            __asm__("ld1 {%0.8h - %3.8h}, [%4]" \
                    : "=w"(w0), "=w"(w1), "=w"(w2), "=w"(w3) \
                    : "r"(at), "m"(*(const weight(*)[64])at)); \
            ADD_COLUMNS(0, lane); \
            ADD_COLUMNS(1, lane); \
            ADD_COLUMNS(2, lane); \
            ADD_COLUMNS(3, lane); \
        } else { \
            uint16x8_t w0 = vreinterpretq_u16_u8(vld1q_u8(at)); \
            ADD_COLUMNS(0, lane); \
        } \
    } while (0)
#else
#define ADD_COLUMNS(i, lane) \
    do { \
        const uint16x8_t byte = vandq_u16(w##i, vdupq_n_u16(255)); \
        const int16x8_t both = vreinterpretq_s16_u16(w##i), first = vreinterpretq_s16_u16(byte); \
        s.both[2 * (i)] = vmlal_lane_s16(s.both[2 * (i)], vget_low_s16(both), values, lane); \
        s.both[2 * (i) + 1] = vmlal_high_lane_s16(s.both[2 * (i) + 1], both, values, lane); \
        s.first[2 * (i)] = vmlal_lane_s16(s.first[2 * (i)], vget_low_s16(first), values, lane); \
        s.first[2 * (i) + 1] = vmlal_high_lane_s16(s.first[2 * (i) + 1], first, values, lane); \
    } while (0)
#define WORDS(lane, i) vreinterpretq_u16_u8(vld1q_u8(row[lane] + from + 16 * (i)))
#define ADD_ROW(lane) \
    do { \
        const uint16x8_t w0 = WORDS(lane, 0); \
        ADD_COLUMNS(0, lane); \
        if (all) { \
            const uint16x8_t w1 = WORDS(lane, 1), w2 = WORDS(lane, 2), w3 = WORDS(lane, 3); \
            ADD_COLUMNS(1, lane); \
            ADD_COLUMNS(2, lane); \
            ADD_COLUMNS(3, lane); \
        } \
    } while (0)
#endif

/* Write the sums of eight columns in their order. */
static inline void write_columns(int32_t *total, int32x4_t both, int32x4_t first, int add)
{
    const int32x4_t second = vshrq_n_s32(vsubq_s32(both, first), 8);
    int32x4_t low = vzip1q_s32(first, second), high = vzip2q_s32(first, second);
    if (add) {
        low = vaddq_s32(low, vld1q_s32(total));
        high = vaddq_s32(high, vld1q_s32(total + 4));
    }
    vst1q_s32(total, low);
    vst1q_s32(total + 4, high);
}

static inline void add_block(int32_t *total, const weight *const *row, const int16_t *q, int count, size_t from,
                             int32_t offset, int add, int all)
{
    const int32x4_t start = vdupq_n_s32(-offset); /* first columns are stored plus 128 */
    sums s = {{start, start, start, start, start, start, start, start},
              {start, start, start, start, start, start, start, start}};
    const weight *const *const end = row + count;
    for (; end - row >= 4; row += 4, q += 4) {
        const int16x4_t values = vld1_s16(q);
        ADD_ROW(0);
        ADD_ROW(1);
        ADD_ROW(2);
        ADD_ROW(3);
    }
    for (; row != end; ++row, ++q) {
        const int16x4_t values = vld1_dup_s16(q);
        ADD_ROW(0);
    }
    write_columns(total, s.both[0], s.first[0], add);
    write_columns(total + 8, s.both[1], s.first[1], add);
    if (all) {
        write_columns(total + 16, s.both[2], s.first[2], add);
        write_columns(total + 24, s.both[3], s.first[3], add);
        write_columns(total + 32, s.both[4], s.first[4], add);
        write_columns(total + 40, s.both[5], s.first[5], add);
        write_columns(total + 48, s.both[6], s.first[6], add);
        write_columns(total + 56, s.both[7], s.first[7], add);
    }
}

static void accumulate(int32_t *restrict total, int columns, const weight *rows, size_t stride, const uint16_t *index,
                       const int16_t *q, int count)
{
    const weight *row[rows_per_block];
    int add, j, k;
    for (add = 0; count > 0; add = 1, index += rows_per_block, q += rows_per_block, count -= rows_per_block) {
        const int n = count < rows_per_block ? count : rows_per_block;
        int32_t sum = 0;
        UNROLLED for (k = 0; k < n; ++k) {
            row[k] = rows + index[k] * stride;
            sum += q[k];
        }
        for (j = 0; j + 64 <= columns; j += 64)
            add_block(total + j, row, q, n, (size_t)j, 128 * sum, add, 1);
        for (; j < columns; j += 16)
            add_block(total + j, row, q, n, (size_t)j, 128 * sum, add, 0);
    }
}
#elif MODEL_ROWS == 2

/* A multiply-add takes one word of each of two rows. */

static inline void add_pair(__m128i *both, __m128i *first, const weight *a, const weight *b, __m128i q)
{
    const __m128i byte = _mm_set1_epi16(255);
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)a);
    const __m128i y = _mm_loadu_si128((const __m128i *)(const void *)b);
    const __m128i low = _mm_unpacklo_epi16(x, y), high = _mm_unpackhi_epi16(x, y);
    both[0] = _mm_add_epi32(both[0], _mm_madd_epi16(low, q));
    both[1] = _mm_add_epi32(both[1], _mm_madd_epi16(high, q));
    first[0] = _mm_add_epi32(first[0], _mm_madd_epi16(_mm_and_si128(low, byte), q));
    first[1] = _mm_add_epi32(first[1], _mm_madd_epi16(_mm_and_si128(high, byte), q));
#ifdef __GNUC__
    /* Compilers would add the products first, and lack registers for them. */
    __asm__("" : "+x"(both[0]), "+x"(both[1]), "+x"(first[0]), "+x"(first[1]));
#endif
}

static void accumulate(int32_t *restrict total, int columns, const weight *rows, size_t stride, const uint16_t *index,
                       const int16_t *q, int count)
{
    int32_t words[tile];
    int add, j, k, p;
    for (add = 0; count > 0; add = 1, index += rows_per_block, q += rows_per_block, count -= rows_per_block) {
        const int n = count < rows_per_block ? count : rows_per_block;
        const entries last = last_entries(index, q, n);
        int32_t sum = 0;
        for (j = 0; j < (columns + 15) / 16 * 16; ++j)
            words[j] = 0;
        for (k = 0; k < n; ++k)
            sum += q[k];
        for (k = 0; k < n; k += 8) {
            const uint16_t *at = k + 8 <= n ? index + k : last.index;
            const int16_t *v = k + 8 <= n ? q + k : last.q;
            const weight *const a = rows + at[0] * stride, *const b = rows + at[1] * stride;
            const weight *const c = rows + at[2] * stride, *const d = rows + at[3] * stride;
            const weight *const e = rows + at[4] * stride, *const f = rows + at[5] * stride;
            const weight *const g = rows + at[6] * stride, *const h = rows + at[7] * stride;
            __m128i values[4];
            for (p = 0; p < 4; ++p)
                values[p] = _mm_set1_epi32((int32_t)((uint32_t)(uint16_t)v[2 * p + 1] << 16 | (uint16_t)v[2 * p]));
            for (j = 0; j < columns; j += 16) {
                __m128i *const to = (__m128i *)(void *)(words + j);
                __m128i both[2], first[2];
                both[0] = _mm_loadu_si128(to);
                both[1] = _mm_loadu_si128(to + 1);
                first[0] = _mm_loadu_si128(to + 2);
                first[1] = _mm_loadu_si128(to + 3);
                add_pair(both, first, a + j, b + j, values[0]);
                add_pair(both, first, c + j, d + j, values[1]);
                if (k + 4 < n) {
                    add_pair(both, first, e + j, f + j, values[2]);
                    add_pair(both, first, g + j, h + j, values[3]);
                }
                _mm_storeu_si128(to, both[0]);
                _mm_storeu_si128(to + 1, both[1]);
                _mm_storeu_si128(to + 2, first[0]);
                _mm_storeu_si128(to + 3, first[1]);
            }
        }
        for (j = 0; j < columns; j += 16) { /* in the order of the columns */
            const __m128i *const from = (const __m128i *)(const void *)(words + j);
            __m128i *const to = (__m128i *)(void *)(total + j);
            const __m128i offset = _mm_set1_epi32(128 * sum); /* first columns are stored plus 128 */
            const __m128i f0 = _mm_loadu_si128(from + 2), f1 = _mm_loadu_si128(from + 3);
            const __m128i s0 = _mm_srai_epi32(_mm_sub_epi32(_mm_loadu_si128(from), f0), 8);
            const __m128i s1 = _mm_srai_epi32(_mm_sub_epi32(_mm_loadu_si128(from + 1), f1), 8);
            const __m128i e0 = _mm_sub_epi32(f0, offset), e1 = _mm_sub_epi32(f1, offset);
            const __m128i sums[4] = {_mm_unpacklo_epi32(e0, s0), _mm_unpackhi_epi32(e0, s0),
                                     _mm_unpacklo_epi32(e1, s1), _mm_unpackhi_epi32(e1, s1)};
            for (p = 0; p < 4; ++p)
                _mm_storeu_si128(to + p, add ? _mm_add_epi32(sums[p], _mm_loadu_si128(to + p)) : sums[p]);
        }
    }
}
#elif MODEL_ROWS == 1

/* A 64-bit sum holds those of two columns: one in its upper 40 bits, and one in its lower 24 bits, whose weights are
 * stored plus 128. 64 products of at most 511 * 255 fit into 24 bits. A word contains two such pairs of weights. */
typedef struct {
    const weight *row;
    int32_t q;
} entry;

/* Up to 64 entries, and what sums start with. */
typedef struct {
    int64_t start;
    entry entries[64];
} entry_list;

typedef struct {
    int64_t first, second;
} sums;

/* Add the products of the words at `offset` bytes in the rows of the entries up to `end`, a multiple of four. */
static inline sums add_entries(const entry_list *list, const entry *end, size_t offset)
{
    const uint32_t pair = 0xFF0000FFu;
    sums s;
#if defined(__thumb2__) && defined(__GNUC__) && defined(__OPTIMIZE__)
    /* Compilers do not load two entries at once. */
    const void *at = list;
    uint32_t first, first_high, second, second_high;
    __asm__("ldrd %[first], %[first_high], [%[at]], #8\n"
            "mov %[second], %[first]\n"
            "mov %[second_high], %[first_high]\n"
            "1:\n"
            ".rept 2\n"
            "ldmia %[at]!, {r0, r1, r2, r3}\n"
            "ldr r0, [r0, %[offset]]\n"
            "ldr r2, [r2, %[offset]]\n"
            "and r4, %[pair], r0\n"
            "and r0, %[pair], r0, ror #16\n"
            "smlal %[first], %[first_high], r4, r1\n"
            "smlal %[second], %[second_high], r0, r1\n"
            "and r4, %[pair], r2\n"
            "and r2, %[pair], r2, ror #16\n"
            "smlal %[first], %[first_high], r4, r3\n"
            "smlal %[second], %[second_high], r2, r3\n"
            ".endr\n"
            "cmp %[at], %[end]\n"
            "bne 1b\n"
            : [at] "+r"(at), [first] "=&r"(first), [first_high] "=&r"(first_high), [second] "=&r"(second),
              [second_high] "=&r"(second_high)
            : [end] "r"(end), [offset] "r"(offset), [pair] "r"(pair)
            : "r0", "r1", "r2", "r3", "r4", "cc", "memory");
    s.first = (int64_t)((uint64_t)first_high << 32 | first);
    s.second = (int64_t)((uint64_t)second_high << 32 | second);
#else
    const entry *e;
    s.first = s.second = list->start;
    for (e = list->entries; e != end; ++e) {
        const uint32_t w = e->row[offset / sizeof *e->row];
        s.first += (int64_t)e->q * (int32_t)(w & pair);
        s.second += (int64_t)e->q * (int32_t)((w >> 16 | w << 16) & pair);
    }
#endif
    return s;
}

/* The sums of the two columns. Sums start with 2^23, so that the lower 24 bits are not negative. */
static inline int32_t lower_column(int64_t sum)
{
    return (int32_t)((uint32_t)sum & 0xFFFFFFu) - 0x800000;
}

static inline int32_t upper_column(int64_t sum)
{
    return (int32_t)(uint32_t)((uint64_t)sum >> 24);
}

/* Write the rows and values of up to 64 entries, and zeros up to a multiple of four. Returns their end. The weights of
 * every second column are stored plus 128. */
static const entry *write_list(entry_list *list, const weight *rows, size_t stride, const uint16_t *index,
                               const int16_t *q, int count)
{
    entry *e = list->entries;
    int32_t start = 0x800000;
    int k;
    for (k = 0; k < count; ++k, ++e) {
        e->row = rows + index[k] * stride;
        e->q = q[k];
        start -= 128 * q[k];
    }
    list->start = start;
    for (; k % 4 != 0; ++k, ++e) {
        e->row = rows;
        e->q = 0;
    }
    return e;
}

/* The same as add_scaled for four columns. */
static inline void add_four_scaled(OUT_TYPE *restrict sum, int32_t a, int32_t b, int32_t c, int32_t d,
                                   const SCALE_TYPE *scale, UNIT_TYPE unit)
{
#if INTEGER
    const int32_t total[4] = {a, b, c, d};
    add_scaled(sum, total, 4, scale, unit);
#else
#if defined(__thumb2__) && defined(__GNUC__) && defined(__ARM_FP) && !defined(__SOFTFP__)
    /* Compilers load and store one number at a time. */
    __asm__("vmov s0, s1, %[a], %[b]\n"
            "vmov s2, s3, %[c], %[d]\n"
            "vldmia %[scale], {s4-s7}\n"
            "vldmia %[sum], {s8-s11}\n"
            "vcvt.f32.s32 s0, s0\n"
            "vcvt.f32.s32 s1, s1\n"
            "vcvt.f32.s32 s2, s2\n"
            "vcvt.f32.s32 s3, s3\n"
            "vmul.f32 s4, %[unit], s4\n"
            "vmul.f32 s5, %[unit], s5\n"
            "vmul.f32 s6, %[unit], s6\n"
            "vmul.f32 s7, %[unit], s7\n"
            "vmul.f32 s0, s0, s4\n"
            "vmul.f32 s1, s1, s5\n"
            "vmul.f32 s2, s2, s6\n"
            "vmul.f32 s3, s3, s7\n"
            "vadd.f32 s8, s0, s8\n"
            "vadd.f32 s9, s1, s9\n"
            "vadd.f32 s10, s2, s10\n"
            "vadd.f32 s11, s3, s11\n"
            "vstmia %[sum], {s8-s11}\n"
            :
            : [a] "r"(a), [b] "r"(b), [c] "r"(c), [d] "r"(d), [sum] "r"(sum), [scale] "r"(scale), [unit] "t"(unit)
            : "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "memory");
#else
    const int32_t total[4] = {a, b, c, d};
    add_scaled(sum, total, 4, scale, unit);
#endif
#endif
}

static void accumulate(int32_t *restrict total, int columns, const weight *rows, size_t stride, const uint16_t *index,
                       const int16_t *q, int count)
{
    entry_list list;
    int add, j;
    for (add = 0; count > 0; add = 1, index += 64, q += 64, count -= 64) {
        const int n = count < 64 ? count : 64;
        const entry *const end = write_list(&list, rows, stride, index, q, n);
        for (j = 0; j < columns; j += 4) {
            const sums s = add_entries(&list, end, (size_t)j / 4 * sizeof *rows);
            int32_t *const to = total + j;
            to[0] = lower_column(s.first) + (add ? to[0] : 0);
            to[1] = upper_column(s.first) + (add ? to[1] : 0);
            to[2] = lower_column(s.second) + (add ? to[2] : 0);
            to[3] = upper_column(s.second) + (add ? to[3] : 0);
        }
    }
}

/* The same for up to 64 entries, scaled and added to `sum` at once. Not inlined: the assembly needs most registers. */
#ifdef __GNUC__
__attribute__((noinline))
#endif
static void add_few_rows(OUT_TYPE *restrict sum, int columns, const weight *rows, size_t stride, const SCALE_TYPE *scale,
                         UNIT_TYPE unit, const uint16_t *index, const int16_t *q, int count)
{
    entry_list list;
    const entry *const end = write_list(&list, rows, stride, index, q, count);
    int j;
    for (j = 0; j + 4 <= columns; j += 4) {
        const sums s = add_entries(&list, end, (size_t)j / 4 * sizeof *rows);
        add_four_scaled(sum + j, lower_column(s.first), upper_column(s.first), lower_column(s.second),
                        upper_column(s.second), scale + j, unit);
    }
    if (j < columns) {
        const sums s = add_entries(&list, end, (size_t)j / 4 * sizeof *rows);
        const int32_t total[3] = {lower_column(s.first), upper_column(s.first), lower_column(s.second)};
        add_scaled(sum + j, total, columns - j, scale + j, unit);
    }
}
#else

static void accumulate(int32_t *restrict total, int columns, const weight *rows, size_t stride, const uint16_t *index,
                       const int16_t *q, int count)
{
    const entries last = last_entries(index, q, count);
    const int n = (columns + 15) & ~15;
    int j, k;
    for (j = 0; j < n; ++j)
        total[j] = 0;
    for (k = 0; k < count; k += 8) {
        const uint16_t *at = k + 8 <= count ? index + k : last.index;
        const int16_t *v = k + 8 <= count ? q + k : last.q;
        const weight *a = rows + at[0] * stride, *b = rows + at[1] * stride, *c = rows + at[2] * stride;
        const weight *d = rows + at[3] * stride, *e = rows + at[4] * stride, *f = rows + at[5] * stride;
        const weight *g = rows + at[6] * stride, *h = rows + at[7] * stride;
        const int16_t va = v[0], vb = v[1], vc = v[2], vd = v[3], ve = v[4], vf = v[5], vg = v[6], vh = v[7];
        for (j = 0; j < n; ++j)
            total[j] += va * a[j] + vb * b[j] + vc * c[j] + vd * d[j] + ve * e[j] + vf * f[j] + vg * g[j] + vh * h[j];
    }
}
#endif
#endif
#if SPARSE

/* The same for rows of which only the non-zero weights are stored. A row has one bit per column in `mask`, and its
 * weights start at start[row]. */
static void accumulate_sparse(int32_t *restrict total, int columns, const int8_t *weights, const uint32_t *start,
                              const uint8_t *mask, const uint16_t *index, const int16_t *q, int count)
{
    const size_t bytes = ((size_t)columns + 7u) / 8u;
    size_t j;
    int k;
    for (k = 0; k < columns; ++k)
        total[k] = 0;
    for (k = 0; k < count; ++k) {
        const int8_t *w = weights + start[index[k]];
        const uint8_t *row = mask + index[k] * bytes;
        const int32_t value = q[k];
        for (j = 0; j < bytes; ++j) {
            int32_t *t = total + 8 * j;
            unsigned bits = row[j];
            for (; bits != 0; bits >>= 1, ++t)
                if (bits & 1u)
                    *t += value * *w++;
        }
    }
}
#endif
#if DENSE

/* Add the product of a sparse vector and a matrix of int8 weights to `sum`. */
static void add_rows_int8(OUT_TYPE *sum, int columns, const weight *rows, const SCALE_TYPE *scale,
#if INTEGER
                          int drop, int shift,
#endif
                          const uint16_t *index, const VALUE_TYPE *value, int count, int16_t *q)
{
    const size_t stride = ((size_t)columns + 3u) / 4u * weights_per_group;
    int32_t total[tile];
    int first;
    if (count > 0) {
        const UNIT_TYPE unit = QUANTISE;
#if MODEL_ROWS == 1
        if (count <= 64) {
            add_few_rows(sum, columns, rows, stride, scale, unit, index, q, count);
            return;
        }
#endif
        for (first = 0; first < columns; first += tile, rows += tile / 4 * weights_per_group) {
            const int n = columns - first < tile ? columns - first : tile;
            accumulate(total, n, rows, stride, index, q, count);
            add_scaled(sum + first, total, n, scale + first, unit);
        }
    }
}
#endif
#if SPARSE

static void add_rows_sparse(OUT_TYPE *sum, int columns, const int8_t *weights, const uint32_t *start,
                            const uint8_t *mask, const SCALE_TYPE *scale,
#if INTEGER
                            int drop, int shift,
#endif
                            const uint16_t *index, const VALUE_TYPE *value, int count, int16_t *q, int32_t *total)
{
    if (count > 0) {
        const UNIT_TYPE unit = QUANTISE;
        accumulate_sparse(total, columns, weights, start, mask, index, q, count);
        add_scaled(sum, total, columns, scale, unit);
    }
}
#endif
