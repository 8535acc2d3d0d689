#if DENSE

/* total[j] = the sum of q[k] * row[j] over the entries of a sparse vector, |q[k]| <= 511. Columns are computed in blocks
 * of up to sixteen: `total` has room for `tile` columns, and the last row is followed by sixteen more weights. */
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

/* For the columns a and b of a word, sums of products have the value both = a + 256 b. The words that start one byte
 * later, b and the next column c, are multiplied in sixteen bits: their sum is b + 256 c, modulo 2^16. The lower eight
 * bits of c are those of its own word, so that the lower sixteen bits of b are known. Together with `both` they determine
 * a and b, because |a| < 2^23. This takes three multiply-adds per sixteen columns. */
typedef struct {
    uint32x4_t both[8];
    uint16x8_t later[4];
} sums; /* of 64 columns */

/* Rows with values that are not negative, then those with negative values, which are subtracted. */
typedef struct {
    const weight *row[rows_per_block];
    uint16_t q[rows_per_block];
    int added, count;
    uint32_t start; /* of all sums: weights are stored plus 128 */
    uint16_t next;  /* the lower bits of the sum of the column after the last block */
} row_list;

/* List up to 128 rows, at least one. `end` is the column after the last block. */
static void list_rows(row_list *list, const weight *rows, size_t stride, size_t end, const uint16_t *index,
                      const int16_t *q, int count)
{
    const weight **added = list->row, **subtracted = list->row + count;
    uint16_t *to = list->q, *to_end = list->q + count;
    uint32_t sum = 0, next = 0;
    const int16_t *const q_end = q + count;
#if defined(__GNUC__) && !defined(__clang__)
    /* Compilers copy the addresses in every iteration. */
    const weight *row;
    int32_t value;
    uint32_t last;
    __asm__ volatile("1:\n"
            "ldrh %w[last], [%[index]], #2\n"
            "ldrsh %w[value], [%[q]], #2\n"
            "umaddl %[row], %w[last], %w[stride], %[rows]\n"
            "ldrb %w[last], [%[row], %[end]]\n"
            "add %w[sum], %w[sum], %w[value]\n"
            "madd %w[next], %w[last], %w[value], %w[next]\n"
            "tbnz %w[value], #31, 2f\n"
            "str %[row], [%[added]], #8\n"
            "strh %w[value], [%[to]], #2\n"
            "cmp %[q], %[q_end]\n"
            "b.ne 1b\n"
            "b 3f\n"
            "2:\n"
            "neg %w[value], %w[value]\n"
            "str %[row], [%[subtracted], #-8]!\n"
            "strh %w[value], [%[to_end], #-2]!\n"
            "cmp %[q], %[q_end]\n"
            "b.ne 1b\n"
            "3:"
            : [index] "+&r"(index), [q] "+&r"(q), [sum] "+&r"(sum), [next] "+&r"(next), [added] "+&r"(added),
              [subtracted] "+&r"(subtracted), [to] "+&r"(to), [to_end] "+&r"(to_end), [row] "=&r"(row),
              [value] "=&r"(value), [last] "=&r"(last)
            : [rows] "r"(rows), [stride] "r"((uint32_t)stride), [end] "r"(end), [q_end] "r"(q_end)
            : "cc", "memory");
#else
    while (q != q_end) {
        const weight *const row = rows + (uint32_t)*index++ * stride;
        const int32_t value = *q++;
        sum += (uint32_t)value;
        next += (uint32_t)value * row[end];
        if (value >= 0) {
            *added++ = row;
            *to++ = (uint16_t)value;
        } else {
            *--subtracted = row;
            *--to_end = (uint16_t)-value;
        }
    }
#endif
    list->added = (int)(added - list->row);
    list->count = count;
    list->start = 0u - 128u * 257u * sum;
    list->next = (uint16_t)(next - 128u * sum);
}

/* Add or subtract the products of a row with entry `lane` of q, in the sixteen or 64 columns at `at`. */
#if defined(__GNUC__) && !defined(__clang__)
#define ADD_16(operation, sign, lane) \
    __asm__("ldr q28, [%3]\n" \
            "ldur q29, [%3, #1]\n" \
            operation " %0.4s, v28.4h, %4.h[" #lane "]\n" \
            operation "2 %1.4s, v28.8h, %4.h[" #lane "]\n" \
            sign " %2.8h, v29.8h, %4.h[" #lane "]" \
            : "+w"(s.both[0]), "+w"(s.both[1]), "+w"(s.later[0]) \
            : "r"(at), "x"(values), "m"(*(const weight(*)[17])at) \
            : "v28", "v29")
