/* List the units of which `fired` has a byte 1; other bytes are 0. Returns their number. */
#if MODEL_NEON && defined(__GNUC__)
static int list_fired(unsigned long *fired, int hidden, uint16_t *index)
{
    uint8_t *const bytes = (uint8_t *)fired;
    uint16_t *to = index;
    int j;
    for (j = hidden; j % 16 != 0; ++j)
        bytes[j] = 0;
    for (j = 0; j < hidden; j += 16) { /* four bits per unit */
        const uint8x16_t units = vld1q_u8(bytes + j);
        const uint8x8_t bits = vshrn_n_u16(vreinterpretq_u16_u8(vsliq_n_u8(units, units, 4)), 4);
        uint64_t word = vget_lane_u64(vreinterpret_u64_u8(bits), 0);
        for (; word != 0; word &= word - 1) {
            unsigned unit = (unsigned)__builtin_ctzll(word);
            __asm__("add %w0, %w1, %w0, lsr #2" : "+r"(unit) : "r"(j));
            *to++ = (uint16_t)unit;
            __asm__("" : "+r"(to)); /* compilers would count the bits of the word again */
        }
    }
    return (int)(to - index);
}
#elif defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
static int list_fired(unsigned long *fired, int hidden, uint16_t *index)
{
    enum { units = sizeof *fired }; /* per word */
    uint16_t *to = index;
    int j;
    for (j = hidden; j % units != 0; ++j)
        ((uint8_t *)fired)[j] = 0;
    for (j = 0; j < hidden; j += units) {
        unsigned long word = *fired++;
        for (; word != 0; word &= word - 1) {
            *to++ = (uint16_t)(j + (__builtin_ctzl(word) >> 3));
            __asm__("" : "+r"(to)); /* compilers would count the bits of the word again */
        }
    }
    return (int)(to - index);
}
#else
static int list_fired(const unsigned long *fired, int hidden, uint16_t *index)
{
    int count = 0, j;
    for (j = 0; j < hidden; ++j)
        if (((const uint8_t *)fired)[j] != 0)
            index[count++] = (uint16_t)j;
    return count;
}
#endif
