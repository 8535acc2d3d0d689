#if DENSE

/* total[j] = the sum of q[k] * row[j] over the entries of a sparse vector, |q[k]| <= 511. Columns are computed in
 * blocks of up to sixteen: `total` has room for `tile` columns, and the last row is followed by sixteen more weights. */
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

/* A word of two columns is multiplied as a whole. Sums of these products fit into 32 bits for 128 rows. */
enum { rows_per_block = 128 };
#endif
#if MODEL_ROWS == 3

NEON_ROWS
#elif MODEL_ROWS == 2

/* A multiply-add takes one word of each of two rows, as a whole and without its upper byte: the second product is that
 * of the first column, and their difference is 256 times that of the second column. */

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

THUMB_ROWS
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
#if MODEL_ROWS == 3
        if (count <= rows_per_block) {
            row_list list;
            list_rows(&list, rows, stride, ((size_t)columns + 15u) / 16u * 16u, index, q, count);
            add_listed_rows(sum, columns, &list, scale, unit);
            return;
        }
#elif MODEL_ROWS == 1
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