/* One load takes all words, for which their registers must be consecutive. */
#define ADD_64(operation, sign, lane) \
    __asm__("ld1 {v28.8h - v31.8h}, [%12], %13\n" \
            operation " %0.4s, v28.4h, %14.h[" #lane "]\n" \
            operation "2 %1.4s, v28.8h, %14.h[" #lane "]\n" \
            operation " %2.4s, v29.4h, %14.h[" #lane "]\n" \
            operation "2 %3.4s, v29.8h, %14.h[" #lane "]\n" \
            operation " %4.4s, v30.4h, %14.h[" #lane "]\n" \
            operation "2 %5.4s, v30.8h, %14.h[" #lane "]\n" \
            operation " %6.4s, v31.4h, %14.h[" #lane "]\n" \
            operation "2 %7.4s, v31.8h, %14.h[" #lane "]\n" \
            "ld1 {v28.8h - v31.8h}, [%12]\n" \
            sign " %8.8h, v28.8h, %14.h[" #lane "]\n" \
            sign " %9.8h, v29.8h, %14.h[" #lane "]\n" \
            sign " %10.8h, v30.8h, %14.h[" #lane "]\n" \
            sign " %11.8h, v31.8h, %14.h[" #lane "]" \
            : "+w"(s.both[0]), "+w"(s.both[1]), "+w"(s.both[2]), "+w"(s.both[3]), "+w"(s.both[4]), "+w"(s.both[5]), \
              "+w"(s.both[6]), "+w"(s.both[7]), "+w"(s.later[0]), "+w"(s.later[1]), "+w"(s.later[2]), \
              "+w"(s.later[3]), "+r"(at) \
            : "r"((size_t)1), "x"(values), "m"(*(const weight(*)[65])at) \
            : "v28", "v29", "v30", "v31")
#define ADD_LISTED ADD_ALL_ROWS("umlal", "mla")
#define SUBTRACT_LISTED ADD_ALL_ROWS("umlsl", "mls")
#else
#define WORDS(offset) vreinterpretq_u16_u8(vld1q_u8(at + (offset)))
#define ADD_COLUMNS(multiply_add, i, lane) \
    do { \
        const uint16x8_t w = WORDS(16 * (i)); \
        s.both[2 * (i)] = multiply_add##l_lane_u16(s.both[2 * (i)], vget_low_u16(w), values, lane); \
        s.both[2 * (i) + 1] = multiply_add##l_high_lane_u16(s.both[2 * (i) + 1], w, values, lane); \
        s.later[i] = multiply_add##q_lane_u16(s.later[i], WORDS(16 * (i) + 1), values, lane); \
    } while (0)
#define ADD_16(multiply_add, sign, lane) ADD_COLUMNS(multiply_add, 0, lane)
#define ADD_64(multiply_add, sign, lane) \
    do { \
        ADD_COLUMNS(multiply_add, 0, lane); \
        ADD_COLUMNS(multiply_add, 1, lane); \
        ADD_COLUMNS(multiply_add, 2, lane); \
        ADD_COLUMNS(multiply_add, 3, lane); \
    } while (0)
#define ADD_LISTED ADD_ALL_ROWS(vmla, +)
#define SUBTRACT_LISTED ADD_ALL_ROWS(vmls, -)
#endif
#define ADD_ROW(operation, sign, lane) \
    do { \
        const weight *at = row[lane] + from; \
        if (all) \
            ADD_64(operation, sign, lane); \
        else \
            ADD_16(operation, sign, lane); \
    } while (0)
#define ADD_ALL_ROWS(operation, sign) \
    do { \
        for (; end - row >= 4; row += 4, q += 4) { \
            const uint16x4_t values = vld1_u16(q); \
            ADD_ROW(operation, sign, 0); \
            ADD_ROW(operation, sign, 1); \
            ADD_ROW(operation, sign, 2); \
            ADD_ROW(operation, sign, 3); \
        } \
        for (; row != end; ++row, ++q) { \
            const uint16x4_t values = vld1_dup_u16(q); \
            ADD_ROW(operation, sign, 0); \
        } \
    } while (0)

/* Add the products of 64 columns, or of sixteen, with all rows of the list. */
static inline sums add_block(const row_list *list, size_t from, int all)
{
    const uint32x4_t b = vdupq_n_u32(list->start);
    const uint16x8_t l = vdupq_n_u16((uint16_t)list->start);
    sums s = {{b, b, b, b, b, b, b, b}, {l, l, l, l}};
    const weight *const *row = list->row, *const *end = row + list->added;
    const uint16_t *q = list->q;
    ADD_LISTED;
    end = list->row + list->count;
    SUBTRACT_LISTED;
    return s;
}

