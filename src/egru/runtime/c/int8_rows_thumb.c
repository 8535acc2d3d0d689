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
