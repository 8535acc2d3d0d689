/* List the units of which `fired` has a byte 1; other bytes are 0. Returns their number. */
#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
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