#if defined(__GNUC__) && !defined(__clang__)

/* The same for 128 columns. Compilers would move sums between registers, of which almost all are needed: sums are in v1
 * to v24, weights in v28 to v31, and up to four values in v0. */
#define ADD_HALF(operation, sign, lane, b0, b1, b2, b3, b4, b5, b6, b7, l0, l1, l2, l3, step) \
    "ld1 {v28.8h - v31.8h}, [%[at]], %[one]\n" \
    operation " v" #b0 ".4s, v28.4h, v0.h[" #lane "]\n" \
    operation "2 v" #b1 ".4s, v28.8h, v0.h[" #lane "]\n" \
    operation " v" #b2 ".4s, v29.4h, v0.h[" #lane "]\n" \
    operation "2 v" #b3 ".4s, v29.8h, v0.h[" #lane "]\n" \
    operation " v" #b4 ".4s, v30.4h, v0.h[" #lane "]\n" \
    operation "2 v" #b5 ".4s, v30.8h, v0.h[" #lane "]\n" \
    operation " v" #b6 ".4s, v31.4h, v0.h[" #lane "]\n" \
    operation "2 v" #b7 ".4s, v31.8h, v0.h[" #lane "]\n" \
    "ld1 {v28.8h - v31.8h}, [%[at]]" step "\n" \
    sign " v" #l0 ".8h, v28.8h, v0.h[" #lane "]\n" \
    sign " v" #l1 ".8h, v29.8h, v0.h[" #lane "]\n" \
    sign " v" #l2 ".8h, v30.8h, v0.h[" #lane "]\n" \
    sign " v" #l3 ".8h, v31.8h, v0.h[" #lane "]\n"
#define ADD_128(operation, sign, lane, row) \
    "add %[at], %[" row "], %[from]\n" \
    ADD_HALF(operation, sign, lane, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ", %[rest]") \
    ADD_HALF(operation, sign, lane, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, "")
#define ADD_LIST(operation, sign, count) \
    "subs %w[" count "], %w[" count "], #4\n" \
    "b.lt 2f\n" \
    "1:\n" \
    "ldr d0, [%[q]], #8\n" \
    "ldp %[first], %[second], [%[row]], #16\n" \
    ADD_128(operation, sign, 0, "first") \
    ADD_128(operation, sign, 1, "second") \
    "ldp %[first], %[second], [%[row]], #16\n" \
    ADD_128(operation, sign, 2, "first") \
    ADD_128(operation, sign, 3, "second") \
    "subs %w[" count "], %w[" count "], #4\n" \
    "b.ge 1b\n" \
    "2:\n" \
    "adds %w[" count "], %w[" count "], #4\n" \
    "b.eq 4f\n" \
    "3:\n" \
    "ldr %[first], [%[row]], #8\n" \
    "ld1r {v0.8h}, [%[q]], #2\n" \
    ADD_128(operation, sign, 0, "first") \
    "subs %w[" count "], %w[" count "], #1\n" \
    "b.ne 3b\n" \
    "4:\n"

static inline void add_two_blocks(sums *s, const row_list *list, size_t from)
{
    const weight *const *row = list->row;
    const weight *at, *first, *second;
    const uint16_t *q = list->q;
    int added = list->added, subtracted = list->count - added;
    __asm__ volatile("dup v1.4s, %w[start]\n"
            ".irp i, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 18, 19, 20\n"
            "mov v\\i\\().16b, v1.16b\n"
            ".endr\n"
            ".irp i, 9, 10, 11, 12, 21, 22, 23, 24\n"
            "dup v\\i\\().8h, %w[start]\n"
            ".endr\n"
            ADD_LIST("umlal", "mla", "added")
            ADD_LIST("umlsl", "mls", "subtracted")
            "stp q1, q2, [%[s]]\n"
            "stp q3, q4, [%[s], #32]\n"
            "stp q5, q6, [%[s], #64]\n"
            "stp q7, q8, [%[s], #96]\n"
            "stp q9, q10, [%[s], #128]\n"
            "stp q11, q12, [%[s], #160]\n"
            "stp q13, q14, [%[s], #192]\n"
            "stp q15, q16, [%[s], #224]\n"
            "stp q17, q18, [%[s], #256]\n"
            "stp q19, q20, [%[s], #288]\n"
            "stp q21, q22, [%[s], #320]\n"
            "stp q23, q24, [%[s], #352]"
            : [row] "+&r"(row), [q] "+&r"(q), [added] "+&r"(added), [subtracted] "+&r"(subtracted), [at] "=&r"(at),
              [first] "=&r"(first), [second] "=&r"(second)
            : [s] "r"(s), [from] "r"(from), [start] "r"(list->start), [one] "r"((size_t)1), [rest] "r"((size_t)63)
            : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
              "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v28", "v29", "v30", "v31");
}
#else

