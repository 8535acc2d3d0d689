
/* Saved states: four bytes "EGRU", the fingerprint, then c and y of every layer, trace and number of steps, all in
 * little-endian order. */
static uint8_t *put(uint8_t *to, uint64_t bits, int bytes)
{
    for (; bytes > 0; --bytes, bits >>= 8)
        *to++ = (uint8_t)(bits & 255u);
    return to;
}

static uint64_t get(const uint8_t *from, int bytes)
{
    uint64_t bits = 0;
    while (bytes-- > 0)
        bits = bits << 8 | from[bytes];
    return bits;
}
