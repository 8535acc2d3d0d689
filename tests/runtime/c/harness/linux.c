/* Print words on an operating system. */
#include <stdint.h>
#include <stdio.h>

void emit(uint32_t word);
void run(void);

void emit(uint32_t word) { printf("%08lx\n", (unsigned long)word); }

int main(void)
{
    run();
    return 0;
}