static inline void add_two_blocks(sums *s, const row_list *list, size_t from)
{
    s[0] = add_block(list, from, 1);
    s[1] = add_block(list, from + 64, 1);
}
#endif

/* The sums of sixteen columns: those of columns 0, 2, 4, 6, then 1, 3, 5, 7, and the same of the other eight. */
typedef struct {
    int32x4_t first[2], second[2];
} column_sums;

/* The number 256, as a vector. */
typedef struct {
    int32x4_t factor;
    uint16x8_t short_factor;
} factors;

static inline factors make_factors(void)
{
    factors f = {vdupq_n_s32(256), vdupq_n_u16(256)};
#ifdef __GNUC__
    __asm__("" : "+w"(f.factor), "+w"(f.short_factor)); /* compilers would replace products by shifts */
#endif
    return f;
}

/* The lower bits of the sums of the first columns of all words. */
static inline uint16x8_t lower_bits(uint32x4_t low, uint32x4_t high)
{
    return vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
}

/* Separate the columns of words. `next` has the lower bits of the words that follow. */
static inline column_sums separate(uint32x4_t low, uint32x4_t high, uint16x8_t later, uint16x8_t next, factors f)
{
    const int32x4_t both[2] = {vreinterpretq_s32_u32(low), vreinterpretq_s32_u32(high)};
    const uint16x8_t upper = vshrn_high_n_u32(vshrn_n_u32(low, 8), high, 8);
    const uint16x8_t following = vextq_u16(lower_bits(low, high), next, 1);
    int16x8_t carry;
    column_sums s;
    /* The upper bits of `both` minus the lower bits of the second columns, modulo 2^16. */
    carry = vreinterpretq_s16_u16(vmlaq_u16(vsubq_u16(upper, later), following, f.short_factor));
    s.second[0] = vsubw_s16(vshrq_n_s32(both[0], 8), vget_low_s16(carry));
    s.second[1] = vsubw_high_s16(vshrq_n_s32(both[1], 8), carry);
    s.first[0] = vmlsq_s32(both[0], s.second[0], f.factor);
    s.first[1] = vmlsq_s32(both[1], s.second[1], f.factor);
    return s;
}

/* The same as add_scaled for eight columns; moves to the next ones. */
static inline void add_columns(OUT_TYPE **sum, int32x4_t first, int32x4_t second, const SCALE_TYPE **scale,
                               UNIT_TYPE unit)
{
#if INTEGER
    const int32x4_t bits = vdupq_n_s32(unit.bits);
#else
    const float32x4_t factor = vdupq_n_f32(unit);
#endif
#if defined(__GNUC__) && !defined(__clang__)
    /* Compilers would compute an address for every access, and copy registers. */
    __asm__ volatile("ld2 {v28.4s, v29.4s}, [%[scale]], #32\n"
                     "ld2 {v30.4s, v31.4s}, [%[sum]]\n"
#if INTEGER
                     "sshl %[first].4s, %[first].4s, %[bits].4s\n"
                     "sshl %[second].4s, %[second].4s, %[bits].4s\n"
                     "sqdmulh %[first].4s, %[first].4s, v28.4s\n"
                     "sqdmulh %[second].4s, %[second].4s, v29.4s\n"
                     "ssra v30.4s, %[first].4s, #1\n"
                     "ssra v31.4s, %[second].4s, #1\n"
#else
                     "fmul v28.4s, v28.4s, %[factor].4s\n"
                     "fmul v29.4s, v29.4s, %[factor].4s\n"
                     "scvtf %[first].4s, %[first].4s\n"
                     "scvtf %[second].4s, %[second].4s\n"
                     "fmul v28.4s, %[first].4s, v28.4s\n"
                     "fmul v29.4s, %[second].4s, v29.4s\n"
                     "fadd v30.4s, v28.4s, v30.4s\n"
                     "fadd v31.4s, v29.4s, v31.4s\n"
#endif
                     "st2 {v30.4s, v31.4s}, [%[sum]], #32"
                     : [sum] "+&r"(*sum), [scale] "+&r"(*scale), [first] "+&w"(first), [second] "+&w"(second)
#if INTEGER
                     : [bits] "w"(bits)
#else
                     : [factor] "w"(factor)
#endif
                     : "memory", "v28", "v29", "v30", "v31");
#else
#if INTEGER
    const int32x4x2_t factor = vld2q_s32(*scale);
    int32x4x2_t to = vld2q_s32(*sum);
    to.val[0] = vsraq_n_s32(to.val[0], vqdmulhq_s32(vshlq_s32(first, bits), factor.val[0]), 1);
    to.val[1] = vsraq_n_s32(to.val[1], vqdmulhq_s32(vshlq_s32(second, bits), factor.val[1]), 1);
    vst2q_s32(*sum, to);
#else
    const float32x4x2_t scales = vld2q_f32(*scale);
    float32x4x2_t to = vld2q_f32(*sum);
    to.val[0] = vaddq_f32(vmulq_f32(vcvtq_f32_s32(first), vmulq_f32(scales.val[0], factor)), to.val[0]);
    to.val[1] = vaddq_f32(vmulq_f32(vcvtq_f32_s32(second), vmulq_f32(scales.val[1], factor)), to.val[1]);
    vst2q_f32(*sum, to);
#endif
    *scale += 8;
    *sum += 8;
#endif
}

