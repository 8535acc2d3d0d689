/* The two functions that compilers may call in freestanding code. */
#include <stddef.h>

void *memset(void *to, int value, size_t count);
void *memcpy(void *to, const void *from, size_t count);

void *memset(void *to, int value, size_t count)
{
    unsigned char *byte = to;
    while (count-- > 0)
        *byte++ = (unsigned char)value;
    return to;
}

void *memcpy(void *to, const void *from, size_t count)
{
    unsigned char *byte = to;
    const unsigned char *source = from;
    while (count-- > 0)
        *byte++ = *source++;
    return to;
}
