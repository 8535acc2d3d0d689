/* The two functions that compilers may call in freestanding code. They move words, as those of C libraries do. */
#include <stddef.h>
#include <stdint.h>

void *memset(void *to, int value, size_t count);
void *memcpy(void *to, const void *from, size_t count);

static int are_words(const void *to, const void *from, size_t count)
{
    return (((uintptr_t)to | (uintptr_t)from | count) & 3u) == 0;
}

void *memset(void *to, int value, size_t count)
{
    unsigned char *byte = to;
    if (are_words(to, to, count)) {
        uint32_t *word = to;
        const uint32_t pattern = (unsigned char)value * 0x01010101u;
        for (; count >= 16; count -= 16, word += 4)
            word[0] = word[1] = word[2] = word[3] = pattern;
        for (; count > 0; count -= 4)
            *word++ = pattern;
        return to;
    }
    while (count-- > 0)
        *byte++ = (unsigned char)value;
    return to;
}

void *memcpy(void *to, const void *from, size_t count)
{
    unsigned char *byte = to;
    const unsigned char *source = from;
    if (are_words(to, from, count)) {
        uint32_t *word = to;
        const uint32_t *source_word = from;
        for (; count >= 16; count -= 16, word += 4, source_word += 4) {
            word[0] = source_word[0];
            word[1] = source_word[1];
            word[2] = source_word[2];
            word[3] = source_word[3];
        }
        for (; count > 0; count -= 4)
            *word++ = *source_word++;
        return to;
    }
    while (count-- > 0)
        *byte++ = *source++;
    return to;
}