static inline void write_columns(int32_t *total, const column_sums *s)
{
    int32x4x2_t to;
    to.val[0] = s->first[0];
    to.val[1] = s->second[0];
    vst2q_s32(total, to);
    to.val[0] = s->first[1];
    to.val[1] = s->second[1];
    vst2q_s32(total + 8, to);
}

/* Scale the sums of 64 columns and add them to `sum`. Returns the lower bits of the first words. */
static inline uint16x8_t add_sums(OUT_TYPE *sum, const sums *s, const SCALE_TYPE *scale, UNIT_TYPE unit, uint16x8_t next,
                                  factors f)
{
    uint16x8_t bits[5];
    int i;
    bits[4] = next;
    UNROLLED for (i = 0; i < 4; ++i)
        bits[i] = lower_bits(s->both[2 * i], s->both[2 * i + 1]);
    UNROLLED for (i = 0; i < 4; ++i) {
        const column_sums c = separate(s->both[2 * i], s->both[2 * i + 1], s->later[i], bits[i + 1], f);
        add_columns(&sum, c.first[0], c.second[0], &scale, unit);
        add_columns(&sum, c.first[1], c.second[1], &scale, unit);
    }
    return bits[0];
}

/* Add the products of all rows of the list to `sum`, from the last block of columns to the first. */
static void add_listed_rows(OUT_TYPE *restrict sum, int columns, const row_list *list, const SCALE_TYPE *scale,
                            UNIT_TYPE unit)
{
    const factors f = make_factors();
    uint16x8_t next = vdupq_n_u16(list->next);
    int j = (columns + 15) & ~15;
    while (j > columns / 64 * 64) {
        const sums s = add_block(list, (size_t)(j -= 16), 0);
        const column_sums c = separate(s.both[0], s.both[1], s.later[0], next, f);
        int32_t total[16];
        write_columns(total, &c);
        add_scaled(sum + j, total, columns - j < 16 ? columns - j : 16, scale + j, unit);
        next = lower_bits(s.both[0], s.both[1]);
    }
    if (j % 128 != 0) {
        const sums s = add_block(list, (size_t)(j -= 64), 1);
        next = add_sums(sum + j, &s, scale + j, unit, next, f);
    }
    while (j > 0) {
        sums s[2];
        add_two_blocks(s, list, (size_t)(j -= 128));
        next = add_sums(sum + j + 64, &s[1], scale + j + 64, unit, next, f);
        next = add_sums(sum + j, &s[0], scale + j, unit, next, f);
    }
}

static void accumulate(int32_t *restrict total, int columns, const weight *rows, size_t stride, const uint16_t *index,
                       const int16_t *q, int count)
{
    const factors f = make_factors();
    const int n = (columns + 15) & ~15;
    row_list list;
    int j, k;
    for (j = 0; j < n; ++j)
        total[j] = 0;
    for (; count > 0; index += rows_per_block, q += rows_per_block, count -= rows_per_block) {
        uint16x8_t next;
        list_rows(&list, rows, stride, (size_t)n, index, q, count < rows_per_block ? count : rows_per_block);
        next = vdupq_n_u16(list.next);
        for (j = n - 16; j >= 0; j -= 16) {
            const sums s = add_block(&list, (size_t)j, 0);
            const column_sums c = separate(s.both[0], s.both[1], s.later[0], next, f);
            int32_t part[16];
            write_columns(part, &c);
            for (k = 0; k < 16; ++k)
                total[j + k] += part[k];
            next = lower_bits(s.both[0], s.both[1]);
        }
    }
}
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
