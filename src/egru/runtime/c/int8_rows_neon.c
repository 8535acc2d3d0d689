/* For the columns a and b of a word, sums of products have the value both = a + 256 b. The words that start one byte
 * later, b and the next column c, are multiplied in sixteen bits: their sum is b + 256 c, modulo 2^16. The lower eight
 * bits of c are those of its own word, so that the lower sixteen bits of b are known. Together with `both` they
 * determine a and b, because |a| < 2^23. This takes three multiply-adds per sixteen columns. */
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
static inline uint16x8_t add_sums(OUT_TYPE *sum, const sums *s, const SCALE_TYPE *scale, UNIT_TYPE unit,
                                  uint16x8_t next, factors f)
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
